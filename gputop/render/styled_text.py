"""Lines as sequences of styled text, before any widget: justified, cropped and wrapped."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from functools import lru_cache

from rich.style import Style

from gputop.text.units import fit

StyledText = tuple[str, Style]  # a text in one style, free of control characters


def justify(left: Sequence[StyledText], right: Sequence[StyledText], width: int) -> list[StyledText]:
    """``left`` and ``right`` at the two ends of a line. Where both do not fit, ``left`` is cut."""
    right_cells = sum(len(text) for text, _ in right)
    room = max(0, width - right_cells - (1 if right else 0))
    out: list[StyledText] = []
    for text, style in left:
        if room <= 0:
            break
        shown = text if len(text) <= room else fit(text, room)
        out.append((shown, style))
        room -= len(shown)
    if right and right_cells <= width:
        out.append((" " * (room + 1), Style()))
        out.extend(right)
    return out


def crop(runs: Sequence[StyledText], x: int, width: int) -> list[StyledText]:
    """The cells of a line from ``x`` on, ``width`` at most; each character is one cell wide."""
    out: list[StyledText] = []
    for text, style in runs:
        shown = text[max(0, x):max(0, x + width)]
        if shown:
            out.append((shown, style))
        x -= len(text)
    return out


def wrap(text: str, width: int, lines: int) -> list[str]:
    """``text`` broken at spaces into at most ``lines`` lines; an ellipsis stands for what is left out."""
    return list(_wrapped(text, width, lines))


@lru_cache(256)  # panels wrap the same few texts at each sample
def _wrapped(text: str, width: int, lines: int) -> tuple[str, ...]:
    if width <= 4:
        return (fit(text, width),)[:lines]

    return tuple(textwrap.wrap(text, width, max_lines=max(1, lines), placeholder=" …", break_on_hyphens=False)) or ("",)


def wrap_sentences(text: str, width: int, lines: int) -> list[str]:
    """Wrap as :func:`wrap` does, but what does not fit is left out by whole sentences where the first one fits."""
    whole = wrap(text, width, lines)
    if lines < 1 or not whole[-1].endswith("…"):
        return whole
    parts = (wrap(text[:end] + " …", width, lines) for end in _ends(text))
    return next((part for part in parts if part[-1].endswith(". …")), whole)


def whole_sentences(text: str, width: int, lines: int) -> list[str]:
    """Sentences of ``text`` that ``lines`` lines hold, and the first one whatever it takes: for what has to be read to
    its end."""
    shown = [wrap(text[:end], width, len(text)) for end in (len(text), *_ends(text)) if end]
    return next((part for part in shown if len(part) <= lines), shown[-1] if shown else [])


def _ends(text: str) -> list[int]:
    """Ends of its sentences but the last one, the last end first."""
    return [match.end() for match in re.finditer(r"[.!?](?= [A-Z→])", text)][::-1]
