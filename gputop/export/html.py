"""The snapshot as one page to attach to a ticket, with the JSON document itself inside (:mod:`gputop.export.page`)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

from gputop.analysis.results import Analysis
from gputop.core.findings import ids_by_missing
from gputop.core.metrics import ADAPTER_METRICS, GPU_METRICS, HOST_METRICS, RATIO
from gputop.core.samples import OK, GpuSample, NodeSample, ProcessSample, Reading
from gputop.export.analysis_page import step_of, what_to_do
from gputop.export.page import BANDS, BANNER, color, embedded, header, heat, page, spectrogram
from gputop.render import gpu_columns
from gputop.render.palette import STEPS
from gputop.render.table import html_none
from gputop.replay.snapshot_document import DATA_ID, Grid, Snapshot, Track, from_document
from gputop.text.commands import short_command, short_description
from gputop.text.markup import esc, esc_lines, moment, titled
from gputop.text.units import devices, limits, percent, printable, reading, seconds

_MANY_GPUS = 9  # from here on lanes are lower
_LANES = tuple(metric for column in gpu_columns.COLUMNS if column.page for metric in column.metrics)


def _cells() -> Iterator[tuple[str, str, str]]:
    """The cells of "Now", one for each direction of a link: heading, metric, and the metric that is 100% of it, if that
    is shown too. The activity has none: it is drawn by its own rule."""
    for column in (c for c in gpu_columns.COLUMNS if c.page and c.metrics):
        directions = ("",) if len(column.metrics) == 1 else (" in", " out")
        for metric, direction in zip(column.metrics, directions, strict=True):
            yield column.heading_in("page") + direction, metric, column.limit


_CELLS = tuple(_cells())


def to_html(document: Mapping[str, Any]) -> str:
    """The page of a snapshot's document. Raises GputopError for one of another version."""
    s = from_document(document)
    title = f"gputop: {printable(s.sample.host.hostname)}, {moment(s.sample.time_s)}"
    parts = [_header(s), _activity(s), _findings(s), _step(s), _gpus(s), _lanes(s), _processes(s), _node(s)]
    return page(title, parts, (
        f"<footer>Written by gputop {esc(s.version)}. Secrets in commands are hidden. The page contains the JSON "
        "document; <code>gputop replay FILE.html</code> opens it in the terminal.</footer>",
        f'<script type="application/json" id="{DATA_ID}">{embedded(document)}</script>'))


def _header(s: Snapshot) -> str:
    sample = s.sample
    source = sample.source.removeprefix("SIMULATED: ")  # the banner says it
    facts = [f"<b>{esc(gpu_columns.gpu_kinds(sample) or 'no GPU')}</b>", esc(source), f"every {s.interval_s:g} s"]
    if s.capture is not None and s.capture.step_text:
        facts.insert(1, f"<b>{s.capture.step_text}</b> a step")
    return (header("gputop snapshot", sample.host.hostname, facts, moment(sample.time_s))
            + (BANNER if sample.simulated else ""))


def _activity(s: Snapshot) -> str:
    """The spectrogram of every GPU over the last minutes."""
    grid = s.spectrogram
    if grid is None or not s.sample.gpus:
        return ""
    tracks = {uuid: track for uuid, (track,) in grid.gpus.items()}
    coarse = any(track.metric == "gpu_util" for track in tracks.values())
    many = " many" if len(s.sample.gpus) >= _MANY_GPUS else ""
    rows = "".join(_lane(g, tracks[g.info.uuid], grid, many) for g in s.sample.gpus if g.info.uuid in tracks)
    name = "SM active" if not coarse else f"SM active or coarse utilization ({gpu_columns.COARSE_MARK})" if any(
        t.metric == "sm_active" for t in tracks.values()) else "Utilization (coarse)"
    help_text = GPU_METRICS["gpu_util" if coarse else "sm_active"].help
    ramp = "".join(f'<path fill="{color(i)}" d="M{i} 0h1v1h-1z"/>' for i in range(STEPS))
    marks, key = _captured(s, grid)
    return (f'<section><h2>{name}<small title="{esc(help_text)}">the last {_span(grid)}, {grid.slice_s:g} s per '
            f'column</small></h2><div class="plate">{rows}{marks}{_axis(grid)}</div><div '
            f'class="ramp"><span>0%</span>{_svg(STEPS, 1, ramp, "color scale")}<span>100%</span><span>'
            "Height shows the level, and brightness the share of samples that reach this level. A dot means that "
            f"nothing was measured.</span>{key}</div></section>")


