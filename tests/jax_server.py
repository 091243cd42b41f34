"""A JAX job with a profiler server, in a Python of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.listening import free_port


@contextlib.contextmanager
def jax_job(python: Path) -> Iterator[tuple[str, int, str]]:
    """Address, pid and version of a JAX job that steps."""
    port = free_port()
    script = Path(__file__).with_name("jax_job.py")
    with subprocess.Popen([str(python), str(script), str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, text=True,
                          env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONSAFEPATH": "1"}) as process:
        try:
            assert process.stdout is not None
            version = process.stdout.readline().strip()
            assert version, f"the job ended with {process.wait()}"
            yield f"127.0.0.1:{port}", process.pid, version
        finally:
            process.kill()
