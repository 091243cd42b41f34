"""The snapshot as one picture: every GPU's lane with its figures, host, step and findings.

It is drawn from the snapshot's document, not from the terminal, so that a headless run gives the same picture and
no command shows its secrets. It has no fonts, scripts or links, so that every viewer shows it alike.
"""

from __future__ import annotations

import itertools
import textwrap
import time
from collections.abc import Iterable, Mapping
from typing import Any

from gputop.core.findings import Finding
from gputop.core.samples import OK, GpuSample
from gputop.diagnosis.roofline import legend, svg_content
from gputop.export import pictures
from gputop.export.sections import analysis
from gputop.render.finding_text import NOTHING_FOUND, kind_text
from gputop.render.gpu_columns import COARSE_MARK, COLUMNS, flags_of
from gputop.render.gpu_names import gpu_kinds
from gputop.render.palette import DARK, SEVERITY_MARK
from gputop.render.verdict_lines import DO, WHY, verdict_of
from gputop.replay.read_snapshot import Snapshot, from_document
from gputop.replay.snapshot_document import Grid
from gputop.text.markup import esc, moment
from gputop.text.units import fit, percent, printable, reading, seconds

_WIDTH, _EDGE = 1200, 24
_LETTER = 7.83  # of a monospaced letter at 13 px, with some to spare
_PLAIN, _BOLD, _DIM, _WARN, _BAD, _ACCENT = (
    DARK.names[name] for name in ("text", "strong", "dim", "warn", "bad", "accent"))
_SEVERITY = {"high": _BAD, "medium": _WARN, "low": _ACCENT}
_LANE_X, _LANE_WIDTH = 60, 540
_ROOFLINE_WIDTH, _ROOFLINE_HEIGHT, _ROOFLINE_TEXT_X = 480, 200, 540
# The columns beside the lane, with the right end of each.
_COLUMNS = tuple(column for column in COLUMNS if column.picture)
_ENDS = tuple(itertools.accumulate((column.picture for column in _COLUMNS), initial=_LANE_X + _LANE_WIDTH))[1:]


class _Page:
    """The elements drawn so far; ``y`` is the base line of the next one."""

    def __init__(self) -> None:
        self.y = 0.0
        self.parts: list[str] = []

    def text(self, x: float, text: str, color: str = _PLAIN, *, bold: bool = False, end: bool = False,
             size: int = 13) -> None:
        weight = ' font-weight="600"' if bold else ""
        anchor = ' text-anchor="end"' if end else ""
        self.parts.append(f'<text x="{x:g}" y="{self.y:g}" fill="{color}" font-size="{size}"{weight}{anchor}>'
                          f"{esc(text)}</text>")

    def box(self, x: float, y: float, width: float, height: float, color: str, radius: float = 0) -> None:
        rounded = f' rx="{radius:g}"' if radius else ""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:.2f}" height="{height:g}" '
                          f'fill="{color}"{rounded}/>')

    def lane(self, x: float, y: float, width: float, height: float, slots: tuple[int, int], content: str) -> None:
        self.parts.append(f'<svg x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" viewBox="0 0 {slots[0]} '
                          f'{slots[1]}" preserveAspectRatio="none" shape-rendering="crispEdges">{content}</svg>')


def to_svg(document: Mapping[str, Any]) -> str:
    """The picture of a snapshot's document. Raises GputopError for one of another version."""
    s = from_document(document)
    page = _Page()
    _header(page, s)
    _gpus(page, s)
    _host(page, s)
    _step(page, s)
    _roofline(page, s)
    _findings(page, s)
    page.y += 30
    page.text(_WIDTH - _EDGE, f"gputop {printable(s.version)}", _DIM, end=True, size=11)
    height = round(page.y + 18)
    mark = ", SIMULATED" if s.sample.simulated else ""
    title = f"gputop: {s.sample.host.hostname}, {moment(s.sample.time_s)}{mark}"
    return (f'<?xml version="1.0" encoding="UTF-8"?>\n<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" '
            f'height="{height}" viewBox="0 0 {_WIDTH} {height}" font-family="ui-monospace, SFMono-Regular, Menlo, '
            f'Consolas, \'DejaVu Sans Mono\', \'Liberation Mono\', monospace">\n<title>{esc(title)}</title>\n'
            f'<rect width="{_WIDTH}" height="{height}" rx="10" fill="#12141b"/>\n'
            + "\n".join(page.parts) + "\n</svg>\n")


