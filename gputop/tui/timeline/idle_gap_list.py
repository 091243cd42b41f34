"""The idle gaps of a capture by what they cost, and what the host did in the selected one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from textual import events
from textual.binding import BindingType
from textual.message import Message

from gputop.render.palette import ACCENT, BOLD, DIM, PART_STYLE, PLAIN
from gputop.render.styled_text import StyledText
from gputop.text.units import fit, ranges, seconds
from gputop.timeline.model import CAUSES, IdleGap
from gputop.timeline.reader import Timeline
from gputop.tui.keys import key
from gputop.tui.timeline.descriptions import idle_gap_lines
from gputop.tui.timeline.header import step_at
from gputop.tui.widgets.cached_lines import DrawnLines

_DETAILS_BESIDE_FROM = 150  # columns; in fewer the details are below the list
_MAX_DETAIL_LINES, _MIN_LIST_LINES = 9, 3  # where the details are below it


class IdleGapList(DrawnLines, can_focus=True):
    """The list with the details of the selected gap; up and down select, enter opens its finding."""

    PANEL = "Idle gaps"
    BINDINGS: ClassVar[list[BindingType]] = [
        key("up,k", "move(-1)", "costlier", "the costlier gap; the picture goes there"),
        key("down,j", "move(1)", "less costly", "the less costly gap"),
        key("pageup", "move(-10)", "up a page", "ten gaps up"),
        key("pagedown", "move(10)", "down a page", "ten gaps down"),
        key("home", "move(-1000)", "costliest", "the costliest gap"),
        key("enter", "open", "finding", "the finding this gap belongs to", footer=True),
    ]

    class Chosen(Message):
        """The picture is to go to this gap."""

        def __init__(self, idle: IdleGap) -> None:
            super().__init__()
            self.idle = idle

    class Opened(Message):
        """The user wants the finding of this gap."""

        def __init__(self, idle: IdleGap) -> None:
            super().__init__()
            self.idle = idle

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.timeline: Timeline | None = None
        self.titles: Mapping[str, str] = {}
        self.at = 0
        self._top = 0

    @property
    def chosen(self) -> IdleGap | None:
        idle_gaps = self.timeline.idle_gaps if self.timeline is not None else ()
        return idle_gaps[self.at] if self.at < len(idle_gaps) else None

    @property
    def _listed(self) -> int:
        """Lines of the list."""
        height = self.size.height
        return height if self.size.width >= _DETAILS_BESIDE_FROM else min(
            height, max(_MIN_LIST_LINES, height - _MAX_DETAIL_LINES))

    def update_view(self, timeline: Timeline, titles: Mapping[str, str]) -> None:
        """``titles``: of the findings by their ids."""
        self.timeline, self.titles = timeline, titles
        self.draw()

    def draw(self) -> None:
        width, height = self.size.width, self.size.height
        if self.timeline is None or width <= 0 or height <= 0:
            return
        idle_gaps = self.timeline.idle_gaps
        self.border_title = f"Idle gaps by cost · {min(self.at + 1, len(idle_gaps))} of {len(idle_gaps)}"
        if not idle_gaps:
            self.show([[(" No GPU is idle for long enough to matter, or the trace has no GPU.", DIM)]])
            return
        beside = width >= _DETAILS_BESIDE_FROM
        listed = self._listed
        left = width // 2 if beside else width
        self._top = max(min(self._top, self.at), self.at - listed + 1)
        # The same width on all lines, also on those that are scrolled away.
        gpus = min(max(len(ranges(b.gpus)) for b in idle_gaps), max(5, left // 6))
        rows = [self._line(i, left, gpus) for i in range(self._top, min(len(idle_gaps), self._top + listed))]
        room = height if beside else height - len(rows)
        id_ = idle_gaps[self.at].finding
        finding = [(self.titles.get(id_, id_), PLAIN), ("  enter", ACCENT)] if id_ else []
        right = width - left - 4 if beside else width - 2
        about = idle_gap_lines(self.timeline, idle_gaps[self.at], right, room, finding)
        if beside:
            rows += [[(" " * left, DIM)]] * (height - len(rows))
            about += [[]] * (height - len(about))
            lines = [[*row, (" │ ", DIM), *detail] for row, detail in zip(rows, about, strict=True)]
        else:
            lines = rows + [[(" ", DIM), *detail] for detail in about]
        self.show(lines[:height])

    def _line(self, i: int, width: int, gpus: int) -> list[StyledText]:
        """One gap, exactly ``width`` cells, ``gpus`` of them for the GPUs' numbers."""
        assert self.timeline is not None
        b = self.timeline.idle_gaps[i]
        here = i == self.at
        step = step_at(self.timeline.steps_ns, b.start_ns)
        runs: list[StyledText] = [("›" if here else " ", ACCENT), ("█ ", PART_STYLE[b.part]),
                                  (fit(seconds(b.cost_ns / 1e9), 8, right=True), BOLD if here else PLAIN),
                                  (fit(f"  GPU {ranges(b.gpus)}", 7 + gpus), DIM)]
        if width >= 44:
            runs.append((fit("" if step is None else f" step {step + 1}", 10), DIM))
        used = sum(len(t) for t, _ in runs)
        what = CAUSES[b.cause] + (f" · {b.host}" if b.host else "")
        runs.append((fit(" " + what, max(0, width - used)), PLAIN if here else DIM))
        return runs

    def action_move(self, by: int) -> None:
        count = len(self.timeline.idle_gaps) if self.timeline is not None else 0
        at = min(max(self.at + by, 0), count - 1)
        if count and at != self.at:
            self.choose(at)

    def choose(self, at: int) -> None:
        """Select this one of the timeline's idle gaps."""
        self.at = at
        self.draw()
        if self.chosen is not None:
            self.post_message(self.Chosen(self.chosen))

    def action_open(self) -> None:
        if self.chosen is not None:
            self.post_message(self.Opened(self.chosen))

    def on_click(self, event: events.Click) -> None:
        row = event.get_content_offset(self)
        if row is None or self.timeline is None:
            return
        index = self._top + row.y
        if row.y >= self._listed or index >= len(self.timeline.idle_gaps):
            return
        if index == self.at:
            self.action_open()
        else:
            self.choose(index)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.action_move(-1)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.action_move(1)
