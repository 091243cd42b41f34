"""Asks the guard in a PyTorch job, the code of :mod:`gputop.launch.inside.gputop_kineto`, to keep a recording from
ending the job; and says what its answers mean.

A request is a datagram of JSON to the guard's socket in the daemon's folder. The guard reports to the daemon, whom the
kernel tells its sender.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

from msgspec import Struct

from gputop.core.codec import encode, parse
from gputop.core.errors import GputopError
from gputop.profiler.kineto.clients import DaemonClient
from gputop.profiler.kineto.daemon import Daemon, DaemonEvent
from gputop.profiler.kineto.folder import SocketFolder
from gputop.profiler.recording import Unbounded
from gputop.text.units import printable

T = TypeVar("T")
_PREFIX = "gputop-guard-"
_TRIES, _BETWEEN_TRIES_S = 3, 2.0
_ANSWER_S, _PERIOD_S = 10.0, 0.2  # the guard waits for Python's lock, as the job's other threads do
_DETAIL_CHARS = 200
_SHARE = re.compile(r"[01]\.\d{3}")
# From the removal of the callbacks to the end of a recording. A thread that was within one has left it by then, however
# many others run: at a load of 15 a CPU the scheduler comes back to it within 0.1 s.
_REST_S, _REST_OF_LOAD_S, _MAX_REST_S = 0.25, 0.02, 1.0
LINES_TO_PASTE = (
    "from torch.profiler import profile, schedule, tensorboard_trace_handler\n"
    "with profile(schedule=schedule(wait=10, warmup=2, active=20, repeat=1),\n"
    "             on_trace_ready=tensorboard_trace_handler('traces')) as profiler:\n"
    "    for batch in loader:\n"
    "        train_step(batch)\n"
    "        profiler.step()")
PASTE = f"Add these lines to the script, and run gputop analyze traces:\n{LINES_TO_PASTE}"


class GuardRequest(Struct, frozen=True):
    """One recording: the name of its file, its length, how long its begin may be away, and how much longer it is than
    operators are recorded; and how many events end that, 0: none."""

    token: str
    file: str
    seconds: float
    wait_s: float
    rest_s: float
    most_events: int


def guard_of(client: DaemonClient) -> str:
    """The name of the guard's socket of a process."""
    return f"{_PREFIX}{client.own_pid}"


def is_guarded(client: DaemonClient) -> bool:
    if client.folder is None:
        return False
    with contextlib.suppress(GputopError), SocketFolder.open(client.pid, client.folder, client.uid) as folder:
        return folder.answers(guard_of(client))
    return False


def rest_s() -> float:
    """Seconds between the last operator of a recording and its end, by the load of this machine."""
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return min(_REST_S + _REST_OF_LOAD_S * load, _MAX_REST_S)


def when_idle(call: Callable[[], T]) -> T:
    """Return the result of ``call``, which is made again where the job's own profiler was at work for an unknown time:
    three times within four seconds. Raises what it raises."""
    for _ in range(_TRIES - 1):
        try:
            return call()
        except ProfilesItself as error:
            if error.share < 1.0:
                raise
        time.sleep(_BETWEEN_TRIES_S)
    return call()


def ask_guard(daemon: Daemon, client: DaemonClient, request: GuardRequest,
              events: queue.SimpleQueue[DaemonEvent]) -> list[str]:
    """Have the guard of a process follow a recording that is about to be asked for; returns what it can be told of it.
    Blocks until it is ready, for 10 s at most. Raises GputopError with the reason why the process cannot be recorded
    now, Unbounded where that is the number of events; nothing has begun then."""
    pid = client.pid
    if not daemon.send(guard_of(client), encode(request)):
        raise GputopError(f"nothing guards recordings of process {pid}, so a recording could crash the job",
                          f"Another tool or an older gputop set up its profiler. gputop capture {pid} adds the guard.")
    deadline = time.monotonic() + _ANSWER_S
    while time.monotonic() < deadline:
        try:
            report = read_report(events.get(timeout=_PERIOD_S).report, request.token)
        except queue.Empty:
            continue
        if report is not None:
            raise_unless(pid, "ready", *report)
            abilities = report[1].split()
            if request.most_events and "most_events" not in abilities:  # of an older gputop, or another torch
                let_go(daemon, client)
                raise Unbounded(f"process {pid} cannot end a recording at a number of events", PASTE)
            return abilities
    let_go(daemon, client)
    raise GputopError(f"gputop's guard could not run in process {pid}, so nothing was recorded",
                      "A recording by a killed gputop may still be running, or a call holds the GIL: py-spy dump --pid "
                      f"{pid} shows where.")


