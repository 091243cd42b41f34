"""Jobs for these tests: processes of fake_client.py, and the folders of their sockets."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath

import pytest

from gputop.profiler.kineto import daemon
from gputop.profiler.kineto.clients import DaemonClient, client_of
from gputop.profiler.kineto.folder import SocketFolder
from tests.processes import once_ready

USER = 12345  # another one
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be another user, or in another root")
_FAKE = Path(__file__).with_name("fake_client.py")


def fake_job(folder: Path, mode: str = "good", **environ: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """A process whose socket is bound; killed at the end of the block."""
    return once_ready(sys.executable, str(_FAKE), str(folder), mode, env=environ)


def found(process: subprocess.Popen[str]) -> DaemonClient:
    """The client that it is."""
    client = client_of(process.pid)
    assert client is not None
    return client


def opened(folder: Path | str, pid: int | None = None, uid: int | None = None) -> SocketFolder:
    """By default the folder of a socket of this process and its user."""
    return SocketFolder.open(os.getpid() if pid is None else pid, PurePosixPath(folder),
                             os.geteuid() if uid is None else uid)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[daemon.Daemon]:
    with opened(folder) as sockets, daemon.serving(sockets) as server:
        yield server