def _lane(g: GpuSample, track: Track, grid: Grid, many: str) -> str:
    means = [v for v in track.mean if v is not None]
    mean = sum(means) / len(means) if means else None
    now = g.activity()[1]
    label = f"GPU {g.info.label}: {GPU_METRICS[track.metric].label}"
    label += "" if mean is None else f", mean {percent(mean)}"
    figures = (titled(gpu_columns.activity_text(g), now.reason or now.source, "now")
               + f'<span class="mean">{"" if mean is None else "ø " + percent(mean)}</span>')
    if g.state != OK:
        figures = f'<span class="bad" title="{esc(g.message)}">{esc(g.state)}</span>'
    return (f'<div class="lane{many}"><span title="{esc(g.info.name)} {esc(g.info.uuid)}">{esc(g.info.label)}</span>'
            f"{_svg(grid.slices, BANDS, spectrogram(track.levels) + _xids(g, grid), label)}{figures}"
            "</div>")


def _xids(g: GpuSample, grid: Grid) -> str:
    places = [(x, (x.time_s - grid.start_s) / grid.slice_s) for x in g.xids]
    return "".join(f'<path fill="#ff6b7a" d="M{x:.1f} 0h.7v{BANDS}h-.7z"><title>Xid {event.xid}</title></path>'
                   for event, x in places if 0 <= x < grid.slices)


def _captured(s: Snapshot, grid: Grid) -> tuple[str, str]:
    """A line under the lanes that shows when the last trace was captured, and the key to it."""
    if s.capture is None:
        return "", ""
    begin, end = ((t - grid.start_s) / grid.slice_s for t in (s.capture.time_s - s.capture.took_s, s.capture.time_s))
    begin, end = max(0.0, begin), min(float(grid.slices), end)
    if begin >= end:
        return "", ""
    mark = f'<path fill="#57c7d4" d="M{begin:.1f} 0h{end - begin:.2f}v1h-{end - begin:.2f}z"/>'
    return (f'<div class="lane marks"><span></span>{_svg(grid.slices, 1, mark, "a trace was captured")}</div>',
            '<span class="key"></span><span>a trace was captured</span>')


def _svg(width: int, height: int, content: str, label: str) -> str:
    return (f'<svg viewBox="0 0 {width} {height}" preserveAspectRatio="none" shape-rendering="crispEdges" role="img" '
            f'aria-label="{esc(label)}" fill="none"><title>{esc(label)}</title>{content}</svg>')


def _axis(grid: Grid) -> str:
    times = (grid.start_s, (grid.start_s + grid.end_s) / 2, grid.end_s)
    shown = "".join(f"<span>{time.strftime('%H:%M:%S', time.localtime(t))}</span>" for t in times)
    return (f'<div class="axis"><span></span><div>{shown}</div><span class="right">now</span>'
            '<span class="right mean">mean</span></div>')


def _span(grid: Grid) -> str:
    span_s = grid.end_s - grid.start_s
    return f"{span_s / 60:.0f} min" if span_s >= 90 else f"{span_s:.0f} s"


