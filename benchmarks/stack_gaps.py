"""Whether the sampled stacks name what ran in the gaps of a real job, and what the sampling costs its steps.

A Keras job (TensorFlow on CPUs, no change but a profiler server) has a callback after each step that does the same work
each time, 40 ms of Python on a CPU of its own, and notes when it began and ended, by the job's own clock.

- Named: of some captures, the gaps between two calls of the step whose first line is the callback's, by gputop; and
  whether the callback ran in that gap, by the job's own notes.
- Cost: the job's own step times while py-spy samples and while it does not, in turns of a few seconds; the ratio of
  each pair of neighboring turns, their median, and its 95% interval by resampling the pairs. Likewise of the 20th
  percentile of the steps, which other load on the node disturbs less, and of the job's CPU time per step.

    python benchmarks/stack_gaps.py [--captures 5] [--pairs 30] [--seconds 3]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

JOB = '''
import json, os, sys, time
import tensorflow as tf
import keras

def confusion_matrix(rounds):
    for _ in range(rounds):
        sum(range(500))

began = time.thread_time()
confusion_matrix(2000)
ROUNDS = int(2000 * 0.04 / (time.thread_time() - began))

class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        began = time.time()
        confusion_matrix(ROUNDS)
        print(json.dumps([began, time.time(), time.process_time()]), flush=True)

tf.profiler.experimental.server.start(int(sys.argv[1]))
x, y = tf.random.normal([1024, 512]), tf.zeros([1024], tf.int32)
data = tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(64)
model = keras.Sequential([keras.layers.Dense(512, activation="relu"), keras.layers.Dense(10)])
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(data, steps_per_epoch=10**9, epochs=1, verbose=0, callbacks=[Slow()])
'''
LINE = "confusion_matrix"


class Job:
    """The job, and what it notes of its steps: (callback's begin, its end, CPU time so far)."""

    def __init__(self, folder: Path) -> None:
        import socket

        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        script = folder / "train.py"
        script.write_text(JOB)
        self.address, self.steps = f"127.0.0.1:{port}", []
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        self.process = subprocess.Popen([sys.executable, str(script), str(port)], stdout=subprocess.PIPE, text=True,
                                        stderr=subprocess.DEVNULL, env=environ)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.steps.append(json.loads(line))

    def wait_steps(self, count: int) -> None:
        wanted = len(self.steps) + count
        while len(self.steps) < wanted:
            assert self.process.poll() is None, "the job has ended"
            time.sleep(0.05)

    def between(self, begin_s: float, end_s: float) -> tuple[float, float, float]:
        """Median step, the 20th percentile, and CPU time per step."""
        own = [step for step in list(self.steps) if begin_s <= step[1] <= end_s]
        lengths = [b[1] - a[1] for a, b in itertools.pairwise(own)]
        return median(lengths), sorted(lengths)[len(lengths) // 5], (own[-1][2] - own[0][2]) / (len(own) - 1)


def named(job: Job, logdir: Path) -> dict[str, float]:
    """One capture: its gaps, those that the samples tell of, and those whose first line is the callback's."""
    from gputop.analysis.host.stack_lines import gap_spans, lines_of_gaps, process_lines, python_of
    from gputop.diagnosis.diagnose import analyze_to_facts
    from gputop.trace.intervals import EMPTY, merge
    from gputop.trace.readers.load import load

    done = subprocess.run([sys.executable, "-m", "gputop", "capture", "--attach", job.address, "--seconds", "5",
                           "--force", "--logdir", str(logdir), "--json"], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    document = json.loads(done.stdout)
    facts = analyze_to_facts(load([logdir]))
    of_kind, _ = gap_spans(facts.trace, facts.gpu_timelines, facts.steps, facts.host, 1)
    spans = {kind: merge(EMPTY, *gaps) for kind, gaps in of_kind.items()}
    gaps = list(zip(spans["gap"].start.tolist(), spans["gap"].end.tolist(), strict=True))
    processes = process_lines(python_of(facts.trace), facts.analyzed_spans, [merge(EMPTY, *spans.values())])
    lines = lines_of_gaps(processes, [(a, b, "gap") for a, b in gaps])
    calls = [step[:2] for step in list(job.steps)]
    right = ran = 0
    truth = 0.0
    for (begin, end), own in zip(gaps, lines, strict=True):
        a, b = ((t + facts.trace.origin_ns) / 1e9 for t in (begin, end))
        inside = sum(max(0.0, min(b, y) - max(a, x)) for x, y in calls)
        truth += inside
        ran += inside > 0.5 * (b - a)
        right += bool(own) and own[0].line.endswith(LINE) and inside > 0.5 * (b - a)
    of_gap = next(own for own in document["stacks"]["gaps"] if own["gap"] == "gap")
    line = next(own for own in of_gap["lines"] if own["line"].endswith(LINE))
    stacks = document["stacks"]
    return {"gaps": len(gaps), "the callback ran in": ran, "named": right, "told_ms": 1e3 * line["s_per_step"],
            "truth_ms": 1e3 * truth / facts.steps.count, "rate_hz": stacks["rate_hz"], "cpus": stacks["cpus"],
            "clock_ms": 1e3 * stacks["error_s"], "missed": stacks["missed"]}


def costs(job: Job, pairs: int, seconds: float) -> list[tuple[float, ...]]:
    """By pair the ratios with sampling to without of the figures of :meth:`Job.between`."""
    from gputop.ranks.stack_sampler import StackSampler

    def turn(sampling: bool) -> tuple[float, ...]:
        sampler = StackSampler(job.process.pid) if sampling else None
        if sampler is not None:
            sampler.wait_for_samples(10)
        begin = time.time()
        time.sleep(seconds)
        end = time.time()
        if sampler is not None:
            sampler.samples()
        else:
            time.sleep(0.1)
        return job.between(begin, end)

    out = []
    for number in range(pairs):
        first = number % 2 == 0
        one, two = turn(first), turn(not first)
        on, off = (one, two) if first else (two, one)
        out.append(tuple(a / b for a, b in zip(on, off, strict=True)))
    return out


def interval(values: list[float]) -> tuple[float, float, float]:
    rng = random.Random(0)
    again = sorted(median(rng.choices(values, k=len(values))) for _ in range(2000))
    return median(values), again[50], again[1949]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--captures", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=3.0)
    args = parser.parse_args()
    from gputop.ranks.stacks import find_py_spy

    if find_py_spy() is None:
        raise SystemExit("py-spy, which samples the stacks, is not installed: pip install py-spy, or put it on PATH.")
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder))
        try:
            job.wait_steps(50)
            found = []
            for number in range(args.captures):
                found.append(named(job, Path(folder) / f"traces{number}"))
                print("capture", {name: round(value, 3) for name, value in found[-1].items()},
                      f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs", flush=True)
            if found:
                gaps, right = (sum(own[name] for own in found) for name in ("gaps", "named"))
                print(f"named {right:.0f} of {gaps:.0f} gaps: {right / gaps:.1%}")
            ratios = costs(job, args.pairs, args.seconds)
            for what, values in zip(("median step", "20th percentile of the steps", "CPU time per step"),
                                    zip(*ratios, strict=True), strict=False):
                if values:
                    middle, low, high = interval(list(values))
                    print(f"{what}, sampled / not: {middle - 1:+.2%} ({low - 1:+.2%} to {high - 1:+.2%}), "
                          f"{len(values)} pairs of {args.seconds:g} s, load {os.getloadavg()[0]:.1f}")
        finally:
            job.process.kill()


if __name__ == "__main__":
    main()
