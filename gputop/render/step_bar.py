"""Parts of the mean step, as one bar with its legend. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from gputop.render.palette import BOLD, DIM, PART_STYLE
from gputop.render.step_parts import PARTS
from gputop.render.styled_text import StyledText
from gputop.text.units import percent, step_time

_MIN_BAR = 30  # cells that a bar keeps with its legend beside it; else that is below it


def step_lines(breakdown: Mapping[str, float | None], width: int,
               median_s: float | None = None) -> list[list[StyledText]]:
    """The mean step, the sum of the parts, with these in proportion, and their legend, on one line where it has room
    and on two where not; no line for a step without a length. ``median_s`` is the median of the steps.

    Unknown parts (None) are left out: without a GPU in the trace, those of the device.
    """
    times = {name: value for name, value in breakdown.items() if value is not None}
    total = sum(times.values())
    if total <= 0 or width < 30:
        return []
    head = f" Step time {step_time(total, median_s)} "
    parts = [(part.label, times[part.id] / total, PART_STYLE[part.id]) for part in PARTS
             if times.get(part.id, 0.0) / total >= 0.005]
    texts = [(style, f" {label} {percent(share)}  ")
             for label, share, style in sorted(parts, key=lambda part: -part[1])]
    beside = sum(1 + len(text) for _, text in texts)
    room = width - len(head) - len("  ") - beside
    if room < _MIN_BAR:
        beside, room = 0, width - len(head) - 1
    # Largest remainders: the cells of all parts together fill the bar exactly.
    shares = [share / sum(s for _, s, _ in parts) * room for _, share, _ in parts]
    cells = [int(share) for share in shares]
    for i in sorted(range(len(parts)), key=lambda i: cells[i] - shares[i])[:room - sum(cells)]:
        cells[i] += 1
    bar: list[StyledText] = [(head, BOLD)]
    bar += [("█" * n, style) for n, (_, _, style) in zip(cells, parts, strict=True) if n]
    if beside:
        return [[*bar, ("  ", DIM), *(run for style, text in texts for run in (("█", style), (text, DIM)))]]
    legend: list[StyledText] = [(" " * len(head), DIM)]
    used = len(head)
    for style, text in texts:
        if used + 1 + len(text) > width:
            break
        legend += [("█", style), (text, DIM)]
        used += 1 + len(text)
    return [bar, legend]


_PLAIN_SIGNS = "█▓▒░#=+-."  # of the parts, the largest first, where there is no color


def plain_step_lines(breakdown: Mapping[str, float | None], width: int, median_s: float | None = None) -> list[str]:
    """The same without color: each part has a sign of its own."""
    lines = step_lines(breakdown, width, median_s)
    legend = [style for text, style in (lines[-1] if lines else ()) if text == "█" and style in PART_STYLE.values()]
    # A part of one cell in the bar looks like a sign of the legend, and is before it.
    in_order = list(dict.fromkeys(legend[::-1]))[::-1]
    signs = {style: _PLAIN_SIGNS[min(i, len(_PLAIN_SIGNS) - 1)] for i, style in enumerate(in_order)}
    return ["".join(text.replace("█", signs.get(style, "█")) for text, style in line).rstrip() for line in lines]
