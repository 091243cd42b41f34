"""The Python stacks of a process sampled over some seconds by ``py-spy record``, with the time of each.

py-spy reads the memory of the process while it runs on. Of its formats only "chrometrace" has times: microseconds since
the recorder was made, and no origin. py-spy makes the recorder and, with nothing between, starts the thread that
samples: gputop starts the program before, and the kernel knows the start of the thread to a tick of 10 ms. The file
comes just before the time of the last events, which gives one more lower bound. The bounds were 14 to 40 ms apart on
two CPUs with 15 to 22 threads at work. There single samples have a late time besides: py-spy waits for a CPU, too.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Struct

from gputop.core import host_stacks
from gputop.core.errors import GputopError, NoDataError, os_errors_as
from gputop.core.files import read_regular, temporary_place, unnamed_file
from gputop.core.proc import owner, read_stat
from gputop.ranks.processes import check_rights
from gputop.ranks.stacks import INSTALL, py_spy
from gputop.text.redaction import command as redacted
from gputop.text.units import printable

RATE_HZ = 100
_MAX_S = 600.0  # should nobody end it
_MAX_BYTES = 64 << 20
_WRITES_S = 20.0  # at most, from the signal to the end of the program
_POLL_S = 0.01
_OUTPUT_BYTES = 1 << 16
_COUNTS = re.compile(rb"Samples: (\d+) Errors: (\d+)")
_THREAD = re.compile(r"thread \((\w+)\)(?:: (.*))?$", re.S)
_MAX_LINE = 10_000_000
_Us = Annotated[int, msgspec.Meta(ge=0, le=10 ** 11)]


class _Args(msgspec.Struct):
    filename: str = ""
    line: int | None = None  # any, where the process changed while it was read


class _Event(msgspec.Struct):
    name: str
    ph: str
    ts: _Us = 0
    tid: int = 0
    args: _Args | None = None


class Clock(Struct, frozen=True):
    """Times in Unix nanoseconds: just before the program was started, after its thread was at the latest, before its
    file came, and after its end."""

    started: int
    sampling: int
    made: int
    ended: int

    def origin(self, last_ns: int) -> tuple[int, int]:
        """Time at which the recorder was made, and its error; ``last_ns`` is the time of its last events.

        Raises GputopError where the node's clock was set meanwhile.
        """
        lower, upper = max(self.started, self.made - last_ns), min(self.sampling, self.ended - last_ns)
        if lower > upper:  # files are stamped by another machine's clock
            lower, upper = self.started, self.ended - last_ns
        if lower > upper:
            raise GputopError("this node's clock changed while gputop sampled the stacks", "Capture again.")
        return (lower + upper) // 2, (upper - lower + 1) // 2


class StackSampler:
    """py-spy at work on one process. Made, it samples; ended by :meth:`stop`; then :meth:`samples`, once, or
    :meth:`discard`."""

    def __init__(self, pid: int, *, rate_hz: int = RATE_HZ, seconds: float = _MAX_S,
                 proc: Path = Path("/proc")) -> None:
        """Raises GputopError where py-spy is missing or the process may not be read; does not wait."""
        program = py_spy()
        uid = owner(pid, proc)
        if uid is None:
            raise NoDataError(f"there is no process {pid}", "")
        check_rights(pid, proc / str(pid), uid, "stacks", proc=proc)
        self._pid, self._rate_hz, self._stopped = pid, float(rate_hz), False
        self._folder = Path(tempfile.mkdtemp(prefix="gputop-stacks-", dir=temporary_place()))
        self._output = unnamed_file(self._folder)
        self._started = time.time_ns()
        command = [program, "record", "--format", "chrometrace", "--nonblocking", "--idle", "--threads",
                   "--full-filenames", "--rate", str(rate_hz), "--duration", str(max(1, round(min(seconds, _MAX_S)))),
                   "--output", str(self._folder / "samples"), "--pid", str(pid)]
        try:
            # A session of its own: ctrl-c in the terminal is for gputop to decide on.
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._output,
                                             stderr=self._output, env={**os.environ, "LC_ALL": "C"},
                                             start_new_session=True)
        except OSError as error:
            self.discard()
            raise GputopError(f"cannot start py-spy: {error.strerror or error}", INSTALL) from None
        with contextlib.suppress(OSError, ValueError):  # it has ended already
            resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (_MAX_BYTES, _MAX_BYTES))

    def wait_for_samples(self, timeout_s: float) -> bool:
        """Wait until it samples, or has ended, for so long at most; whether it does. It reads the process's symbols
        first, 0.03 to 0.4 s."""
        until_s = time.monotonic() + timeout_s
        while os.fstat(self._output.fileno()).st_size == 0:
            if self._has_ended() or time.monotonic() > until_s:
                return False
            time.sleep(_POLL_S)
        return not self._has_ended()

    def _has_ended(self) -> bool:
        """Asked so that :meth:`samples` can still have what it used: Popen's own methods take its end away."""
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def stop(self) -> None:
        """Have it write what it has; does not wait."""
        if not self._stopped:
            self._stopped, self._sampling = True, self._thread_started()
            os.kill(self._process.pid, signal.SIGINT)  # not reaped yet, so the number is its own

    def _thread_started(self) -> int:
        """Unix nanoseconds, at most a tick too late; now where its thread has ended, as it does with the process."""
        tasks, now = Path(f"/proc/{self._process.pid}/task"), time.time_ns()
        with contextlib.suppress(OSError, ValueError):
            first = min(read_stat(task.name, tasks).start for task in tasks.iterdir()
                        if task.name != str(self._process.pid))
            since_boot = (first + 1) * 10 ** 9 // os.sysconf("SC_CLK_TCK")
            return now - time.clock_gettime_ns(time.CLOCK_BOOTTIME) + since_boot
        return now

    def samples(self) -> host_stacks.StackSamples:
        """Samples that were taken; waits for the end. Raises GputopError."""
        self.stop()
        timer = threading.Timer(_WRITES_S, os.kill, (self._process.pid, signal.SIGKILL))
        timer.start()
        try:
            _, status, used = os.wait4(self._process.pid, 0)
            self._process.returncode = os.waitstatus_to_exitcode(status)
            ended, in_time = time.time_ns(), timer.is_alive()
        finally:
            timer.cancel()
        try:
            output = self._last_output()
            if not in_time:
                raise GputopError(f"py-spy did not finish within {_WRITES_S:.0f} s", "gputop stopped py-spy; the "
                                                                                     "process continues.")
            if self._process.returncode != 0:
                raise GputopError(f"py-spy could not sample process {self._pid}: "
                                  f"{printable(output)[-300:] or f'status {self._process.returncode}'}", "")
            with os_errors_as("cannot read py-spy's output"):
                made = self._folder.stat().st_mtime_ns
                data = read_regular(self._folder / "samples", _MAX_BYTES)
        finally:
            self.discard()
        counts = _COUNTS.search(output)
        return read_record(data, self._pid, Clock(self._started, self._sampling, made, ended), self._rate_hz,
                           (int(counts[1]), int(counts[2])) if counts else None, used.ru_utime + used.ru_stime)

    def discard(self) -> None:
        """End it where it runs, and remove its file."""
        process = getattr(self, "_process", None)
        if process is not None and process.returncode is None:
            process.kill()
            process.wait()
        self._output.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _last_output(self) -> bytes:
        with contextlib.suppress(OSError):
            self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - _OUTPUT_BYTES))
            return b" ".join(self._output.read(_OUTPUT_BYTES).split())
        return b""


