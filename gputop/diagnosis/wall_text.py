"""Words for the division of the recorded time: the same in the report, on the screen and on the page."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from msgspec import Struct

from gputop.advice.trace.known_work import host_words
from gputop.analysis.results import MORE_RUNS, SESSION_RUN, Analysis, RankWallTime, WallPart, WallTime
from gputop.core.findings import HIGH_SHARE
from gputop.render.finding_text import DO, VerdictLines, VerdictRow
from gputop.render.step_parts import WALL_PARTS
from gputop.text.units import counted, percent, printable, seconds
from gputop.trace.kernel_names import short_kernel

WORTH_SAYING = 0.05  # share of the recording: a part that has to be named
_WORTH_A_ROW = 0.0005
_HALF = 0.5  # share of the recording: what fills it
# Fewer steps show no rhythm of the job, and what is seldom not at all (TraceML: sure from 20 steps on).
ENOUGH_STEPS = 20
_FEW_STEPS, _FEW_KERNELS = 3, 20  # as few.steps, and few.hardly_any_kernels of a GPU
_SHORT_S = 0.005  # recorded: of a loop it shows a step at most
_MOMENT = 0.01  # share of the recording in which the GPUs worked
_BRIEF = 0.1  # share of the recording from the GPUs' first event to their last: what they do then is not said of it
_MIN_SHARE_IN_STEPS = 0.5  # share of the recording in whole training steps: what is said of them is said of the job
_SENTENCE_PARTS = 4
_STEPS, _PERIODS = "steps", "periods"
_NO_NEWS = (_STEPS, _PERIODS, "edges", "profiler")  # of every job, or of none
_START = "start"
_UNTOLD = ("between", "open", "no_steps", "gpu_work", "iterations", _START)
_UNRECORDED = WALL_PARTS["unrecorded"][0]
_LATER = "capture again after the job has run for a while"
_LONGER_RUN = "record a longer run of the program"
_SAMPLE = ("find out what the host does while the trace shows no events (py-spy record, or perf record for compiled "
           "code); in a loop, mark the steps and capture several")
_READ_AT_ONCE = ("copy all results to the host together before it reads them (prefetch to the CPU, or a copy), and "
                 "look at what the host computes with them")
_ON_A_GPU = "check that the program runs on a GPU, and "
_USE_A_GPU = f"{_ON_A_GPU}record "
_RECORDED_BY = {"nsys": "all of its processes: nsys profile --trace=cuda,nvtx", "chrome": "with ProfilerActivity.CUDA"}
CAPTURE_LONGER = "gputop capture PID --seconds 60 (add --force if it records less), or C in gputop's monitor"


class WallRow(Struct, frozen=True):
    """A part as a row of a table: its name, its time and share, how often, and what the host did."""

    name: str
    time_s: float
    share: float
    often: str
    what: str
    meaning: str
    longest_s: float


def wall_rows(wall: WallTime | RankWallTime) -> Iterator[WallRow]:
    for part in wall.parts:
        share = part.time_s / wall.total_s
        if share >= _WORTH_A_ROW:
            name, meaning = WALL_PARTS.get(part.id, (part.id, ""))
            yield WallRow(name, part.time_s, share, _often(part), printable(host_words(part)), meaning, part.longest_s)


def _often(part: WallPart) -> str:
    if part.id in (_STEPS, _PERIODS):
        about = "about " if part.kind == "sampled" else ""
        return about + counted(part.count, "step" if part.id == _STEPS else "period")
    if part.every_steps:
        return f"{part.count:,}×, every {counted(part.every_steps, 'step')}"
    return f"{part.count:,}×" if part.count > 1 else ""


def wall_title(wall: WallTime) -> str:
    """"Where the recorded 10.0 s went", with what was not recorded "Where the 10.8 s went (10.0 s recorded)"."""
    if wall.recorded_s >= wall.total_s:
        return f"Where the {seconds(wall.recorded_s)} recorded went"
    return f"Where the {seconds(wall.total_s)} went ({seconds(wall.recorded_s)} recorded)"


def wall_sentence(wall: WallTime) -> str:
    """"10.0 s recorded: training steps 5.0 s, evaluation 3.0 s, between steps 2.0 s (train.py:11 Save.on_epoch_end).",
    with what was not recorded "10.0 s of 10.8 s recorded: ..."
    """
    whole = f" of {seconds(wall.total_s)}" if any(row.name == _UNRECORDED for row in wall_rows(wall)) else ""
    rows = sorted((row for row in wall_rows(wall) if row.name != _UNRECORDED), key=lambda row: -row.time_s)
    shown = [row for i, row in enumerate(rows) if row.share >= (0.01 if i < _SENTENCE_PARTS else WORTH_SAYING)]
    listed = ", ".join(f"{row.name} {seconds(row.time_s)}" + (f" ({row.what})" if row.what else "") for row in shown)
    return f"{seconds(wall.recorded_s)}{whole} recorded: {listed}."


def worth_saying(wall: WallTime | None) -> bool:
    """Return whether something besides training steps takes a part of the recording that has to be named."""
    return wall is not None and any(part.id not in _NO_NEWS and part.time_s >= WORTH_SAYING * wall.recorded_s
                                    for part in wall.parts)


def parts_share(wall: WallTime | RankWallTime, ids: Collection[str] = (_STEPS,)) -> float:
    """The part of a recording in whole training steps, or in what else has these ids, small pieces of it together."""
    return sum(part.time_s for part in wall.parts if part.id in ids) / wall.recorded_s


def no_verdict(reason: str, do: str, *seen: str) -> VerdictLines:
    """The lines where there is no verdict on a job: the reason, what to do about it, and what was seen all the same."""
    shown = "; ".join(filter(None, seen))
    rows = (VerdictRow(DO, do), VerdictRow("Seen", shown[:1].upper() + shown[1:]))
    return VerdictLines("NO VERDICT", reason, rows=tuple(row for row in rows if row.text))


def doubt(a: Analysis, clean: bool, about: str) -> VerdictLines | None:
    """The lines that say why a recording without large findings is not enough for a verdict; None where it is."""
    # "No cause found" is not said above a cause that is small only because so little of the job was recorded.
    caused = any(max(f.evidence.get("share_ratio", 0), f.gain.step_time or 0) >= HIGH_SHARE for f in a.findings)
    few = caused or a.steps is None if _hardly_any_work(a) else (
        caused and a.steps is not None and a.steps.unit == "period")
    # Then it shows no loop, whatever it idles for.
    short = a.wall_time is not None and a.wall_time.recorded_s < _SHORT_S
    begins = a.steps is None and (short or _is_brief(a) or _start_share(a) >= WORTH_SAYING)
    no_kernel = not any(gpu.kernels for gpu in a.gpus)
    return not_enough(a, about) if clean or few or no_kernel or begins or _starts(a) else None


def _starts(a: Analysis) -> bool:
    """Return whether the recording is that of a job's start, which is why its GPUs have so little to do."""
    if a.steps is not None and (a.steps.start_up or a.steps.unit == "step"):
        return bool(a.steps.start_up)
    return _start_share(a) >= _HALF