def _header(page: _Page, s: Snapshot) -> None:
    sample = s.sample
    page.y = 36
    page.text(_EDGE, "gputop", _ACCENT, bold=True, size=15)
    x = _EDGE + 66.0
    if sample.simulated:
        page.box(x, page.y - 15, 96, 21, "#ffd84d", 4)
        page.text(x + 10, "SIMULATED", "#1d1a00", bold=True)
        x += 110
    host = fit(printable(sample.host.hostname), 32).rstrip()
    page.text(x, host, _BOLD, bold=True, size=15)
    x += len(host) * _LETTER * 15 / 13 + 16
    page.text(x, fit(gpu_kinds(sample) or "no GPU", 40).rstrip())
    page.text(_WIDTH - _EDGE, moment(sample.time_s), end=True)
    page.y += 21
    source = printable(sample.source).removeprefix("SIMULATED: ")
    page.text(_EDGE, fit(f"{source} · every {s.interval_s:g} s", 140).rstrip(), _DIM, size=12)


def _gpus(page: _Page, s: Snapshot) -> None:
    if not s.sample.gpus:
        return
    grid = s.spectrogram
    page.y += 32
    name = "SM active"
    if grid is not None and any(t.metric != "sm_active" for tracks in grid.gpus.values() for t in tracks):
        name += f" ({COARSE_MARK} coarse utilization)"
    span = "" if grid is None else f", last {(grid.end_s - grid.start_s) / 60:.2g} min"
    page.text(_EDGE, "GPU", _DIM, size=12)
    page.text(_LANE_X, name + span, _DIM, size=12)
    for column, x in zip(_COLUMNS, _ENDS, strict=True):
        page.text(x, column.heading_in("picture"), _DIM, end=True, size=12)
    height = 34 if len(s.sample.gpus) <= 8 else 24
    page.y += 10
    for g in s.sample.gpus:
        top = page.y
        page.box(_LANE_X, top, _LANE_WIDTH, height - 4, pictures.GROUND, 2)
        page.y = top + height / 2 + 3
        _gpu(page, g, grid, top, height - 4)
        page.y = top + height
    if grid is not None:
        page.y += 11
        middle = (grid.start_s + grid.end_s) / 2
        for tick, t, anchor in ((_LANE_X, grid.start_s, "start"), (_LANE_X + _LANE_WIDTH / 2, middle, "middle"),
                                (_LANE_X + _LANE_WIDTH, grid.end_s, "end")):
            page.parts.append(f'<text x="{tick:g}" y="{page.y:g}" fill="{_DIM}" font-size="11" text-anchor="{anchor}">'
                              f"{time.strftime('%H:%M:%S', time.localtime(t))}</text>")


def _gpu(page: _Page, g: GpuSample, grid: Grid | None, top: float, height: float) -> None:
    page.text(_LANE_X - 14, g.info.label, _BOLD, end=True)
    tracks = grid.gpus.get(g.info.uuid, ()) if grid is not None else ()
    mean = None
    for track in tracks:
        page.lane(_LANE_X, top, _LANE_WIDTH, height, (grid.slices if grid else 1, pictures.BANDS),
                  pictures.spectrogram(track.levels))
        means = [v for v in track.mean if v is not None]
        mean = sum(means) / len(means) if means else None
    if g.state != OK:
        page.text(_LANE_X + _LANE_WIDTH + 16, fit(f"{printable(g.state)}: {printable(g.message)}", 70).rstrip(), _BAD)
        return
    for column, x in zip(_COLUMNS, _ENDS, strict=True):
        text, tone = column.figure_of(g, "picture")
        if column.id == "mean" and mean is not None:
            text, tone = f"ø {percent(mean)}", "dim"
        page.text(x, text, DARK.names[tone], bold=column.id == "now", end=True)
    flags, tone = flags_of(g)
    if flags:
        page.y += 11
        page.text(_ENDS[-1], fit(printable(", ".join(flags)), 60).rstrip(), DARK.names[tone], end=True, size=10)