def tell_end(daemon: Daemon, client: DaemonClient, ends_s: float) -> None:
    """Tell a guard that can be told so that kineto ends at this Unix time."""
    daemon.send(guard_of(client), encode({"ends_s": ends_s}))


def let_go(daemon: Daemon, client: DaemonClient) -> None:
    """Tell the guard that its recording has been fetched, or will not come."""
    daemon.send(guard_of(client), b"{}")


def read_report(body: bytes | None, token: str) -> tuple[str, str] | None:
    """State and detail in a report; None where it is none, or another's."""
    if body is None:
        return None
    try:
        report: Any = parse(body)
    except ValueError:
        return None
    if not isinstance(report, dict) or report.get("token") != token:
        return None
    return str(report.get("state")), printable(str(report.get("detail")))[:_DETAIL_CHARS]


class UsedBefore(GputopError):
    """The process has used torch.profiler: only torch.profiler itself can record it, which holds it."""


class ProfilesItself(GputopError):
    """The process's own torch.profiler records it, or will soon: ``share`` of its steps, 1 where no end is known."""

    def __init__(self, pid: int, share: float, message: str, fix: str) -> None:
        super().__init__(message, fix)
        self.pid, self.share = pid, share


def raise_unless(pid: int, expected: str, state: str, detail: str) -> None:
    """Raise GputopError unless gputop's code in a process reports what is ``expected``."""
    if state == expected:
        return
    own_traces = "The job's own traces contain what gputop would record: gputop analyze FOLDER."
    steps, _, recorded = detail.partition(" ")
    if state == "profiling" and not steps:
        state = "left on"
    reasons = {
        "absent": (f"process {pid} has not imported torch", "Name the Python process that trains, not its launcher."),
        "importing": (f"process {pid} is importing torch", "Try again in a moment."),
        "no CUDA yet": (f"process {pid} is not using its GPU yet, and the profiler would initialize CUDA for the job",
                        "Try again once it is training on the GPU."),
        "left on": (f"torch.profiler is recording process {pid} continuously: training then often takes two to three "
                    "times as long", f"Remove the profiler from the script, or record only a few steps. {own_traces}"),
        "profiling": (f"torch.profiler is recording process {pid} for {steps} more steps", own_traces),
        "cycles": (f"process {pid} profiles itself in cycles: torch.profiler starts again in {steps} steps, and two "
                   "simultaneous recordings would crash the job", own_traces),
        "observed": (f"another observer of PyTorch operators is active in process {pid}",
                     "It can be an execution trace or another recording. Capture again when it has ended."),
        "ending": (f"process {pid} is exiting", "Nothing was recorded."),
        "used": (f"process {pid} has used torch.profiler before, so only torch.profiler can record it, which pauses "
                 "the job for half a second per 25,000 events", f"gputop capture {pid} asks first. Or: {PASTE}"),
        "no threads": (f"process {pid} has used torch.profiler before, and PyTorch {detail} then does not allow "
                       "external recordings", PASTE),
        "unsupported": (f"gputop cannot prepare PyTorch {detail} for recording while process {pid} is "
                        "running", f"Update to PyTorch 2.6 or newer. {PASTE}"),
        "unguarded": (f"gputop cannot prevent a recording from crashing process {pid} (PyTorch {detail})", PASTE),
    }
    if state == "used":
        raise UsedBefore(*reasons[state])
    if state in ("left on", "profiling", "cycles"):
        share = float(recorded) if _SHARE.fullmatch(recorded) else 0.0
        raise ProfilesItself(pid, 1.0 if state == "left on" else share, *reasons[state])
    unknown = f"PyTorch in process {pid} did not turn on its daemon mode ({detail or state})", PASTE
    raise GputopError(*reasons.get(state, unknown))
