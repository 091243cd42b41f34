"""The part of the app that knows the terminal: driver, theme, colors and glyphs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

from rich.segment import Segment
from textual import events
from textual.app import App
from textual.binding import Binding, BindingType
from textual.color import Color
from textual.filter import ANSIToTruecolor, LineFilter, Monochrome
from textual.notifications import SeverityLevel
from textual.screen import ModalScreen
from textual.theme import Theme

from gputop.render.palette import SCHEMES
from gputop.render.styled_text import wrap
from gputop.text.console import clean
from gputop.text.units import printable
from gputop.tui.terminal.color_support import DEFAULT_THEME, Preferences, TerminalPalette
from gputop.tui.terminal.driver import StallProofDriver
from gputop.tui.terminal.first_frame import FirstFrame
from gputop.tui.terminal.textual_private import FaultReportingApp, driver_of

_CLIPBOARD_CHARS = 100_000
NOTICE_S = 3.0  # time that a notice is shown
_NOTICE_LINES, _NOTICE_FRAME = 6, 6  # of each paragraph; columns of its border, padding and scrollbar


class PaletteFilter(LineFilter):
    """Translates each line into the colors and glyphs of a palette; Textual caches the result."""

    def __init__(self, palette: TerminalPalette) -> None:
        super().__init__()
        self._palette = palette

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        run = self._palette.run
        return [Segment(*run(text, style), control) for text, style, control in segments]


class TerminalApp(FaultReportingApp):
    """An app that never waits for its terminal, drawn with the colors and glyphs which that terminal has."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+l", "redraw", "redraw", show=False, tooltip="redraw the screen"),
    ]

    def __init__(self, preferences: Preferences | None = None, first_frame: FirstFrame | None = None) -> None:
        """``first_frame``: what may be on the screen already."""
        super().__init__(driver_class=StallProofDriver)
        self.preferences = preferences or Preferences()
        self.first_frame = first_frame
        if first_frame is not None:
            first_frame.waiting = False
        self._palette_filters: list[LineFilter] = []
        self._keeps_theme = False
        for scheme in SCHEMES:
            self.register_theme(theme_of(scheme))
        wanted = self.preferences.theme
        self.theme = wanted if wanted in self.available_themes else DEFAULT_THEME
        self._apply_theme(self.current_theme)

    def take_over(self) -> None:
        """Draw over the first frame, once the app's own is complete."""
        if isinstance(driver := driver_of(self), StallProofDriver):
            driver.take_over()

    def show_preference_warnings(self) -> None:
        """Show what is wrong with the preferences, once there is a screen; from then on a new theme is saved."""
        warnings = list(self.preferences.warnings)
        if self.theme != self.preferences.theme:
            warnings.append(f"There is no theme {printable(self.preferences.theme)}, so gputop uses {self.theme}. For "
                            "a list: ctrl+p, Theme.")
        if warnings:
            self.notify("\n".join(warnings), title="Settings", severity="warning")
        self._keeps_theme = True

    # -- notices ------------------------------------------------------------------------------

    def notify(self, message: str, *, title: str = "", severity: SeverityLevel = "information",
               timeout: float | None = None, markup: bool = False) -> None:
        """Show a notice for three seconds, in the place of any other; what it says is no markup."""
        # Wrapped here: Textual leaves out what it wraps where a line is nearly as long as the screen.
        width = max(8, self.size.width - _NOTICE_FRAME)
        lines = [line for part in message.split("\n") for line in wrap(part, width, _NOTICE_LINES)]
        super().notify("\n".join(lines), title=title, severity=severity, timeout=NOTICE_S, markup=False)

    def on_notify(self) -> None:
        self.clear_notifications()  # Textual adds the new one after this

    def clear_notifications(self) -> None:
        """Clear every notice. Textual would leave an empty line in the place of each."""
        super().clear_notifications()
        for screen in self.screen_stack:
            screen.query("ToastHolder").remove()

    async def on_event(self, event: events.Event) -> None:
        """Escape clears a notice, too, beside what it does on the screen: one press steps back in any case."""
        if isinstance(event, events.Key) and event.key == "escape":
            self.clear_notifications()
        await super().on_event(event)

    # -- theme, colors, glyphs -----------------------------------------------------------------

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return variables(scheme_of(self.current_theme))

    def get_line_filters(self) -> Sequence[LineFilter]:
        # For NO_COLOR Textual draws shades of gray, which are colors too. And gputop draws with none of the terminal's
        # own 16 colors, which ANSIToTruecolor translates; searching for them takes a tenth of the time of a frame.
        kept = (f for f in super().get_line_filters() if not isinstance(f, (Monochrome, ANSIToTruecolor)))
        return [*kept, *self._palette_filters]

    def push_screen(self, screen: Any, *arguments: Any, **more: Any) -> Any:
        if isinstance(screen, ModalScreen):
            screen.get_line_filters = self._modal_filters  # type: ignore[method-assign]
        return super().push_screen(screen, *arguments, **more)

    def _modal_filters(self) -> Sequence[LineFilter]:
        """The filters for what is behind a box: it is dimmed after its own filters, and must not regain colors."""
        return self._palette_filters if self.preferences.colors == "none" else []

    def _apply_theme(self, theme: Theme) -> None:
        palette = TerminalPalette(scheme_of(theme), self.preferences.colors, self.preferences.glyphs)
        self._palette_filters = [] if palette.plain else [PaletteFilter(palette)]

    def refresh_css(self, animate: bool = True) -> None:
        """Refresh the styles. Before there is a screen only the theme's colors are taken: what is parsed then would be
        parsed once more for the first widget."""
        if self.screen_stack:
            super().refresh_css(animate)
        else:
            self.stylesheet.set_variables(self.get_css_variables())

    def watch_theme(self, theme: str) -> None:
        self._apply_theme(self.current_theme)
        keep = self.preferences.keep_theme if self._keeps_theme else None
        problem = keep(theme) if keep is not None else ""
        if problem:
            self.notify(problem, severity="warning")

    # -- the link to the terminal --------------------------------------------------------------

    def ring(self, text: str) -> None:
        """Ring the terminal's bell, and hand it a text for its notifications (OSC 9). From any thread."""
        if isinstance(driver := driver_of(self), StallProofDriver):
            driver.write(bell(text))

    def copy_to_clipboard(self, text: str) -> None:
        """Hand a text to the terminal's clipboard, as it is shown: whoever wrote it, in a snapshot or a trace, has what
        is pasted type nothing. An escape code that ends a bracketed paste would, and so would a lone carriage return.
        """
        shown = clean(text.expandtabs(4).replace("\r\n", "\n"))
        super().copy_to_clipboard(shown[:_CLIPBOARD_CHARS])

    def action_redraw(self) -> None:
        """Draw everything again, after something else has written on the terminal."""
        if isinstance(driver := driver_of(self), StallProofDriver):
            driver.redraw()


