"""Whether captures hurt jobs: many short recordings of many kinds of jobs, and what became of the jobs.

    python benchmarks/harm.py --python 2.13=/envs/torch213/bin/python [--python ...] [--recordings 100] [--kind plain]
    python benchmarks/harm.py --python tf=/envs/tf/bin/python --kind tf --kind end-tf
    python benchmarks/harm.py --python 2.13=... --grow 200     # what 200 recordings leave in one process

Each job (harm_jobs.py) is made ready as ``gputop capture`` does it, recorded up to ten times with random lengths, and
told to end: "end…" kinds at a random moment of a recording, others between two. Its losses are compared, bit by bit,
with those of the same job without a recording. Counted as harm: another status or last line than its own, a step that
does not come within ten seconds, another loss. "pinned": on one CPU with ten busy loops; "load": beside 30 busy loops.
Where nothing was seen in N recordings the odds are below 3/N (95% confidence: the rule of three).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gputop.core.errors import GputopError  # noqa: E402
from gputop.core.own_memory import resident_bytes  # noqa: E402
from gputop.launch.serve import make_ready  # noqa: E402
from gputop.profiler.kineto.guard import UsedBefore  # noqa: E402
from gputop.profiler.recording import EmptyTrace, Progress, Recorder, RecordingOrder  # noqa: E402
from gputop.profiler.ways import recorder_of  # noqa: E402

TORCH_KINDS = ("plain", "threads", "workers", "ddp", "compile", "profiler", "schedule", "busy", "forks", "pinned",
               "load", "end-plain", "end-threads", "end-workers", "end-busy", "end-pinned", "end-load")
_EACH = 10  # recordings of one process, at most
_STATUS = 3  # with which jobs end
_STEPS_S, _END_S, _BUSY = 240.0, 240.0, {"pinned": 10, "load": 30}


class Job:
    """One job, or two ranks of one; from its first lines on."""

    def __init__(self, python: str, kind: str, folder: Path) -> None:
        self.folder, self.ends = folder, kind.startswith("end-")
        kind = kind.removeprefix("end-")
        self.busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(_BUSY.get(kind, 0))]
        pinned = (lambda: os.sched_setaffinity(0, {0})) if kind == "pinned" else None
        if kind == "pinned":
            for process in self.busy:
                os.sched_setaffinity(process.pid, {0})
        name = kind if kind not in _BUSY else "plain"
        ranks = 2 if kind == "ddp" else 1
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.logs = [folder / f"log{rank}" for rank in range(ranks)]
        self.outputs = [folder / f"out{rank}" for rank in range(ranks)]
        self.processes = [
            subprocess.Popen(
                [python, str(ROOT / "benchmarks/harm_jobs.py"), name, str(log), str(_STATUS)], stderr=subprocess.STDOUT,
                stdout=output.open("w"), preexec_fn=pinned,
                env={**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                     "RANK": str(rank), "WORLD_SIZE": str(ranks), "PYTHONPATH": ""})
            for rank, (log, output) in enumerate(zip(self.logs, self.outputs, strict=True))]

    def steps(self, more: int = 1, timeout_s: float = _STEPS_S) -> bool:
        """Wait until each rank has written so many more lines."""
        wanted = [count + more for count in self.lines()]
        deadline = time.monotonic() + timeout_s
        while any(count < want for count, want in zip(self.lines(), wanted, strict=True)):
            if time.monotonic() > deadline or any(process.poll() is not None for process in self.processes):
                return False
            time.sleep(0.05)
        return True

    def lines(self) -> list[int]:
        return [log.read_text().count("\n") if log.exists() else 0 for log in self.logs]

    def end(self) -> None:
        """Have it come to its own end."""
        with contextlib.suppress(FileNotFoundError):  # it has
            for log in self.logs:
                Path(f"{log}.stop").touch()

    def harm(self, reference: dict[str, str]) -> str:
        """What is wrong with how it ended, and with its losses; "" for nothing. Waits for its end."""
        problems = []
        for process, output, log in zip(self.processes, self.outputs, self.logs, strict=True):
            try:
                status = process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
                problems.append("hung")
            said = output.read_text()
            if status != _STATUS or "clean end\n" not in said:  # TensorFlow's profiler may log after it
                problems.append(f"status {status}, said {said[-200:]!r}")
            for line in log.read_text().splitlines():
                step, loss = line.split()
                if reference.setdefault(step, loss) != loss:
                    problems.append(f"another loss at step {step}")
                    break
        return "; ".join(problems)

    def close(self) -> None:
        for process in (*self.processes, *self.busy):
            process.kill()
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def record(recorder: Recorder, seconds: float, folder: Path, end: Callable[[], None] = lambda: None) -> str:
    """One recording; "" where it was made, else what gputop says. ``end`` is called once, within it."""
    traces, ends = folder / f"traces{recorder.pid}", threading.Timer(random.uniform(0.0, seconds + 2.0), end)

    def begun(progress: Progress) -> None:
        if progress.phase == "recording" and not ends.is_alive() and not ends.finished.is_set():
            ends.start()

    try:
        most = random.choice((0, 1, 5_000, 50_000))  # with which it ends, mostly while the job goes on
        recorder.record(RecordingOrder(seconds, traces, most_events=most), begun, threading.Event())
    except EmptyTrace:
        return ""
    except GputopError as error:
        return error.message
    finally:
        ends.cancel()
        shutil.rmtree(traces, ignore_errors=True)
    return ""


def told(refused: dict[str, int], text: str) -> None:
    """Count what gputop said, without its numbers."""
    text = re.sub(r"\d+", "N", text)[:120]
    refused[text] = refused.get(text, 0) + 1


def run(name: str, python: str, kind: str, count: int) -> None:
    """Make ``count`` recordings of jobs of one kind; print what became of the jobs."""
    reference: dict[str, str] = {}
    made = jobs = harmed = 0
    refused: dict[str, int] = {}
    began_s = time.monotonic()
    tries = 0
    while made < count and tries < 3 * count:
        job = Job(python, kind, Path(tempfile.mkdtemp(prefix="harm-")))
        jobs += 1
        try:
            if not job.steps(2):
                raise SystemExit(f"{name} {kind}: the job does not start: {job.outputs[0].read_text()[-300:]}")
            pids = [process.pid for process in job.processes]
            try:
                addresses = [make_ready(pid).address for pid in pids]
            except UsedBefore:
                addresses = [make_ready(pid, hold=True).address for pid in pids]
            except GputopError as error:
                addresses = []
                told(refused, error.message)
            recorders = [recorder_of(address, pid) for pid, address in zip(pids, addresses, strict=False)]
            each = 1 if job.ends else min(_EACH, count - made)
            for _ in range(each):
                tries += 1
                seconds = random.uniform(0.1, 1.0)
                end = job.end if job.ends else lambda: None
                with ThreadPoolExecutor(len(pids)) as threads:
                    said = list(threads.map(lambda one: record(one, seconds, job.folder, end), recorders))  # noqa: B023
                for text in said:
                    made += not text
                    if text:
                        told(refused, text)
                if not job.ends and not job.steps(1, 30.0):
                    break
            job.end()
            problem = job.harm(reference)
            if problem:
                harmed += 1
                print(f"    HARM {name} {kind}: {problem}", flush=True)
        finally:
            job.close()
    odds = f"below {300 / made:.1f}%" if made and not harmed else ""
    print(f"{name:>6} {kind:<12} {made:4} recordings of {jobs:3} jobs: {harmed} harmed {odds}"
          f" ({time.monotonic() - began_s:.0f} s){'; ' if refused else ''}"
          + "; ".join(f"{text} ({number})" for text, number in refused.items()), flush=True)


def grow(name: str, python: str, count: int) -> None:
    """Resident memory of one job over so many recordings."""
    job = Job(python, "plain", Path(tempfile.mkdtemp(prefix="harm-")))
    try:
        job.steps(2)
        pid = job.processes[0].pid
        sizes = [resident_bytes(pid) or 0]
        recorder = recorder_of(make_ready(pid).address, pid)
        for _ in range(count):
            record(recorder, 0.5, job.folder)
            sizes.append(resident_bytes(pid) or 0)
        shown = [0, 1, 10, 20, *range(50, count + 1, 50)]
        print(f"{name:>6} grows: " + ", ".join(f"{sizes[n] / 1e6:.0f} MB after {n}" for n in shown if n <= count))
        job.end()
        print(f"{name:>6} ended: {job.harm({}) or 'as without'}")
    finally:
        job.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", required=True, metavar="NAME=PYTHON")
    parser.add_argument("--kind", action="append", metavar="KIND",
                        help=f"of {', '.join(TORCH_KINDS)}, tf, jax, end-tf, …")
    parser.add_argument("--recordings", type=int, default=50, help="of each kind")
    parser.add_argument("--grow", type=int, default=0)
    args = parser.parse_args()
    for name, python in (pair.split("=", 1) for pair in args.python):
        if args.grow:
            grow(name, python, args.grow)
            continue
        for kind in args.kind or TORCH_KINDS:
            run(name, python, kind, args.recordings)


if __name__ == "__main__":
    main()
