"""The screens that open over the monitor: details of a finding, help, attach, the last capture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import HorizontalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from gputop.render.palette import ACCENT, WARN
from gputop.text.units import printable
from gputop.tui.keys import key
from gputop.tui.widgets.dialog_frame import DialogFrame, WrappedText


@dataclass(frozen=True, slots=True)
class Code:
    """Lines to paste."""

    text: str


@dataclass(frozen=True, slots=True)
class Below:
    """Text that belongs to the one above it and stands further in."""

    text: Text


Part = Text | Callable[[int], Text] | Code | Below  # text as it is, or made for the columns it has


class Popup(ModalScreen[None]):
    """A box over the monitor; esc and q close it. Code among its texts scrolls sideways and never wraps."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("y", "copy", "copy", "the code into the terminal's clipboard (OSC 52: over SSH, too, where allowed)"),
        key("question_mark", "app.help", "help", "the keys of this screen"),
        key("escape,q", "dismiss", "close", "back to where you were"),
    ]
    HELP = "↑ ↓ and the wheel scroll.\n"

    def __init__(self, title: str, *content: Part, keys: Sequence[str] = ()) -> None:
        """``keys`` are named on its border, beside the one that closes."""
        super().__init__()
        self._title, self._content, self._keys = title, content, keys

    def compose(self) -> ComposeResult:
        with DialogFrame(self._title, *self._keys, "esc: close", id="popup"):
            for part in self._content:
                if isinstance(part, Code):
                    with HorizontalScroll(classes="code"):
                        yield Static(Text("\n".join(map(printable, part.text.splitlines())), ACCENT, no_wrap=True))
                else:
                    below = isinstance(part, Below)
                    yield WrappedText(part.text if isinstance(part, Below) else part,
                                      classes="indented" if below else None)

    def on_mount(self) -> None:
        self.query_one("#popup").focus()

    def copied(self) -> tuple[str, str]:
        """What y copies, and what it is called; empty where there is nothing."""
        return "\n".join(part.text for part in self._content if isinstance(part, Code)), "The code"

    def action_copy(self) -> None:
        from gputop.tui.terminal.clipboard import copy

        text, what = self.copied()
        if text:
            copy(self.app, text, what)
        else:
            self.notify("There is no code to copy here.", timeout=4)


class LivePopup(Popup):
    """A box whose text is made anew with each look at the node."""

    def update_view(self) -> None:
        for wrapped in self.query(WrappedText):
            wrapped.update_text()


class Ask(ModalScreen[str | None]):
    """One line of input; dismissed with the text, or None on escape."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", "cancel")]

    def __init__(self, title: str, hint: str, value: str = "", placeholder: str = "",
                 check: Callable[[str], str | None] = lambda _: None) -> None:
        """``check`` says what is wrong with a text, which is then asked for again."""
        super().__init__()
        self._title, self._hint, self._value, self._placeholder = title, hint, value, placeholder
        self._check = check

    def compose(self) -> ComposeResult:
        with DialogFrame(self._title, "enter: ok", "esc: cancel", id="ask", can_focus=False):
            yield Input(value=self._value, placeholder=self._placeholder)
            yield WrappedText(Text(self._hint), id="hint")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        text = event.value.strip()
        problem = self._check(text) if text else None
        if problem is None:
            self.dismiss(text)
        else:
            self.query_one(WrappedText).update_text(Text(printable(problem), WARN))

    def action_cancel(self) -> None:
        self.dismiss(None)