def read_record(data: bytes, pid: int, clock: Clock, rate_hz: float, counts: tuple[int, int] | None,
                cpu_s: float) -> host_stacks.StackSamples:
    """Read what ``py-spy record --format chrometrace --threads`` wrote; ``rate_hz`` was asked for, ``counts`` are the
    samples of all threads and the failures that it told of. Raises GputopError."""
    try:
        # Not gputop.core.codec: its own check of each number takes seconds for the events of a minute.
        events = msgspec.json.decode(data, type=list[_Event])
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise GputopError(f"py-spy's output is damaged: {error}", "") from None
    if not events:
        raise NoDataError(f"py-spy took no samples of process {pid}", "Check that it is a running Python process.")
    first, last = min(event.ts for event in events), max(event.ts for event in events)
    origin_ns, error_ns = clock.origin(last * 1000)
    tables = _Tables()
    threads: dict[int, _Thread] = {}
    for event in events:
        if event.tid not in threads and len(threads) == host_stacks.MAX_THREADS:
            continue
        threads.setdefault(event.tid, _Thread()).take(event, first, tables)
    kept = [thread.finished(pid) for thread in threads.values()]
    kept = _bounded([thread for thread in kept if thread.times_us])
    length_s = max(last - first, 1) / 1e6
    samples, failures = counts or (0, 0)
    # Of all threads, of which some are there for a moment only: those of a sample are one to some.
    each = min(samples, rate_hz * length_s)
    return host_stacks.StackSamples(
        start_s=origin_ns / 1e9 + first / 1e6, length_s=length_s, error_s=error_ns / 1e9,
        rate_hz=min(max(each / length_s, 0.1), rate_hz) if counts else rate_hz,
        missed=failures / (failures + each) if failures else 0.0, cpu_s=cpu_s,
        frames=tuple(tables.frames), stacks=tuple(tables.stacks), threads=tuple(kept))


