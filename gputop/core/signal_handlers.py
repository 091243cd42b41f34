"""Signal handlers for the time of a block."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def signal_handlers(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    """Install ``handlers`` for the block and restore the former ones after it; in the main thread only."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def termination_handlers(handler: Any) -> dict[signal.Signals, Any]:
    """``handler`` for the signals that end a program: SIGINT (ctrl-c), SIGTERM (a scheduler) and SIGHUP (a closed
    line). A signal that was ignored from the start, as under nohup, stays ignored."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return {number: handler for number in numbers if signal.getsignal(number) != signal.SIG_IGN}
