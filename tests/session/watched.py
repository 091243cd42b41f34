"""Wait for a session to get somewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable

from gputop.profiler.capture.records import CaptureStatus
from gputop.session.session import Session
from tests.waiting import PATIENCE_S


class Watched:
    """Waits for a session to get somewhere, by its own events."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._changed = threading.Condition()
        session.listen(self._on_change)

    def _on_change(self, change: str) -> None:
        with self._changed:
            self._changed.notify_all()

    def captured(self) -> CaptureStatus:
        """The status of the capture that runs, once it is over."""
        control = self.session.control
        self.until(lambda: control.status is not None and not control.status.running)
        return control.status

    def until(self, done: Callable[[], object]) -> None:
        with self._changed:
            assert self._changed.wait_for(done, PATIENCE_S), "the session did not get there"
