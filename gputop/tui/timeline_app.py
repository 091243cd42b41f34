"""The timeline of trace files that were named on the command line, without the monitor."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gputop.core.errors import EXIT_OK
from gputop.tui.terminal.terminal_app import TerminalApp
from gputop.tui.timeline.timeline_screen import TimelineScreen
from gputop.tui.timeline.trace_file import TraceFile

if TYPE_CHECKING:
    from gputop.tui.terminal.color_support import Preferences


class TimelineApp(TerminalApp):
    """Nothing but the timeline of some trace files."""

    TITLE = "gputop"
    CSS_PATH = "gputop.tcss"

    def __init__(self, trace: TraceFile, preferences: Preferences | None = None) -> None:
        super().__init__(preferences)
        self._trace = trace

    @property
    def shows_simulated(self) -> bool:
        return self._trace.timeline is not None and self._trace.timeline.simulated

    def on_mount(self) -> None:
        self.push_screen(TimelineScreen(self._trace), lambda _: self.exit(EXIT_OK))
        self.call_after_refresh(gc.freeze)  # as the monitor does: what is there by now stays


def show(paths: Sequence[str], preferences: Preferences | None = None) -> int:
    """Show the timeline of these files until the user has seen enough; returns the exit status."""
    trace = TraceFile(tuple(paths), ", ".join(Path(p).name or p for p in paths))
    status = TimelineApp(trace, preferences).run()
    return EXIT_OK if status is None else status
