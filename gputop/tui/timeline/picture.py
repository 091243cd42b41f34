"""The timeline's picture: rows of coverage, and on a closer zoom ranges with their names.

A new view draws all lines again; a new selection only the lines that it touches, from the cached lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from rich.segment import Segment
from textual.filter import ANSIToTruecolor, LineFilter
from textual.geometry import Region
from textual.strip import Strip

from gputop.render.palette import ACCENT, BOLD, DIM, PLAIN, on
from gputop.render.styled_text import StyledText
from gputop.text.units import fit, fit_middle, portion
from gputop.timeline.model import Range
from gputop.timeline.read_timeline import Timeline
from gputop.tui.timeline import viewport
from gputop.tui.timeline.cells import FULL, LINKED, ROW, RULE, SELECTED, touched_cells
from gputop.tui.timeline.descriptions import axis, axis_origin, overview, steps_line
from gputop.tui.timeline.drawn_places import DrawnPlace, IdleGapParts, Lanes, draw_lanes
from gputop.tui.widgets.cached_lines import CachedLinesWidget

_EMPTY = viewport.View(0, 1, (0, 1))


class TimelinePicture(CachedLinesWidget):
    """Draws a :class:`~gputop.timeline.read_timeline.Timeline`: a view of it, the place one is on, and the
    selection."""

    def __init__(self, moved: Callable[[], None], *, id: str | None = None) -> None:
        """``moved`` is called at once when the view, the place or the selection changes. With a message, what
        describes the selection would be drawn a frame later."""
        super().__init__(id=id)
        self._moved = moved
        self.timeline: Timeline | None = None
        self.view = _EMPTY
        self.cursor_ns = 0
        self.selected: Range | None = None
        self.linked: Range | None = None
        self.gap: tuple[int, int] | None = None  # a stretch without ranges, selected instead of a range
        self.idle_gpus: tuple[int, ...] = ()  # the gap is on these GPUs' rows, too
        self._scrolled = viewport.ScrolledPlaces()
        self.index = 0  # of the place on which keys act
        self.unfolded: frozenset[int] = frozenset()  # keys of GPUs and threads that show what is in them
        self._arranged = False
        self._idle = IdleGapParts(())
        self._busy: npt.NDArray[np.float32] | None = None  # the GPUs over the whole capture, a value a cell
        self.columns = self.height = 0  # its size, which drawing a picture reads some thousand times
        self.label_cells = 8
        self._lanes: Lanes = {}
        self._once_sized: Callable[[], None] | None = None

    # -- what is shown ------------------------------------------------------------------------

    def show(self, timeline: Timeline) -> None:
        """Draw this trace, the whole of it."""
        self.timeline = timeline
        self.view = viewport.View.whole(timeline.window_ns)
        self.cursor_ns = timeline.window_ns[0]
        self._idle, self._busy = IdleGapParts(timeline.idle_gaps), None
        self._arrange()

    @property
    def where(self) -> tuple[object, ...]:
        """Position, by what keys and the mouse change: to be compared with another one."""
        return (self.view, self.cursor_ns, self.place.key if self.place is not None else None, self.selected,
                self.gap, self.unfolded)

    def complete(self, timeline: Timeline) -> None:
        """Take the same trace with what was not there yet; view, place and selection stay, on the same lines."""
        line = self._scrolled.lines(self.index).start if self.index < len(self.places) else 0
        self.timeline = timeline
        self._idle = IdleGapParts(timeline.idle_gaps)
        self._arrange()
        if self.index < len(self.places):
            self._scrolled.put(self.index, line)
            self._scroll_to_place()
            self._redraw()

    def once_sized(self, then: Callable[[], None]) -> None:
        """Call ``then`` when there are rows to go to: before Textual has laid the picture out there are none."""
        if self.height > 0:
            then()
        else:
            self._once_sized = then

    def _arrange(self) -> None:
        """Arrange the rows as places for this size and these folds; the place on which keys act stays."""
        if self.timeline is None or self.height <= 0:
            return
        key_before = self.places[self.index].key if self.index < len(self.places) else None
        room = self.height - self.head_lines
        rows = self.timeline.rows
        if not self._arranged:
            self._arranged, self.unfolded = True, viewport.first_unfolded(rows, room)
        self._scrolled.replace(viewport.places(rows, self.unfolded, viewport.lines_per_gpu(rows, self.unfolded, room)))
        self.index = next((i for i, p in enumerate(self.places) if p.key == key_before),
                          next((i for i, p in enumerate(self.places) if p.row and p.row.kind not in viewport.ABOVE), 0))
        longest = max((len(p.label) for p in self.places if p.row is not None), default=6)
        self.label_cells = max(8, min(longest + 4, 36, self.columns // 4))
        self._scroll_to_place()
        self._redraw()

    @property
    def head_lines(self) -> int:
        """Lines above the rows: the time axis, where there is room the steps, and the whole capture in small."""
        return 1 if self.height < 5 else 2 if self.height < 12 else 3

    @property
    def _share_width(self) -> int:
        return 6 if self.columns >= 50 else 0

    @property
    def cells(self) -> int:
        """Columns of the picture itself."""
        return max(4, self.columns - self.label_cells - self._share_width)

    @property
    def places(self) -> list[viewport.Place]:
        """The rows from top to bottom, those above and below the screen included."""
        return self._scrolled.places

    @property
    def place(self) -> viewport.Place | None:
        """The place the keys act on; a heading only where there is nothing else."""
        return self.places[self.index] if self.index < len(self.places) else None

    @property
    def _full(self) -> int:
        # Without color a full block becomes the letter of its kind (gputop.tui.terminal.color_support).
        preferences = getattr(self.app, "preferences", None)
        return 8 if preferences is not None and preferences.colors == "none" else FULL

    def on_resize(self) -> None:
        self.columns, self.height = self.size
        self._arrange()
        then, self._once_sized = self._once_sized, None
        if then is not None:
            self.once_sized(then)

    # -- drawing ------------------------------------------------------------------------------

    def _redraw(self) -> None:
        self._lanes.clear()
        self.refresh()
        self._moved()

    def _place_lines(self, index: int) -> range:
        """Lines of the widget that a place takes, as far as they are in it."""
        lines = self._scrolled.lines(index)
        return range(self.head_lines + max(0, lines.start), min(self.height, self.head_lines + lines.stop))

    def _touch(self, *indices: int) -> None:
        """Draw these places again, and the head: it shows the cursor."""
        for y in {*range(self.head_lines), *(y for i in indices for y in self._place_lines(i))}:
            self.refresh(Region(0, y, self.columns, 1))

    def render_line(self, y: int) -> Strip:
        return self._head(y) if y < self.head_lines else self._row(y)

    def get_line_filters(self) -> Sequence[LineFilter]:
        # Every style here has colors of its own; that filter would go through thousands to find none to change.
        return [each for each in super().get_line_filters() if not isinstance(each, ANSIToTruecolor)]

    def _head(self, y: int) -> Strip:
        if self.timeline is None:
            return self.strip((), self.columns)
        cells, view = self.cells, self.view
        kind = y + 3 - self.head_lines  # 0 overview, 1 axis, 2 steps; the first ones go where there is no room
        if self.head_lines == 1:
            kind = 1
        cursor_ns = self.cursor_ns
        if kind == 0:
            label, runs = "all", self._overview()
        elif kind == 1:
            label, runs = axis_origin(view, cells), axis(view, cells, cursor_ns)
        else:
            label, runs = "steps", steps_line(self.timeline.steps_ns, view, cells, cursor_ns)
        share = ("busy ".rjust(self._share_width), DIM) if kind == 1 and self._share_width else ("", DIM)
        return self.strip([(fit(label, self.label_cells - 1, right=True) + " ", DIM), *runs, share], self.columns)

    def _overview(self) -> list[StyledText]:
        assert self.timeline is not None
        if self._busy is None or len(self._busy) != self.cells:
            gpus = [row.key for row in self.timeline.rows if row.kind == "gpu"] or [r.key for r in self.timeline.rows]
            cover, _ = self.timeline.coverage.picture(gpus, *self.timeline.window_ns, self.cells)
            self._busy = cover.mean(axis=0) if gpus else cover.sum(axis=0)
        return overview(self._busy, self.view)

    def _row(self, y: int) -> Strip:
        index = self.index_at(y)
        if index is None:
            return self.strip((), self.columns)
        place = self.places[index]
        if not place.rows:
            rule = "─" * max(0, self.columns - len(place.label) - 4)
            return self.strip([("  " + place.label + " ", DIM), (rule, RULE)], self.columns)
        within = y - self.head_lines - self._scrolled.lines(index).start
        drawn = self._lane(place)
        cells = drawn.lines[within].copy()
        if index == self.index:
            cells.mark(0, self.cells, ROW)
        for r, flag in ((self.linked, LINKED), (self.selected, SELECTED)):
            if r is not None and self.shows(place, r):
                cells.mark(*touched_cells(self.view, self.cells, r.start_ns, r.end_ns), flag)
        gpu = place.rows[0].gpu if place.rows[0].kind == "gpu" else None
        if self.gap is not None and (index == self.index or gpu in self.idle_gpus):
            cells.mark(*touched_cells(self.view, self.cells, *self.gap), SELECTED)
        here = index == self.index
        mark = " " if place.fold is None or place.depth else "▸" if place.folded else "▾"
        label = f"{mark} {fit_middle(place.label, self.label_cells - 4)}" if within == 0 else ""
        share = "" if not self._share_width or within or drawn.share is None else drawn.figure or portion(drawn.share)
        ground = self.ground
        # Put together by hand: the cells bring their ground, and the line its length.
        segments = [Segment("›" if here and within == 0 else " ", on(ground, ACCENT)),
                    Segment(fit(label, self.label_cells - 2) + " ",
                            on(ground, BOLD if here else PLAIN if place.rows[0].kind == "gpu" else DIM)),
                    *cells.segments(),
                    Segment(share.rjust(max(0, self._share_width - 1)), on(ground, PLAIN if here else DIM))]
        used = self.label_cells + self.cells + max(0, self._share_width - 1)
        if used > self.columns:  # a terminal too narrow for any picture
            return Strip(segments, used).crop(0, self.columns)
        return Strip([*segments, Segment(" " * (self.columns - used), on(ground, None))], self.columns)

    def _lane(self, place: viewport.Place) -> DrawnPlace:
        """The lane of a place; the missing lanes of all places on the screen are drawn together."""
        if place.key not in self._lanes:
            assert self.timeline is not None
            shown = self._scrolled.shown(self.height - self.head_lines)
            # Between a change of the size and its event, this one need not be among them.
            missing = [p for p in dict.fromkeys((*shown, place)) if p.key not in self._lanes]
            self._lanes |= draw_lanes(self.timeline, self._idle, missing, self.view, self.cells, self._full)
        return self._lanes[place.key]

    def index_at(self, y: int) -> int | None:
        """The place on this line of the widget."""
        return self._scrolled.index_at(y - self.head_lines) if y >= self.head_lines else None

    def shows(self, place: viewport.Place, r: Range) -> bool:
        """Return whether a range is drawn on this place: its row, pool or GPU, at its level of nesting."""
        assert self.timeline is not None
        if all(row.key != r.row for row in place.rows):
            source, gpu = self.timeline.rows[r.row], place.row
            return gpu is not None and gpu.kind == "gpu" and source.kind == "stream" and source.gpu == gpu.gpu
        return place.depth is None or place.depth == min(r.depth, viewport.MAX_DEPTH - 1)

    # -- the current place --------------------------------------------------------------------

    def fold(self, unfolded: frozenset[int]) -> None:
        """Fold and unfold; where the current place disappears, the one that contains it becomes current."""
        place = self.place
        self.unfolded = unfolded
        self._arrange()
        if place is not None and place.rows and (self.place is None or self.place.key != place.key):
            row = place.rows[0]
            self.index = next((i for i, p in enumerate(self.places) if row in p.rows or (
                row.kind in viewport.WITHIN and p.rows and p.rows[0].kind == "gpu" and p.rows[0].gpu == row.gpu)),
                self.index)
        self._scroll_to_place()
        self._redraw()

    def select(self, index: int, selected: Range | None, gap: tuple[int, int] | None = None,
               idle_gpus: tuple[int, ...] = (), ended_by: Range | None = None) -> None:
        """Go to a place and what lies on it: a range, or a stretch with none, which may be on several GPUs.

        Linked to a range is its launch or what it launched, to an idle gap what ended it.
        """
        if self.timeline is None:
            return
        before = (self.index, self.selected, self.linked)
        many = bool(self.idle_gpus or idle_gpus)
        self.selected, self.gap, self.index, self.idle_gpus = selected, gap, index, idle_gpus
        self.linked = self.timeline.linked(selected) if selected is not None else ended_by
        if self._scroll_to_place() or many:
            self.refresh()
        else:
            ranges = [r for r in (*before[1:], self.selected, self.linked) if r is not None]
            touched = [i for i, p in enumerate(self.places) if any(self.shows(p, r) for r in ranges)]
            self._touch(before[0], index, *touched)
        self._moved()

    def reveal(self, r: Range, index: int | None = None) -> None:
        """Select a range wherever it is: unfold what hides it, move the view to it, scroll to its row."""
        assert self.timeline is not None
        if index is None:
            hidden = next((p for p in self.places if p.folded and p.fold is not None and self.shows(p, r)), None)
            if hidden is not None and hidden.rows != (self.timeline.rows[r.row],):
                self.fold(self.unfolded | {hidden.fold or 0})
            # The last that shows it: after its GPU or pool comes its own row.
            index = max((i for i, p in enumerate(self.places) if self.shows(p, r)), default=self.index)
        self.cursor_ns = r.start_ns
        self.set_view(self.view.showing(r.start_ns, r.end_ns), keep=False)
        self.select(index, r)

    def set_view(self, view: viewport.View, keep: bool = True) -> None:
        """Show another stretch of time; ``keep`` is for subclasses that remember earlier views."""
        if view != self.view:
            self.view = view
            self._redraw()

    def scroll_rows(self, by: int) -> None:
        """Scroll the rows; the current place stays."""
        if self._scrolled.scroll(by, self.height - self.head_lines):
            self.refresh()

    def _scroll_to_place(self) -> bool:
        """Scroll the current place into view; True if the rows moved."""
        return bool(self.places) and self._scrolled.scroll_to(self.index, max(1, self.height - self.head_lines))
