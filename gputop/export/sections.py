"""The sections of the page: the step of the last capture, the GPUs now, processes, host and servers."""

from __future__ import annotations

from collections.abc import Iterator

from gputop.analysis.results import Analysis
from gputop.core.metrics import ADAPTER_METRICS, GPU_METRICS, HOST_METRICS, RATIO
from gputop.core.samples import OK, GpuSample, NodeSample, ProcessSample, Reading
from gputop.export.analysis_page import step_of
from gputop.render.gpu_columns import COLUMNS, activity_text, clock_limits, fault_texts, flags_of
from gputop.render.table import html_none
from gputop.replay.read_snapshot import Snapshot
from gputop.text.commands import short_command, short_description
from gputop.text.markup import esc, esc_lines, moment, titled
from gputop.text.units import devices, limits, reading, seconds


def _cells() -> Iterator[tuple[str, str, str]]:
    """The cells of "Now", one for each direction of a link: heading, metric, and the metric that is 100% of it, if that
    is shown too. The activity has none: it is drawn by its own rule."""
    for column in (c for c in COLUMNS if c.page and c.metrics):
        directions = ("",) if len(column.metrics) == 1 else (" in", " out")
        for metric, direction in zip(column.metrics, directions, strict=True):
            yield column.heading_in("page") + direction, metric, column.limit


_CELLS = tuple(_cells())


def analysis(s: Snapshot) -> Analysis | None:
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
    return ('<section><h2>Now<small>hover over a value to see its source, or over N/A to see the '
            f'reason</small></h2><div class="scroll"><table><thead><tr><th>GPU</th><th>SM</th>{head}<th '
            'class="l"></th></tr></thead>'
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
    reason = "the driver does not report this value"
    cells = (Reading(memory, "bytes", "all its GPUs") if memory is not None else Reading.missing("bytes", reason),
             Reading(sm, "ratio", "mean over its GPUs") if sm is not None else Reading.missing("ratio", reason))
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
        out += f"<dt>gputop</dt><dd>{100 * cost:.1f}% of a core</dd>"
    return f"<section><h2>Host<small>{esc(h.hostname)}</small></h2><dl>{out}</dl></section>"
