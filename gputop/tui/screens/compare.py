"""Two captures of this session compared: what changed, and what the advice that was followed has brought."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from msgspec.structs import replace
from rich.style import Style
from rich.text import Text
from textual import events, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen

from gputop.core.errors import GputopError
from gputop.profiler.capture.records import CaptureRecord
from gputop.render.palette import ACCENT, BAD, BOLD, DIM, PLAIN, WARN
from gputop.render.styled_text import StyledText
from gputop.session.capture.captures import analyze_saved
from gputop.session.capture.saved_captures import saved_captures
from gputop.session.session import Session
from gputop.text.commands import command_of, script_of, short_description
from gputop.text.units import fit, printable, seconds, size
from gputop.tui.keys import key, up_and_down
from gputop.tui.monitor.messages import no_capture
from gputop.tui.terminal.terminal_app import copy
from gputop.tui.widgets.cached_lines import ChoiceList
from gputop.tui.widgets.dialog_frame import Dialog, DialogFrame, WrappedText

if TYPE_CHECKING:
    from gputop.comparison.compare import Comparison
    from gputop.comparison.report_lines import ReportLine
    from gputop.comparison.sides import Side

REPORT_WIDTH = 88
TITLE = "What changed"
UNFOLD = "u"
AGAIN = "Press c to capture again."
_PROGRESS_S = 0.5
_STYLES: dict[str, Style] = {"": PLAIN, "head": BOLD, "good": ACCENT, "bad": BAD, "warn": WARN, "dim": DIM}

Name = Literal["a", "b"]


def label(record: CaptureRecord) -> str:
    """A capture in a few words: "11:04:31, 412 ms/step"."""
    clock = time.strftime("%H:%M:%S", time.localtime(record.time_s))
    return f"{clock}, " + ("no steps" if record.step_s is None else f"{seconds(record.step_s)}/step")


def _job(record: CaptureRecord) -> str:
    """Name of its job: the script, and the framework if that is known; else its address."""
    return printable(short_description(record.job) or record.address)


def _script(record: CaptureRecord) -> str:
    return script_of(command_of(record.job))


def before(b: CaptureRecord, captures: Sequence[CaptureRecord]) -> CaptureRecord:
    """The last of the captures before ``b`` that is of its script and of an earlier start of it; as far as there is
    one."""
    earlier = list(captures[:captures.index(b)]) if b in captures[1:] else [one for one in captures if one is not b]
    for alike in (lambda one: _script(one) == _script(b), lambda one: (one.pid, one.started_s) != (b.pid, b.started_s)):
        earlier = [one for one in earlier if alike(one)] or earlier
    return earlier[-1]


def before_this_run(b: CaptureRecord, logdir: Path) -> CaptureRecord | None:
    """The newest capture of the logdir that an earlier gputop took of the script of ``b``, of an earlier start of it as
    far as there is one. Blocks as long as the logdir's file system does."""
    earlier = [one.record for one in saved_captures(logdir)
               if one.record.time_s < b.time_s and _script(one.record) == _script(b) != ""]
    before_start = (one for one in earlier if b.started_s is not None and one.time_s < b.started_s)
    return next(before_start, earlier[0] if earlier else None)


def two_jobs(a: CaptureRecord, b: CaptureRecord) -> str:
    """Warning that both are of different scripts; "" where they are not, or one is not known."""
    if not a.job or not b.job or _script(a) == _script(b):
        return ""
    return (f"These are two different jobs: A is from {_job(a)}, B from {_job(b)}. The difference does not come from a "
            "change in one job.")


def colored(lines: list[ReportLine]) -> Text:
    """The lines of a comparison; its verdict is bold, in the color of what it says."""
    out = Text()
    verdict = bool(lines)
    for i, line in enumerate(lines):
        verdict = verdict and (i == 0 or line.tone == lines[0].tone != "")
        style = _STYLES[line.tone]
        out.append(line.text + "\n", (style + Style(bold=True) if line.tone else BOLD) if verdict else style)
    return out


