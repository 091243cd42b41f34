"""Small JAX training jobs, each with one known fault, next to the same job fixed.

    python benchmarks/h200/jax_jobs.py NAME --port 6009 --log steps.json [--scale 1.0]

The job imports JAX, prints "imported", and waits for a line; then it serves its profiler on ``--port``, prints
"ready" after some steps, and trains until SIGTERM or SIGINT. It writes the Unix time at the end of every step.
``--scale`` makes the arrays smaller, for a machine without a GPU. The faults are those a JAX program can have on one
GPU: see :data:`JOBS`.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from common import Job, Loop, Stepped, parser, run_until_signaled, wait_to_begin

Step = Callable[[int], Any]  # makes one step's work and returns what to wait for


def _sizes(scale: float, width: int = 8192) -> int:
    return max(64, round(width * scale) // 64 * 64)


def _network(scale: float, dtype: str, precision: str | None = None, layers: int = 4) -> tuple[Any, Any, Any]:
    """Parameters, one batch and a jitted training step of a plain multi-layer perceptron."""
    import jax
    import jax.numpy as jnp

    width = _sizes(scale)
    keys = jax.random.split(jax.random.key(0), layers + 1)
    weights = [jax.random.normal(key, (width, width), dtype) * width ** -0.5 for key in keys[1:]]
    batch = jax.random.normal(keys[0], (width, width), dtype)

    def loss(weights: Any, batch: Any) -> Any:
        x = batch
        for w in weights:
            x = jax.nn.relu(jnp.matmul(x, w, precision=precision))
        return jnp.mean(jnp.square(x).astype("float32"))

    @jax.jit
    def train(weights: Any, batch: Any) -> Any:
        gradients = jax.grad(loss)(weights, batch)
        return [w - (1e-3 * g).astype(w.dtype) for w, g in zip(weights, gradients, strict=True)]

    return weights, batch, train


def _training(scale: float, dtype: str, precision: str | None = None) -> Step:
    weights, batch, train = _network(scale, dtype, precision)

    def step(_: int) -> Any:
        nonlocal weights
        weights = train(weights, batch)
        return weights

    return step


def _host_work(scale: float) -> Step:
    """Python between the steps, the GPU idle meanwhile: a metric fetched and 30 ms of bookkeeping."""
    inner = _training(scale / 2, "bfloat16")

    def step(i: int) -> Any:
        out = inner(i)
        out[0].block_until_ready()
        end = time.perf_counter() + 0.03
        while time.perf_counter() < end:
            sum(range(1000))
        return out

    return step


def _small_kernels(scale: float, *, jitted: bool) -> Step:
    """Some 300 elementwise operations on small arrays, launched one by one or fused by XLA."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones((_sizes(scale, 1024), 256))

    def chain(x: Any) -> Any:
        for k in range(100):
            x = jnp.tanh(x * 1.001 + k * 1e-6)
        return x

    run = jax.jit(chain) if jitted else chain

    def step(_: int) -> Any:
        nonlocal x
        x = run(x)
        return x

    return step


def _copies(scale: float, *, resident: bool) -> Step:
    """A batch of 512 MB that goes to the GPU, and back, every step; or lies there."""
    import jax
    import numpy as np

    host = np.ones((_sizes(scale), 16384), np.float32)
    weights, batch, train = _network(scale / 2, "bfloat16", layers=2)
    there = jax.device_put(host)
    total = jax.jit(lambda a: (a * 2.0).sum(axis=1))

    def step(_: int) -> Any:
        nonlocal weights
        data = there if resident else jax.device_put(host)
        sums = total(data)
        weights = train(weights, batch)
        if not resident:
            np.asarray(data[: len(host) // 4])
        return sums, weights

    return step


def _input(scale: float, *, prefetch: bool) -> Step:
    """Batches that take 25 ms to make: made while the GPU waits, or by a thread ahead of it."""
    import jax
    import numpy as np

    weights, _, train = _network(scale / 2, "bfloat16")
    shape = weights[0].shape
    random = np.random.default_rng(0)
    ready: queue.Queue[Any] = queue.Queue(4)

    def make() -> Any:
        with jax.profiler.TraceAnnotation("make_batch"):
            end = time.perf_counter() + 0.025
            while time.perf_counter() < end:
                random.standard_normal(1 << 14)
            return np.ones(shape, jax.numpy.bfloat16)

    def produce() -> None:
        while True:
            ready.put(make())

    if prefetch:
        for _ in range(3):
            threading.Thread(target=produce, daemon=True).start()

    def step(_: int) -> Any:
        nonlocal weights
        weights = train(weights, jax.device_put(ready.get() if prefetch else make()))
        weights[0].block_until_ready()
        return weights

    return step


JOBS = {
    "healthy_bf16": Job(lambda s: _training(s, "bfloat16")),
    "fp32": Job(lambda s: _training(s / 2, "float32", "highest"), "tensor_cores_unused", "tf32"),
    "tf32": Job(lambda s: _training(s / 2, "float32", "default")),
    "host_work": Job(_host_work, "step_gap_host", "no_host_work"),
    "no_host_work": Job(lambda s: _training(s / 2, "bfloat16")),
    "small_kernels": Job(lambda s: _small_kernels(s, jitted=False), "launch_bound", "fused"),
    "fused": Job(lambda s: _small_kernels(s, jitted=True)),
    "copies": Job(lambda s: _copies(s, resident=False), "copies_excessive", "resident"),
    "resident": Job(lambda s: _copies(s, resident=True)),
    # JAX has no input pipeline of its own: to the trace this is work of the host, under its own name.
    "slow_input": Job(lambda s: _input(s, prefetch=False), "step_gap_host", "prefetched"),
    "prefetched": Job(lambda s: _input(s, prefetch=True)),
}


def _loop(step: Step, *, markers: bool) -> Loop:
    """A training loop of this step, which waits for what each step makes."""
    import jax

    def loop(stepped: Stepped) -> None:
        for number in itertools.count():
            with jax.profiler.StepTraceAnnotation("train", step_num=number) if markers else contextlib.nullcontext():
                jax.block_until_ready(step(number))
            stepped()

    return loop


def main() -> None:
    arguments = parser(JOBS, __doc__)
    arguments.add_argument("--port", type=int, help="of the profiler server (default: none)")
    arguments.add_argument("--no-markers", action="store_true", help="do not mark the steps in the trace")
    options = arguments.parse_args()

    import jax

    wait_to_begin()
    if options.port:
        jax.profiler.start_server(options.port)
    run_until_signaled(
        _loop(JOBS[options.job].make(options.scale), markers=not options.no_markers), options.log,
        {"job": options.job, "platform": jax.devices()[0].platform, "device": jax.devices()[0].device_kind,
         "jax": jax.__version__})


if __name__ == "__main__":
    main()
