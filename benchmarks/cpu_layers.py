"""The layers of a real Keras model as gputop tells them from a trace of the CPU, beside what is known of them. Needs
TensorFlow.

    python benchmarks/cpu_layers.py

Each convolution and dense layer is also built alone and timed, forward and with its gradients, and its FLOPs are
counted by hand. The table, with what explains the differences: benchmarks/cpu_layers.md.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

from gputop.analysis.results import Analysis
from gputop.diagnosis.diagnose import analyze

BATCH, SIZE, STEPS, REPEATS = 64, 32, 12, 15
CONVOLUTIONS = {"conv_a": (16, 32), "conv_b": (32, 64), "conv_c": (64, 64)}  # channels: 1, 4 and 8 times the products
DENSE = {"dense_a": (4096, 1024), "dense_b": (1024, 1024)}
L = tf.keras.layers


def layer(name: str) -> Any:
    if name in CONVOLUTIONS:
        return L.Conv2D(CONVOLUTIONS[name][1], 3, padding="same", name=name)
    return L.Dense(DENSE[name][1], name=name)


def flops(name: str) -> float:
    """Of the forward pass; of a row of places the outer two lack one of three neighbors."""
    if name in CONVOLUTIONS:
        in_, out = CONVOLUTIONS[name]
        return 2.0 * BATCH * in_ * out * (3 * SIZE - 2) ** 2
    in_, out = DENSE[name]
    return 2.0 * BATCH * in_ * out


def model() -> Any:
    return tf.keras.Sequential([L.Input((SIZE, SIZE, 16)), *map(layer, CONVOLUTIONS), L.AveragePooling2D(4),
                                L.Flatten(), *map(layer, DENSE), L.Dense(10)])


def traced(folder: str, *, jit: bool) -> Analysis:
    net = model()
    net.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=jit)
    x = np.random.default_rng(0).random((BATCH * STEPS, SIZE, SIZE, 16), "f")
    y = np.zeros(BATCH * STEPS, int)
    net.fit(x, y, batch_size=BATCH, verbose=0)
    tf.profiler.experimental.start(folder, tf.profiler.experimental.ProfilerOptions(host_tracer_level=2))
    net.fit(x, y, batch_size=BATCH, verbose=0)
    tf.profiler.experimental.stop()
    return analyze(str(next(Path(folder).glob("plugins/profile/*/*.xplane.pb"))))


def alone(name: str, *, jit: bool) -> tuple[float, float]:
    """Seconds of the layer's forward pass, and of it with the gradients that training needs of it."""
    one = layer(name)
    shape = (BATCH, SIZE, SIZE, CONVOLUTIONS[name][0]) if name in CONVOLUTIONS else (BATCH, DENSE[name][0])
    x = tf.random.uniform(shape)
    one(x)

    @tf.function(jit_compile=jit)
    def forward(x: tf.Tensor) -> tf.Tensor:
        return one(x)

    @tf.function(jit_compile=jit)
    def both(x: tf.Tensor, dy: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = one(x)
        wanted = [one.kernel, one.bias, *([x] if name != next(iter(CONVOLUTIONS)) else [])]
        return y, tape.gradient(y, wanted, output_gradients=dy)

    dy = tf.ones_like(forward(x))
    return timed(lambda: forward(x)), timed(lambda: both(x, dy))


def timed(call: Callable[[], Any]) -> float:
    call(), call()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        tf.nest.map_structure(lambda t: t.numpy(), call())
        times.append(time.perf_counter() - began)
    return median(times)


def of_layer(found: Analysis, phase: str, name: str) -> float:
    """Seconds per step of the rows of a layer that are in no other row of it."""
    table = found.cpu_layers
    assert table is not None
    path: list[str] = []
    total = 0.0
    for row, parent in zip(table.rows, table.parents, strict=True):
        path.append(row.name if parent is None else f"{path[parent]}/{row.name}")
        inside = parent is not None and f"/{name}" in path[parent]
        if path[-1].startswith(phase) and f"/{name}" in path[-1] and not inside:
            total += row.device_s
    return total


def main() -> None:
    for jit in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            found = traced(folder, jit=jit)
        assert found.cpu_layers is not None and found.steps is not None
        names = [*CONVOLUTIONS, *DENSE]
        figures = {name: (of_layer(found, "forward", name), of_layer(found, "backward", name), *alone(name, jit=jit))
                   for name in names}
        sums = [sum(column) for column in zip(*figures.values(), strict=True)]
        whole, by_hand = sums[0] + sums[1], sum(products(name) for name in names)
        rows = [row for row in found.cpu_layers.rows if row.parent is None]
        print(f"\n## {'jit_compile=True' if jit else 'graph'}, TensorFlow {tf.__version__}, {os.cpu_count()} CPUs\n")
        print(f"The mean step takes {found.cpu_layers.total_s * 1e3:.1f} ms, of which these layers "
              f"{whole * 1e3:.1f} ms ({whole / found.cpu_layers.total_s:.0%}); timed alone, one after the other, they "
              f"take {sums[3] * 1e3:.1f} ms. Phases: " + ", ".join(f"{r.name} {r.share:.1%}" for r in rows) + ".\n")
        print("| layer | forward, ms: gputop | alone | forward and backward, ms: gputop | alone | share: gputop | "
              "alone | FLOPs |\n|---|---|---|---|---|---|---|---|")
        for name, (forward, backward, own_forward, own) in figures.items():
            print(f"| {name} | {forward * 1e3:.2f} | {own_forward * 1e3:.2f} | {(forward + backward) * 1e3:.2f} | "
                  f"{own * 1e3:.2f} | {(forward + backward) / whole:.1%} | {own / sums[3]:.1%} | "
                  f"{products(name) / by_hand:.1%} |")


def products(name: str) -> float:
    return flops(name) * (2 if name == next(iter(CONVOLUTIONS)) else 3)


if __name__ == "__main__":
    sys.exit(main())
