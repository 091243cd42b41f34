"""Keras jobs with an embedding table of a million rows, captured, and each with the fix that gputop shows.

    python benchmarks/embedding_jobs.py [JOB…]

Each job serves its profiler and trains on the CPU. Its time per step is uncaptured, the mean of ``MEASURED_S``. The fix
is the snippet of the finding itself. Prints a table in Markdown: promised against measured, and the healthy jobs.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
WIDTH, BATCH, LOOKED_UP, WARM_UP_STEPS, MEASURED_S = 64, 256, 8, 10, 6.0


class Job(NamedTuple):
    rows: int  # of the table; 0: dense layers alone
    optimizer: str
    fixed: tuple[str, str] = ("", "")  # classes of the embedding and of the optimizer in the snippet; "": healthy


JOBS = {
    "adam": Job(1_000_000, "Adam", ("Lookup", "LazyAdam")),
    "sgd": Job(1_000_000, "SGD", ("Lookup", "SGD")),
    "adagrad": Job(1_000_000, "Adagrad", ("Lookup", "LazyAdam")),
    "small-table": Job(2_000, "Adam"),
    "dense-layers": Job(0, "Adam"),
}


# -- the job ----------------------------------------------------------------------------------------------------------

def train(name: str, port: int, fixed: bool) -> None:
    import numpy as np
    import tensorflow as tf

    from gputop.advice.trace.embeddings import LAZY_ADAM

    keras, job, rng = tf.keras, JOBS[name], np.random.default_rng(0)
    tf.profiler.experimental.server.start(port)
    keras.utils.set_random_seed(0)
    classes: dict[str, Any] = {"keras": keras, "tf": tf}
    exec(LAZY_ADAM, classes)
    lookup, optimizer = job.fixed if fixed else ("", job.optimizer)
    targets = rng.random((4096, 1), np.float32)
    if job.rows:
        inputs = rng.integers(0, job.rows, (4096, LOOKED_UP)).astype(np.int32)
        table = classes[lookup] if lookup else keras.layers.Embedding
        layers = [keras.Input([LOOKED_UP], dtype="int32"), table(job.rows, WIDTH, name="items"), keras.layers.Flatten(),
                  keras.layers.Dense(128, "relu")]
    else:
        inputs = rng.random((4096, WIDTH), np.float32)
        layers = [keras.Input([WIDTH]), keras.layers.Dense(4096, "relu"), keras.layers.Dense(8192, "relu")]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile((classes.get(optimizer) or getattr(keras.optimizers, optimizer))(1e-3), "mse")

    class Steps(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            print(f"{time.monotonic()!r} {logs['loss']!r}", flush=True)

    batch = BATCH if job.rows else 16
    data = tf.data.Dataset.from_tensor_slices((inputs, targets)).cache().repeat().batch(batch).prefetch(2)
    model.fit(data, steps_per_epoch=1 << 30, verbose=0, callbacks=[Steps()])


# -- the runner -------------------------------------------------------------------------------------------------------

class Running:
    """``steps`` are the times at which the job's steps ended, and their losses."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.address, self.pid = address, process.pid
        self.steps: list[tuple[float, float]] = []
        self._process = process
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            ended, loss = map(float, line.split())
            self.steps.append((ended, loss))

    def step_s(self) -> float:
        """Mean time per step over a while in which nothing records."""
        while len(self.steps) < WARM_UP_STEPS:
            if self._process.poll() is not None:
                raise RuntimeError("the job ended")
            time.sleep(0.2)
        first = len(self.steps)
        time.sleep(MEASURED_S)
        steps = self.steps[first - 1:]
        return (steps[-1][0] - steps[0][0]) / (len(steps) - 1)


@contextlib.contextmanager
def start(name: str, fixed: bool) -> Iterator[Running]:
    from benchmarks.cpu_jobs import free_port

    port = free_port()
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, __file__, "--job", name, str(port), "fixed" * fixed], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env) as process:
        try:
            yield Running(process, f"127.0.0.1:{port}")
        finally:
            process.kill()


def row(name: str) -> str:
    with start(name, fixed=False) as job, tempfile.TemporaryDirectory() as folder:
        before_s = job.step_s()
        done = subprocess.run([sys.executable, "-m", "gputop", "capture", "--attach", job.address, "--seconds", "6",
                               "--logdir", folder, "--json"], capture_output=True, text=True, check=False, cwd=ROOT)
    findings = {finding["id"]: finding for finding in json.loads(done.stdout)["findings"]}
    found = findings.get("embedding_dense")
    gain = found and found["gain"]
    promised = f"{'about' if gain['estimate'] else 'at most'} {gain['step_time']:.0%}" if gain else "none"
    if not JOBS[name].fixed[1]:
        return f"| {name} | {1e3 * before_s:.1f} ms | | | {promised} |"
    with start(name, fixed=True) as job:
        after_s = job.step_s()
    return (f"| {name} | {1e3 * before_s:.1f} ms | {1e3 * after_s:.1f} ms | {1 - after_s / before_s:.0%} "
            f"| {promised} |")


def main(names: Sequence[str]) -> None:
    print(f"Load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs\n")
    print("| job | step before | with the fix | brought | promised |\n|---|---:|---:|---:|---|", flush=True)
    for name in names or JOBS:
        print(row(name), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    if sys.argv[1:2] == ["--job"]:
        threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
        train(sys.argv[2], int(sys.argv[3]), sys.argv[4] == "fixed")
    else:
        main(sys.argv[1:])
