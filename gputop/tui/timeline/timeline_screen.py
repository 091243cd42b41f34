"""The timeline of a capture as a screen: the picture, what is selected, and the list of idle gaps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Footer

from gputop.core.errors import GputopError
from gputop.core.findings import Finding
from gputop.render.palette import ACCENT, BAD, BOLD, DIM, PLAIN, WARN
from gputop.render.styled_text import StyledText, justify, wrap
from gputop.text.units import counted, printable, seconds, size
from gputop.timeline.model import IdleGap, Range
from gputop.timeline.read_timeline import Timeline
from gputop.tui.keys import key
from gputop.tui.monitor.status_lines import SIMULATED_STYLE
from gputop.tui.screens.dialogs import Ask, Popup
from gputop.tui.screens.finding import FindingPopup
from gputop.tui.screens.help import help_box
from gputop.tui.timeline import descriptions
from gputop.tui.timeline.canvas import TimelineCanvas
from gputop.tui.timeline.descriptions import losses
from gputop.tui.timeline.idle_gap_list import IdleGapList
from gputop.tui.timeline.trace_file import TraceFile, gap_before, place_of
from gputop.tui.widgets.cached_lines import LinesWidget, MessageAbout

_CLOCK_PERIOD_S = 0.5  # period of the time shown while a trace is read
_HELP = """\
Each row is a GPU, a GPU stream, a host thread or a tf.data stage; each column is a slice of time. The height of \
a cell shows the share of its time with work, and its color the main kind of work. On the right is the share \
over the visible time. When you zoom in, ranges become named bars. The background of an idle gap has the color of \
its part of the step. Thin lines show where steps begin. In captures made by gputop, rows such as \
“Power” under a GPU show samples of that metric relative to its maximum, with the mean on the right.

