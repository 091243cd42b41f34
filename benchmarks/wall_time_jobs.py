"""Real CPU jobs that lose time around their steps, and healthy ones: what gputop says of the recorded time.

    python benchmarks/wall_time_jobs.py [--runs 2] [--seconds 10] [--jax-python PATH] [JOB…]

Each job serves its profiler and logs the begin and the end of each training step, and of the work that holds it up. It
is captured as a user would, ``gputop capture --attach … --json``. The truth is the job's own log, cut to the window
that the profiler has recorded. A job with a fault also runs with the fix, uncaptured, for its time per step. Prints a
table in Markdown. JAX jobs run only with ``--jax-python``, a Python that has JAX.

The faults are modeled on public reports, named in ``JOBS``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
WIDTH, BATCH = 2048, 64
WARM_UP_STEPS = 12
MEASURED_S = 10.0  # uncaptured, for the time per step


@dataclass(frozen=True)
class Job:
    """``cause``: what the log calls the work that holds up the training; "" in healthy jobs."""

    run: str  # the function below that is the job
    cause: str = ""
    report: str = ""  # the public report of such a fault


JOBS = {
    "keras-checkpoint": Job("keras_checkpoint", "checkpoint", "keras-team/keras#9298"),
    "shuffle-refill": Job("shuffle_refill", "first batch", "tensorflow/tensorflow#47090"),
    "custom-evaluation": Job("custom_evaluation", "evaluation", "keras-team/keras#11267"),
    "histograms": Job("histograms", "summary", "tensorflow/tensorflow#24643"),
    "custom-checkpoint": Job("custom_checkpoint", "checkpoint", "deepchem/deepchem#458"),
    "jax-save": Job("jax_save", "checkpoint", "google/flax#1543"),
    "generator-stall": Job("generator_stall", "stall", "syang1993/gst-tacotron#50"),
    "healthy-keras": Job("healthy_keras"),
    "healthy-custom": Job("healthy_custom"),
    "healthy-jax": Job("healthy_jax"),
    "healthy-epochs": Job("healthy_epochs"),
    "healthy-long-steps": Job("healthy_long_steps"),
}


# -- the jobs -----------------------------------------------------------------------------------------------

class Log:
    """The job's own account: "TIME + NAME" where something begins, "TIME - NAME" where it ends."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

    def begin(self, name: str) -> None:
        os.write(self._file, f"{time.time()!r} + {name}\n".encode())

    def end(self, name: str) -> None:
        os.write(self._file, f"{time.time()!r} - {name}\n".encode())

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.begin(name)
        yield
        self.end(name)


class Keras:
    """What the Keras jobs share: a model of dense layers, rows in memory, the log as callbacks."""

    def __init__(self, port: int, log: Log) -> None:
        import tensorflow as tf

        tf.profiler.experimental.server.start(port)
        self.tf, self.log = tf, log
        rows = tf.random.stateless_normal([4096, 64], [1, 2])
        self.rows = (rows, tf.reduce_sum(rows, axis=1, keepdims=True))

    def model(self, width: int = WIDTH, layers: int = 3) -> Any:
        keras = self.tf.keras
        model = keras.Sequential([keras.Input([64]), *[keras.layers.Dense(width, "relu") for _ in range(layers)],
                                  keras.layers.Dense(1)])
        model.compile("adam", "mse")
        return model

    def batches(self) -> Any:
        return self.tf.data.Dataset.from_tensor_slices(self.rows).repeat().batch(BATCH).prefetch(2)

    def steps(self) -> Any:
        log, callback = self.log, self.tf.keras.callbacks.Callback

        class Steps(callback):  # type: ignore[misc, valid-type]
            def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
                log.begin("step")

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                log.end("step")

        return Steps()

    def around(self, name: str, inner: Any) -> list[Any]:
        """A callback between two that log what it does at the ends of epochs."""
        make = self.tf.keras.callbacks.LambdaCallback
        return [make(on_epoch_end=lambda epoch, logs: self.log.begin(name)), inner,
                make(on_epoch_end=lambda epoch, logs: self.log.end(name))]

    def custom(self, model: Any) -> tuple[Any, Any]:
        """A training step and an evaluation step of a loop without ``fit``."""
        tf = self.tf
        optimizer = tf.keras.optimizers.SGD(1e-4)
        optimizer.build(model.trainable_variables)

        @tf.function
        def train_step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return loss

        @tf.function
        def test_step(x: Any, y: Any) -> Any:
            return tf.reduce_mean(tf.square(model(x, training=False) - y))

        return train_step, test_step

    def loop(self, model: Any, every: int = 0, work: Callable[[int], None] | None = None) -> None:
        train_step, _ = self.custom(model)
        for number, (x, y) in enumerate(self.batches()):
            with self.log("step"):
                train_step(x, y).numpy()
            if work is not None and number % every == every - 1:
                work(number)


