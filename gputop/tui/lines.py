"""A widget that is a list of ready lines and repaints only those that changed.

Textual's own text widgets lay out again on every update; a monitor that changes some figures
a second on a slow line wants the opposite: same place, same size, few cells.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.color import Color
from rich.segment import Segment
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.widget import Widget

from gputop.tui.palette import on
from gputop.tui.runs import Run


class Grounded(Widget):
    """A widget whose lines come with their colours; only the ground behind them is the style sheet's."""

    _ground_color: Color | None = None

    @property
    def ground(self) -> Color:
        if self._ground_color is None:
            self._ground_color = self.background_colors[1].rich_color
        return self._ground_color

    def notify_style_update(self) -> None:
        self._ground_color = None
        super().notify_style_update()

    def strip(self, runs: Iterable[Run | Segment], width: int) -> Strip:
        """A line of this width on the widget's ground."""
        ground = self.ground
        line = Strip([Segment(run[0], on(ground, run[1])) for run in runs])
        return line.adjust_cell_length(width, on(ground, None))


class LinesWidget(Grounded):
    """Draws the lines given to :meth:`show`."""

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
        return self.strip(self._lines[y] if y < len(self._lines) else (), self.size.width)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return max(1, len(self._lines))


class DrawnLines(LinesWidget):
    """Lines made for the widget's size and focus: drawn anew as either changes."""

    def draw(self) -> None:
        """Show the lines for the present size and focus."""
        raise NotImplementedError

    def on_resize(self) -> None:
        self.draw()

    def on_focus(self) -> None:
        self.draw()

    def on_blur(self) -> None:
        self.draw()
