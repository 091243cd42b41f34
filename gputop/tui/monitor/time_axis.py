"""The lines above the lanes: their title, and the time axis with marks for events. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from rich.style import Style

from gputop.core.metrics import BYTES_PER_S, GPU_METRICS
from gputop.core.samples import OK, GpuSample
from gputop.render.gpu_columns import COARSE_MARK
from gputop.render.palette import ACCENT, BAD, BOLD, DIM, WARN
from gputop.render.styled_text import StyledText
from gputop.session.event_log import EventLog, Kind, LoggedEvent
from gputop.text.units import fit, printable, ranges
from gputop.tui.monitor.columns import ACTIVITY
from gputop.tui.monitor.lanes import LaneWindow, merged
from gputop.tui.monitor.visible_time import Slice, VisibleTime

# Of each kind of event: the letter where it begins, the line for as long as it lasts, the style, the name in the
# legend. Letter and line make it readable without color. In one cell the gravest event, the last in this order, wins.
SIGNS: dict[Kind, tuple[str, str, Style, str]] = {
    "finding": ("F", "─", ACCENT, "finding"),
    "capture": ("C", "━", ACCENT, "capture"),
    "power": ("P", "─", DIM, "power"),
    "thermal": ("T", "═", WARN, "heat"),
    "lost": ("L", "━", BAD, "lost"),
    "ecc": ("E", "─", BAD, "ECC"),
    "xid": ("X", "─", BAD, "Xid"),
}
_RANK = {kind: rank for rank, kind in enumerate(SIGNS)}
CARET = "▲"
_TICKS_S = (5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 4 * 3600, 6 * 3600, 12 * 3600, 24 * 3600)
_TICK_COLUMNS = 12  # at least, from one to the next


def metric_name(metric: str, gpus: Iterable[GpuSample]) -> str:
    if metric == ACTIVITY:
        kinds = {g.activity()[0] for g in gpus if g.state == OK}
        name = GPU_METRICS["gpu_util"].label if kinds == {"gpu_util"} else GPU_METRICS["sm_active"].label
        return name + (f" ({COARSE_MARK} coarse)" if len(kinds) > 1 else "")
    description = GPU_METRICS[metric]
    return description.label + (" GB/s" if description.unit == BYTES_PER_S else "")


def title(name: str, span_s: float, end_s: float | None, width: int) -> str:
    """The metric and the time in view; ``end_s`` None follows now."""
    if end_s is None:
        length = f"{span_s / 60:.0f} min" if span_s >= 90 else f"{span_s:.0f} s"
        long, short = f"{name}, last {length}", f"{name} {length}"
    else:
        begin, end = (time.strftime("%H:%M:%S", time.localtime(t)) for t in (end_s - span_s, end_s))
        long, short = f"{name}, {begin} to {end} (end: back to now)", f"{name} to {end}"
    return long if len(long) <= width else short


class AxisLine:
    """The line of the axis: its ticks and marks under the main lane's columns, and behind them what they mean."""

    def __init__(self) -> None:
        self.runs: list[StyledText] = []
        self._made_of: tuple[object, ...] = ()

    def update(self, time: VisibleTime, events: EventLog | None, x: int, width: int) -> bool:
        """Make the line of ``width`` cells for a lane that begins at ``x``; returns whether it may look different."""
        window = time.window
        if window is None:
            self.runs, self._made_of = [], ()
            return False
        marks = events.between(window.begin_s(0), window.begin_s(window.columns)) if events else []
        following, cursor = time.end_s is None, time.cursor
        made_of = (window, marks, following, cursor.time_s, cursor.slice, x, width)
        if made_of == self._made_of:
            return False
        self._made_of = made_of
        line = axis(window, marks, following, cursor.time_s)
        self.runs = append_notes([(" " * x, DIM), *line], axis_notes(marks, cursor.slice), x + window.columns, width)
        return True