class CaptureList(ChoiceList[CaptureRecord]):
    """The captures, oldest first, with what each is in the comparison: A, B, or another one of their jobs."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *up_and_down("capture"),
    ]
    PANEL = "Captures"
    ROWS = 6

    def __init__(self, captures: tuple[CaptureRecord, ...], *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.marks: dict[Path, str] = {}
        self.show_captures(captures)

    def show_captures(self, captures: tuple[CaptureRecord, ...], chosen: Path | None = None) -> None:
        """``chosen``: the capture to be selected; else the newest."""
        self.choices = captures
        self.index = next((i for i, one in enumerate(captures) if one.path == chosen), len(captures) - 1)
        self.styles.height = max(1, min(self.ROWS, len(captures)))

    def draw(self) -> None:
        lines: list[list[StyledText]] = []
        for i, record in self.shown():
            here = i == self.index and self.has_focus
            mark = self.marks.get(record.path, "")
            steps = f"{record.steps.count} steps" if record.steps is not None else ""
            about = f"{steps:>10}   {_job(record)}   {printable(record.path.name)}"
            lines.append([("›" if i == self.index else " ", ACCENT if here else DIM), (f"{mark:>2}  ", ACCENT),
                          (fit(label(record), 26), BOLD if here else PLAIN),
                          (fit(about, max(0, self.size.width - 31)), DIM)])
        self.show(lines)


class Changes(VerticalScroll, can_focus=True, inherit_bindings=False):
    """The comparison, scrolled without animation."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("up,k", "scroll(-1)", "up", "a line up"),
        key("down,j", "scroll(1)", "down", "a line down"),
        key("pageup", "scroll(-1, True)", "up the page", "a page up"),
        key("pagedown,space", "scroll(1, True)", "down the page", "a page down"),
        key("home,g", "end(-1)", "begin", "to the verdict"),
        key("end,G", "end(1)", "end", "to the end"),
    ]
    PANEL = TITLE

    def action_scroll(self, by: int, page: bool = False) -> None:
        self.scroll_relative(y=by * max(1, self.size.height - 2) if page else by, animate=False, immediate=True)

    def action_end(self, by: int) -> None:
        (self.scroll_home if by < 0 else self.scroll_end)(animate=False, immediate=True)