def keras_checkpoint(port: int, log: Log, fixed: bool, folder: Path) -> None:
    """A checkpoint of 100 MB at the end of each epoch of 20 steps."""
    keras, steps = Keras(port, log), 20
    save = keras.tf.keras.callbacks.ModelCheckpoint(
        str(folder / "model.keras"), save_freq=steps * 25 if fixed else "epoch")
    keras.model().fit(keras.batches(), steps_per_epoch=steps, epochs=10**6, verbose=0,
                      callbacks=[keras.steps(), *keras.around("checkpoint", save)])


def shuffle_refill(port: int, log: Log, fixed: bool, folder: Path) -> None:
    """Each epoch fills the shuffle buffer again, from a slow store, before its first batch."""
    keras = Keras(port, log)
    tf, size = keras.tf, 2048

    def read(x: Any, y: Any) -> Any:
        tf.numpy_function(lambda v: (time.sleep(0.001), v)[1], [y], tf.float32)
        return x, y

    rows = tf.data.Dataset.from_tensor_slices(keras.rows).take(size).map(read)
    rows = (rows.cache() if fixed else rows).shuffle(size).batch(BATCH).prefetch(2)
    state = {"waits": False}

    def began(epoch: int, logs: Any) -> None:
        state["waits"] = True
        log.begin("first batch")

    def ended(batch: int, logs: Any) -> None:
        if state["waits"]:
            log.end("first batch")
        state["waits"] = False

    keras.model().fit(rows, epochs=10**6, verbose=0, callbacks=[
        keras.steps(), tf.keras.callbacks.LambdaCallback(on_epoch_begin=began, on_train_batch_end=ended)])


def custom_evaluation(port: int, log: Log, fixed: bool, folder: Path) -> None:
    """A loop without ``fit`` that evaluates on 60 batches after every 20 steps."""
    keras = Keras(port, log)
    model = keras.model()
    _, test_step = keras.custom(model)
    held_out = keras.batches().take(60).cache()

    def evaluate(number: int) -> None:
        with log("evaluation"):
            sum(float(test_step(x, y)) for x, y in held_out)

    keras.loop(model, 20 * 25 if fixed else 20, evaluate)


def histograms(port: int, log: Log, fixed: bool, folder: Path) -> None:
    """TensorBoard's histograms and images of all weights at the end of each epoch of 20 steps. Needs TensorBoard."""
    keras = Keras(port, log)
    board = keras.tf.keras.callbacks.TensorBoard(
        str(folder), histogram_freq=25 if fixed else 1, write_images=not fixed, write_graph=False)
    keras.model(1024).fit(keras.batches(), steps_per_epoch=20, epochs=10**6, verbose=0,
                          callbacks=[keras.steps(), *keras.around("summary", board)])


def custom_checkpoint(port: int, log: Log, fixed: bool, folder: Path) -> None:
    """A loop without ``fit`` that writes a checkpoint after every 15 steps and waits for it."""
    keras = Keras(port, log)
    model = keras.model()
    checkpoints = keras.tf.train.CheckpointManager(keras.tf.train.Checkpoint(model=model), str(folder), max_to_keep=2)

    def save(number: int) -> None:
        with log("checkpoint"):
            checkpoints.save(number)

    keras.loop(model, 15 * 25 if fixed else 15, save)