def _lanes(s: Snapshot) -> str:
    """All other lanes of the history, small: one block a metric, one strip a GPU."""
    grid = s.history
    if grid is None:
        return ""
    blocks = []
    for metric in _LANES:
        tracks = {u: t for u, lanes in grid.gpus.items() for t in lanes if t.metric == metric}
        values = [v for t in tracks.values() for v in t.mean if v is not None]
        if len(values) < 2 * len(tracks) or not any(values):
            continue
        filled_slices = [i for t in tracks.values() for i, v in enumerate(t.mean) if v is not None]
        first = min(min(filled_slices), grid.slices - min(12, grid.slices))
        scale = _full_scale(metric, [t.full_scale for t in tracks.values()], max(values))
        kind = GPU_METRICS[metric]
        rows = "".join(_heat(g, tracks[g.info.uuid], scale, first) for g in s.sample.gpus if g.info.uuid in tracks)
        full = reading(Reading(scale, kind.unit))
        blocks.append(f'<div><h3 title="{esc(kind.help)}"><span>{esc(kind.label)}</span><span>0 – {esc(full)}</span>'
                      f'</h3><div class="plate">{rows}</div></div>')
    if not blocks:
        return ""
    return (f'<section><h2>Other lanes<small>up to the last {_span(grid)}, averaged over {grid.slice_s:g} s, newest on '
            f'the right</small></h2><div class="heats">{"".join(blocks)}</div></section>')


def _full_scale(metric: str, scales: list[float | None], largest: float) -> float:
    """100% of a metric on all GPUs: its own, or the largest value in view rounded up to 1, 2 or 5."""
    known_scales = [scale for scale in scales if scale is not None]
    if GPU_METRICS[metric].full_scale is not None and known_scales:
        return max(known_scales)
    step = 10.0 ** math.floor(math.log10(largest)) if largest > 0 else 1.0
    return next(m * step for m in (1, 2, 5, 10) if m * step >= largest * (1 - 1e-9))


def _heat(g: GpuSample, track: Track, scale: float, first: int) -> str:
    means = track.mean[first:]
    now = g[track.metric]
    label = f"GPU {g.info.label}: {GPU_METRICS[track.metric].label}"
    picture = _svg(len(means), 1, heat(track.metric, means, scale), label)
    return (f'<div class="lane"><span>{esc(g.info.label)}</span>{picture}'
            f'{titled(reading(now), now.reason or now.source, "now")}</div>')


def _findings(s: Snapshot) -> str:
    result = _analysis(s)
    missing = ids_by_missing((*s.live.abstained, *(result.abstained if result is not None else ())))
    return what_to_do(s.findings, s.capture.limit if s.capture is not None else s.live.limit, missing)


def _analysis(s: Snapshot) -> Analysis | None:
    return s.capture.analysis if s.capture is not None else None


def _step(s: Snapshot) -> str:
    """Show where the mean step's time goes, one step as it went, and the GPUs in the trace."""
    record, result = s.capture, _analysis(s)
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


def _gpus(s: Snapshot) -> str:
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
        return f'<tr>{label}<td class="bad wrap" colspan="{len(_CELLS) + 2}">{esc(g.trouble)}</td></tr>'
    cells = _figure(g.activity()[1], gpu_columns.activity_text(g))
    for _, metric, limit in _CELLS:
        cells += _pair(g[metric], g[limit]) if limit and g[metric].value is not None else _figure(g[metric])
    tone = "l warn" if gpu_columns.flags_of(g)[0] else "l"
    flags = gpu_columns.clock_limits(g) + gpu_columns.fault_texts(g)
    return f'<tr>{label}{cells}<td class="{tone}">{esc(", ".join(flags))}</td></tr>'


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


def _processes(s: Snapshot) -> str:
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


def _node(s: Snapshot) -> str:
    h = s.sample.host
    rows = []
    if h.cpu_count is not None:
        granted = "" if h.cpu_limit_cores is None else f", {h.cpu_limit_cores:g} granted here"
        full = f", {h.full_cores} full" if h.core_ratios else ""
        rows.append(("cores", f"{h.cpu_count}{granted}{full}"))
    rows += [(f"NUMA node {n}", f"GPU {', '.join(map(str, gpus))}")
             for n, gpus in gpu_columns.numa_gpus(s.sample).items()]
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
