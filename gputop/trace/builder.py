"""Code that the trace readers share: names as numbers, and the assembly of a trace from pieces of columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from gputop.core.errors import GputopError, NoDataError
from gputop.core.findings import TraceNote
from gputop.trace import limits
from gputop.trace.derived_lines import stream_key
from gputop.trace.gpu_clocks import set_right
from gputop.trace.model import (
    I64,
    AllocatorEvents,
    Columns,
    DeviceEvents,
    HloOp,
    HostEvents,
    Line,
    StepEvents,
    Trace,
    TraceGpu,
    column_types,
)
from gputop.trace.nesting import begun_within
from gputop.trace.occupancy import LaunchShape
from gputop.trace.parallel import pool

# The beginning of the names of host events that readers drop: up to 97% of a host's events
# (docs/contributing/trace-notes.md, "The profiler server").
IGNORED_EVENT = "ThreadpoolListener"
_MIX = 0x5851F42D4C957F2D  # Knuth's multiplier for 64-bit linear congruences
MAX_GPUS = 1024  # of one host; a larger number is damage

_Events = TypeVar("_Events", DeviceEvents, HostEvents, AllocatorEvents, StepEvents)
_Collectable = TypeVar("_Collectable", bound=Columns)


class Names(dict[str, int]):
    """Strings, each stored once, by number. Raises GputopError where they need many times the memory of the file."""

    def __init__(self) -> None:
        super().__init__()
        self.list: list[str] = []
        self._room_chars = limits.NAME_CHARS

    def __missing__(self, name: str) -> int:
        self._room_chars -= len(name)
        if self._room_chars < 0:
            raise GputopError("The names in this trace need far more memory than the size of the file suggests; no "
                              "profiler writes such names.", "Capture again, or copy the file again.")
        index = self[name] = len(self.list)
        self.list.append(encodable(name))
        return index

    def allow_for(self, file_bytes: int) -> None:
        """Give the names room for so many more bytes of a file, decompressed."""
        self._room_chars += limits.NAME_CHARS_PER_BYTE * file_bytes


def encodable(text: str) -> str:
    """``text`` without lone surrogates, which JSON may contain but which cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


