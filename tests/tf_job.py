"""A real Keras training job with a profiler server, for tests: started here, run as a script.

``start_tf_job`` runs this file in a process of its own (TensorFlow stays out of the test
process; see tests/forked_processes.py) and waits for its ready line. The job trains until
it is killed, and prints one JSON line per step, so that a test can hold a trace against what
the job itself saw.

    with start_tf_job("slow input") as job:
        capture(job.address, ...)
        job.step_times()
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests import forked_processes

MODES = ("fast", "slow input", "validation", "host work", "retracing", "tiny ops", "small layers")
READY_TIMEOUT_S = 240.0  # TensorFlow's import alone takes tens of seconds on a busy machine
WARM_UP_STEPS = 5  # the first ones hold tracing and allocation
# What the job itself spends, and a trace of it is to show; no test waits by them.
SLOW_INPUT_S = 0.05  # per batch, as a read from slow storage; the step computes for some milliseconds
CALLBACK_S = 0.005  # of Python after each step
REST_S = 0.02  # after each step of a fast job: one that never rests leaves the rest of a test run no core
TINY_OPS = 1000  # in a step


@dataclass
class TfJob:
    """A running job. ``address`` is its profiler server's, ``versions`` of TensorFlow and Keras."""

    address: str
    pid: int
    versions: dict[str, str]
    _process: subprocess.Popen[str] | forked_processes.Forked
    _steps: list[float] = field(default_factory=list)
    _progress: threading.Condition = field(default_factory=threading.Condition)
    _ended: bool = False

    def step_times(self) -> list[float]:
        """Unix times in seconds at which the job's steps ended so far, oldest first."""
        with self._progress:
            return list(self._steps)

    def wait_steps(self, count: int) -> None:
        """Wait until ``count`` more steps ended; AssertionError where the job does not get there."""
        with self._progress:
            wanted = len(self._steps) + count
            self._progress.wait_for(lambda: len(self._steps) >= wanted or self._ended, READY_TIMEOUT_S)
            assert len(self._steps) >= wanted, "the job stopped stepping"

    @contextlib.contextmanager
    def awake(self) -> Iterator[TfJob]:
        """Let it train within the block only: the rest of a test run need not share its cores with it.

        It is asked to and not stopped by a signal: its server goes on answering, and who looks for servers
        meanwhile, as many tests do, does not wait for one that cannot.
        """
        self._ask("train")
        try:
            yield self
        finally:
            self.pause()

    def _ask(self, what: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed
            self._process.stdin.write(what + "\n")
            self._process.stdin.flush()

    def pause(self) -> None:
        """Let it train no more, unless something wakes it."""
        self._ask("pause")

    def kill(self) -> None:
        """End the job as a crash would."""
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def start_tf_job(mode: str = "fast", *, python: str = sys.executable, port: int | None = None,
                 threads: int | None = None) -> Iterator[TfJob]:
    """Run a training job in one of the ``MODES`` until the block ends, each op of it in so many threads (None: as many
    as TensorFlow takes)."""
    from tests import forked_processes  # not above: the job itself runs without this repository on its path
    from tests.listening import free_port

    assert mode in MODES
    script, arguments = Path(__file__).resolve(), [mode, str(port or free_port())]
    # The job ends by itself when its stdin closes, so it does not outlive a killed test run.
    # Keras is imported as a namespace of TensorFlow; the script's folder must not shadow anything.
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", "PYTHONSAFEPATH": "1"}
    if threads is not None:
        env["TF_NUM_INTRAOP_THREADS"] = str(threads)
    process = forked_processes.start(script, arguments, env) if python == sys.executable else subprocess.Popen(
        [python, str(script), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=env)
    errors: list[str] = []
    ready: queue.Queue[dict[str, Any] | None] = queue.Queue()
    jobs: list[TfJob] = []
    readers = (
        threading.Thread(target=_read_steps, args=(process, ready, jobs), daemon=True),
        threading.Thread(target=lambda: errors.extend(process.stderr or ()), daemon=True),
    )
    for reader in readers:
        reader.start()
    try:
        line = ready.get(timeout=READY_TIMEOUT_S)
        if line is None:
            readers[1].join()
            raise RuntimeError(f"the training job ended with {process.wait()}:\n" + "".join(errors[-40:]))
        yield jobs[0]
    finally:
        process.kill()
        process.wait()
        for reader in readers:
            reader.join()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def _read_steps(
    process: subprocess.Popen[str] | forked_processes.Forked, ready: queue.Queue[dict[str, Any] | None],
    jobs: list[TfJob],
) -> None:
    assert process.stdout is not None
    for text in process.stdout:
        if not text.endswith("}\n"):  # cut off by the kill
            continue
        line = json.loads(text)
        if "ready" in line:
            jobs.append(TfJob(f"127.0.0.1:{line['port']}", line["pid"], line["versions"], process))
            ready.put(line)
        elif jobs:
            with jobs[0]._progress:
                jobs[0]._steps.append(line["end_s"])
                jobs[0]._progress.notify_all()
    for job in jobs:
        with job._progress:
            job._ended = True
            job._progress.notify_all()
    ready.put(None)


def _train(mode: str, port: int) -> None:
    """The job itself. Few and large operations, so that a trace of seconds stays small; but for "small layers"."""
    import tensorflow as tf

    tf.keras.utils.set_random_seed(0)
    sizes = {"small layers": (32, 16, 24), "fast": (64, 384, 3), "slow input": (64, 384, 3)}
    rows, width, layers = sizes.get(mode, (64, 768, 3))
    features = tf.random.normal([rows, width])
    labels = tf.random.normal([rows, width])

    def load(_index: Any) -> Any:
        if mode == "slow input":
            # Sleeps as a read from slow storage would, in one thread and without prefetching.
            tf.py_function(lambda: time.sleep(SLOW_INPUT_S), [], [])
        return features, labels

    dataset = tf.data.Dataset.range(1_000_000_000).map(load)
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False  # TensorFlow would hide some of the wait
    dataset = dataset.with_options(options)
    if mode in ("fast", "validation", "small layers"):
        dataset = dataset.prefetch(2)

    def report(batch: int) -> None:
        if batch == WARM_UP_STEPS:
            versions = {"tensorflow": tf.__version__, "keras": metadata.version("keras")}
            _say({"ready": True, "port": port, "pid": os.getpid(), "versions": versions})
        _say({"step": batch, "end_s": time.time()})
        if mode == "fast":
            time.sleep(REST_S)
        training.wait()

    tf.profiler.experimental.server.start(port)
    training = threading.Event()
    training.set()
    threading.Thread(target=_obey_parent, args=(training,), daemon=True).start()
    if mode == "retracing":
        return _retrace(tf, features, report)
    if mode == "tiny ops":
        return _tiny_ops(tf, report)
    if mode == "host work":
        dataset = _parallel_input(tf)
    steps = itertools.count()

    class Steps(tf.keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if mode == "host work":
                _look_at_weights(tf, self.model)
            report(next(steps))

    model = tf.keras.Sequential(
        [tf.keras.Input([width]), *(tf.keras.layers.Dense(width, activation="relu") for _ in range(layers))]
    )
    model.compile(optimizer="sgd", loss="mse")
    if mode == "validation":
        while True:
            model.fit(dataset, steps_per_epoch=6, validation_data=dataset, validation_steps=5, verbose=0,
                      callbacks=[Steps()])
    model.fit(dataset, steps_per_epoch=1_000_000_000, verbose=0, callbacks=[Steps()])


def _parallel_input(tf: Any) -> Any:
    """Files read in turn by two workers, a map of two workers that computes, then batches and a prefetch."""
    def compute(_index: Any) -> Any:
        noise = tf.random.normal([256, 256])
        for _ in range(4):
            noise = tf.matmul(noise, noise) * 1e-3
        row = tf.reshape(noise, [-1])[:768]
        return row, row

    files = tf.data.Dataset.range(1_000_000_000)
    rows = files.interleave(lambda _: tf.data.Dataset.range(100), cycle_length=2, num_parallel_calls=2)
    return rows.map(compute, num_parallel_calls=2).batch(8).prefetch(1)


def _look_at_weights(tf: Any, model: Any) -> None:
    """What callbacks do that cost: ops one by one, and Python."""
    weights = model.layers[0].get_weights()[0]
    for _ in range(5):
        tf.reduce_mean(tf.square(weights)).numpy()
    time.sleep(CALLBACK_S)


def _retrace(tf: Any, features: Any, report: Callable[[int], None]) -> None:
    """A loop of its own whose batches change their size, so that every call is traced anew."""
    weights = tf.Variable(tf.random.normal([768, 768]) * 0.01)

    @tf.function
    def train_step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.nn.relu(tf.matmul(batch, weights))))
        weights.assign_sub(0.01 * tape.gradient(loss, weights))
        return loss

    batches = iter(tf.data.Dataset.range(1_000_000_000).map(lambda _: features).prefetch(2))
    for step in itertools.count():
        size = 1 + step % 256
        train_step(next(batches)[:size]).numpy()
        report(step)


def _tiny_ops(tf: Any, report: Callable[[int], None]) -> None:
    """Eager ops of a few microseconds each: what makes a profiler gather most for the least work."""
    one = value = tf.constant(1.0)
    for step in itertools.count():
        for _ in range(TINY_OPS // 2):
            value = tf.tanh(value + one)
        report(step)


def _obey_parent(training: threading.Event) -> None:
    for line in sys.stdin:
        if line == "pause\n":
            training.clear()
        else:
            training.set()
    os._exit(0)


def _say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("port", type=int)
    arguments = parser.parse_args()
    _train(arguments.mode, arguments.port)
