"""The page of an analysis: findings, where the step's time goes, all tables. No request leaves it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from gputop.analysis.results import Analysis, Layers, Limits, TypicalStep
from gputop.core.findings import Finding, ids_by_missing
from gputop.core.version import __version__
from gputop.diagnosis.python_lines import cost_words, gap_words, lines_of_gaps, per_basis, worth_showing
from gputop.diagnosis.report import limit_of, text_report
from gputop.diagnosis.roofline import axes_text, legend, svg
from gputop.diagnosis.tables import tables
from gputop.export.page import BANNER, page, step_runs
from gputop.render.evidence_words import evidence
from gputop.render.finding_text import DO, NOTHING_FOUND, gain_sentence, kernel_rows, verdict_of
from gputop.render.step_parts import PART_BY_ID
from gputop.render.table import Table, to_html
from gputop.text.markup import esc, esc_lines
from gputop.text.units import counted, percent, printable, ranges, seconds

_LINES_SHOWN = 10
_OPEN = ("Limit", "Ranks", "Time")  # tables that are unfolded at first
_PHASE_COLORS = {"forward": "#43b98c", "loss": "#d8c05a", "backward": "#5f8fe5", "recomputation": "#e5955f",
                 "optimizer": "#9a7fe0", "collectives": "#e56b7f", "copies": "#7fb3e8"}
_OTHER_COLOR, _GAP_COLOR = "#8b93a3", "#e5955f"
_MAX_SLOTS = 10_000  # of a step's picture


def analysis_page(result: Analysis) -> str:
    """The page of an analysis alone, as notebooks show it: findings, the step, the report as text."""
    title = f"gputop: {', '.join(map(printable, result.trace.hosts)) or 'a trace'}"
    notes = "".join(f'<p class="fine">{esc(note.message)}</p>' for note in result.trace.quality)
    report = esc_lines(text_report(result, findings=False))
    text = f"<details><summary>The analysis as text</summary><pre>{report}</pre></details>"
    parts = [f'<header class="top"><div><h1>{esc(title)}</h1></div></header>', BANNER if result.simulated else "",
             what_to_do(result.findings, limit_of(result), ids_by_missing(result.abstained)),
             "".join(("<section><h2>The step</h2>", *step_of(result), notes, text, "</section>"))]
    return page(title, parts, (f"<footer>Written by gputop {esc(__version__)}.</footer>",))


def what_to_do(findings: Iterable[Finding], limit: str, missing: Mapping[str, list[str]]) -> str:
    """``limit``: what is said where there are no findings; ``missing``: the rules that lack it."""
    body = "".join(_finding(f) for f in findings) or "".join(
        f"<p>{esc(line)}</p>" for line in (limit or NOTHING_FOUND).splitlines())
    if missing:
        rows = "".join(f"<dt><code>{esc(', '.join(ids))}</code></dt><dd>{esc(what)}</dd>"
                       for what, ids in missing.items())
        body += (f"<details><summary>{counted(sum(map(len, missing.values())), 'check')} could not run</summary>"
                 f"<dl>{rows}</dl></details>")
    return f"<section><h2>What to do</h2>{body}</section>"


def _finding(f: Finding) -> str:
    verdict = verdict_of(f, *kernel_rows(f))
    chips = "".join(f"<li>{esc(label)} <b>{esc(value)}</b></li>" for label, value in evidence(f))
    gpus = f" · GPU {ranges(f.gpus, ', ')}" if f.gpus else ""
    explained = "".join(f"<li>{esc(c.title)}</li>" for c in f.consequences)
    tag = f"{f.severity}{gpus} · {f.origin}{' · yours' if f.yours else ''}"
    rows = "".join(f'<p class="{"do" if row.label == DO else "row"}"><b>{esc(row.label)}</b> {esc(row.text)}</p>' + (
        f'<div class="code"><pre>{esc_lines(row.code)}</pre></div>' if row.code else "") for row in verdict.rows)
    return "".join((
        f'<article class="finding {esc(f.severity)}"><header><h3>{esc(verdict.head)}</h3>',
        f'<span class="gain">{esc(verdict.fix)}</span>' if verdict.fix else "",
        f'<span class="tag">{esc(tag)}</span></header>', rows,
        f'<ul class="chips">{chips}</ul>' if chips else "",
        f'<p class="fine">It also explains:</p><ul class="fine">{explained}</ul>' if explained else "",
        f'<p class="fine">{esc(gain_sentence(f).removesuffix("."))}. Rule <code>{esc(f.id)}</code>: '
        f'{esc(f.source)}.</p></article>'))


# -- the step ------------------------------------------------------------------------------------


def step_of(result: Analysis) -> list[str]:
    """Return the parts of an analysis alone; an empty text for what it lacks."""
    made = {table.name: table for table in tables(result)}
    return [_breakdown(result), _limits(result.limits), _one_step(result.typical_step),
            _python(result, made["Python"]) if "Python" in made else "",
            _layers(result.layers or result.cpu_layers, made["Layers"]),
            to_html(made.pop("GPUs"), opened=True),
            *(to_html(table, opened=name in _OPEN) for name, table in made.items())]


def _breakdown(result: Analysis) -> str:
    times = {} if result.breakdown is None else result.breakdown.known
    parts = [(PART_BY_ID[id_], time_s) for id_, time_s in times.items() if time_s > 0]
    if not parts:
        return ""
    total = sum(time_s for _, time_s in parts)
    summary = f"Mean step {seconds(total)}"
    if result.steps is not None:
        summary += (f", median {seconds(result.steps.median_s)}, 95th percentile {seconds(result.steps.p95_s)} "
                    f"of {result.steps.count} steps")
    bar = "".join(f'<span style="width:{100 * (time_s / total):.3f}%;background:{part.dark}" title="{esc(part.label)}: '
                  f'{seconds(time_s)}, {percent(time_s / total)}"></span>' for part, time_s in parts)
    rows = "".join(f'<li title="{esc(part.meaning)}"><i style="background:{part.dark}"></i>{esc(part.label)}'
                   f"<b>{esc(_share(time_s / total))}</b><em>{seconds(time_s)}</em></li>"
                   for part, time_s in sorted(parts, key=lambda part: -part[1]))
    means = " Each part is averaged over the participating GPUs." if len(result.gpus) > 1 else ""
    return (f"<p>{summary}.{means}</p>"
            f'<div class="step" role="img" aria-label="parts of the step">{bar}</div><ul class="legend">{rows}</ul>')


def _share(share: float) -> str:
    return percent(share) if share >= 0.0095 else f"{100 * share:.1f}%" if share >= 0.0005 else "<0.1%"


def _one_step(step: TypicalStep | None) -> str:
    """The step nearest to the median, a strip a GPU; nothing where its runs are not of its slots."""
    if step is None or not 0 < step.slots <= _MAX_SLOTS or not step.duration_s or not step.gpus:
        return ""
    slots = step.slots
    rows = ""
    for gpu in step.gpus:
        if not all(part in PART_BY_ID and 0 <= first < end <= slots for part, first, end in gpu.runs):
            return ""
        rows += (f'<div class="lane"><span>{gpu.gpu}</span><svg viewBox="0 0 {slots} 1" role="img" '
                 f'preserveAspectRatio="none" shape-rendering="crispEdges" aria-label="GPU {gpu.gpu}">'
                 f"{step_runs(gpu.runs)}</svg></div>")
    ticks = "".join(f"<span>{seconds(step.duration_s * i / 4)}</span>" for i in range(5))
    return (f"<h3>Timeline of step {step.step} of the trace, {seconds(step.duration_s)}, one row per GPU. Each slice "
            f"of {seconds(step.duration_s / slots)} shows the part that took the most time.</h3>"
            f'<div class="plate steps">{rows}<div class="axis"><span></span><div>{ticks}</div></div></div>')


def _python(result: Analysis, table: Table) -> str:
    """The lines of Python that ran in the gaps, and the training loop's stacks as an icicle: a flame graph, hanging."""
    stacks = result.stacks
    if stacks is None or not stacks.flame:
        return ""
    period_s = result.steps.mean_s if result.steps is not None else result.trace.window_s
    lists = ""
    for gaps in worth_showing(stacks, period_s):
        lines = "".join(f"<li>{esc(text)}</li>" for text in lines_of_gaps(gaps, stacks))
        words = gap_words(gaps, stacks)
        lists += f"<p>{esc(words[0].upper() + words[1:])}.</p><ul>{lines}</ul>"
    whole, flame = sum(node.time_s for node in stacks.flame if node.parent is None), stacks.flame
    boxes = _icicle(table, lambda row, _: _GAP_COLOR if flame[row].gap_s > 0.5 * flame[row].time_s else _OTHER_COLOR)
    return (f"<h3>Python lines that ran in the gaps</h3>{lists}<h3>Python code of the training loop, "
            f"{esc(per_basis(stacks.basis))} of {seconds(whole)}: each line with its calls below it, without library "
            "lines that only forward a call. Lines that run mostly in gaps are highlighted. Click a box to see it "
            f"alone; click again to go back.</h3>{boxes}"
            f'<p class="fine">{esc(cost_words(stacks, result.simulated))}</p>')


