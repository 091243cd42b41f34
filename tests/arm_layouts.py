"""Prints sizes and offsets of the structures of gputop and pynvml, and what could not be imported, as JSON."""

from __future__ import annotations

import ctypes
import importlib
import json
import pkgutil
import platform
import struct
import sys
from collections.abc import Iterator
from typing import Any

import pynvml

import gputop

PACKAGES = tuple(package.__name__ for package in (gputop, pynvml))


def imported() -> dict[str, str]:
    """Import every module; by name, what went wrong."""
    failed = {}
    for module in pkgutil.walk_packages(gputop.__path__, "gputop."):
        if not module.name.endswith("__main__") and ".inside." not in module.name:  # these start at once
            try:
                importlib.import_module(module.name)
            except Exception as error:  # noqa: BLE001
                failed[module.name] = repr(error)
    return failed


def structures(base: type) -> Iterator[Any]:
    for kind in base.__subclasses__():
        if kind.__module__.partition(".")[0] in PACKAGES and hasattr(kind, "_fields_"):
            yield kind
        yield from structures(kind)


def main() -> None:
    failed = imported()
    layouts: dict[str, Any] = {
        f"{kind.__module__}.{kind.__qualname__}": [ctypes.sizeof(kind), ctypes.alignment(kind), *(
            [name, getattr(kind, name).offset, getattr(kind, name).size] for name, *_ in kind._fields_)]
        for base in (ctypes.Structure, ctypes.Union) for kind in structures(base)}
    for name, module in sorted(sys.modules.items()):
        if name.startswith("gputop."):
            layouts |= {f"{name}.{place}": [value.format, value.size] for place, value in vars(module).items()
                        if isinstance(value, struct.Struct)}
    json.dump({"machine": platform.machine(), "failed": failed, "layouts": layouts}, sys.stdout, sort_keys=True)


if __name__ == "__main__":
    main()
