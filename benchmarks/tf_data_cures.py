"""What the cures of a slow tf.data pipeline bring: each on a real TensorFlow job on the CPU, before and after.

    python benchmarks/tf_data_cures.py [--seconds 6] [--case NAME ...]

The step itself only sleeps (10 ms), so that the pipeline has the processors; its mean over the run, epoch
starts included, is what is told. Each case has the pipeline as it is found, and one line for each cure.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

STEP_S = 0.010
BATCH = 16
ELEMENTS = 1024  # of an epoch
SIDE = 128  # of an image
SPIN = 40_000  # turns of a Python loop, as a tokenizer or a parser in Python does


def _python(value: int) -> float:
    """Work that holds Python's lock."""
    total = 0.0
    for i in range(SPIN):
        total += (value * i) % 7
    return total


def _fill(batches: Any) -> None:
    while True:
        batches.put([_python(i) for i in range(BATCH)])


def _steps(dataset: Any, seconds: float) -> float:
    """Mean seconds of a step over so long, after a warm-up of ten."""
    def epochs() -> Iterator[Any]:
        while True:  # as Keras does; one that repeats has one epoch
            yield from dataset

    batches = epochs()
    for _ in range(10):
        next(batches)
    began, steps = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        next(batches)
        time.sleep(STEP_S)
        steps += 1
    return (time.monotonic() - began) / steps


class _Ahead:
    """A dataset of which the next epoch's iterator is made while one still goes, and begins at once (warm start)."""

    def __init__(self, tf: Any, dataset: Any) -> None:
        options = tf.data.Options()
        options.experimental_warm_start = True
        self._dataset = dataset.with_options(options)

    def __iter__(self) -> Iterator[Any]:
        following = iter(self._dataset)
        while True:
            current, following = following, iter(self._dataset)
            yield from current


def _shuffle(tf: Any) -> Iterator[tuple[str, Any]]:
    """Half an epoch in the buffer, behind a read of 0.4 ms per element: fast enough but for the start of an epoch."""
    def read(i: Any) -> Any:
        return tf.numpy_function(lambda v: (time.sleep(0.0004), v)[1], [i], tf.int64)

    source = tf.data.Dataset.range(ELEMENTS).map(read)
    yield "found: shuffle, a new iterator each epoch", source.shuffle(512).batch(BATCH).prefetch(2)
    yield "deeper prefetch (16)", source.shuffle(512).batch(BATCH).prefetch(16)
    yield "shuffle, batch, repeat", source.shuffle(512).batch(BATCH).repeat().prefetch(2)
    yield "shuffle and repeat at once", source.shuffle(512).repeat().batch(BATCH).prefetch(2)
    yield "next epoch's iterator begun ahead", _Ahead(tf, source.shuffle(512).batch(BATCH).prefetch(2))
    yield "repeat before shuffle", source.repeat().shuffle(512).batch(BATCH).prefetch(2)


def _python_in_map(tf: Any) -> Iterator[tuple[str, Any]]:
    def call(i: Any) -> Any:
        return tf.numpy_function(lambda v: _python(int(v)), [i], tf.float64)

    def ops(i: Any) -> Any:
        value = tf.cast(i, tf.float64)
        return tf.reduce_sum(tf.math.floormod(value * tf.range(SPIN, dtype=tf.float64), 7.0))

    source = tf.data.Dataset.range(1 << 40)
    yield "found: numpy_function in map", source.map(call).batch(BATCH).prefetch(2)
    yield "num_parallel_calls=AUTOTUNE", source.map(call, num_parallel_calls=tf.data.AUTOTUNE).batch(BATCH).prefetch(2)
    yield "TensorFlow ops", source.map(ops).batch(BATCH).prefetch(2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records"
        with tf.io.TFRecordWriter(str(path)) as file:
            for i in range(ELEMENTS):
                file.write(tf.io.serialize_tensor(tf.constant(_python(i), tf.float64)).numpy())
        records = tf.data.TFRecordDataset(str(path)).map(lambda r: tf.io.parse_tensor(r, tf.float64))
        yield "done once, in TFRecords", records.repeat().batch(BATCH).prefetch(2)
    context = get_context("spawn")
    batches = context.Queue(8)
    workers = [context.Process(target=_fill, args=(batches,), daemon=True) for _ in range(2)]
    for worker in workers:
        worker.start()
    yield "two processes that fill a queue", tf.data.Dataset.from_generator(
        lambda: iter(batches.get, None), output_signature=tf.TensorSpec((BATCH,), tf.float64)).prefetch(2)
    for worker in workers:
        worker.terminate()


def _generator(tf: Any) -> Iterator[tuple[str, Any]]:
    def rows() -> Iterator[float]:
        i = 0
        while True:
            yield _python(i)
            i += 1

    signature = tf.TensorSpec((), tf.float64)
    yield "found: from_generator", tf.data.Dataset.from_generator(rows, output_signature=signature).batch(
        BATCH).prefetch(2)
    yield "interleave of 4 generators", tf.data.Dataset.range(4).interleave(
        lambda _: tf.data.Dataset.from_generator(rows, output_signature=signature), cycle_length=4,
        num_parallel_calls=4).batch(BATCH).prefetch(2)


def _decode(tf: Any) -> Iterator[tuple[str, Any]]:
    pixels = tf.cast(tf.random.uniform([8 * SIDE, 8 * SIDE, 3], 0, 255, tf.int32), tf.uint8)
    images = [tf.io.encode_jpeg(pixels).numpy()] * 256

    def decode(image: Any) -> Any:
        return tf.image.resize(tf.io.decode_jpeg(image, channels=3), [SIDE, SIDE])

    source = tf.data.Dataset.from_tensor_slices(images)
    yield "found: decode in each epoch", source.map(decode, num_parallel_calls=tf.data.AUTOTUNE).repeat().batch(
        BATCH).prefetch(2)
    size = 256 * SIDE * SIDE * 3 * 4
    decoded = source.map(decode, num_parallel_calls=tf.data.AUTOTUNE)
    yield f"cache ({size / 1e6:.0f} MB)", decoded.cache().repeat().batch(BATCH).prefetch(2)


CASES: dict[str, Callable[[Any], Iterator[tuple[str, Any]]]] = {
    "shuffle": _shuffle, "python": _python_in_map, "generator": _generator, "decode": _decode}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--case", nargs="*", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1")
    import tensorflow as tf

    print(f"TensorFlow {tf.__version__}, {os.cpu_count()} CPUs, Python {sys.version.split()[0]}; "
          f"a step of {STEP_S * 1e3:.0f} ms waits for nothing")
    for name in arguments.case:
        print(name)
        found: float | None = None
        for what, dataset in CASES[name](tf):
            step_s = _steps(dataset, arguments.seconds)
            found = found or step_s
            print(f"  {what:40} {step_s * 1e3:7.1f} ms a step {found / step_s:6.1f}×", flush=True)


if __name__ == "__main__":
    main()
