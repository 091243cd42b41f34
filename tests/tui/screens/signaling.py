"""A session whose processes can be sent signals."""

from __future__ import annotations

import signal
from typing import Any

from gputop.core.errors import GputopError
from gputop.core.samples import ProcessSample
from gputop.tui.app import GputopApp
from gputop.tui.monitor.process_panel import ProcessPanel
from gputop.tui.screens.process_screens import SignalList, SignalScreen
from tests.fakes import StillSession


class SignalingSession(StillSession):
    """Remembers signals instead of sending them, or refuses."""

    def __init__(self, refuse: GputopError | None = None) -> None:
        super().__init__()
        self.sent: list[tuple[int, signal.Signals]] = []
        self._refuse = refuse

    def signal(self, process: ProcessSample, number: signal.Signals) -> None:
        if self._refuse is not None:
            raise self._refuse
        self.sent.append((process.pid, number))


async def open_signals(app: GputopApp, pilot: Any) -> SignalList:
    await pilot.pause()
    app.query_one(ProcessPanel).focus()
    await pilot.press("K")
    assert isinstance(app.screen, SignalScreen)
    return app.screen.query_one(SignalList)
