"""A real JAX training job on the CPU with a profiler server, for tests; run as a script with the port."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path


@contextlib.contextmanager
def jax_job(python: Path) -> Iterator[tuple[str, int, str]]:
    """Address, pid and version of a job that steps, in a Python of its own."""
    from tests.listening import free_port  # not above: the job itself runs without this repository on its path

    port = free_port()
    with subprocess.Popen([str(python), str(Path(__file__).resolve()), str(port)], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                          env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONSAFEPATH": "1"}) as process:
        try:
            assert process.stdout is not None
            version = process.stdout.readline().strip()
            assert version, f"the job ended with {process.wait()}"
            yield f"127.0.0.1:{port}", process.pid, version
        finally:
            process.kill()


def _train(port: int) -> None:
    import jax
    import jax.numpy as jnp

    jax.profiler.start_server(port)
    step = jax.jit(lambda weights, batch: weights - 1e-3 * jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(weights))
    weights, batch = jnp.ones((128, 128)), jnp.ones((64, 128))
    for number in count():
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            weights = step(weights, batch).block_until_ready()
        time.sleep(0.02)  # one that never rests leaves the rest of a test run no core
        if number == 10:
            print(jax.__version__, flush=True)


if __name__ == "__main__":
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    _train(int(sys.argv[1]))
