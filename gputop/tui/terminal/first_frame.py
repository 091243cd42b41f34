"""The first frame, which is on the screen while Textual is still being imported: how it reaches the terminal.

Textual takes a quarter of a second to import and to lay out. Until then the screen shows the lines that
:mod:`gputop.tui.monitor.first_paint` makes, in the same places and colors, and Textual takes over that screen.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence

from rich.style import Style

from gputop.core.signal_handlers import fatal_handlers, signal_handlers
from gputop.render.styled_text import StyledText
from gputop.tui.terminal.color_support import SYSTEMS, TerminalPalette

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)  # each ends gputop as q does, the terminal given back
ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l\x1b[H\x1b[2J", "\x1b[m\x1b[?25h\x1b[?1049l"


class FirstFrame:
    """State of the first frame: whether it is on the screen; what takes the screen over calls :meth:`taken`."""

    on_screen = False
    waiting = True  # for Textual, which from then on answers signals itself
    ended = False  # by a signal that came while Textual started

    def taken(self) -> bool:
        """True where there was a frame, and with it the terminal's other screen."""
        was, self.on_screen = self.on_screen, False
        return was

    def show(self, text: str) -> None:
        self.on_screen = True
        sys.stdout.write(text)
        sys.stdout.flush()

    def give_back(self) -> None:
        """Leave the terminal's other screen, unless Textual has taken it over."""
        if self.taken():
            sys.stdout.write(_LEAVE)
            sys.stdout.flush()


@contextlib.contextmanager
def ended_by_signals(frame: FirstFrame) -> Iterator[None]:
    """Make a signal that ends gputop raise SystemExit within the block, which is only noted once Textual has begun."""
    def ended(number: int, _: object) -> None:
        frame.ended = True
        if frame.waiting:
            raise SystemExit(128 + number)

    with signal_handlers({**fatal_handlers(frame.give_back), **dict.fromkeys(ENDING_SIGNALS, ended)}):
        yield


def ansi_text(lines: Sequence[Sequence[StyledText]], palette: TerminalPalette, enter: str = "") -> str:
    """Lines as text with color sequences on the theme's ground, the first one on its panel's."""
    ground, panel = palette.ground(), palette.ground("panel")
    # Erased with the ground's color, the terminal fills the screen with it.
    return (_sequence(ground, palette) + enter if enter else "") + "\r\n".join(
        _line(line, ground if y else panel, palette) for y, line in enumerate(lines))


def _line(line: Sequence[StyledText], ground: Style, palette: TerminalPalette) -> str:
    out = []
    for text, style in line:
        shown, meant = palette.run(text, style)
        out.append((ground + meant).render(shown, color_system=SYSTEMS[palette.colors]))
    fill = _sequence(ground, palette)
    return "".join(out) + (f"{fill}\x1b[K\x1b[m" if fill else "")


def _sequence(style: Style, palette: TerminalPalette) -> str:
    """Sequence that sets a style; nothing where it says nothing."""
    return style.render("x", color_system=SYSTEMS[palette.colors]).partition("x")[0]
