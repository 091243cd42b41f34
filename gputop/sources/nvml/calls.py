"""Calls into the driver: on threads that keep NVML open, and texts whatever bytes they hold."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from gputop.text.units import printable


def import_pynvml() -> Any:
    """pynvml, without waiting for ``ctypes.util``, which imports shutil and subprocess: 3 ms of the first frame. Where
    pynvml asks it to look for a library that the loader does not find, it is imported."""
    if "pynvml" not in sys.modules and "ctypes.util" not in sys.modules:
        stand_in = ModuleType("ctypes.util")
        vars(stand_in)["find_library"] = _find_library
        sys.modules["ctypes.util"] = stand_in
        try:
            import pynvml
        finally:
            del sys.modules["ctypes.util"]
    import pynvml

    return pynvml


def _find_library(name: str) -> str | None:
    from ctypes.util import find_library

    return find_library(name)


def start_nvml_thread(nvml: Any, name: str, work: Callable[[], None]) -> None:
    """Run ``work`` in a daemon thread that holds NVML open for itself.

    NVML counts its users and shuts down after the last one, so closing a source never shuts
    down the library under a call that is still in it. ``work`` must not raise. Raises
    NVMLError where NVML cannot be opened once more.
    """
    nvml.nvmlInit()

    def run() -> None:
        try:
            work()
        finally:
            with contextlib.suppress(nvml.NVMLError):  # closed for good by somebody else
                nvml.nvmlShutdown()

    threading.Thread(target=run, name=f"gputop-nvml-{name}", daemon=True).start()


def nvml_text(call: Callable[..., Any], *args: Any) -> str:
    """The text that an NVML call returns, made safe to show.

    nvidia-ml-py decodes as UTF-8 and raises for anything else; the function it wraps
    returns the bytes as they are.
    """
    return printable(getattr(call, "__wrapped__", call)(*args))
