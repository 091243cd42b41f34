"""Widgets that draw ready lines and repaint only those that have changed.

Textual's own text widgets compute their layout again on every update. A monitor changes some figures a second, perhaps
over a slow link: same place, same size, few cells.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Generic, TypeVar

from rich.cells import cell_len
from rich.color import Color
from rich.segment import Segment
from textual import events
from textual.color import Color as Background
from textual.geometry import Region, Size
from textual.message import Message
from textual.strip import Strip

from gputop.render.palette import ACCENT, PLAIN, on
from gputop.render.styled_text import StyledText
from gputop.tui.keys import name
from gputop.tui.terminal.textual_private import DrawnOnce

if TYPE_CHECKING:
    from typing_extensions import Self

Choice = TypeVar("Choice")
Subject = TypeVar("Subject")


class MessageAbout(Message, Generic[Subject]):
    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.subject = subject


class DrawnLine(Strip):
    """A line that is freed as soon as it is drawn anew.

    Textual has a strip that is not cut keep itself among its parts. Only the garbage collector frees such a circle:
    with 30 lines a second they were all that it had to do.
    """

    def divide(self, cuts: Iterable[int]) -> Sequence[Strip]:
        cuts = [cut for cut in cuts if cut <= self.cell_length]
        return [self] if cuts == [self.cell_length] else super().divide(cuts)

    def crop(self, start: int, end: int | None = None) -> Strip:
        part = super().crop(start, end)
        return part if part is self else DrawnLine(part, part.cell_length)


class WheelMoves:
    """The wheel moves the selection by one."""

    @abstractmethod
    def action_move(self, by: int) -> None:
        """Select the entry ``by`` places further down."""

    def on_mouse_scroll_down(self) -> None:
        self.action_move(1)

    def on_mouse_scroll_up(self) -> None:
        self.action_move(-1)


class CachedLinesWidget(DrawnOnce):
    """A widget that caches its lines. Its text has its own colors; only the ground comes from the style sheet.

    Textual caches lines as well, but for each frame it asks the style sheet for the border, title, padding and opacity
    of each widget, and these widgets have none of them.
    """

    _ground_color: Color | None = None
    _background: Background
    _framed: bool  # has a border or padding
    _cache: dict[int, Strip]
    _cache_key: tuple[object, ...] = ()  # what the cached lines were made for; empty where the cache is not valid

    @property
    def ground(self) -> Color:
        if self._ground_color is None:
            self._background, self._framed = self.background_colors[1], bool(self.gutter)
            self._ground_color = self._background.rich_color
        return self._ground_color

    def notify_style_update(self) -> None:
        self._ground_color = None
        self._cache_key = ()
        super().notify_style_update()

    def render_lines(self, crop: Region) -> list[Strip]:
        size, ground = self.outer_size, self.ground
        if self._framed:  # Textual draws the frame
            return super().render_lines(crop)
        filters = self.get_line_filters()
        cache_key = (size, ground, *filters)
        if cache_key != self._cache_key:
            self._cache, self._cache_key = {}, cache_key
        strips = []
        for y in crop.line_range:
            strip = self._cache.get(y)
            if strip is None:
                strip = self.render_line(y)
                for each in filters:
                    strip = strip.apply_filter(each, self._background)
                self._cache[y] = strip
            strips.append(strip)
        if crop.column_span != (0, size.width):
            strips = [strip.crop(*crop.column_span) for strip in strips]
        return strips

    def refresh(self, *regions: Region, repaint: bool = True, layout: bool = False, recompose: bool = False) -> Self:
        if not regions:
            self._cache_key = ()
        elif self._cache_key:
            for region in regions:
                for y in region.line_range:
                    self._cache.pop(y, None)
        return super().refresh(*regions, repaint=repaint, layout=layout, recompose=recompose)

    def strip(self, runs: Sequence[StyledText | Segment], width: int) -> Strip:
        """A line of this width on the ground of the widget."""
        ground = self.ground
        if not runs:
            return Strip.blank(width, on(ground, None))
        segments = [Segment(run[0], on(ground, run[1])) for run in runs]
        length = sum([cell_len(segment.text) for segment in segments])
        if length < width:
            segments.append(Segment(" " * (width - length), on(ground, None)))
        strip = DrawnLine(segments, max(length, width))
        return strip if length <= width else strip.crop(0, width)


class LinesWidget(CachedLinesWidget):
    """Draws the lines given to :meth:`show`."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._lines: list[tuple[StyledText, ...]] = []

    def show(self, lines: Sequence[Sequence[StyledText]]) -> None:
        """Replace the content, repainting the lines that differ."""
        new = [tuple(line) for line in lines]
        old, self._lines = self._lines, new
        changed = [y for y, (before, after) in enumerate(zip_longest(old, new, fillvalue=())) if before != after]
        if changed:
            width = self.size.width
            self.refresh(*(Region(0, y, width, 1) for y in changed))

    def render_line(self, y: int) -> Strip:
        return self.strip(self._lines[y] if y < len(self._lines) else (), self.size.width)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return max(1, len(self._lines))


