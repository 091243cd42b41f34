"""The overview of a capture: the rest of the time that was asked for, recorded at little cost after the detail.

The second Profile request of the same server asks for the host's coarsest events alone. Where there may be many of
them it is made in parts: the first shows how many there are. Nothing that goes wrong here harms the detail.
"""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from gputop.core.errors import GputopError, NoDataError
from gputop.core.files import write_file
from gputop.profiler.capture import plan
from gputop.profiler.capture.job_memory import MemoryGuard, Watch
from gputop.profiler.capture.plan import Plan
from gputop.profiler.recording import JoinsOverviews, Progress, Recorder, RecordingOrder
from gputop.profiler.storage import TRACE, RunFolder
from gputop.trace.readers.capture_file import OVERVIEW


class _Overview(Struct):
    """Recording so far, the parts oldest first. ``marks`` are those of thread pools, which ``events`` are not."""

    parts: list[Path] = field(default_factory=list)
    seconds: float = 0.0
    call_s: float = 0.0
    events: int = 0
    marks: int = 0
    why_ended: str = ""


def record_overview(recorder: Recorder, detail: Path, chosen: Plan, watch: Watch, scratch: Path,
                    workers: int = 1) -> tuple[Plan, float]:
    """Record ``chosen.overview_s`` beside the detail, as far as that goes; blocks. Raises nothing of its own.

    Returns the plan as it was carried out, with the reason where the overview is shorter, and the time of the calls.
    ``detail`` is its trace. ``scratch``: a folder of this overview's own, removed by its owner. ``workers``: so many
    share what an analysis bears.
    """
    made = _Overview()
    try:
        _record_parts(made, recorder, chosen, watch, scratch / "overview", workers)
    except GputopError as error:
        made.why_ended = error.message
    if made.parts:
        try:
            _save(made.parts, recorder, detail, scratch)
        except (GputopError, OSError) as error:
            made.seconds, made.why_ended = 0.0, str(error)
    done_s = round(made.seconds, 1)
    ended = ""
    if made.why_ended:
        ended = f"gputop watched for rare events for {done_s:g} of {chosen.overview_s:g} s ({made.why_ended})."
    return replace(chosen, overview_s=done_s, ended=also(chosen.ended, ended)), made.call_s


def also(ended: str, overview: str) -> str:
    """Sentences of what ended the detail and its overview, if anything did."""
    return f"{ended} {overview}".strip()


def _record_parts(made: _Overview, recorder: Recorder, chosen: Plan, watch: Watch, scratch: Path,
                  workers: int) -> None:
    """Raises GputopError where a part cannot be recorded; those before it are kept."""
    def as_overview(progress: Progress) -> Progress:  # whatever the part's phase
        return Progress("overview", min(chosen.overview_s, made.seconds + progress.elapsed_s), chosen.overview_s)

    assert chosen.probe is not None
    most_events, most_marks = plan.overview_events(chosen.asked_s, workers)
    rate, mark_rate = plan.OVERVIEW_SHARE * chosen.probe.host_events / chosen.probe.seconds, 0.0
    while (left_s := chosen.overview_s - made.seconds) >= plan.MIN_OVERVIEW_S and not watch.stop.is_set():
        part_s = min(left_s, *((most - so_far) / per_s for most, so_far, per_s in (
            (most_events, made.events, rate), (most_marks, made.marks, mark_rate)) if per_s))
        if part_s < plan.MIN_OVERVIEW_S and made.parts:
            made.why_ended = f"{plan.count(rate + mark_rate)} events a second"
            return
        part_s = max(part_s, min(left_s, plan.MIN_OVERVIEW_S))
        guard = MemoryGuard(watch, threading.Event(), label=as_overview)
        result = recorder.record(RecordingOrder(part_s, scratch, overview=True), guard, guard.halt)
        if not result.path.is_relative_to(scratch):
            shutil.rmtree(result.path.parents[3], ignore_errors=True)
            raise GputopError("the disk of the logdir is full", "Free some space.")
        recorded_s = min(part_s, result.took_s)
        made.parts.append(result.path)
        made.call_s += result.took_s
        made.seconds += recorded_s
        if guard.ended is not None:
            made.why_ended = guard.ended[1]
            return
        if chosen.overview_s - made.seconds < plan.MIN_OVERVIEW_S:
            return
        events, marks = _counted(recorder, result.path)
        made.events, made.marks = made.events + events, made.marks + marks
        if recorded_s:
            rate, mark_rate = events / recorded_s, marks / recorded_s


def _counted(recorder: Recorder, path: Path) -> tuple[int, int]:
    """The events of a part, and the marks of thread pools in it; raises GputopError where it cannot be read."""
    from gputop.trace.readers.load import load

    try:
        total = sum(recorder.count_events(path))
        events = len(load([path]).host) if total else 0
    except NoDataError:
        events = 0
    except OSError as error:
        raise GputopError(f"cannot read {path}: {error.strerror or error}", "Check the file system.") from None
    return events, max(0, total - events)


def _save(parts: list[Path], recorder: Recorder, trace: Path, scratch: Path) -> None:
    """One file of the parts beside the trace. Raises GputopError, OSError."""
    source = parts[0]
    if len(parts) > 1:
        assert isinstance(recorder, JoinsOverviews)
        source = scratch / "joined"
        write_file(source, recorder.join(parts))
    with RunFolder.create(trace.parents[3], trace.name.removesuffix(TRACE), trace.parent.name, OVERVIEW) as folder:
        folder.take_over(source)