def _host(page: _Page, s: Snapshot) -> None:
    h = s.sample.host
    full = f", {h.full_cores} full" if h.full_cores else ""
    cores = "" if h.cpu_count is None else f" of {h.cpu_count} cores{full}"
    page.y += 34
    page.text(_EDGE, "Host", _BOLD, bold=True)
    page.text(_LANE_X + 14, "  ·  ".join((
        f"CPU {reading(h['cpu_ratio'])}{cores}",
        f"RAM {reading(h['memory_used_bytes'])}/{reading(h['memory_total_bytes'])}",
        f"disk read {reading(h['disk_read_bytes_per_s'])}", f"net in {reading(h['net_rx_bytes_per_s'])}")))


def _step(page: _Page, s: Snapshot) -> None:
    result = analysis(s)
    parts = pictures.shares(result.breakdown if result is not None else None)
    if not parts:
        return
    page.y += 36
    page.text(_EDGE, "Step", _BOLD, bold=True)
    page.text(_LANE_X + 14, seconds(sum(s.time_s for s in parts)), _PLAIN)
    left, width = 152.0, _WIDTH - _EDGE - 152.0
    x = left
    for part, _, share in parts:
        page.box(x, page.y - 16, share * width, 22, part.dark)
        x += share * width
    page.y += 25
    x = left
    for part, _, share in sorted(parts, key=lambda s: -s.share):
        text = f"{part.label} {percent(share)}"
        if share < 0.005 or x + len(text) * _LETTER + 20 > _WIDTH - _EDGE:
            break
        page.box(x, page.y - 9, 9, 9, part.dark, 2)
        page.text(x + 15, text, _DIM, size=12)
        x += 15 + len(text) * _LETTER * 12 / 13 + 20


def _roofline(page: _Page, s: Snapshot) -> None:
    """Ops by FLOP per byte and FLOP/s below the roofs of the GPU, where the programs of the capture tell them."""
    result = analysis(s)
    limits = result.limits if result is not None else None
    content = svg_content(limits, _ROOFLINE_WIDTH, _ROOFLINE_HEIGHT) if limits is not None else ""
    if limits is None or not content:
        return
    page.y += 40
    page.text(_EDGE, "Roofline", _BOLD, bold=True)
    page.text(_LANE_X + 64, "FLOP per byte to the right, FLOP/s upward, both logarithmic", _DIM, size=12)
    top = page.y + 18
    page.parts.append(f'<g transform="translate({_EDGE + 10} {top:g})">{content}</g>')
    page.y = top - 4
    for line in legend(limits):
        for wrapped in _lines(printable(line), int((_WIDTH - _EDGE - _ROOFLINE_TEXT_X) / _LETTER)):
            page.y += 17
            page.text(_ROOFLINE_TEXT_X, wrapped, _DIM, size=12)
    page.y = max(page.y, top + _ROOFLINE_HEIGHT + 4)


def _findings(page: _Page, s: Snapshot) -> None:
    page.y += 40
    page.text(_EDGE, "What to do", _BOLD, bold=True)
    if not s.findings:
        limit = s.capture.limit if s.capture is not None else s.live.limit
        for line in (limit or NOTHING_FOUND).splitlines():
            _wrapped(page, line, _PLAIN)
    for f in s.findings:
        _finding(page, f)


def _finding(page: _Page, f: Finding) -> None:
    color, verdict = _SEVERITY[f.severity], verdict_of(f)
    page.y += 27
    page.text(_EDGE, SEVERITY_MARK[f.severity], color)
    page.text(_EDGE + 22, fit(printable(verdict.head), 115).rstrip(), _BOLD, bold=True)
    page.text(_WIDTH - _EDGE, verdict.fix or kind_text(f), color, bold=True, end=True)
    for row in verdict.rows if f.severity != "low" else ():
        _wrapped(page, row.text, _DIM if row.label == WHY else _PLAIN, row.label)


def _wrapped(page: _Page, text: str, color: str, label: str = "") -> None:
    columns = int((_WIDTH - 2 * _EDGE - 70) / _LETTER)
    for i, line in enumerate(_lines(printable(text), columns)):
        page.y += 19
        if i == 0 and label:
            page.text(_EDGE + 22, label, _ACCENT if label == DO else _DIM)
        page.text(_EDGE + (70 if label else 22), line, color)


def _lines(text: str, columns: int) -> Iterable[str]:
    return textwrap.wrap(text, columns, break_on_hyphens=False)
