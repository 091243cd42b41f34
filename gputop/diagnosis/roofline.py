"""The roofline picture: ops by FLOP per byte and FLOP/s, below what the GPU's memory and its arithmetic allow.

Both axes are logarithmic (Williams, Waterman, Patterson: "Roofline", CACM 2009). In ASCII alone, so that every terminal
shows it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from msgspec import Struct

from gputop.analysis.results import Limits, RooflinePoint
from gputop.text.markup import esc
from gputop.text.units import percent, printable, rate, seconds

_NAMED = 9  # points with a number of one digit
_MARGIN = 2.0  # around what is shown, as a factor


class _Axes(Struct, frozen=True):
    """Ends of the axes: FLOP per byte, FLOP/s."""

    x: tuple[float, float]
    y: tuple[float, float]

    def place(self, intensity: float, flops_per_s: float) -> tuple[float, float]:
        """0 to 1 from the left, and from the bottom."""
        return _part(self.x, intensity), _part(self.y, flops_per_s)


def _part(axis: tuple[float, float], value: float) -> float:
    return min(max(math.log(max(value, axis[0]) / axis[0]) / math.log(axis[1] / axis[0]), 0.0), 1.0)


def _axes(limits: Limits) -> _Axes | None:
    """None where there is nothing to draw: no point, or no roof."""
    points = [p for p in limits.points if p.flops_per_byte > 0 and p.flops_per_s > 0]
    peaks = [peak.flops_per_s for peak in limits.peaks if peak.flops_per_s > 0]
    if not points or not peaks or not limits.bytes_per_s or limits.bytes_per_s <= 0:
        return None
    x = [p.flops_per_byte for p in points] + [peak / limits.bytes_per_s for peak in peaks]
    y = [p.flops_per_s for p in points] + peaks
    return _Axes((min(x) / _MARGIN, max(x) * _MARGIN), (min(y) / _MARGIN, max(y) * _MARGIN))


def picture(limits: Limits, width: int = 72, height: int = 12) -> list[str]:
    """The picture with the list of its points, as lines; why there is none, where that is so."""
    axes = _axes(limits)
    if axes is None:
        return [f"No roofline: {limits.reason or 'no op has both FLOPs and bytes.'}"]
    grid = [[" "] * width for _ in range(height)]

    def put(intensity: float, flops_per_s: float, mark: str) -> None:
        right, up = axes.place(intensity, flops_per_s)
        grid[height - 1 - round(up * (height - 1))][round(right * (width - 1))] = mark

    for column in range(width):
        intensity = axes.x[0] * (axes.x[1] / axes.x[0]) ** (column / max(width - 1, 1))
        for peak in reversed(limits.peaks):
            roof = min(peak.flops_per_s, intensity * (limits.bytes_per_s or 0.0))
            if roof >= axes.y[0]:
                put(intensity, roof, "/" if roof < peak.flops_per_s else "-")
    for number, point in reversed(list(enumerate(limits.points, 1))):
        put(point.flops_per_byte, point.flops_per_s, str(number) if number <= _NAMED else "*")
    lines = ["".join(row).rstrip() for row in grid]
    return [*lines, axes_text(limits), *legend(limits)]


def axes_text(limits: Limits) -> str:
    """Ends of the axes in words; empty where there is nothing to draw."""
    axes = _axes(limits)
    return "" if axes is None else (
        f"{axes.x[0]:.3g} to {axes.x[1]:.3g} FLOP per byte, "
        f"{axes.y[0] / 1e12:.3g} to {axes.y[1] / 1e12:.3g} TFLOP/s, both logarithmic")


def legend(limits: Limits) -> Iterator[str]:
    """The roofs, what the points rest on, and the first of them by number."""
    roofs = ", ".join(f"{peak.flops_per_s / 1e12:,.4g} TFLOP/s in {peak.dtype}" for peak in limits.peaks)
    yield f"roofs of the {printable(limits.gpu)}: {rate(limits.bytes_per_s or 0.0)} (/), {roofs} (-)"
    yield (f"FLOPs and bytes are known for {percent(limits.coverage)} of the compute time; bytes are the minimum that "
           "an op must move")
    for number, point in enumerate(limits.points[:_NAMED], 1):
        yield f"{number} {_about(point)}"
    if len(limits.points) > _NAMED:
        yield f"* {len(limits.points) - _NAMED} more"


def _about(point: RooflinePoint) -> str:
    return (f"{printable(point.name)}: {point.flops_per_s / 1e12:.3g} TFLOP/s in {point.dtype}, "
            f"{point.flops_per_byte:.3g} FLOP per byte, {seconds(point.time_s)} per step")


def svg(limits: Limits, width: int = 640, height: int = 260) -> str:
    """The same as a picture of its own, without scripts; empty where there is nothing to draw."""
    axes = _axes(limits)
    if axes is None:
        return ""

    def at(intensity: float, flops_per_s: float) -> str:
        right, up = axes.place(intensity, flops_per_s)
        return f"{right * width:.1f},{(1 - up) * height:.1f}"

    bandwidth = limits.bytes_per_s or 0.0
    roofs = "".join(
        f'<polyline points="{at(max(axes.x[0], axes.y[0] / bandwidth), max(axes.y[0], axes.x[0] * bandwidth))} '
        f'{at(peak.flops_per_s / bandwidth, peak.flops_per_s)} {at(axes.x[1], peak.flops_per_s)}" fill="none" '
        f'stroke="#8b93a3"><title>{esc(peak.dtype)}: {peak.flops_per_s / 1e12:,.4g} TFLOP/s</title></polyline>'
        for peak in limits.peaks)
    longest = max(point.time_s for point in limits.points) or 1.0
    points = ""
    for number, point in enumerate(limits.points, 1):
        x, y = at(point.flops_per_byte, point.flops_per_s).split(",")
        points += (f'<circle cx="{x}" cy="{y}" r="{3 + 7 * math.sqrt(point.time_s / longest):.1f}" fill="#43b98c" '
                   f'fill-opacity="0.7"><title>{esc(_about(point))}</title></circle>')
        if number <= _NAMED:
            points += f'<text x="{x}" y="{float(y) + 4:.1f}" font-size="11" text-anchor="middle">{number}</text>'
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-12 -12 {width + 24} {height + 24}" role="img" '
            f'aria-label="roofline">{roofs}{points}</svg>')
