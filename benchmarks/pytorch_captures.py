"""What captures cost a PyTorch job: gputop's by kineto's daemon mode and torch.profiler's own in a thread, by turns.

    TORCH_PYTHON=python3 python benchmarks/pytorch_captures.py [--rounds 5] [--seconds 10]
    TORCH_PYTHON=python3 python benchmarks/pytorch_captures.py --verdict [--rounds 5] [--seconds 2]

Needs a Python with PyTorch 2.8 or newer. The job trains on the CPU and writes how long each step took; it was started
without anything. "thread" has the job's own torch.profiler record all threads for the same seconds, as tools do that
inject code. "longest" is the longest step while the client was at work, "before" that of as long a time before.

``--verdict`` takes the time of whole ``gputop capture`` commands, from their start to their end, of three jobs; the
first one of each job prepares it. They begin at random moments, as kineto looks for requests once a second.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gputop.core.own_memory import resident_bytes  # noqa: E402
from gputop.launch.serve import switch_on  # noqa: E402
from gputop.profiler.capture.request import CaptureRequest  # noqa: E402
from gputop.profiler.capture.safe_capture import capture_with_probe  # noqa: E402
from gputop.profiler.ways import recorder_of  # noqa: E402

_JOB = """
import os, sys, threading, time
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)], torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
data = torch.randn(32, 64)

def record():
    for line in sys.stdin:
        seconds, path = line.split()
        from torch._C._profiler import _ExperimentalConfig
        with torch.profiler.profile(experimental_config=_ExperimentalConfig(profile_all_threads=True)) as profiler:
            time.sleep(float(seconds))
        profiler.export_chrome_trace(path)
        print("recorded", flush=True)

threading.Thread(target=record, daemon=True).start()
steps = open(sys.argv[1], "w", buffering=1 << 14)
step = 0
print("ready", flush=True)
while True:
    begin = time.time()
    optimizer.zero_grad()
    loss = model(data).pow(2).mean()
    loss.backward()
    optimizer.step()
    time.sleep(0.002)
    step += 1
    print(begin, time.time() - begin, file=steps)
    if step % 50 == 0:
        steps.flush()
"""


# A step of an MLP; of one that waits for its DataLoader; and operations on four numbers.
_VERDICT_JOB = """
import sys, threading, time
import torch
torch.set_num_threads(1)
threading.Thread(target=lambda: [time.sleep(10) for _ in range(10**6)], daemon=True).start()  # gputop attaches by it
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU(),
                            torch.nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
numbers, data = torch.ones(4), torch.randn(256000, 64)

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return len(data)

    def __getitem__(self, index):
        time.sleep(0.0003)
        return data[index]

def step(batch):
    optimizer.zero_grad()
    model(batch).pow(2).mean().backward()
    optimizer.step()

print("ready", flush=True)
while True:
    if sys.argv[1] == "tiny operations":
        numbers.add_(1.0)
    elif sys.argv[1] == "MLP":
        step(data[:64])
    else:
        for batch in torch.utils.data.DataLoader(Slow(), 64, num_workers=1):
            step(batch)
"""


class Job:
    """The job, from its first step on."""

    def __init__(self, folder: Path) -> None:
        self._steps = folder / "steps"
        self.process = subprocess.Popen(
            [os.environ.get("TORCH_PYTHON", sys.executable), "-c", _JOB, str(self._steps)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None and self.process.stdout.readline() == "ready\n"

    def longest_s(self, begin_s: float, end_s: float) -> float:
        """The longest step that began within these Unix times."""
        rows = (line.split() for line in self._steps.read_text().splitlines()[:-1])
        return max((float(took) for began, took in rows if begin_s <= float(began) <= end_s), default=0.0)

    def record_by_thread(self, seconds: float, path: Path) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(seconds, path, file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "recorded\n"


def compare(seconds: float, rounds: int) -> None:
    """Both clients by turns, each in a job of its own: a job that has used torch.profiler cannot be switched on."""
    figures: dict[str, list[tuple[float, float, float]]] = {"gputop": [], "thread": []}
    for number in range(2 * rounds):
        client = ("gputop", "thread")[number % 2]
        with tempfile.TemporaryDirectory() as name:
            job = Job(Path(name))
            try:
                time.sleep(seconds)
                began_s, before_bytes = time.time(), resident_bytes(job.process.pid) or 0
                if client == "gputop":
                    switch_on(job.process.pid)
                    capture_with_probe(recorder_of(f"pid:{job.process.pid}"), CaptureRequest(seconds, Path(name)),
                                       lambda _: None, lambda _: None, threading.Event())
                else:
                    job.record_by_thread(seconds, Path(name) / "trace.json")
                ended_s, after_bytes = time.time(), resident_bytes(job.process.pid) or 0
                time.sleep(1)
                before_s = job.longest_s(2 * began_s - ended_s, began_s)
                figures[client].append((job.longest_s(began_s, ended_s), before_s, after_bytes - before_bytes))
            finally:
                job.process.kill()
                job.process.wait()
    for client, rows in figures.items():
        longest, before, growth = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{client:>7}: longest step {longest * 1e3:.0f} ms (before: {before * 1e3:.0f} ms), "
              f"grew by {growth / 1e6:.0f} MB; medians of {rounds}")


def verdicts(seconds: float, rounds: int) -> None:
    """Seconds from the start of ``gputop capture`` to its end, for each job."""
    for name in ("MLP", "DataLoader", "tiny operations"):
        with tempfile.TemporaryDirectory() as folder, subprocess.Popen(
                [os.environ.get("TORCH_PYTHON", sys.executable), "-c", _VERDICT_JOB, name], stdout=subprocess.PIPE,
                text=True) as job:
            assert job.stdout is not None and job.stdout.readline() == "ready\n"
            took = []
            for _ in range(rounds + 1):
                time.sleep(random.uniform(1.0, 2.0))
                began_s = time.monotonic()
                subprocess.run(
                    [sys.executable, "-m", "gputop", "capture", str(job.pid), "--yes", "--seconds", str(seconds),
                     "--logdir", folder], cwd=ROOT, check=True, capture_output=True)
                took.append(time.monotonic() - began_s)
            job.kill()
        print(f"{name:>16}: the first {took[0]:.1f} s, then {statistics.median(took[1:]):.1f} s "
              f"({min(took[1:]):.1f} to {max(took[1:]):.1f}), median of {rounds}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--verdict", action="store_true")
    args = parser.parse_args()
    (verdicts if args.verdict else compare)(args.seconds, args.rounds)


if __name__ == "__main__":
    main()
