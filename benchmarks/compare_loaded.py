"""What `gputop compare` says of real jobs on a node that other work fills: true improvements, and reruns of one job.

    python benchmarks/compare_loaded.py FOLDER [--load 8] [--captures 4] [--minutes 8] [--zoo ZOO.PY] [--only NAME ...]

Of each pair the slow job is started twice and the fast one once, before the load is. Then one at a time runs beside
``--load`` processes that each compute on one CPU, and is captured; the others are stopped. The load's processes end by
themselves. FOLDER keeps the captures, and what is there is not captured again. ZOO.PY is a script with further jobs,
called with a kind, a port and a log, and with CURE=1 for the fast one.

Pairs of captures: the slow job against the fast one, which is to be called better, and each job against itself, in the
same process and in another one, which is not to be called changed.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cpu_jobs import Options, free_port, start
from gputop.comparison.compare import compare_sides
from gputop.comparison.sides import Side
from gputop.profiler.capture.records import CaptureStatus, Server
from gputop.profiler.capture.request import CaptureRequest
from gputop.replay.compared_files import read_side
from gputop.session.capture.captures import CaptureRun, capture_and_analyze
from tests.tf_job import start_tf_job

KERAS: Options = {"framework": "keras"}
READ: Options = KERAS | {"input": "read", "work": 1}
CPU_JOBS: dict[str, tuple[Options, Options]] = {
    "a fifth of the work": (KERAS, {"work": 4}),
    "20 ms in a callback → none": (KERAS | {"callback_s": 0.02, "work": 4}, {"callback_s": 0.0}),
    "decode each epoch → cache": (KERAS | {"input": "decode", "serial": True, "work": 4}, {"cache": True}),
    "reads of 4 ms → 1 ms": (READ | {"read_s": 0.004}, {"read_s": 0.001}),
}
ZOO = ("mapbatch", "predictcb", "pydataset", "fninloop")
LOAD_S = 900.0  # the load ends by itself after so many seconds, whatever becomes of this script
_LOAD = ("import os, sys, time\nparent, end = os.getppid(), time.monotonic() + float(sys.argv[1])\n"
         "while time.monotonic() < end and os.getppid() == parent: sum(range(10000))")
_AFTER = ("receiving", "saving", "analyzing")
_LOG_STEPS = 12


class Job(NamedTuple):
    """A process that trains, and its profiler server."""

    address: str
    pid: int


def jobs_of(pair: str, zoo: Path | None, stack: contextlib.ExitStack) -> dict[str, Job]:
    """Start the slow job, another run of it and the fast one."""
    jobs = {}
    for side in ("slow", "rerun", "fast"):
        is_fast = side == "fast"
        if pair in CPU_JOBS:
            slow, faster = CPU_JOBS[pair]
            address, pid = stack.enter_context(start(slow | faster if is_fast else slow, sys.executable))
        elif zoo is not None and pair in ZOO:
            address, pid = stack.enter_context(start_zoo(zoo, pair, is_fast))
        else:
            job = stack.enter_context(start_tf_job("fast" if is_fast else "slow input"))
            address, pid = job.address, job.pid
        os.kill(pid, signal.SIGSTOP)
        jobs[side] = Job(address, pid)
    return jobs


@contextlib.contextmanager
def start_zoo(zoo: Path, kind: str, is_fast: bool) -> Iterator[tuple[str, int]]:
    """Run a job of the zoo until the block ends, from its first steps on."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        env = {**os.environ, **({"CURE": "1"} if is_fast else {})}
        with subprocess.Popen([sys.executable, zoo, kind, str(port), log], env=env, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL) as job:
            try:
                while not log.is_file() or log.read_text().count(" e") < _LOG_STEPS:
                    if job.poll() is not None:
                        raise RuntimeError(f"{kind} ended")
                    time.sleep(0.25)
                yield f"127.0.0.1:{port}", job.pid
            finally:
                job.kill()


