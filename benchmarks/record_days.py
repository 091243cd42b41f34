"""What `gputop record --rotate` costs: CPU, memory and bytes a day, at several intervals.

    python benchmarks/record_days.py [--seconds 600] [--gpus 8]

Over the fake NVML of the tests (so gcc is needed, and no GPU), whose figures change all the time; one process that
computes holds each GPU. The fake answers in under a microsecond: what the driver takes comes on top
(benchmarks/nvml_calls.py measures that). CPU is counted over the second half of the time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for the fake of the tests

from gputop.replay.parts import recordings_in  # noqa: E402
from gputop.replay.reader import Recording  # noqa: E402
from tests.nvml_fake import build, environment  # noqa: E402

INTERVALS_S = (1.0, 5.0, 10.0)
DAY_S = 86400.0


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--gpus", type=int, default=8)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = [subprocess.Popen([sys.executable, "-c", "import time\nwhile True: time.sleep(0.2); sum(range(10000))",
                                  "train.py", f"--rank={i}"]) for i in range(args.gpus)]
        holders = [f"process {i} {job.pid} 60000 C 80" for i, job in enumerate(jobs)]
        env = {**environment(build(folder), f"gpus {args.gpus}", *holders), "PYTHONPATH": str(ROOT)}
        recorders = []
        for interval_s in INTERVALS_S:
            command = [sys.executable, "-m", "gputop", "record", "--source", "nvml", "--rotate", "--interval",
                       f"{interval_s:g}", "-o", str(folder / f"{interval_s:g}")]
            recorders.append(subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL))
        try:
            time.sleep(args.seconds / 2)
            own = [psutil.Process(recorder.pid) for recorder in recorders]
            before, since_s = [cpu_s(process) for process in own], time.monotonic()
            time.sleep(args.seconds / 2)
            spent, memory = [cpu_s(process) for process in own], [process.memory_info().rss for process in own]
            span_s = time.monotonic() - since_s
        finally:
            for process in (*recorders, *jobs):
                process.terminate()
                process.wait()
        print(f"{args.gpus} GPUs, {args.seconds:g} s, {os.cpu_count()} cores\n")
        print("| interval | CPU of a core | memory | a sample | a day | a fortnight |\n|---|---|---|---|---|---|")
        for interval_s, first, last, rss in zip(INTERVALS_S, before, spent, memory, strict=True):
            (part,) = recordings_in(folder / f"{interval_s:g}")
            with Recording(part) as recording:
                sample = part.stat().st_size / len(recording)
            day = sample * DAY_S / interval_s
            print(f"| {interval_s:g} s | {(last - first) / span_s:.2%} | {rss / 1e6:.0f} MB | {sample:,.0f} B | "
                  f"{day / 1e6:.1f} MB | {14 * day / 1e6:.0f} MB |")


if __name__ == "__main__":
    main()
