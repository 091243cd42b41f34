"""The texts around a timeline: the lines above its rows (overview of the capture, time axis, steps), and what is
selected, in the lines below them and in detail. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from rich.style import Style
from rich.text import Text

from gputop.analysis.results import StackLine
from gputop.diagnosis.python_lines import line_words
from gputop.render.finding_text import BY_TRACER
from gputop.render.palette import ACCENT, BOLD, DARK, DIM, PART_STYLE, PLAIN
from gputop.render.step_parts import PART_IDS
from gputop.render.styled_text import StyledText, justify
from gputop.text.units import fit, percent, printable, ranges, seconds
from gputop.timeline.model import KINDS, IdleGap, IdleTotal, Range, Row, cause_text
from gputop.timeline.read_timeline import Timeline
from gputop.tui.timeline.cells import KIND_STYLE, PART_OF, STEP, STEP_HERE
from gputop.tui.timeline.viewport import View, base_ns, every, moment, ticks, unit_of

_KINDS = {"compute": "kernel", "collective": "collective", "h2d": "copy host → device", "d2h": "copy device → host",
          "d2d": "copy on the device", "p2p": "copy between GPUs", "copy": "copy", "memset": "memset", "host": "host",
          "input": "input", "counter": "sampled by gputop"}

_MAX_PYTHON = 3  # lines that ran in a gap


def when(timeline: Timeline, time_ns: int, grain_ns: int) -> str:
    """A time in the capture and in its step: "+1.203 456 s, step 12 +34.2 ms"."""
    text = moment(time_ns - timeline.window_ns[0], grain_ns)
    step = step_at(timeline.steps_ns, time_ns)
    if step is None:
        return text
    return f"{text}, step {step + 1} {moment(time_ns - int(timeline.steps_ns[step, 0]), grain_ns)}"


def _grain(length_ns: int) -> int:
    return max(1, 10 ** (len(str(max(1, length_ns))) - 3))


def where(row: Row) -> str:
    """A row with the GPU or host it belongs to."""
    label = row.label.strip()
    if row.kind == "layer":
        return f"GPU {row.gpu}" if row.gpu is not None else "the CPU"
    return label if label.startswith(row.group) or row.kind == "path" else f"{row.group} {label}"


def view_lines(timeline: Timeline, view: View, width: int) -> list[list[StyledText]]:
    """Lines without a selection: the range on screen, and the meaning of the colors."""
    begin, end = timeline.window_ns
    seen = len(visible_steps(timeline.steps_ns, view))
    left: list[StyledText] = [(f" {seconds(view.span_ns / 1e9)}", BOLD), (" shown", PLAIN)]
    if not view.is_whole:
        left.append((f" of {seconds((end - begin) / 1e9)}, from {moment(view.start_ns - begin, view.span_ns // 100)}",
                     DIM))
    if seen:
        left.append((f"   {seen} of {len(timeline.steps_ns)} step{'s' * (len(timeline.steps_ns) != 1)}", DIM))
    if timeline.idle_gaps:
        cost = sum(b.cost_ns for b in timeline.idle_gaps)
        left.append((f"   b: {len(timeline.idle_gaps)} costly idle gaps, {seconds(cost / 1e9)} of GPU time", DIM))
    if timeline.no_counters:
        left.append((f"   no counters: {timeline.no_counters}", DIM))
    while len(left) > 2 and sum(len(text) for text, _ in left) > width:
        left.pop()  # not within a figure
    # The possible kinds, by the rows: looking for the kinds that occur would read the whole trace.
    kinds = {"compute", "collective", "h2d", "d2h"} if any(r.kind == "gpu" for r in timeline.rows) else set()
    kinds |= {"host"} if any(r.kind == "thread" for r in timeline.rows) else set()
    kinds |= {"input"} if any(r.kind == "stage" for r in timeline.rows) else set()
    return [left, [(" ", DIM), *legend(kinds, width - 2)]]


def range_lines(timeline: Timeline, r: Range, linked: Range | None, width: int) -> list[list[StyledText]]:
    """A range in two lines: name and duration, then row, op and linked range."""
    length = r.end_ns - r.start_ns
    right: list[StyledText] = [(seconds(length / 1e9), BOLD),
                               (f" at {when(timeline, r.start_ns, _grain(length))} ", DIM)]
    if sum(len(t) for t, _ in right) > width * 2 // 3:
        right = [(seconds(length / 1e9) + " ", BOLD)]
    first = justify([(" █ ", KIND_STYLE[r.kind]), (r.name or "(no name)", BOLD)], right, width)
    parts = [f"{_what(timeline, r)} on {where(timeline.rows[r.row])}"]
    if r.tf_op and r.tf_op != r.name:
        parts.append(f"op {r.tf_op}")
    if linked is not None:
        parts.append(link_text(timeline, r, linked) + "  o: go there")
    return [first, justify([("   " + " · ".join(parts), DIM)], [], width)]


def _what(timeline: Timeline, r: Range) -> str:
    if timeline.rows[r.row].kind == "path":
        return "a typical step waits for this"
    if timeline.rows[r.row].kind == "layer":
        return "layer of the model" if r.depth else "phase of the step"
    return _KINDS[r.kind]


def link_text(timeline: Timeline, r: Range, linked: Range) -> str:
    """The delay between a kernel and its launch."""
    delay = seconds(abs(linked.start_ns - r.start_ns) / 1e9)
    if timeline.rows[linked.row].kind in ("gpu", "stream"):
        return f"starts {linked.name} on {where(timeline.rows[linked.row])} {delay} later"
    return f"launched {delay} earlier by {timeline.rows[linked.row].label.strip()}"


def idle_gap_at(timeline: Timeline, row: Row, begin_ns: int, end_ns: int) -> IdleGap | None:
    """The costly idle gap that this gap of a row is part of; None where it is part of none."""
    if row.gpu is None:
        return None
    middle = (begin_ns + end_ns) // 2
    return next((b for b in timeline.idle_gaps if row.gpu in b.gpus and b.start_ns <= middle < b.end_ns), None)


def gap_lines(timeline: Timeline, row: Row, gap: tuple[int, int], gpus: tuple[int, ...], ended_by: Range | None,
              width: int) -> list[list[StyledText]]:
    """A gap on a row, or on all of these ``gpus`` at once, with its cause where that is known."""
    length = gap[1] - gap[0]
    idle_gap = idle_gap_at(timeline, row, *gap)
    style = PART_STYLE[idle_gap.part if idle_gap is not None else "idle"]
    what = "idle" if row.kind in ("gpu", "stream") else "nothing recorded"
    on = f"GPUs {ranges(gpus, ', ')}" if len(gpus) > 1 else where(row)
    first = justify([(" ▒ ", style), (f"{what} on {on}", BOLD)],
                    [(seconds(length / 1e9), BOLD), (f" at {when(timeline, gap[0], _grain(length))} ", DIM)], width)
    if idle_gap is None:
        remark = f"the cause is unknown: {timeline.pending}" if timeline.pending else (
            "not among the costliest idle gaps")
        return [first, [(f"   {remark}", DIM)] if row.gpu is not None else []]
    parts = [cause_text(idle_gap.cause, idle_gap.part), *([idle_gap.host] if idle_gap.host else [])]
    if idle_gap.ended_by:
        parts.append(f"ended by {idle_gap.ended_by}" + ("  o: go there" if ended_by is not None else ""))
    return [first, justify([("   " + " · ".join(parts), DIM)], [], width)]


def range_text(timeline: Timeline, r: Range, linked: Range | None, around: list[Range]) -> Text:
    """All details of a range; ``around`` are the ranges it is nested in, outermost first."""
    out = Text()
    length = r.end_ns - r.start_ns

    def line(label: str, text: str) -> None:
        out.append(f"{label:<12}", DIM)
        out.append(text + "\n")

    out.append("█ ", KIND_STYLE[r.kind])
    out.append((r.name or "(no name)") + "\n\n", BOLD)
    line("what", _what(timeline, r))
    line("on", where(timeline.rows[r.row]))
    line("duration", f"{seconds(length / 1e9)}  ({length:,} ns)")
    line("start", when(timeline, r.start_ns, 1))
    step = step_at(timeline.steps_ns, r.start_ns)
    if step is not None:
        begin, end = timeline.steps_ns[step].tolist()
        line("of its step", percent(length / max(1, end - begin)))
    if r.tf_op:
        line("op", r.tf_op)
    if linked is not None:
        line("other end", link_text(timeline, r, linked))
    elif timeline.rows[r.row].kind == "stream":
        line("other end", "its launch is not in the trace")
    if r.kind == "counter":
        line("value", "mean since the previous sample; clocks are read at the end")
        line("clock", "Unix time of the machine that recorded the trace and samples")
    if around:
        out.append("\nWithin\n", BOLD)
        for i, outer in enumerate(around):
            out.append(f"  {'  ' * min(i, 12)}{outer.name}", ACCENT if i == len(around) - 1 else "")
            out.append(f"  {seconds((outer.end_ns - outer.start_ns) / 1e9)}\n", DIM)
    return out


def idle_gap_text(timeline: Timeline, idle_gap: IdleGap, finding: str, width: int) -> Text:
    """Everything about one idle gap; ``finding`` is the title of the one it belongs to."""
    out = Text()
    for line in idle_gap_lines(timeline, idle_gap, width, 40, [(finding, PLAIN)] if finding else []):
        for text, style in line:
            out.append(text, style)
        out.append("\n")
    return out


def idle_total_lines(
    timeline: Timeline, total: IdleTotal, gaps: Sequence[IdleGap], width: int, room: int, finding: list[StyledText],
) -> list[list[StyledText]]:
    """Lines on what one cause costs in all, and what the host did in the listed gaps of it, in at most ``room``
    lines."""
    lines: list[list[StyledText]] = [
        [(seconds(total.s_per_step), BOLD), (f" {total.text(timeline.period_s)}", PLAIN)],
        *([[("finding   ", DIM), *finding]] if finding else []),
    ]
    if gaps:
        first = gaps[0]
        lines.append([("costliest ", DIM), (f"{seconds(first.cost_ns / 1e9)} of GPU time on GPU {ranges(first.gpus)} "
                                            f"at {when(timeline, first.start_ns, 1000)}", PLAIN)])
    else:
        lines.append([("This cause explains only parts of gaps, which have another main cause.", DIM)])
    lines += [_python_line(line, timeline.basis) for line in total.python[:_MAX_PYTHON]]
    length = sum(gap.end_ns - gap.start_ns for gap in gaps)
    done: Counter[tuple[str, str]] = Counter()
    for gap in gaps:
        done.update({(work.thread, work.what): work.time_ns for work in gap.work})
    if done and room > len(lines) + 1:
        most = done.most_common(room - len(lines) - 1)
        lines.append([(f"the host during the {len(gaps)} costliest gaps", BOLD)])
        names = max(len(thread) for (thread, _), _ in most)
        lines += [_work_line(time / max(1, length), thread, what, names) for (thread, what), time in most]
    return [justify(line, [], width) for line in lines][:room]


def _python_line(line: StackLine, basis: str) -> list[StyledText]:
    """"Python    38 ms of each step: metrics.py:112 confusion_matrix"; of one gap without the basis."""
    text = line_words(line, basis) if basis else f"{seconds(line.s_per_step)}: {printable(line.line)}"
    return [("Python    ", DIM), (text, PLAIN), (BY_TRACER * line.traced, DIM)]


def _work_line(share: float, thread: str, what: str, names: int) -> list[StyledText]:
    cells = min(10, max(1, round(10 * min(1.0, share))))
    return [(f"  {percent(min(1.0, share)):>5} ", PLAIN), ("█" * cells + "·" * (10 - cells), PART_STYLE["host"]),
            (f" {fit(thread, min(names, 24))} ", DIM), (what, PLAIN)]


def idle_gap_lines(
    timeline: Timeline, idle_gap: IdleGap, width: int, room: int, finding: list[StyledText],
) -> list[list[StyledText]]:
    """One idle gap in at most ``room`` lines: cost, cause, what the host did, what ended it, its finding."""
    length = idle_gap.end_ns - idle_gap.start_ns
    who = f"GPU {ranges(idle_gap.gpus, ', ')}" if len(idle_gap.gpus) == 1 else f"GPUs {ranges(idle_gap.gpus, ', ')}"
    ended_by = (idle_gap.ended_by, PLAIN) if idle_gap.ended_by else ("nothing in this step or trace", DIM)
    tail: list[list[StyledText]] = [[("ended by  ", DIM), ended_by]]
    if finding:
        tail.append([("finding   ", DIM), *finding])
    cause = cause_text(idle_gap.cause, idle_gap.part) + (f": {idle_gap.meanwhile}" if idle_gap.meanwhile else "")
    head: list[list[StyledText]] = [
        [(seconds(idle_gap.cost_ns / 1e9), BOLD), (f" of GPU time on {who}: {seconds(length / 1e9)} from ", PLAIN),
         (when(timeline, idle_gap.start_ns, _grain(length)), PLAIN)],
        [("why       ", DIM), ("█ ", PART_STYLE[idle_gap.part]), (cause, PLAIN)],
    ]
    head += [_python_line(line, "") for line in idle_gap.python[:_MAX_PYTHON]]
    host: list[list[StyledText]] = []
    free = room - len(head) - len(tail)
    if idle_gap.work and free >= 2:
        host.append([("the host meanwhile", BOLD)])
        names = max(len(w.thread) for w in idle_gap.work[:free - 1])
        host += [_work_line(work.time_ns / max(1, length), work.thread, work.what, names)
                 for work in idle_gap.work[:free - 1]]
    elif idle_gap.host and free >= 1:
        host.append([("the host  ", DIM), (idle_gap.host, PLAIN)])
    elif free >= 1:
        host.append([("the host  ", DIM), ("no host thread is known as the cause", DIM)])
    return [justify(line, [], width) for line in [*head, *host, *tail]][:room]


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
