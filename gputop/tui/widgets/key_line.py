"""The line at the bottom that names the keys of the moment; a click on one is as good as pressing it."""

from __future__ import annotations

from collections.abc import Sequence

from textual import events

from gputop.render.palette import ACCENT, PLAIN
from gputop.render.styled_text import StyledText
from gputop.tui.keys import name
from gputop.tui.widgets.cached_lines import LinesWidget

_KEPT = 2  # the last ones are named in any width


class KeyLine(LinesWidget):
    """Line of as many keys as fit; the last two always."""

    def __init__(self) -> None:
        super().__init__(id="keys")
        self._places: list[tuple[int, str]] = []  # the column behind each key, and the key
        self._made_of: tuple[object, ...] = ()

    def show_keys(self, keys: Sequence[tuple[str, str]], width: int) -> None:
        """``keys`` as "left,right" with what they do."""
        if (made_of := (*keys, width)) == self._made_of:
            return
        self._made_of = made_of
        texts = [(" ".join(map(name, each.split(","))), label) for each, label in keys]
        room = width - sum(_cells(one) for one in texts[-_KEPT:]) - 1
        shown = []
        for i, one in enumerate(texts):
            room -= _cells(one) if i < len(texts) - _KEPT else 0
            if room >= 0 or i >= len(texts) - _KEPT:
                shown.append(i)
        line: list[StyledText] = [(" ", PLAIN)]
        used, self._places = 1, []
        for i in shown:
            line += [(texts[i][0], ACCENT), (f" {texts[i][1]}  ", PLAIN)]
            used += _cells(texts[i])
            self._places.append((used, keys[i][0].split(",")[0]))
        self.show([line])

    def on_click(self, event: events.Click) -> None:
        key = next((key for end, key in self._places if event.x < end), None)
        if key is not None:
            self.app.simulate_key(key)


def _cells(one: tuple[str, str]) -> int:
    return len(one[0]) + len(one[1]) + 3
