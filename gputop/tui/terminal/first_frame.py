"""The first frame, painted by hand while Textual is still being imported.

Textual takes a quarter of a second to import and to lay out; the driver answers within
milliseconds. So the first look at the GPUs is put on the screen at once, in the same places
and colours, and Textual takes over what is already there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

from rich.style import Style

from gputop.core.samples import NodeSample
from gputop.core.signal_handlers import signal_handlers
from gputop.render.palette import BLANK, BLANK_STYLE, DIM, PLAIN
from gputop.render.styled_text import StyledText
from gputop.telemetry.sampler import Sampler
from gputop.text.units import fit
from gputop.tui.monitor import status_lines
from gputop.tui.monitor.columns import ACTIVITY, Field, figures_of, has_axis, lines_per_gpu, plan, title_texts
from gputop.tui.terminal.color_support import SYSTEMS, Look

ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)  # each ends gputop as q does, the terminal given back
PATIENCE_S = 0.4  # how long to wait for the first sample before Textual may start without it
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l\x1b[H\x1b[2J", "\x1b[m\x1b[?25h\x1b[?1049l"


class FirstFrame:
    """Whether it is on the screen; who takes the screen over says :meth:`taken`."""

    on_screen = False
    waiting = True  # for Textual; then it is Textual's to end in good order
    ended = False  # by a signal that came while Textual started

    def taken(self) -> bool:
        """True where there was a frame, and with it the terminal's other screen."""
        was, self.on_screen = self.on_screen, False
        return was


@contextlib.contextmanager
def shown(sampler: Sampler, look: Look) -> Iterator[FirstFrame]:
    """Start the sampler and paint its first look at the GPUs, if it comes in time and the terminal has room.

    At the end the sampler is stopped, and the screen given back where an error or a signal came
    before Textual had taken it over. Raises the sampler's failure, should the source not open in that time.
    """
    frame = FirstFrame()

    def ended(number: int, _: object) -> None:
        frame.ended = True
        if frame.waiting:
            raise SystemExit(128 + number)

    with signal_handlers(dict.fromkeys(ENDING, ended)):
        try:
            _show(sampler, look, frame)
            yield frame
        finally:
            if frame.taken():
                sys.stdout.write(_LEAVE)
                sys.stdout.flush()
            sampler.stop()


def _show(sampler: Sampler, look: Look, frame: FirstFrame) -> None:
    sampler.start()
    sampler.first_gpus_ready.wait(PATIENCE_S)
    if sampler.failure is not None:
        raise sampler.failure
    sample = sampler.first_gpus
    size = os.get_terminal_size(sys.stdout.fileno())
    if sample is None or size.columns < 20 or size.lines < 5:
        return
    frame.on_screen = True
    sys.stdout.write(paint(sample, sampler.interval_s, size.columns, size.lines, look, _ENTER))
    sys.stdout.flush()


def paint(sample: NodeSample, interval_s: float, width: int, height: int, look: Look, enter: str = "") -> str:
    """Header and GPUs as text with colour sequences, at most ``height`` lines, on the theme's ground."""
    fields = plan(width)
    per_gpu = lines_per_gpu(height, len(sample.gpus))
    title = "".join(title_texts(fields, "SM active"))
    lines: list[list[StyledText]] = [status_lines.header(sample, interval_s, False, width), [(title, DIM)]]
    lines += [[]] if has_axis(height) else []
    for gpu in sample.gpus:
        figures = figures_of(gpu, ACTIVITY)
        lines += [[] for _ in range(per_gpu - 1)]
        lines.insert(len(lines) - (per_gpu - 1), _gpu_line(fields, figures, width))
    ground, panel = look.ground(), look.ground("panel")
    # Erased with the ground's colour, the terminal fills the screen with it.
    return (_sequence(ground, look) + enter if enter else "") + "\r\n".join(
        _line(line, ground if y else panel, look) for y, line in enumerate(lines[:height]))


def _line(line: list[StyledText], ground: Style, look: Look) -> str:
    out = []
    for text, style in line:
        shown, meant = look.run(text, style)
        out.append((ground + meant).render(shown, color_system=SYSTEMS[look.colors]))
    fill = _sequence(ground, look)
    return "".join(out) + (f"{fill}\x1b[K\x1b[m" if fill else "")


def _sequence(style: Style, look: Look) -> str:
    """What sets a style; nothing where it says nothing."""
    return style.render("x", color_system=SYSTEMS[look.colors]).partition("x")[0]


def _gpu_line(fields: list[Field], figures: dict[str, StyledText], width: int) -> list[StyledText]:
    out: list[StyledText] = []
    x = 0
    message = figures.get("message")
    for field in fields:
        if field.x > x:
            out.append((" " * (field.x - x), PLAIN))
        if field.key == "main" or field.key.endswith("_lane"):
            out.append((BLANK * field.width, BLANK_STYLE))
        elif message and field.key != "gpu":
            return [*out, (fit(" " + message[0], width - field.x), message[1])]
        else:
            text, style = figures.get(field.key, ("", PLAIN))
            out.append((fit(text, field.width, right=field.key not in ("gpu", "flag", "flags")), style))
        x = field.x + field.width
    return out
