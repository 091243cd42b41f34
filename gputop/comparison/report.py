"""A comparison as text, for a terminal or a ticket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from gputop.comparison.advice import Followed
from gputop.comparison.compare import METHOD, Comparison
from gputop.comparison.rows import Group, Row, of_group, percent_change
from gputop.comparison.sides import Side
from gputop.core.metrics import BYTES, BYTES_PER_S, CELSIUS, GPU_METRICS, HERTZ, RATIO, WATTS
from gputop.render.step_parts import PARTS
from gputop.text.units import bytes_, fit, percent, printable, ranges, rate, seconds
from gputop.text.wrapping import wrap

_LABELS = {
    "median_s": "median", "mean_s": "mean",
    **{part.id: part.name for part in PARTS},
    "waiting": "collectives waiting", "count_per_step": "collectives per step",
}
_SHARES = {"busy": "busy", "compute": "compute", "collectives": "coll.", "collectives_exposed": "exposed",
           "copies": "copies", "idle": "idle"}
_REST = {"launch_delay_s": "launch delay", "kernels": "kernels/step", "tensor_core_time": "tensor cores"}
_MARKS = {"better": "+", "worse": "-", "changed": "*", "noise": " ", "cannot be told": "?"}
_LABEL = 34  # columns of a table's first column
_KINDS = {"trace": "trace", "analysis": "saved analysis", "snapshot": "snapshot"}


def text_report(comparison: Comparison, width: int = 80) -> str:
    """Everything a comparison says, in lines of at most ``width`` columns, 80 at least (paths excepted)."""
    width = max(width, 80)
    lines: list[str] = []
    for section in (
            _head, _summary, _steps, partial(_group, "breakdown", "Where the mean step goes"), _gpus,
            partial(_group, "collectives", "Collectives"), partial(_group, "memory", "Peak memory in use"),
            partial(_group, "live", "Live, means of minutes"), _advice, _method):
        part = "\n".join(line.rstrip() for line in section(comparison, width)).strip("\n").splitlines()
        if part:
            lines += ["", *part] if lines else part
    return "\n".join(lines) + "\n"


def _head(c: Comparison, width: int) -> Iterator[str]:
    for name, side in (("A", c.a), ("B", c.b)):
        yield f"{name}  {printable(side.path)}"
        yield from wrap(_about(side), width, "   ")
        for repeat in side.repeats:
            yield f"   and {printable(repeat.path)}"
    for note in c.notes:
        yield from wrap(note.message, width, "!  ")


def _about(side: Side) -> str:
    steps = side.analysis.steps if side.analysis is not None else None
    text = ("SIMULATED " if side.simulated else "") + _KINDS[side.kind]
    if steps is not None:
        text += f", {steps.count} steps by {steps.anchor}"
    elif side.analysis is not None:
        text += ", no steps found"
    return text


def _summary(c: Comparison, width: int) -> Iterator[str]:
    row = c.decisive
    if row is None:
        return
    change = percent_change(row)
    mean, median = (next(r for r in c.rows if r.group == "steps" and r.id == id_) for id_ in ("mean_s", "median_s"))
    what = "typical step" if row is median else "step"
    changed = "" if change is None else f"{'shorter' if change < 0 else 'longer'} by {_exactly(abs(change))}"
    if row.verdict == "cannot be told":
        text = f"Whether the step time changed cannot be told: {row.reason}."
    elif row.verdict == "noise":
        text = "NOISE: the step time did not change by more than its noise."
        if c.repeat is not None:
            text = f"NOISE: B's {what} is {changed}, but {row.reason}."
    else:
        text = f"{c.verdict.upper()}: B's {what} is {changed}."
        if row is median:
            text += " The mean is too uneven to tell."
        elif {mean.verdict, median.verdict} == {"better", "worse"}:
            text += f" Its typical step is {median.verdict}, though: look at the slow steps."
    if c.sample_change is not None:
        text += (f" If the bytes copied to the GPUs tell the batch size, the time per sample is "
                 f"{'shorter' if c.sample_change < 0 else 'longer'} by {_exactly(abs(c.sample_change))}.")
    yield from wrap(text, width)


def _exactly(share: float) -> str:
    return f"{100 * share:.1f} %"


def _steps(c: Comparison, width: int) -> Iterator[str]:
    rows = list(of_group(c.rows, "steps"))
    if not rows:
        return
    yield from _table("Step time", rows, width)
    tails = [side.analysis.steps.p95_s / side.iterations if side.analysis is not None
             and side.analysis.steps is not None else None for side in (c.a, c.b)]
    yield f"  {fit('95th percentile', _LABEL - 2)}{_figure(tails[0], 's'):>10}{_figure(tails[1], 's'):>10}"
    within = [f"{_LABELS[row.id]} {_signed(row.low / row.a)} to {_signed(row.high / row.a)}" for row in rows
              if row.a and row.low is not None and row.high is not None]
    if within:
        yield from wrap(f"The change lies within: {', '.join(within)}.", width, "  ")


def _signed(share: float) -> str:
    return f"{100 * share:+.1f} %"


def _group(group: Group, title: str, comparison: Comparison, width: int) -> Iterator[str]:
    rows = [row for row in of_group(comparison.rows, group) if group != "breakdown" or max(row.a or 0, row.b or 0) > 0]
    if rows:
        yield from _table(title, rows, width)


def _table(title: str, rows: list[Row], width: int) -> Iterator[str]:
    """A, B, change and verdict, one row a line; GPUs or allocators that say the same are one, reasons below."""
    yield f"{fit(title, _LABEL)}{'A':>10}{'B':>10}{'change':>9}  verdict"
    alike: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        key: tuple[str, ...] = (row.id, row.verdict)
        if row.group == "memory":
            key = (_figure(row.a, row.unit), _figure(row.b, row.unit), row.verdict)
        alike.setdefault(key, []).append(row)
    for same in alike.values():
        one = same[0]
        a, b = (_mean([getattr(row, side) for row in same]) for side in "ab")
        yield (f"  {fit(_label(same), _LABEL - 2)}{_figure(a, one.unit):>10}{_figure(b, one.unit):>10}"
               f"{_change(a, b, one.unit):>9}  {one.verdict}")
    for reason in {row.reason: None for row in rows if row.verdict == "cannot be told" and row.reason}:
        yield from wrap(f"cannot be told: {reason}.", width, "  ")


def _label(rows: list[Row]) -> str:
    one = rows[0]
    if one.group == "live":
        gpus = ranges(row.gpu for row in rows if row.gpu is not None)
        return f"{GPU_METRICS[one.id].label}, GPU {gpus}"
    if one.group == "memory":
        return printable(one.id) + (f" and {len(rows) - 1} more" if len(rows) > 1 else "")
    return _LABELS[one.id]


def _mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def _change(a: float | None, b: float | None, unit: str) -> str:
    if a is None or b is None:
        return ""
    if unit == RATIO:
        return f"{100 * (b - a):+.1f} pp"
    if unit == CELSIUS:  # 0 is no nothing, so there are no shares of it
        return f"{b - a:+.0f} °C"
    if not a:
        return ""
    share = b / a - 1
    return f"{share:+.1%}" if abs(share) < 10 else f"×{share + 1:.3g}" if share < 999 else "×1000+"


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return "?"
    formats: dict[str, Callable[[float], str]] = {
        "s": seconds, RATIO: lambda v: f"{v:.1%}", BYTES: bytes_, BYTES_PER_S: rate,
        WATTS: lambda v: f"{v:.0f} W", HERTZ: lambda v: f"{v / 1e6:.0f} MHz", CELSIUS: lambda v: f"{v:.0f} °C"}
    return formats.get(unit, lambda v: f"{v:.4g}")(value)


def _gpus(c: Comparison, width: int) -> Iterator[str]:
    rows = {(row.gpu, row.id): row for row in of_group(c.rows, "gpus")}
    if not rows:
        return
    gpus = sorted({row.gpu for row in rows.values() if row.gpu is not None})
    yield "GPUs, A→B, % of the step      (+ better, - worse, * changed, ? cannot be told)"
    yield "GPU " + "".join(f"{label:>12}" for label in _SHARES.values())
    for gpu in gpus:
        yield f"{gpu:>3} " + "".join(f"{_cell(rows.get((gpu, id_)), 11):>12}" for id_ in _SHARES)
    rest = [id_ for id_ in _REST if any((gpu, id_) in rows for gpu in gpus)]
    if rest:
        yield "GPU " + "".join(f"{_REST[id_]:>24}" for id_ in rest)
        for gpu in gpus:
            yield f"{gpu:>3} " + "".join(f"{_cell(rows.get((gpu, id_)), 23):>24}" for id_ in rest)
    reasons = {row.reason: None for row in rows.values() if row.verdict == "cannot be told" and row.reason}
    for reason in reasons:
        yield from wrap(f"cannot be told: {reason}.", width)
    if c.verdict == "better" and any(row.verdict == "worse" and row.id in ("busy", "compute", "idle")
                                     for row in rows.values()):
        yield from wrap("Shares are of each side's own step: the same idle time is a larger share of a shorter one. "
                        "The parts in seconds above tell.", width)


def _cell(row: Row | None, width: int) -> str:
    if row is None:
        return ""
    if row.unit == RATIO:
        a, b = ("?" if v is None else f"{100 * v:.0f}" for v in (row.a, row.b))
    else:
        a, b = (_figure(v, row.unit) for v in (row.a, row.b))
    return f"{a}→{b} {_MARKS[row.verdict]}"[:width + 1]


def _advice(c: Comparison, width: int) -> Iterator[str]:
    if not c.advice:
        yield "Advice: neither side has a finding."
        return
    yield "Advice of A and what became of it" if any(e.status != "new" for e in c.advice) else "Advice"
    for entry in c.advice:
        yield from _entry(entry, width)


_STATUS = {"gone": "GONE", "weaker": "WEAKER", "same": "STILL THERE", "stronger": "STRONGER", "new": "NEW IN B",
           "not judged": "NOT JUDGED IN B"}


def _entry(e: Followed, width: int) -> Iterator[str]:
    on = f" · GPU {ranges(e.gpus)}" if e.gpus else ""
    severity = e.severity_a if e.severity_b is None else e.severity_b if e.severity_a is None else (
        e.severity_a if e.severity_a == e.severity_b else f"{e.severity_a} → {e.severity_b}")
    yield from wrap(f"{_STATUS[e.status]}: {e.title} [{e.id}, {severity}]{on}", width, "  ")
    parts = []
    unit = "the time per sample" if e.per == "sample" else "the step"
    if e.promised is not None:
        shown = " when it was captured" if e.when == "capture" else ""
        parts.append(f"promised {_saved(e.promised)} of {unit}{shown}")
    if e.together is not None:
        parts.append(f"all that was followed {_saved(e.together[0])} to {_saved(e.together[1])}")
    if e.measured is not None:
        low, high = _saved(e.low), _saved(e.high)
        between = f" ({low} to {high})" if e.low is not None and low != high else ""
        parts.append(f"measured {_saved(e.measured)}{between}")
    if e.fulfilled not in (None, "cannot be told"):
        parts.append(f"{e.fulfilled.upper()}" + (", more than promised" if e.outcome == "more than promised" else ""))
    elif e.outcome is not None:
        parts.append(e.outcome)
    text = ", ".join(parts)
    if e.reason is not None:
        text += (": " if text else "") + e.reason
    if text:
        yield from wrap(text, width, "    ")


def _saved(share: float | None) -> str:
    return "?" if share is None else f"{'−' if share > 0 else '+' if share < 0 else ''}{percent(abs(share))}"


def _method(c: Comparison, width: int) -> Iterator[str]:
    yield from wrap(METHOD, width)