_MAX_CHARS = 200


def bell(text: str) -> str:
    """OSC 9 with the text, for the terminals that know it, and the bell for all of them.

    tmux keeps OSC 9 to itself; with ``allow-passthrough`` it hands on what is wrapped so, and the bell always.
    """
    shown = f"\x1b]9;{printable(text)[:_MAX_CHARS]}\x07"
    if os.environ.get("TMUX"):
        shown = "\x1bPtmux;" + shown.replace("\x1b", "\x1b\x1b") + "\x1b\\"
    return f"{shown}\x07"


def theme_of(scheme: str) -> Theme:
    """One of gputop's own themes. With one of Textual's the style sheet has the colors of that theme, and all else
    those of gputop's dark or light scheme, whichever fits it."""
    names = SCHEMES[scheme].names
    return Theme(
        name=f"gputop-{scheme}", dark=scheme != "light", primary=names["accent"], secondary=names["h2d"],
        accent=names["accent"], warning=names["warn"], error=names["bad"], success=names["compute"],
        foreground=names["text"], background=names["ground"], surface=names["surface"], panel=names["panel"],
        variables={
            "border": names["accent"], "border-blurred": names["border"], "footer-background": names["panel"],
            "footer-key-foreground": names["accent"], "footer-description-foreground": names["text"],
            "scrollbar": names["border"], "scrollbar-hover": names["dim"], "scrollbar-active": names["accent"],
            "scrollbar-background": names["ground"], "scrollbar-corner-color": names["ground"],
            "scrollbar-background-hover": names["ground"], "scrollbar-background-active": names["ground"],
            "block-cursor-blurred-background": f"{names['accent']} 45%", "block-cursor-background": names["accent"],
            "block-cursor-foreground": names["ground"],
            **variables(scheme)})


def variables(scheme: str) -> dict[str, str]:
    """Colors that Textual's themes do not have."""
    names = SCHEMES[scheme].names
    return {"quiet-border": names["border"], "quiet-text": names["dim"]}


def scheme_of(theme: Theme) -> str:
    """Scheme of the palette that goes with a theme."""
    scheme = theme.name.removeprefix("gputop-")
    return scheme if scheme in SCHEMES else "dark" if theme.dark else "light"


def copy(app: App[Any], text: str, what: str) -> None:
    """Hand ``text`` to the terminal and say so; no terminal reports whether it took it."""
    app.copy_to_clipboard(text)
    lines = len(text.splitlines())
    size = f"{lines} line{'s' if lines != 1 else ''}"
    app.notify(f"{what} ({size}) was sent to the terminal's clipboard (OSC 52). {_must_allow()}", title="Copied")


def _must_allow() -> str:
    if os.environ.get("TMUX"):
        return "If nothing pastes, run tmux set -g set-clipboard on; the terminal must also allow it."
    if os.environ.get("STY"):
        return "GNU screen may not pass the text on."
    return "If nothing pastes, allow the clipboard in the terminal's settings."
