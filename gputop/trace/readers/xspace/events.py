"""The events of one XSpace, decoded in chunks, and the numbers of their lines in the trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from mmap import MADV_DONTNEED, PAGESIZE, mmap

import numpy as np

from gputop.trace.builder import TraceBuilder
from gputop.trace.model import I64, Line
from gputop.trace.readers.content import Data, MemoryWatch
from gputop.trace.readers.xspace.xplane import Decoded, Losses, PlaneLines, XLine, XPlane, read_events


class EventReader:
    """Decodes events of one file. Raises GputopError where they take more memory than ``watch`` allows."""

    def __init__(self, path: str, data: Data, losses: Losses, watch: MemoryWatch, decoders: ThreadPoolExecutor) -> None:
        self._path, self._data, self._watch, self._decoders = path, data, watch, decoders
        self._losses = losses

    def read(self, sources: Sequence[PlaneLines], base_ns: int) -> Iterator[Decoded]:
        """The events of these sources in chunks; ``base_ns`` is added to their times. Counts those that are lost."""
        for decoded in read_events(self._data, sources, self._decoders):
            self._watch.check(self._path)
            self._losses.add(decoded.lost)
            decoded.chunk.start_ns += base_ns
            decoded.chunk.end_ns += base_ns
            yield decoded

    def forget(self, lines: Iterable[XLine]) -> None:
        """Free the memory of these lines' events, which nobody reads again: they read as zeros then."""
        for line in lines:
            if len(line.begin) and isinstance(self._data, mmap):
                first, last = -(-int(line.begin[0]) // PAGESIZE), int(line.end[-1]) // PAGESIZE
                if first < last:
                    self._data.madvise(MADV_DONTNEED, first * PAGESIZE, (last - first) * PAGESIZE)

    def same_bytes(self, one: XLine, other: XLine) -> bool:
        """Return whether the events of two lines, which have some, are byte by byte the same."""
        first, second = (self._data[int(line.begin[0]):int(line.end[-1])] for line in (one, other))
        return first == second


class LineNumbers:
    """Numbers the lines of one file in the trace: a line that several recordings of the file have is one line.

    Within a recording two lines of one plane and id are two.
    """

    def __init__(self, builder: TraceBuilder, host: str, rank: int) -> None:
        self._builder, self._host, self._rank = builder, host, rank
        # By plane and id: those of this recording, and of those before it that this one does not have yet.
        self._numbers: dict[tuple[str, int], int] = {}
        self._earlier: dict[tuple[str, int], int] = {}
        self._last: tuple[XLine | None, int] = None, -1

    def begin_recording(self) -> None:
        self._earlier |= self._numbers
        self._numbers.clear()

    def of(self, decoded: Decoded, gpu: int = -1) -> int | I64:
        """Number of the line of a chunk, or of that of each event. A line's chunks come one after the other;
        ``gpu`` is the index in the trace of the GPU that the line is of."""
        plane, lines, column = decoded.source.plane, decoded.lines, decoded.chunk.line
        if column is not None:
            return np.array([self._number(plane, xline, gpu) for xline in lines])[column]
        whole = lines[0].whole or lines[0]
        if whole is not self._last[0]:
            self._last = whole, self._number(plane, whole, gpu)
        return self._last[1]

    def _number(self, plane: XPlane, xline: XLine, gpu: int) -> int:
        key = plane.name, xline.id
        number = self._earlier.pop(key, None)
        if number is None:
            number = self._builder.add_line(Line(self._host, gpu, xline.name, self._rank))
        self._numbers[key] = number
        return number
