"""The account of a recording: along each GPU, and along the loop of a rank without one, each nanosecond in one part.

Two divisions of the same time meet in it: that of the recording (:mod:`gputop.analysis.host.wall_time`), and within the
time that is judged, the steps, that of each GPU (:mod:`gputop.analysis.gpu.breakdown`). Whatever names a time or a
share reads the one or the other as a view of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gputop.analysis.gpu.breakdown import PartsByGpu
from gputop.analysis.gpu.device_time import GpuTimeline, gpu_number
from gputop.analysis.host.wall_time import SAMPLED, Division, RankDivision
from gputop.analysis.results import Account, AccountLine, AccountPart, WallPart
from gputop.analysis.steps.model import Steps
from gputop.render.step_parts import PART_IDS
from gputop.trace.intervals import Spans, intersect, overlap, subtract, uncovered, union
from gputop.trace.model import Trace

_UNRECORDED = "unrecorded"
_LEFT_OUT = (_UNRECORDED, "start", "end", "profiler", "edges")
_INFERRED = ("python", "silent", "unknown")  # kinds of host work of which no event tells
_BY_STACKS = ("line", SAMPLED)


def account(trace: Trace, division: Division | None, gpu_timelines: Sequence[GpuTimeline], steps: Steps | None,
            bounds: Sequence[tuple[int, int]], by_gpu: PartsByGpu | None) -> Account | None:
    """Make the account; None where the trace has no time. ``bounds`` is the time that is judged, ``by_gpu`` its parts
    on each GPU; None where the trace does not tell them."""
    if division is None:
        return None
    within = union([begin for begin, _ in bounds], [end for _, end in bounds])
    lines = []
    for rank in division.ranks:
        of_rank = [timeline.gpu for timeline in gpu_timelines if trace.gpus[timeline.gpu].rank == rank.number]
        if by_gpu:
            lines += [AccountLine(rank.number, rank.host, gpu_number(trace, gpu), _line(rank, by_gpu[gpu], within))
                      for gpu in of_rank if gpu in by_gpu]
            continue
        waits = intersect(rank.waits, within)
        in_steps = {} if by_gpu is None else {"input": waits, "host": subtract(within, waits)}
        numbers: list[int | None] = [gpu_number(trace, gpu) for gpu in of_rank]
        lines += [AccountLine(rank.number, rank.host, number, _line(rank, in_steps, within))
                  for number in numbers or [None]]
    count = steps.count if steps is not None else 1
    left_out: dict[str, float] = {}
    for line in lines:
        for part in line.parts:
            if part.of in _LEFT_OUT:
                left_out[part.of] = left_out.get(part.of, 0.0) + part.time_s / len(lines)
    mean_s = within.total / 1e9 / max(count, 1)
    return Account(tuple(lines), steps.times.unit if steps is not None else "window", count, mean_s,
                   steps.times.median_s if steps is not None else mean_s, left_out)


def _line(rank: RankDivision, in_steps: Mapping[str, Spans], within: Spans) -> tuple[AccountPart, ...]:
    """Parts of one line. ``in_steps`` divides all of ``within``, some of which another rank may have recorded alone."""
    out, left = [], {id_: in_steps[id_].total for id_ in PART_IDS if id_ in in_steps}
    for part, spans in rank.parts:
        rest, whole = spans.total, not uncovered(within, spans)
        for id_ in left:
            time = left[id_] if whole else overlap(in_steps[id_], spans)
            left[id_] -= time
            rest -= time
            out += [_part(rank, part, id_, time)] * bool(time)
        out += [_part(rank, part, part.id, rest)] * bool(rest)
    out += [_part(rank, part, part.id, round(part.time_s * 1e9)) for part in rank.overview]
    return (*out, *(AccountPart(id_, time / 1e9, _UNRECORDED) for id_, time in left.items() if time))


def _part(rank: RankDivision, part: WallPart, id_: str, time_ns: int) -> AccountPart:
    sampled = part.kind in _BY_STACKS and rank.sampled
    known_by = "sampled" if sampled else "inferred" if part.kind in _INFERRED or id_ == "idle" else "recorded"
    return AccountPart(id_, time_ns / 1e9, part.id, part.kind, part.what, known_by, rank.error_s if sampled else 0.0)