def _start_share(a: Analysis) -> float:
    if a.wall_time is None or not a.wall_time.recorded_s:
        return 0.0
    return parts_share(a.wall_time, (_START,))


def _hardly_any_work(a: Analysis) -> str:
    """The little that the GPUs did, where it stands for no job: a few kernels, a moment's work; "" where it is more."""
    active = [gpu for gpu in a.gpus if gpu.kernels]
    if not active or (a.steps is not None and a.steps.count >= _FEW_STEPS):
        return ""
    kernels, busy_s = sum(gpu.kernels for gpu in active), max(gpu.busy * gpu.window_s for gpu in active)
    if kernels < _FEW_KERNELS * len(active):
        return f"only {counted(kernels, 'kernel' if any(gpu.compute for gpu in active) else 'collective')}"
    moment = a.steps is None and a.wall_time is not None and busy_s < _MOMENT * a.wall_time.recorded_s
    return f"GPU work of only {seconds(busy_s)}" if moment else ""


def not_enough(a: Analysis, limit: str = "") -> VerdictLines | None:
    """Reason why a trace without findings is no clean bill, with the ``limit`` that it shows; None where most of the
    recording is enough whole training steps, and nothing of weight lies around them."""
    wall, steps = a.wall_time, a.steps
    if wall is None or wall.recorded_s <= 0:
        return no_verdict("the trace does not show how its time was spent", CAPTURE_LONGER, limit)
    asked_s = 60 * math.ceil(wall.recorded_s / 30)  # twice as long; forced, so much may take all of a job's memory
    longer = CAPTURE_LONGER if asked_s <= 60 else f"gputop capture PID --seconds {asked_s}, or C in gputop's monitor"
    recorded = f"{seconds(wall.recorded_s)} recorded"
    unused = a.trace.format == "nsys" or any(note.id == "unused_gpu" for note in a.trace.quality)
    if steps is None and not a.gpus and unused:
        return no_verdict(f"no GPU work in the {recorded}", _USE_A_GPU + _RECORDED_BY[a.trace.format],
                          _seen(wall, "recorded time"))
    ended = a.trace.format == "nsys"  # which records programs up to their exit: then nothing is left to capture
    if _starts(a) and (steps is None or not steps.start_up):
        return no_verdict(f"the {recorded} are mostly job startup", _LONGER_RUN if ended else _LATER,
                          _seen(wall, "recorded time"))
    if steps is None:
        return _without_steps(a, wall, limit, "" if ended else longer)
    if steps.start_up:
        return no_verdict(f"the {recorded} are only job startup", _LATER, f"the steps include {steps.start_up}", limit)
    if steps.phase not in ("training", "unknown"):
        return no_verdict(f"{steps.phase} but no training in the {recorded}", "capture again while the job trains",
                          limit)
    if steps.unit == "period":
        work, without, do = ("kernels", "", "") if a.gpus else ("ops", "no GPU work and ", _USE_A_GPU + "its kernels; ")
        seen = f"a sequence of {work} repeats {counted(steps.count, 'time')}, which may be a step or a layer"
        return no_verdict(f"{without}no steps are marked in the {recorded}",
                          f"{do}mark the steps in the loop and capture again", seen, limit, _seen(wall))
    ranks: tuple[WallTime | RankWallTime, ...] = wall.ranks or (wall,)
    share, least = min(((parts_share(rank), rank) for rank in ranks), key=lambda of_rank: of_rank[0])
    untold = max(ranks, key=lambda rank: parts_share(rank, _UNTOLD))
    if steps.count < ENOUGH_STEPS:
        longer += "; a longer capture also shows work that runs only every few hundred steps"
        return no_verdict(f"{counted(steps.count, 'step')} seen, {ENOUGH_STEPS} needed",
                          ("" if a.gpus else _ON_A_GPU) + MORE_RUNS if steps.anchor == SESSION_RUN else longer,
                          f"whole steps take {percent(share)} of the {recorded}", limit)
    for enough, of in ((parts_share(untold, _UNTOLD) < WORTH_SAYING, untold), (share >= _MIN_SHARE_IN_STEPS, least)):
        if not enough:
            whose = f" by rank {of.rank}" if isinstance(of, RankWallTime) else ""
            only = f"whole steps take only {percent(parts_share(of))} of the {recorded}{whose}"
            return no_verdict(only, longer, _seen(of), limit)
    return None


