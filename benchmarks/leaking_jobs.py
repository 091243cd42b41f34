"""Real processes that leak, and healthy ones that only look so, against what `gputop report` says of them.

    sudo python benchmarks/leaking_jobs.py [--limit-mib 1024]

Each process runs in a memory control group of its own with a limit (version 1 or 2: this needs the right to make groups
below the present one) and is shown as the holder of one GPU of the tests' fake NVML; so gcc is needed, and no GPU. One
`gputop record --rotate` watches all of them with gputop's own sampling of processes and groups. Every ten seconds
a report is made of what is recorded until then, and what it says of each process is kept. A leak ends when the kernel
kills the process: that moment is what the predictions are held against. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for the fake of the tests

from gputop.goodput.recorded import report  # noqa: E402
from tests.nvml_fake import build, environment  # noqa: E402

MIB = 1 << 20
SHORT_S = 10.0  # nearer to the end a prediction is of no use, and 1 s between samples a large part of it
_BASE = """
import gc, os, random, sys, time
random.seed(int(sys.argv[2])); rate, MIB, kept, began = float(sys.argv[1]), 1 << 20, [], time.monotonic()
def touched(mib): return bytearray(os.urandom(4096) * max(1, int(256 * mib)))
base = touched(80)
def due(): return rate * (time.monotonic() - began) - sum(map(len, kept)) / MIB
"""
PEAKS = "below peaks of 300 MiB, each for milliseconds"
# Leaks: by name, the loop that is run; ``rate`` is MiB/s.
LEAKS = {
    "steady, ten times a second": "while True: kept.append(touched(due())); time.sleep(0.1)",
    "one piece of each 4 s epoch": "while True: time.sleep(4); kept.append(touched(due()))",
    "pieces of random size at random times": """
while True:
    time.sleep(random.expovariate(1)); kept.append(touched(due() * random.uniform(0.3, 1.7)))""",
    "below teeth of 100 MiB every 3 s": """
while True:
    tooth = []
    for i in range(10): tooth.append(touched(10)); kept.append(touched(due())); time.sleep(0.3)""",
    PEAKS: """
while True:
    kept.append(touched(due())); time.sleep(1); touched(150)""",
    "small objects in a list, as of a history of metrics": """
rows, n = [], 0
while True:
    while n < rate * (time.monotonic() - began) * 2600: rows.append({"step": n, "loss": [n * 0.5, n * 0.7]}); n += 1
    time.sleep(0.05)""",
}
# Not leaks; ``rate`` as well.
HEALTHY = {
    "garbage of reference cycles, collected at times": """
gc.disable(); last = time.monotonic()
while True:
    own = [touched(rate * 0.1)]; own.append(own); time.sleep(0.1)
    if time.monotonic() - last > 45: del own; gc.collect(); last = time.monotonic()""",
    "long teeth: a buffer of 150 s": """
while True:
    kept.append(touched(rate * 0.1)); time.sleep(0.1)
    if time.monotonic() - began > 150: kept.clear(); began = time.monotonic()""",
    "a cache that fills to 40% of the limit": """
while True:
    if len(kept) < 3200 / rate: kept.append(touched(rate * 0.1))
    time.sleep(0.1)""",
    "a data set of 300 MiB read again and again (page cache)": """
import tempfile
with tempfile.NamedTemporaryFile(dir=os.environ["DATA"]) as file:
    for _ in range(300): file.write(os.urandom(MIB))
    while True:
        file.flush(); file.seek(0)
        while file.read(MIB): time.sleep(0.02)""",
    "memory that goes up and down by chance": """
