"""The ten-second test: at each size and number of GPUs the first look answers the four questions of a user.

Which GPUs are busy, since when, whose job is it, and what is to be done next (docs/contributing/screens.md).
"""

from __future__ import annotations

import re

import pytest

from tests.tui.found import piloted
from tests.tui.goldens import cells, text_of
from tests.tui.scenes import Change, Scene, with_only, with_sixteen

SIZES = ((80, 24), (100, 30), (120, 40), (160, 50), (200, 50), (240, 70))
CHANGES: dict[int, Change] = {1: with_only(1), 2: with_only(2), 4: with_only(4), 8: with_only(8), 16: with_sixteen}


def which_are_busy(text: str, gpus: int) -> bool:
    """Whether each GPU has a row with its activity; those that find no place are counted."""
    rows = {int(row[1]) for row in re.finditer(r"^[ ›] ?(\d{1,2}) .*?\d%", text, re.MULTILINE)}
    more = re.search(r"(\d+) more ↓", text)
    return len(rows) + (int(more[1]) if more else 0) == gpus and rows == set(range(len(rows)))


@pytest.mark.parametrize("gpus", CHANGES)
async def test_the_first_look_answers_the_four_questions(gpus: int) -> None:
    async with piloted(Scene("input-bound", CHANGES[gpus]), SIZES[0]) as (app, pilot):
        for size in SIZES:
            await pilot.resize_terminal(*size)
            await pilot.pause()
            text = text_of(cells(app))
            assert which_are_busy(text, gpus), f"which GPUs are busy:\n{text}"
            assert re.search(r"last \d+ (s|min|h)\b", text) and re.search(r"┊-\d+(s|m|h)", text), f"since when:\n{text}"
            job, processes = re.search(r"^ Job .*train\.py", text, re.MULTILINE), re.search(r"\bdemo ", text)
            assert job and processes, f"whose job:\n{text}"
            assert "What to do" in text and re.search(r"→ |Press |Nothing to advise|No problem", text), text
