"""Jobs for these tests: processes of fake_client.py."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from gputop.profiler.kineto.clients import DaemonClient, client_of

_FAKE = Path(__file__).with_name("fake_client.py")


@contextlib.contextmanager
def fake_job(folder: Path, mode: str = "good", **environ: str) -> Iterator[subprocess.Popen[str]]:
    """A process whose socket is bound; killed at the end of the block."""
    with subprocess.Popen([sys.executable, str(_FAKE), str(folder), mode], stdout=subprocess.PIPE, text=True,
                          env=environ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def found(process: subprocess.Popen[str]) -> DaemonClient:
    """The client that it is."""
    client = client_of(process.pid)
    assert client is not None
    return client