def _icicle(table: Table, color: Callable[[int, int], str]) -> str:
    """Draw a tree whose first column is a share: each box is as wide as that, its parts are below it. ``color`` is of a
    row and of the one at its root."""
    depth: list[int] = []
    root: list[int] = []
    used: dict[int | None, float] = {None: 0.0}  # up to where each box, and the whole, is filled
    boxes = ""
    for i, (row, parent) in enumerate(zip(table.rows, table.parents, strict=True)):
        depth.append(0 if parent is None else depth[parent] + 1)
        root.append(i if parent is None else root[parent])
        used[i] = left = used[parent]
        share = float(row[0] or 0.0)
        used[parent] += share
        about = ", ".join(f"{c.title} {c.text(v)}" for c, v in zip(table.columns, row, strict=True) if v is not None)
        boxes += (f'<b style="left:{100 * left:.3f}%;width:{100 * share:.3f}%;top:{22 * depth[i]}px;'
                  f'background:{color(i, root[i])}" title="{esc(about)}">{esc(str(row[-1]))}</b>')
    return f'<div class="plate icicle" style="height:{22 * (max(depth) + 1)}px">{boxes}</div>'


def _layers(layers: Layers | None, table: Table) -> str:
    """The step by phase and layer as an icicle: each box is as wide as its share, its parts are below it."""
    if layers is None or not layers.rows:
        return ""
    rows, processor = layers.rows, "GPU" if layers.gpus else "CPU"
    boxes = _icicle(table, lambda _, phase: _PHASE_COLORS.get(rows[phase].name, _OTHER_COLOR))
    lines = "".join(f"<li>{esc(line.line)}<b>{esc(_share(line.share))}</b><em>{seconds(line.device_s)}</em></li>"
                    for line in (layers.sources or ())[:_LINES_SHOWN])
    what = "captured window" if layers.basis == "window" else f"mean {layers.basis}"
    of_what = ("the GPU's busy time, plus the idle time before their kernels" if layers.gpus else
               "the time during which the CPU runs their ops; overlapping ops share the time")
    by_line = f"<h3>The {processor}'s time by source line</h3>"
    return (f"<h3>The {esc(what)} of {seconds(layers.total_s)} by phase and layer: {of_what}. Click a box to see it "
            f"alone; click again to go back.</h3>{boxes}"
            + (f'{by_line}<ul class="legend">{lines}</ul>' if lines else ""))


def _limits(limits: Limits | None) -> str:
    """Show the roofline, or why the limit is not known."""
    if limits is None or not limits.step_s:
        return ""
    if not limits.gpu:
        return f"<p>The distance of the step from the GPU's limit is unknown. {esc(limits.reason)}</p>"
    drawing = svg(limits)
    points = "".join(f'<p class="fine">{esc(line)}</p>' for line in (axes_text(limits), *legend(limits)))
    return ("<h3>Roofline: FLOP per byte (horizontal) and FLOP/s (vertical), both logarithmic; a larger circle"
            f' means that the op takes more time</h3><div class="plate">{drawing}</div>{points}') if drawing else ""
