"""One recording of a job: how it is meant, how far it has come, what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gputop.core.errors import GputopError, NoDataError

Phase = Literal["connecting", "probing", "recording", "overview", "receiving", "saving"]


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a capture stands. ``elapsed_s`` counts from the request; ``asked_s`` is the recording asked for;
    ``more``: another recording follows this one."""

    phase: Phase
    elapsed_s: float
    asked_s: float
    more: bool = False


@dataclass(frozen=True, slots=True)
class RecordingOptions:
    """How a recording differs from the usual one, in detail, at once, into a run folder of its own.

    ``host_name`` names the file (default: the host), ``run`` the folder where that exists already.
    ``start_ns`` is when to begin, in Unix time by the *server's* clock: it waits for it, its profiler
    taken meanwhile, and nothing but the end of the job ends that wait. TensorFlow 2.15 and 2.21 and JAX
    0.10 begin within a tenth of a millisecond of it; a moment that has passed counts as now.
    ``overview``: only the coarsest events of the host, at little cost.
    """

    host_name: str | None = None
    run: str | None = None
    start_ns: int | None = None
    overview: bool = False


@dataclass(frozen=True, slots=True)
class CaptureResult:
    """A captured trace on disk.

    ``took_s`` is request to answer, recording included; ``delivered`` how the trace came;
    ``errors`` and ``warnings`` are the profiler's own words about what is missing, and ours
    about the hand-over. ``sent_s`` is our Unix time of the request.
    """

    address: str
    path: Path
    run_dir: Path
    session_id: str
    asked_s: float
    took_s: float
    bytes: int
    stopped_early: bool
    delivered: Literal["response", "server disk"]
    errors: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    sent_s: float = 0.0


class EmptyTrace(NoDataError):
    """The trace holds no events. ``took_s`` is request to answer."""

    def __init__(self, message: str, fix: str, took_s: float) -> None:
        super().__init__(message, fix)
        self.took_s = took_s


class TraceLost(GputopError):
    """The job was recorded, or may have been, and its trace did not arrive."""
