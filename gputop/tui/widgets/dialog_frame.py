"""The parts of dialogs: a frame that fits its terminal, and text that is wrapped for its width."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from rich.cells import cell_len
from rich.text import Text
from textual.actions import SkipAction
from textual.app import RenderResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.geometry import Size
from textual.screen import ModalScreen
from textual.widget import Widget

from gputop.text.units import printable

_GAP = re.compile(r"(?:^|\S) {2,}(?=\S)")
Answer = TypeVar("Answer")
_ROOM = 16  # columns that the indented text needs at least


def wrap_hanging(text: Text, width: int) -> Text:
    """``text`` with lines longer than ``width`` wrapped at spaces, indented to the last column of their first line.

    A column begins after two or more spaces; one that leaves too little room beside it is ignored. Words that are
    longer than the room are broken.
    """
    out = Text()
    furthest = width - max(_ROOM, width // 3)
    for line in text.split("\n"):  # without a blank one at the end
        indent = max((gap.end() for gap in _GAP.finditer(line.plain) if gap.end() <= furthest), default=0)
        while (whole := _fitting(line.plain, width)) < len(line.plain):
            space = line.plain.rfind(" ", indent + 1, whole + 1)
            rest = len(line.plain) - len(line.plain[space:].lstrip()) if space > 0 else whole
            head, line = line.divide([rest])
            head.rstrip()
            if head.plain:
                out.append_text(head).append("\n")
            line = Text(" " * indent).append_text(line)
        out.append_text(line).append("\n")
    out.right_crop(1)
    return out


def _fitting(line: str, width: int) -> int:
    """Number of characters of the line that these columns hold; one at least."""
    if line.isascii():
        return max(1, width)
    used = 0
    for i, char in enumerate(line):
        used += cell_len(char)
        if used > width:
            return max(1, i)
    return len(line)


class WrappedText(Widget):
    """Text that is wrapped for the width of the widget, and again when that changes."""

    DEFAULT_CSS = "WrappedText { width: 1fr; height: auto; }"

    def __init__(self, make: Text | Callable[[int], Text], id: str | None = None, classes: str | None = None) -> None:
        """``make`` is the text, or makes it for a number of columns; longer lines are wrapped."""
        super().__init__(id=id, classes=classes)
        self._make = make
        self._columns = 0
        self.text = Text()  # as shown

    def _for(self, columns: int) -> Text:
        if columns != self._columns:
            made = self._make if isinstance(self._make, Text) else self._make(columns)
            self._columns, self.text = columns, wrap_hanging(made, columns)
        return self.text

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return self._for(width).plain.count("\n") + 1

    def render(self) -> RenderResult:
        return self._for(self.content_size.width)

    def update_text(self, make: Text | None = None) -> None:
        """Make the text again, or show this one."""
        self._make = self._make if make is None else make
        before, columns, self._columns = self.text, self._columns, 0
        if columns and self._for(columns) != before:
            self.refresh(layout=self.text.plain.count("\n") != before.plain.count("\n"))


class Dialog(ModalScreen[Answer]):
    """A dialog whose frame "#popup" has the focus; a key dismisses it with its answer."""

    def on_mount(self) -> None:
        self.query_one("#popup").focus()

    def action_answer(self, answer: Answer) -> None:
        self.dismiss(answer)


class DialogFrame(VerticalScroll):
    """A box that names keys on its border, as many as fit, and keeps its place when its text is rewrapped."""

    def __init__(self, title: str, *keys: str, id: str, can_focus: bool = True, has_data: bool = False) -> None:
        """``keys``: the last one, which closes the box, is always named, the others as far as they fit. ``has_data``:
        the box shows values, and says so if they are simulated."""
        super().__init__(id=id, can_focus=can_focus)
        self._has_data = has_data
        self.set_title(title)
        self.keys = keys

    def set_title(self, title: str) -> None:
        simulated = self._has_data and bool(getattr(self.app, "shows_simulated", False))
        self.border_title = Content(printable("SIMULATED · " * simulated + title))  # no markup

    def name_keys(self, *keys: str) -> None:
        self.keys = keys
        self.on_resize()

    def on_resize(self) -> None:
        *others, last = self.keys or ("",)
        shown: list[str] = []
        for key in others:
            # The corners, and a dash and a space at each end.
            if len("   ".join([*shown, key, last])) <= self.outer_size.width - 6:
                shown.append(key)
        self.border_subtitle = "   ".join([*shown, last])

    def action_scroll_up(self) -> None:
        self._scroll(self.scroll_up)

    def action_scroll_down(self) -> None:
        self._scroll(self.scroll_down)

    def _scroll(self, scroll: Callable[..., None]) -> None:
        """Scroll without animation, so that each of several keys that arrive together over a slow link scrolls."""
        if not self.allow_vertical_scroll:
            raise SkipAction  # the key is for the widgets around the box
        scroll(animate=False, immediate=True)

    def watch_virtual_size(self, before: Size, now: Size) -> None:
        if before.width and before.width != now.width:
            y = round(self.scroll_y * now.height / max(1, before.height))
            self.call_after_refresh(self.scroll_to, y=y, animate=False)
