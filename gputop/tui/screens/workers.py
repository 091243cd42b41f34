"""The question which of many workers to capture."""

from __future__ import annotations

from typing import ClassVar, Literal

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType

from gputop.profiler.capture.choose_workers import MAX_ALL_WORKERS, Choice
from gputop.render.palette import DIM, WARN
from gputop.text.units import printable
from gputop.tui.keys import key
from gputop.tui.widgets.dialog_frame import Dialog, DialogFrame, WrappedText

Answer = Literal["few", "all", "none"]


class WorkersQuestion(Dialog[Answer]):
    """Dismissed with the answer."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("y", "answer('few')", "capture these", "capture the proposed workers"),
        key("a", "answer('all')", "capture all", f"capture all workers (at most {MAX_ALL_WORKERS}), even if this slows "
                                                 "them down"),
        key("n,escape,q,enter", "answer('none')", "no", "close without a capture"),
        key("question_mark,f1", "app.help", "help", "the keys of this screen"),
    ]
    HELP = "A capture slows down each worker, and all wait for the slowest one.\n"

    def __init__(self, choice: Choice) -> None:
        super().__init__()
        self._choice = choice

    def compose(self) -> ComposeResult:
        choice = self._choice
        text = Text(f"Capture {len(choice.chosen)} of {choice.of} workers? y/N\n\n", WARN)
        for address, reason in zip(choice.chosen, choice.reasons, strict=True):
            text.append(f"{printable(address)}  {printable(reason)}\n")
        text.append(f"\nChosen by {printable(choice.by)}. A capture slows down each worker; traces are similar.", DIM)
        if choice.risk:
            text.append(f"\n\nA capture may end the job: {printable(choice.risk)}.", WARN)
        more = [] if choice.of > MAX_ALL_WORKERS else [f"a: all {choice.of}"]
        with DialogFrame("Capture", "y: these", *more, "n, esc: no", id="popup"):
            yield WrappedText(text)

    def action_answer(self, answer: Answer) -> None:
        if answer != "all" or self._choice.of <= MAX_ALL_WORKERS:
            self.dismiss(answer)
