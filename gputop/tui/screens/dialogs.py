"""Dialogs that open over a screen: a box of texts and code, and a line of input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from msgspec import Struct
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import HorizontalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from gputop.core.errors import GputopError
from gputop.render.palette import ACCENT, WARN
from gputop.render.styled_text import wrap
from gputop.text.units import printable
from gputop.tui.keys import key
from gputop.tui.terminal.terminal_app import copy
from gputop.tui.widgets.dialog_frame import Dialog, DialogFrame, WrappedText


class Code(Struct, frozen=True):
    """Lines for the user to paste."""

    text: str


class Below(Struct, frozen=True):
    """Text that belongs to the one above it, and is indented."""

    text: Text


_POPUP_COLUMNS, _BESIDE_CODE = 104, 7  # as the style sheet has them: its width, frame and margins


def with_comments_above(code: str, columns: int) -> str:
    """``code`` with the comments of lines that are longer than ``columns`` on lines of their own, above the line."""
    out: list[str] = []
    for line in code.splitlines():
        body, mark, comment = line.partition("# ")
        if len(line) <= columns or not mark or not (body.isspace() or not body or body.endswith("  ")):
            out.append(line)
            continue
        indent = " " * (len(body) - len(body.lstrip()) if body.strip() else len(body))
        out += [f"{indent}# {part}" for part in wrap(comment, max(16, columns - len(indent) - len("# ")), len(comment))]
        out += [body.rstrip()] if body.strip() else []
    return "\n".join(out)


Part = Text | Callable[[int], Text] | Code | Below  # text as it is, or made for a number of columns


class Popup(Dialog[None]):
    """A box over the screen; esc and q close it. Code in it scrolls sideways and is not wrapped, but its comments."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("y", "copy", "copy", "copy the code (OSC 52, works over SSH)"),
        key("question_mark,f1", "app.help", "help", "show the keys of this screen"),
        key("escape,q", "dismiss", "close", "back"),
        key("j", "scroll(1)", "down", "a line down"),
        key("k", "scroll(-1)", "up", "a line up"),
    ]
    HELP = "You can also scroll with ↑ ↓ and the wheel.\n"

    def __init__(self, title: str, *content: Part, keys: Sequence[str] = (), has_data: bool = True) -> None:
        """``keys`` are named on its border, next to the one that closes it. ``has_data``: it shows values."""
        super().__init__()
        self._title, self._content, self._keys, self._has_data = title, content, keys, has_data

    def compose(self) -> ComposeResult:
        with DialogFrame(self._title, *self._keys, "esc: close", id="popup", has_data=self._has_data):
            for part in self._content:
                if isinstance(part, Code):
                    code = "\n".join(map(printable, part.text.splitlines()))
                    code = with_comments_above(code, min(_POPUP_COLUMNS, self.app.size.width) - _BESIDE_CODE)
                    with HorizontalScroll(classes="code"):
                        yield Static(Text(code, ACCENT, no_wrap=True))
                else:
                    below = isinstance(part, Below)
                    yield WrappedText(part.text if isinstance(part, Below) else part,
                                      classes="indented" if below else None)

    def action_scroll(self, by: int) -> None:
        self.query_one("#popup").scroll_relative(y=by, animate=False, immediate=True)

    def copied(self) -> tuple[str, str]:
        """Text that the key y copies, and its name; empty where there is nothing to copy."""
        return "\n".join(part.text for part in self._content if isinstance(part, Code)), "The code"

    def action_copy(self) -> None:
        text, what = self.copied()
        if text:
            copy(self.app, text, what)
        else:
            self.notify("There is no code to copy here.")


class LivePopup(Popup):
    """A box whose text is made again for each sample."""

    def update_view(self) -> None:
        for wrapped in self.query(WrappedText):
            wrapped.update_text()


class Ask(ModalScreen[str | None]):
    """One line of input; dismissed with the text, or None on escape."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss", "cancel")]

    def __init__(self, title: str, hint: str, value: str = "", placeholder: str = "",
                 check: Callable[[str], str | None] = lambda _: None) -> None:
        """``check`` returns what is wrong with a text, or None; a wrong one has to be corrected."""
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


def ask_text(app: App[Any], title: str, hint: str, value: str, apply: Callable[[str], None]) -> None:
    """Ask for a text that is ``value`` by now; ``apply`` gets the answer, unless there is none."""
    app.push_screen(Ask(title, hint, value), lambda text: apply(text) if text is not None else None)


class Confirm(Dialog[bool]):
    """A question; dismissed with whether it was answered with yes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("y", "answer(True)", "yes", "do it"),
        key("n,escape,q,enter", "answer(False)", "no", "close without doing anything"),
        key("question_mark,f1", "app.help", "help", "show the keys of this screen"),
    ]
    HELP = "Only y confirms.\n"

    def __init__(self, title: str, question: str, hint: str) -> None:
        super().__init__()
        self._title, self._question, self._hint = title, question, hint

    def compose(self) -> ComposeResult:
        with DialogFrame(self._title, "y: yes", "n, esc: no", id="popup"):
            yield WrappedText(Text(printable(self._question), WARN))
            yield WrappedText(Text("\n".join(printable(line) for line in self._hint.split("\n"))))


def ask_attach() -> Ask:
    """Ask where the profiler server is."""
    def problem(address: str) -> str | None:
        from gputop.profiler.workers import addresses

        try:
            addresses([address])
        except GputopError as error:
            return error.in_one_line
        return None

    hint = ("The address of a job's profiler server. To start one in the job:\n"
            "  tf.profiler.experimental.server.start(6009)\n"
            "  jax.profiler.start_server(6009)\n"
            "To start one in a running job:\n"
            "  gputop attach PID")
    return Ask("Attach to HOST:PORT", hint, placeholder="localhost:6009", check=problem)
