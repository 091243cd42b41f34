from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from gputop.core.errors import GputopError
from gputop.launch.elf import addresses_in, functions_of

_NAMES = ("Py_AddPendingCall", "PyRun_SimpleString")


def test_addresses_are_those_the_loader_gave():
    import ctypes

    own = {name: ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value for name in _NAMES}
    assert addresses_in(os.getpid(), _NAMES) == own


def test_a_function_that_is_not_there():
    with pytest.raises(GputopError, match="is not Python"):
        addresses_in(os.getpid(), ("Py_NoSuchFunction",))


@pytest.mark.parametrize("size", [0, 4, 16, 63, 64, 200, 1000])
def test_a_truncated_file_is_reported(size):
    data = Path(sys.executable).resolve().read_bytes()[:size]
    with pytest.raises(ValueError, match="ELF"):
        functions_of(data, _NAMES)


def test_another_kind_of_file_is_reported():
    with pytest.raises(ValueError, match="not a 64-bit"):
        functions_of(b"\x7fELF\x01\x01" + bytes(200), _NAMES)
    shell = shutil.which("sh")
    assert shell is not None
    assert functions_of(Path(shell).read_bytes(), _NAMES)[0] == {}
