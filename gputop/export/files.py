"""Writing files so that a full disk or a kill leaves either the whole file or none."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from gputop.core.errors import GputopError


def write_private(path: Path, data: bytes, *, make_folder: bool = True) -> None:
    """Write ``data`` to ``path`` atomically with mode 0600; ``make_folder``: its folder, too, where needed.

    Raises GputopError where that cannot be done; no partial file is left behind. A device or a
    pipe is written to, never replaced.
    """
    temporary: str | None = None
    try:
        if path.exists() and not path.is_file():
            with path.open("wb") as device:
                device.write(data)
            return
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(temporary).replace(path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
        raise GputopError(f"cannot write {path}: {error.strerror or error}",
                          "Give a folder you may write to that has room: --logdir DIR or -o FILE.") from error


def unused(path: Path) -> Path:
    """``path``, or the first of ``name-2.ext``, ``name-3.ext``, … that does not exist.

    In a folder that cannot be searched it is ``path``; :func:`write_private` then raises the error.
    """
    candidate, n = path, 1
    while os.path.exists(candidate):  # noqa: PTH110  Path.exists raises where the folder may not be searched
        n += 1
        candidate = path.with_name(f"{path.stem}-{n}{path.suffix}")
    return candidate
