"""Screens as text files: what a terminal would show, and in which colors.

``golden/<screen>/<width>x<height>.txt`` (80x24, 120x40, and of the main screen 200x50) is the screen, a line a line,
without the blanks at its right. A form of colors and glyphs whose letters differ has its own file,
``<width>x<height>-<form>.txt``; the others show the same letters, which is checked too.
``<width>x<height>-<form>.colors`` is what SVG files would hold at a tenth of their
size: a list of styles, a letter each ("a #d7dae0 on #14161a bold"), and below it the screen with the letter of its
style in the place of each cell.

After a change that is meant, renew them with

    pytest tests/tui --snapshot-update

which renews the SVG files of the other tests, too, and look at what ``git diff`` says. In color a terminal
shows them by ``python -m tests.tui.goldens tests/tui/golden/main/80x24-16.colors``.
"""

from __future__ import annotations

import difflib
import itertools
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from rich.cells import get_character_cell_size
from rich.color import Color
from rich.style import Style
from textual.app import App
from textual.pilot import Pilot

from gputop.tui.app import GputopApp
from gputop.tui.terminal.color_support import Preferences
from tests.tui.textual_private import screen_strips

FOLDER = Path(__file__).parent / "golden"
FORMS = {
    "256": Preferences(colors="256"), "16": Preferences(colors="16"), "none": Preferences(colors="none"),
    "console": Preferences(colors="16", glyphs="console"), "ascii": Preferences(colors="none", glyphs="ascii"),
    "light": Preferences(theme="gputop-light"), "contrast": Preferences(theme="gputop-contrast"),
    "light-16": Preferences("gputop-light", "16"),
}
_SHOWN = 25  # differing lines that a failure tells
# Letters one cell wide, for as many styles as a screen of the most colors has.
_LETTERS = [c for c in map(chr, itertools.chain(range(48, 123), range(0xC0, 0x530))) if c.isalnum() and c.isprintable()]
Cell = tuple[str, str]  # what stands in it, its style in words


def cells(app: App[object]) -> list[list[Cell]]:
    """What the terminal is sent for the whole screen."""
    grid: list[list[Cell]] = []
    for strip in screen_strips(app):
        grid.append([])
        for segment in strip:
            inked, blank = _words(segment.style, True), _words(segment.style, False)
            if segment.text.isascii():
                grid[-1] += [(char, blank if char == " " else inked) for char in segment.text]
                continue
            for char in segment.text:
                beside = get_character_cell_size(char) - 1
                grid[-1] += [(char, blank if char == " " else inked), *[("", inked)] * beside]
    return grid


@lru_cache(maxsize=4096)
def _words(style: Style | None, inked: bool) -> str:
    """A style as text; of a blank only what can be seen of it."""
    if style is None:
        return "default"
    attributes = [name for name in ("bold", "dim", "italic", "underline", "strike", "reverse")
                  if getattr(style, name) and (inked or name in ("underline", "strike", "reverse"))]
    color = f"{_name(style.color)} " if inked or "reverse" in attributes else ""
    return " ".join([f"{color}on {_name(style.bgcolor)}", *attributes])


def _name(color: Color | None) -> str:
    if color is None or color.is_default:
        return "default"
    return color.triplet.hex if color.triplet is not None else str(color.number)


def text_of(grid: Sequence[Sequence[Cell]]) -> str:
    return "".join("".join(char for char, _ in line).rstrip() + "\n" for line in grid)


def colors_of(grid: Sequence[Sequence[Cell]]) -> str:
    """Styles in the order in which they come, and the screen in their letters."""
    letters: dict[str, str] = {}
    lines = ["".join(letters.setdefault(style, _LETTERS[len(letters)]) for _, style in line) for line in grid]
    return "".join(f"{letter} {style}\n" for style, letter in letters.items()) + "\n" + "\n".join(lines) + "\n"


def styles_in(colors: str) -> list[list[str]]:
    """A file of colors back as the style of each cell."""
    legend, _, picture = colors.partition("\n\n")
    styles = {line[0]: line[2:] for line in legend.splitlines()}
    return [[styles[letter] for letter in line] for line in picture.splitlines()]


