"""Which files of a test this process still has open."""

from __future__ import annotations

import os
from pathlib import Path


def open_below(folder: Path) -> list[str]:
    """The paths of this process's descriptors at or below ``folder``; other threads' and tests' do not count."""
    paths = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            paths.append(os.readlink(link))  # noqa: PTH115 - the link's text; a pipe's is no path
        except FileNotFoundError:  # closed meanwhile, by another thread
            continue
    return [path for path in paths if Path(path).is_relative_to(folder.resolve())]
