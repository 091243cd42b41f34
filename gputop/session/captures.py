"""From a profiler server to a record on disk with its findings; used by the monitor and headless.

Plain functions: whoever calls them brings the thread they may block.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gputop.core.errors import GputopError, NothingToSee
from gputop.core.findings import Finding
from gputop.text.units import seconds

if TYPE_CHECKING:
    from gputop.profiler.capture.multi_worker import Outcome, Together
    from gputop.profiler.capture.plan import Plan
    from gputop.profiler.capture.safe_capture import Cost

HOW_TO_SERVE = (
    "In the job: tf.profiler.experimental.server.start(6009) or jax.profiler.start_server(6009); "
    "then gputop finds it, or name it with --attach HOST:PORT. Without a change: gputop run -- python train.py starts "
    "a job so, gputop attach PID gives a running one a server."
)

_FEW_STEPS = 5  # gputop.diagnosis.diagnose calls fewer a sample


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
    message: str = ""  # done: what came of it; failed: the cause; before that: what to beware of
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
    cost: Cost | None = None  # of several workers, that of the one that was held longest
    workers: tuple[Outcome, ...] = ()  # where several were captured at once
    asides: tuple[str, ...] = ()  # what to know of it first: why gputop made it by itself, which worker is missing

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
        lines = list(self.asides)
        if self.plan is not None:
            lines += [f"{self.plan.chosen_s:g} s: {self.plan.why}", *self.plan.notes]
            count = self._steps.get("count", 0)
            if self.plan.shortened and self.analysis and count < _FEW_STEPS:
                lines.append(f"{count or 'no'} whole step{'s' if count != 1 else ''} in it; for more: "
                             f"gputop capture --seconds {self.asked_s:g} --force")
            elif self.plan.enough:
                lines.append("what is seldom, such as a checkpoint, may not be in it; for more: "
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
        if self.workers:
            out["workers"] = [worker.to_json() for worker in self.workers]
        return out


def find_servers(attached: Sequence[str], own: Mapping[str, str], discover: bool,
                 busy: Collection[str] = ()) -> tuple[tuple[Server, ...], tuple[str, ...]]:
    """The servers a capture can go to, those asked for first, and what could not be looked at.

    ``own`` are servers the source itself brings; ``busy`` are addresses that are being captured
    from, which must not be probed meanwhile.
    """
    from gputop.profiler.client import parse_address, probe

    discovered: dict[str, Server] = {a: Server(a, text) for a, text in own.items()}
    notes: tuple[str, ...] = ()
    if discover:
        from gputop.profiler.discovery import find_servers as discover_servers

        discovery = discover_servers(None)
        notes = tuple(discovery.notes)
        discovered |= {s.address: Server(s.address, s.about(), s.pid) for s in discovery.servers}
    def look(text: str) -> Server:
        try:
            address = parse_address(text)
        except GputopError as error:
            return Server(text, problem=error.message, asked=True)
        if address in discovered:
            return replace(discovered[address], asked=True)
        try:
            if address not in busy:
                probe(address, timeout_s=2.0)
        except GputopError as error:
            return Server(address, problem=error.message, asked=True)
        return Server(address, "attached", asked=True)

    if len(attached) > 1:  # those that are down must not add up
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(min(32, len(attached)), "gputop-look") as threads:
            found = {s.address: s for s in threads.map(look, attached)}
    else:
        found = {s.address: s for s in map(look, attached)}
    return tuple((found | {a: s for a, s in discovered.items() if a not in found}).values()), notes


def choose_servers(servers: Iterable[Server]) -> tuple[Server, ...]:
    """What to capture from: all servers that were asked for, or the first that was found.

    Of those asked for, the ones that do not answer come along, with their ``problem``. Raises
    NothingToSee with what to do where none answers: where one was asked for, no other is taken in
    its place, as a capture slows down its job.
    """
    servers = tuple(servers)
    asked = tuple(s for s in servers if s.asked)
    if any(s.problem is None for s in asked or servers):
        return asked or next((s,) for s in servers if s.problem is None)
    if asked or servers:
        first = (asked or servers)[0]
        raise NothingToSee(f"no profiler server at {first.address}: {first.problem}", HOW_TO_SERVE)
    raise NothingToSee("no profiler server found on this node", HOW_TO_SERVE)


def called(servers: Sequence[Server]) -> str:
    """One name for them all: "a:6009 and 3 more"."""
    more = len(servers) - 1
    return servers[0].address + (f" and {more} more" if more else "")


def capture_and_analyse(servers: Sequence[Server], asked_s: float, logdir: Path, stop: threading.Event,
                        closing: threading.Event, on_status: Callable[[CaptureStatus], None],
                        force: bool = False) -> CaptureRecord:
    """Capture, save and analyse; blocks. ``stop`` ends the recording early and keeps its data.

    A probe may shorten it to what does not hurt the job, unless ``force``. Several servers are captured
    at once, as the workers of one job; those with a ``problem`` are named as missing. Raises GputopError
    where there is no trace to keep. A trace that cannot be analysed is a record with its ``problem``:
    the file is safe on disk. ``closing`` gives up the analysis.
    """
    from gputop.profiler.capture.footprint import job_pid
    from gputop.profiler.client import Progress
    from gputop.profiler.discovery import crash_risk
    from gputop.profiler.stale_files import clear_leftovers

    clear_leftovers(logdir)
    answering = [s for s in servers if s.problem is None]
    name = called(answering)
    warning = crash_risk([pid for s in answering if (pid := job_pid(s.address, s.pid)) is not None]) or ""
    chosen: list[Plan] = []

    def status(phase: Any, elapsed_s: float) -> None:
        plan = chosen[0] if chosen else None
        on_status(CaptureStatus(phase, name, asked_s, elapsed_s, warning, chosen_s=plan.chosen_s if plan else None,
                                why=plan.why if plan else ""))

    def on_progress(p: Progress) -> None:
        status(p.phase, p.elapsed_s)

    if len(servers) == 1:
        from gputop.profiler.capture.safe_capture import careful_capture

        result, plan, cost = careful_capture(
            answering[0].address, seconds=asked_s, logdir=logdir, pid=answering[0].pid, force=force,
            on_progress=on_progress, on_plan=chosen.append, stop=stop)
        record = CaptureRecord(name, result.path, time.time(), asked_s, result.took_s,
                               (*result.errors, *result.warnings), plan=plan, cost=cost)
    else:
        from gputop.profiler.capture.multi_worker import capture_together

        together = capture_together(
            [(s.address, s.pid) for s in answering], seconds=asked_s, logdir=logdir, force=force,
            on_progress=on_progress, on_plan=chosen.append, stop=stop)
        missing = tuple(f"not captured: {s.address}: {s.problem}" for s in servers if s.problem is not None)
        record = of_several(name, asked_s, together, missing)
    status("analysing", record.took_s)
    return analyse(record, closing)


def analyse(record: CaptureRecord, closing: threading.Event) -> CaptureRecord:
    """The record with what its trace says, or with the ``problem`` of not knowing; blocks."""
    from gputop.diagnosis.worker import analyze_in_worker

    try:
        document = analyze_in_worker([str(record.path)], closing)
    except GputopError as error:
        return replace(record, problem=error)
    report, limit = document.pop("report"), document.pop("limit")
    return replace(record, analysis=document, report=report, limit=limit)


def of_several(name: str, asked_s: float, together: Together, missing: tuple[str, ...]) -> CaptureRecord:
    """The record of several workers' capture, not analysed yet; ``missing`` are remarks on those that took no part."""
    results = [(o.address, o.result) for o in together.captured if o.result is not None]
    notes = tuple(f"{address}: {note}" for address, r in results for note in (*r.errors, *r.warnings))
    costs = [o.cost for o in together.captured if o.cost is not None]
    return CaptureRecord(name, together.run_dir, time.time(), asked_s, max(r.took_s for _, r in results), notes,
                         plan=together.plan, cost=max(costs, key=lambda c: c.call_s, default=None),
                         workers=together.outcomes, asides=(*missing, *together.notes()))