def generator_stall(port: int, log: Log, fixed: bool, folder: Path) -> None:
    """A generator that reads a group of batches at once, for 3 s; fixed: a thread reads the next group meanwhile."""
    keras = Keras(port, log)
    tf, group = keras.tf, 80
    batches = [(x.numpy(), y.numpy()) for x, y in keras.batches().take(group)]

    def read_group() -> list[Any]:
        if not fixed:
            log.begin("stall")
        time.sleep(3.0)
        if not fixed:
            log.end("stall")
        return batches

    def rows() -> Iterator[Any]:
        ahead: queue.Queue[list[Any]] = queue.Queue(1)
        if fixed:
            threading.Thread(target=lambda: [ahead.put(read_group()) for _ in itertools.count()], daemon=True).start()
        while True:
            yield from ahead.get() if fixed else read_group()

    kinds = (tf.TensorSpec((BATCH, 64), tf.float32), tf.TensorSpec((BATCH, 1), tf.float32))
    data = tf.data.Dataset.from_generator(rows, output_signature=kinds).prefetch(2)
    keras.model().fit(data, steps_per_epoch=10**6, verbose=0, callbacks=[keras.steps()])


def healthy_keras(port: int, log: Log, fixed: bool, folder: Path) -> None:
    """``fit`` with a map that runs in parallel, and a prefetch."""
    keras = Keras(port, log)
    data = keras.batches().map(lambda x, y: (x * 0.5, y), num_parallel_calls=keras.tf.data.AUTOTUNE).prefetch(2)
    keras.model().fit(data, steps_per_epoch=10**6, verbose=0, callbacks=[keras.steps()])


def healthy_custom(port: int, log: Log, fixed: bool, folder: Path) -> None:
    """A loop without ``fit``."""
    keras = Keras(port, log)
    keras.loop(keras.model())


def healthy_epochs(port: int, log: Log, fixed: bool, folder: Path) -> None:
    """Epochs of 100 steps with a short validation, and callbacks that cost little."""
    keras = Keras(port, log)
    calls = keras.tf.keras.callbacks
    keras.model().fit(keras.batches(), steps_per_epoch=100, epochs=10**6, verbose=0,
                      validation_data=keras.batches().take(3),
                      callbacks=[keras.steps(), calls.CSVLogger(str(folder / "log.csv")),
                                 calls.ReduceLROnPlateau(patience=10**6), calls.TerminateOnNaN()])


def healthy_long_steps(port: int, log: Log, fixed: bool, folder: Path) -> None:
    """Steps of 0.5 to 1 s."""
    keras = Keras(port, log)
    data = keras.tf.data.Dataset.from_tensor_slices(keras.rows).repeat().batch(1024).prefetch(2)
    keras.model(WIDTH, 4).fit(data, steps_per_epoch=10**6, verbose=0, callbacks=[keras.steps()])


def _jax_step(port: int) -> tuple[Any, Any, Any]:
    import jax
    import jax.numpy as jnp

    jax.profiler.start_server(port)
    keys = jax.random.split(jax.random.PRNGKey(0), 4)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) * WIDTH**-0.5 for key in keys]
    state = {"weights": weights, "momentum": [jnp.zeros_like(w) for w in weights]}
    batch = jax.random.normal(keys[0], (BATCH, WIDTH))

    def loss(values: Any, x: Any) -> Any:
        for w in values:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    @jax.jit
    def train_step(state: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state["weights"], x)
        momentum = [0.9 * m + g for m, g in zip(state["momentum"], grads, strict=True)]
        new = [w - 1e-3 * m for w, m in zip(state["weights"], momentum, strict=True)]
        return {"weights": new, "momentum": momentum}, value

    return train_step, state, batch


def jax_save(port: int, log: Log, fixed: bool, folder: Path) -> None:
    """The whole state to the host and to a file, after every 20 steps."""
    import jax
    import numpy as np

    train_step, state, batch = _jax_step(port)
    for number in itertools.count():
        with log("step"):
            state, value = train_step(state, batch)
            value.block_until_ready()
        if number % (20 * 25 if fixed else 20) == 19:
            with log("checkpoint"):
                np.savez(folder / "state.npz", *jax.tree.leaves(jax.device_get(state)))


