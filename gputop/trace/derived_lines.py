"""Distinction of a GPU's lines: its streams, and lines that a viewer has derived from them.

XProf and TensorBoard, and in older TensorFlow the profiling program itself, add lines to a GPU's plane in which every
event repeats time of its streams (docs/contributing/trace-notes.md, "Derived lines"). Counted with them, a GPU seems
several times as busy as it is.
"""

from __future__ import annotations

import re
from collections.abc import Collection

STEPS = "Steps"  # the derived line that tells something new: where a step begins and ends
_NAMES = frozenset((
    STEPS, "XLA Modules", "XLA Ops", "Async XLA Ops", "XLA TraceMe", "XLA Op", "XLA Module", "Framework Ops",
    "Framework Name Scope", "TensorFlow Ops", "TensorFlow Name Scope", "Source code", "Source Code", "Launch Stats",
    "Kernel Launch", "Host Offload Ops", "Sub Steps", "Scope Range", "Hlo Module", "Hlo Op"))
# Their ids begin here (tsl/profiler/utils/xplane_schema.h, kThreadIdDerivedMin), whatever a version calls them; as
# 32-bit numbers with a sign they are negative.
_FIRST_ID, _IDS = 0xDEADBEEF, 32
_STREAM = re.compile(r"stream\s*#?\s*(\d+)", re.IGNORECASE)


def is_derived(name: str, line_id: object) -> bool:
    """Return whether the line repeats others by its name or its id."""
    of_viewer = (isinstance(line_id, int) and not isinstance(line_id, bool)
                 and 0 <= (line_id & 0xFFFFFFFF) - _FIRST_ID < _IDS)
    return name in _NAMES or of_viewer


def streams(names: Collection[str]) -> frozenset[str]:
    """Streams among a GPU's lines that are not known as derived: where any is called one, only those that are."""
    called = frozenset(name for name in names if _STREAM.match(name))
    return called or frozenset(names)


def stream_key(name: str) -> str:
    """The stream that a line is of: ``Stream #13(Kernel)`` and ``Stream #13(Compute)`` are one."""
    number = _STREAM.match(name)
    return f"#{number[1]}" if number else name
