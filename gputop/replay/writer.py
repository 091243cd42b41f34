"""Appending samples to a recording, so that whatever ends it leaves a file that can be read."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

from gputop.core.errors import GputopError
from gputop.core.files import Folder, writable_folder
from gputop.core.samples import NodeSample
from gputop.replay.format import Encoder, header

SYNC_PERIOD_S = 30.0  # what a crash of the machine, not of gputop, may lose


class RecordingGone(GputopError):
    """The file being written was removed: what is written from now on could not be read."""


class RecordingWriter:
    """A new recording at ``path`` (mode 0600), in ``folder`` where that is held open; never an existing one.

    Each sample is handed to the operating system at once, and to the disk every 30 s. Raises
    GputopError where the file exists or cannot be made.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic, folder: Folder | None = None) -> None:
        self.path = path
        self.samples = 0
        self.size_bytes = 0
        self._encoder = Encoder()
        self._clock = clock
        self._synced_s = clock()
        self._file = -1
        try:
            with contextlib.nullcontext(folder) if folder else writable_folder(path.parent, "-o FILE") as target_folder:
                self._file = target_folder.create(path.name, flags=os.O_APPEND)
                self._named = os.fstat(self._file).st_nlink > 0  # as most file systems tell
                with contextlib.suppress(OSError):  # its name is to outlast a power failure, too
                    os.fsync(target_folder.fd)
        except OSError as error:
            if error.errno == errno.EEXIST and error.filename == path.name:  # not one of its folders
                raise GputopError(f"{path} already exists; gputop never overwrites a recording",
                                  "Choose another name with -o, or remove the file.") from error
            raise GputopError(f"cannot write {path}: {error.strerror or error}",
                              "Choose a file in a writable folder: -o FILE.") from error
        self._write(header())

    def append(self, sample: NodeSample) -> None:
        """Add one sample. Raises GputopError where it does not fit, and the file then ends with the one before;
        :class:`RecordingGone` within 30 s after the file was removed."""
        self._write(self._encoder.encode(sample))
        self.samples += 1
        if self._clock() - self._synced_s >= SYNC_PERIOD_S:
            self._sync()
            if self._named and os.fstat(self._file).st_nlink == 0:
                self._end()
                raise RecordingGone(f"{self.path} was removed while gputop was writing it", "Record again.")

    def close(self) -> None:
        """Bring everything to the disk. Raises GputopError where the disk did not take it."""
        if self._file >= 0:
            try:
                self._sync()
            finally:
                self._end()

    def _write(self, data: bytes) -> None:
        if self._file < 0:
            raise GputopError(f"{self.path} is closed")
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._file, left):]
        except OSError as error:
            with contextlib.suppress(OSError):  # a reader passes over half a record, too
                os.ftruncate(self._file, self.size_bytes)
            self._end()
            raise self._failed(error) from error
        self.size_bytes += len(data)

    def _sync(self) -> None:
        self._synced_s = self._clock()
        try:
            os.fsync(self._file)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a pipe or device that knows no fsync
                self._end()
                raise self._failed(error) from error

    def _failed(self, error: OSError) -> GputopError:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        fix = "Free some space or record to another disk; " if full else "Check whether the disk is healthy; "
        return GputopError(f"the recording ended: cannot write {self.path}: {error.strerror or error}",
                           f"{fix}the {self.samples} samples before the error are saved and can be replayed.")

    def _end(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            with contextlib.suppress(OSError):
                os.close(file)
