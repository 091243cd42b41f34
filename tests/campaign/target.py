"""A door to the outside, as the campaign sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Target:
    """``structure`` is one of tests.campaign.mutation; ``run`` gets a folder of its own and the input.

    ``most_cpu_s`` and ``most_bytes`` are its budget for one input of at most 256 kB: of CPU time, and of growth of
    resident memory.
    """

    name: str
    structure: str
    seeds: Callable[[Path], list[bytes]]
    run: Callable[[Path, bytes], object]
    cost: float = 1.0  # relative: how much less often than others it is tried
    most_cpu_s: float = 30.0
    most_bytes: int = 300 << 20