def healthy_jax(port: int, log: Log, fixed: bool, folder: Path) -> None:
    """A jitted step in a loop."""
    train_step, state, batch = _jax_step(port)
    while True:
        with log("step"):
            state, value = train_step(state, batch)
            value.block_until_ready()


# -- the runner ---------------------------------------------------------------------------------------------

class Mark(NamedTuple):
    name: str
    begin_s: float
    end_s: float


@dataclass
class Running:
    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def marks(self) -> list[Mark]:
        """All that the log holds until now; what has not ended yet ends now."""
        now = time.time()
        out: list[Mark] = []
        open_: dict[str, float] = {}
        for line in self.log.read_text().splitlines():
            at, sign, name = line.split(" ", 2)
            if sign == "+":
                open_[name] = float(at)
            elif name in open_:
                out.append(Mark(name, open_.pop(name), float(at)))
        return out + [Mark(name, begin_s, now) for name, begin_s in open_.items()]

    def steps(self) -> int:
        return sum(line.endswith("- step") for line in self.log.read_text().splitlines())

    def wait_for_steps(self, count: int) -> None:
        until = time.monotonic() + 240
        while self.steps() < count:
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{self.log} shows {self.steps()} steps of a job that ended or hangs")
            time.sleep(0.2)

    def step_s(self) -> float:
        """Wall time per step, over a while in which nothing records."""
        before, begin = self.steps(), time.monotonic()
        time.sleep(MEASURED_S)
        return (time.monotonic() - begin) / max(self.steps() - before, 1)


@contextmanager
def start(name: str, python: str, folder: Path, *, fixed: bool = False) -> Iterator[Running]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    log = folder / "job.log"
    log.touch()
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "JAX_PLATFORMS": "cpu"}
    with (folder / "job.out").open("wb") as output, subprocess.Popen(
            [python, __file__, "--job", name, str(port), str(log), "fixed" if fixed else "faulty"],
            stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, env=env) as process:
        try:
            yield Running(process, port, log)
        finally:
            process.kill()


class Seen(NamedTuple):
    """What gputop says of a capture, and what the log says of the same window."""

    document: dict[str, Any]
    text: str
    begin_s: float
    end_s: float
    marks: list[Mark]


def gputop(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "gputop", *arguments], capture_output=True, text=True, timeout=300,
                          check=False, cwd=ROOT)


def capture(job: Running, folder: Path, seconds: float | None) -> Seen:
    from gputop.trace.readers.load import load

    asked = ["--seconds", f"{seconds:g}"] if seconds is not None else []
    done = gputop("capture", "--attach", f"127.0.0.1:{job.port}", "--logdir", str(folder), "--json", *asked)
    (folder / "capture.json").write_text(done.stdout)
    (folder / "capture.err").write_text(done.stderr)
    if not done.stdout.startswith("{"):
        raise RuntimeError(f"no capture: {done.stderr[-500:]}")
    marks = job.marks()
    run = next((folder / "plugins" / "profile").iterdir())
    text = gputop("analyze", str(run))
    (folder / "report.txt").write_text(text.stdout + text.stderr)
    trace = load([run])
    begin_ns, end_ns = trace.profile_window_ns or trace.window_ns
    return Seen(json.loads(done.stdout), text.stdout, (trace.origin_ns + begin_ns) / 1e9,
                (trace.origin_ns + end_ns) / 1e9, marks)


def truth(seen: Seen, cause: str) -> dict[str, float]:
    """Shares of the recorded window by the job's log: its steps, the cause (also inside of steps), and the rest."""
    length = seen.end_s - seen.begin_s

    def spans(name: str) -> list[tuple[float, float]]:
        cut = [(max(mark.begin_s, seen.begin_s), min(mark.end_s, seen.end_s)) for mark in seen.marks
               if mark.name == name]
        return sorted(span for span in cut if span[1] > span[0])

    lost, steps = spans(cause), spans("step")
    both = sum(max(min(a[1], b[1]) - max(a[0], b[0]), 0.0) for a in lost for b in steps)
    lost_s, steps_s = sum(b - a for a, b in lost), sum(b - a for a, b in steps) - both
    out = {"steps": steps_s / length, **({cause: lost_s / length} if cause else {})}
    return {**out, "other": 1 - sum(out.values())}


