"""NVIDIA's Python bindings of DCGM: found where DCGM installs them, loaded on demand.

They are not on PyPI; they come with DCGM and fit only the library of the same major
version. Their modules have generic top-level names and cost about 27 MB, so they are
imported under no name that others see, and only when a host engine is there.
"""

from __future__ import annotations

import importlib
import platform
import re
import sys
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import Struct

from gputop.core.errors import GputopError

FOLDERS = {4: "usr/share/datacenter-gpu-manager-4/bindings/python3", 3: "usr/local/dcgm/bindings/python3"}
INSTALL = "sudo apt-get install datacenter-gpu-manager-4-core   # from NVIDIA's CUDA repository; dnf on RHEL"

_MODULES = ("dcgm_structs", "dcgm_fields", "dcgm_agent")
_ALSO = ("dcgmvalue",)  # imported by those
_NEEDED = ("dcgmInit", "dcgmConnect_v2", "dcgmDisconnect", "dcgmGetAllDevices", "dcgmGetDeviceAttributes",
           "dcgmEntitiesGetLatestValues")
_LIBRARY = re.compile(r"libdcgm\.so\.(\d+)")
_import_lock = threading.Lock()


class Installed(Struct, frozen=True):
    """Bindings with the library that they belong to."""

    major: int
    folder: Path
    shared_object: Path


class Bindings(Struct, frozen=True):
    major: int
    agent: Any
    structs: Any


def find_bindings(root: Path, folder: Path | None = None) -> dict[int, Path]:
    """Folders with bindings by DCGM's major version; only ``folder`` where one is given."""
    if folder is not None:
        major = _major(folder)
        return {} if major is None else {major: folder}
    return {major: root / subfolder for major, subfolder in FOLDERS.items()
            if (root / subfolder / "dcgm_agent.py").is_file()}


def _major(folder: Path) -> int | None:
    """The major version of the library that the bindings in ``folder`` load, as they say themselves."""
    try:
        text = (folder / "dcgm_structs.py").read_text(errors="replace")
    except OSError:
        return None
    match = _LIBRARY.search(text)
    return int(match[1]) if match and (folder / "dcgm_agent.py").is_file() else None


def find_libraries(root: Path, env: Mapping[str, str], folder: Path | None = None) -> dict[int, Path]:
    """libdcgm.so.N where the bindings look for it (not in the loader's cache), by major version."""
    places = [root / directory.lstrip("/") for directory in env.get("LD_LIBRARY_PATH", "").split(":") if directory]
    places += [root / f"usr/lib/{platform.machine()}-linux-gnu", root / "usr/lib64"]
    if folder is not None:
        places.insert(0, folder)
    libraries: dict[int, Path] = {}
    for directory in places:
        for path in sorted(directory.glob("libdcgm.so.*")):
            match = _LIBRARY.fullmatch(path.name)
            if match:
                libraries.setdefault(int(match[1]), path)
    return libraries


def find_installed(root: Path, env: Mapping[str, str], folder: Path | None = None) -> list[Installed]:
    """Bindings whose library is installed, newest first.

    Raises GputopError, which says what is missing, where there are none.
    """
    python, shared = find_bindings(root, folder), find_libraries(root, env, folder)
    matching = sorted(python.keys() & shared.keys(), reverse=True)
    if matching:
        return [Installed(major, python[major], shared[major]) for major in matching]
    if folder is not None and not python:
        raise GputopError(f"--dcgm-bindings {folder} does not contain DCGM's bindings (dcgm_agent.py, "
                          "dcgm_structs.py).", "The bindings come with "
                          "DCGM: " + ", ".join(f"/{path} (DCGM {m})" for m, path in FOLDERS.items()))
    if python:
        major, path = max(python.items())
        raise GputopError(f"the library libdcgm.so.{major} of the DCGM bindings in {path} is not installed", INSTALL)
    if shared:
        major, library = max(shared.items())
        raise GputopError(f"the DCGM bindings for {library.name} are not installed: no /{FOLDERS.get(major, '…')}",
                          f"{INSTALL}\n# or name their folder with --dcgm-bindings DIR")
    raise GputopError("the DCGM bindings for Python and libdcgm.so are not installed", INSTALL)


@cache
def load(installed: Installed) -> Bindings:
    """Import the bindings and let them load their library, once.

    Neither ``sys.path`` nor ``sys.modules`` shows a trace afterwards; modules of the same
    names that are already there stay what they were. Raises GputopError.
    """
    with _import_lock:
        names = (*_MODULES, *_ALSO)
        others = {name: sys.modules.pop(name) for name in names if name in sys.modules}
        path = str(installed.folder)
        sys.path.insert(0, path)
        importlib.invalidate_caches()
        try:
            modules = {name: importlib.import_module(name) for name in _MODULES}
        except Exception as error:  # foreign code, which may fail in any way on a newer Python
            raise GputopError(f"cannot import the DCGM bindings in {path}: {type(error).__name__}: {error}",
                              INSTALL) from error
        finally:
            sys.path.remove(path)
            for name in names:
                sys.modules.pop(name, None)
            sys.modules.update(others)
    agent, structs = modules["dcgm_agent"], modules["dcgm_structs"]
    for name, module in modules.items():
        if Path(module.__file__ or "").resolve().parent != installed.folder.resolve():
            raise GputopError(f"{name} was imported from {module.__file__}, not from {path}: an import hook of this "
                              "Python environment replaces it with another module of the same name.",
                              "Run gputop in a separate environment.")
    lacking = [name for name in _NEEDED if not hasattr(agent, name)]
    if lacking:
        raise GputopError(f"the DCGM bindings in {path} are too old: they lack {', '.join(lacking)}", INSTALL)
    try:
        structs._dcgmInit(str(installed.shared_object.parent))
        agent.dcgmInit()
    except structs.DCGMError as error:
        raise GputopError(f"cannot load {installed.shared_object} (DCGM {error.value})", INSTALL) from error
    return Bindings(installed.major, agent, structs)
