"""A real job of two workers for tests: tf.distribute's MultiWorkerMirroredStrategy on the CPU of one machine.

``start_workers`` starts this file twice, each with a profiler server; the workers train until the block ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from tests import forked_processes
from tests.forked_processes import Forked
from tests.listening import free_port
from tests.tf_job import READY_TIMEOUT_S
from tests.waiting import until


@dataclass(frozen=True)
class Workers:
    """A running job. ``servers`` are the addresses of its workers' profiler servers."""

    servers: list[str]
    processes: list[Forked]

    def crashed(self) -> bool:
        """Whether a worker dies of a signal, which may take a while: it answers no more before it is gone.

        TensorFlow 2.21 does so now and then when a worker that serves other workers' calls is captured,
        by its own client too ("double free or corruption", and faults in libtensorflow_framework, in
        the profiler server's thread).
        """
        with contextlib.suppress(AssertionError):
            return until(lambda: any((process.poll() or 0) < 0 for process in self.processes))
        return False


@contextlib.contextmanager
def start_workers(*, late: int | None = None) -> Iterator[Workers]:
    """Run two workers until the block ends; they step when this returns. The one that is ``late`` does not come to the
    seventh step: it waits for a batch that never comes."""
    cluster = {"worker": [f"127.0.0.1:{free_port()}" for _ in range(2)]}
    ports = [free_port() for _ in range(2)]
    processes: list[Forked] = []
    try:
        for index, port in enumerate(ports):
            config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
            env = {**os.environ, "TF_CONFIG": config, "TF_CPP_MIN_LOG_LEVEL": "3", "TF_NUM_INTRAOP_THREADS": "1",
                   "CUDA_VISIBLE_DEVICES": "-1"}
            arguments = [str(port), *["late"] * (index == late)]
            processes.append(forked_processes.start(Path(__file__).resolve(), arguments, env, stderr=2))
        deadline = time.monotonic() + READY_TIMEOUT_S
        for process in processes:
            left_s = max(0.0, deadline - time.monotonic())
            assert select.select([process.stdout], [], [], left_s)[0], "a worker does not start"
            assert process.stdout.readline() == "ready\n", f"a worker ended with {process.wait()}"
        yield Workers([f"127.0.0.1:{port}" for port in ports], processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                pipe.close()


def late_batch() -> None:
    threading.Event().wait()  # for ever


def _train(port: int, late: bool) -> None:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    tf.profiler.experimental.server.start(port)
    with strategy.scope():
        weights = tf.Variable(tf.ones([256, 256]))

    @tf.function
    def step(batch: tf.Tensor) -> tf.Tensor:
        def replica(batch: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.matmul(batch, weights)))
            gradient = tape.gradient(loss, weights)
            weights.assign_sub(1e-3 * tf.distribute.get_replica_context().all_reduce("SUM", gradient))
            return loss

        return strategy.run(replica, args=(batch,))

    batch = tf.ones([128, 256])
    for number in count():
        with tf.profiler.experimental.Trace("train", step_num=number, _r=1):
            step(batch)
        time.sleep(0.02)  # two workers that never rest leave the rest of a test run no core
        if number == 5:
            print("ready", flush=True)
            if late:
                late_batch()


if __name__ == "__main__":
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    _train(int(sys.argv[1]), "late" in sys.argv)
