"""Two captures of this session compared: what changed, and what the advice that was followed has brought."""

from __future__ import annotations

import threading
import time
from typing import ClassVar

from rich.text import Text
from textual import events, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.message import Message
from textual.screen import ModalScreen

from gputop.core.errors import GputopError
from gputop.profiler.capture.records import CaptureRecord
from gputop.render.palette import ACCENT, BAD, BOLD, DIM, PLAIN, WARN
from gputop.render.styled_text import StyledText
from gputop.session.session import Session
from gputop.text.units import fit, printable, seconds
from gputop.tui.keys import key
from gputop.tui.monitor.messages import no_capture
from gputop.tui.widgets.cached_lines import DrawnLines
from gputop.tui.widgets.dialog_frame import DialogFrame, WrappedText

REPORT_WIDTH = 88
_STYLES = {"better": ACCENT, "worse": BAD, "changed": WARN, "BETTER": ACCENT, "WORSE": BAD, "NOISE": DIM}
_HEADS = ("Step time", "Where the mean", "GPUs, A→B", "Advice", "Collectives  ", "Peak memory", "GPU  ")


def label(record: CaptureRecord) -> str:
    """A capture in a few words: "11:04:31, 412 ms/step"."""
    clock = time.strftime("%H:%M:%S", time.localtime(record.time_s))
    return f"{clock}, " + ("no steps" if record.step_s is None else f"{seconds(record.step_s)}/step")


def colored(report: str) -> Text:
    """The report of a comparison with its verdicts in color; the words are clear without it."""
    out = Text()
    for line in report.splitlines():
        words = line.replace(":", " ").replace(".", " ").split()
        style = PLAIN
        if line.startswith(_HEADS):
            style = BOLD
        elif words and words[0] in _STYLES:
            style = _STYLES[words[0]] + BOLD
        elif words and words[-1] in _STYLES:
            style = _STYLES[words[-1]]
        elif words[:1] == ["GONE"] or ", KEPT" in line:
            style = ACCENT
        elif line.startswith("!"):
            style = WARN
        out.append(line + "\n", style)
    return out


