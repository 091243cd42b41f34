"""Requests for an update, from threads that must not wait to one that may hang."""

from __future__ import annotations

import threading
import time


class UpdateRequests:
    """Requests that any thread makes and one thread answers: an answer serves all requests made before it was begun.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._made = self._answered = 0
        self._made_s = 0.0  # monotonic: when the last one was made
        self._ended = False

    def make(self) -> bool:
        """Request an update; returns at once, False after the end."""
        with self._changed:
            if not self._ended:
                self._made += 1
                self._made_s = time.monotonic()
                self._changed.notify_all()
            return not self._ended

    def wait(self, timeout_s: float) -> bool:
        """Wait for the last request's answer; False if that takes longer than ``timeout_s``.

        The time counts from the request, so that several callers of one answer share one timeout.
        """
        with self._changed:
            made, left_s = self._made, self._made_s + timeout_s - time.monotonic()
            return self._changed.wait_for(lambda: self._answered >= made, max(0.0, left_s))

    def take(self) -> int | None:
        """Wait for a request without an answer, on the thread that answers; returns its number, None after the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._answered < self._made)
            return None if self._ended else self._made

    def answer(self, number: int) -> None:
        """Note that the request of this number, and all before it, have their answer."""
        with self._changed:
            self._answered = number
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
