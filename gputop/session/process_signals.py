"""Sends a signal to a process of the screen, and to no other.

The kernel reuses PIDs: between the sample and the key press the process can end, and its PID can belong to another.
So a pidfd holds the process (pidfd_open(2), Linux 5.3), its start time is compared with the sampled one, and the
signal is sent through the pidfd.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from gputop.core.errors import GputopError
from gputop.core.proc import started_s, user_name
from gputop.core.samples import ProcessSample

# Each with its effect on a training job, in a line of a screen of 80 columns.
SIGNALS: tuple[tuple[signal.Signals, str], ...] = (
    (signal.SIGINT, "like ctrl-c (KeyboardInterrupt): the job can save a checkpoint"),
    (signal.SIGTERM, "asks the process to exit; it may save its work first"),
    (signal.SIGKILL, "kills it immediately without saving; other ranks may hang"),
    (signal.SIGSTOP, "pauses it; GPU memory stays in use, and other ranks may time out"),
    (signal.SIGCONT, "resumes it after SIGSTOP"),
)
_SAME_START_S = 1.0  # the boot time in /proc/stat changes by up to a second when the clock is adjusted


def send(process: ProcessSample, number: signal.Signals) -> None:
    """Send the signal; raises GputopError with the reason where it must not or cannot be sent."""
    pid = process.local_pid or process.pid
    if pid <= 1 or pid == os.getpid():
        raise GputopError(f"gputop does not send signals to PID {pid}", "To quit gputop, press q.")
    if process.started_s is None:
        raise GputopError(f"no signal was sent: the start time of process {pid} is unknown, so the PID may now belong "
                          "to another process"
                          + (f" ({process.reason})" if process.reason else ""),
                          f"Check the process yourself, then run kill -{number.value} {pid}")
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise GputopError(f"process {pid} has ended", "There is nothing left to do.") from None
    except OSError as error:
        raise GputopError(f"cannot open process {pid} for signals ({error.strerror}): Linux 5.3 or newer is needed",
                          f"Send the signal yourself: kill -{number.value} {pid}") from error
    try:
        _check(process, pid)
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        raise GputopError(f"process {pid} has ended", "There is nothing left to do.") from None
    except PermissionError:
        raise GputopError(f"the kernel does not allow you to signal process {pid}", "Ask its owner or root.") from None
    finally:
        os.close(fd)


def _check(process: ProcessSample, pid: int) -> None:
    """Raises unless this PID is still the sampled process, and the user's own."""
    try:
        owner = Path(f"/proc/{pid}").stat().st_uid
    except FileNotFoundError:
        raise ProcessLookupError from None
    except OSError as error:
        raise GputopError(f"no signal was sent: /proc has no information about process {pid} ({error})",
                          "Send the signal yourself with kill.") from error
    began_s = started_s(pid)
    if began_s is None or process.started_s is None:
        raise GputopError(f"no signal was sent: /proc does not show when process {pid} started",
                          "Send the signal yourself with kill.")
    if abs(began_s - process.started_s) > _SAME_START_S:
        raise GputopError(f"no signal was sent: PID {pid} now belongs to another process",
                          "The process that was shown has ended.")
    own_uid = os.geteuid()
    if own_uid not in (0, owner):
        raise GputopError(f"no signal was sent: process {pid} belongs to {user_name(owner)}, and you are "
                          f"{user_name(own_uid)}", "Ask its owner, or root.")