class CaptureAgain(Dialog[Name | None]):
    """Question which job runs now, whose further capture is to be taken; dismissed with its side, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("a,A", "answer('a')", "A's job", "the job is running without the change: capture it again"),
        key("b,B", "answer('b')", "B's job", "the job is running with the change: capture it again"),
        key("escape,q,n", "dismiss", "no", "close without a capture"),
        key("question_mark,f1", "app.help", "help", "show the keys of this screen"),
    ]
    HELP = "gputop averages another capture of the same job with the first one.\n"
    QUESTION = "Which job is running now?"
    TEXT = ("a  A's job, without the change\nb  B's job, with the change\n\ngputop averages the new capture with the "
            "first one of that side, so smaller changes become significant. The best order is A, B, then A again, "
            "which shows what else changed over time.")

    def compose(self) -> ComposeResult:
        with DialogFrame("Capture again", "a: A's job", "b: B's job", "esc: no", id="popup"):
            yield WrappedText(Text(self.QUESTION, WARN))
            yield WrappedText(Text(self.TEXT))


class CompareScreen(ModalScreen[None]):
    """A and B of the session's captures, and what changed between them.

    A trace that this session has captured, opened or compared is not read again: what a comparison needs of it is kept
    with its capture. Any other is read once, in a process of its own.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        key("a", "mark('a')", "is A", "use the selected capture as A, from before the change"),
        key("b,enter", "mark('b')", "is B", "use the selected capture as B, from after the change"),
        key("A", "again('a')", "also A", "add the selected capture to A as another run; press again to remove it"),
        key("B", "again('b')", "also B", "add the selected capture to B as another run; press again to remove it"),
        key(UNFOLD, "unfold", "unfold", "show or hide unchanged values and the method"),
        key("x", "swap", "swap", "swap A and B"),
        key("c", "capture_again", "capture again", "capture the job of A or B again to resolve a small difference"),
        key("y", "copy", "copy", "copy the comparison as Markdown (OSC 52)"),
        key("e", "export", "export", "export the values as a CSV file"),
        key("question_mark,f1", "app.help", "help", "show the keys of this screen"),
        key("escape,q", "dismiss", "back", "back"),
    ]
    HELP = ("“Better” and “worse” mean more than the usual difference within a job over time and between runs. If a "
            "capture has too few steps, or its trace is no longer on disk, the verdict is “Cannot be told”. If the "
            "difference is small, capture again: A, B, then A once more.\n")

    def __init__(self, session: Session, b: CaptureRecord | None = None) -> None:
        """The session must have two captures at least. ``b``: which of them is B; else the newest."""
        super().__init__()
        self._session = session
        captures = session.results.captures
        baseline = session.results.baseline
        self._b = b or (captures[-1] if captures[-1] is not baseline else captures[-2])
        self._a = baseline if baseline in captures and baseline is not None else before(self._b, captures)
        self._chosen = False  # by the user, and not by their order
        self._again: dict[Name, tuple[CaptureRecord, ...]] = {"a": (), "b": ()}
        self._awaited: tuple[Name, CaptureRecord | None] | None = None  # whose capture runs, and the last one before it
        self._stop = threading.Event()
        self._reading: dict[Path, float] = {}  # traces, and since when
        self._unread: dict[Path, GputopError] = {}  # why
        self._shown: Comparison | list[ReportLine] | None = None  # or the lines that say why there is none
        self._everything = False

    def compose(self) -> ComposeResult:
        with DialogFrame(TITLE, *self._keys(), id="compare", can_focus=False, has_data=True):
            yield CaptureList(self._session.results.captures, id="captures")
            with Changes(id="changes"):
                yield WrappedText(Text())

    def _keys(self) -> tuple[str, ...]:
        return (f"{UNFOLD}: {'fold' if self._everything else 'unfold'}", "c: capture again", "x: swap",
                "tab, a b: choose", "y: copy", "e: CSV", "↑↓ scroll", "esc: back")

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.width < REPORT_WIDTH + 8, "tight")

    def on_mount(self) -> None:
        self.query_one(Changes).focus()
        self.set_interval(_PROGRESS_S, self._show_progress)
        self._compare()

    def on_unmount(self) -> None:
        self._stop.set()

    def on_choice_list_chosen(self) -> None:
        self.action_mark("b")

    def action_mark(self, side: Name) -> None:
        chosen, self._chosen = self.query_one(CaptureList).selected, True
        a, b = (chosen, self._b) if side == "a" else (self._a, chosen)
        if a.path == b.path:  # swap them
            a, b = self._b, self._a
        self._a, self._b = a, b
        self._forget_again(a, b)
        self._compare()

    def action_again(self, side: Name) -> None:
        chosen = self.query_one(CaptureList).selected
        if chosen.path in (self._a.path, self._b.path):
            return
        had = any(one.path == chosen.path for one in self._again[side])
        self._forget_again(chosen)
        if not had:
            self._again[side] += (chosen,)
        self._compare()

    def _forget_again(self, *chosen: CaptureRecord) -> None:
        paths = {one.path for one in chosen}
        self._again = {name: tuple(one for one in records if one.path not in paths)
                       for name, records in self._again.items()}

    def action_unfold(self) -> None:
        self._everything = not self._everything
        self.query_one(DialogFrame).name_keys(*self._keys())
        self._show_lines()

    def on_mouse_scroll_down(self) -> None:
        self.query_one(Changes).action_scroll(3)

    def on_mouse_scroll_up(self) -> None:
        self.query_one(Changes).action_scroll(-3)

    def action_swap(self) -> None:
        self._a, self._b = self._b, self._a
        self._again = {"a": self._again["b"], "b": self._again["a"]}
        self._compare()

    def action_capture_again(self) -> None:
        self.app.push_screen(CaptureAgain(), self._capture_again)

    async def _capture_again(self, side: Name | None) -> None:
        if side is not None:
            self._awaited = side, next(reversed(self._session.results.captures_this_run), None)
            await self.app.run_action("capture")

    def update_view(self) -> None:
        """Update with each sample: a capture that was asked for here may have ended."""
        if self._awaited is None:
            return
        side, before = self._awaited
        last, status = next(reversed(self._session.results.captures_this_run), None), self._session.control.status
        if last is not None and last.problem is None and (before is None or last.path != before.path):
            self._awaited = None
            self._again[side] += (last,)
            self.query_one(CaptureList).show_captures(self._session.results.captures)
            self._compare()
        elif status is not None and status.phase == "failed":
            self._awaited = None
            self.notify(f"{printable(status.message)}\n{printable(status.fix)}", severity="warning")

    # -- comparing ----------------------------------------------------------------------------

    def _records(self) -> tuple[CaptureRecord, ...]:
        return (self._a, self._b, *self._again["a"], *self._again["b"])

    def _compare(self) -> None:
        """Read what is not read yet, then compare; captures of two jobs only if they were chosen."""
        self._session.results.baseline = self._a
        captures = self.query_one(CaptureList)
        captures.marks = {record.path: f"+{name.upper()}" for name, again in self._again.items() for record in again}
        captures.marks |= {self._a.path: "A", self._b.path: "B"}
        captures.draw()
        self._shown = None
        if (warning := two_jobs(self._a, self._b)) and not self._chosen:
            self._show_text(Text(f"{warning}\n\na, b: choose A and B from the captures above to compare them.", WARN))
            return
        for record in self._records():
            path = record.path
            if record.compared is None and path not in self._reading and path not in self._unread:
                self._reading[path] = time.monotonic()
                self._read(record)
        self._compare_read()

    @work(thread=True)
    def _read(self, record: CaptureRecord) -> None:
        if record.path.exists():
            read = analyze_saved(record, self._stop)
        else:
            read = replace(record, problem=GputopError("its trace is no longer on disk", ""))
        if not self._stop.is_set():
            self.app.call_from_thread(self._was_read, read)

    def _was_read(self, record: CaptureRecord) -> None:
        del self._reading[record.path]
        if record.problem is not None:
            self._unread[record.path] = record.problem
        else:
            self._session.results.capture_read(record)
            self._a, self._b = (record if one.path == record.path else one for one in (self._a, self._b))
            self._again = {name: tuple(record if one.path == record.path else one for one in records)
                           for name, records in self._again.items()}
            captures = self.query_one(CaptureList)
            captures.show_captures(self._session.results.captures, captures.selected.path)
            captures.draw()
        self._compare_read()

    def _compare_read(self) -> None:
        """Compare, where all is read."""
        records = self._records()
        if any(record.path in self._reading for record in records):
            self._show_progress()
            return
        reasons = {name: self._unread[record.path].message for name, record in zip("AB", records[:2], strict=True)
                   if record.path in self._unread}
        self._work(records, len(self._again["a"]), reasons)

    @work(thread=True, exclusive=True, group="compare")
    def _work(self, records: Sequence[CaptureRecord], again_a: int, unread: dict[str, str]) -> None:
        shown = compared(records, again_a, unread)
        if not self._stop.is_set():
            self.app.call_from_thread(self._show_compared, shown, records)

    def _show_compared(self, shown: Comparison | list[ReportLine], records: Sequence[CaptureRecord]) -> None:
        if [one.path for one in records] == [one.path for one in self._records()]:  # else another choice is under way
            self._shown = shown
            self._show_lines()

    def _show_lines(self) -> None:
        shown = self._shown
        if shown is None:
            return
        if not isinstance(shown, list):
            from gputop.comparison.report_lines import layout

            width = 80 if self.app.size.width < REPORT_WIDTH + 8 else REPORT_WIDTH
            shown = layout(shown, width, everything=self._everything, unfold=UNFOLD, again=AGAIN)
        self._show_text(colored(shown))

    def action_copy(self) -> None:
        from gputop.comparison.report_lines import markdown
        if isinstance(self._shown, list | None):
            self.notify("There is no comparison to copy yet.")
        else:
            copy(self.app, markdown(self._shown, ()), "The comparison as Markdown")

    def action_export(self) -> None:
        from gputop.tui.screens.tables_screen import write_csv

        shown = self._shown
        if isinstance(shown, list | None):
            self.notify("There is no comparison to export yet.")
            return
        rows = [(row.group, row.id, row.gpu, row.unit, row.a, row.b, row.change, row.low, row.high, row.verdict,
                 row.reason) for row in shown.rows]
        write_csv(self.app, self._session.control.options.logdir, "comparison", _TITLES, rows,
                  simulated=shown.a.simulated or shown.b.simulated)

    def _show_progress(self) -> None:
        """Show which traces are being read, and where a capture that was asked for here stands."""
        status = self._session.control.status
        capturing = self._awaited is not None and status is not None and status.running
        frame = self.query_one(DialogFrame)
        frame.set_title(TITLE + (f" · capturing again: {status.phase}" if capturing and status else ""))
        if self._shown is None and self._reading:
            now = time.monotonic()
            self._show_text(Text("\n".join(
                f"Reading the trace from {name}, {_size(record.path)}: {now - self._reading[record.path]:.0f} s"
                if record.path in self._reading else f"{name} is read."
                for name, record in zip("AB", (self._a, self._b), strict=True)), DIM))

    def _show_text(self, text: Text) -> None:
        for shown in self.query(WrappedText):
            shown.update_text(text)


