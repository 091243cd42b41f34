"""The skeleton of gputop's pages, and their pictures: no request leaves one, and it opens from a file.

A policy in the head forbids the browser to load anything and to run any script but the page's own, which copies
snippets and turns the icicle's boxes; a page without it runs none.

The pictures are SVG in the terminal's colors, cells of one color in one path. Numbers in a path are small integers, so
a picture of 16 GPUs stays below 100 kB. Nothing in them takes text from outside.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from itertools import groupby
from typing import Any

from gputop.core.metrics import LEVELS
from gputop.render.gpu_columns import MUTED_METRICS
from gputop.render.palette import SHADES, STEPS, level_rgb, step_of
from gputop.render.step_parts import PART_BY_ID
from gputop.text.markup import esc

SCRIPT = """\
for (const box of document.querySelectorAll(".code")) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    const pre = box.querySelector("pre");
    try {
      await navigator.clipboard.writeText(pre.textContent);
    } catch {
      getSelection().selectAllChildren(pre);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  box.append(button);
}
for (const plate of document.querySelectorAll(".icicle")) {
  const boxes = [...plate.children].map((box) => (
    {box, x: parseFloat(box.style.left), w: parseFloat(box.style.width), y: parseFloat(box.style.top)}));
  let alone = null;
  plate.addEventListener("click", (event) => {
    const hit = boxes.find((b) => b.box === event.target);
    if (!hit) return;
    alone = alone === hit ? null : hit;
    const [x, w, y] = alone ? [hit.x, hit.w, hit.y] : [0, 100, -1];
    for (const b of boxes) {
      const inside = !alone || b === hit || (b.y > y && b.x > x - 0.002 && b.x + b.w < x + w + 0.002);
      const above = alone && b.y < y && b.x < x + 0.002 && b.x + b.w > x + w - 0.002;
      b.box.hidden = !inside && !above;
      b.box.style.left = above ? "0%" : 100 * (b.x - x) / w + "%";
      b.box.style.width = above ? "100%" : 100 * b.w / w + "%";
    }
  });
}
"""
BANNER = ('<div class="banner" role="note">SIMULATED <span>— no hardware was measured: all values on this page '
           "come from gputop's simulated node.</span></div>")


def page(title: str, parts: Iterable[str], end: Iterable[str], *, script: str = SCRIPT, style: str = "") -> str:
    """A page of gputop: sections, and what follows them. ``style`` is added to that of all pages."""
    css = resources.files("gputop.export").joinpath("report.css").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"script-src 'sha256-{digest}'; " if script else ""
    return "\n".join((
        "<!DOCTYPE html>", '<html lang="en">', "<head>", '<meta charset="utf-8">',
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src \'unsafe-inline\'; '
        f'{policy}base-uri \'none\'; form-action \'none\'">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer">',
        f"<title>{esc(title)}</title>", f"<style>\n{css}{style}</style>", "</head>", "<body>",
        *(part for part in (*parts, *end) if part), *([f"<script>{script}</script>"] if script else ()), "</body>",
        "</html>", ""))


def header(brand: str, heading: str, facts: Iterable[str], when: str) -> str:
    """The head of a page: what it is, of what, ``facts`` as HTML, and of which time."""
    spans = "".join(f"<span>{fact}</span>" for fact in facts)
    return (f'<header class="top"><div><div class="brand">{brand}</div><h1>{esc(heading)}</h1>'
            f'<div class="facts">{spans}</div></div><div class="when">{esc(when)}</div></header>')


def embedded(document: Mapping[str, Any]) -> str:
    """The document as JSON in which no text can end the script element around it."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


BANDS = LEVELS
Levels = Sequence[Sequence[float] | None]  # of each slice, the share of its time at each level
DOT = "#4d5260"  # nothing was measured

Cells = Mapping[str, list[tuple[int, int, int, int]]]  # color -> x, y, width, height


def color(step: int, shade: int = SHADES - 1, muted: bool = False) -> str:
    return "#{:02x}{:02x}{:02x}".format(*level_rgb(step, shade, muted))


def spectrogram(slices: Levels) -> str:
    """One GPU's lane in a box of ``slices`` by BANDS: levels upwards, brightness the share of samples there."""
    cells: dict[str, list[tuple[int, int, int, int]]] = defaultdict(list)
    for band in range(BANDS):
        colors = [None if levels is None else _band(band, sum(levels[band:])) for levels in slices]
        _runs(cells, colors, BANDS - 1 - band)
    dots = [x for x, levels in enumerate(slices) if levels is None]
    return _paths(cells) + _dots(dots, BANDS - 1)


def _band(band: int, reach: float) -> str | None:
    """Return the color as in the terminal, see gputop.tui.monitor.lanes.column: the lowest band of a measured slice is
    never nothing."""
    share = 0.4 + 0.6 * reach if band == 0 else reach
    if band == 0 and reach >= 1:
        share = 1.0
    shade = 0 if share < 0.02 else max(1, round(min(1.0, share) * (SHADES - 1)))
    return color(round(band / (BANDS - 1) * (STEPS - 1)), shade) if shade else None


def heat(metric: str, means: Sequence[float | None], scale: float) -> str:
    """Means as a strip of one row: color is the level, ``scale`` is 100%."""
    cells: dict[str, list[tuple[int, int, int, int]]] = defaultdict(list)
    muted = metric in MUTED_METRICS
    _runs(cells, [None if v is None else color(step_of(min(1.0, v / scale)), muted=muted) for v in means], 0)
    return _paths(cells) + _dots([x for x, v in enumerate(means) if v is None], 0)


def step_runs(runs: Sequence[tuple[str, int, int]]) -> str:
    """One GPU's step: runs of slots (part, first, end) in a box of one row."""
    cells: dict[str, list[tuple[int, int, int, int]]] = defaultdict(list)
    for part, first, end in runs:
        cells[PART_BY_ID[part].dark].append((first, 0, end - first, 1))
    return _paths(cells)


def _runs(cells: dict[str, list[tuple[int, int, int, int]]], colors: Iterable[str | None], y: int) -> None:
    x = 0
    for run_color, run in groupby(colors):
        width = len(list(run))
        if run_color is not None:
            cells[run_color].append((x, y, width, 1))
        x += width


def _paths(cells: Cells) -> str:
    return "".join(f'<path fill="{fill}" d="' + "".join(f"M{x} {y}h{w}v{h}h-{w}z" for x, y, w, h in boxes) + '"/>'
                   for fill, boxes in cells.items())


def _dots(columns: Sequence[int], y: int) -> str:
    if not columns:
        return ""
    return f'<path fill="{DOT}" d="' + "".join(f"M{x}.3 {y}.4h.4v.4h-.4z" for x in columns) + '"/>'
