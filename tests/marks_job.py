"""A job that marks its steps by gputop.marks and profiles itself, for tests: ``keras FOLDER`` or ``jax FOLDER``.

It prints how many steps of training and of evaluation it made while it was profiled.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from gputop import marks

EPOCHS, STEPS, TESTS, BATCH = 2, 12, 5, 16
made: Counter[str] = Counter()


def counting(name: str, function: Any) -> Any:
    def counted(*args: Any) -> Any:
        made[name] += 1
        return function(*args)

    return counted


def run_keras(folder: str) -> None:
    import keras
    import numpy as np
    import tensorflow as tf

    def counted(name: str) -> Any:  # ops run by a py_function tell what truly ran, and not what was marked
        def count(x: Any, y: Any) -> tuple[Any, Any]:
            def added(x: Any) -> Any:
                made[name] += 1
                return x

            whole = tf.py_function(added, [x], tf.float32)
            whole.set_shape((BATCH, 8))
            return whole, y

        return count

    def data(name: str, batches: int) -> Any:
        x, y = np.ones((BATCH * batches, 8), np.float32), np.ones((BATCH * batches, 1), np.float32)
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).map(counted(name))

    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    fit = {"verbose": 0, "callbacks": [marks.keras_callback()], "validation_data": data("test", TESTS)}
    model.fit(data("train", STEPS), epochs=1, **fit)
    made.clear()
    with tf.profiler.experimental.Profile(folder):
        model.fit(data("train", STEPS), epochs=EPOCHS, **fit)
    assert "_Marked" not in repr(model.train_function), "it is as it was before"


def run_jax(folder: str) -> None:
    import jax
    import jax.numpy as jnp

    step = counting("train", jax.jit(lambda w, x: w - 1e-3 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)))
    test = counting("test", jax.jit(lambda w, x: jnp.mean((x @ w) ** 2)))
    weights, batches = jnp.ones((128, 128)), [jnp.ones((64, 128))] * STEPS
    test(step(weights, batches[0]), batches[0]).block_until_ready()
    made.clear()
    with jax.profiler.trace(folder):
        for epoch in range(EPOCHS):
            with marks.span("epoch"):
                for batch in marks.steps(batches, first=epoch * STEPS):
                    weights = step(weights, batch).block_until_ready()
            with marks.span("evaluation"):
                for batch in marks.steps(batches[:TESTS], "test"):
                    test(weights, batch).block_until_ready()


if __name__ == "__main__":
    {"keras": run_keras, "jax": run_jax}[sys.argv[1]](sys.argv[2])
    print(made["train"], made["test"])