def _size(path: Path) -> str:
    try:
        files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
        return size(sum(file.stat().st_size for file in files))
    except OSError:
        return "size not known"


def side_of(record: CaptureRecord) -> Side:
    """Side of a comparison: what a capture's trace says, or its analysis alone where the trace could not be read."""
    from gputop.comparison.sides import Side, side_of_trace

    if record.compared is not None and record.analysis is not None:
        return side_of_trace(str(record.path), record.analysis, record.compared)
    return Side(str(record.path), "analysis", record.analysis, findings_at_capture=record.findings)


_TITLES = ("group", "id", "gpu", "unit", "a", "b", "change", "low", "high", "verdict", "reason")  # of a row's values


def compared(records: Sequence[CaptureRecord], again_a: int, unread: dict[str, str]) -> Comparison | list[ReportLine]:
    """The comparison, or the lines that say why there is none.

    ``records``: A and B, then ``again_a`` further captures of A's job, then those of B's. ``unread`` says of A and B,
    where their traces could not be read, why.
    """
    from gputop.comparison.caveats import Note
    from gputop.comparison.compare import compare_sides
    from gputop.comparison.report_lines import ReportLine

    try:
        a, b, *others = map(side_of, records)
        comparison = compare_sides(replace(a, repeats=tuple(others[:again_a])),
                                   replace(b, repeats=tuple(others[again_a:])))
    except GputopError as error:
        return [ReportLine(printable(text), "warn") for text in (error.message, error.fix, *unread.values())]
    if warning := two_jobs(*records[:2]):
        comparison = comparison.with_note(Note("other_job", warning))
    for name, reason in reversed(unread.items()):
        comparison = comparison.with_note(Note("no_trace", f"{name} is compared only by its saved analysis: {reason}."))
    return comparison


def mark_last(session: Session) -> str:
    """Make the last capture A, the baseline; returns what to do next."""
    captures = session.results.captures
    if not captures:
        return no_capture(session, "Then press A to mark it for comparison.")
    if session.results.baseline is captures[-1]:
        return f"The capture from {label(captures[-1])} is already A. Change the job, capture again (c), then press B."
    session.results.baseline = captures[-1]
    return (f"A is the capture from {label(captures[-1])}. Follow a recommendation, restart the job, press c, and then "
            "B to see what changed.")


def why_not(session: Session) -> str | None:
    """Reason why there is nothing to compare, and what to do; None where there is."""
    captures = session.results.captures
    if len(captures) >= 2:
        return None
    if not captures:
        return no_capture(session, "This compares two captures, from before and after a change to the job.")
    earlier = " To compare with an earlier capture, press J (a, b)." if session.watch.earlier.count else ""
    return (f"A comparison needs two captures, and there is one so far ({label(captures[-1])}). Change the job, press "
            f"c again, and then B to see what changed.{earlier}")
