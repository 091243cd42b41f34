"""Jobs for these tests: processes of fake_client.py."""

from __future__ import annotations

import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from gputop.profiler.kineto.clients import DaemonClient, client_of
from tests.processes import once_ready

_FAKE = Path(__file__).with_name("fake_client.py")


def fake_job(folder: Path, mode: str = "good", **environ: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """A process whose socket is bound; killed at the end of the block."""
    return once_ready(sys.executable, str(_FAKE), str(folder), mode, env=environ)


def found(process: subprocess.Popen[str]) -> DaemonClient:
    """The client that it is."""
    client = client_of(process.pid)
    assert client is not None
    return client
