"""Descriptions of the selection on a timeline: the lines below the picture, and the details."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.text import Text

from gputop.analysis.results import StackLine
from gputop.diagnosis.python_lines import line_words
from gputop.render.finding_text import BY_TRACER
from gputop.render.palette import ACCENT, BOLD, DIM, PART_STYLE, PLAIN
from gputop.render.styled_text import StyledText, justify
from gputop.text.units import fit, percent, printable, ranges, seconds
from gputop.timeline.model import IdleGap, IdleTotal, Range, Row, cause_text
from gputop.timeline.read_timeline import Timeline
from gputop.tui.timeline.cells import KIND_STYLE
from gputop.tui.timeline.header import legend, step_at, visible_steps
from gputop.tui.timeline.viewport import View, moment

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
    tail: list[list[StyledText]] = []
    if idle_gap.ended_by:
        tail.append([("ended by  ", DIM), (idle_gap.ended_by, PLAIN)])
    else:
        tail.append([("ended by  ", DIM), ("nothing in this step or trace", DIM)])
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