class DrawnLines(LinesWidget):
    """Lines that depend on the size and the focus of the widget; drawn again when either changes."""

    @abstractmethod
    def draw(self) -> None:
        """Show the lines for the current size and focus."""

    def on_resize(self) -> None:
        self.draw()

    def watch_has_focus(self, _has_focus: bool) -> None:  # the events of it come before it has changed
        super().watch_has_focus(_has_focus)
        self.draw()


class ChoiceList(DrawnLines, Generic[Choice], can_focus=True):
    """A line for each of ``choices``, one of which is selected; those around it are shown."""

    class Chosen(Message):
        """The user clicked the selected one."""

    choices: Sequence[Choice] = ()
    index = 0  # of the selected one

    @property
    def selected(self) -> Choice:
        """The selected one. Raises IndexError where there is none."""
        return self.choices[self.index]

    @property
    def _top(self) -> int:
        return max(0, min(self.index - self.size.height // 2, len(self.choices) - self.size.height))

    def shown(self) -> Iterator[tuple[int, Choice]]:
        """The choices that have a line, with their places in the list."""
        return enumerate(self.choices[self._top:self._top + self.size.height], self._top)

    def action_move(self, by: int) -> None:
        self.index = max(0, min(len(self.choices) - 1, self.index + by))
        self.draw()

    def on_click(self, event: events.Click) -> None:
        row = event.get_content_offset(self)
        if row is None or not 0 <= self._top + row.y < len(self.choices):
            return
        by = self._top + row.y - self.index
        if by:
            self.action_move(by)
        else:
            self.post_message(self.Chosen())


_KEPT = 2  # the last ones are named in any width


class KeyLine(LinesWidget):
    """The line at the bottom with as many keys of the moment as fit, the last two always; a click on one is as good as
    pressing it."""

    def __init__(self) -> None:
        super().__init__(id="keys")
        self._places: list[tuple[int, str]] = []  # the column behind each key, and the key
        self._made_of: tuple[object, ...] = ()

    def show_keys(self, keys: Sequence[tuple[str, str]], width: int) -> None:
        """``keys`` as "left,right" with what they do."""
        if (made_of := (*keys, width)) == self._made_of:
            return
        self._made_of = made_of
        texts = [(" ".join(map(name, each.split(","))), label) for each, label in keys]
        room = width - sum(_cells(one) for one in texts[-_KEPT:]) - 1
        shown = []
        for i, one in enumerate(texts):
            room -= _cells(one) if i < len(texts) - _KEPT else 0
            if room >= 0 or i >= len(texts) - _KEPT:
                shown.append(i)
        line: list[StyledText] = [(" ", PLAIN)]
        used, self._places = 1, []
        for i in shown:
            line += [(texts[i][0], ACCENT), (f" {texts[i][1]}  ", PLAIN)]
            used += _cells(texts[i])
            self._places.append((used, keys[i][0].split(",")[0]))
        self.show([line])

    def on_click(self, event: events.Click) -> None:
        key = next((key for end, key in self._places if event.x < end), None)
        if key is not None:
            self.app.simulate_key(key)


def _cells(one: tuple[str, str]) -> int:
    return len(one[0]) + len(one[1]) + 3
