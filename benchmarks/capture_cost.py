"""What a capture costs a real job: `gputop capture` beside TensorFlow's own client, both asked for 10 s.

    python benchmarks/capture_cost.py [--job "tiny ops" --job "small layers"] [--seconds 10] [--rounds 1]
    python benchmarks/capture_cost.py --detail       # what the overview costs beside the detail alone
    python benchmarks/capture_cost.py --workers 2    # the same for workers that are captured together, each job kept

Needs TensorFlow in this environment. Each client captures from a fresh job of its own (tests/tf_job.py,
on the CPU), turn about. Lost steps are those the job would have made at its own pace (five seconds before
and after) between the start of the client and its end, less those it made: true on a quiet machine only.
CPU is what job and client took between these moments, less what the steps the job made meanwhile take it
otherwise; others' work on the machine hardly changes that. Growth is that of the job's resident memory at
its highest.
The traces of both are analyzed, as a cheaper capture that finds less would be no gain: whether the costliest finding
of each round is the same, in how many rounds each client had which findings, and how many steps they rest on.
The goal: a fifth of the training lost and a quarter of the growth, with the same findings; with the overview no more
than 1.3 times what the detail alone takes of training and memory.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402
from msgspec.structs import replace  # noqa: E402

from gputop.core.own_memory import resident_bytes  # noqa: E402
from gputop.diagnosis.diagnose import analyze  # noqa: E402
from gputop.profiler.capture import multi_worker, safe_capture  # noqa: E402
from gputop.profiler.capture.plan import Plan  # noqa: E402
from gputop.profiler.xprof.probe import load_grpc  # noqa: E402
from tests.profiler.capturing import capture_with_probe, capture_workers  # noqa: E402
from tests.tf_job import MODES, TfJob, start_tf_job  # noqa: E402

GPUTOP, DETAIL, TENSORFLOW = "gputop", "detail", "TensorFlow"
_BASELINE_S = 5.0
_TF_CLIENT = "import sys; import tensorflow as tf; print('ready', flush=True); sys.stdin.readline(); " \
             "tf.profiler.experimental.client.trace('grpc://' + sys.argv[1], sys.argv[2], int(sys.argv[3]))"


@dataclass
class Cost:
    """Of one capture. ``lost_s`` may be below zero by the job's own noise."""

    took_s: float
    lost_s: float  # of training
    cpu_s: float
    growth_bytes: int
    trace_bytes: int
    steps: int  # whole ones in the trace
    step_s: float  # their median
    findings: tuple[str, ...]  # the costliest first


