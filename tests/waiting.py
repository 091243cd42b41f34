"""Waiting for what must come: for a condition, never for a time that a loaded machine may exceed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 60.0  # until a test gives up on what must come; nothing that passes waits for so long
_T = TypeVar("_T")


def until(done: Callable[[], _T], what: str = "it") -> _T:
    """Wait for a value that is true, and return it."""
    ends_s = time.monotonic() + PATIENCE_S
    while not (value := done()):
        assert time.monotonic() < ends_s, f"{what} did not come within {PATIENCE_S:.0f} s"
        time.sleep(0.02)
    return value