async def wear(app: GputopApp, pilot: Pilot[int], preferences: Preferences) -> None:
    """Show the same in another form, as if the app had been started in it; that it starts so: test_themes."""
    app.preferences = preferences
    app.theme = preferences.theme
    app._apply_theme(app.current_theme)
    for screen in app.screen_stack:
        for widget in screen.walk_children(with_self=True):
            widget.refresh()
    await pilot.pause()


# -- comparing ---------------------------------------------------------------------------------


class Goldens:
    """The files of one screen, compared with what it shows now or, where that is asked for, written."""

    def __init__(self, name: str, update: bool) -> None:
        self.folder, self._update = FOLDER / name, update
        self.names: set[str] = set()  # the files this screen has
        self.problems: list[str] = []

    def check(self, grid: Sequence[Sequence[Cell]], form: str = "", colors: bool = False) -> None:
        """``form`` is "" for the one whose letters the others are compared with, which is to be checked first."""
        size = f"{len(grid[0])}x{len(grid)}"
        text, base = text_of(grid), self.folder / f"{size}.txt"
        own = f"{size}-{form}.txt" if form else f"{size}.txt"
        if not form or text != base.read_text():
            self._hold(own, text, _text_differs)
        if colors:
            self._hold(f"{size}-{form or 'dark'}.colors", colors_of(grid),
                       lambda a, b: _colors_differ(a, b, text.splitlines()))

    def _hold(self, name: str, now: str, differs: object) -> None:
        self.names.add(name)
        file = self.folder / name
        if self._update:
            self.folder.mkdir(parents=True, exist_ok=True)
            file.write_text(now)
        elif not file.exists():
            self.problems.append(f"{self._called(name)} is not there: it is a new screen, or shows other letters now")
        elif (before := file.read_text()) != now:
            self.problems.append("\n".join([self._called(name), *differs(before, now)]))  # type: ignore[operator]

    def done(self) -> list[str]:
        """All that differs; files that this screen did not ask for are a difference, too."""
        for file in sorted(self.folder.iterdir()):
            if file.name not in self.names:
                if self._update:
                    file.unlink()
                else:
                    self.problems.append(f"{self._called(file.name)} is there and nothing shows it any more")
        return self.problems

    def _called(self, name: str) -> str:
        return f"golden/{self.folder.name}/{name}"


def _text_differs(before: str, now: str) -> Iterator[str]:
    lines = difflib.unified_diff(before.splitlines(), now.splitlines(), "golden", "now", n=1, lineterm="")
    yield from itertools.islice(lines, 2 * _SHOWN)


def _colors_differ(before: str, now: str, text: Sequence[str]) -> Iterator[str]:
    was, shown = styles_in(before), 0
    for y, (old, new) in enumerate(itertools.zip_longest(was, styles_in(now), fillvalue=[])):
        x = 0
        for (a, b), run in itertools.groupby(itertools.zip_longest(old, new, fillvalue="nothing")):
            length = len(list(run))
            if a != b and shown < _SHOWN:
                shown += 1
                what = text[y][x:x + length] if y < len(text) else ""
                yield f"  line {y + 1}, cells {x + 1}-{x + length} “{what}”: was {a}, is {b}"
            x += length


def show(file: Path) -> None:
    """Print a file of colors as the screen it stands for."""
    from rich.console import Console
    from rich.text import Text

    size, _, form = file.stem.partition("-")
    own = file.with_name(f"{size}-{form}.txt")
    text = (own if own.exists() else file.with_name(f"{size}.txt")).read_text().splitlines()
    for line, styles in zip(text, styles_in(file.read_text()), strict=True):
        shown = Text(line.ljust(len(styles)), no_wrap=True)
        for x, style in enumerate(styles):
            words = [f"color({word})" if word.isdigit() else word for word in style.split()]
            shown.stylize(" ".join(words), x, x + 1)
        Console(width=len(styles) + 1, color_system="truecolor", force_terminal=True).print(shown, soft_wrap=True)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        show(Path(argument))
