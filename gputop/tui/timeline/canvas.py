"""Keys and mouse of the timeline: pan, zoom, and a selection that moves between ranges and between gaps."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from textual import events
from textual.binding import BindingType
from textual.message import Message

from gputop.text.units import seconds
from gputop.timeline.model import Range
from gputop.tui.keys import key
from gputop.tui.timeline.descriptions import idle_gap_at, step_at
from gputop.tui.timeline.picture import TimelinePicture
from gputop.tui.timeline.viewport import WITHIN, Place, View, gpu_folds

_PAN_RATIO = 0.125  # share of the view, for each key press
_WHEEL_ZOOM = 1.25
_KEY_ZOOM = 2.0
_MAX_EARLIER_VIEWS = 50
_MAX_RANGES_SKIPPED = 200  # while searching for one at the same level of nesting


class TimelineCanvas(TimelinePicture, can_focus=True):
    """The picture with its keys and the mouse."""

    PANEL = "Timeline"
    BINDINGS: ClassVar[list[BindingType]] = [
        key("left,h", "pan(-1)", "earlier", "go an eighth of the screen back"),
        key("right,l", "pan(1)", "later", "go an eighth of the screen forward"),
        key("shift+left,H", "pan(-8)", "a screen earlier", "go a full screen back"),
        key("shift+right,L", "pan(8)", "a screen later", "go a full screen forward"),
        key("home", "edge(-1)", "begin", "go to the start of the capture"),
        key("end", "edge(1)", "end", "go to the end of the capture"),
        key("plus,equals_sign,right_square_bracket", "zoom(-1)", "in", "zoom in: show less time around the cursor ▼",
            footer=True),
        key("minus,left_square_bracket", "zoom(1)", "out", "zoom out: show more time", footer=True),
        key("z", "fit", "fit", "zoom to the selection, or to the step at the cursor", footer=True),
        key("0", "whole", "whole", "the whole capture"),
        key("u", "back", "undo zoom", "go back to the view before the last zoom or jump"),
        key("up,k", "place(-1)", "row above", "the row above"),
        key("down,j", "place(1)", "row below", "the row below"),
        key("pageup", "place(-10)", "up a page", "ten rows up"),
        key("pagedown", "place(10)", "down a page", "ten rows down"),
        key("full_stop", "range(1)", "next range", "select the next range on this row"),
        key("comma", "range(-1)", "previous range", "select the previous range"),
        key("n", "gap(1)", "gap", "select the next gap on this row that is at least a cell wide", footer=True),
        key("N", "gap(-1)", "previous gap", "the gap before"),
        key("o", "other_end", "other end", "go from a kernel to its launch and back, or from an idle gap to its end"),
        key("e,space", "fold", "unfold", "show or hide streams, threads of a pool, nested ranges", footer=True),
        key("E", "fold_all", "unfold all", "show or hide the streams of all GPUs"),
        key("enter", "details", "details", "show everything about the selection"),
    ]

    class Opened(Message):
        """The user wants the details of what is selected."""

    def __init__(self, moved: Callable[[], None], *, id: str | None = None) -> None:
        super().__init__(moved, id=id)
        self.match: Range | None = None  # what a search found last
        self._views: list[View] = []
        self._drag: tuple[int, View] | None = None  # the column where it began, and the view then
        self._dragged = False

    # -- the view -----------------------------------------------------------------------------

    def set_view(self, view: View, keep: bool = True) -> None:
        """Show another stretch of time; with ``keep`` the key u goes back to the one before."""
        if keep and view != self.view:
            self._views = [*self._views[-_MAX_EARLIER_VIEWS:], self.view]
        super().set_view(view)

    def action_pan(self, eighths: int) -> None:
        # By whole cells, so that the picture shifts without flicker.
        cell_ns = self.view.span_ns / self.cells
        by = max(1, round(_PAN_RATIO * self.cells)) * eighths
        self.set_view(self.view.at(self.view.start_ns + by * cell_ns, self.view.span_ns), keep=False)

    def action_edge(self, side: int) -> None:
        self.set_view(self.view.at(self.view.window_ns[0] if side < 0 else self.view.window_ns[1], self.view.span_ns))

    def action_zoom(self, by: int) -> None:
        about = self.cursor_ns
        if not self.view.start_ns <= about <= self.view.end_ns:
            about = self.view.start_ns + self.view.span_ns // 2
        self.set_view(self.view.zoom(_KEY_ZOOM**by, about))

    def action_whole(self) -> None:
        self.set_view(View.whole(self.view.window_ns))

    def action_back(self) -> None:
        if self._views:
            *self._views, before = self._views
            self.set_view(before, keep=False)
        else:
            self.notify("Nothing to undo: there was no zoom or jump yet.")

    def action_fit(self) -> None:
        if self.timeline is None:
            return
        step = step_at(self.timeline.steps_ns, self.cursor_ns)
        if self.selected is not None:
            self.set_view(self.view.fit(self.selected.start_ns, self.selected.end_ns))
        elif self.gap is not None:
            self.set_view(self.view.fit(self.gap[0], self.gap[1], margin=0.5))
        elif step is not None:
            begin, end = self.timeline.steps_ns[step].tolist()
            self.set_view(self.view.fit(begin, end, margin=0.02))
        else:
            self.notify("Nothing is selected. Press . for the next range, or n for the next gap.")

    # -- places -------------------------------------------------------------------------------

    def action_place(self, by: int) -> None:
        """Go to the next place that is not a heading, and select what is there at the cursor's time."""
        step = 1 if by >= 0 else -1
        index = min(max(self.index + by, 0), len(self.places) - 1)
        while 0 <= index < len(self.places) and self.places[index].row is None:
            index += step
        if not 0 <= index < len(self.places):
            return
        if not self.view.start_ns <= self.cursor_ns < self.view.end_ns:
            self.cursor_ns = self.view.start_ns + self.view.span_ns // 2
        self.select(index, self._range_at(index, self.cursor_ns))

    def action_fold(self) -> None:
        place = self.place
        if place is None or not place.rows:
            return
        # From a stream this folds its GPU; from a thread of a pool without nested ranges, the pool.
        for candidate in (place, *(p for p in reversed(self.places[:self.index]) if p.rows)):
            if candidate.fold is not None and (candidate is place or place.rows[0] in candidate.rows or (
                    place.rows[0].kind in WITHIN and candidate.rows[0].kind == "gpu")):
                self.fold(self.unfolded ^ {candidate.fold})
                return
        self.notify(f"There is nothing inside {place.label.strip()} to show.")

    def action_fold_all(self) -> None:
        if self.timeline is not None:
            gpus = gpu_folds(self.timeline.rows)
            self.fold(self.unfolded - gpus if gpus <= self.unfolded else self.unfolded | gpus)

    # -- the selection ------------------------------------------------------------------------

    def _range_at(self, index: int, time_ns: int) -> Range | None:
        """The range drawn on this place at a moment: the innermost one, or that of the place's level of nesting."""
        place = self.places[index]
        if self.timeline is None:
            return None
        for row in place.rows:
            innermost = self.timeline.at(row.key, time_ns)
            if innermost is not None and not self.shows(place, innermost):
                overlapping = self.timeline.ranges(row.key, time_ns, time_ns + 1)
                innermost = next((r for r in overlapping if self.shows(place, r)), None)
            if innermost is not None:
                return innermost
        return None

    def action_range(self, by: int) -> None:
        place, last = self.place, self.selected
        if self.timeline is None or place is None or not place.rows:
            return
        time_ns = last.start_ns if last is not None else self.gap[0] if self.gap else self.cursor_ns
        for _ in range(_MAX_RANGES_SKIPPED):
            following = self._next(place, time_ns, by < 0, last)
            if following is None:
                break
            if self.shows(place, following):
                self.reveal(following, self.index)
                return
            time_ns, last = following.start_ns, following
        self.notify(f"No {'earlier' if by < 0 else 'later'} range on {place.label.strip()}.")

    def _next(self, place: Place, time_ns: int, back: bool, last: Range | None) -> Range | None:
        """The next range of a place, at any level of nesting."""
        assert self.timeline is not None
        next_ranges = [
            self.timeline.next_range(row.key, time_ns, back, last.index if last and last.row == row.key else None)
            for row in place.rows]
        existing = [r for r in next_ranges if r is not None]
        return (max if back else min)(existing, key=lambda r: r.start_ns, default=None)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Allow an action; while a match of a search is selected, n and N go to the next match and not to the next
        gap."""
        if action == "gap" and self.match is not None and self.selected is self.match:
            return False
        return super().check_action(action, parameters)

    def action_gap(self, by: int) -> None:
        place = self.place
        if self.timeline is None or place is None or place.row is None:
            return
        least = max(1, self.view.span_ns // self.cells)
        begin = self.gap[0] if self.gap else self.cursor_ns
        next_gap = self.timeline.coverage.next_gap(place.row.key, begin, least, by < 0)
        if next_gap is None:
            self.notify(f"No {'earlier' if by < 0 else 'later'} gap of {seconds(least / 1e9)} or more on "
                        f"{place.row.label}. Zoom in to find shorter gaps.")
            return
        self.cursor_ns = next_gap[0]
        self.set_view(self.view.showing(*next_gap), keep=False)
        idle = idle_gap_at(self.timeline, place.row, *next_gap) if place.row.kind == "gpu" else None
        self.select(self.index, None, next_gap,
                    ended_by=self.timeline.range(*idle.ends) if idle is not None and idle.ends is not None else None)

    def action_other_end(self) -> None:
        if self.linked is not None:
            self.reveal(self.linked)
        elif self.selected is None:
            self.notify("Nothing is selected. Press . to select the next range on this row.")
        else:
            self.notify("The other end is not in this trace.")

    def action_details(self) -> None:
        self.post_message(self.Opened())

    # -- the mouse ----------------------------------------------------------------------------

    def _column(self, x: int) -> int:
        return min(max(x - self.label_cells, 0), self.cells - 1)

    def on_mouse_down(self, event: events.MouseDown) -> None:
        if event.button == 1 and event.x >= self.label_cells:
            self._drag, self._dragged = (event.x, self.view), False
            self.capture_mouse()

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if self._drag is None:
            return
        column, before = self._drag
        if event.x != column or self._dragged:
            self._dragged = True
            self.set_view(before.at(before.start_ns - (event.x - column) * before.span_ns / self.cells, before.span_ns),
                      keep=False)

    def on_mouse_up(self, event: events.MouseUp) -> None:
        self.release_mouse()
        dragged = self._drag is not None and self._dragged
        self._drag = None
        if not dragged and event.button == 1:
            self._clicked(event.x, event.y)

    def _clicked(self, x: int, y: int) -> None:
        if self.timeline is None:
            return
        column = self._column(x)
        if y < self.head_lines:
            if self.head_lines == 3 and y == 0:
                whole = View.whole(self.view.window_ns)
                self.set_view(self.view.centered(whole.time(column + 0.5, self.cells)))
            else:
                self.cursor_ns = self.view.time(column + 0.5, self.cells)
                self.select(self.index, self._range_at(self.index, self.cursor_ns))
            return
        index = self.index_at(y)
        place = self.places[index] if index is not None else None
        if index is None or place is None or place.row is None:
            return
        if x < self.label_cells:
            if index == self.index and x < 4:
                self.action_fold()
            self.select(index, self._range_at(index, self.cursor_ns))
            return
        begin, end = self.view.time(column, self.cells), self.view.time(column + 1, self.cells)
        self.cursor_ns = (begin + end) // 2
        clicked = self._range_at(index, self.cursor_ns)
        if clicked is None:  # the longest in the cell
            in_cell = [r for r in self.timeline.ranges(place.row.key, begin, end, 50) if self.shows(place, r)]
            clicked = max(in_cell, key=lambda r: r.end_ns - r.start_ns, default=None)
        if clicked is not None and clicked == self.selected and index == self.index:
            self.action_details()
        gap = self.timeline.coverage.next_gap(place.row.key, self.cursor_ns + 1, 1, True) if clicked is None else None
        self.select(index, clicked, gap if gap is not None and gap[1] > self.cursor_ns else None)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self._wheel(event, -1)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self._wheel(event, 1)

    def on_mouse_scroll_left(self, event: events.MouseEvent) -> None:
        self._wheel(event, -1, sideways=True)

    def on_mouse_scroll_right(self, event: events.MouseEvent) -> None:
        self._wheel(event, 1, sideways=True)

    def _wheel(self, event: events.MouseEvent, by: int, sideways: bool = False) -> None:
        event.stop()
        event.prevent_default()
        if sideways or event.shift or event.ctrl:
            self.action_pan(by)
        elif event.x < self.label_cells:
            self.scroll_rows(3 * by)
        else:
            about_ns = self.view.time(self._column(event.x) + 0.5, self.cells)
            self.set_view(self.view.zoom(_WHEEL_ZOOM**by, about_ns), keep=False)
