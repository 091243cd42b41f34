"""What the monitor leaves out of its process, each in a process of its own."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from types import SimpleNamespace

import pytest

from gputop.commands.monitor import unfit_terminal


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout


_WITHOUT_SSL = "from gputop.commands.monitor import import_asyncio_without_ssl as go; go(); import sys; "
_OF_MSGSPEC = pytest.mark.skipif(sys.version_info < (3, 11), reason="msgspec takes more from typing_extensions there")


@pytest.mark.parametrize(("code", "printed"), [
    (_WITHOUT_SSL + "import asyncio; print('ssl' in sys.modules, asyncio.run(asyncio.sleep(0, 7))); "
     "import ssl; print(ssl.SSLContext.__name__)", "False 7\nSSLContext"),
    ("import ssl; " + _WITHOUT_SSL + "print(sys.modules['ssl'] is ssl)", "True"),
    pytest.param(
        "import sys, types; from gputop import __main__; "
        "sys.modules['gputop.cli'] = types.SimpleNamespace(command=lambda: None); __main__.command(); "
        "print('msgspec' in sys.modules, 'inspect' in sys.modules); "
        "import typing_extensions; print(typing_extensions.__name__)", "True False\ntyping_extensions",
        marks=_OF_MSGSPEC),
], ids=["no ssl", "ssl that is there stays", "no inspect"])
def test_what_the_start_does_without_can_be_had_later(code: str, printed: str):
    assert _run(code) == f"{printed}\n"


@pytest.mark.parametrize("absent", ["gputop.profiler.xprof.client", "gputop.trace", "hashlib", "grpc"])
def test_looking_for_servers_imports_nothing_that_only_a_capture_needs(absent: str):
    assert _run("import sys\n"
                "from gputop.profiler import discovery\n"
                "from gputop.session.capture.captures import find_servers\n"
                "discovery.Finder._may_train = lambda *_, **__: False  # whatever else runs here\n"
                "find_servers((), {}, True)\n"
                f"print({absent!r} in sys.modules)\n") == "False\n"


@pytest.mark.parametrize(("output", "keys", "term", "reason"), [
    (True, True, "xterm-256color", ""), (False, True, "xterm", "standard output is not a terminal"),
    (True, False, "xterm", "standard input is not a terminal"), (True, True, "dumb", "TERM is dumb"),
    (True, True, "", "TERM is not set"), (True, True, None, "TERM is not set")])
def test_what_makes_a_terminal_unfit(output: bool, keys: bool, term: str | None, reason: str,
                                     monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: output))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: keys))
    if term is None:
        monkeypatch.delenv("TERM", raising=False)
    else:
        monkeypatch.setenv("TERM", term)
    given = unfit_terminal()
    monkeypatch.undo()
    assert given.startswith(reason) and bool(given) == bool(reason)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt: not glibc")
@pytest.mark.parametrize(("code", "in_heap"), [("", False), ("share_one_heap()", True)])
def test_threads_allocate_from_the_heap_of_the_process(code: str, in_heap: bool):
    assert _run(rf"""
import ctypes, re, threading
from pathlib import Path
from gputop.core.own_memory import share_one_heap
{code}
malloc = ctypes.CDLL(None).malloc
malloc.restype = ctypes.c_size_t
found = []
thread = threading.Thread(target=lambda: found.append(malloc(1000)))
thread.start(); thread.join()
begin, end = re.search(r"^(\w+)-(\w+) .*\[heap\]", Path("/proc/self/maps").read_text(), re.M).groups()
print(int(begin, 16) <= found[0] < int(end, 16))
""") == f"{in_heap}\n"


def test_asyncio_comes_without_ssl_and_ssl_can_be_had_later():
    assert _run(
        "import sys\n"
        "from gputop.commands.monitor import import_asyncio_without_ssl\n"
        "import_asyncio_without_ssl()\n"
        "import asyncio\n"
        "print('ssl' in sys.modules, asyncio.run(asyncio.sleep(0, 7)))\n"
        "import ssl\n"
        "print(ssl.SSLContext.__name__)\n") == "False 7\nSSLContext\n"


def test_an_ssl_that_is_there_stays():
    assert _run("import ssl, sys\n"
                "from gputop.commands.monitor import import_asyncio_without_ssl\n"
                "import_asyncio_without_ssl()\n"
                "print(sys.modules['ssl'] is ssl)\n") == "True\n"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="msgspec takes more from typing_extensions there")
def test_the_start_does_without_inspect_and_who_wants_it_gets_it():
    assert _run("import sys, types\n"
                "from gputop import __main__\n"
                "sys.modules['gputop.cli'] = types.SimpleNamespace(command=lambda: None)\n"
                "__main__.command()\n"
                "print('msgspec' in sys.modules, 'inspect' in sys.modules)\n"
                "import typing_extensions\n"
                "print(typing_extensions.__name__)\n") == "True False\ntyping_extensions\n"
