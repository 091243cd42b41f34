"""The sections of the page: the step of the last capture, the GPUs now, processes, host and servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gputop.analysis.results import Analysis, Layers, Limits, TypicalStep
from gputop.core.metrics import ADAPTER_METRICS, GPU_METRICS, HOST_METRICS, RATIO
from gputop.core.samples import OK, GpuSample, NodeSample, ProcessSample, Reading
from gputop.diagnosis.python_lines import cost_words, gap_words, lines_of_gaps, per_basis, worth_showing
from gputop.diagnosis.roofline import axes_text, legend, svg
from gputop.diagnosis.tables import gpus_table, tables
from gputop.export import pictures
from gputop.render.gpu_columns import COLUMNS, activity_text, clock_limits, fault_texts, flags_of
from gputop.render.step_parts import PART_BY_ID
from gputop.render.table import Table, html_none, to_html
from gputop.replay.snapshot import Snapshot
from gputop.text.commands import short_command, short_description
from gputop.text.markup import esc, esc_lines, moment, titled
from gputop.text.units import devices, limits, percent, reading, seconds

_LINES_SHOWN = 10
_OPEN = ("GPUs", "Limit", "Ranks", "Time")  # tables that are unfolded at first
_PHASE_COLORS = {"forward": "#43b98c", "loss": "#d8c05a", "backward": "#5f8fe5", "recomputation": "#e5955f",
                 "optimizer": "#9a7fe0", "collectives": "#e56b7f", "copies": "#7fb3e8"}
_OTHER_COLOR, _GAP_COLOR = "#8b93a3", "#e5955f"
_MAX_SLOTS = 10_000  # of a step's picture


def _cells() -> Iterator[tuple[str, str, str]]:
    """The cells of "Now", one for each direction of a link: heading, metric, and the metric that is 100% of it, if that
    is shown too. The activity has none: it is drawn by its own rule."""
    for column in (c for c in COLUMNS if c.page and c.metrics):
        directions = ("",) if len(column.metrics) == 1 else (" in", " out")
        for metric, direction in zip(column.metrics, directions, strict=True):
            yield column.heading_in("page") + direction, metric, column.limit


_CELLS = tuple(_cells())


def analysis(s: Snapshot) -> Analysis | None:
    """Return what the trace of the last capture says."""
    return s.capture.analysis if s.capture is not None else None


# -- the step ------------------------------------------------------------------------------------


def step(s: Snapshot) -> str:
    """Show where the mean step's time goes, one step as it went, and the GPUs in the trace."""
    record, result = s.capture, analysis(s)
    if record is None:
        return ""
    about = f"captured {esc(moment(record.time_s))} for {seconds(record.took_s)} from {esc(record.address)}"
    parts = [f"<section><h2>The step<small>{about}</small></h2>"]
    if record.problem is not None:
        parts.append(f'<p class="bad">{esc(record.problem.message)}</p><p>{esc(record.problem.fix)}</p>')
    notes = list(record.notes)
    if result is not None:
        parts += step_of(result)
        notes = [note.message for note in result.trace.quality] + notes
    parts += [f'<p class="fine">{esc(note)}</p>' for note in (*notes, *s.remarks)]
    parts.append(f'<p class="fine">The trace: <code>{esc(str(record.path))}</code></p>')
    if record.report:
        parts.append(f"<details><summary>The analysis as text</summary><pre>{esc_lines(record.report)}</pre></details>")
    return "".join((*parts, "</section>"))


def step_of(result: Analysis) -> list[str]:
    """Return the parts of an analysis alone; an empty text for what it lacks."""
    made = {table.name: table for table in (gpus_table(result), *tables(result))}
    return [_breakdown(result), _limits(result.limits), _one_step(result.typical_step),
            _python(result, made["Python"]) if "Python" in made else "",
            _layers(result.layers or result.cpu_layers, made["Layers"]),
            *(to_html(table, opened=name in _OPEN) for name, table in made.items())]


