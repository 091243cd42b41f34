"""Parts of a long column, for a search that mostly ends early."""

from __future__ import annotations

from collections.abc import Iterator

_BLOCK = 4096  # rows searched first; each further block is four times as large


def blocks(first: int, stop: int, back: bool = False) -> Iterator[tuple[int, int]]:
    """``first`` to ``stop`` in parts, each larger than the one before, from one end or the other."""
    size = _BLOCK
    while first < stop:
        if back:
            yield max(first, stop - size), stop
            stop -= size
        else:
            yield first, min(stop, first + size)
            first += size
        size = min(4 * size, 1 << 20)
