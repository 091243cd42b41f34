"""The monitor's first frame, painted without Textual: the header and the GPUs within milliseconds of the start.

No module that is slow to import may be imported here (a test holds it).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from gputop.core.samples import NodeSample
from gputop.render.palette import BLANK_STYLE, DIM, PLAIN
from gputop.render.styled_text import StyledText
from gputop.telemetry.sampler import Sampler
from gputop.text.units import BLANK, fit
from gputop.tui.monitor import columns, status_lines
from gputop.tui.monitor.layout import layout
from gputop.tui.terminal.color_support import TerminalPalette
from gputop.tui.terminal.first_frame import ENTER, FirstFrame, ansi_text, ended_by_signals

FIRST_SAMPLE_TIMEOUT_S = 0.4  # after which Textual starts without a first frame


@contextlib.contextmanager
def shown(sampler: Sampler, palette: TerminalPalette) -> Iterator[FirstFrame]:
    """Paint the first GPUs of a sampler that was started, if they come in time and the terminal has room.

    At the end the sampler is stopped, and the screen given back where an error or a signal came
    before Textual had taken it over. Raises the sampler's failure, should the source not open in that time.
    """
    frame = FirstFrame()
    with ended_by_signals(frame):
        try:
            _show(sampler, palette, frame)
            yield frame
        finally:
            frame.give_back()
            sampler.stop()


def _show(sampler: Sampler, palette: TerminalPalette, frame: FirstFrame) -> None:
    sampler.first_gpus_ready.wait(FIRST_SAMPLE_TIMEOUT_S)
    if sampler.failure is not None:
        raise sampler.failure
    sample = sampler.first_gpus
    size = os.get_terminal_size(sys.stdout.fileno())
    if sample is not None and size.columns >= 20 and size.lines >= 5:
        frame.show(paint(sample, sampler.interval_s, size.columns, size.lines, palette, ENTER))


def paint(sample: NodeSample, interval_s: float, width: int, height: int, palette: TerminalPalette,
          enter: str = "") -> str:
    """Header and GPUs as text with color sequences, at most ``height`` lines; ``enter`` is written before them."""
    return ansi_text(_lines(sample, interval_s, width, height)[:height], palette, enter)


def _lines(sample: NodeSample, interval_s: float, width: int, height: int) -> list[list[StyledText]]:
    pids = {process.pid for gpu in sample.gpus for process in gpu.processes}
    fitted = layout(width, height, len(sample.gpus), len(pids), columns.unread_lanes(sample.gpus))
    stacked = fitted.rows.is_stacked
    fields = columns.fields_of(width) if stacked else columns.plan(width)
    title = "".join(columns.title_texts(fields, "SM active"))
    lines: list[list[StyledText]] = [status_lines.header(sample, interval_s, False, width), [(title, DIM)]]
    lines += [[]] if fitted.rows.has_axis else []
    shown = {field.key: field for field in fields}
    for gpu in sample.gpus[:len(sample.gpus) - fitted.hidden_gpus]:
        if not stacked:
            lines.append(_gpu_line(fields, columns.figures_of(gpu, columns.ACTIVITY, shown), width))
            lines += [[]] * (fitted.rows.per_gpu - 1)
            continue
        places = [lane for lane, _ in fitted.rows.lanes]
        figures = columns.figures_of_gpu(gpu, columns.ACTIVITY, places, shown)
        for lane, height_of_lane in fitted.rows.lanes:
            name = columns.name_of(lane, columns.ACTIVITY, gpu)
            lines.append(_gpu_line(fields, {**figures.get((lane, 0), {}), "name": (name, DIM)}, width))
            lines += [[]] * (height_of_lane - 1)
    return lines


def _gpu_line(fields: list[columns.Field], figures: dict[str, StyledText], width: int) -> list[StyledText]:
    out: list[StyledText] = []
    x = 0
    message = figures.get("message")
    for field in fields:
        if field.x > x:
            out.append((" " * (field.x - x), PLAIN))
        if field.is_lane:
            out.append((BLANK * field.width, BLANK_STYLE))
        elif message and field.draw != "label":
            return [*out, (fit(" " + message[0], width - field.x), message[1])]
        else:
            text, style = figures.get(field.key, ("", PLAIN))
            out.append((fit(text, field.width, right=field.draw == "figure"), style))
        x = field.x + field.width
    return out
