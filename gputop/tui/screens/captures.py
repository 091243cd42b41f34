"""The captures of this session and of the logdir: open one, choose two to compare, delete one."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import ClassVar

from msgspec.structs import replace
from rich.style import Style
from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.message import Message
from textual.screen import ModalScreen

from gputop.core.errors import GputopError
from gputop.profiler.capture.records import CaptureRecord
from gputop.render.palette import ACCENT, BOLD, DIM, PLAIN
from gputop.render.styled_text import StyledText
from gputop.session.capture.saved_captures import (
    ListedCapture,
    delete_capture,
    listed,
    rename_capture,
    run_of,
    saved_captures,
)
from gputop.session.session import Session
from gputop.text.commands import command_of, short_command, short_description
from gputop.text.units import fit, printable, seconds
from gputop.tui.keys import key, up_and_down
from gputop.tui.screens.dialogs import Confirm, ask_text
from gputop.tui.widgets.cached_lines import ChoiceList, WheelMoves
from gputop.tui.widgets.dialog_frame import DialogFrame, WrappedText

_BATCH = 16  # captures that are shown together while the logdir is read
_OTHER_LINES = 8  # of the box: frame, details of the selected capture
_STEP_FROM_COLUMNS, _JOB_FROM_COLUMNS, _JOB_COLUMNS = 50, 100, 28


def when(time_s: float, now_s: float) -> str:
    """The time of a capture: of today the time alone, else the date, too."""
    then, now = time.localtime(time_s), time.localtime(now_s)
    if then[:3] == now[:3]:
        return time.strftime("%H:%M:%S", then)
    return time.strftime("%d %b %H:%M" if then[0] == now[0] else "%Y-%m-%d", then)


class SavedCaptures(ChoiceList[ListedCapture], WheelMoves):
    """A line a capture, the newest first; ● is the one that is shown, A and B are those to compare."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *up_and_down("capture"),
        key("pageup", "move(-10)", "up a page", "ten captures up"),
        key("pagedown", "move(10)", "down a page", "ten captures down"),
        key("home", "move(-1000)", "newest", "the newest capture"),
        key("end", "move(1000)", "oldest", "the oldest capture"),
    ]
    PANEL = "Captures"

    class Moved(Message):
        """Another capture is selected."""

    def __init__(self, session: Session) -> None:
        super().__init__(id="saved")
        self._session = session
        self.marks: dict[str, CaptureRecord] = {}

    @property
    def chosen(self) -> ListedCapture | None:
        """The selected capture, if there is one."""
        return self.selected if self.choices else None

    def draw(self) -> None:
        width = self.size.width
        now_s, shown = self._session.feed.clock(), self._session.results.last_capture
        job_columns = _JOB_COLUMNS if width >= _JOB_FROM_COLUMNS else 0
        lines: list[list[StyledText]] = []
        for i, one in self.shown():
            here = i == self.index
            record = one.record
            mark = next((name for name, marked in self.marks.items() if marked.path == record.path), " ")
            is_shown = shown is not None and shown.path == record.path
            step = "" if record.analysis is None else "no steps"
            step = step if record.step_s is None else seconds(record.step_s) + "/step" * (width >= _STEP_FROM_COLUMNS)
            left = f"{when(record.time_s, now_s):<13}{step:<{13 if width >= _STEP_FROM_COLUMNS else 10}}"
            job = printable(short_command(command_of(record.job)) if record.job else record.address)
            job = fit(job, job_columns - 2) + "  " if job_columns else ""
            rest = max(0, width - 5 - len(left) - len(job))
            lines.append([("›" if here else " ", ACCENT), (mark, ACCENT), (" ● " if is_shown else "   ", ACCENT),
                          (left, BOLD if here else PLAIN), (job, DIM),
                          *_named(one, rest, PLAIN if here else DIM)])
        self.show(lines)

    def action_move(self, by: int) -> None:
        super().action_move(by)
        self.post_message(self.Moved())


