"""How often `gputop compare` calls reruns of unchanged jobs changed, and how often it finds a true change.

    python benchmarks/compare_reruns.py FOLDER [--runs 7] [--jax-python PYTHON] [--seconds 2.5] [--minutes 8]

Each job is started ``--runs`` times and captured twice each time; FOLDER keeps the captures, and what is there is not
captured again: a run that ended after --minutes goes on. A job with "+10%" does a tenth more, one with "x2" twice as
much. Pairs: the same job in the next run, the same process a few seconds later, the job against its changed one.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from statistics import median, stdev

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cpu_jobs import Options, capture_job
from gputop.comparison.compare import compare_sides
from gputop.comparison.sides import Side
from gputop.replay.compared_files import read_side

JOBS: dict[str, Options] = {
    "jax": {"framework": "jax"},
    "jax+10%": {"framework": "jax", "work": 22},
    "keras": {"framework": "keras"},
    "keras+10%": {"framework": "keras", "work": 22},
    "keras-read": {"framework": "keras", "input": "read", "read_s": 0.002, "work": 4},
    "keras-read+10%": {"framework": "keras", "input": "read", "read_s": 0.0022, "work": 4},
    "keras-readx2": {"framework": "keras", "input": "read", "read_s": 0.004, "work": 4},
}
CAPTURES = 2
Key = tuple[str, int, int]  # job, run, capture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--jax-python", default=sys.executable, help="a Python with JAX, where this one has none")
    parser.add_argument("--seconds", type=float, default=2.5, help="of each capture")
    parser.add_argument("--minutes", type=float, default=60.0, help="no job is started after so many")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    sides: dict[Key, Side] = {}
    for run in range(options.runs):
        for name, job in JOBS.items():
            places = {(name, run, n): options.folder / name / f"{run}-{n}" for n in range(CAPTURES)}
            if time.monotonic() > end and not all(place.is_dir() for place in places.values()):
                continue
            python = options.jax_python if job["framework"] == "jax" else sys.executable
            capture_job(job, python, options.seconds, list(places.values()))
            sides |= {key: read_side(place) for key, place in places.items()}
    print("# Reruns of unchanged jobs, and true changes\n\nMade by `compare_reruns.py`; "
          f"{os.cpu_count()} CPUs, shared with other work that kept {_others(sides)} of them busy.\n")
    print("| pairs | called better | called worse | noise | cannot be told |\n|---|---|---|---|---|")
    for kind, possible in _pairs(options.runs).items():
        pairs = [(a, b) for a, b in possible if a in sides and b in sides]
        verdicts = [compare_sides(sides[a], sides[b]).verdict for a, b in pairs]
        counts = [verdicts.count(v) for v in ("better", "worse", "noise", "cannot be told")]  # type: ignore[arg-type]
        print(f"| {kind} ({len(pairs)}) | {' | '.join(map(str, counts))} |")
    print("\n| job | mean step, median of the runs | standard deviation between runs |\n|---|---|---|")
    for name in JOBS:
        means = [steps.mean_s for key, side in sides.items() if key[0] == name and side.analysis is not None
                 and (steps := side.analysis.steps) is not None]
        if len(means) > 1:
            print(f"| {name} | {median(means) * 1e3:.1f} ms | {stdev(map(math.log, means)):.0%} |")


def _pairs(runs: int) -> dict[str, list[tuple[Key, Key]]]:
    out: dict[str, list[tuple[Key, Key]]] = {
        "unchanged, another run": [((job, r, n), (job, r + 1, n)) for job in JOBS for r in range(runs - 1)
                                   for n in range(CAPTURES)],
        "unchanged, any two runs": [((job, r, 0), (job, q, 0)) for job in JOBS
                                    for r, q in combinations(range(runs), 2)],
        "unchanged, the same process": [((job, r, 0), (job, r, 1)) for job in JOBS for r in range(runs)],
    }
    for job in JOBS:
        for mark in ("+10%", "x2"):
            if job.endswith(mark):
                out[f"true change: {job}"] = [((job.removesuffix(mark), r, n), (job, r, n)) for r in range(runs)
                                              for n in range(CAPTURES)]
    return out


def _others(sides: dict[Key, Side]) -> str:
    known = sorted(_known(sides))
    return f"{known[0]:.1f} to {known[-1]:.1f} (median {known[len(known) // 2]:.1f})" if known else "an unknown number"


def _known(sides: dict[Key, Side]) -> Iterator[float]:
    for side in sides.values():
        cpus = side.analysis.trace.job_cpus if side.analysis is not None else None
        if cpus is not None and cpus.others is not None:
            yield cpus.others


if __name__ == "__main__":
    main()
