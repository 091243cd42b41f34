"""The help for the current screen: its keys, and how to read it."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from rich.text import Text
from textual.screen import Screen

from gputop.render.palette import ACCENT, BOLD, DIM
from gputop.render.styled_text import wrap
from gputop.tui.keys import key_groups
from gputop.tui.screens.dialogs import Popup

_KEY_COLUMNS = 9  # "shift+tab", "q  ctrl+c"

HOW_TO_SERVE = """\
To let gputop capture, the job starts a profiler server; it costs nothing until it is used.
  TensorFlow   tf.profiler.experimental.server.start(6009)
  JAX          jax.profiler.start_server(6009)
  no change    gputop run -- python train.py …
  running      gputop attach PID
"""

READING = (
    "Each row is a GPU, each column a slice of time, newest at the right; height and color are the level, "
    "ø is the mean of what is shown. On several lines, brightness is the share of samples that reach a level: "
    "a GPU busy half of the time is dim to the top, a half busy one bright to the middle. A dot: nothing was "
    "measured. ~ marks coarse utilization (any kernel ran), where SM activity cannot be read.\n"
    "The line above the lanes marks what happened: a letter where it began, a line while it lasted, and beside it "
    "what the letters mean. With the cursor (v, or a click on a lane) the figures are means of the slice under it, and "
    "the words say what happened in it.\n"
    "The period on the job line is an estimate of the step period from the load alone. Samples show steps of 2.5 "
    "intervals and longer; shorter ones can look like longer ones, so see whether it stays when you press +.\n"
)


def help_box(screen: Screen[Any], more: str) -> Popup:
    """The keys of ``screen``: of the monitor, of the focused panel and of the others; then ``more``."""
    groups = list(key_groups(screen))

    def text(width: int) -> Text:
        out = Text()
        for title, lines in groups:
            if len(groups) > 1:
                out.append(f"{title}\n", BOLD)
            for keys, binding in lines:
                names = wrap("  ".join(sorted(keys, key=len)), _KEY_COLUMNS, 9)
                sentences = wrap(binding.tooltip, max(20, width - _KEY_COLUMNS - 2), 9)
                for left, right in zip_longest(names, sentences, fillvalue=""):
                    out.append(f"{left:>{_KEY_COLUMNS}}  ", ACCENT)
                    out.append(right + "\n")
        if more:
            out.append("\n" + more, DIM)
        return out

    return Popup("Help", text)