def _named(one: ListedCapture, width: int, style: Style) -> list[StyledText]:
    """The name that the user gave it, then its first finding."""
    name = f"“{fit(printable(one.name), min(len(printable(one.name)), width // 2))}” " if one.name else ""
    return [(name, BOLD), (fit(printable(one.first), max(0, width - len(name))), style)]


class CapturesScreen(ModalScreen[None]):
    """The list, which grows while the logdir is read, and what is known of the selected capture."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("enter", "open", "open", "open the selected capture: findings, timeline, tables; may need analysis first"),
        key("a,A", "mark('A')", "is A", "use the selected capture as A, from before the change"),
        key("b,B", "mark('B')", "is B", "use the selected capture as B, from after the change, and compare A and B"),
        key("n", "name", "name…", "name the selected capture, such as “before prefetch”"),
        key("slash", "filter", "filter", "show only captures whose name, job or finding contains a text"),
        key("d,delete", "delete", "delete…", "delete the selected capture from disk, after confirmation"),
        key("question_mark,f1", "app.help", "help", "show the keys of this screen"),
        key("escape", "step_back", "step back", "show all captures again; if all are shown, go back to the monitor"),
        key("q,J", "dismiss", "close", "back to the monitor"),
    ]
    HELP = ("The captures of this session and those in the --logdir folder, including TensorBoard's and automatic "
            "captures. ● marks the capture whose findings are shown. gputop analyzes a capture when you open it.\n")

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._list = SavedCaptures(session)
        if session.results.baseline is not None:
            self._list.marks["A"] = session.results.baseline
        self._saved: dict[Path, ListedCapture] = {}  # of the logdir, by the run's folder
        self._own: tuple[object, ...] = ()  # what of the session is shown
        self._pattern = ""
        self._stop = threading.Event()
        self._reading = session.replayed_snapshot is None

    def compose(self) -> ComposeResult:
        keys = "enter: open", "a b: compare", "n: name", "/: filter", "d: delete", "↑↓ select", "esc: close"
        with DialogFrame("Captures", *keys, id="captures-box", can_focus=False, has_data=True):
            yield self._list
            yield WrappedText(self._about, id="about")

    def on_mount(self) -> None:
        self._list.focus()
        self.update_view()
        if self._reading:
            self._read_logdir()

    def on_unmount(self) -> None:
        self._stop.set()

    def on_resize(self) -> None:
        self._fit()

    def _fit(self) -> None:
        self._list.styles.height = max(1, min(len(self._list.choices), self.app.size.height - _OTHER_LINES))
        self._list.draw()
        self.query_one(WrappedText).update_text()

    @work(thread=True, exclusive=True)
    def _read_logdir(self) -> None:
        batch: list[ListedCapture] = []
        for one in saved_captures(self._session.control.options.logdir):
            if self._stop.is_set():
                return
            batch.append(one)
            if len(batch) == _BATCH:
                self.app.call_from_thread(self._add, batch)
                batch = []
        self._reading = False
        if not self._stop.is_set():
            self.app.call_from_thread(self._add, batch)

    def _add(self, more: list[ListedCapture]) -> None:
        self._saved |= {_place(one): one for one in more}
        self._own = ()
        self.update_view()

    def update_view(self) -> None:
        """List what there is by now, where that has changed; the same capture stays selected."""
        session = self._session
        shown = (session.results.captures_this_run, session.results.captures, session.results.last_capture)
        if shown == self._own or not self.is_attached:
            return
        self._own = shown
        chosen = self._list.chosen
        by_place = dict(self._saved)
        for one in map(listed, (*session.results.captures_this_run, *session.results.captures)):
            saved = by_place.get(_place(one))
            if one.record.analysis is not None or saved is None:
                by_place[_place(one)] = one if saved is None else replace(one, name=saved.name)
        self._list.choices = sorted((one for one in by_place.values() if one.contains(self._pattern)),
                                     key=lambda one: -one.record.time_s)
        places = [_place(one) for one in self._list.choices]
        if chosen is not None and _place(chosen) in places:
            self._list.index = places.index(_place(chosen))
        self._list.index = max(0, min(self._list.index, len(places) - 1))
        self._fit()

    def _about(self, width: int) -> Text:
        """Below the list: the selected capture, or why there is none."""
        one, out = self._list.chosen, Text()
        if one is None and self._pattern:
            return out.append(f"No capture contains “{printable(self._pattern)}”. Press / to change the filter.", DIM)
        if one is None:
            logdir = printable(str(self._session.control.options.logdir))
            return out.append(f"Reading {logdir} …" if self._reading else
                              f"No captures in {logdir} yet. Press c to capture a trace.", DIM)
        record = one.record
        out.append("\n")
        if record.job or record.address:
            out.append(printable("  ".join(filter(None, (short_description(record.job), record.address)))) + "\n")
        out.append(printable(str(record.path)), DIM)
        remarks = record.remarks[:2]
        if record.uncaptured and record.uncaptured not in remarks:
            remarks = (remarks[0], record.uncaptured)
        for line in remarks:
            out.append("\n" + (fit(printable(line), width).rstrip() if line == record.uncaptured else printable(line)),
                       DIM)
        return out

    def on_saved_captures_moved(self) -> None:
        self.query_one(WrappedText).update_text()

    def on_choice_list_chosen(self) -> None:
        self.action_open()

    def action_open(self) -> None:
        one = self._list.chosen
        if one is None:
            return
        try:
            self._session.open_capture(one.record)
        except GputopError as error:
            self.notify(printable(f"{error.message}\n{error.fix}"), severity="warning")
        else:
            self.dismiss()

    def action_mark(self, name: str) -> None:
        one, marks = self._list.chosen, self._list.marks
        if one is None:
            return
        other = "B" if name == "A" else "A"
        if other in marks and marks[other].path == one.record.path:
            del marks[other]
        marks[name] = one.record
        self._list.draw()
        if len(marks) < 2:
            self.notify(f"{name} is chosen. Select the other capture and press {other.lower()}.")
            return
        from gputop.tui.screens.compare import CompareScreen

        self._session.compare_captures(marks["A"], marks["B"])
        self.app.switch_screen(CompareScreen(self._session, marks["B"]))

    def action_name(self) -> None:
        one = self._list.chosen
        if one is None:
            return

        def apply(name: str) -> None:
            try:
                rename_capture(one.record, name)
            except GputopError as error:
                self.notify(printable(f"{error.message}\n{error.fix}"), severity="warning")
            else:
                self._add([replace(one, name=name.strip())])

        ask_text(self.app, "Name of the capture", "what is different; leave empty to remove the name", one.name, apply)

    def action_filter(self) -> None:
        ask_text(self.app, "Filter captures", "part of a name, job or finding; leave empty to show all", self._pattern,
                 self._show_matching)

    def action_step_back(self) -> None:
        if self._pattern:
            self._show_matching("")
        else:
            self.dismiss()

    def _show_matching(self, pattern: str) -> None:
        self._pattern, self._own = pattern, ()
        self.update_view()

    def action_delete(self) -> None:
        one = self._list.chosen
        if one is None:
            return
        run = printable(str(run_of(one.record)))

        def answered(yes: bool | None) -> None:
            if not yes:
                return
            try:
                delete_capture(one.record)
            except GputopError as error:
                self.notify(printable(f"{error.message}\n{error.fix}"), severity="warning")
                return
            self._list.marks = {name: r for name, r in self._list.marks.items() if r.path != one.record.path}
            self._saved.pop(_place(one), None)
            self._session.drop_capture(one.record)
            self._add([])

        self.app.push_screen(Confirm(
            "Delete", f"Delete the capture of {when(one.record.time_s, self._session.feed.clock())}? y/N",
            f"This removes the traces in {run} and the files that gputop wrote next to them from disk."), answered)


def _place(one: ListedCapture) -> Path:
    """The run's folder, however its path is written."""
    return run_of(one.record).absolute()
