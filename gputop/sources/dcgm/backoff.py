"""Pauses between the tries to connect to a host engine that went away, or is not there."""

from __future__ import annotations

import math

FIRST_RETRY_S = 1.0
MAX_RETRY_S = 60.0
STABLE_CONNECTION_S = 10.0  # a connection of this age resets the back-off


class Backoff:
    """A second after the first failure, then twice as long each time. All times are monotonic."""

    def __init__(self) -> None:
        self._retry_s = FIRST_RETRY_S
        self._due_s = -math.inf
        self._connected_s = 0.0

    def due(self, now_s: float) -> bool:
        """Return whether it is time to try to connect."""
        return now_s >= self._due_s

    def connected(self, now_s: float) -> None:
        self._connected_s = now_s

    def answered(self, now_s: float) -> None:
        """Note an answer over the connection: one that holds forgets the failures before it."""
        if now_s - self._connected_s > STABLE_CONNECTION_S:
            self._retry_s = FIRST_RETRY_S

    def failed(self, now_s: float) -> None:
        self._due_s = now_s + self._retry_s
        self._retry_s = min(MAX_RETRY_S, 2 * self._retry_s)
