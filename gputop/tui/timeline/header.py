"""The lines above the rows of a timeline: overview of the capture, time axis, steps. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from rich.style import Style

from gputop.render.palette import ACCENT, DARK, DIM, PART_STYLE
from gputop.render.step_parts import PART_IDS
from gputop.render.styled_text import StyledText
from gputop.text.units import seconds
from gputop.timeline.model import KINDS
from gputop.timeline.read_timeline import Timeline
from gputop.tui.timeline.cells import PART_OF, STEP, STEP_HERE
from gputop.tui.timeline.viewport import View, base_ns, every, ticks, unit_of

Steps = npt.NDArray[np.int64]  # (n, 2): begin and end of each

# Quality notes of incomplete traces, in a word or two; the report has the whole sentence.
_LOSSES = {"dropped_events": "events dropped", "clipped": "clipped", "truncated": "damaged",
           "unreadable_file": "a file left out", "left_out": "parts left out"}

_OUTSIDE = Style(color="#596272", bgcolor=DARK.names["surface"])  # not a part of the step, so it has no letter
_INSIDE = ACCENT + Style(bgcolor="#16262d")

_ON_LABEL = Style(color=DARK.names["ground"], bgcolor=DARK.names["accent"])  # the cursor, where a time is written


def losses(timeline: Timeline) -> str:
    """Losses of the trace, with the key of the report; empty for a complete trace."""
    lost = dict.fromkeys(_LOSSES[id_] for id_, _ in timeline.quality if id_ in _LOSSES)
    return f"{', '.join(lost)} (r)" if lost else ""


def overview(cover: npt.NDArray[np.float32], view: View) -> list[StyledText]:
    """Activity of the GPUs over the whole capture, one value per cell; the range on screen is highlighted."""
    cells = len(cover)
    whole = View.whole(view.window_ns)
    first = min(max(0, whole.column(view.start_ns, cells)), cells - 1)
    last = min(cells, max(first + 1, whole.column(view.end_ns - 1, cells) + 1))
    text = "".join(" ▁▂▃▄▅▆▇█"[i] for i in np.clip(np.rint(cover * 8), cover > 0, 8).astype(int).tolist())
    if view.is_whole:
        return [(text, _OUTSIDE)]
    return [(text[:first], _OUTSIDE), (text[first:last], _INSIDE), (text[last:], _OUTSIDE)]


def axis(view: View, cells: int, cursor_ns: int | None) -> list[StyledText]:
    """Ticks with their times, and the place of the cursor."""
    line = [" "] * cells
    cursor_column = view.column(cursor_ns, cells) if cursor_ns is not None else -1
    mark = ("▼", ACCENT)
    for column, label in ticks(view, cells):
        line[column:column + 1 + len(label)] = list("╷" + label)
        if column < cursor_column <= column + len(label):
            mark = line[cursor_column], _ON_LABEL
    if not 0 <= cursor_column < cells:
        return [("".join(line), DIM)]
    return [("".join(line[:cursor_column]), DIM), mark, ("".join(line[cursor_column + 1:]), DIM)]


def axis_origin(view: View, cells: int) -> str:
    """The origin of the ticks, where it is not the begin of the capture: "1.25 s +"."""
    base = base_ns(view, cells)
    if not base:
        return ""
    size, unit = unit_of(base)
    return f"{base / size:.9f}".rstrip("0").rstrip(".") + f" {unit} +"


def visible_steps(steps: Steps, view: View) -> range:
    """Indices of the steps that are in the view, at least in part. Steps are in order and do not overlap."""
    if not len(steps):
        return range(0)
    first = int(np.searchsorted(steps[:, 1], view.start_ns, "right"))
    return range(first, int(np.searchsorted(steps[:, 0], view.end_ns, "left")))


def drawn_steps(steps: Steps, view: View, cells: int) -> list[int]:
    """The visible steps that get a mark: all of them, or every second, fifth, tenth, …"""
    seen = visible_steps(steps, view)
    if not len(seen):
        return []
    typical_ns = float(np.median(steps[:, 1] - steps[:, 0]))
    apart = every(cells / (view.span_ns / max(1.0, typical_ns)), len(str(seen[-1] + 1)) + 2)
    return [i for i in seen if i % apart == 0]


def rules(steps: Steps, view: View, cells: int) -> npt.NDArray[np.bool_]:
    """The cells of the vertical lines: at the begin of each marked step, and at the end of the last one."""
    out = np.zeros(cells, np.bool_)
    marked = drawn_steps(steps, view, cells)
    times = [int(steps[i, 0]) for i in marked]
    if marked and marked[-1] == len(steps) - 1:
        times.append(int(steps[-1, 1]))
    for time_ns in times:
        column = view.column(time_ns, cells)
        if 0 <= column < cells and time_ns > view.start_ns:
            out[column] = True
    return out


def steps_line(steps: Steps, view: View, cells: int, cursor_ns: int | None) -> list[StyledText]:
    """The steps, numbered from 1, with their duration where there is room."""
    if not len(steps):
        return [(" no steps were found in this trace".ljust(cells)[:cells], DIM)]
    runs: list[StyledText] = []
    drawn_to = 0
    marked = drawn_steps(steps, view, cells)
    apart = marked[1] - marked[0] if len(marked) > 1 else 1
    for i in marked:
        behind = min(i + apart, len(steps))
        begin, end = int(steps[i, 0]), int(steps[behind - 1, 1])
        name = f"{i + 1}" if behind == i + 1 else f"{i + 1}–{behind}"
        # Steps that take hardly a cell are still named: over the room behind them, at the end over that before them.
        first = max(drawn_to, min(view.column(begin, cells), cells - len(name) - 1))
        last = min(cells, max(view.column(end, cells), first + len(name) + 1))
        if last <= first:
            continue
        room = last - first
        long = f" step {name}  {seconds((end - begin) / 1e9)}"
        texts = (long if apart == 1 else f" steps {name}", f" step {name}" if apart == 1 else f" {name}", f" {name}",
                 name, f"{i + 1}")
        text = next((t for t in texts if len(t) < room + t.startswith(" ")), "")  # a blank separates it from the next
        here = cursor_ns is not None and begin <= cursor_ns < end
        runs += [(" " * (first - drawn_to), DIM), (text.ljust(room), STEP_HERE if here else STEP[i // apart % 2])]
        drawn_to = last
    runs.append((" " * (cells - drawn_to), DIM))
    return [run for run in runs if run[0]]


def step_at(steps: Steps, time_ns: int) -> int | None:
    """Index of the step at this time."""
    if not len(steps):
        return None
    i = int(np.searchsorted(steps[:, 0], time_ns, "right")) - 1
    return i if i >= 0 and time_ns < steps[i, 1] else None


def legend(kinds: set[str], width: int) -> list[StyledText]:
    """Legend of the colors for the kinds of work there are, as many as fit."""
    runs: list[StyledText] = []
    used = 0
    for part in PART_IDS:
        kinds_of_part = [k for k in KINDS if PART_OF.get(k) == part and k in kinds]
        if not kinds_of_part:
            continue
        label = "/".join(kinds_of_part) if part in ("h2d", "d2h", "idle") else part
        if used + len(label) + 3 > width:
            break
        runs += [("█", PART_STYLE[part]), (f" {label} ", DIM)]
        used += len(label) + 3
    return runs
