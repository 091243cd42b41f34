"""Makes a running process ready for captures, by the way that its framework has."""

from __future__ import annotations

import threading

from gputop.core.framework import loaded_frameworks
from gputop.core.proc import read_maps
from gputop.launch import attach, kineto, target
from gputop.launch.attach import Ready
from gputop.text.units import printable


def is_pytorch(pid: int) -> bool:
    """Return whether PyTorch is what is captured of a process: a job of TensorFlow or JAX may have it loaded for its
    data."""
    try:
        loaded = loaded_frameworks(read_maps(pid))
    except OSError:
        return False
    return "pytorch" in loaded and not loaded & target.SERVED


def examine(pid: int, started: int | None = None) -> target.Target:
    """Inspect a process without touching it; raises GputopError with the reason why it cannot be made ready.

    ``started``: see :func:`gputop.launch.target.examine`."""
    frameworks = kineto.FRAMEWORKS if is_pytorch(pid) else target.SERVED
    return target.examine(pid, frameworks=frameworks, started=started)


def what_it_does(pid: int) -> str:
    """Words for what is done to the process, for the question."""
    return kineto.WHAT_SWITCHING_ON_DOES if is_pytorch(pid) else target.WHAT_STARTING_DOES


def give_back(pid: int) -> None:
    """See :func:`gputop.launch.attach.give_back`. Raises GputopError."""
    attach.give_back(examine(pid))


def make_ready(pid: int, stop: threading.Event | None = None, *, hold: bool = False, port: int = 0,
               started: int | None = None) -> Ready:
    """Start a profiler server in a process, or have its PyTorch listen; blocks for up to 30 s. Raises GputopError.

    ``hold``: see :func:`gputop.launch.kineto.switch_on`; ``port`` 0 is any. ``started``: of the process that somebody
    agreed to, see :func:`gputop.launch.target.examine`.
    """
    if is_pytorch(pid):
        client = kineto.switch_on(pid, stop, hold=hold, started=started)
        folder = printable(str(client.folder))
        return Ready(f"pid:{pid}", f"PyTorch's profiler in process {pid} is waiting for gputop in {folder}")
    return attach.start_server(target.examine(pid, started=started), port)
