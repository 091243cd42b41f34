"""A widget that is a list of ready lines and repaints only those that changed.

Textual's own text widgets lay out again on every update; a monitor that changes some figures
a second on a slow line wants the opposite: same place, same size, few cells.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.widget import Widget

from gputop.tui.format import fit

Run = tuple[str, Style]  # text in one style, already free of control characters


class LinesWidget(Widget):
    """Draws ``lines``; subclasses call :meth:`show` with what should be there now."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._lines: list[tuple[Run, ...]] = []

    def show(self, lines: Sequence[Sequence[Run]]) -> None:
        """Replace the content, repainting the lines that differ."""
        new = [tuple(line) for line in lines]
        old, self._lines = self._lines, new
        for y in range(max(len(new), len(old))):
            before = old[y] if y < len(old) else ()
            after = new[y] if y < len(new) else ()
            if before != after:
                self.refresh(Region(0, y, self.size.width, 1))

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        runs = self._lines[y] if y < len(self._lines) else ()
        strip = Strip([Segment(text, run_style) for text, run_style in runs])
        return strip.adjust_cell_length(width)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return max(1, len(self._lines))


def spread(left: Sequence[Run], right: Sequence[Run], width: int) -> list[Run]:
    """``left`` and ``right`` at the two ends of a line; where both do not fit, left is cut."""
    right_cells = sum(len(text) for text, _ in right)
    room = max(0, width - right_cells - (1 if right else 0))
    out: list[Run] = []
    for text, style in left:
        if room <= 0:
            break
        shown = text if len(text) <= room else fit(text, room)
        out.append((shown, style))
        room -= len(shown)
    if right and right_cells <= width:
        out.append((" " * (room + 1), Style()))
        out.extend(right)
    return out


def wrap(text: str, width: int, lines: int) -> list[str]:
    """Break at spaces into at most ``lines`` lines; what is cut ends in an ellipsis."""
    import textwrap

    if width <= 4:
        return [fit(text, width)][:lines]
    return textwrap.wrap(text, width, max_lines=max(1, lines), placeholder=" …") or [""]
