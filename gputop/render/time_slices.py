"""The slices of time that history is drawn in: the widths that a column may stand for."""

from __future__ import annotations

SLICES_S = (0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)


def slice_for(span_s: float, columns: int, shortest_s: float = 0.0) -> float:
    """The shortest slice, of at least ``shortest_s``, with which ``columns`` of them cover at least ``span_s``."""
    for slice_s in SLICES_S:
        if slice_s * max(1, columns) >= span_s and slice_s >= shortest_s:
            return slice_s
    return SLICES_S[-1]