class _Tables:
    """Frames and stacks, each once."""

    def __init__(self) -> None:
        self.frames: dict[host_stacks.StackFrame, int] = {}
        self.stacks: dict[tuple[int, ...], int] = {}
        self._of_event: dict[tuple[str, str, int], int] = {}

    def frame(self, event: _Event) -> int:
        """Index of a frame; -1 where there is no room for more."""
        where = event.args or _Args()
        line = where.line or 0
        key = event.name, where.filename, line if 0 < line < _MAX_LINE else 0
        if key not in self._of_event:
            frame = host_stacks.StackFrame(_text(key[0]), redacted(_text(key[1])), key[2])
            full = len(self.frames) == host_stacks.MAX_FRAMES
            self._of_event[key] = -1 if full else self.frames.setdefault(frame, len(self.frames))
        return self._of_event[key]

    def stack(self, frames: Sequence[int]) -> int:
        stack = tuple(frame for frame in frames if frame >= 0)[-host_stacks.MAX_DEPTH:]
        if stack not in self.stacks and len(self.stacks) == host_stacks.MAX_STACKS:
            return -1
        return self.stacks.setdefault(stack, len(self.stacks))


class _Thread:
    """The open frames of one thread, and when they changed: events of one time are of one sample."""

    def __init__(self) -> None:
        self.title = ""
        self._open: list[int] = []
        self._now = -1
        self._changes: list[tuple[int, int]] = []

    def take(self, event: _Event, first: int, tables: _Tables) -> None:
        time_us = event.ts - first
        if time_us > self._now >= 0:
            self._note(tables)
        self._now = max(self._now, time_us)
        if event.ph == "B":
            if not event.name.startswith("thread (") or event.args is None or event.args.filename or self._open:
                self._open.append(tables.frame(event))
            else:
                self.title = event.name
        elif event.ph == "E" and self._open:
            self._open.pop()

    def finished(self, pid: int) -> host_stacks.ThreadStacks:
        # The last events end all that is open: not a stack that was seen.
        title = _THREAD.match(self.title)
        number, name = (title[1], title[2] or "") if title else ("", "")
        main = name == "MainThread" or number == str(pid)
        return host_stacks.ThreadStacks(redacted(_text(name)), main, tuple(t for t, _ in self._changes),
                                        tuple(stack for _, stack in self._changes))

    def _note(self, tables: _Tables) -> None:
        stack = tables.stack(self._open) if self._open else -1
        if not self._changes or self._changes[-1][1] != stack:
            self._changes.append((self._now, stack))


def _bounded(threads: list[host_stacks.ThreadStacks]) -> list[host_stacks.ThreadStacks]:
    """The main thread and as many others as there is room for, those of few changes first."""
    out, left = [], host_stacks.MAX_CHANGES
    for thread in sorted(threads, key=lambda sampled: (not sampled.main, len(sampled.times_us))):
        kept = min(left, len(thread.times_us))
        left -= kept
        if kept:
            out.append(host_stacks.ThreadStacks(thread.name, thread.main, thread.times_us[:kept], thread.stacks[:kept]))
    return out


def _text(text: str) -> str:
    return printable(text)[-host_stacks.NAME_CHARS:]