def _cpu_s(pid: int) -> float:
    """Processor time of a process and of its children that have ended."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)


class _Peak:
    """The highest resident memory of a process while the block runs."""

    def __init__(self, pid: int) -> None:
        self._pid, self._stop = pid, threading.Event()
        self.before = self.highest = resident_bytes(pid) or 0
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            self.highest = max(self.highest, resident_bytes(self._pid) or 0)

    def __enter__(self) -> _Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def measure(client: str, mode: str, seconds: float) -> Cost:
    with tempfile.TemporaryDirectory() as logdir, start_tf_job(mode) as job:
        # Imports of the clients are no part of what a capture costs the job: they come first.
        process = _start_tensorflow(job, logdir, seconds) if client == TENSORFLOW else None
        load_grpc()
        calm = [(time.time(), _cpu_s(job.pid))]
        time.sleep(_BASELINE_S)
        began_s, own_s = time.time(), _cpu_s(os.getpid()) + (_cpu_s(process.pid) if process else 0.0)
        calm.append((began_s, _cpu_s(job.pid)))
        with _Peak(job.pid) as memory:
            if process is not None:
                process.communicate("go\n", timeout=600)
            else:
                _capture(job, logdir, seconds, overview=client != DETAIL)
            ended_s, own_s = time.time(), _cpu_s(os.getpid()) - own_s
        calm.append((ended_s, _cpu_s(job.pid)))
        time.sleep(_BASELINE_S)
        calm.append((time.time(), _cpu_s(job.pid)))
        steps = job.step_times()
        made = sum(began_s <= t <= ended_s for t in steps)
        calm_steps = sum(calm[0][0] <= t <= began_s or ended_s <= t <= calm[3][0] for t in steps)
        each_s = (calm[1][1] - calm[0][1] + calm[3][1] - calm[2][1]) / calm_steps
        cpu_s = calm[2][1] - calm[1][1] - made * each_s + own_s
        (path,) = Path(logdir).rglob("*.xplane.pb")
        said = analyze([path])
        found = sorted(said.findings, key=lambda f: -(f.gain.step_time or 0.0))
        count, step_s = (said.steps.count, said.steps.median_s) if said.steps else (0, math.nan)
        return Cost(ended_s - began_s, _lost_s(steps, began_s, ended_s), cpu_s, memory.highest - memory.before,
                    path.stat().st_size, count, step_s, tuple(f.id for f in found if f.severity != "low"))


def _start_tensorflow(job: TfJob, logdir: str, seconds: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _TF_CLIENT, job.address, logdir, str(round(1000 * seconds))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"})
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "ready", "TensorFlow's client does not start"
    return process


@contextlib.contextmanager
def _planned(overview: bool) -> Iterator[None]:
    """Let captures have an overview, or the detail alone, while the block runs."""
    whole = safe_capture.plan

    def plan(*args: Any, **options: Any) -> Plan:
        planned = whole(*args, **options)
        return planned if overview else replace(planned, overview_s=0.0)

    safe_capture.plan = multi_worker.plan = plan
    try:
        yield
    finally:
        safe_capture.plan = multi_worker.plan = whole


def _capture(job: TfJob, logdir: str, seconds: float, overview: bool) -> None:
    with _planned(overview):
        _, plan, _ = capture_with_probe(job.address, seconds=seconds, logdir=Path(logdir), pid=job.pid)
    print(f"  gputop chose {plan.chosen_s:g} s: {plan.why}; overview {plan.overview_s:g} s {plan.ended}")


def compare_workers(mode: str, seconds: float, rounds: int, workers: int) -> None:
    """Capture the same jobs together, with an overview and without, turn about; the first capture does not count."""
    load_grpc()
    lost: dict[bool, list[float]] = {True: [], False: []}
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(start_tf_job(mode)) for _ in range(workers)]
        _lost_together(jobs, seconds, overview=True)
        for turn in range(rounds):
            for overview in (turn % 2 == 0, turn % 2 == 1):
                lost[overview].append(_lost_together(jobs, seconds, overview))
                print(f"{GPUTOP if overview else DETAIL:10} {lost[overview][-1]:.2f} s of training lost by each job",
                      flush=True)
    means = {overview: statistics.mean(each) for overview, each in lost.items()}
    errors = {overview: statistics.stdev(each) / math.sqrt(rounds) for overview, each in lost.items()}
    print(f"{mode}, {workers} workers together: {means[True]:.2f}±{errors[True]:.2f} s with an overview, "
          f"{means[False]:.2f}±{errors[False]:.2f} s without, {means[True] / means[False]:.2f} times")


def _lost_together(jobs: Sequence[TfJob], seconds: float, overview: bool) -> float:
    """Return the seconds of training that each of the jobs loses by a capture of all of them."""
    with tempfile.TemporaryDirectory() as logdir, _planned(overview):
        time.sleep(_BASELINE_S)
        began_s = time.time()
        capture_workers([(job.address, job.pid) for job in jobs], seconds=seconds, logdir=Path(logdir))
        ended_s = time.time()
        time.sleep(_BASELINE_S)
    return statistics.mean(_lost_s(job.step_times(), began_s, ended_s) for job in jobs)


def _lost_s(steps: Sequence[float], began_s: float, ended_s: float) -> float:
    """Return how long the steps that are missing from an interval take, by the median second on both sides of it."""
    pace = statistics.median(sum(begin_s <= t < begin_s + 1 for t in steps) for begin_s in (
        *(began_s - n - 1 for n in range(int(_BASELINE_S))), *(ended_s + n for n in range(int(_BASELINE_S)))))
    return ended_s - began_s - sum(began_s <= t <= ended_s for t in steps) / pace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--job", choices=MODES, action="append")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--detail", action="store_true", help="beside gputop without an overview, not TensorFlow")
    parser.add_argument("--workers", type=int, default=None, metavar="N", help="so many jobs captured together")
    args = parser.parse_args()
    for job in args.job or ("tiny ops", "small layers"):
        if args.workers is not None:
            compare_workers(job, args.seconds, max(2, args.rounds), args.workers)
        else:
            compare(job, args.seconds, args.rounds, DETAIL if args.detail else TENSORFLOW)


def compare(job: str, seconds: float, rounds: int, other: str) -> None:
    clients = (GPUTOP, other)
    costs: dict[str, list[Cost]] = {client: [] for client in clients}
    for _ in range(rounds):
        for client in clients:
            costs[client].append(cost := measure(client, job, seconds))
            print(f"{client:10} {cost.took_s:5.1f} s  {cost.lost_s:.1f} s of training lost  CPU {cost.cpu_s:.1f} s  "
                  f"job +{cost.growth_bytes / 1e6:.0f} MB  trace {cost.trace_bytes / 1e6:.1f} MB  "
                  f"{f'{cost.steps} steps of {1000 * cost.step_s:.2f} ms' if cost.steps else 'no steps'}  "
                  f"{', '.join(cost.findings) or 'no findings'}", flush=True)

    def ratio(what: str) -> float:
        ours, theirs = (statistics.median(getattr(c, what) for c in costs[client]) for client in clients)
        return ours / theirs

    print(f"{job}, gputop over {other}: " + ", ".join(f"{name} {ratio(what):.2f}" for name, what in (
        ("training lost", "lost_s"), ("CPU", "cpu_s"), ("growth of the job", "growth_bytes"),
        ("trace", "trace_bytes"), ("wall time", "took_s"))))
    same = sum(len({costs[client][i].findings[:1] for client in clients}) == 1 for i in range(rounds))
    print(f"the costliest finding is the same in {same} of {rounds} rounds")
    for finding in sorted({f for one in costs.values() for c in one for f in c.findings}):
        print(f"  {finding}: " + ", ".join(
            f"{client} in {sum(finding in c.findings for c in costs[client])}" for client in clients))


if __name__ == "__main__":
    main()
