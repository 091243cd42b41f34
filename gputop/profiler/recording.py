"""A way to capture: the protocol between gputop and what records inside a job, one recording at a time.

Each way is a folder of its own (``xprof``): it implements :class:`Recorder`. What is common stands in
``gputop.profiler.capture``: the probe, the plan, the guard, the overview, the storage, the cost and several workers at
once. :func:`gputop.profiler.ways.recorder_of` chooses the way by a target's address.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from msgspec import Struct

from gputop.core.errors import GputopError, NoDataError
from gputop.core.proc import end_of
from gputop.profiler.storage import TRACE
from gputop.text.crash import ISSUES

Phase = Literal["connecting", "probing", "recording", "overview", "receiving", "saving"]


class Progress(Struct, frozen=True):
    """Progress of a capture. ``elapsed_s`` counts from the request; ``more``: another recording follows this
    one."""

    phase: Phase
    elapsed_s: float
    more: bool = False


class RecordingOrder(Struct, frozen=True):
    """One recording to make: ``seconds`` of a job, saved below ``logdir``; in detail, at once, and into a run folder of
    its own unless the rest says otherwise.

    ``host_name`` names the file (default: the host), ``run`` the folder where that exists already.
    ``start_ns`` is when to begin, in Unix time by the *server's* clock: it waits for it, its profiler
    taken meanwhile, and nothing but the end of the job ends that wait. TensorFlow 2.15 and 2.21 and JAX
    0.10 begin within a tenth of a millisecond of it; a moment that has passed counts as now.
    ``overview``: only the coarsest events of the host, at little cost, or with ``operations`` all that the detail has
    of it. ``shapes``: of the operations' inputs, where the way can leave them out. ``most_events`` of the host end it,
    unless that is 0.
    """

    seconds: float
    logdir: str | Path
    host_name: str | None = None
    run: str | None = None
    start_ns: int | None = None
    overview: bool = False
    operations: bool = False
    shapes: bool = True
    most_events: int = 0


class CaptureResult(Struct, frozen=True):
    """A captured trace on disk.

    ``asked_s`` is its length, unless somebody stopped it. ``took_s`` is request to answer, recording included;
    ``errors`` and ``warnings`` are the profiler's own words about what is missing, and ours about the hand-over.
    ``sent_s`` is our Unix time of the request.
    """

    path: Path
    asked_s: float
    took_s: float
    bytes: int
    stopped_early: bool
    errors: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    sent_s: float = 0.0


class EmptyTrace(NoDataError):
    """The trace holds no events. ``took_s`` is request to answer; its file is kept at ``path``, if there is one."""

    def __init__(self, message: str, fix: str, took_s: float, path: Path | None = None) -> None:
        super().__init__(message, fix)
        self.took_s, self.path = took_s, path


class Unbounded(GputopError):
    """The job cannot end a recording at a number of events; nothing was recorded."""


class TraceLost(GputopError):
    """The job was recorded, or may have been, and its trace did not arrive."""


_CRASHES = frozenset(("by SIGABRT", "by SIGBUS", "by SIGFPE", "by SIGILL", "by SIGSEGV"))
_EXIT_S = 1.0  # from the end of a process's connections to its own


@contextlib.contextmanager
def pidfd_of(pid: int | None) -> Iterator[int]:
    """A descriptor of a process; -1 where it cannot be had."""
    try:
        descriptor = -1 if pid is None else os.pidfd_open(pid)
    except OSError:  # it has ended, or Linux before 5.3
        descriptor = -1
    try:
        yield descriptor
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def end_of_recorded(pid: int | None, pidfd: int) -> TraceLost | None:
    """Return the error of a process that ended while it was recorded, with what is known of its end; None where it
    goes on, or nobody knows. Blocks for a second at most."""
    if pid is None or pidfd < 0:
        return None
    ends = select.poll()
    ends.register(pidfd, select.POLLIN)
    if not ends.poll(_EXIT_S * 1000):
        return None
    how = end_of(pid, pidfd)
    text = f"process {pid} ended{how and f' {how}'} while it was being recorded"
    report = f"report this at {ISSUES}, with the versions of gputop and the job's framework."
    if how in _CRASHES:
        return TraceLost(f"{text}: the recording is the likely cause", f"Please {report}")
    if how == "by SIGKILL":
        return TraceLost(text, "Someone killed it, or the kernel did because memory ran out (see dmesg).")
    if how:
        return TraceLost(f"{text}, before its trace arrived", "Check the job's output for the reason.")
    return TraceLost(f"{text}; how it ended is unknown", "Check the job's output. If nothing there explains the end, "
                                                         f"the recording is the likely cause; please {report}")


# Growth of the job over the size of its trace: 16.7 for 132 MB, 10 to 19 for 1 to 17 MB, TensorFlow 2.21 on
# the CPU, where an event has few stats.
SERVER_MULTIPLE = 20.0
# CUPTI in TensorFlow keeps 2 Mi activity records for all GPUs together (xla, cupti_collector); after that
# the tail of the window is empty. A fifth is left for a job that speeds up.
CUPTI_RECORDS = 2 * 2**20
_CUPTI_SHARE = 0.8


class RecorderLimits(Struct, frozen=True):
    """Limits and costs of a way to record, unless it says otherwise that of TensorFlow's and JAX's profiler server.

    ``device_events`` are kept at most, ``device_limit`` says that in words; so many ``events`` of any kind are
    bearable, ``events_limit`` says why. The job grows by ``job_bytes_per_byte`` of the trace and by
    ``job_bytes_per_event``, or, if that is 0, by what a probe showed; by ``bare_bytes_per_event`` without shapes, 0 if
    these cannot be left out. ``overview``: it can record the host's coarsest events alone. ``stoppable``: it can end a
    recording that has begun. One that cannot has short recordings: a probe of ``probe_s``, and where a job makes many
    events of ``least_s``. One that may end at a number of events of the host has ``most_device_events_per_s`` at worst.
    ``ending``: that of the names of its files. It must be asked ``lead_s`` before a common start. ``instead`` says how
    else a job can be recorded.
    """

    device_events: float = _CUPTI_SHARE * CUPTI_RECORDS
    device_limit: str = "CUPTI keeps at most 2 M"
    events: float = math.inf
    events_limit: str = ""
    job_bytes_per_byte: float = SERVER_MULTIPLE
    job_bytes_per_event: float = 0.0
    bare_bytes_per_event: float = 0.0
    overview: bool = True
    stoppable: bool = True
    probe_s: float = math.inf
    least_s: float = math.inf
    most_device_events_per_s: float = math.inf
    ending: str = TRACE
    lead_s: float = 0.0
    instead: str = ""


class Recorder(Protocol):
    """Records one process of a job. Its methods block; they raise GputopError with cause and fix."""

    @property
    def address(self) -> str:
        """Address as the user, the reports and the JSON have it: HOST:PORT, unix:PATH, or pid:PID without a server."""

    @property
    def pid(self) -> int | None:
        """The process on this machine, None where that is not known."""

    @property
    def limits(self) -> RecorderLimits:
        """Limits and costs of the way; the plan is made by them."""

    def round_trip_s(self) -> float:
        """Check that it can record now, without disturbing the job; returns how long an answer takes."""

    def record(self, recording: RecordingOrder, on_progress: Callable[[Progress], None],
               stop: threading.Event) -> CaptureResult:
        """Record, and save the trace in a :class:`~gputop.profiler.storage.RunFolder`.

        ``on_progress`` is called about eight times a second on the calling thread. ``stop`` ends the recording early
        and its data is kept; a way that cannot end one waits for its end. Raises TraceLost where the job was recorded
        in vain, EmptyTrace where the trace holds no events. A probe is a short recording.
        """

    def count_events(self, path: Path) -> tuple[int, int]:
        """Events of the host and of the devices in a trace of its own, without decoding them; raises OSError."""

    def window_ns(self, path: Path) -> tuple[int, int] | None:
        """Begin and end of that recording, Unix time by the job's clock; None where the trace does not say."""


@runtime_checkable
class JoinsOverviews(Protocol):
    """Abilities of a recorder whose ``limits.overview`` says that it records overviews."""

    def join(self, parts: Sequence[Path]) -> bytes:
        """One trace of several overviews, oldest first; raises OSError."""
