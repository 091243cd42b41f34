"""The idle gaps of a capture: what each cause costs in all, and unfolded its gaps one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from textual import events
from textual.binding import BindingType

from gputop.render.palette import ACCENT, BOLD, DIM, PART_STYLE, PLAIN
from gputop.render.styled_text import StyledText
from gputop.text.units import fit, ranges, seconds, wrap
from gputop.timeline.model import PER, IdleGap, cause_text
from gputop.timeline.read_timeline import Timeline
from gputop.tui.keys import key
from gputop.tui.timeline.descriptions import idle_gap_lines, idle_total_lines, step_at
from gputop.tui.widgets.cached_lines import DrawnLines, MessageAbout, WheelMoves

_DETAILS_BESIDE_FROM = 150  # columns; in fewer the details are below the list
_MAX_DETAIL_LINES, _MIN_LIST_LINES = 9, 3  # where the details are below it
_CAUSE_LINES = 3  # of the details of a cause, at least


class _Entry(NamedTuple):
    """A line of the list: a cause, or one of its gaps (an index into the timeline's)."""

    total: int
    gap: int | None = None


class IdleGapList(WheelMoves, DrawnLines, can_focus=True):
    """Causes, the costliest first, and below an unfolded one its gaps; beside or below them the details of the
    selected one."""

    PANEL = "Idle gaps"
    BINDINGS: ClassVar[list[BindingType]] = [
        key("up,k", "move(-1)", "costlier", "select the line above; the timeline shows its costliest gap"),
        key("down,j", "move(1)", "less costly", "the line below"),
        key("right,l,space", "unfold(1)", "unfold", "list the gaps of this cause", footer=True),
        key("left,h", "unfold(-1)", "fold", "go back to the cause, and fold it"),
        key("pageup", "move(-10)", "up a page", "ten lines up"),
        key("pagedown", "move(10)", "down a page", "ten lines down"),
        key("home", "move(-10000)", "costliest", "the costliest cause"),
        key("enter", "open", "open", "on a cause: show its gaps; on a gap: show its finding", footer=True),
    ]

    class Chosen(MessageAbout[IdleGap]):
        """The picture is to go to this gap."""

    class Opened(MessageAbout[IdleGap]):
        """The user wants the finding of this gap."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.timeline: Timeline | None = None
        self.titles: Mapping[str, str] = {}
        self.at = 0  # index into ``entries``
        self.entries: list[_Entry] = []
        self._unfolded: set[int] = set()  # causes
        self._top = 0

    @property
    def chosen(self) -> IdleGap | None:
        """The selected gap, of a cause its costliest one."""
        if self.timeline is None or self.at >= len(self.entries):
            return None
        entry = self.entries[self.at]
        gaps = self._gaps(entry.total) if entry.gap is None else [entry.gap]
        return self.timeline.idle_gaps[gaps[0]] if gaps else None

    def _gaps(self, total: int) -> list[int]:
        assert self.timeline is not None
        idle_total = self.timeline.idle_totals[total]
        return [i for i, gap in enumerate(self.timeline.idle_gaps) if idle_total.holds(gap)]

    def _arrange(self) -> None:
        """The lines for what is unfolded."""
        self.entries = []
        for number in range(len(self.timeline.idle_totals) if self.timeline is not None else 0):
            self.entries.append(_Entry(number))
            if number in self._unfolded:
                self.entries += [_Entry(number, gap) for gap in self._gaps(number)]

    @property
    def _listed(self) -> int:
        height = self.size.height
        if self.size.width >= _DETAILS_BESIDE_FROM:
            return height
        of_cause = self.at < len(self.entries) and self.entries[self.at].gap is None  # that has fewer details
        fewest = min(len(self.entries), height - _CAUSE_LINES) if of_cause else 0
        return min(height, max(_MIN_LIST_LINES, fewest, height - _MAX_DETAIL_LINES))

    def update_view(self, timeline: Timeline, titles: Mapping[str, str]) -> None:
        """``titles``: of the findings by their ids."""
        self.timeline, self.titles = timeline, titles
        self._arrange()
        self.draw()

    def draw(self) -> None:
        width, height = self.size.width, self.size.height
        if self.timeline is None or width <= 0 or height <= 0:
            return
        idle_gaps, totals = self.timeline.idle_gaps, self.timeline.idle_totals
        self.border_title = f"Idle gaps by cause{PER.get(self.timeline.basis, '')}, mean over the GPUs"
        if not totals:
            if self.timeline.pending:
                text = f"Looking for idle gaps: {self.timeline.pending}."
            elif any(row.gpu is not None for row in self.timeline.rows):
                text = "No GPU is idle long enough to matter."
            else:
                text = ("This trace has no GPU. The findings and the tables (esc, then T) show what the host does "
                        "between the steps.")
            self.show([[(f" {line}", DIM)] for line in wrap(text, width - 2)][:height])
            return
        beside = width >= _DETAILS_BESIDE_FROM
        listed = self._listed
        left = width // 2 if beside else width
        self._top = max(min(self._top, self.at), self.at - listed + 1)
        # The same width on all lines, also on those that are scrolled away.
        gpus = min(max((len(ranges(b.gpus)) for b in idle_gaps), default=0), max(5, left // 6))
        rows = [self._line(i, left, gpus) for i in range(self._top, min(len(self.entries), self._top + listed))]
        room = height if beside else height - len(rows)
        right = width - left - 4 if beside else width - 2
        about = self._details(right, room)
        if beside:
            rows += [[(" " * left, DIM)]] * (height - len(rows))
            about += [[]] * (height - len(about))
            lines = [[*row, (" │ ", DIM), *detail] for row, detail in zip(rows, about, strict=True)]
        else:
            lines = rows + [[(" ", DIM), *detail] for detail in about]
        self.show(lines[:height])

    def _details(self, width: int, room: int) -> list[list[StyledText]]:
        assert self.timeline is not None
        total, gap = self.entries[self.at]
        of_cause = self.timeline.idle_totals[total]
        id_ = of_cause.finding if gap is None else self.timeline.idle_gaps[gap].finding
        finding: list[StyledText] = [(self.titles.get(id_, id_), PLAIN)] if id_ else []
        if gap is None:
            gaps = [self.timeline.idle_gaps[i] for i in self._gaps(total)]
            return idle_total_lines(self.timeline, of_cause, gaps, width, room, finding)
        return idle_gap_lines(self.timeline, self.timeline.idle_gaps[gap], width, room,
                              [*finding, ("  enter", ACCENT)] if finding else [])

    def _line(self, i: int, width: int, gpus: int) -> list[StyledText]:
        """A cause or a gap, exactly ``width`` cells, ``gpus`` of them for the numbers of a gap's GPUs."""
        assert self.timeline is not None
        number, gap = self.entries[i]
        here = i == self.at
        strong, quiet = (BOLD, PLAIN) if here else (PLAIN, DIM)
        runs: list[StyledText] = [("›" if here else " ", ACCENT)]
        if gap is None:
            total = self.timeline.idle_totals[number]
            mark = " " if not self._gaps(number) else "▾" if number in self._unfolded else "▸"
            runs += [(mark + " ", strong), ("█ ", PART_STYLE[total.part]),
                     (fit(seconds(total.s_per_step), 8, right=True), strong),
                     (fit("  " + total.text(self.timeline.period_s), max(0, width - 13)), PLAIN)]
            return runs
        b = self.timeline.idle_gaps[gap]
        step = step_at(self.timeline.steps_ns, b.start_ns)
        # As long as it is to be seen on each of its GPUs: their sum would be longer than the cause's whole mean.
        each = f"{len(b.gpus)}× " if len(b.gpus) > 1 else ""
        runs += [(fit(each + seconds(b.cost_ns / 1e9 / max(1, len(b.gpus))), 12, right=True), strong),
                 (fit(f"  GPU {ranges(b.gpus)}", 7 + gpus), DIM)]
        if width >= 44:
            runs.append((fit("" if step is None else f" step {step + 1}", 10), DIM))
        used = sum(len(t) for t, _ in runs)
        runs.append((fit(" " + (b.host or cause_text(b.cause, b.part)), max(0, width - used)), quiet))
        return runs

    def action_move(self, by: int) -> None:
        line = min(max(self.at + by, 0), len(self.entries) - 1)
        if self.entries and line != self.at:
            self.choose(line)

    def choose_gap(self, gap: int) -> None:
        """Select this one of the timeline's idle gaps; its cause unfolds."""
        assert self.timeline is not None
        idle_gap = self.timeline.idle_gaps[gap]
        total = next(i for i, of_cause in enumerate(self.timeline.idle_totals) if of_cause.holds(idle_gap))
        self._unfolded.add(total)
        self._arrange()
        self.choose(self.entries.index(_Entry(total, gap)))

    def choose(self, line: int) -> None:
        self.at = line
        self.draw()
        if self.chosen is not None:
            self.post_message(self.Chosen(self.chosen))

    def action_unfold(self, by: int) -> None:
        """Show the gaps of the cause (1), hide them (-1), or whichever it is not (0)."""
        if not self.entries:
            return
        total = self.entries[self.at].total
        if by > 0 or (by == 0 and total not in self._unfolded):
            self._unfolded.add(total)
        else:
            self._unfolded.discard(total)
            self.at = self.entries.index(_Entry(total))
        self._arrange()
        self.choose(self.at)

    def action_open(self) -> None:
        if self.entries and self.entries[self.at].gap is None:
            self.action_unfold(0)
        elif self.chosen is not None:
            self.post_message(self.Opened(self.chosen))

    def on_click(self, event: events.Click) -> None:
        row = event.get_content_offset(self)
        if row is None or self.timeline is None:
            return
        index = self._top + row.y
        if row.y >= self._listed or index >= len(self.entries):
            return
        if index == self.at:
            self.action_open()
        else:
            self.choose(index)
