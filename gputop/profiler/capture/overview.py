"""The overview of a capture: the rest of the time that was asked for, recorded at little cost after the detail.

The second Profile request of the same server asks for the host's coarsest events alone. Where there may be many of
them it is made in parts: the first shows how many there are. Where they are too many, the rest is sampled:
some milliseconds every 0.4 s. Nothing that goes wrong here harms the detail.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from gputop.core.errors import GputopError, NoDataError, os_errors_as
from gputop.core.files import write_file
from gputop.profiler.capture import plan
from gputop.profiler.capture.job_memory import MemoryGuard, Watch
from gputop.profiler.capture.plan import Plan
from gputop.profiler.recording import EmptyTrace, JoinsOverviews, Progress, Recorder, RecordingOrder
from gputop.profiler.storage import TRACE, RunFolder
from gputop.trace.readers.capture_file import OVERVIEW

# So many times its budget a part may have if it does: the harm is bounded. gputop's own figure.
_MOST_BUDGETS = 4.0
_WORTH = 0.25  # share of the rest of the time: a shorter part shows less than samples of all of it. gputop's own figure


class OverviewMade(Struct, frozen=True):
    """The plan as it was carried out, with the reason where the overview is shorter or in samples; the time of its
    calls, and the seconds that these recorded."""

    plan: Plan
    call_s: float = 0.0
    recorded_s: float = 0.0


class _Overview(Struct):
    """Recording so far, the parts oldest first, in ``scratch``. ``workers``: so many share what an analysis bears.
    ``marks`` are those of thread pools, which ``events`` are not. ``seconds`` is the time that parts in one piece took;
    the ``samples``, of ``samples_s`` together, are spread over ``spread_s`` after it."""

    recorder: Recorder
    chosen: Plan
    probe: plan.Probe
    watch: Watch
    scratch: Path
    workers: int
    parts: list[Path] = field(default_factory=list)
    has_events: bool = False
    seconds: float = 0.0
    call_s: float = 0.0
    events: int = 0
    marks: int = 0
    samples: int = 0
    samples_s: float = 0.0
    spread_s: float = 0.0
    why_ended: str = ""
    guarded: bool = False  # the guard ended it

    def record(self) -> None:
        """Raises GputopError where a part cannot be recorded; those before it are kept."""
        most_events, most_marks = plan.overview_events(self.chosen.asked_s, self.workers)
        # Of a job that paused during the probe, the first part is as short as it may be.
        rate, mark_rate = plan.OVERVIEW_SHARE * self.probe.host_events_per_s or most_events / plan.MIN_OVERVIEW_S, 0.0
        # A part may begin in a quiet phase of the job and reach into one like the probe's.
        most_s = max(_MOST_BUDGETS * most_events / rate, plan.MIN_OVERVIEW_S)
        while (left_s := self.chosen.overview_s - self.seconds) >= plan.MIN_OVERVIEW_S and not self.watch.stop.is_set():
            part_s = min(left_s, *((most - so_far) / per_s for most, so_far, per_s in (
                (most_events, self.events, rate), (most_marks, self.marks, mark_rate)) if per_s))
            if part_s < max(plan.MIN_OVERVIEW_S, _WORTH * left_s) and self.has_events:
                self.why_ended = f"{plan.count(rate + mark_rate)} events a second"
                self._sample()
                return
            part_s = min(max(part_s, min(left_s, plan.MIN_OVERVIEW_S)), most_s)
            recorded_s, events, marks = self._record(RecordingOrder(part_s, self.scratch, overview=True))
            self.seconds += recorded_s
            if self.guarded or self.chosen.overview_s - self.seconds < plan.MIN_OVERVIEW_S:
                return
            self.events, self.marks = self.events + events, self.marks + marks
            if recorded_s and events + marks:  # what does nothing for once, as TensorFlow for seconds, tells no rate
                rate, mark_rate = events / recorded_s, marks / recorded_s

    def _sample(self) -> None:
        """Record the rest of the time in samples. Raises GputopError as above."""
        whole_s, rate = self.chosen.overview_s - self.seconds, self.probe.host_events_per_s
        begun_s, period_s = time.monotonic(), plan.SAMPLE_EVERY_S
        samples = max(round(whole_s / period_s), 1)
        while not self.watch.stop.wait(period_s - (time.monotonic() - begun_s) % period_s):
            if self.spread_s >= whole_s:
                return
            sample_s = plan.sample_s(self.chosen.asked_s, samples, rate, self.workers)
            recorded_s, events, marks = self._record(RecordingOrder(sample_s, self.scratch, overview=True,
                                                                    operations=True))
            self.samples, self.samples_s = self.samples + 1, self.samples_s + recorded_s
            self.spread_s = min(time.monotonic() - begun_s, whole_s)
            if self.guarded:
                return
            if recorded_s:
                rate = max(rate, (events + marks) / recorded_s)

    def _record(self, order: RecordingOrder) -> tuple[float, int, int]:
        """Record one part: its seconds, its events, and the marks of thread pools. Raises GputopError."""
        def as_overview(progress: Progress) -> Progress:  # whatever the part's phase
            done_s = self.seconds + self.spread_s + progress.elapsed_s
            return Progress("overview", min(self.chosen.overview_s, done_s))

        guard = MemoryGuard(self.watch, threading.Event(), label=as_overview)
        try:
            result = self.recorder.record(order, guard, guard.halt)
            path, took_s, self.has_events = result.path, result.took_s, True
        except EmptyTrace as empty:  # nothing happened in it: that was seen, too
            if empty.path is None:
                raise
            path, took_s = empty.path, empty.took_s
        if not path.is_relative_to(self.scratch):
            shutil.rmtree(path.parents[3], ignore_errors=True)
            raise GputopError("the disk of the logdir is full", "Free some space.")
        self.parts.append(path)
        self.call_s += took_s
        if guard.ended is not None:  # nor is memory spent on counting
            self.why_ended, self.guarded = guard.ended[1], True
            return min(order.seconds, took_s), 0, 0
        return min(order.seconds, took_s), *_counted(self.recorder, path)


def record_overview(recorder: Recorder, detail: Path, chosen: Plan, watch: Watch, scratch: Path,
                    workers: int = 1) -> OverviewMade:
    """Record ``chosen.overview_s`` beside the detail, as far as that goes; blocks. Raises nothing of its own.
    ``detail`` is its trace. ``scratch``: a folder of this overview's own, removed by its owner."""
    assert chosen.probe is not None
    made = _Overview(recorder, chosen, chosen.probe, watch, scratch / "overview", workers)
    try:
        made.record()
    except GputopError as error:
        made.why_ended = error.message
    if made.parts and not made.has_events:
        made.parts, made.why_ended = [], made.why_ended or "the job produced no events"
    elif made.parts:
        try:
            source = made.parts[0]
            if len(made.parts) > 1:
                assert isinstance(recorder, JoinsOverviews)
                source = scratch / "joined"
                write_file(source, recorder.join(made.parts))
            with RunFolder.create(detail.parents[3], detail.name.removesuffix(TRACE), detail.parent.name,
                                  OVERVIEW) as folder:
                folder.take_over(source)
        except (GputopError, OSError) as error:
            made.parts, made.why_ended = [], str(error)
    if not made.parts:
        made.seconds = made.spread_s = made.samples = 0
    ended = ""
    if made.why_ended:
        done_s = round(made.seconds, 1)
        ended = f"gputop watched for rare events for {done_s:g} of {chosen.overview_s:g} s ({made.why_ended})."
    if made.samples:
        ended += (f" For the next {made.spread_s:.1f} s, gputop took {made.samples} samples of "
                  f"{made.samples_s / made.samples * 1000:.0f} ms and did not see which ops ran between them.")
    done = replace(chosen, overview_s=round(made.seconds + made.spread_s, 1), ended=also(chosen.ended, ended))
    return OverviewMade(done, made.call_s, made.seconds + made.samples_s)


def also(ended: str, overview: str) -> str:
    """Sentences of what ended the detail and its overview, if anything did."""
    return f"{ended} {overview}".strip()


def _counted(recorder: Recorder, path: Path) -> tuple[int, int]:
    """The events of a part, and the marks of thread pools in it; raises GputopError where it cannot be read."""
    from gputop.trace.readers.load import load

    events = 0
    with os_errors_as(f"cannot read {path}", "Check the file system."), contextlib.suppress(NoDataError):
        total = sum(recorder.count_events(path))
        events = len(load([path]).host) if total else 0
    return events, max(0, total - events)
