"""Where the recorded time went, in words: the same in the report, on the screen and on the page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gputop.analysis.results import Analysis, WallPart, WallTime
from gputop.render.step_parts import HOST_KINDS, WALL_PARTS
from gputop.text.units import counted, percent, printable, seconds

WORTH_SAYING = 0.05  # of the recording: a part that has to be named
_WORTH_A_ROW = 0.0005
# Fewer steps show no rhythm of the job, and what is seldom not at all (TraceML: sure from 20 steps on).
ENOUGH_STEPS = 20
_MOST = 0.5  # of the recording in whole training steps: what is said of them is said of the job
_SENTENCE_PARTS = 4
_STEPS, _PERIODS = "steps", "periods"
_NO_NEWS = (_STEPS, _PERIODS, "edges", "profiler")  # of every job, or of none
_UNTOLD = ("between", "open", "no_steps", "gpu_work", "iterations", "start")
SEE_MORE = "A longer recording shows it (key C, or gputop capture --seconds 60)."


class WallRow(NamedTuple):
    """A part as a row of a table: its name, its time and share, how often, and what the host did."""

    name: str
    time_s: float
    share: float
    often: str
    what: str
    meaning: str
    longest_s: float


def wall_rows(wall: WallTime) -> Iterator[WallRow]:
    for part in wall.parts:
        share = part.time_s / wall.total_s
        if share >= _WORTH_A_ROW:
            name, meaning = WALL_PARTS.get(part.id, (part.id, ""))
            yield WallRow(name, part.time_s, share, _often(part), printable(host_words(part)), meaning,
                          part.longest_s)


def host_words(part: WallPart) -> str:
    """What the host did: "saving checkpoints (train.py:88 save)", "train.py:11 Save.on_epoch_end"; "" where the part's
    name says it all."""
    if not part.kind:
        return part.what
    if part.kind in ("line", "op") and part.what:
        return part.what
    kind = HOST_KINDS.get(part.kind, part.kind)
    return f"{kind} ({part.what})" if part.what else kind


def _often(part: WallPart) -> str:
    if part.id in (_STEPS, _PERIODS):
        return counted(part.count, "step" if part.id == _STEPS else "period")
    if part.every_steps:
        return f"{part.count:,}×, every {counted(part.every_steps, 'step')}"
    return f"{part.count:,}×" if part.count > 1 else ""


def wall_title(wall: WallTime) -> str:
    """"Where the 10.0 s recorded went", with what was not recorded "Where the 10.8 s went, 10.0 s of them recorded"."""
    if wall.recorded_s >= wall.total_s:
        return f"Where the {seconds(wall.recorded_s)} recorded went"
    return f"Where the {seconds(wall.total_s)} went, {seconds(wall.recorded_s)} of them recorded"


def wall_sentence(wall: WallTime) -> str:
    """"10.0 s recorded: training steps 5.0 s, evaluation 3.0 s, between steps 2.0 s (train.py:11 Save.on_epoch_end)."
    """
    rows = sorted(wall_rows(wall), key=lambda row: -row.time_s)
    shown = [row for row in rows[:_SENTENCE_PARTS] if row.share >= 0.01]
    listed = ", ".join(f"{row.name} {seconds(row.time_s)}" + (f" ({row.what})" if row.what else "") for row in shown)
    return f"{seconds(wall.recorded_s)} recorded: {listed}."


def worth_saying(wall: WallTime | None) -> bool:
    """Whether something besides training steps takes a part of the recording that has to be named."""
    return wall is not None and any(part.id not in _NO_NEWS and part.time_s >= WORTH_SAYING * wall.recorded_s
                                    for part in wall.parts)


def steps_share(wall: WallTime) -> float:
    """The part of the recording in whole training steps, of the rank with least of it."""
    ranks = wall.ranks or (wall,)
    return min(sum(part.time_s for part in rank.parts if part.id == _STEPS) / rank.recorded_s for rank in ranks)


def not_enough(a: Analysis) -> str:
    """Why a trace without findings is no clean bill, in a sentence or two; "" where most of the recording is enough
    whole training steps, and nothing of weight lies around them."""
    wall, steps = a.wall_time, a.steps
    if wall is None or wall.recorded_s <= 0:
        return "The trace does not show what its time was spent on."
    recorded = f"{seconds(wall.recorded_s)} recorded"
    if steps is None:
        return (f"No whole training step was found in the {recorded}: one takes longer, or nothing marks them. That is "
                f"no verdict on the job. {_seen(wall)}")
    if steps.phase not in ("training", "unknown"):
        return f"The {recorded} hold {steps.phase} and no training, so this is no verdict on the training."
    if steps.unit == "period":
        return (f"No training step is marked in the {recorded}: a sequence of kernels repeats "
                f"{counted(steps.count, 'time')}, which may be a step or a layer. That is no verdict on the job.")
    share = steps_share(wall)
    several = counted(steps.count, "whole step")
    if steps.start_up:
        return f"The {recorded} are the job's start ({steps.start_up}), so this is no verdict on the job."
    untold = [part for part in wall.parts if part.id in _UNTOLD and part.time_s >= WORTH_SAYING * wall.recorded_s]
    if steps.count < ENOUGH_STEPS:
        seen = "was" if steps.count == 1 else "were"
        return (f"{several} {seen} seen ({percent(share)} of the {recorded}): too few for a verdict. What happens "
                f"every N steps is not judged. {SEE_MORE}")
    if share < _MOST or untold:
        return f"Training steps are {percent(share)} of the {recorded}. {_seen(wall)}"
    return ""


def _seen(wall: WallTime) -> str:
    rows = [row for row in sorted(wall_rows(wall), key=lambda row: -row.time_s) if row.name != WALL_PARTS[_STEPS][0]]
    listed = ", ".join(_named(row) for row in rows[:2] if row.share >= WORTH_SAYING)
    return f"The rest: {listed}." if listed else ""


def _named(row: WallRow) -> str:
    if row.name == WALL_PARTS["no_steps"][0]:
        return f"{row.what} {percent(row.share)}"
    return f"{row.name} {percent(row.share)}" + (f" ({row.what})" if row.what else "")
