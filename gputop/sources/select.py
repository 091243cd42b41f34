"""Which GPUs to show: indices, ranges and UUIDs as users type them after ``--gpus``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gputop.errors import EXIT_USAGE, GputopError
from gputop.samples import GpuInfo


def select_gpus(wanted: Sequence[str], available: Sequence[GpuInfo]) -> list[int]:
    """Positions in ``available`` of the GPUs that ``wanted`` names, in the order of ``available``.

    Each item of ``wanted`` is a comma-separated list of indices ("0"), inclusive ranges
    ("2-3"), "all", or UUIDs, whole or their first characters if only one GPU starts with
    them. Indices are those of :class:`~gputop.samples.GpuInfo`, not positions. Nothing
    wanted means all.

    Raises :class:`~gputop.errors.GputopError` (exit status 2) for a GPU that does not exist
    or an item that cannot be read.
    """
    items = [item.strip() for part in wanted for item in part.split(",") if item.strip()]
    if not items:
        return list(range(len(available)))
    chosen: set[int] = set()
    for item in items:
        chosen.update(_positions(item, available))
    return sorted(chosen)


def _positions(item: str, available: Sequence[GpuInfo]) -> Iterable[int]:
    if item.lower() == "all":
        return range(len(available))
    first, dash, last = item.partition("-")
    if first.isdecimal() and (last.isdecimal() if dash else True):
        low, high = int(first), int(last or first)
        if low > high:
            raise _usage(f"--gpus {item}: the range runs backwards", available)
        at = {info.index: position for position, info in enumerate(available)}
        absent = next((index for index in range(low, high + 1) if index not in at), None)
        if absent is not None:
            raise _usage(f"--gpus {item}: there is no GPU {absent} on this node", available)
        return [at[index] for index in range(low, high + 1)]
    found = [p for p, info in enumerate(available) if info.uuid.lower().startswith(item.lower())]
    if len(found) == 1:
        return found
    if found:
        raise _usage(f"--gpus {item}: {len(found)} GPUs have a UUID that starts so", available)
    raise _usage(f"--gpus {item}: neither an index, a range nor the UUID of a GPU on this node", available)


def _usage(message: str, available: Sequence[GpuInfo]) -> GputopError:
    if available:
        known = ", ".join(str(info.index) for info in available)
        fix = f"This node has GPU {known}. Write indices, ranges or UUIDs: --gpus 0,2-3 or --gpus {available[0].uuid}."
    else:
        fix = "This node has no GPU to choose from."
    return GputopError(message, fix, EXIT_USAGE)
