"""What gputop promised against what the cure brought: Keras and JAX jobs on the CPU, before and after.

    python benchmarks/promised_pairs.py FOLDER [--jax-python PYTHON] [--seconds 3] [--minutes 8] [--only NAME ...]

Each pair: a capture of the faulty job, the cure, a capture of the cured one, and what `gputop compare` says of the two.
FOLDER keeps the captures, and what is there is not captured again: a run that ended after --minutes goes on.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cpu_jobs import Options, capture_job
from gputop.comparison.compare import Comparison, compare

KERAS: Options = {"framework": "keras", "work": 4}
JAX: Options = {"framework": "jax"}
# Name, the faulty job, what cures it.
PAIRS: tuple[tuple[str, Options, Options], ...] = (
    ("serial map → parallel", KERAS | {"input": "map", "map_work": 4, "serial": True}, {"parallel": True}),
    ("Python in a map → TensorFlow ops", KERAS | {"input": "python"}, {"input": "ops"}),
    ("Python in a map → more calls at once", KERAS | {"input": "python"}, {"parallel": True}),
    ("generator → TensorFlow ops", KERAS | {"input": "generator"}, {"input": "ops"}),
    ("decode each epoch → cache", KERAS | {"input": "decode", "serial": True}, {"cache": True}),
    ("no prefetch → prefetch", KERAS | {"input": "read", "prefetch": False, "work": 20}, {"prefetch": True}),
    ("slow reads one by one → parallel", KERAS | {"input": "read", "read_s": 0.002}, {"parallel": True}),
    ("shuffle filled each epoch → repeat first", KERAS | {"input": "shuffle"}, {"repeat": True}),
    ("eager steps → compiled", KERAS | {"eager": True, "work": 20}, {"eager": False}),
    ("new shape each step → one shape (tf.function)", KERAS | {"retrace": "always"}, {"retrace": "never"}),
    ("work in a callback → none", KERAS | {"callback_s": 0.01}, {"callback_s": 0.0}),
    ("JAX: jit anew each step → once", JAX | {"retrace": True}, {"retrace": False}),
    ("JAX: work between steps → none", JAX | {"callback_s": 0.02}, {"callback_s": 0.0}),
    ("two: serial map and no prefetch", KERAS | {"input": "map", "map_work": 4, "serial": True, "prefetch": False},
     {"parallel": True, "prefetch": True}),
    ("two: callback and Python in a map", KERAS | {"input": "python", "callback_s": 0.01},
     {"input": "ops", "callback_s": 0.0}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=60.0, help="no pair is begun after so many")
    parser.add_argument("--jax-python", default=sys.executable, help="a Python with JAX, where this one has none")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each capture")
    parser.add_argument("--only", nargs="*", default=[], help="only pairs whose name contains one of these")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    print("# Promised against measured\n\nMade by `promised_pairs.py`; "
          f"{os.cpu_count()} CPUs, shared with other work: see the column of the CPUs that others used.\n")
    print("| pair | step before | after | brought | findings, each promised | gputop compare says | others' CPUs |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name, faulty, cure in PAIRS:
        if options.only and not any(text in name for text in options.only):
            continue
        python = options.jax_python if faulty["framework"] == "jax" else sys.executable
        places = [options.folder / str(PAIRS.index((name, faulty, cure))) / side for side in ("before", "after")]
        if time.monotonic() > end and not all(place.is_dir() for place in places):
            print(f"| {name} | not captured yet |", flush=True)
            continue
        try:
            for job, place in zip((faulty, faulty | cure), places, strict=True):
                capture_job(job, python, options.seconds, [place])
            print(_row(name, compare(*places)), flush=True)
        except Exception as error:  # noqa: BLE001  the other pairs are still of use
            print(f"| {name} | failed: {type(error).__name__} |", flush=True)
            print(error, file=sys.stderr)


def _row(name: str, c: Comparison) -> str:
    mean = next(row for row in c.rows if row.group == "steps" and row.id == "mean_s")
    if mean.a is None or mean.b is None:
        return f"| {name} | {mean.reason} |"
    found = [entry for entry in c.advice if entry.status != "new"]
    promised = "; ".join(f"{e.id} {'no figure' if e.promised is None else f'−{e.promised:.0%}'}" for e in found)
    said = "; ".join(f"{e.status}, {e.fulfilled or e.outcome or 'nothing'}" for e in found) or c.verdict
    cpus = [side.analysis.trace.job_cpus for side in (c.a, c.b) if side.analysis is not None]
    others = " → ".join("?" if one is None or one.others is None else f"{one.others:.1f}" for one in cpus)
    return (f"| {name} | {mean.a * 1e3:.1f} ms | {mean.b * 1e3:.1f} ms | {mean.b / mean.a - 1:+.0%} "
            f"| {promised or 'none'} | {said} | {others} |")


if __name__ == "__main__":
    main()
