"""Small Keras and JAX training jobs on the CPU, faulty and cured, for the benchmarks beside this file.

    python benchmarks/cpu_jobs.py '{"framework": "keras", "input": "map", "parallel": true}' PORT

As a script: the job itself, which serves its profiler and trains until its standard input closes. Imported: ``start``
runs such a job, ``capture`` has gputop capture and analyze it, as its monitor does.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gputop.profiler.capture.records import CaptureRecord

Options = dict[str, Any]
BATCH, ELEMENTS, SIDE, WIDTH = 16, 1024, 128, 512
SPIN = 15_000  # turns of a Python loop, as a parser in Python does
WARM_UP_STEPS = 20


# -- for the benchmarks -----------------------------------------------------------------------

@contextlib.contextmanager
def start(options: Options, python: str) -> Iterator[tuple[str, int]]:
    """Run a job until the block ends; yields the address of its profiler server and its process."""
    port = free_port()
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "JAX_PLATFORMS": "cpu",
           "PYTHONSAFEPATH": "1"}
    with tempfile.TemporaryFile("w+") as errors, subprocess.Popen(
            [python, __file__, json.dumps(options), str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=errors, text=True, env=env) as job:
        try:
            assert job.stdout is not None
            if job.stdout.readline() != "ready\n":
                errors.seek(0)
                raise RuntimeError(f"{options} did not start:\n{errors.read()[-2000:]}")
            yield f"127.0.0.1:{port}", job.pid
        finally:
            job.kill()


def free_port() -> int:
    """A port of this machine on which nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def capture_job(job: Options, python: str, seconds: float, places: Sequence[Path]) -> None:
    """Start a job and capture it once for each place. What is there is kept."""
    if all(place.is_dir() for place in places):
        return
    with start(job, python) as (address, pid):
        for place in places:
            with tempfile.TemporaryDirectory() as folder:
                shutil.copytree(capture(address, pid, seconds, Path(folder)).path.parent, place, dirs_exist_ok=True)


def capture(address: str, pid: int, seconds: float, logdir: Path) -> CaptureRecord:
    """What gputop's monitor keeps of a capture, trace and findings on disk."""
    from gputop.profiler.capture.records import Server
    from gputop.profiler.capture.request import CaptureRequest
    from gputop.session.capture.captures import CaptureRun, capture_and_analyze

    never, request = threading.Event(), CaptureRequest(seconds, logdir, force=True)
    record = capture_and_analyze([Server(address, pid=pid)], request, CaptureRun(never, never, lambda _: None))
    if record.problem is not None:
        raise record.problem
    return record


# -- the jobs ---------------------------------------------------------------------------------

def _python(value: int) -> float:
    """Work that holds Python's lock."""
    total = 0.0
    for i in range(SPIN):
        total += (value * i) % 7
    return total


def _rows(tf: Any, options: Options) -> Any:
    """The input pipeline that the options name: elements of WIDTH floats."""
    data, kind = tf.data.Dataset, options.get("input", "memory")
    calls = {"num_parallel_calls": tf.data.AUTOTUNE} if options.get("parallel") else {}
    row = tf.random.normal([WIDTH])

    def compute(i: Any) -> Any:
        noise = tf.random.stateless_normal([160, 160], tf.stack([i, i]))
        for _ in range(options.get("map_work", 2)):
            noise = tf.matmul(noise, noise) * 1e-3
        return row + noise[0, 0] * 0

    def spin(i: Any) -> Any:
        value = tf.numpy_function(lambda v: _python(int(v)), [i], tf.float64)
        value.set_shape([])
        return row + tf.cast(value, tf.float32) * 0

    def ops(i: Any) -> Any:
        value = tf.cast(i, tf.float64)
        total = tf.reduce_sum(tf.math.floormod(value * tf.range(SPIN, dtype=tf.float64), 7.0))
        return row + tf.cast(total, tf.float32) * 0

    def read(i: Any) -> Any:
        tf.numpy_function(lambda v: (time.sleep(options.get("read_s", 0.0004)), v)[1], [i], tf.int64)
        return row

    def decode(image: Any) -> Any:
        pixels = tf.image.resize(tf.io.decode_jpeg(image, channels=3), [SIDE, SIDE])
        return tf.reshape(pixels, [-1])[:WIDTH] / 255.0

    if kind == "generator":
        def rows() -> Iterator[Any]:
            values = row.numpy()
            for i in itertools.count():
                _python(i)
                yield values

        return data.from_generator(rows, output_signature=tf.TensorSpec((WIDTH,), tf.float32))
    if kind == "decode":
        pixels = tf.cast(tf.random.uniform([4 * SIDE, 4 * SIDE, 3], 0, 255, tf.int32), tf.uint8)
        images = [tf.io.encode_jpeg(pixels).numpy()] * 128
        decoded = data.from_tensor_slices(images).map(decode, **calls)
        return (decoded.cache() if options.get("cache") else decoded).repeat()
    if kind == "shuffle":
        source = data.range(ELEMENTS).map(read)
        return source.shuffle(512).repeat() if options.get("repeat") else source.shuffle(512)
    maps = {"map": compute, "python": spin, "ops": ops, "read": read, "memory": lambda _: row}
    return data.range(1 << 40).map(maps[kind], **calls)


