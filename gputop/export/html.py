"""The snapshot as one page to attach to a ticket: no request leaves it, and it opens from a file.

Styles, pictures and the JSON document itself are inside. A policy in its head forbids the browser
to load anything and to run any script but the page's own, which copies snippets and turns the icicle's boxes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from gputop.core.findings import ids_by_missing
from gputop.core.metrics import GPU_METRICS
from gputop.core.samples import OK, GpuSample, Reading
from gputop.export import pictures, sections
from gputop.export.analysis_page import what_to_do
from gputop.export.page import BANNER, embedded, header, page
from gputop.render.gpu_columns import COARSE_MARK, COLUMNS, activity_text
from gputop.render.gpu_names import gpu_kinds
from gputop.render.palette import STEPS
from gputop.replay.read_snapshot import DATA_ID, Snapshot, from_document
from gputop.replay.snapshot_document import Grid, Track
from gputop.text.markup import esc, moment, titled
from gputop.text.units import percent, printable, reading

_MANY_GPUS = 9  # from here on lanes are lower
_LANES = tuple(metric for column in COLUMNS if column.page for metric in column.metrics)


def to_html(document: Mapping[str, Any]) -> str:
    """The page of a snapshot's document. Raises GputopError for one of another version."""
    s = from_document(document)
    title = f"gputop: {printable(s.sample.host.hostname)}, {moment(s.sample.time_s)}"
    parts = [_header(s), _activity(s), _findings(s), sections.step(s), sections.gpus(s), _lanes(s),
             sections.processes(s), sections.node(s)]
    return page(title, parts, (
        f"<footer>Written by gputop {esc(s.version)}. Secrets in commands are hidden. The page contains the JSON "
        "document; <code>gputop replay FILE.html</code> opens it in the terminal.</footer>",
        f'<script type="application/json" id="{DATA_ID}">{embedded(document)}</script>'))


def _header(s: Snapshot) -> str:
    sample = s.sample
    source = sample.source.removeprefix("SIMULATED: ")  # the banner says it
    facts = [f"<b>{esc(gpu_kinds(sample) or 'no GPU')}</b>", esc(source), f"every {s.interval_s:g} s"]
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
    name = "SM active" if not coarse else f"SM active or coarse utilization ({COARSE_MARK})" if any(
        t.metric == "sm_active" for t in tracks.values()) else "Utilization (coarse)"
    help_text = GPU_METRICS["gpu_util" if coarse else "sm_active"].help
    ramp = "".join(f'<path fill="{pictures.color(i)}" d="M{i} 0h1v1h-1z"/>' for i in range(STEPS))
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
    figures = (titled(activity_text(g), now.reason or now.source, "now")
               + f'<span class="mean">{"" if mean is None else "ø " + percent(mean)}</span>')
    if g.state != OK:
        figures = f'<span class="bad" title="{esc(g.message)}">{esc(g.state)}</span>'
    return (f'<div class="lane{many}"><span title="{esc(g.info.name)} {esc(g.info.uuid)}">{esc(g.info.label)}</span>'
            f"{_svg(grid.slices, pictures.BANDS, pictures.spectrogram(track.levels) + _xids(g, grid), label)}{figures}"
            "</div>")


def _xids(g: GpuSample, grid: Grid) -> str:
    places = [(x, (x.time_s - grid.start_s) / grid.slice_s) for x in g.xids]
    return "".join(f'<path fill="#ff6b7a" d="M{x:.1f} 0h.7v{pictures.BANDS}h-.7z"><title>Xid {event.xid}</title></path>'
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
    picture = _svg(len(means), 1, pictures.heat(track.metric, means, scale), label)
    return (f'<div class="lane"><span>{esc(g.info.label)}</span>{picture}'
            f'{titled(reading(now), now.reason or now.source, "now")}</div>')


def _findings(s: Snapshot) -> str:
    result = sections.analysis(s)
    missing = ids_by_missing((*s.live.abstained, *(result.abstained if result is not None else ())))
    return what_to_do(s.findings, s.capture.limit if s.capture is not None else s.live.limit, missing)
