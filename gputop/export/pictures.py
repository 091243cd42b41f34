"""The spectrogram and the step as SVG: the terminal's colors, cells of one color in one path.

Numbers in a path are small integers, so a picture of 16 GPUs stays below 100 kB; whoever embeds
it scales it. Nothing here takes text from outside.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from gputop.analysis.results import Breakdown
from gputop.core.metrics import LEVELS
from gputop.render.gpu_columns import MUTED_METRICS
from gputop.render.palette import SHADES, STEPS, level_rgb, step_of
from gputop.render.step_parts import PART_BY_ID, PARTS, StepPart

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


class PartShare(NamedTuple):
    """A part of the mean step: its time, and its share of the step (0-1)."""

    part: StepPart
    time_s: float
    share: float


def shares(breakdown: Breakdown | None) -> list[PartShare]:
    """The parts of a step that are known and not zero, in the order of the bar."""
    parts = {} if breakdown is None else {name: value for name, value in breakdown.known.items() if value > 0}
    total = sum(parts.values())
    return [PartShare(part, parts[part.id], parts[part.id] / total) for part in PARTS if part.id in parts]


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
