"""From a profiler server to a record on disk with its findings; used by the monitor and headless.

Plain functions: whoever calls them brings the thread they may block.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gputop.advice.finding import Finding
from gputop.errors import GputopError, NothingToSee
from gputop.text import seconds

if TYPE_CHECKING:
    from gputop.profiler.careful import Cost
    from gputop.profiler.plan import Plan

HOW_TO_SERVE = (
    "In the job: tf.profiler.experimental.server.start(6009) or jax.profiler.start_server(6009); "
    "then gputop finds it, or name it with --attach HOST:PORT."
)

_FEW_STEPS = 5  # gputop.trace.analysis calls fewer a sample


@dataclass(frozen=True, slots=True)
class Server:
    """A profiler server a capture can go to, or one asked for that does not answer (``problem``)."""

    address: str
    description: str = ""
    pid: int | None = None
    problem: str | None = None
    asked: bool = False  # named by the user, not found


@dataclass(frozen=True, slots=True)
class CaptureStatus:
    """Where the current or last capture stands."""

    phase: Literal["connecting", "probing", "recording", "receiving", "saving", "analysing", "done", "failed"]
    address: str
    asked_s: float
    elapsed_s: float = 0.0
    message: str = ""  # done: what came of it; failed: the cause
    fix: str = ""
    time_s: float = 0.0  # Unix time it was reached
    chosen_s: float | None = None  # what is recorded, once that is known
    why: str = ""  # and the reason for it

    @property
    def running(self) -> bool:
        return self.phase not in ("done", "failed")


@dataclass(frozen=True, slots=True)
class CaptureRecord:
    """A finished capture: its raw trace on disk and, where the analysis succeeded, what it says."""

    address: str
    path: Path
    time_s: float  # Unix time of its end
    asked_s: float
    took_s: float
    notes: tuple[str, ...] = ()  # errors and warnings of the profiler server
    analysis: dict[str, Any] | None = None  # the document of ``analyze --json``
    report: str = ""  # the analysis as text
    limit: str = ""  # what bounds the job, should nothing be wrong with it
    problem: GputopError | None = None  # why there is no analysis
    plan: Plan | None = None
    cost: Cost | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(Finding.from_json(f) for f in self.analysis["findings"]) if self.analysis else ()

    @property
    def step_s(self) -> float | None:
        """Median step time, where the trace has steps."""
        return self._steps.get("median_s")

    @property
    def _steps(self) -> dict[str, Any]:
        """What the analysis says of the steps; empty where it found none."""
        return (self.analysis or {}).get("steps") or {}

    @property
    def steps_slowed_s(self) -> tuple[float, float] | None:
        """Median of the first and of the last fifth of the steps in the trace; ten steps at least."""
        from statistics import median  # 4 ms of the first frame otherwise

        durations = self._steps.get("durations_s", ())
        fifth = len(durations) // 5
        return (median(durations[:fifth]), median(durations[-fifth:])) if fifth >= 2 else None

    @property
    def remarks(self) -> tuple[str, ...]:
        """What was done to the job and why, as a person reads it."""
        lines: list[str] = []
        if self.plan is not None:
            lines += [f"{self.plan.chosen_s:g} s: {self.plan.why}", *self.plan.notes]
            count = self._steps.get("count", 0)
            if self.plan.shortened and self.analysis and count < _FEW_STEPS:
                lines.append(f"{count or 'no'} whole step{'s' if count != 1 else ''} in it; for more: "
                             f"gputop capture --seconds {self.asked_s:g} --force")
        if self.cost is not None:
            lines.append(self.cost.text())
        slowed = self.steps_slowed_s
        if slowed is not None and slowed[1] > 1.1 * slowed[0]:
            lines.append(f"steps took {seconds(slowed[0])} at its beginning and {seconds(slowed[1])} at its end")
        return tuple(lines)

    def to_json(self) -> dict[str, Any]:
        out = {"address": self.address, "path": str(self.path), "time_s": self.time_s, "asked_s": self.asked_s,
               "took_s": self.took_s, "notes": list(self.notes)}
        out |= self.plan.to_json() if self.plan else {}
        first_s, last_s = self.steps_slowed_s or (None, None)
        if self.cost is not None:
            out["cost"] = {**self.cost.to_json(), "first_steps_s": first_s, "last_steps_s": last_s}
        return out


def find_servers(attached: Sequence[str], own: Mapping[str, str], discover: bool,
                 busy: str | None = None) -> tuple[tuple[Server, ...], tuple[str, ...]]:
    """The servers a capture can go to, those asked for first, and what could not be looked at.

    ``own`` are servers the source itself brings; ``busy`` is an address that is being captured
    from, which must not be probed meanwhile.
    """
    from gputop.profiler.client import parse_address, probe

    found: dict[str, Server] = {}
    discovered: dict[str, Server] = {a: Server(a, text) for a, text in own.items()}
    notes: tuple[str, ...] = ()
    if discover:
        from gputop.profiler.discovery import find_servers as discover_servers

        discovery = discover_servers(None)
        notes = tuple(discovery.notes)
        discovered |= {s.address: Server(s.address, s.command or "", s.pid) for s in discovery.servers}
    for text in attached:
        try:
            address = parse_address(text)
        except GputopError as error:
            found[text] = Server(text, problem=error.message, asked=True)
            continue
        if address in discovered:
            found[address] = replace(discovered[address], asked=True)
            continue
        try:
            if address != busy:
                probe(address, timeout_s=2.0)
            found[address] = Server(address, "attached", asked=True)
        except GputopError as error:
            found[address] = Server(address, problem=error.message, asked=True)
    return tuple((found | {a: s for a, s in discovered.items() if a not in found}).values()), notes


def choose_server(servers: Iterable[Server]) -> Server:
    """The first server that answers; raises NothingToSee with what to do where there is none.

    Where one was asked for, no other is taken in its place: a capture slows down its job.
    """
    servers = tuple(servers)
    asked = tuple(s for s in servers if s.asked)
    first: Server | None = None
    for server in asked or servers:
        if server.problem is None:
            return server
        first = first or server
    if first is not None:
        raise NothingToSee(f"no profiler server at {first.address}: {first.problem}", HOW_TO_SERVE)
    raise NothingToSee("no profiler server found on this node", HOW_TO_SERVE)


def capture_and_analyse(server: Server, asked_s: float, logdir: Path, stop: threading.Event,
                        closing: threading.Event, on_status: Callable[[CaptureStatus], None],
                        force: bool = False) -> CaptureRecord:
    """Capture, save and analyse; blocks. ``stop`` ends the recording early and keeps its data.

    A probe may shorten it to what does not hurt the job, unless ``force``. Raises GputopError where
    there is no trace to keep. A trace that cannot be analysed is a record with its ``problem``: the
    file is safe on disk. ``closing`` gives up the analysis.
    """
    from gputop.profiler.careful import careful_capture
    from gputop.profiler.client import Progress
    from gputop.trace.worker import analyze_in_worker

    chosen: list[Plan] = []

    def status(phase: Any, elapsed_s: float) -> None:
        plan = chosen[0] if chosen else None
        on_status(CaptureStatus(phase, server.address, asked_s, elapsed_s, chosen_s=plan.chosen_s if plan else None,
                                why=plan.why if plan else ""))

    def on_progress(p: Progress) -> None:
        status(p.phase, p.elapsed_s)

    result, plan, cost = careful_capture(
        server.address, seconds=asked_s, logdir=logdir, pid=server.pid, force=force, on_progress=on_progress,
        on_plan=chosen.append, stop=stop)
    record = CaptureRecord(server.address, result.path, time.time(), asked_s, result.took_s,
                           (*result.errors, *result.warnings), plan=plan, cost=cost)
    status("analysing", result.took_s)
    try:
        document = analyze_in_worker([str(result.path)], closing)
    except GputopError as error:
        return replace(record, problem=error)
    report, limit = document.pop("report"), document.pop("limit")
    return replace(record, analysis=document, report=report, limit=limit)
