"""What the history costs: appending, asking for lanes, live advice, memory.

    python benchmarks/history.py

Lanes are compared with the obvious alternative, a deque of samples and a Python loop per
slice, holding the same samples. Figures are medians on this machine; the ratio is what
carries over to another one.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import psutil

from gputop.advice.live.advise import live_advice
from gputop.core.metrics import GPU_METRICS, LEVELS
from gputop.core.samples import GpuInfo, GpuProcess, GpuSample, HostSample, NodeSample, ProcessSample, Reading
from gputop.telemetry.history import History

START_S = 1_800_000_000.0
RATE_HZ = 10
HOURS = 24


def samples(gpus: int, count: int, first: int = 0, every_s: float = 1 / RATE_HZ) -> Iterator[NodeSample]:
    """``count`` samples from a pool of random samples, so that making them costs little."""
    rng = random.Random(1)
    none = Reading.missing("ratio", "not measured")
    pool = []
    for _ in range(20):
        gpu_samples = []
        for i in range(gpus):
            readings = {m: Reading(rng.random(), d.unit) for m, d in GPU_METRICS.items()}
            held = GpuProcess(100, "C", None, none, none)
            gpu_samples.append(GpuSample(GpuInfo(i, f"GPU-{i}", "benchmark"), readings, (held,), None, ("power cap",)))
        pool.append(tuple(gpu_samples))
    host = HostSample("benchmark", {})
    for i in range(first, first + count):
        gpu_samples = pool[i % len(pool)]
        process = ProcessSample(100, "user", "python train.py", none, none, None,
                                {g.info.index: g.processes[0] for g in gpu_samples})
        yield NodeSample(START_S + i * every_s, gpu_samples, host, (process,))


def microseconds(call: Callable[[], object], repeat: int) -> float:
    """Median time of one call."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1e3


def naive_lane(kept: deque[NodeSample], gpu: int, metric: str, end_s: float, slice_s: float,
               slices: int) -> list[tuple[int, float, float, float, list[float]]]:
    """The same lane from a deque of samples."""
    first = int(end_s / slice_s) - slices
    parts: list[list[float]] = [[] for _ in range(slices)]
    for sample in reversed(kept):
        number = int(sample.time_s // slice_s) - first
        if number < 0:
            break
        value = sample.gpus[gpu][metric].value
        if number < slices and value is not None:
            parts[number].append(value)
    out = []
    for values in parts:
        levels = [0.0] * LEVELS
        for value in values:
            levels[min(LEVELS - 1, int(value * LEVELS))] += 1 / len(values)
        out.append((len(values), sum(values) / len(values), min(values), max(values), levels) if values
                   else (0, 0.0, 0.0, 0.0, levels))
    return out


def main() -> None:
    minutes = 10
    count = minutes * 60 * RATE_HZ
    for gpus in (8, 16):
        history = History()
        kept: deque[NodeSample] = deque(maxlen=count)
        costs = []
        for sample in samples(gpus, count):
            kept.append(sample)
            start = time.perf_counter_ns()
            history.append(sample)
            costs.append(time.perf_counter_ns() - start)
        append_us = statistics.median(costs) / 1e3
        print(f"{gpus} GPUs, {RATE_HZ} Hz")
        print(f"  append            {append_us:8.0f} µs a sample = {append_us * RATE_HZ / 1e4:.2f}% of a core")
        end_s = kept[-1].time_s
        for slice_s, slices in ((2.0, 100), (2.5, 100), (0.5, 100), (2.0, 2)):
            ours = partial(history.lane, "GPU-3", "sm_active", end_s=end_s, slice_s=slice_s, slices=slices)
            theirs = partial(naive_lane, kept, 3, "sm_active", end_s, slice_s, slices)
            fast, slow = microseconds(ours, 300), microseconds(theirs, 10)
            print(f"  lane {slices:3d} × {slice_s:3.1f} s  {fast:8.0f} µs; deque and loop {slow:8.0f} µs: "
                  f"{slow / fast:5.1f} times as long")
        print(f"  live advice       {microseconds(partial(live_advice, history, kept[-1]), 50):8.0f} µs a tick")

    process = psutil.Process()
    before = process.memory_info().rss
    history = History()
    stream = samples(16, 1)
    history.append(next(stream))
    at_start = process.memory_info().rss - before
    # One sample per second fills every slice of every tier as ten would, in a tenth of the time.
    for sample in samples(16, HOURS * 3600, 1, every_s=1.0):
        history.append(sample)
    full = process.memory_info().rss - before
    print(f"16 GPUs, {HOURS} h of samples: {at_start / 1e6:.1f} MB after the first, {full / 1e6:.1f} MB at the end")


if __name__ == "__main__":
    main()