def _edge(seen: Seen, cause: str) -> str:
    """Whether the cause was under way where the recording begins or ends."""
    at = {"begin": seen.begin_s, "end": seen.end_s}
    found = [name for name, time_s in at.items() if any(
        mark.name == cause and mark.begin_s < time_s < mark.end_s for mark in seen.marks)]
    return f" (open at its {' and '.join(found)})" if found else ""


def row(name: str, seen: Seen) -> str:
    wall, cause = seen.document["wall_time"], JOBS[name].cause
    listed = ", ".join(f"{share:.0%} {what}" for what, share in truth(seen, cause).items()) + _edge(seen, cause)
    parts = sorted(wall["parts"], key=lambda part: -part["time_s"])
    said = ", ".join(f"{part['time_s'] / wall['recorded_s']:.0%} {part['id']}" + (
        f" ({' '.join(filter(None, (part['kind'], part['what'])))})" if part["kind"] else "")
        for part in parts if part["time_s"] >= 0.01 * wall["recorded_s"])
    found = "; ".join(" ".join((finding["severity"], finding["id"], *(
        f"[{culprit['name']}]" for culprit in finding["culprits"][:1]))) for finding in seen.document["findings"][:3])
    count = (seen.document["steps"] or {}).get("count", 0)
    cells = (name, f"{wall['recorded_s']:.1f} s, {count} steps", listed, said, found or "none", verdict(seen))
    return f"| {' | '.join(cells)} |"


def verdict(seen: Seen) -> str:
    """The paragraph that says what limits the job, or why that is not judged."""
    begins = ("No ", "Nothing to advise", "The ", "Training steps are", *"123456789")
    return next((" ".join(paragraph.split()) for paragraph in seen.text.split("\n\n")[1:]
                 if paragraph.startswith(begins) and not re.match(r"\d+\. |\d+ causes? could", paragraph)), "")


def run(name: str, python: str, kept: Path, runs: int, seconds: float | None) -> None:
    job, per_step = JOBS[name], []
    for number in range(runs):
        folder = kept / f"{name}-{number}"
        folder.mkdir(parents=True)
        with start(name, python, folder) as running:
            running.wait_for_steps(WARM_UP_STEPS)
            if job.cause:
                per_step.append(running.step_s())
            time.sleep(random.uniform(0, 4))  # to begin at any moment of the job's rhythm
            seen = capture(running, folder, seconds)
        print(row(name, seen), flush=True)
    if not job.cause:
        return
    with tempfile.TemporaryDirectory() as scratch, start(name, python, Path(scratch), fixed=True) as running:
        running.wait_for_steps(WARM_UP_STEPS * 5)
        fixed_s = running.step_s()
    faulty_s = sum(per_step) / len(per_step)
    print(f"| {name}, fixed | | {1e3 * faulty_s:.0f} → {1e3 * fixed_s:.0f} ms per step "
          f"({1 - fixed_s / faulty_s:.0%} less) | | | |", flush=True)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=", ".join(JOBS))
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--seconds", type=float, help="what each capture asks for (default: gputop's)")
    parser.add_argument("--jax-python", help="a Python that has JAX; without it the JAX jobs are left out")
    parser.add_argument("--keep", type=Path, help="an empty folder for logs, traces and reports (default: keep none)")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        print(f"Load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs\n")
        print("| job | recorded | truth (log) | gputop | findings | verdict |\n|---|---|---|---|---|---|", flush=True)
        for name in args.jobs or JOBS:
            python = args.jax_python if "jax" in name else sys.executable
            if python is not None:
                run(name, python, args.keep or Path(scratch), args.runs, args.seconds)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
        with tempfile.TemporaryDirectory() as own:
            globals()[JOBS[sys.argv[2]].run](int(sys.argv[3]), Log(sys.argv[4]), sys.argv[5] == "fixed", Path(own))
    else:
        sys.path.insert(0, str(ROOT))
        main(sys.argv[1:])
