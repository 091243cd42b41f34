"""The first frame, painted by hand while Textual is still being imported.

Textual takes a quarter of a second to import and to lay out; the driver answers within
milliseconds. So the first sample is put on the screen at once, in the same places and
colours, and Textual takes over what is already there.
"""

from __future__ import annotations

import os
import sys
import threading

from rich.color import ColorSystem

from gputop.samples import NodeSample
from gputop.session import Session
from gputop.text import fit
from gputop.tui import rows
from gputop.tui.columns import ACTIVITY, Field, figures_of, lines_per_gpu, plan, title_texts
from gputop.tui.palette import BLANK, BLANK_STYLE, DIM, PLAIN
from gputop.tui.runs import Run

PATIENCE_S = 0.4  # how long to wait for the first sample before Textual may start without it
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l\x1b[H\x1b[2J", "\x1b[?25h\x1b[?1049l"


def show(session: Session) -> bool:
    """Start the session and paint its first sample; False where the screen was left alone.

    Raises the session's failure, should the source not open in that time.
    """
    there = threading.Event()
    session.listen(lambda change: there.set() if change in ("sample", "failed") else None)
    session.start()
    there.wait(PATIENCE_S)
    if session.failure is not None:
        raise session.failure
    sample = session.sample
    if sample is None or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return False
    size = os.get_terminal_size(sys.stdout.fileno())
    if size.columns < 20 or size.lines < 5:
        return False
    sys.stdout.write(_ENTER + paint(sample, session.interval_s, size.columns, size.lines, color_system()))
    sys.stdout.flush()
    return True


def leave() -> None:
    """Give the screen back, should Textual not have come to do so."""
    sys.stdout.write(_LEAVE)
    sys.stdout.flush()


def color_system() -> ColorSystem | None:
    """What the terminal says it can show; None without colour."""
    if os.environ.get("NO_COLOR"):
        return None
    if os.environ.get("COLORTERM", "").lower() in ("truecolor", "24bit"):
        return ColorSystem.TRUECOLOR
    return ColorSystem.EIGHT_BIT if "256" in os.environ.get("TERM", "") else ColorSystem.STANDARD


def paint(sample: NodeSample, interval_s: float, width: int, height: int, colors: ColorSystem | None) -> str:
    """Header, GPUs and host as text with colour sequences, at most ``height`` lines."""
    fields = plan(width)
    per_gpu = lines_per_gpu(height, len(sample.gpus))
    title = "".join(title_texts(fields, "SM active"))
    lines: list[list[Run]] = [rows.header(sample, interval_s, False, width), [(title, DIM)]]
    for gpu in sample.gpus:
        figures = figures_of(gpu, ACTIVITY)
        lines += [[] for _ in range(per_gpu - 1)]
        lines.insert(len(lines) - (per_gpu - 1), _gpu_line(fields, figures, width))
    lines.append(rows.host(sample, width))
    return "\r\n".join("".join(style.render(text, color_system=colors) for text, style in line)
                       for line in lines[:height])


def _gpu_line(fields: list[Field], figures: dict[str, Run], width: int) -> list[Run]:
    out: list[Run] = []
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
