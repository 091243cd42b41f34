"""A comparison as lines: the verdict, what became of the advice, what changed; the rest where it is asked for.

The screen, the text and the document (``headline``) are made from these.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from gputop.comparison.advice import FollowedAdvice
from gputop.comparison.compare import MAX_REPEATS, METHOD, Comparison, GateResult, signed
from gputop.comparison.figures import SECONDS, ComparedRow, Group, of_group
from gputop.comparison.sides import Side
from gputop.core.metrics import BYTES, BYTES_PER_S, CELSIUS, GPU_METRICS, HERTZ, RATIO, WATTS
from gputop.render.step_parts import PARTS
from gputop.render.table import Column, Table, table_lines
from gputop.text.markup import without_marks
from gputop.text.units import bytes_, counted, percent, printable, ranges, rate, seconds, wrap

_LABELS = {
    "median_s": "median", "mean_s": "mean", "wall_s": "wall time per training step",
    "live_s": "live, minutes before the capture",
    **{part.id: part.name for part in PARTS},
    "waiting": "collectives waiting", "count_per_step": "collectives per step",
}
_SHARES = {"busy": "busy", "compute": "compute", "collectives": "coll.", "collectives_exposed": "exposed",
           "copies": "copies", "idle": "idle"}
_REST = {"launch_delay_s": "launch delay", "kernels": "kernels/step", "tensor_core_time": "tensor cores"}
_MARKS = {"better": "+", "worse": "-", "changed": "*", "noise": " ", "cannot be told": "?"}
_AGAIN = "Capture both jobs again and add the traces: --again-a A2 --again-b B2."
_CHANGED = ("better", "worse", "changed")
# A figure that differs by this share of the step without being certain is shown with what changed: hardly anybody
# would call it unchanged. gputop's own.
_SHOWN_UNSURE = 0.05
_GROUPS: tuple[tuple[Group, str], ...] = (
    ("breakdown", "Where the mean step goes"), ("gpus", ""), ("collectives", "Collectives"),
    ("memory", "Peak memory in use"), ("live", "Live, means of minutes"))
_LEAST_WIDTH = 38  # of sentences
_LABEL = Column("", least=34, most=34)
_FIGURES = (Column("A", str, least=8), Column("B", str, least=8), Column("change", str, least=7), Column("verdict"))
_KINDS = {"trace": "trace", "analysis": "saved analysis", "snapshot": "snapshot"}


Tone = Literal["", "head", "good", "bad", "warn", "dim"]
_TONES: dict[str, Tone] = {"better": "good", "worse": "bad", "changed": "warn"}


class ReportLine(Struct, frozen=True):
    """A line of the report and what its color is to say; the words are clear without it."""

    text: str
    tone: Tone = ""


def text_report(comparison: Comparison, width: int = 80, *, everything: bool = False) -> str:
    """The lines of :func:`layout` as one text, for the command line."""
    lines = layout(comparison, width, everything=everything, unfold="--verbose", again=_AGAIN)
    return "\n".join(line.text for line in lines) + "\n"


def layout(comparison: Comparison, width: int = 80, *, everything: bool, unfold: str, again: str) -> list[ReportLine]:
    """Lay out what a comparison says, in lines of at most ``width`` columns (tables of 80 at least, and paths,
    excepted).

    ``everything``: with the figures that did not change and how the verdicts are made; else ``unfold`` names what shows
    them, an option or a key. ``again`` says how to capture again where that would decide.
    """
    prose, width = max(width, _LEAST_WIDTH), max(width, 80)
    # The wall time per training step stands beside the step's where they differ.
    shown = [row for row in comparison.rows if everything or row.verdict in _CHANGED or _is_unsure(row, comparison) or (
        comparison.wall is not None and row.id in ("mean_s", "wall_s"))]
    out: list[ReportLine] = []
    for section in (_summary(comparison, again, prose), _notes(comparison, prose), _advice(comparison, prose),
                    *_tables(comparison, shown, width, everything), _folded(comparison, shown, unfold, prose),
                    _sides(comparison, width), _wrapped(METHOD, prose, tone="dim") if everything else ()):
        part = [ReportLine(line.text.rstrip(), line.tone) for line in section]
        out += [ReportLine(""), *part] if out and part else part
    return out


def _wrapped(text: str, width: int, begin: str = "", tone: Tone = "") -> Iterator[ReportLine]:
    return (ReportLine(line, tone) for line in wrap(text, width, begin))


def _summary(c: Comparison, again: str, width: int) -> Iterator[ReportLine]:
    row = c.decisive
    if row is None:
        return
    unchanged = c.repeat is None and row is not c.wall and row.verdict == "noise"
    tone: Tone = _TONES.get(c.verdict, "dim" if unchanged else "warn")
    yield from _wrapped(c.headline, width, tone=tone)
    mean, median = (next(r for r in c.rows if r.group == "steps" and r.id == id_) for id_ in ("mean_s", "median_s"))
    more = []
    if c.verdict in _CHANGED and row is median:
        more.append("The mean varies too much for a verdict.")
    elif c.verdict in _CHANGED and {mean.verdict, median.verdict} == {"better", "worse"}:
        more.append(f"Its typical step is {median.verdict}, though: look at the slow steps.")
    waits = next((r for r in c.rows if r.group == "breakdown" and r.id == "input"), None)
    if waits is not None and waits.a and not waits.b and mean.verdict == "better" and mean.a and mean.change:
        more.append(f"B does not wait for input. If only the input differs (synthetic data), input costs "
                    f"{seconds(-mean.change)} of each step of A ({percent(-mean.change / mean.a)}).")
    if row.work == 1.0 and c.sample_change is not None:
        more.append("If the bytes copied to the GPUs show the batch size, the time per sample is "
                    f"{'shorter' if c.sample_change < 0 else 'longer'} by {abs(c.sample_change):.1%}.")
    if c.repeat is not None:
        reason = c.repeat.reason or ""
        more.append(f"{_how_often(c)} {reason[:1].upper()}{reason[1:]}. {again}".strip())
    yield from _wrapped(" ".join(more), width) if more else ()


def _how_often(c: Comparison) -> str:
    count = c.captures_needed
    if count is None:
        return ""
    if count > MAX_REPEATS:
        return f"Even {MAX_REPEATS} captures of each may not be enough."
    return f"About {count} captures of each would be enough."


def _notes(c: Comparison, width: int) -> Iterator[ReportLine]:
    for note in c.notes:
        yield from _wrapped(note.message, width, "!  ", "warn")


def _sides(c: Comparison, width: int) -> Iterator[ReportLine]:
    for name, side in (("A", c.a), ("B", c.b)):
        yield ReportLine(f"{name}  {printable(side.path)}", "dim")
        yield from _wrapped(_about(side), width, "   ", "dim")
        for repeat in side.repeats:
            yield ReportLine(f"   and {printable(repeat.path)}", "dim")


def _about(side: Side) -> str:
    steps = side.steps
    text = ("SIMULATED " if side.simulated else "") + _KINDS[side.kind]
    if steps is not None:
        text += f", {counted(steps.count, 'step')} by {steps.anchor}"
    elif side.analysis is not None:
        text += ", no steps found"
    return text


def _tables(c: Comparison, rows: list[ComparedRow], width: int, everything: bool) -> Iterator[Iterable[ReportLine]]:
    yield _steps(c, rows, width, everything)
    for group, title in _GROUPS:
        yield _gpus(c, rows, width) if group == "gpus" else _group(c, group, title, rows, width)


def _is_unsure(row: ComparedRow, c: Comparison) -> bool:
    if row.verdict != "noise" or row.change is None or row.group not in ("steps", "breakdown"):
        return False
    step = next((one.a for one in c.rows if one.id == "mean_s" and one.a), None)
    least = _SHOWN_UNSURE * step if row.unit == SECONDS and step else _SHOWN_UNSURE
    return abs(row.change) >= least


def _folded(c: Comparison, shown: list[ComparedRow], unfold: str, width: int) -> Iterator[ReportLine]:
    folded = [row for row in c.rows if row not in shown]
    untold = sum(row.verdict == "cannot be told" for row in folded)
    which = [f"did not change beyond noise ({len(folded) - untold})" if len(folded) > untold else "",
             f"cannot be told ({untold})" if untold else ""]
    if not shown and c.decisive is None:
        yield from _reasons(folded, width)
    if folded:
        yield from _wrapped(f"Hidden: values that {' or '.join(filter(None, which))}. {unfold} shows all, and the "
                            "method.", width, tone="dim")


def _steps(c: Comparison, shown: list[ComparedRow], width: int, everything: bool) -> Iterator[ReportLine]:
    rows = list(of_group(shown, "steps"))
    if not rows:
        return
    tails = [_figure(None if side.steps is None else side.steps.p95_s / side.iterations, "s") for side in (c.a, c.b)]
    yield from _table("Step time", rows, width, c, ("95th percentile", *tails, "", "") if everything else None)
    if not everything:
        return
    within = [f"{_LABELS[row.id]} {bounds[0]} to {bounds[1]}" for row in rows if (bounds := _bounds(row)) is not None]
    if within:
        yield from _wrapped(f"The change lies within: {', '.join(within)}.", width, "  ")


def _group(c: Comparison, group: Group, title: str, shown: list[ComparedRow], width: int) -> Iterator[ReportLine]:
    rows = [row for row in of_group(shown, group) if group != "breakdown" or max(row.a or 0, row.b or 0) > 0]
    if rows:
        yield from _table(title, rows, width, c)


def _table(title: str, rows: list[ComparedRow], width: int, c: Comparison, last: tuple[str, ...] | None = None,
           ) -> Iterator[ReportLine]:
    """A, B, change and verdict, one row a line; GPUs or allocators that say the same are one, reasons below.

    Of B's figures it shows those for the same work. ``last``: one more row.
    """
    per_sample = any(row.work != 1.0 for row in rows)
    alike: dict[tuple[str, ...], list[ComparedRow]] = {}
    for row in rows:
        key: tuple[str, ...] = (row.id, row.verdict)
        if row.group == "memory":
            key = (_figure(row.a, row.unit), _figure(row.b, row.unit), row.verdict)
        alike.setdefault(key, []).append(row)
    cells, tones = list[tuple[str, ...]](), list[Tone](["head"])
    for same in alike.values():
        one = same[0]
        a, b = (_mean([getattr(row, side) for row in same]) for side in ("a", "b_alike"))
        unsure = _is_unsure(one, c)
        cells.append((_label(same), _figure(a, one.unit), _figure(b, one.unit), _change(a, b, one.unit),
                      "not proven" if unsure else one.verdict))
        tones.append("warn" if unsure else _TONES.get(one.verdict, ""))
    cells += [last] if last else []
    columns = (replace(_LABEL, title=title + ", for A's samples" * per_sample), *_FIGURES)
    table = Table(title, columns, tuple((f"  {label}", *others) for label, *others in cells), "")
    yield from map(ReportLine, table_lines(table, width), (*tones, ""))
    yield from _reasons(rows, width, "  ")


def _reasons(rows: Iterable[ComparedRow], width: int, begin: str = "") -> Iterator[ReportLine]:
    for reason in dict.fromkeys(row.reason for row in rows if row.verdict == "cannot be told" and row.reason):
        yield from _wrapped(f"cannot be told: {reason}.", width, begin)


def _label(rows: list[ComparedRow]) -> str:
    one = rows[0]
    if one.group == "live":
        gpus = ranges(row.gpu for row in rows if row.gpu is not None)
        return f"{GPU_METRICS[one.id].label}, GPU {gpus}"
    if one.group == "memory":
        return printable(one.id) + (f" and {len(rows) - 1} more" if len(rows) > 1 else "")
    return _LABELS[one.id]


def _mean(values: list[float | None]) -> float | None:
    measured = [v for v in values if v is not None]
    return sum(measured) / len(measured) if len(measured) == len(values) else None


def _change(a: float | None, b: float | None, unit: str) -> str:
    if a is None or b is None:
        return ""
    if unit == RATIO:
        return f"{100 * (b - a):+.1f} pp".replace("-", "−")
    if unit == CELSIUS:  # 0 is no nothing, so there are no shares of it
        return f"{b - a:+.0f} °C"
    if not a:
        return ""
    share = b / a - 1
    return f"{share:+.1%}".replace("-", "−") if abs(share) < 10 else f"×{share + 1:.3g}" if share < 999 else "×1000+"


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return "?"
    formats: dict[str, Callable[[float], str]] = {
        "s": seconds, RATIO: lambda v: f"{v:.1%}", BYTES: bytes_, BYTES_PER_S: rate,
        WATTS: lambda v: f"{v:.0f} W", HERTZ: lambda v: f"{v / 1e6:.0f} MHz", CELSIUS: lambda v: f"{v:.0f} °C"}
    return formats.get(unit, lambda v: f"{v:.4g}")(value)


def _gpus(c: Comparison, shown: list[ComparedRow], width: int) -> Iterator[ReportLine]:
    """The GPUs of which a figure is shown, with all their figures; those that read the same are one line."""
    gpus = sorted({row.gpu for row in of_group(shown, "gpus") if row.gpu is not None})
    if not gpus:
        return
    rows = {(row.gpu, row.id): row for row in of_group(c.rows, "gpus")}
    yield ReportLine("GPUs, A→B, % of the step      (+ better, - worse, * changed, ? cannot be told)", "head")
    yield from _by_gpu(rows, gpus, _SHARES, 10, width)
    rest = {id_: label for id_, label in _REST.items() if any((gpu, id_) in rows for gpu in gpus)}
    if rest:
        yield from _by_gpu(rows, gpus, rest, 22, width)
    yield from _reasons(rows.values(), width)
    if c.verdict == "better" and any(row.verdict == "worse" and row.id in ("busy", "compute", "idle")
                                     for row in rows.values()):
        yield from _wrapped("Shares refer to each side's own step: the same idle time is a larger share of a shorter "
                            "step. Compare the parts in seconds above.", width)


def _by_gpu(rows: dict[tuple[int | None, str], ComparedRow], gpus: list[int], columns: dict[str, str], least: int,
            width: int) -> Iterator[ReportLine]:
    alike: dict[tuple[str, ...], list[int]] = {}
    for gpu in gpus:
        alike.setdefault(tuple(_cell(rows.get((gpu, id_))) for id_ in columns), []).append(gpu)
    table = Table("GPUs", (Column("GPU", least=5), *(Column(label, str, least=least) for label in columns.values())),
                  tuple((ranges(same), *cells) for cells, same in alike.items()), "")
    yield from map(ReportLine, table_lines(table, width))


def _cell(row: ComparedRow | None) -> str:
    if row is None:
        return ""
    if row.unit == RATIO:
        a, b = ("?" if v is None else f"{100 * v:.0f}" for v in (row.a, row.b))
    else:
        a, b = (_figure(v, row.unit) for v in (row.a, row.b))
    return f"{a}→{b} {_MARKS[row.verdict]}"


def _advice(c: Comparison, width: int) -> Iterator[ReportLine]:
    if not c.advice:
        yield ReportLine("Advice: neither side has a finding.")
        return
    followed = any(e.status != "new" for e in c.advice)
    yield ReportLine("Advice of A and what became of it" if followed else "Advice", "head")
    for entry in c.advice:
        yield from _entry(entry, width)


_STATUS = {"gone": "GONE", "weaker": "WEAKER", "same": "STILL THERE", "stronger": "STRONGER", "new": "NEW IN B",
           "not judged": "NOT CHECKED IN B"}
_STATUS_TONES: dict[str, Tone] = {"gone": "good", "weaker": "good", "stronger": "bad", "new": "warn"}
_FULFILLED = {"kept": "REACHED", "partly kept": "PARTLY REACHED", "broken": "NOT REACHED"}
_FULFILLED_TONES: dict[str | None, Tone] = {"kept": "good", "partly kept": "warn", "broken": "bad"}


def _entry(e: FollowedAdvice, width: int) -> Iterator[ReportLine]:
    on = f" · GPU {ranges(e.gpus)}" if e.gpus else ""
    severity = " → ".join(dict.fromkeys(filter(None, (e.severity_a, e.severity_b))))
    status = "IN B" if e.status == "new" and e.reason is not None else _STATUS[e.status]
    yield from _wrapped(f"{status}: {e.title} [{e.id}, {severity}]{on}", width, "  ", _STATUS_TONES.get(e.status, ""))
    if e.title_b not in (None, e.title):
        yield from _wrapped(f"in B: {e.title_b}", width, "    ")
    parts = []
    if e.promised is not None:
        of = {"sample": " per sample", "recording": " of the recorded time"}.get(e.per, "")
        parts.append(f"estimated {_less(e.promised)}{of}")
    if e.once_s is not None:
        parts.append(f"{seconds(e.once_s[0])} once in A, {seconds(e.once_s[1]) if e.once_s[1] else 'none'} in B")
    if e.together is not None:
        parts.append(f"all followed advice together {percent(e.together[0])} to {_less(e.together[1])}")
    if e.measured is not None:
        by = " of the wall time per training step" if e.per == "recording" else ""
        ends = None if e.low is None or e.high is None else (
            (e.low, min(e.high, 1.0)) if e.measured >= 0 else (-e.high, -e.low))
        between = f" ({percent(ends[0])} to {percent(ends[1])})".replace("-", "−") if (
            e.fulfilled not in (None, "cannot be told") and ends is not None
            and percent(ends[0]) != percent(ends[1])) else ""
        parts.append(f"measured {_less(e.measured)}{by}{between}")
    unsure = e.fulfilled in (None, "cannot be told") and e.outcome == "cannot be told"
    if e.fulfilled not in (None, "cannot be told"):
        parts.append(_FULFILLED[e.fulfilled] + (", more than estimated" if e.outcome == "more than promised" else ""))
    elif e.outcome is not None and not unsure:
        parts.append(e.outcome.replace("promised", "estimated"))
    text = "; ".join(parts)
    if unsure and text:
        text += f" (cannot be told: {e.reason})" if e.reason is not None else " (cannot be told)"
    elif e.reason is not None:
        text += (": " if text else "") + e.reason
    if text:
        yield from _wrapped(text, width, "    ", _FULFILLED_TONES.get(e.fulfilled, ""))


def _bounds(row: ComparedRow) -> tuple[str, str] | None:
    """Return between which shares the change of a time lies, where it was tested. No step takes less than no time."""
    if not row.a or row.low is None or row.high is None:
        return None
    return signed(max(-1.0, row.low / row.a)), signed(row.high / row.a)


def _less(share: float) -> str:
    """"45% less", of a time."""
    return f"{percent(abs(share))} {'more' if share < 0 else 'less'}"


_COLUMNS = 100
_OUTCOME_MARKS = {"passed": "✅", "failed": "❌", "cannot be told": "❔"}


def markdown(comparison: Comparison, gates: Iterable[GateResult]) -> str:
    """Return the comparison as Markdown that GitHub and Slack both show: no headings, tables or HTML. What others wrote
    (names, paths) stands in code."""
    return "\n".join(_markdown(comparison, list(gates))) + "\n"


def _markdown(comparison: Comparison, gates: list[GateResult]) -> Iterator[str]:
    simulated = "SIMULATED. " if comparison.a.simulated or comparison.b.simulated else ""
    yield f"gputop: {simulated}{without_marks(comparison.headline)}"
    if gates:
        yield ""
        for result in gates:
            yield (f"- {_OUTCOME_MARKS[result.outcome]} {result.outcome}: {without_marks(result.gate)}: "
                   f"{without_marks(result.why)}")
    report = text_report(comparison, _COLUMNS)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", report)), default=0))
    yield from ("", fence, report.rstrip("\n"), fence)
