"""A job that runs beside the monitor: its output in a file, its signals, its exit."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from gputop.core.errors import GputopError, os_errors_as
from gputop.core.files import writable_folder
from gputop.core.own_memory import MONITOR_SCORE, OOM_SCORE, offer_to_oom_killer, set_oom_score
from gputop.core.proc import read_or_empty
from gputop.core.signal_handlers import signal_handlers
from gputop.text import console
from gputop.text.commands import short_command
from gputop.text.units import printable

TAIL_BYTES = 64 * 1024
FOLLOW_PERIOD_S = 0.2
# Colors, and where progress bars have the cursor go: ECMA-48's control sequences, and titles and links (OSC).
_SEQUENCE = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
# A terminal's signals go to the whole process group, those of a person or scheduler to its first process.
_TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTSTP)
FORWARDED = (*_TERMINAL_SIGNALS[:-1], signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def open_log(log: Path) -> int:
    """The descriptor of a new file for a job's output. Raises GputopError."""
    with (os_errors_as(f"cannot write the job's output to {log}", "Name another file with --output. The job was not "
                                                                   "started."),
          writable_folder(log.parent, "--output FILE or --logdir DIR") as folder):
        return folder.create(log.name, flags=os.O_APPEND)


class StartedJob:
    """A started command. Its processes are a process group of their own: the terminal is the monitor's."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        """Start it; its output goes to ``log``, a new file of the user's own. Raises GputopError."""
        self.command = short_command(printable(" ".join(argv)))
        self.log = log
        self.addresses: list[str] = []  # of its profiler servers, one for each rank, as they come up
        self.problem: str | None = None  # why it has no server, where it announced that
        self._on_change: Callable[[], object] = lambda: None
        self.ended = threading.Event()
        self.end_asked = False
        self._argv, self._environ = tuple(argv), dict(environ)
        self._descriptor = open_log(log)  # kept for the next start
        self._oom_score = read_or_empty(OOM_SCORE)  # the job keeps the value that gputop was started with
        try:
            self._process = self._started()
        except GputopError:
            os.close(self._descriptor)
            log.unlink(missing_ok=True)
            raise
        offer_to_oom_killer(MONITOR_SCORE)

    def _started(self) -> subprocess.Popen[bytes]:
        try:
            process = subprocess.Popen(
                self._argv, env=self._environ, stdin=subprocess.DEVNULL, stdout=self._descriptor,
                stderr=subprocess.STDOUT, close_fds=False, preexec_fn=self._before_it)
        except OSError as error:
            raise GputopError(f"cannot start {self._argv[0]}: {error.strerror}",
                              "Check that it is a program, or a script with a #! line.", 126) from None
        threading.Thread(target=self._wait, args=(process,), name="gputop-job", daemon=True).start()
        return process

    def _before_it(self) -> None:
        """Run in the new process, before the command: nothing that takes a lock."""
        os.setpgrp()
        set_oom_score(self._oom_score)

    def restart(self) -> None:
        """Start the command again once it has ended: the same arguments, environment and folder; its output goes on in
        the same file. Waits for the end. Raises GputopError where it cannot be started."""
        self.ended.wait()
        with contextlib.suppress(OSError):  # a full disk does not keep the job from its start
            os.write(self._descriptor, f"\n--- gputop: started again at {time.strftime('%H:%M:%S')} ---\n".encode())
        self.addresses, self.problem, self.end_asked = [], None, False
        self.ended.clear()
        try:
            self._process = self._started()
        except GputopError:
            self.ended.set()
            raise
        finally:
            self._on_change()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def server(self) -> str | None:
        """The address of its profiler server, of several the first one; None: there is none yet."""
        return self.addresses[0] if self.addresses else None

    def watch(self, on_change: Callable[[], object]) -> None:
        """Call ``on_change`` from now on when the job ends or its server comes up; from any thread."""
        self._on_change = on_change

    def set_server(self, address: str | None, line: str) -> None:
        if address is None:
            self.problem = line
        else:
            self.addresses.append(address)
        self._on_change()

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        self.ended.set()
        self._on_change()

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.returncode

    def state(self) -> str:
        """State of the job in words: that it runs, or how it ended."""
        code = self.returncode
        if code is None:
            return "runs"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"was terminated by {signal.Signals(-code).name}"
            return f"was terminated by signal {-code}"
        return f"exited with status {code}"

    def send(self, number: int) -> None:
        """A signal to the job, as the terminal or another process would have sent it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if number in _TERMINAL_SIGNALS:
                os.killpg(self.pid, number)
            elif self.returncode is None:
                os.kill(self.pid, number)

    def end(self) -> None:
        """SIGTERM to the whole process group: to a shell alone it would leave the training behind."""
        self.end_asked = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the whole process group, which has not ended at :meth:`end`."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def tail(self, lines: int) -> tuple[list[str], int]:
        """The last lines of its output, without colors and control characters, and the offset they end at, in bytes."""
        try:
            with self.log.open("rb") as file:
                file.seek(0, os.SEEK_END)
                start = max(0, file.tell() - TAIL_BYTES)
                file.seek(start)
                data = file.read()
        except OSError as error:
            return [f"cannot read {self.log}: {error.strerror}"], 0
        end = start + len(data)
        # A progress bar rewrites its line after each \r: what stands there last counts.
        if start:
            data = re.split(rb"[\r\n]", data, maxsplit=1)[-1]
        text = _SEQUENCE.sub(b"", data).rstrip(b"\n")
        rows = [row.rstrip(b"\r").rpartition(b"\r")[2] for row in text.split(b"\n")]
        return [printable(row) for row in rows[-lines:]] if text else [], end


@contextlib.contextmanager
def forward_signals(job: StartedJob, others: Mapping[signal.Signals, Any] | None = None) -> Iterator[None]:
    """Forward, for the block, the signals that would end gputop to the job; ``others`` are handlers of more signals."""
    def forward(number: int, _: FrameType | None) -> None:
        job.send(number)

    with signal_handlers({**dict.fromkeys(FORWARDED, forward), **(others or {})}):
        yield


def wait_for_exit(job: StartedJob, say: Callable[[str], None] = console.write_text, tail_lines: int = 20) -> None:
    """Show, after the monitor, the end of the job's output and what follows, until the job exits. Signals are forwarded
    meanwhile. Raw bytes go to stdout, as they would without gputop."""
    def stop(number: int, _: FrameType | None) -> None:
        job.send(number)
        os.kill(os.getpid(), signal.SIGSTOP)
        job.send(signal.SIGCONT)  # gputop is in the foreground again

    # Textual's handler of SIGCONT would bring its screen back.
    with forward_signals(job, {signal.SIGTSTP: stop, signal.SIGCONT: signal.SIG_DFL}):
        running = not job.ended.is_set()
        lines, position = job.tail(tail_lines)
        for line in lines:
            say(line)
        if running:
            now = "received SIGTERM and has not exited yet" if job.end_asked else "is still running"
            say(f"gputop: the job {now}; ctrl-c goes to the job. Full output: {job.log}")
        while running:
            running = not job.ended.wait(FOLLOW_PERIOD_S)
            position += _copy(job.log, position)
    say(f"gputop: the job {job.state()}; output: {job.log}")


def _copy(log: Path, position: int) -> int:
    """Copy the log from ``position`` on to stdout; returns the bytes copied. A lost terminal or file is ignored."""
    size = 0
    with contextlib.suppress(OSError, ValueError), log.open("rb") as file:
        file.seek(position)
        while data := file.read(TAIL_BYTES):
            size += len(data)
            console.write_raw(data)
    return size


def exit_like(returncode: int) -> int:
    """The exit status with which gputop ends as the job did; does not return where a signal ended the job."""
    if returncode >= 0:
        return returncode
    sys.stdout.flush()
    sys.stderr.flush()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core file, the job's, is enough
    with contextlib.suppress(OSError, ValueError):  # those that cannot be caught
        signal.signal(-returncode, signal.SIG_DFL)
    os.kill(os.getpid(), -returncode)
    return 128 - returncode


def log_path(folder: Path) -> Path:
    """A new file for a job's output beside the traces."""
    return folder / f"run-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