class TraceBuilder(Struct):
    """A trace under construction: columns in pieces, in absolute nanoseconds, unsorted.

    The stats of a piece of ``host`` have rows that count within that piece.
    """

    names: Names = field(default_factory=Names)
    lines: list[Line] = field(default_factory=list)
    gpus: list[TraceGpu] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    device: list[DeviceEvents] = field(default_factory=list)
    host: list[HostEvents] = field(default_factory=list)
    allocator: list[AllocatorEvents] = field(default_factory=list)
    steps: list[StepEvents] = field(default_factory=list)
    quality: list[TraceNote] = field(default_factory=list)
    shapes: dict[LaunchShape, int] = field(default_factory=dict)
    hlo_ops: list[HloOp] = field(default_factory=list)
    cuda_graphs: bool = False

    def shape(self, shape: LaunchShape | None) -> int:
        """The number of a launch shape, -1 for None."""
        return -1 if shape is None else self.shapes.setdefault(shape, len(self.shapes))

    def add_line(self, line: Line) -> int:
        self.lines.append(line)
        return len(self.lines) - 1

    def note(self, id_: str, message: str) -> None:
        """Add a quality note, each once and of a bounded length; behind many comes one that says that more follow."""
        note = TraceNote(id_, limits.cut_text(message))
        if note in self.quality or len(self.quality) > limits.MAX_NOTES:
            return
        if len(self.quality) == limits.MAX_NOTES:
            note = TraceNote("more_notes", f"This trace has more than {limits.MAX_NOTES} notes, and some are left out.")
        self.quality.append(note)

    def note_other_lines(self, host: str, ordinal: int, names: Iterable[str]) -> None:
        """A note of lines of a GPU that have events and are no streams of it."""
        listed = ", ".join(sorted(names)[:4])
        self.note("not_streams", f"{host or 'This host'}, GPU {ordinal}: lines that are not GPU streams are left "
                                 f"out ({listed}), because they repeat the streams.")

    def finish(self, paths: Sequence[str], *, to_unix_ns: int | None,
               windows_ns: Mapping[int, tuple[int, int]] | None = None, simulated: bool = False,
               empty_fix: str = "") -> Trace:
        """Join, sort and shift to the first event. ``to_unix_ns`` added to the columns' times gives Unix times;
        ``windows_ns`` is by rank when its profiler began and ended.

        Raises NoDataError, with ``empty_fix`` as its remedy, where there is no event at all;
        the quality notes go into its message as the reasons.
        """
        with pool(_count(self.device) + _count(self.host) + _count(self.allocator)) as threads:
            stats = joined_stats(self.host)
            device = _joined(self.device, DeviceEvents, threads)
            host = _joined(self.host, HostEvents, threads)
            allocator = _joined(self.allocator, AllocatorEvents, threads)
            self._bound_allocators(allocator)
            steps = _joined(self.steps, StepEvents, threads)
            starts = [times for times in (device.start_ns, host.start_ns, allocator.time_ns) if len(times)]
            if not starts:
                raise self._no_events(paths, empty_fix)
            for message in set_right(device, host, self.names.list, self.gpus):
                self.note("clock", message)
            first = min(int(times.min()) for times in starts)
            for times in (device.start_ns, device.end_ns, host.start_ns, host.end_ns, allocator.time_ns,
                          steps.start_ns, steps.end_ns):
                times -= first
            launched = device.launch_line >= 0
            for times in (device.launch_ns, device.launch_end_ns):
                np.subtract(times, first, out=times, where=launched)
            of_host = threads.submit(_order, host.start_ns)
            _sort(device, _order(device.start_ns, device.gpu), threads)
            once = threads.submit(_first_listed, device, self.lines)
            _sort(steps, _order(steps.start_ns), threads)
            _sort(allocator, _order(allocator.time_ns), threads)
            order = of_host.result()
            _sort(host, order, threads)
            host.stats = stats if order is None else _rows_after(stats, order)
            self._count_once(device, once.result())
        if "graph_type" in host.stats:  # until TensorFlow 2.3 Keras' markers "train" and "test" are "TraceContext"
            marked, phases = host.stats.pop("graph_type")
            host.name[marked] = phases
        add_eager_stats(host, self.names.list, self.names.__getitem__)
        windows = {rank: (begin - first, end - first) for rank, (begin, end) in (windows_ns or {}).items()}
        return Trace(
            paths=list(paths), hosts=self.hosts, names=self.names.list, lines=self.lines,
            gpus=self.gpus, device=device, host=host, allocator=allocator,
            origin_ns=0 if to_unix_ns is None else first + to_unix_ns,
            rank_windows_ns=windows, profile_window_ns=(min(begin for begin, _ in windows.values()), max(
                end for _, end in windows.values())) if windows else None,
            simulated=simulated, quality=self.quality, launch_shapes=list(self.shapes), step_events=steps,
            hlo_ops=self.hlo_ops, cuda_graphs=self.cuda_graphs)

    def _no_events(self, paths: Sequence[str], fix: str) -> NoDataError:
        where = ", ".join(paths)
        damage = [note for note in self.quality if note.id == "truncated"]  # then nothing else is known to be missing
        reasons = [note.message.removeprefix(f"{where}: ") for note in damage or self.quality]
        return NoDataError(f"No events to analyze in {where}{': ' if reasons else '.'}{' '.join(reasons)}", fix)

    def _bound_allocators(self, events: AllocatorEvents) -> None:
        """Leave out allocators beyond what any job has, and say so: each is analyzed by itself."""
        distinct = np.unique(events.allocator[events.allocator >= 0])
        if len(distinct) <= limits.MAX_ALLOCATORS:
            return
        events.allocator[np.isin(events.allocator, distinct[limits.MAX_ALLOCATORS:])] = -1
        self.note("left_out", f"The trace has records of {len(distinct):,} memory allocators, and "
                              f"gputop analyzes {limits.MAX_ALLOCATORS:,} of them.")

    def _count_once(self, device: DeviceEvents, keep: npt.NDArray[np.bool_] | None) -> None:
        """Leave out the repetitions of events that a file lists more than once, and say so; None: there are none."""
        if keep is None:
            return
        gpus = sorted({self.gpus[i].ordinal for i in np.unique(device.gpu[~keep]).tolist()})
        self.note("duplicate_events", (
            f"{int((~keep).sum()):,} events of GPU {', '.join(map(str, gpus))} are in the trace more than once (same "
            "stream, name, times, and launch), and each event is counted once."))
        for name in device.__struct_fields__:
            setattr(device, name, getattr(device, name)[keep])


