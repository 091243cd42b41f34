"""The help for the current screen: its keys, and how to read it; and the palette of commands."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from rich.text import Text
from textual.command import DiscoveryHit, Hit, Hits
from textual.screen import Screen
from textual.system_commands import SystemCommandsProvider

from gputop.render.palette import ACCENT, BOLD, DIM, PLAIN
from gputop.render.styled_text import wrap
from gputop.tui.keys import key_groups
from gputop.tui.screens.dialogs import Popup

_KEY_COLUMNS = 9  # "shift+tab", "q  ctrl+c"
_GUTTER, _TWO_COLUMNS_FROM = 2, 70

HOW_TO_SERVE = """\
Press c to capture from a running TensorFlow, JAX or PyTorch job. gputop asks the first time.
  by PID       gputop capture PID
  from start   gputop run -- python train.py …
  TensorFlow   tf.profiler.experimental.server.start(6009) in the script
  JAX          jax.profiler.start_server(6009) in the script
"""

READING = (
    "Each row is a GPU, and each column is a slice of time, with the newest on the right. Height and color show the "
    "level; ø is the mean of the row. If a row has several lines, brightness shows the share of samples that reach a "
    "level. A GPU that is fully busy half of the time is dim up to the top; a GPU that is always half busy is bright "
    "up to the middle. A dot means that nothing was measured. ~ marks coarse utilization (any kernel ran), which "
    "gputop shows if it cannot read SM activity.\nThe line above the lanes marks events: a letter shows where an event "
    "began, and a line how long it lasted. The letters are explained next to it. With the cursor (press v or click on "
    "a lane), values are means over the slice under the cursor, and the text describes what happened in that slice.\n"
    "The period on the job line is an estimate of the step period from the load alone. Samples show steps of 2.5 "
    "intervals and longer. Shorter steps can look like longer ones: press + and check whether the period stays the "
    "same.\n"
)


def help_box(screen: Screen[Any], more: str) -> Popup:
    """The keys of ``screen`` in groups, in two columns where there is room; then ``more``."""
    groups = list(key_groups(screen))

    def text(width: int) -> Text:
        half = (width - _GUTTER) // 2 if width >= _TWO_COLUMNS_FROM else width
        blocks = [_block(title if len(groups) > 1 else "", lines, half) for title, lines in groups]
        out = Text("\n").join(_side_by_side(blocks, half) if half < width else [line for b in blocks for line in b])
        if more:
            out.append("\n\n" + more, DIM)
        return out

    return Popup("Help", text, has_data=False)


def _block(title: str, lines: list[tuple[str, str]], width: int) -> list[Text]:
    """A group as lines of that width."""
    out = [Text().append(title, BOLD)] if title else []  # of this style is the title, not what is put beside it
    keys_width = max(min(_KEY_COLUMNS, len(keys)) for keys, _ in lines)
    for keys, sentence in lines:
        names = wrap(keys, keys_width, 9)
        for left, right in zip_longest(names, wrap(sentence, max(16, width - keys_width - 3), 9), fillvalue=""):
            out.append(Text().append(f" {left:>{keys_width}}  ", ACCENT).append(right, PLAIN))
    return out


def _side_by_side(blocks: list[list[Text]], width: int) -> list[Text]:
    """The blocks in two columns of about the same height, in their order."""
    heights = [len(block) + 1 for block in blocks]
    split = min(range(1, len(blocks) + 1), key=lambda n: max(sum(heights[:n]), sum(heights[n:])))
    columns = [[line for block in part for line in (*block, Text())] for part in (blocks[:split], blocks[split:])]
    out = []
    for left, right in zip_longest(*columns, fillvalue=Text()):
        line = left.copy()
        if right.plain:
            line.pad_right(max(0, width + _GUTTER - line.cell_len))
            line.append_text(right)
        out.append(line)
    while out and not out[-1].plain:
        out.pop()
    return out


_SENTENCE_SCORE = 0.1  # score of a word in the sentence, below any match of the title


class Commands(SystemCommandsProvider):
    """Commands in their own order; Textual's sorts by the alphabet and searches titles alone."""

    async def discover(self) -> Hits:
        for title, sentence, run, discover in self.app.get_system_commands(self.screen):
            if discover:
                yield DiscoveryHit(title, run, help=sentence)

    async def search(self, query: str) -> Hits:
        matcher, words = self.matcher(query), query.casefold().split()
        for title, sentence, run, _ in self.app.get_system_commands(self.screen):
            score = matcher.match(title)
            if score <= 0 and all(word in sentence.casefold() for word in words):
                score = _SENTENCE_SCORE
            if score > 0:
                yield Hit(score, matcher.highlight(title), run, help=sentence)