def _keras(options: Options, port: int) -> None:
    import tensorflow as tf

    tf.keras.utils.set_random_seed(0)
    dataset = _rows(tf, options).map(lambda r: (r, r)) if options.get("pairs", True) else _rows(tf, options)
    dataset = dataset.batch(options.get("batch", BATCH), drop_remainder=True)
    if options.get("prefetch", True):
        dataset = dataset.prefetch(2)
    settings = tf.data.Options()
    settings.experimental_optimization.inject_prefetch = False
    if options.get("serial"):  # TensorFlow would make its maps parallel
        settings.experimental_optimization.map_parallelization = bool(options.get("parallel"))
    dataset = dataset.with_options(settings)
    work = options.get("work", 20)

    class Work(tf.keras.layers.Layer):  # type: ignore[misc, name-defined]
        """The compute of a step, in twentieths of its usual size."""

        def build(self, _shape: Any) -> None:
            self.kernel = self.add_weight(shape=(WIDTH, WIDTH), initializer="orthogonal")

        def call(self, x: Any) -> Any:
            for _ in range(work):
                x = tf.matmul(x, self.kernel)
            return x

    counted = itertools.count()

    class Steps(tf.keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            _busy(options.get("callback_s", 0.0))
            if next(counted) == WARM_UP_STEPS:
                print("ready", flush=True)

    tf.profiler.experimental.server.start(port)
    if options.get("retrace"):
        return _retrace(tf, iter(dataset), work, options)
    model = tf.keras.Sequential([tf.keras.Input([WIDTH]), Work(), tf.keras.layers.Dense(WIDTH)])
    model.compile(optimizer="sgd", loss="mse", run_eagerly=options.get("eager", False), jit_compile=False)
    endless = options.get("input") != "shuffle" or options.get("repeat")
    model.fit(dataset, steps_per_epoch=1 << 30 if endless else None, epochs=1 if endless else 1 << 20, verbose=0,
              callbacks=[Steps()])


def _retrace(tf: Any, batches: Any, work: int, options: Options) -> None:
    """A loop of its own whose batches have another size at each step, or are padded to one size."""
    weights = tf.Variable(tf.random.normal([WIDTH, WIDTH]) * 0.01)

    @tf.function
    def train_step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            x = batch
            for _ in range(work):
                x = tf.matmul(x, weights)
            loss = tf.reduce_mean(tf.square(x))
        weights.assign_sub(0.01 * tape.gradient(loss, weights))
        return loss

    for step in itertools.count():
        rows = next(batches)[0]
        size = 1 + step % 4096
        rows = tf.tile(rows, [1 + size // BATCH, 1])[:size] if options["retrace"] == "always" else rows
        train_step(rows).numpy()
        if step == WARM_UP_STEPS:
            print("ready", flush=True)


def _busy(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        sum(range(100))


def _jax(options: Options, port: int) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    jax.profiler.start_server(port)
    width, work = options.get("width", 384), options.get("work", 20)

    def loss(weights: Any, batch: Any) -> Any:
        for _ in range(work):
            batch = batch @ weights
        return jnp.mean(batch ** 2)

    train = jax.jit(lambda weights, batch: weights - 1e-3 * jax.grad(loss)(weights, batch))
    weights, rows = jnp.eye(width), np.ones((128, width), np.float32)
    for number in itertools.count():
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            batch = rows[:1 + number % 127] if options.get("retrace") else rows
            if options.get("retrace"):
                train = jax.jit(train.__wrapped__)
            weights = train(weights, batch)
            weights.block_until_ready()
        _busy(options.get("callback_s", 0.0))
        if number == WARM_UP_STEPS:
            print("ready", flush=True)


if __name__ == "__main__":
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    chosen = json.loads(sys.argv[1])
    {"keras": _keras, "jax": _jax}[chosen["framework"]](chosen, int(sys.argv[2]))