def axis(window: LaneWindow, marks: Iterable[LoggedEvent], following: bool, cursor_s: float | None) -> list[StyledText]:
    """The axis of the main lane, ``window.columns`` cells.

    Ticks count back from now where the picture follows it, so that they stand still; else they are times of day.
    """
    cells: list[StyledText] = [(" ", DIM)] * window.columns
    marked = ((mark.kind, max(0, window.column(mark.begin_s)), min(window.columns - 1, window.column(mark.end_s)))
              for mark in marks)
    spans = sorted((span for span in marked if span[1] <= span[2]), key=lambda span: _RANK[span[0]])

    def rule(kind: Kind, first: int, last: int) -> None:
        cells[first:last + 1] = [(SIGNS[kind][1], SIGNS[kind][2])] * (last + 1 - first)

    for kind, first, last in spans:
        if kind == "power":  # a GPU can be at its power limit all day: other marks and labels go over it
            rule(kind, first, last)
    # A label that a letter or the cursor would interrupt is left out.
    taken = {first for _, first, _ in spans}
    if cursor_s is not None:
        taken.add(window.column(cursor_s))
    for column, label in _ticks(window, following):
        text = "┊" if taken.intersection(range(column, column + len(label) + 2)) else f"┊{label}"
        cells[column:column + len(text)] = [(char, DIM) for char in text]
    for kind, first, last in spans:
        if kind != "power":
            rule(kind, first, last)
    for kind, first, _ in spans:  # a letter is never hidden by a line
        cells[first] = (SIGNS[kind][0], SIGNS[kind][2] + Style(bold=True))
    if cursor_s is not None and 0 <= window.column(cursor_s) < window.columns:
        cells[window.column(cursor_s)] = (CARET, BOLD)
    return merged(cells)


def _ticks(window: LaneWindow, following: bool) -> list[tuple[int, str]]:
    tick_s = next((t for t in _TICKS_S if t >= _TICK_COLUMNS * window.slice_s), _TICKS_S[-1])
    out = []
    if following:
        for n in range(1, int(window.columns * window.slice_s / tick_s) + 1):
            out.append((window.columns - 1 - round(n * tick_s / window.slice_s), "-" + _duration(n * tick_s)))
    else:
        form = "%H:%M" if tick_s >= 60 else "%H:%M:%S"
        first = int(window.begin_s(0) // tick_s) + 1
        for n in range(first, int(window.begin_s(window.columns) // tick_s) + 1):
            out.append((window.column(n * tick_s), time.strftime(form, time.localtime(n * tick_s))))
    return [(column, label) for column, label in out if column >= 0 and column + len(label) < window.columns]


def _duration(seconds: int) -> str:
    """Duration in the largest unit in which it is whole."""
    for unit, size in (("h", 3600), ("m", 60)):
        if seconds % size == 0:
            return f"{seconds // size}{unit}"
    return f"{seconds}s" if seconds < 60 else f"{seconds // 60}m{seconds % 60:02}"


def axis_notes(marks: Sequence[LoggedEvent], under: Slice | None) -> list[StyledText]:
    """The text beside the axis: the legend of its letters, or with a cursor the events in the slice under it."""
    if under is None:
        return legend(marks)
    return events_in_words([m for m in marks if m.within(under.begin_s, under.end_s)])


def legend(marks: Iterable[LoggedEvent]) -> list[StyledText]:
    """The meaning of the letters that are on the axis."""
    kinds = {mark.kind for mark in marks}
    out: list[StyledText] = []
    for kind in reversed(SIGNS):
        if kind in kinds:
            letter, _, style, name = SIGNS[kind]
            out += [(f" {letter}", style), (f" {name} ", DIM)]
    return out


def events_in_words(marks: Sequence[LoggedEvent]) -> list[StyledText]:
    """The events in words, the gravest first. An event that several GPUs share appears once."""
    grouped: dict[tuple[Kind, str], list[str]] = {}
    for mark in sorted(marks, key=lambda m: -_RANK[m.kind]):
        grouped.setdefault((mark.kind, printable(mark.text)), []).append(mark.gpu)
    out: list[StyledText] = []
    for (kind, text), gpus in grouped.items():
        letter, _, style, _ = SIGNS[kind]
        where = gpus_text(set(gpus) - {""})
        out += [(f" {letter}", style), (f" {where}{': ' if where else ''}{text} ", DIM)]
    return out


def gpus_text(labels: set[str]) -> str:
    """GPUs by their labels: "GPU 0-3", "GPU 0:1"."""
    whole = ranges(int(label) for label in labels if label.isdigit())
    parts = [*([whole] if whole else []), *sorted(label for label in labels if not label.isdigit())]
    return f"GPU {','.join(parts)}" if parts else ""


def append_notes(left: Sequence[StyledText], right: Sequence[StyledText], x: int, width: int) -> list[StyledText]:
    """``left`` in front of ``x``, ``right`` from there to ``width``, cut with an ellipsis where it is too long."""
    out, used = [*left], sum(len(text) for text, _ in left)
    out.append((" " * max(0, x - used), DIM))
    room = width - x
    for text, style in right:
        if len(text) > room:
            out.append((fit(text, room), style))
            return out
        out.append((text, style))
        room -= len(text)
    out.append((" " * room, DIM))
    return out
