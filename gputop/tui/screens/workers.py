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

Answer = Literal["few", "all", "ask", "none"]


class WorkersQuestion(Dialog[Answer]):
    """Dismissed with the answer."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("y", "answer('few')", "capture these", "capture the proposed workers"),
        key("a", "answer('all')", "capture all", "capture all workers, even if it slows them down; at most "
                                                 f"{MAX_ALL_WORKERS}"),
        key("f", "answer('ask')", "ask their nodes", "first ask gputop on the other nodes for live figures, by ssh"),
        key("n,escape,q,enter", "answer('none')", "no", "close without a capture"),
        key("question_mark,f1", "app.help", "help", "the keys of this screen"),
    ]
    HELP = "A capture slows each worker down, and all wait for the slowest one.\n"

    def __init__(self, choice: Choice) -> None:
        super().__init__()
        self._choice = choice

    def compose(self) -> ComposeResult:
        choice = self._choice
        text = Text(f"Capture {len(choice.chosen)} of {choice.of} workers? y/N\n\n", WARN)
        for address, reason in zip(choice.chosen, choice.reasons, strict=True):
            text.append(f"{printable(address)}  {printable(reason)}\n")
        asks = "; f asks gputop on their nodes for some, by ssh" if choice.others_unasked else ""
        text.append(f"\nChosen by {printable(choice.by)}{asks}. A capture slows each worker down; their traces are "
                    "alike.", DIM)
        for note in choice.notes:
            text.append(f"\n{printable(note)}", WARN)
        if choice.risk:
            text.append(f"\n\nA capture may end the job: {printable(choice.risk)}.", WARN)
        more = [] if choice.of > MAX_ALL_WORKERS else [f"a: all {choice.of}"]
        more += ["f: ask their nodes"] if choice.others_unasked else []
        with DialogFrame("Capture", "y: these", *more, "n, esc: no", id="popup"):
            yield WrappedText(text)

    def action_answer(self, answer: Answer) -> None:
        choice = self._choice
        if {"all": choice.of <= MAX_ALL_WORKERS, "ask": choice.others_unasked}.get(answer, True):
            self.dismiss(answer)
