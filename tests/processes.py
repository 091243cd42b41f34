"""Processes that are there for the time of a block."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from gputop.core.proc import read_stat
from tests.waiting import until


@contextlib.contextmanager
def once_ready(*command: str, or_skip: str = "", **how: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that has said "ready"; killed at the end of the block. ``or_skip``: why it may say otherwise here."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **how) as process:
        try:
            is_ready = process.stdout.readline() == "ready\n"
            if or_skip and not is_ready:
                pytest.skip(or_skip)
            assert is_ready
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def asleep(**how: Any) -> Iterator[subprocess.Popen[bytes]]:
    """One that does nothing any more: a moment after the start it has no command line yet."""
    with subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL, **how) as process:
        try:
            until(lambda: read_stat(process.pid).state == "S")
            yield process
        finally:
            process.kill()