def _breakdown(result: Analysis) -> str:
    shares = pictures.shares(result.breakdown)
    if not shares:
        return ""
    total = sum(s.time_s for s in shares)
    summary = f"Mean step {seconds(total)}"
    if result.steps is not None:
        summary += (f", median {seconds(result.steps.median_s)}, 95th percentile {seconds(result.steps.p95_s)} "
                    f"of {result.steps.count} steps")
    bar = "".join(f'<span style="width:{100 * s.share:.3f}%;background:{s.part.dark}" title="{esc(s.part.label)}: '
                  f'{seconds(s.time_s)}, {percent(s.share)}"></span>' for s in shares)
    rows = "".join(f'<li title="{esc(s.part.meaning)}"><i style="background:{s.part.dark}"></i>{esc(s.part.label)}'
                   f"<b>{esc(_share(s.share))}</b><em>{seconds(s.time_s)}</em></li>"
                   for s in sorted(shares, key=lambda s: -s.time_s))
    means = " The parts are means over the GPUs that took part." if len(result.gpus) > 1 else ""
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
                 f"{pictures.step_runs(gpu.runs)}</svg></div>")
    ticks = "".join(f"<span>{seconds(step.duration_s * i / 4)}</span>" for i in range(5))
    return (f"<h3>Timeline of step {step.step} of the trace, {seconds(step.duration_s)}, "
            f"one row per GPU. Each {seconds(step.duration_s / slots)} shows the part that took most of it.</h3>"
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
    return (f"<h3>Lines of Python that ran in the gaps</h3>{lists}<h3>The Python of the training loop, "
            f"{esc(per_basis(stacks.basis))} of {seconds(whole)}: each line with its calls below it, without library "
            "lines that only pass a call on. Lines that run mostly in gaps are highlighted. Click a box to see it "
            f"alone, click again to go back.</h3>{boxes}"
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
    of_what = ("the GPU's time, and its idle time that their kernels end" if layers.gpus else
               "the time in which the CPU runs their ops; ops that overlap share it")
    by_line = f"<h3>By line of source, of the {processor}'s time</h3>"
    return (f"<h3>The {esc(what)} of {seconds(layers.total_s)} by phase and layer: {of_what}. "
            f"Click a box to see it alone, click again to go back.</h3>{boxes}"
            + (f'{by_line}<ul class="legend">{lines}</ul>' if lines else ""))


def _limits(limits: Limits | None) -> str:
    """Show the roofline, or why the limit is not known."""
    if limits is None or not limits.step_s:
        return ""
    if not limits.gpu:
        return f"<p>How far the step is from the GPU's limit is unknown. {esc(limits.reason)}</p>"
    drawing = svg(limits)
    points = "".join(f'<p class="fine">{esc(line)}</p>' for line in (axes_text(limits), *legend(limits)))
    return ("<h3>Roofline: FLOP per byte to the right, FLOP/s upward, both logarithmic; the more time an op takes, "
            f'the larger its circle</h3><div class="plate">{drawing}</div>{points}') if drawing else ""


# -- now -----------------------------------------------------------------------------------------


def gpus(s: Snapshot) -> str:
    """A row a GPU; below it every reading there is, or why there is none."""
    sample = s.sample
    if not sample.gpus:
        return ""
    head = "".join(f'<th title="{esc(GPU_METRICS[metric].help)}">{esc(heading)}</th>' for heading, metric, _ in _CELLS)
    rows = "".join(_gpu_row(g) for g in sample.gpus)
    metrics = "".join(_metric_row(metric, sample) for metric in GPU_METRICS)
    labels = "".join(f'<th title="{esc(g.info.uuid)}">{esc(g.info.label)}</th>' for g in sample.gpus)
    return ('<section><h2>Now<small>hover over a value for its source, over N/A for the reason</small></h2>'
            f'<div class="scroll"><table><thead><tr><th>GPU</th><th>SM</th>{head}<th class="l"></th></tr></thead>'
            f"<tbody>{rows}</tbody></table></div><details><summary>All readings of every GPU</summary>"
            f'<div class="scroll"><table><thead><tr><th>metric</th>{labels}</tr></thead><tbody>{metrics}</tbody>'
            "</table></div></details></section>")


def _gpu_row(g: GpuSample) -> str:
    which_gpu = f"{g.info.name} {g.info.uuid} {g.info.pci_bus_id}"
    label = f'<td title="{esc(which_gpu)}"><b>{esc(g.info.label)}</b></td>'
    if g.state != OK:
        problem = esc(f"{g.state}: {g.message}")
        return f'<tr>{label}<td class="bad wrap" colspan="{len(_CELLS) + 2}">{problem}</td></tr>'
    cells = _figure(g.activity()[1], activity_text(g))
    for _, metric, limit in _CELLS:
        cells += _pair(g[metric], g[limit]) if limit and g[metric].value is not None else _figure(g[metric])
    tone = "l warn" if flags_of(g)[0] else "l"
    return f'<tr>{label}{cells}<td class="{tone}">{esc(", ".join(clock_limits(g) + fault_texts(g)))}</td></tr>'


def _figure(r: Reading, text: str = "") -> str:
    origin = (r.reason or r.source or "") + (" (coarse)" if r.coarse else "")
    if r.value is None:
        return html_none(origin)
    level = f' class="level" style="--v:{100 * min(1.0, max(0.0, r.value)):.0f}%"' if r.unit == RATIO else ""
    return f'<td{level} title="{esc(origin)}">{esc(text or reading(r))}</td>'


def _pair(now: Reading, limit: Reading) -> str:
    full = f' class="level" style="--v:{100 * min(1.0, max(0.0, (now.value or 0) / limit.value)):.0f}%"' \
        if limit.value else ""
    of = f'<span class="sub">/ {esc(reading(limit))}</span>'
    return f'<td{full} title="{esc(now.source)}">{esc(reading(now))} {of}</td>'


def _metric_row(metric: str, sample: NodeSample) -> str:
    kind = GPU_METRICS[metric]
    cells = "".join(_figure(g[metric]) for g in sample.gpus)
    return f'<tr><td title="{esc(kind.help)}">{esc(kind.label)}</td>{cells}</tr>'


def processes(s: Snapshot) -> str:
    if not s.sample.processes:
        reasons = sorted({g.processes_reason for g in s.sample.gpus if g.processes_reason})
        return (f'<section><h2>Processes</h2><p>{esc("; ".join(reasons)) or "No process holds a GPU."}</p></section>'
                if s.sample.gpus else "")
    rows = "".join(_process_row(p) for p in s.sample.processes)
    return ('<section><h2>Processes</h2><div class="scroll"><table><thead><tr><th>pid</th><th class="l">user</th>'
            '<th class="l">GPU</th><th>GPU memory</th><th>SM</th><th>CPU cores</th><th>RAM</th><th>read</th>'
            f'<th>written</th><th class="l">command</th></tr></thead><tbody>{rows}</tbody></table></div></section>')


def _process_row(p: ProcessSample) -> str:
    memory, sm = p.gpu_memory_bytes, p.mean_sm_ratio
    reason = "the driver does not report it"
    cells = (Reading(memory, "bytes", "all its GPUs") if memory is not None else Reading.missing("bytes", reason),
             Reading(sm, "ratio", "mean of its GPUs") if sm is not None else Reading.missing("ratio", reason))
    cpu = p.cpu_cores
    cores = f'<td title="{esc(cpu.source)}">{cpu.value:.1f}</td>' if cpu.value is not None else _figure(cpu)
    description = [f'<span class="mono">{_command(p.command)}</span>' if p.command is not None
            else f'<span class="sub">N/A: {esc(p.reason or "unknown")}</span>']
    description += [f'<span class="sub">{esc(text)}</span>' for text in (
        p.container, p.kubernetes and p.kubernetes.label, p.cgroup and limits(p.cgroup),
        p.cuda_visible_devices and f"CUDA_VISIBLE_DEVICES={p.cuda_visible_devices}", p.note) if text]
    local = "" if p.local_pid is None else f' <span class="sub">({p.local_pid} here)</span>'
    return (f'<tr><td>{p.pid}{local}</td><td class="l">{esc(p.user or "?")}</td><td class="l">{esc(devices(p))}</td>'
            f"{_figure(cells[0])}{_figure(cells[1])}{cores}{_figure(p.rss_bytes)}{_figure(p.io_read_bytes_per_s)}"
            f'{_figure(p.io_write_bytes_per_s)}<td class="wrap">{"<br>".join(description)}</td></tr>')


def _command(command: str) -> str:
    """The script and its arguments; the whole command is there on hover."""
    return titled(short_command(command), command)


def node(s: Snapshot) -> str:
    """The host and its profiler servers."""
    h = s.sample.host
    rows = []
    if h.cpu_count is not None:
        granted = "" if h.cpu_limit_cores is None else f", {h.cpu_limit_cores:g} granted here"
        full = f", {h.full_cores} full" if h.core_ratios else ""
        rows.append(("cores", f"{h.cpu_count}{granted}{full}"))
    nodes: dict[int, list[str]] = {}
    for g in s.sample.gpus:
        if g.info.numa_node is not None and g.info.mig is None:
            nodes.setdefault(g.info.numa_node, []).append(g.info.label)
    rows += [(f"NUMA node {n}", f"GPU {', '.join(labels)}") for n, labels in sorted(nodes.items())]
    out = "".join(f"<dt>{esc(HOST_METRICS[m].label)}</dt><dd>{titled(reading(h[m]), h[m].reason or h[m].source)}</dd>"
                  for m in HOST_METRICS)
    out += "".join(f"<dt>{esc(name)}</dt><dd>{esc(text)}</dd>" for name, text in rows)
    for a in h.adapters:
        figures = "  ".join(f"{metric.label} {reading(a[m])}" for m, metric in ADAPTER_METRICS.items())
        out += f"<dt>{esc(a.name)} {esc(a.state)}</dt><dd>{esc(figures)}</dd>"
    for p in s.sample.busy_without_gpu:
        out += (f'<dt>pid {p.pid}, no GPU</dt><dd title="{esc(p.cpu_cores.source)}">{p.cpu_cores.value:.1f} cores  '
                f"{_command(p.command) if p.command else 'N/A'}</dd>")
    for server in s.servers:
        state = f'<span class="bad">{esc(server.problem)}</span>' if server.problem else titled(
            short_description(server.description), server.description)
        out += f"<dt>profiler server {esc(server.address)}</dt><dd>{state}</dd>"
    cost = s.sample.own_cpu_ratio
    if cost is not None:
        out += f"<dt>gputop itself</dt><dd>{100 * cost:.1f}% of a core</dd>"
    return f"<section><h2>Host<small>{esc(h.hostname)}</small></h2><dl>{out}</dl></section>"