while True:
    kept = [touched(random.uniform(1, 30)) for _ in range(10)]; time.sleep(random.uniform(0.5, 4))""",
}
CASES = [*((name, rate) for name in LEAKS for rate in (2.0, 4.0) if (name, rate) != (PEAKS, 2.0)),
         *((name, 2.7) for name in HEALTHY)]


class Group:
    """A memory control group below the present one."""

    def __init__(self, name: str, limit_bytes: int) -> None:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        own = next((path for _, kinds, path in lines if kinds == "memory"), None)
        root = Path("/sys/fs/cgroup") if own is None else Path("/sys/fs/cgroup/memory")
        self.folder = root / (own or next(path for _, kinds, path in lines if not kinds)).lstrip("/") / name
        self.folder.mkdir()
        (self.folder / ("memory.max" if own is None else "memory.limit_in_bytes")).write_text(str(limit_bytes))

    def start(self, command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        moved = f'echo $$ > "{self.folder}/cgroup.procs" && exec "$@"'
        return subprocess.Popen(["sh", "-c", moved, "sh", *command], env=env, stderr=subprocess.DEVNULL)

    def remove(self) -> None:
        self.folder.rmdir()


def watch(jobs: list[subprocess.Popen[bytes]], folder: Path, end_s: float,
          leaks: int) -> tuple[dict[int, float], dict[int, list[tuple[float, float | None]]]]:
    """When each process was killed, and what reports said of it: (when, seconds to the limit)."""
    killed: dict[int, float] = {}
    said: dict[int, list[tuple[float, float | None]]] = {job.pid: [] for job in jobs}
    report_s = time.time() + 30
    while time.time() < end_s and len(killed) < leaks:
        for job in jobs:
            if job.pid not in killed and job.poll() is not None:
                assert job.returncode == -signal.SIGKILL, job.returncode
                killed[job.pid] = time.time()
        if time.time() >= report_s:
            report_s += 10
            found = report([folder])
            for creep in found.creep:
                pids = [creep.pid] if creep.pid is not None else [
                    job.pid for i, job in enumerate(jobs) if creep.name.endswith(f"gputop-leak-{i}")]
                for pid in pids:
                    if pid not in killed:
                        said[pid].append((found.end_s, creep.full_in_s))
        time.sleep(0.05)
    return killed, said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--limit-mib", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=620.0, help="at most")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        groups, jobs = [], []
        try:
            for i, (what, rate) in enumerate(CASES):
                groups.append(Group(f"gputop-leak-{i}", args.limit_mib * MIB))
                code = _BASE + (LEAKS.get(what) or HEALTHY[what])
                jobs.append(groups[i].start([sys.executable, "-c", code, str(rate), str(i)],
                                            {**os.environ, "DATA": name}))
            holders = [f"process {i} {job.pid} 1000 C 50" for i, job in enumerate(jobs)]
            env = {**environment(build(folder), f"gpus {len(jobs)}", *holders), "PYTHONPATH": str(ROOT)}
            recorder = subprocess.Popen([sys.executable, "-m", "gputop", "record", "--source", "nvml", "--rotate",
                                         "--interval", "1", "-o", str(folder / "days")], env=env,
                                        stderr=subprocess.DEVNULL)
            leaks = sum(what in LEAKS for what, _ in CASES)
            killed, said = watch(jobs, folder / "days", time.time() + args.seconds, leaks)
            recorder.terminate()
            recorder.wait()
        finally:
            for job in jobs:
                job.kill()
                job.wait()
            for group in groups:
                _eventually(group.remove)
    _print(jobs, killed, said)


def _eventually(call: Callable[[], None]) -> None:
    for _ in range(100):
        try:
            return call()
        except OSError:
            time.sleep(0.1)


def _print(jobs: list[subprocess.Popen[bytes]], killed: dict[int, float],
           said: dict[int, list[tuple[float, float | None]]]) -> None:
    print("| process | MiB/s | killed | first said | off by | later reports | off by, median, worst |")
    print("|---|---|---|---|---|---|---|")
    off: list[tuple[float, float]] = []  # how long before the kill, and by how much
    for job, (what, rate) in zip(jobs, CASES, strict=True):
        end_s, all_said = killed.get(job.pid), said[job.pid]
        if what in HEALTHY or end_s is None:
            outcome = f"{'no' if end_s is None else 'yes'} | {len(all_said)} reports accuse it"
            print(f"| {what} | {rate:g} | {outcome} | | | |")
            continue
        own = [(end_s - at, (left or 0.0) / (end_s - at) - 1) for at, left in all_said if end_s - at > SHORT_S]
        if not own:
            print(f"| {what} | {rate:g} | yes | never | | | |")
            continue
        off += own
        errors = [abs(error) for _, error in own]
        print(f"| {what} | {rate:g} | yes | {own[0][0]:.0f} s before | {own[0][1]:+.0%} | {len(own)} | "
              f"{statistics.median(errors):.0%}, {max(errors):.0%} |")
    for least_s in (SHORT_S, 30.0):
        errors = [abs(error) for ahead_s, error in off if ahead_s >= least_s]
        print(f"\n{len(errors)} predictions {least_s:g} s or more before the kill: "
              f"{sum(error <= 0.2 for error in errors)} of them within 20%, median {statistics.median(errors):.0%}.")


if __name__ == "__main__":
    main()