class CaptureList(DrawnLines, can_focus=True):
    """The captures, oldest first; A and B mark those that are compared."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("up,k", "move(-1)", "up", "select the capture above"),
        key("down,j", "move(1)", "down", "select the capture below"),
    ]
    PANEL = "Captures"
    ROWS = 6

    class Chosen(Message):
        """The user clicked a selected capture."""

    def __init__(self, captures: tuple[CaptureRecord, ...], *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.captures = captures
        self.a: CaptureRecord | None = None
        self.b: CaptureRecord | None = None
        self.index = len(captures) - 1
        self.styles.height = max(1, min(self.ROWS, len(captures)))

    @property
    def selected(self) -> CaptureRecord:
        return self.captures[self.index]

    @property
    def _top(self) -> int:
        return max(0, min(self.index - self.ROWS // 2, len(self.captures) - self.ROWS))

    def draw(self) -> None:
        lines: list[list[StyledText]] = []
        for i, record in enumerate(self.captures[self._top:self._top + self.ROWS], self._top):
            here = i == self.index and self.has_focus
            mark = "A" if record is self.a else "B" if record is self.b else " "
            steps = f"{record.steps.count} steps" if record.steps is not None else ""
            about = f"{steps:>10}   {printable(record.address)}   {printable(record.path.name)}"
            lines.append([("›" if here else " ", ACCENT), (f" {mark}  ", ACCENT),
                          (fit(label(record), 26), BOLD if here else PLAIN),
                          (fit(about, max(0, self.size.width - 31)), DIM)])
        self.show(lines)

    def action_move(self, by: int) -> None:
        self.index = min(len(self.captures) - 1, max(0, self.index + by))
        self.draw()

    def on_click(self, event: events.Click) -> None:
        row = event.get_content_offset(self)
        if row is None or not 0 <= self._top + row.y < len(self.captures):
            return
        if self.index == self._top + row.y:
            self.post_message(self.Chosen())
        self.index = self._top + row.y
        self.draw()


class CompareScreen(ModalScreen[None]):
    """A and B of the session's captures, and what changed between them."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("a,A", "mark('a')", "is A", "the selected capture is A, from before the change"),
        key("b,B,enter", "mark('b')", "is B", "the selected capture is B, from after the change"),
        key("pagedown,space", "scroll(1)", "on", "scroll the comparison down"),
        key("pageup", "scroll(-1)", "up the page", "scroll the comparison up"),
        key("x", "swap", "swap", "swap A and B"),
        key("c", "capture_again", "again", "back to the monitor, and capture once more: B is then the new capture"),
        key("question_mark", "app.help", "help", "the keys of this screen"),
        key("escape,q", "dismiss", "close", "back to the monitor"),
    ]
    HELP = ("Better and worse are beyond what one job differs by over time and between runs; the rest is noise. A "
            "share is “cannot be told” where a capture has too few steps or its trace is no longer on disk. Where the "
            "difference is small, capture again to be surer.\n")

    def __init__(self, session: Session, b: CaptureRecord | None = None) -> None:
        """The session must have two captures at least. ``b``: which of them is B; else the newest."""
        super().__init__()
        self._session = session
        captures = session.captures
        self._a = session.baseline if session.baseline in captures else captures[-2]
        self._b = b or (captures[-1] if captures[-1] is not self._a else captures[-2])
        self._stop = threading.Event()

    def compose(self) -> ComposeResult:
        keys = "a b: is A, B", "↑↓ select", "pgdn: on", "x: swap", "esc: close"
        with DialogFrame("What changed", *keys, id="compare", can_focus=False):
            yield CaptureList(self._session.captures, id="captures")
            with VerticalScroll(id="changes"):
                yield WrappedText(Text())

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.width < REPORT_WIDTH + 8, "tight")

    def on_mount(self) -> None:
        self.query_one(CaptureList).focus()
        self._compare()

    def on_unmount(self) -> None:
        self._stop.set()

    def on_capture_list_chosen(self) -> None:
        self.action_mark("b")

    def action_mark(self, side: str) -> None:
        chosen = self.query_one(CaptureList).selected
        a, b = (chosen, self._b) if side == "a" else (self._a, chosen)
        if a is b:  # swap them
            a, b = self._b, self._a
        self._a, self._b = a, b
        self._compare()

    def action_scroll(self, by: int) -> None:
        changes = self.query_one("#changes")
        changes.scroll_relative(y=by * max(1, changes.size.height - 2), animate=False)

    def on_mouse_scroll_down(self) -> None:
        self.query_one("#changes").scroll_relative(y=3, animate=False)

    def on_mouse_scroll_up(self) -> None:
        self.query_one("#changes").scroll_relative(y=-3, animate=False)

    def action_swap(self) -> None:
        self._a, self._b = self._b, self._a
        self._compare()

    async def action_capture_again(self) -> None:
        self.dismiss()
        await self.app.run_action("capture")

    def _compare(self) -> None:
        self._session.set_baseline(self._a)
        captures = self.query_one(CaptureList)
        captures.a, captures.b = self._a, self._b
        captures.draw()
        self._stop.set()
        self._stop = threading.Event()
        self._show_text(Text("Reading both traces…", DIM))
        self._work(self._a, self._b, self._stop)

    @work(thread=True, exclusive=True)
    def _work(self, a: CaptureRecord, b: CaptureRecord, stop: threading.Event) -> None:
        tight = self.app.size.width < REPORT_WIDTH + 8  # the class is set by the first resize, which may be later
        text = compared(a, b, 80 if tight else REPORT_WIDTH, stop)
        if not stop.is_set():
            self.app.call_from_thread(self._show_text, text)

    def _show_text(self, text: Text) -> None:
        for shown in self.query(WrappedText):
            shown.update_text(text)


def compared(a: CaptureRecord, b: CaptureRecord, width: int, stop: threading.Event) -> Text:
    """The comparison of two captures, from their traces, or from their analyses, or why there is none; blocks."""
    from gputop.comparison.worker import compare_in_worker

    why = "their traces are no longer on disk"
    if a.path.exists() and b.path.exists():
        try:
            return colored(compare_in_worker(str(a.path), str(b.path), width, stop).report)
        except GputopError as error:
            why = printable(error.message)
    from gputop.comparison.compare import compare_sides
    from gputop.comparison.report import text_report
    from gputop.comparison.sides import Side

    try:
        comparison = compare_sides(*(Side(str(r.path), "analysis", r.analysis, findings_at_capture=r.findings)
                                     for r in (a, b)))
    except GputopError as error:
        return Text(f"{printable(error.message)}\n{printable(error.fix)}")
    return Text(f"From the analyses alone: {why}.\n\n", WARN) + colored(text_report(comparison, width))


def mark_last(session: Session) -> str:
    """Make the last capture A, the baseline; returns what to do next."""
    captures = session.captures
    if not captures:
        return no_capture(session, "Then A marks it as the one to compare with.")
    if session.baseline is captures[-1]:
        return f"The capture of {label(captures[-1])} is A already. Change the job, capture again (c), then press B."
    session.set_baseline(captures[-1])
    return (f"A is the capture of {label(captures[-1])}. Now follow an advice, restart the job and press c: "
            "B then shows what it brought.")


def why_not(session: Session) -> str | None:
    """Why there is nothing to compare, and what to do; None where there is."""
    if len(session.captures) >= 2:
        return None
    if not session.captures:
        return no_capture(session, "Two captures are compared here, before and after a change of the job.")
    return (f"One capture so far ({label(session.captures[-1])}), two are needed. Change the job and press c again: "
            "B then shows what that brought.")