class Collected(Generic[_Collectable]):
    """Events that come in pieces, in one set of columns with ``room`` for the most that can come. ``absent``: the
    columns that may be unknown of some."""

    def __init__(self, kind: type[_Collectable], room: int, *absent: str) -> None:
        self._kind, self._absent = kind, absent
        self._columns = {name: np.empty(room, dtype) for name, dtype in column_types(kind).items()}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def more(self, count: int) -> _Collectable:
        """The part of the whole for so many further events, to be set: nothing is known (:meth:`Columns.empty`) in the
        ``absent`` columns."""
        begin, self._count = self._count, self._count + count
        for column in map(self._columns.__getitem__, self._absent):
            column[begin:self._count] = -int(column.dtype.kind == "i")
        return self._part(slice(begin, self._count))

    def whole(self) -> _Collectable:
        return self._part(slice(self._count))

    def _part(self, rows: slice) -> _Collectable:
        return self._kind(**{name: column[rows] for name, column in self._columns.items()})


def _count(pieces: Iterable[Sized]) -> int:
    return sum(map(len, pieces))


def _joined(pieces: list[_Events], kind: type[_Events], threads: ThreadPoolExecutor) -> _Events:
    """One set of columns from many. The stats are not joined. Empties ``pieces`` to free their memory."""
    if len(pieces) <= 1:
        return pieces.pop() if pieces else kind.empty()
    names = column_types(kind)
    columns: Any = threads.map(lambda name: np.concatenate([getattr(piece, name) for piece in pieces]), names)
    joined = kind(**dict(zip(names, columns, strict=True)))
    pieces.clear()
    return joined


def _order(*keys: npt.NDArray) -> npt.NDArray[np.intp] | None:
    """The order by these columns, the last one first; None where they are in it, as those of one stream a GPU are."""
    order = np.lexsort(keys)
    return None if (order[1:] > order[:-1]).all() else order


def _sort(events: _Events, order: npt.NDArray[np.intp] | None, threads: ThreadPoolExecutor) -> None:
    """Bring the columns into this order, few at a time to save memory."""
    if order is None:
        return

    def sort(name: str) -> None:
        setattr(events, name, getattr(events, name)[order])

    list(threads.map(sort, column_types(type(events))))


def _first_listed(device: DeviceEvents, lines: Sequence[Line]) -> npt.NDArray[np.bool_] | None:
    """Mask of the events, sorted by GPU and start, that do not repeat an earlier one; None where all are.

    A stream runs one thing at a time, so that two of one stream, name, start, end and launch are the same one.
    """
    together = device.start_ns[1:] == device.start_ns[:-1]
    if not together.any():
        return None
    rows = np.flatnonzero(np.concatenate((together, [False])) | np.concatenate(([False], together)))
    streams: dict[tuple[str, int, str], int] = {}
    stream_of = np.array([streams.setdefault((line.host, line.gpu, stream_key(line.name)), len(streams))
                          for line in lines])
    launched = device.correlation[rows], device.end_ns[rows], device.start_ns[rows]
    hashes = row_hashes(launched)
    hashes.sort()  # quicker than to sort the rows, and mostly none are equal
    if not (hashes[1:] == hashes[:-1]).any():
        return None
    columns = (device.name[rows], stream_of[device.line[rows]], *launched)
    order = np.lexsort(columns)  # stable: of equal events the first listed comes first
    same = np.logical_and.reduce([column[order][1:] == column[order][:-1] for column in columns])
    if not same.any():
        return None
    keep = np.ones(len(device), bool)
    keep[rows[order[1:][same]]] = False
    return keep


