"""A recording of days: parts in a folder. A new one begins at an age or a size, and the oldest give way.

A part is a recording as any other, whole up to its last sample. Nothing is ever added to a part of an earlier run: what
a kill, a crash or a power failure left behind stays as it is, and the next run begins a new one.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct

from gputop.core.errors import GputopError, os_errors_as
from gputop.core.files import Folder, open_regular, writable_folder
from gputop.core.samples import NodeSample
from gputop.replay.format import HEADER, MAGIC, RecordingGone, RecordingWriter
from gputop.sources.base import Source
from gputop.telemetry.sampler import Sampler
from gputop.text import redaction
from gputop.text.units import printable, size

MAX_PARTS = 10_000  # of a folder that are read
_PART = re.compile(r"gputop-\d{8}T\d{6}Z(?:-\d{1,6})?\.rec")
_LOCK = ".gputop-record.lock"
_MAX_SHARE = 8  # a part is at most this part of all that is kept, so that little is removed at a time


class Bounds(Struct, frozen=True):
    """Bounds of one part or of all; None: not bounded so."""

    age_s: float | None = None
    size_bytes: float | None = None
    parts: float | None = None


class Rotation(Struct, frozen=True):
    """Rule for when a part ends, and what of all parts is kept."""

    part: Bounds = Bounds()
    keep: Bounds = Bounds()

    @property
    def part_bytes(self) -> float:
        allowed = float("inf") if self.part.size_bytes is None else self.part.size_bytes
        return allowed if self.keep.size_bytes is None else min(allowed, self.keep.size_bytes / _MAX_SHARE)


class PartsWriter:
    """Writes samples to ``folder``, which is made where there is none. Has what a :class:`RecordingWriter` has.

    Raises GputopError where the folder cannot be written, and where another one writes to it already.
    """

    def __init__(self, folder: Path, rotation: Rotation, say: Callable[[str], None] = lambda text: None) -> None:
        self.path = folder
        self.samples = self.size_bytes = 0  # of all parts of this run
        self._rotation = rotation
        self._say = say
        self._begun_s = 0.0
        self._part: RecordingWriter | None = None
        with contextlib.ExitStack() as opened:
            try:
                self._folder = opened.enter_context(writable_folder(folder, "-o DIR"))
                self._lock = self._folder.lock(_LOCK, f"PID {os.getpid()} on {os.uname().nodename}")
            except BlockingIOError as error:
                holder = printable(str(error.strerror))[:100]
                raise GputopError(f"another gputop record is writing to {folder}: {holder}",
                                  "Give each recorder its own folder with -o, or stop the other one.") from error
            except OSError as error:
                raise GputopError(f"cannot write to {folder}: {error.strerror or error}",
                                  "Choose a writable folder: -o DIR.") from error
            if self._lock is None:
                say(f"the file system of {folder} has no locks: make sure that no other gputop record writes there")
            for name in self._closed_parts():  # killed before its first sample
                with contextlib.suppress(OSError):
                    if self._folder.state(name).st_size <= HEADER.size:
                        self._folder.remove(name)
            self._opened = opened.pop_all()

    def append(self, sample: NodeSample) -> None:
        """Add one sample, to a new part where it is time. Raises GputopError as a RecordingWriter does."""
        part, age_s, most_s = self._part, sample.time_s - self._begun_s, self._rotation.part.age_s
        if part is not None and (part.size_bytes >= self._rotation.part_bytes or age_s < 0
                                 or (most_s is not None and age_s >= most_s)):
            self._end_part()
        try:
            self._append(sample)
        except RecordingGone as error:
            self._say(f"{error.message}; gputop starts a new file")
            self._part = None
            self._append(sample)
        self.samples += 1

    def _append(self, sample: NodeSample) -> None:
        if self._part is None:
            self._begun_s = sample.time_s
            self._part = self._new_part(sample.time_s)
        before = self._part.size_bytes
        self._part.append(sample)
        self.size_bytes += self._part.size_bytes - before

    def close(self) -> None:
        """Bring everything to the disk. Raises GputopError where the disk did not take it."""
        with self._opened:
            try:
                self._end_part()
            finally:
                if self._lock is not None:
                    os.close(self._lock)

    def _new_part(self, time_s: float) -> RecordingWriter:
        stamp = time.strftime("gputop-%Y%m%dT%H%M%SZ", time.gmtime(time_s))
        name, n = f"{stamp}.rec", 1
        while self._folder.has(name):
            n += 1
            name = f"{stamp}-{n}.rec"
        self._prune()
        return RecordingWriter(self.path / name, folder=self._folder)

    def _end_part(self) -> None:
        part, self._part = self._part, None
        if part is not None:
            part.close()

    def _closed_parts(self) -> list[str]:
        """Oldest first, by the time in their names."""
        return sorted(filter(_PART.fullmatch, self._folder.names()), key=_order)

    def _prune(self) -> None:
        """Remove the oldest parts until there is room for a new one; only files with the name of a part."""
        keep, states = self._rotation.keep, list(self._states())
        left_bytes, left = sum(state.st_size for _, state in states), len(states)
        for name, state in states:
            old = keep.age_s is not None and time.time() - state.st_mtime > keep.age_s
            large = keep.size_bytes is not None and left_bytes > keep.size_bytes - self._rotation.part_bytes
            many = keep.parts is not None and left > keep.parts - 1
            if not (old or large or many):
                return
            self._folder.remove(name)
            left_bytes, left = left_bytes - state.st_size, left - 1

    def _states(self) -> Iterator[tuple[str, os.stat_result]]:
        try:
            names = self._closed_parts()
        except OSError:  # the folder is gone, which the new part will say
            return
        for name in names:
            with contextlib.suppress(OSError):
                state = self._folder.state(name)
                if stat.S_ISREG(state.st_mode):
                    yield name, state


def _order(name: str) -> tuple[str, int]:
    """Parts in the order in which they began, the second one of a second after the first; other names as they are."""
    if not _PART.fullmatch(name):
        return name, 1
    stamp, _, number = name.removesuffix(".rec").partition("Z-")
    return stamp.removesuffix("Z"), int(number or 1)


def recordings_in(folder: Path) -> list[Path]:
    """The recordings of a folder, whatever their names, in the order of these. Raises GputopError."""
    recordings = []
    with os_errors_as(f"cannot read {folder}", "Give a folder written by gputop record."), Folder(folder) as opened:
        for name in sorted(opened.names(), key=_order):
            with contextlib.suppress(OSError), open_regular(name, folder_fd=opened.fd) as file:
                if file.read(len(MAGIC)) == MAGIC:
                    recordings.append(folder / name)
    return recordings[-MAX_PARTS:]


MAX_WAITING = 600  # samples; a disk that hangs for longer loses some rather than filling memory
_STOP_POLL_S = 0.2  # how soon a stop is noticed between two samples


def record(source: Source, interval_s: float, path: Path, seconds: float | None, stop: threading.Event,
           say: Callable[[str], None], rotation: Rotation | None = None) -> None:
    """Record until ``stop`` is set or for ``seconds``; ``say`` gets messages for the user. Commands lose their secrets.
    With a ``rotation`` ``path`` is a folder of parts.

    The caller's thread writes, another one samples: a slow disk delays no sample. Raises GputopError where the source
    or the file fails; what was written until then can be replayed.
    """
    waiting: queue.Queue[NodeSample | GputopError] = queue.Queue()
    dropped = 0

    def enqueue(message: NodeSample | GputopError) -> None:
        nonlocal dropped
        if isinstance(message, NodeSample) and waiting.qsize() >= MAX_WAITING:
            dropped += 1
        else:
            waiting.put(message)

    with contextlib.closing(RecordingWriter(path) if rotation is None else PartsWriter(path, rotation, say)) as writer:
        sampler = Sampler(source, interval_s, enqueue, enqueue)
        sampler.start()
        try:
            elapsed_s = 0.0
            while not (stop.is_set() and waiting.empty()):
                try:
                    message = waiting.get(timeout=_STOP_POLL_S)
                except queue.Empty:
                    continue
                if isinstance(message, GputopError):
                    raise message
                if not writer.samples:
                    say(f"recording to {path}; press ctrl-c to stop")
                writer.append(redaction.sample(message))
                elapsed_s += message.interval_s or 0.0
                if seconds is not None and elapsed_s >= seconds:
                    break
        finally:
            sampler.stop()
            if dropped:
                say(f"{dropped} samples are missing because writing {path} was too slow")
            if writer.samples:
                see = f"to view them: gputop replay {path}" if rotation is None else ("to summarize them: gputop "
                                                                                     f"report {path}")
                say(f"{writer.samples} samples, {size(writer.size_bytes)} in {path}; {see}")
            elif rotation is None:
                path.unlink(missing_ok=True)  # this run made it, and it would stand in the way of the next
