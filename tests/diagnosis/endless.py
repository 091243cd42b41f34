"""Work of a subprocess that never comes to an end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str]) -> int:
    Path(arguments[0]).read_bytes()  # a pipe into which nobody writes
    return 0
