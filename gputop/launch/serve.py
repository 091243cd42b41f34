"""Makes a running process ready for captures, by the way that its framework has."""

from __future__ import annotations

import queue
import threading
import time

from gputop.core.errors import GputopError
from gputop.launch import attach, environment, target
from gputop.launch.attach import ANSWER_TIMEOUT_S, Ready, no_answer, running_in, silent_text
from gputop.profiler.kineto import clients, daemon
from gputop.profiler.kineto.clients import DaemonClient
from gputop.profiler.kineto.folder import SocketFolder, sweep
from gputop.profiler.kineto.guard import PASTE, UsedBefore, is_guarded, raise_unless, read_report, when_idle
from gputop.profiler.kineto.recorder import unsafe
from gputop.text.units import printable


def examine(pid: int, started: int | None = None) -> target.Target:
    """:func:`gputop.launch.target.examine`, for the framework that the process has loaded."""
    frameworks = FRAMEWORKS if target.is_pytorch(pid) else target.SERVED
    return target.examine(pid, frameworks=frameworks, started=started)


def what_it_does(pid: int) -> str:
    """Words for what is done to the process, for the question."""
    return WHAT_SWITCHING_ON_DOES if target.is_pytorch(pid) else target.WHAT_STARTING_DOES


def give_back(pid: int) -> None:
    """See :func:`gputop.launch.attach.give_back`. Raises GputopError."""
    attach.give_back(examine(pid))


def make_ready(pid: int, stop: threading.Event | None = None, *, hold: bool = False, port: int = 0,
               started: int | None = None) -> Ready:
    """Start a profiler server in a process, or have its PyTorch listen; blocks for up to 30 s. Raises GputopError.

    ``hold``: see :func:`gputop.launch.serve.switch_on`; ``port`` 0 is any. ``started``: of the process that somebody
    agreed to, see :func:`gputop.launch.target.examine`.
    """
    if target.is_pytorch(pid):
        client = switch_on(pid, stop, hold=hold, started=started)
        folder = printable(str(client.folder))
        return Ready(f"pid:{pid}", f"PyTorch's profiler in process {pid} is waiting for gputop in {folder}")
    return attach.start_server(target.examine(pid, started=started), port)


# -- kineto's daemon mode, in a PyTorch process that was started without anything ----------------
# As gputop.launch.attach starts a profiler server: the process's own interpreter runs gputop_kineto of
# gputop.launch.inside, once, and reports to gputop's daemon, which the kernel tells its sender.

WHAT_SWITCHING_ON_DOES = (
    "gputop makes the job's Python turn on the daemon mode of PyTorch's profiler, once, between two steps. From then "
    "on, a profiler thread looks for gputop's socket once a second until the process ends. A gputop thread guards each "
    "recording: the job's exit and its own torch.profiler wait until the recording ends. In our tests on CPUs, no such "
    "recording crashed a job. The first recording leaves about 240 MB and NVIDIA's CUPTI in the process. A host-bound "
    "job is then slower until it ends. Two such jobs took 12.4 and 11.2 ms per step before, 22.3 and 26.0 ms during a "
    "recording, and 15.8 and 17 to 19 ms afterward. A job that keeps its GPU busy does not become slower. Before "
    "Python 3.14, this pauses one idle thread for about 1 ms.")
_PERIOD_S = 0.2
FRAMEWORKS = frozenset({"pytorch"})


def switch_on(pid: int, stop: threading.Event | None = None, *, hold: bool = False,
              started: int | None = None) -> DaemonClient:
    """The client that a process is or, after this, has become. Blocks for up to 30 s.

    ``hold``: one that has used torch.profiler may be recorded by it. Raises GputopError with the reason why it cannot
    become a client, UsedBefore where ``hold`` would help; nothing has changed in it then. ``started``: see
    :func:`gputop.launch.target.examine`.
    """
    existing = clients.client_of(pid)
    if existing is not None and started in (None, existing.started):
        if existing.folder is None:
            raise unsafe(pid)
        if not is_guarded(existing):
            process = target.examine(pid, frameworks=FRAMEWORKS, started=existing.started)
            with SocketFolder.open(pid, existing.folder, existing.uid) as folder:
                _inject(process, folder, "guard_now", stop or threading.Event(), polls=False)
        return existing
    sweep()
    process = target.examine(pid, frameworks=FRAMEWORKS, started=started)
    try:
        return when_idle(lambda: _switch_on(process, "switch_on_now", stop or threading.Event()))
    except UsedBefore:
        if not hold:
            raise
        return _switch_on(process, "hold_now", stop or threading.Event())


def _switch_on(process: target.Target, function: str, stop: threading.Event) -> DaemonClient:
    """Raises GputopError."""
    with SocketFolder.create(process.pid, process.uid) as folder:
        try:
            _inject(process, folder, function, stop)
        finally:
            client = clients.client_of(process.pid)
            if client is None:
                folder.remove()
    if client is None or client.folder != folder.path:
        raise GputopError(f"PyTorch in process {process.pid} did not turn on its daemon mode",
                          "It may have been built without kineto. " + PASTE)
    return client


def _inject(process: target.Target, folder: SocketFolder, function: str, stop: threading.Event, *,
            polls: bool = True) -> None:
    """Raises GputopError unless the process reports that it is on, and asks for work. ``polls``: wait for that."""
    token = environment.new_token()
    until_s = time.time() + ANSWER_TIMEOUT_S
    source = source_of(f"{function}({str(folder.path)!r}, {token!r}, {until_s})")
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    reported, polled = False, not polls
    with (daemon.serving(folder, stop.is_set) as server, server.events_of(process.pid) as events,
          running_in(process, silent_text(source, "gputop_kineto"))):
        while not (reported and polled) and time.monotonic() < deadline and not stop.is_set():
            try:
                event = events.get(timeout=_PERIOD_S)
            except queue.Empty:
                continue
            report = read_report(event.report, token)
            if report is not None:
                raise_unless(process.pid, "on", *report)
                reported = True
            polled = polled or event.report is None
    if reported:
        return
    if stop.is_set():
        raise GputopError("the capture was stopped", "The request expires after 30 s.")
    raise no_answer(process.pid, ANSWER_TIMEOUT_S)


def source_of(call: str) -> str:
    """Source that the process is to run: gputop's code for it, and one call of that."""
    return f"{(environment.INSIDE / 'gputop_kineto.py').read_text()}\n{call}\n"
