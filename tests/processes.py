"""Processes that are there for the time of a block."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def once_ready(*command: str, **how: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that has said "ready"; killed at the end of the block."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **how) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()
