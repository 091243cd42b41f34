"""All labeled cases: every fault in several strengths, pairs of faults, healthy jobs, and traces that lack inputs."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import cache

from tests.advice.labeled.case import Case, Window
from tests.advice.labeled.faults import FAULTS, Fault
from tests.advice.labeled.healthy import healthy, missing
from tests.advice.labeled.pairs import pairs

# Share of the step that a fault is meant to cost.
STRENGTHS = {"weak": 0.025, "medium": 0.1, "strong": 0.32}


@cache
def fault_case(id_: str, strength: str, seed: int) -> Case:
    fault = FAULTS[id_](seed * 31 + zlib.crc32(id_.encode()) % 1000, STRENGTHS[strength])
    return _case(f"{id_}-{strength}-{seed}", id_, fault, first=strength != "weak")


def _case(name: str, id_: str, fault: Fault, first: bool) -> Case:
    windows: dict[str, Window] = {} if fault.window is None else {id_: fault.window}
    return Case(
        name=name, kind="fault", job=fault.job, fixed={id_: fault.fixed}, windows=windows,
        partly_fixed={} if fault.partly_fixed is None else {id_: fault.partly_fixed},
        main=(id_, *fault.main) if first else (), consequences=frozenset(fault.consequences),
        must_not=frozenset(fault.must_not), params=fault.params,
    )


def all_cases(seeds: int = 3, only: str = "") -> Iterator[Case]:
    """``seeds`` cases of every fault, strong and medium, and one weak; ``only`` keeps names that contain it."""
    for id_ in FAULTS:
        numbered = [("strong", seed) for seed in range(seeds)] + [("medium", seed + 10) for seed in range(seeds)]
        for strength, seed in (*numbered, ("weak", 20)):
            if only in f"{id_}-{strength}-{seed}":
                yield fault_case(id_, strength, seed)
    for kind, cases in (("pair", pairs), ("healthy", healthy), ("missing", missing)):
        if only.startswith(kind) or kind.startswith(only):
            yield from (case for case in cases() if only in case.name)