Mouse: click to select, and click again to open details. The wheel zooms around the pointer. To pan, drag or use the \
wheel with shift or ctrl. Over the labels, the wheel scrolls the rows. Click on the top line to go to that time.
"""


class TimelineScreen(ModalScreen[None]):
    """The timeline of a trace, which is read in the background. Of the monitor's keys none works here."""

    TITLE = "timeline"
    HELP = _HELP
    CSS = """
    TimelineScreen { background: $background; }
    TimelineScreen #timeline-header { height: 1; background: $panel; }
    TimelineScreen #canvas { height: 1fr; }
    TimelineScreen #detail { height: 2; background: $surface; }
    TimelineScreen #idle-gaps { height: 14; border: round $quiet-border; border-title-color: $foreground; }
    TimelineScreen #idle-gaps { display: none; }
    TimelineScreen #idle-gaps:focus { border: round $accent; }
    TimelineScreen #reading { height: 1fr; padding: 1 2; }
    TimelineScreen.-reading #canvas, TimelineScreen.-reading #detail, TimelineScreen.-reading Footer { display: none; }
    TimelineScreen.-idle-gaps #idle-gaps { display: block; }
    TimelineScreen #reading { display: none; }
    TimelineScreen.-reading #reading { display: block; }
    TimelineScreen.-short #detail { height: 1; }
    TimelineScreen.-listing #detail { display: none; }
    TimelineScreen.-short Footer { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        key("escape", "leave", "back", "close the list, then go back to the monitor"),
        key("b,g", "idle_gaps", "idle gaps", "idle gaps by cause: cost, location and host activity", footer=True),
        key("slash", "search", "search", "search ranges and ops by part of their name", footer=True),
        key("n,greater_than_sign", "found(1)", "next match", "go to the next match"),
        key("N,less_than_sign", "found(-1)", "previous match", "go to the previous match"),
        key("r", "report", "report", "show the analysis as text: where the step's time goes on each GPU"),
        key("question_mark,f1", "help", "help", "the keys of this screen, and how to read it", footer=True),
        key("q", "close", "back", "back to the monitor", footer=True),
    ]

    class Read(MessageAbout[Timeline | GputopError]):
        """The rows of the trace or all of it has been read, or it cannot be; posted from the thread that tried."""

    def __init__(self, trace: TraceFile, finding: Finding | None = None,
                 find_range: Callable[[Timeline], Range | None] | None = None) -> None:
        """Show at first the place of ``finding``, or that range."""
        super().__init__()
        self._place = find_range
        self.trace = trace
        self._finding = finding
        self._stop = threading.Event()
        self._began_s = 0.0
        self._problem: GputopError | None = None
        self._shown_at: tuple[object, ...] | None = None  # when only the rows were there
        self._search_text = ""

    # -- building -----------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        yield LinesWidget(id="timeline-header")
        yield LinesWidget(id="reading")
        with Vertical():
            yield TimelineCanvas(self._show_detail, id="canvas")
            yield IdleGapList(id="idle-gaps")
        yield LinesWidget(id="detail")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self._canvas = self.query_one(TimelineCanvas)
        self._idle_gaps = self.query_one(IdleGapList)
        self._detail = self.query_one("#detail", LinesWidget)
        self._fit()
        if self.trace.timeline is not None:
            self._show_timeline(self.trace.timeline)
            return
        self.add_class("-reading")
        self._began_s = time.monotonic()
        self._clock = self.set_interval(_CLOCK_PERIOD_S, self._show_reading)
        self._show_reading()
        threading.Thread(target=self._read, name="gputop-timeline", daemon=True).start()

    def on_unmount(self) -> None:
        self._stop.set()

    def _post_read(self, outcome: Timeline | GputopError) -> None:
        """Post from the thread that reads."""
        if not self._stop.is_set():
            self.post_message(self.Read(outcome))
        elif isinstance(outcome, Timeline):
            outcome.close()

    def _read(self) -> None:
        try:
            outcome: Timeline | GputopError = self.trace.read(self._stop, self._post_read)
        except GputopError as error:
            outcome = error
        except Exception as error:  # noqa: BLE001  thread boundary: the screen shows it, the monitor goes on
            outcome = GputopError(f"internal error in gputop: {error!r}", "Please report this. The trace is saved.")
        self._post_read(outcome)

    def on_timeline_screen_read(self, message: Read) -> None:
        outcome, rows = message.subject, self._canvas.timeline
        if isinstance(outcome, GputopError):
            self._clock.stop()
            self._problem = outcome
            if rows is None:
                self._show_reading()
            else:  # those that are there stay
                rows.pending = "the trace could not be analyzed"
                self._idle_gaps.update_view(rows, self.trace.titles)
                self._show_header()
                self._show_detail()
                self.notify(f"gputop could not read the rest: {printable(outcome.message)}\n{printable(outcome.fix)}",
                            severity="warning")
        elif outcome.pending:
            self.remove_class("-reading")
            self._show_timeline(outcome)
        else:
            self._clock.stop()
            self.trace.timeline = outcome
            self.remove_class("-reading")
            (self._show_timeline if rows is None else self._complete)(outcome)

    def _complete(self, timeline: Timeline) -> None:
        """Take what has been read since the rows were, without moving anything; go where the screen was opened to
        show, unless the user has gone elsewhere meanwhile."""
        as_shown = self._shown_at in (None, self._canvas.where) and not self.has_class("-idle-gaps")
        self._canvas.complete(timeline)
        self._idle_gaps.update_view(timeline, self.trace.titles)
        self._show_header()
        self._show_detail()
        if as_shown:
            self._go_where_asked(timeline)

    def _show_reading(self) -> None:
        """Show, in place of the picture, that the trace is being read and for how long, or why it cannot be read; where
        its rows are there, in the header."""
        if self._canvas.timeline is not None:
            self._show_header()
            return
        box = self.query_one("#reading", LinesWidget)
        width = max(20, self.size.width - 4)
        paths = [Path(p) for p in self.trace.paths]
        lines: list[list[StyledText]] = []
        if self._problem is not None:
            lines += [[(t, BAD)] for t in wrap(printable(self._problem.message), width, 6)]
            lines += [[(t, PLAIN)] for t in wrap(printable(self._problem.fix), width, 4)]
            lines += [[], *([(printable(str(p)), DIM)] for p in paths[:4]), [], [
                ("r", ACCENT), (": the analysis as text   ", DIM), ("esc", ACCENT), (": back", DIM)]]
        else:
            total_bytes = sum(p.stat().st_size for p in paths if p.is_file())
            dots = "·" * (1 + int((time.monotonic() - self._began_s) / _CLOCK_PERIOD_S) % 3)
            lines = [[(f"Reading the trace {dots:<3}", BOLD),
                      (f"  {seconds(max(0.1, time.monotonic() - self._began_s))}", PLAIN),
                      (f"   {size(total_bytes)} in {counted(len(paths), 'file')}" if total_bytes else "", DIM)],
                     *([(printable(str(p)), DIM)] for p in paths[:4]), [],
                     [("esc", ACCENT), (": give up   ", DIM), ("r", ACCENT), (": the analysis as text", DIM)]]
        box.show(lines)
        self._show_header()

    def _show_timeline(self, timeline: Timeline) -> None:
        self._canvas.show(timeline)
        self._idle_gaps.update_view(timeline, self.trace.titles)
        self._canvas.focus()
        self._show_header()
        if timeline.pending:
            self._canvas.once_sized(self._note_place)
        else:
            self._go_where_asked(timeline)

    def _note_place(self) -> None:
        self._shown_at = self._canvas.where

    def _go_where_asked(self, timeline: Timeline) -> None:
        if self._finding is not None:
            self._canvas.once_sized(partial(self.go_to_finding, self._finding))
        elif self._place is not None:
            self._canvas.once_sized(partial(self._go_to, self._place(timeline)))

    # -- drawing ------------------------------------------------------------------------------

    def on_resize(self, event: events.Resize) -> None:
        self._fit()

    def _fit(self) -> None:
        height = self.app.size.height
        self.set_class(height < 14, "-short")
        self._idle_gaps.styles.height = max(4, min(16, height * 9 // 20))
        self._show_header()
        if self.has_class("-reading"):
            self._show_reading()
        self.call_after_refresh(self._show_detail)

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        # The list shows more about its gaps itself.
        self.set_class(event.widget is self._idle_gaps, "-listing")

    def _show_header(self) -> None:
        timeline = self._canvas.timeline
        width = self.app.size.width
        left: list[StyledText] = [(" gputop ", BOLD), (" timeline ", PLAIN), (" " + printable(self.trace.title), DIM)]
        right: list[StyledText] = []
        if timeline is not None:
            lost = losses(timeline)
            left[1:1] = [(" SIMULATED ", SIMULATED_STYLE)] * timeline.simulated + [(f" {lost} ", WARN)] * bool(lost)
            begin, end = timeline.window_ns
            right = [(seconds((end - begin) / 1e9), BOLD), (f"  {timeline.events:,} events", PLAIN), (" ", PLAIN)]
            if len(timeline.steps_ns):
                right.insert(2, (f"  {len(timeline.steps_ns)} step{'s' * (len(timeline.steps_ns) != 1)}", PLAIN))
            if timeline.pending:
                text = "rows only" if self._problem is not None else (
                    f"reading idle gaps, critical path  {seconds(time.monotonic() - self._began_s)}")
                left[-1:-1] = [(f" {text} ", WARN if self._problem is not None else ACCENT)]
            while right and sum(len(t) for t, _ in (*left[:-1], *right)) >= width:
                right.pop()
        self.query_one("#timeline-header", LinesWidget).show([justify(left, right, width)])

    def _show_detail(self) -> None:
        """Show what is selected, below the picture."""
        canvas, timeline = self._canvas, self._canvas.timeline
        width = self.app.size.width
        if timeline is None:
            return
        place = canvas.place
        if canvas.selected is not None:
            lines = descriptions.range_lines(timeline, canvas.selected, canvas.linked, width)
        elif canvas.gap is not None and place is not None and place.row is not None:
            lines = descriptions.gap_lines(timeline, place.row, canvas.gap, canvas.idle_gpus, canvas.linked, width)
        else:
            lines = descriptions.view_lines(timeline, canvas.view, width)
        self._detail.show([justify(line, [], width) for line in lines])

    # -- messages of the picture and the list -------------------------------------------------

    def on_timeline_canvas_opened(self, _: TimelineCanvas.Opened) -> None:
        canvas, timeline = self._canvas, self._canvas.timeline
        place = canvas.place
        if timeline is None or place is None or place.row is None:
            return
        if canvas.selected is not None:
            r = canvas.selected
            around = [o for o in timeline.ranges(r.row, r.start_ns, r.start_ns + 1)
                      if o.depth < r.depth and o.end_ns >= r.end_ns]
            around.sort(key=lambda o: o.depth)
            text = descriptions.range_text(timeline, r, canvas.linked, around)
            self.app.push_screen(Popup(place.row.label.strip(), text))
            return
        idle_gap = descriptions.idle_gap_at(timeline, place.row, *canvas.gap) if canvas.gap is not None else None
        if idle_gap is not None:
            self._open_idle(timeline, idle_gap)
        else:
            self.notify("Nothing is selected. Press . for the next range, or n for the next gap.")

    def on_idle_gap_list_chosen(self, message: IdleGapList.Chosen) -> None:
        idle, canvas, timeline = message.subject, self._canvas, self._canvas.timeline
        if timeline is None:
            return
        index = next((i for i, p in enumerate(canvas.places)
                      if p.rows and p.rows[0].kind == "gpu" and p.rows[0].gpu in idle.gpus), canvas.index)
        canvas.cursor_ns = idle.start_ns
        canvas.set_view(canvas.view.fit(idle.start_ns, idle.end_ns, margin=1.0))
        canvas.select(index, None, (idle.start_ns, idle.end_ns), idle.gpus,
                      timeline.range(*idle.ends) if idle.ends is not None else None)

    def on_idle_gap_list_opened(self, message: IdleGapList.Opened) -> None:
        finding = self.trace.finding(message.subject.finding)
        timeline = self._canvas.timeline
        if finding is not None:
            self.app.push_screen(FindingPopup(finding, self.go_to_finding))
        elif timeline is not None:
            self._open_idle(timeline, message.subject)

    def _open_idle(self, timeline: Timeline, idle: IdleGap) -> None:
        finding = self.trace.titles.get(idle.finding, idle.finding) if idle.finding else ""
        self.app.push_screen(Popup(
            "An idle gap", lambda width: descriptions.idle_gap_text(timeline, idle, finding, width)))

    def _go_to(self, range_: Range | None) -> None:
        if range_ is None:
            self.notify("This row has no single place in the trace.")
        else:
            self._canvas.set_view(self._canvas.view.fit(range_.start_ns, range_.end_ns, margin=3.0))
            self._canvas.reveal(range_)

    def go_to_finding(self, finding: Finding) -> None:
        """Show where a finding costs most, or say that there is no such place."""
        timeline = self._canvas.timeline
        target = place_of(timeline, finding) if timeline is not None else None
        if timeline is None or target is None:
            self.notify(f"{printable(finding.title)}: this finding has no single place in the trace.")
        elif isinstance(target, int):
            self._open_idle_gaps()
            self._idle_gaps.choose_gap(target)
        else:
            self._go_to(target)
            if (gap := gap_before(timeline, finding, target)) is not None:
                self._canvas.set_view(self._canvas.view.fit(*gap, margin=1.0))
                self._canvas.select(self._canvas.index, None, gap, (), target)

    # -- actions ------------------------------------------------------------------------------

    def _open_idle_gaps(self) -> None:
        self.add_class("-idle-gaps")
        self._idle_gaps.focus()

    def action_idle_gaps(self) -> None:
        if self._canvas.timeline is None:
            return
        if self.has_class("-idle-gaps") and self._idle_gaps.has_focus:
            self.remove_class("-idle-gaps")
            self._canvas.focus()
        else:
            self._open_idle_gaps()
            if self._idle_gaps.chosen is not None:
                self._idle_gaps.choose(self._idle_gaps.at)

    def action_search(self) -> None:
        if self._canvas.timeline is None:
            return

        def seek(text: str | None) -> None:
            if text:
                self._search_text = text
                self._canvas.focus()
                self.action_found(1)

        self.app.push_screen(Ask("Search the timeline", "part of a range or op name, in any case; then press n for the "
                                                        "next match, N for the previous one", self._search_text), seek)

    def action_found(self, by: int) -> None:
        canvas, timeline = self._canvas, self._canvas.timeline
        if timeline is None:
            return
        if not self._search_text:
            self.action_search()
            return
        selected = canvas.selected
        row, begin, index = (-1, canvas.cursor_ns, None) if selected is None else (
            selected.row, selected.start_ns, selected.index)
        match = timeline.search(self._search_text, row, begin, by < 0, index)
        if match is None:  # continue from the other end
            end = timeline.window_ns[0] - 1 if by > 0 else timeline.window_ns[1] + 1
            match = timeline.search(self._search_text, 0, end, by < 0)
            if match is not None:
                self.notify("The search continued from the other end of the capture.")
        if match is None:
            self.notify(f"No range or op name contains “{printable(self._search_text)}”.")
        else:
            canvas.reveal(match)
            canvas.match = canvas.selected

    def action_report(self) -> None:
        self.app.push_screen(Popup("The capture", self.trace.report))

    def action_help(self) -> None:
        self.app.push_screen(help_box(self, self.HELP))

    def action_leave(self) -> None:
        if self.has_class("-idle-gaps"):
            self.remove_class("-idle-gaps")
            self._canvas.focus()
        else:
            self.action_close()

    def action_close(self) -> None:
        self._stop.set()
        self.dismiss()