def _without_steps(a: Analysis, wall: WallTime, limit: str, longer: str) -> VerdictLines:
    """The same of a recording without steps, mostly no start; ``longer``: how to get one, "" where none can be."""
    little, u = _hardly_any_work(a), wall.unexplained
    silent_s = (u.silent_s or 0.0) if u is not None and u.per == "recording" else 0.0
    silent = silent_s >= _HALF * wall.recorded_s * (1 - _start_share(a)) and not any(
        part.kind == "op" and part.time_s >= _HALF * wall.recorded_s for part in wall.parts)
    do = (f"{longer}, if a step takes longer; or " if longer else "") + "mark the steps in the loop"
    if silent and any(part.kind == "managed" for part in wall.parts):
        do = _READ_AT_ONCE
    elif silent:
        starts = _start_share(a) >= _HALF * (1 - silent_s / wall.recorded_s) and all(
            part.longest_s < _HALF * wall.recorded_s for part in wall.parts)  # one such pause is what the program does
        do = (f"{_LONGER_RUN}, as most of what this one shows is its start; or " if starts else "") + _SAMPLE
    elif little:
        do = _long_kernel(a, wall) or (do if longer else _LONGER_RUN)
    elif not longer and parts_share(wall, (_START, "end")) >= _HALF:
        do = _LONGER_RUN
    return no_verdict(f"{little or 'no steps found'} in the {seconds(wall.recorded_s)} recorded", do,
                      _seen(wall, "recorded time"), "" if little or _is_brief(a) else limit)


def _is_brief(a: Analysis) -> bool:
    """Return whether what the findings judge is a small part of the recording."""
    judged = a.account.breakdown if a.account is not None else None
    return judged is not None and a.wall_time is not None and judged.total < _BRIEF * a.wall_time.recorded_s


def _long_kernel(a: Analysis, wall: WallTime) -> str:
    """Advice where one launch of a kernel takes half of the recording, so that no loop runs; "" where none does."""
    longest = max((row for row in (a.kernels.by_name if a.kernels else ()) if not row.collective),
                  key=lambda row: row.mean_s, default=None)
    if longest is None or longest.mean_s < _HALF * wall.recorded_s:
        return ""
    return (f"optimize the kernel {printable(short_kernel(longest.name))} ({seconds(longest.mean_s)} per launch; ncu "
            "shows what limits it), or split it into shorter ones")


def _seen(wall: WallTime | RankWallTime, what: str = "the rest") -> str:
    """The largest parts besides the steps, as shares of what was recorded."""
    apart = [WALL_PARTS[id_][0] for id_ in (_STEPS, "periods", "unrecorded")]
    rows = [row for row in sorted(wall_rows(wall), key=lambda row: -row.time_s) if row.name not in apart]
    large = [row for row in rows if row.time_s >= WORTH_SAYING * wall.recorded_s] or rows
    listed = "; ".join(f"{row.name} {percent(row.time_s / wall.recorded_s)}{f' ({row.what})' if row.what else ''}"
                       for row in large[:2])
    return f"{what}: {listed}" if listed else ""
