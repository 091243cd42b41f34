"""Signal handlers for the time of a block."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# SIGKILL and SIGSTOP cannot be held, faults of the program itself must not.
_NEVER_HELD = {signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
_ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
_HARMLESS = {signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH}  # ignored unless there is a handler


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


@contextlib.contextmanager
def unwinding() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as ctrl-c does, so that it is cleaned up; in the main thread only."""
    def ended(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    handlers = termination_handlers(ended)
    handlers.pop(signal.SIGINT, None)
    with signal_handlers(handlers):
        yield


@contextlib.contextmanager
def stop_at_end() -> Iterator[threading.Event]:
    """Yield an event that the first of :func:`termination_handlers`'s signals sets; the second ends at once."""
    stop = threading.Event()

    def ended(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        stop.set()

    with signal_handlers(termination_handlers(ended)):
        yield stop


@contextlib.contextmanager
def signals_held() -> Iterator[Callable[[], bool]]:
    """Let no signal that can be held interrupt or end this program during the block; they take effect after it. Yields
    a function that returns whether one has come that is to end the program.

    Blocked in this thread, and in the main thread also caught, for other threads that do not block them.
    """
    held: list[int] = []
    numbers = signal.valid_signals() - _NEVER_HELD
    before_mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    before: dict[int, Any] = {}
    ending = {number for number in _ENDING if signal.getsignal(number) != signal.SIG_IGN}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in numbers - _HARMLESS:
                if (handler := signal.getsignal(number)) not in (signal.SIG_IGN, None):
                    before[number] = handler
                    signal.signal(number, lambda caught, _: held.append(caught))
        yield lambda: bool(ending & {*held, *signal.sigpending()})
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)
        for late in held:  # still blocked in this thread
            signal.pthread_kill(threading.get_ident(), late)
        signal.pthread_sigmask(signal.SIG_SETMASK, before_mask)


# Signals whose default action ends the process and that come from outside: a person (kill, ctrl-\\), a limit (CPU
# time), a timer. Those of a fault inside the process (SIGSEGV, …) would come again at once.
FATAL_SIGNALS = tuple(signal.Signals[name] for name in (
    "SIGTERM", "SIGHUP", "SIGQUIT", "SIGABRT", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGALRM", "SIGVTALRM", "SIGPROF",
    "SIGTRAP", "SIGSYS", "SIGIO", "SIGPWR", "SIGSTKFLT") if name in signal.Signals.__members__)


class EndBySignal:
    """A handler that restores something, such as the terminal, and then ends the process by the signal it got. It does
    not wait for an event loop, which may be what hangs."""

    def __init__(self, restore: Callable[[], None]) -> None:
        self._restore = restore

    def __call__(self, number: int, _: object) -> None:
        try:
            self._restore()
        finally:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def fatal_handlers(restore: Callable[[], None]) -> dict[signal.Signals, Any]:
    """:class:`EndBySignal` for the signals that would end the process now: for none that is ignored or handled."""
    return {number: EndBySignal(restore) for number in FATAL_SIGNALS
            if (now := signal.getsignal(number)) == signal.SIG_DFL or isinstance(now, EndBySignal)}
