"""Wait for a session to get somewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable

from gputop.session.session import Session


class Watched:
    """Waits for a session to get somewhere, by its own events."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._changed = threading.Condition()
        session.listen(self._on_change)

    def _on_change(self, change: str) -> None:
        with self._changed:
            self._changed.notify_all()

    def until(self, done: Callable[[], object], timeout_s: float = 30.0) -> None:
        with self._changed:
            assert self._changed.wait_for(done, timeout_s), "the session did not get there"
