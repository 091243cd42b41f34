"""Which GPUs ``--gpus`` means."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from gputop.errors import EXIT_USAGE, GputopError

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def select_gpus(items: Iterable[str], present: Sequence[tuple[int, str]]) -> list[int]:
    """Indices of the GPUs that ``items`` name, in the order of ``present``.

    ``items`` are indices ("0"), inclusive ranges ("2-3"), UUIDs or the beginning of one
    ("GPU-4f"), alone or joined by commas; none at all means every GPU. ``present`` are
    (NVML index, UUID) pairs. Raises :class:`GputopError` (wrong usage) for an item that
    names no GPU, listing those that exist.
    """
    wanted = [part.strip() for item in items for part in item.split(",") if part.strip()]
    if not wanted:
        return [index for index, _ in present]
    chosen: set[int] = set()
    for item in wanted:
        matched = _matches(item, present)
        if not matched:
            listing = ", ".join(f"{index} ({uuid})" for index, uuid in present)
            raise GputopError(
                f"--gpus {item}: no such GPU.",
                f"This node has {listing}. Give indices, ranges (2-3) or UUIDs.",
                EXIT_USAGE,
            )
        chosen |= matched
    return [index for index, _ in present if index in chosen]


def _matches(item: str, present: Sequence[tuple[int, str]]) -> set[int]:
    numbers = _RANGE.fullmatch(item)
    if numbers:
        first = int(numbers[1])
        last = int(numbers[2]) if numbers[2] else first
        indices = {index for index, _ in present}
        # A range must exist as a whole: "0-15" on a node of 8 is more likely a mistake than a wish.
        if first not in indices or last not in indices:
            return set()
        return {index for index in indices if first <= index <= last}
    folded = item.casefold()
    return {index for index, uuid in present if uuid.casefold().startswith(folded)}