class Load:
    """Processes that compute, each on one CPU; they run while something is recorded."""

    def __init__(self, count: int) -> None:
        self._processes = [subprocess.Popen([sys.executable, "-c", _LOAD, str(LOAD_S)]) for _ in range(count)]

    def signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(number)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def capture(job: Job, load: Load, seconds: float, place: Path) -> None:
    """Capture one job beside the load, which pauses when the recording has ended."""
    def report(status: CaptureStatus) -> None:
        if status.phase in _AFTER:
            load.signal(signal.SIGSTOP)

    never = threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        os.kill(job.pid, signal.SIGCONT)
        load.signal(signal.SIGCONT)
        time.sleep(1.0)
        try:
            record = capture_and_analyze([Server(job.address, pid=job.pid)],
                                         CaptureRequest(seconds, Path(folder), force=True),
                                         CaptureRun(never, never, report))
        finally:
            load.signal(signal.SIGSTOP)
            os.kill(job.pid, signal.SIGSTOP)
        if record.problem is not None:
            raise record.problem
        shutil.copytree(record.path.parent, place, dirs_exist_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--load", type=int, default=8, help="processes that compute meanwhile")
    parser.add_argument("--captures", type=int, default=4, help="of each process")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each capture")
    parser.add_argument("--minutes", type=float, default=60.0, help="no pair is begun after so many")
    parser.add_argument("--zoo", type=Path, default=None, metavar="ZOO.PY")
    parser.add_argument("--only", nargs="*", default=[], help="only pairs whose name contains one of these")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    pairs = [pair for pair in (*CPU_JOBS, "slow input → prefetch", *(ZOO if options.zoo else ()))
             if not options.only or any(text in pair for text in options.only)]
    for pair in pairs:
        places = {(side, n): options.folder / pair.replace("/", " ") / f"{side}-{n}"
                  for n in range(options.captures) for side in ("slow", "fast", "rerun")}
        left = {key: place for key, place in places.items() if not place.is_dir()}
        if left and time.monotonic() < end:
            with contextlib.ExitStack() as stack:
                jobs = jobs_of(pair, options.zoo, stack)
                load = Load(options.load)
                stack.callback(load.close)
                for (side, _), place in left.items():
                    try:
                        capture(jobs[side], load, options.seconds, place)
                    except Exception as error:  # noqa: BLE001  the others are still of use
                        print(f"{place}: {type(error).__name__}: {error}", file=sys.stderr)
    report(options.folder, pairs)


def report(folder: Path, pairs: list[str]) -> None:
    print("| pair | step, slow → fast | true change | better | worse | noise | cannot be told | reruns called a change "
          "| σ of log step |\n|---|---|---|---|---|---|---|---|---|")
    for pair in pairs:
        captured: dict[str, list[Side]] = {"slow": [], "fast": [], "rerun": []}
        for place in sorted((folder / pair.replace("/", " ")).glob("*-*")):
            captured[place.name.partition("-")[0]].append(read_side(place))
        slow, fast = [*captured["slow"], *captured["rerun"]], captured["fast"]
        if not slow or not fast:
            continue
        verdicts = [compare_sides(a, b).verdict for a, b in product(slow, fast)]
        reruns = [(a, b) for group in (slow, fast) for a, b in product(group, group) if a is not b]
        changed = sum(compare_sides(a, b).verdict in ("better", "worse") for a, b in reruns)
        logs = [[math.log(side.analysis.steps.mean_s) for side in group
                 if side.analysis is not None and side.analysis.steps is not None] for group in (slow, fast)]
        if min(map(len, logs)) < 2:
            print(f"| {pair} | too few captures hold steps: {len(logs[0])} slow, {len(logs[1])} fast |")
            continue
        means = [math.exp(mean(log)) for log in logs]
        counts = " | ".join(str(verdicts.count(word)) for word in ("better", "worse", "noise", "cannot be told"))
        spread = max(stdev(log) for log in logs)
        print(f"| {pair} | {means[0] * 1e3:.1f} → {means[1] * 1e3:.1f} ms | {means[1] / means[0] - 1:+.0%} | {counts} "
              f"| {changed} of {len(reruns)} | {spread:.2f} |", flush=True)


if __name__ == "__main__":
    main()
