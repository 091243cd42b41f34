"""The timeline of a capture: its rows, the named ranges on them, and its idle gaps.

All times are int64 nanoseconds since the trace's origin, as in :mod:`gputop.trace.model`. Every text here has been
made printable; it may still hold markup characters.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from gputop.analysis.results import StackLine
from gputop.render.step_parts import IDLE_CAUSES
from gputop.text.units import percent

RowKind = Literal["path", "layer", "gpu", "stream", "counter", "thread", "stage"]

# What a range is; its place in here is its code in the arrays of ``Timeline.picture``. 0: nothing.
KINDS = ("", "compute", "collective", "h2d", "d2h", "d2d", "p2p", "copy", "memset", "host", "input", "counter")

PER = {"step": " per step", "period": " per period"}  # by the basis; without steps: in the window

# Causes of idle gaps: the parts of the step's breakdown (gputop.analysis.gpu.breakdown), with the host's part divided
# by what the host does meanwhile (gputop.analysis.host.host_causes).
CAUSES = {
    **IDLE_CAUSES,
    "other_gpu": "another GPU is working",
    "collective_wait": "waits in a collective for the last GPU",
    "idle": "unknown (work queued, launch not recorded, or edge of the recording)",
}


def cause_text(cause: str, part: str) -> str:
    """The cause in words; late launches are told apart by the part of the step that they are in."""
    return CAUSES[cause] + (": the host does other work" if (cause, part) == ("dispatch", "host") else "")


class Row(Struct, frozen=True):
    """One row of the timeline. A GPU's row is the union of its streams, a stage's that of its calls on all threads."""

    key: int  # index into Timeline.rows
    kind: RowKind
    label: str  # "GPU 0", "Stream #13 compute", "python 1", "Map"
    group: str  # the heading it stands under: "GPU 0", "Host node-1", "tf.data", "Model"
    gpu: int | None  # as the job numbers it
    depth: int = 0  # deepest nesting of its ranges: it takes depth + 1 lines to draw all of them
    unit: str = ""  # of a counter
    full_scale: float = 0.0  # and what its samples are drawn against, in that unit


class Range(Struct, frozen=True):
    """One event. ``(row, index)`` is its identity; one seen through a GPU's row carries the row of its stream."""

    row: int
    index: int
    start_ns: int
    end_ns: int
    name: str
    kind: str  # one of KINDS
    depth: int = 0  # how many ranges of its row are around it
    tf_op: str = ""


class IdleWork(Struct, frozen=True):
    """Work of one host thread within an idle gap: time of events of this name, less that of events inside them."""

    thread: str
    role: str  # main, executor, input or pool (gputop.trace.threads)
    op: str  # "": no event was recorded
    time_ns: int
    threads: int = 1  # more than 1: threads of a pool; time_ns is their mean, thread the pool's name with their number

    @property
    def what(self) -> str:
        """The op, or "no event", which on a Python thread means Python code and on any other thread nothing."""
        return self.op or ("no event (Python)" if self.role == "main" else "no event")


class IdleGap(Struct, frozen=True):
    """One stretch of time in which one or more GPUs do nothing. ``start_ns`` to ``end_ns`` is from the first GPU's idle
    time to the end of the last one's; ``cost_ns`` is the sum of the idle times of the GPUs, so the GPU time lost.
    ``ends`` is the (row, index) of the range that ended it on the GPU that was idle longest, for ``Timeline.range``;
    ``Timeline.linked`` gives its launch. None: it ended with the step or the trace."""

    gpus: tuple[int, ...]
    start_ns: int
    end_ns: int
    cost_ns: int
    part: str  # of the step's breakdown: input, launch, host, idle or collectives
    cause: str  # one of CAUSES
    host: str  # the longest work of the thread that matters most: "python 4711: SaveV2 83%"; "": unknown
    ended_by: str  # "Conv2D kernel…, launched by python 4711"; "": unknown
    finding: str | None  # id of the finding it belongs to
    meanwhile: str = ""  # what the GPU did that the others wait for: "GPU 0 computes 97% of that time"
    work: tuple[IdleWork, ...] = ()  # threads that matter for its cause first, longest first
    ends: tuple[int, int] | None = None
    python: tuple[StackLine, ...] = ()  # the lines that ran in it, by sampled stacks, with the seconds of each


class IdleTotal(Struct, frozen=True):
    """All idle time of one cause, the listed gaps and the others: as the breakdown of the step counts it."""

    cause: str  # one of CAUSES
    part: str  # of the step's breakdown; tells late launches apart, of any other cause that of most of its time
    s_per_step: float  # mean of the GPUs and the steps; without steps of the GPUs
    gaps: int  # idle times of single GPUs that hold some of it, in all steps
    finding: str | None  # id of the finding that is about it
    python: tuple[StackLine, ...] = ()  # the lines that ran in gaps of this cause, by sampled stacks

    def text(self, period_s: float) -> str:
        """Share of the step, number of gaps, and cause: "53% in 4,100 gaps: the next launch is late"."""
        share = self.s_per_step / period_s if period_s > 0 else 0.0
        return (f"{'<1%' if share < 0.005 else percent(share)} in {self.gaps:,} gap{'s' * (self.gaps != 1)}: "
                f"{cause_text(self.cause, self.part)}")

    def holds(self, gap: IdleGap) -> bool:
        """Return whether most of a gap is of this cause."""
        return gap.cause == self.cause and (gap.cause != "dispatch" or gap.part == self.part)
