"""One deadline over all that gputop does to a job: calls into it, reads and writes of its memory.

A job may answer late or never: its code, called, runs on; a page of its memory is filled by a program of its own
(userfaultfd, FUSE), and whoever reads it waits for that. So another thread does it, which is left behind once the time
is over. It ends with gputop; a thread of the job that it holds then goes back by itself
(:class:`gputop.launch.inject.ReturnFrame`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from msgspec import Struct

from gputop.core.errors import GputopError
from gputop.core.signal_handlers import signals_held

MOST_S = 10.0  # of one call into a job, with all that leads to it
_RELEASE_S = 7.0  # for a held thread to be let go, once the time is over or gputop is to end
_POLL_S = 0.01

T = TypeVar("T")


class TooLate(GputopError):
    """The deadline has passed, or gputop is to end."""


class Deadline(Struct, frozen=True):
    """``until_s`` by the monotonic clock; ``stop`` ends the wait at once."""

    pid: int
    until_s: float
    stop: threading.Event

    def within(self, seconds: float) -> Deadline:
        """The same, or sooner: in ``seconds``."""
        return Deadline(self.pid, min(self.until_s, time.monotonic() + seconds), self.stop)

    def after(self, seconds: float) -> Deadline:
        """One of its own, for what must be done when this one has passed."""
        return Deadline(self.pid, time.monotonic() + seconds, threading.Event())

    @property
    def over(self) -> bool:
        return self.stop.is_set() or time.monotonic() > self.until_s

    def check(self) -> None:
        """Raises TooLate."""
        if self.stop.is_set():
            raise TooLate(f"stopped before process {self.pid} received gputop's request", "")
        if self.over:
            raise TooLate(f"process {self.pid} did not let gputop finish in time",
                          "The process is frozen or hanging in the kernel, or its code does not return.")


def in_time(pid: int, memory: int, do: Callable[[int, Deadline], T], seconds: float = MOST_S) -> T:
    """``do`` with a descriptor of the process's memory, like ``memory``, in another thread. Signals that can be held
    take effect after it; those that would end gputop end it at once. Raises what it raises, and TooLate."""
    deadline = Deadline(pid, time.monotonic() + seconds, threading.Event())
    done = threading.Event()
    result: list[T] = []
    errors: list[BaseException] = []
    duplicate = os.dup(memory)  # open as long as the thread may use it, and no other file by then

    def run() -> None:
        try:
            result.append(do(duplicate, deadline))
        except BaseException as error:  # noqa: BLE001  thread boundary: raised by the caller
            errors.append(error)
        finally:
            os.close(duplicate)
            done.set()

    with signals_held() as end_asked:
        threading.Thread(target=run, name="gputop-attach", daemon=True).start()
        while not done.wait(_POLL_S) and not deadline.over:
            if end_asked():
                deadline.stop.set()
        done.wait(_RELEASE_S)
    if result:
        return result[0]
    if errors:
        raise errors[0]
    raise TooLate(f"process {pid} is not responding: gputop is waiting for its memory or one of its threads",
                  "The process is frozen or hanging in the kernel. If gputop holds one of its threads, the thread "
                  "resumes when gputop exits.")