def row_hashes(columns: Sequence[npt.NDArray]) -> I64:
    """A hash of each row of these columns of integers: equal rows have equal ones."""
    hashes = columns[0].astype(np.int64)
    for column in columns[1:]:
        hashes *= _MIX
        hashes += column
    return hashes


def joined_stats(pieces: Iterable[HostEvents]) -> dict[str, tuple[I64, I64]]:
    """The sparse stats of all pieces, with rows that count in the joined columns."""
    columns_of: dict[str, list[tuple[I64, I64]]] = {}
    base = 0
    for piece in pieces:
        for name, (rows, values) in piece.stats.items():
            columns_of.setdefault(name, []).append((rows + base, values))
        base += len(piece)
    return {name: (np.concatenate([rows for rows, _ in stat]), np.concatenate([values for _, values in stat]))
            for name, stat in sorted(columns_of.items())}


def _rows_after(stats: dict[str, tuple[I64, I64]], order: npt.NDArray[np.intp]) -> dict[str, tuple[I64, I64]]:
    """Stats with the rows that the events have after sorting by ``order``."""
    row_after = np.empty(len(order), np.int64)
    row_after[order] = np.arange(len(order))
    out = {}
    for name, (rows, values) in stats.items():
        rows = row_after[rows]
        by_row = np.argsort(rows, kind="stable")
        out[name] = (rows[by_row], values[by_row])
    return out


# -- eager calls --------------------------------------------------------------------------------------
#
# Calls of ops from Python, by the names that each version of TensorFlow gives them.
#
# Newer versions write ``EagerExecute`` with the stats ``eager_op`` and ``is_func``. Older ones (seen in 2.2 to 2.4)
# write ``EagerExecute: <op>``; others only ``EagerKernelExecute`` or ``TFE_Py_FastPathExecute_C``, which do not tell
# the op.

_NAMED = re.compile(r"EagerExecute: (\S+)")
_UNNAMED = ("EagerKernelExecute", "TFE_Py_FastPathExecute_C")
_FUNCTION = re.compile(r"__(?:inference|forward|backward)_")
_RUNS_FUNCTION = "FunctionRun"


def add_eager_stats(host: HostEvents, names: Sequence[str], number_of: Callable[[str], int]) -> None:
    """Give such calls the stats of newer versions, where no event has them. ``host`` is sorted by start."""
    if not len(host) or len(host.stats.get("eager_op", ((),))[0]):
        return
    op_of: dict[int, tuple[int, int]] = {}  # by name of the event: its op, and whether that is a function
    for i, name in enumerate(list(names)):
        if match := _NAMED.match(name):
            op_of[i] = number_of(match[1]), int(_FUNCTION.match(match[1]) is not None)
    if op_of:
        rows = np.flatnonzero(np.isin(host.name, list(op_of)))
        values = np.array([op_of[i] for i in host.name[rows].tolist()], np.int64).reshape(-1, 2)
        host.stats["eager_op"], host.stats["is_func"] = (rows, values[:, 0]), (rows, values[:, 1])
        return
    numbers = {name: i for i, name in enumerate(names) if name in (*_UNNAMED, _RUNS_FUNCTION)}
    for name in _UNNAMED:
        if name in numbers:
            rows = np.flatnonzero(host.name == numbers[name])
            runs = np.flatnonzero(host.name == numbers.get(_RUNS_FUNCTION, -1))
            host.stats["eager_op"] = rows, np.full(len(rows), numbers[name], np.int64)
            holds = begun_within(host, rows, host.line[runs], host.start_ns[runs]) > 0
            host.stats["is_func"] = rows, holds.astype(np.int64)
            return
