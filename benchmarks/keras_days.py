"""A real Keras job with planted stalls, recorded by the real recorder: what `gputop report` makes of it.

    python benchmarks/keras_days.py [--stretch 30]

There is no GPU here: the job trains on the CPU, and the tests' fake NVML shows it as the holder of a GPU that is busy
while the job computes, because the job says so when a phase begins. Everything else is real: the process, its memory,
what it writes, its end and its restart, the sampling and the recording in parts, which are also rotated meanwhile. The
truth is the job's own clock. Planted are a callback that sleeps, a checkpoint of 400 MB that is brought to the disk, an
evaluation (which computes: training, to telemetry), an end and a restart. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for the fake of the tests

from gputop.goodput.recorded import report  # noqa: E402
from gputop.replay.parts import Bounds, Rotation, record, recordings_in  # noqa: E402
from gputop.sources.nvml.source import NvmlSource  # noqa: E402
from tests.nvml_fake import FakeNvml, build  # noqa: E402

INTERVAL_S = 0.5
# What the job says, and the state that telemetry has to see; "load" is start-up.
STATES = {"train": "training", "evaluate": "training", "stall": "waiting", "checkpoint": "checkpoint",
          "end": "waiting"}  # until the driver lists it no more
JOB = """
import os, sys, time
def phase(name): print(f"{time.time()!r} {name}", flush=True)
phase("load")
import keras, numpy
folder, stretch, last = sys.argv[1], float(sys.argv[2]), sys.argv[3] == "last"
x, y = numpy.random.rand(4096, 64), numpy.random.rand(4096, 1)
model = keras.Sequential([keras.layers.Dense(256, "relu"), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(x[:64], y[:64], verbose=0)
big = os.urandom(400 << 20)
class Planted(keras.callbacks.Callback):
    def __init__(self): self.began, self.done = time.monotonic(), set()
    def once(self, name, at):
        if name in self.done or time.monotonic() - self.began < at * stretch: return False
        self.done.add(name); return True
    def on_train_batch_end(self, batch, logs=None):
        if self.once("stall", 1): phase("stall"); time.sleep(0.5 * stretch); phase("train")
        if self.once("checkpoint", 2.5):
            phase("checkpoint")
            self.model.save(os.path.join(folder, "model.keras"))
            with open(os.path.join(folder, "optimizer.bin"), "wb") as file:
                for part in range(8):
                    file.write(big[:50 << 20]); file.flush(); os.fsync(file.fileno()); time.sleep(0.3)
            phase("train")
        if self.once("evaluate", 3.5):
            phase("evaluate"); until = time.monotonic() + 0.3 * stretch
            while time.monotonic() < until: self.model.evaluate(x[:256], y[:256], verbose=0)
            phase("train")
        if self.once("end", 4.5 if last else 4): self.model.stop_training = True; phase("end"); os._exit(0)
phase("train")
model.fit(x, y, batch_size=64, epochs=10**6, verbose=0, callbacks=[Planted()])
"""


def run_job(fake: FakeNvml, folder: Path, stretch: float, which: str) -> list[tuple[float, str]]:
    """The phases of one run, with their beginnings."""
    phases: list[tuple[float, str]] = []
    job = subprocess.Popen([sys.executable, "-c", JOB, str(folder), str(stretch), which], stdout=subprocess.PIPE,
                           stderr=subprocess.DEVNULL, text=True)
    fake.change(f"process 0 {job.pid} 8000 C 0")
    assert job.stdout is not None
    for line in job.stdout:
        at, _, name = line.strip().partition(" ")
        fake.change(f"set util {90 if STATES.get(name) == 'training' else 0} 0")
        phases.append((float(at), name))
    job.wait()
    fake.change("set util 0 0")
    fake.change(f"end_process {job.pid}")
    phases.append((time.time(), "gone"))
    return phases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--stretch", type=float, default=30.0, help="seconds of training between two stalls")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, FakeNvml(build(Path(name))) as fake:
        folder, stop = Path(name), threading.Event()
        fake.configure("gpus 1", "gpm 0", "set util 0 0", "set power_w 200 0")
        rotation = Rotation(Bounds(age_s=40.0))
        recorder = threading.Thread(target=record, args=(
            NvmlSource(()), INTERVAL_S, folder / "days", None, stop, lambda text: None, rotation))
        began_s = time.time()
        recorder.start()
        time.sleep(3)
        first = run_job(fake, folder, args.stretch, "first")
        time.sleep(10)
        second = run_job(fake, folder, args.stretch, "last")
        time.sleep(3)
        stop.set()
        recorder.join()
        parts = len(recordings_in(folder / "days"))
        found = report([folder / "days"])
    truth = planted(first, second, found.begin_s, found.end_s)
    print(f"{found.end_s - began_s:.0f} s in {parts} files, a sample every {INTERVAL_S:g} s\n")
    print("| state | the job's clock | gputop report | off by |\n|---|---|---|---|")
    states = found.total.states_s
    for state in sorted({*truth, *states}):
        off = states.get(state, 0.0) - truth.get(state, 0.0)
        print(f"| {state} | {truth.get(state, 0.0):.1f} s | {states.get(state, 0.0):.1f} s | {off:+.1f} s |")
    known = truth["training"] / sum(truth.values())
    print(f"\nGoodput: {known:.1%} by the job's clock, {found.total.goodput_ratio or 0.0:.1%} by the report. Restarts: "
          f"{[job.restarts for job in found.jobs]}.")


def planted(first: list[tuple[float, str]], second: list[tuple[float, str]], begin_s: float,
            end_s: float) -> dict[str, float]:
    truth: dict[str, float] = defaultdict(float)
    truth["idle"] = first[0][0] - begin_s + end_s - second[-1][0]
    truth["starting"] = first[1][0] - first[0][0]
    truth["restart"] = second[1][0] - first[-1][0]  # with the time between
    for phases in (first[1:], second[1:]):
        for (at, name), (until, _) in itertools.pairwise(phases):
            truth[STATES[name]] += until - at
    return truth


if __name__ == "__main__":
    main()
