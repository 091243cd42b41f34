"""The range of a trace that is on screen, the labels beside it, and the layout of its
rows: headings, GPUs with their streams, pools of threads, nested ranges. Pure."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby

from msgspec import Struct

from gputop.timeline.model import Row

MIN_SPAN_NS = 200  # a CUPTI timestamp is good to some tens of nanoseconds
_MOST_APART = 10**18  # more nanoseconds than a trace is long
_TICK_CELLS = 11  # between two labels: room for "250.4 ms" and some space

_UNITS = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs"), (1, "ns"))


class View(Struct, frozen=True):
    """A range of time within ``window_ns``. Immutable: every change returns another view within the window."""

    start_ns: int
    end_ns: int
    window_ns: tuple[int, int]

    @classmethod
    def whole(cls, window_ns: tuple[int, int]) -> View:
        return cls(window_ns[0], max(window_ns[1], window_ns[0] + 1), window_ns)

    @property
    def span_ns(self) -> int:
        return self.end_ns - self.start_ns

    @property
    def is_whole(self) -> bool:
        return self.span_ns >= self.window_ns[1] - self.window_ns[0]

    def at(self, start_ns: float, span_ns: float) -> View:
        """The view of length ``span_ns`` from ``start_ns`` on, moved into the window."""
        begin, end = self.window_ns
        span = round(min(max(span_ns, MIN_SPAN_NS), max(end - begin, 1)))
        start = min(max(round(start_ns), begin), max(begin, end - span))
        return View(start, start + span, self.window_ns)

    def zoom(self, factor: float, about_ns: float) -> View:
        """``factor`` times as long; ``about_ns`` keeps its place on the screen."""
        share = (about_ns - self.start_ns) / self.span_ns
        span = min(max(self.span_ns * factor, MIN_SPAN_NS), max(self.window_ns[1] - self.window_ns[0], 1))
        return self.at(about_ns - share * span, span)

    def fit(self, start_ns: int, end_ns: int, margin: float = 0.15) -> View:
        """The view of this range with a margin, a share of its length, at both sides."""
        around = margin * max(end_ns - start_ns, MIN_SPAN_NS)
        return self.at(start_ns - around, end_ns - start_ns + 2 * around)

    def centered(self, time_ns: float) -> View:
        return self.at(time_ns - self.span_ns / 2, self.span_ns)

    def showing(self, start_ns: int, end_ns: int) -> View:
        """This view if enough of the range is in it, else moved there, and longer only if the range needs it."""
        seen = min(end_ns, self.end_ns) - max(start_ns, self.start_ns)
        if seen >= min(end_ns - start_ns, 0.2 * self.span_ns):
            return self
        if end_ns - start_ns > 0.9 * self.span_ns:
            return self.fit(start_ns, end_ns)
        return self.centered((start_ns + end_ns) / 2)

    def column(self, time_ns: float, columns: int) -> int:
        """The column of a time; below 0, or ``columns`` and more, where the time is outside the view."""
        return int((time_ns - self.start_ns) * columns // self.span_ns)

    def time(self, column: float, columns: int) -> int:
        """The time at which a column begins."""
        return self.start_ns + int(column * self.span_ns / max(columns, 1))


def tick_step_ns(span_ns: int, columns: int) -> int:
    """The smallest of 1, 2, 5, 10 … ns whose multiples leave room for their labels."""
    return every(1.0, span_ns * _TICK_CELLS / max(columns, 1))


def base_ns(view: View, columns: int) -> int:
    """The origin of the tick labels, relative to the window: 0, or a round time shortly before the view.

    A label has no room for both the seconds into a trace and the microseconds between two kernels.
    """
    offset = view.start_ns - view.window_ns[0]
    step = tick_step_ns(view.span_ns, columns)
    grain = step * 100
    return 0 if offset + view.span_ns < 20 * grain else offset // grain * grain


def ticks(view: View, columns: int) -> list[tuple[int, str]]:
    """Columns of the ticks with their labels: times since :func:`base_ns`, all in one unit."""
    if columns < 4:
        return []
    step, base = tick_step_ns(view.span_ns, columns), base_ns(view, columns)
    zero = view.window_ns[0] + base
    size, unit = unit_of(max(step, (view.end_ns - zero) // 2))
    digits = _digits(step, size)
    first = -(-(view.start_ns - zero) // step)
    last = (view.end_ns - 1 - zero) // step
    out = []
    for i in range(first, last + 1):
        column = view.column(zero + i * step, columns)
        label = f"{i * step / size:.{digits}f} {unit}"
        if column + len(label) < columns:
            out.append((column, label))
    return out


def unit_of(value_ns: float) -> tuple[int, str]:
    """The largest unit of which this is one or more: (nanoseconds in it, its name)."""
    for size, unit in _UNITS:
        if abs(value_ns) >= size:
            return size, unit
    return _UNITS[-1]


def _digits(step_ns: int, size: int) -> int:
    digits = 0
    while digits < 9 and step_ns * 10**digits % size:
        digits += 1
    return digits


def moment(offset_ns: int, grain_ns: int = 1000) -> str:
    """A time in the trace, as exact as ``grain_ns`` asks: "+1.203 456 s", "+3.2 ms"."""
    if offset_ns == 0:
        return "+0 s"
    size, unit = unit_of(offset_ns)
    digits = _digits(max(1, 10 ** max(0, len(str(max(1, int(grain_ns)))) - 1)), size)
    text = f"{offset_ns / size:.{digits}f}"
    whole, _, part = text.partition(".")
    groups = [part[i:i + 3] for i in range(0, len(part), 3)]
    return f"+{whole}" + ("." + " ".join(groups) if part else "") + f" {unit}"


def every(step_columns: float, least: float) -> int:
    """Draw every n-th (1, 2, 5, 10, …) of marks ``step_columns`` apart, so that those drawn are ``least`` apart."""
    n = 1
    while n <= _MOST_APART:
        for factor in (1, 2, 5):
            if n * factor * step_columns >= least:
                return n * factor
        n *= 10
    return n


MAX_DEPTH = 16  # lines of one thread; a recursion can be deeper than any screen
_MIN_POOL_THREADS = 4  # as many successive threads of one name, or more, are folded into one row
_MAX_LEVELS_UNFOLDED = 8  # deeper threads are folded at first
ABOVE = ("path", "layer")  # rows above those of the GPUs
WITHIN = ("stream", "counter")  # rows within that of their GPU
NESTED = ("thread", "layer")  # rows that unfold to a line for each level
_LEVEL_LABELS = ("  layer", "  in it")
_NUMBER = re.compile(r"[\s/#:_.-]*\d+$")


class Place(Struct, frozen=True):
    """One or more lines of the picture: a heading (no row), a row, a pool of rows, or one level of a thread's nesting.

    ``fold`` identifies it in the ``unfolded`` of :func:`places`; None if it cannot be unfolded.
    """

    rows: tuple[Row, ...]
    label: str
    lines: int = 1
    depth: int | None = None  # None: the whole row on one place
    fold: int | None = None
    folded: bool = True

    @property
    def row(self) -> Row | None:
        """Row of the place, for a pool the first one; None for a heading."""
        return self.rows[0] if self.rows else None

    @property
    def key(self) -> tuple[int, int, int]:
        """Identity of the place while rows fold and unfold."""
        return -1 if not self.rows else self.rows[0].key, len(self.rows), self.depth or 0


def places(rows: Sequence[Row], unfolded: frozenset[int], gpu_lines: int = 1) -> list[Place]:
    """The picture from top to bottom. ``unfolded``: the folds that are open."""
    out: list[Place] = []
    group = ""
    for members in _pools(sorted(rows, key=lambda row: row.kind not in ABOVE)):
        row = members[0]
        if row.kind in ("thread", "stage") and row.group != group:
            out.append(Place((), row.group))
        group = row.group
        if row.kind == "gpu":
            within = row.key + 1 < len(rows) and rows[row.key + 1].kind in WITHIN
            out.append(Place((row,), row.label, gpu_lines, None, row.key if within else None, row.key not in unfolded))
        elif row.kind in WITHIN:
            gpu = next((r.key for r in rows if r.kind == "gpu" and r.gpu == row.gpu), None)
            if gpu is None or gpu in unfolded:
                out.append(Place((row,), "  " + row.label))
        elif len(members) > 1:
            pool = -1 - row.key
            out.append(Place(members, f"{len(members)}× {_NUMBER.sub('', row.label)}", 1, None, pool,
                             pool not in unfolded))
            if pool in unfolded:
                for member in members:
                    out += _thread(member, unfolded, "  ")
        else:
            out += _thread(row, unfolded, "")
    return out


def _pools(rows: Sequence[Row]) -> Iterator[tuple[Row, ...]]:
    """The rows in order; the threads of a pool are one tuple."""
    def pool(row: Row) -> object:
        name = _NUMBER.sub("", row.label) if row.kind == "thread" else ""
        # Python's threads run the job's loops, so they are not folded.
        return (row.group, name) if name and not name.startswith(("python", "pt_main", "thread")) else row.key

    for _, grouped in groupby(rows, pool):
        members = tuple(grouped)
        if len(members) >= _MIN_POOL_THREADS:
            yield members
        else:
            yield from ((row,) for row in members)


def _thread(row: Row, unfolded: frozenset[int], indent: str) -> list[Place]:
    nested = row.key if row.kind in NESTED and row.depth > 0 else None
    if nested is None or nested not in unfolded:
        return [Place((row,), indent + row.label, 1, None, nested)]
    below = ("", *_LEVEL_LABELS) if row.kind == "layer" else ("",) * MAX_DEPTH
    return [Place((row,), indent + row.label if depth == 0 else below[depth], 1, depth, nested, False)
            for depth in range(min(row.depth + 1, MAX_DEPTH))]


def gpu_folds(rows: Sequence[Row]) -> frozenset[int]:
    """The folds of all GPUs that have streams."""
    return frozenset(p.fold for p in places(rows, frozenset()) if p.fold is not None and p.rows[0].kind == "gpu")


def first_unfolded(rows: Sequence[Row], lines: int) -> frozenset[int]:
    """Rows to unfold at first, as long as the whole picture fits into ``lines``: GPUs, then threads.

    A GPU with a single stream and no counters stays folded: both rows would be equal.
    """
    within = Counter(row.gpu for row in rows if row.kind in WITHIN)
    chosen = frozenset(fold for fold in gpu_folds(rows) if within[rows[fold].gpu] > 1)
    if _lines(rows, chosen) > lines:
        chosen = frozenset()
    for row in sorted(rows, key=lambda row: row.kind not in ABOVE):
        more = chosen | {row.key}
        if row.kind in NESTED and 0 < row.depth <= _MAX_LEVELS_UNFOLDED and _lines(rows, more) <= lines:
            chosen = more
    return chosen


def _lines(rows: Sequence[Row], unfolded: frozenset[int]) -> int:
    return sum(place.lines for place in places(rows, unfolded))


def lines_per_gpu(rows: Sequence[Row], unfolded: frozenset[int], lines: int) -> int:
    """Lines per GPU row: up to three, where the other rows leave room."""
    gpus = sum(row.kind == "gpu" for row in rows)
    rest = lines - _lines(rows, unfolded)
    return 1 + max(0, min(2, rest // gpus)) if gpus else 1


class ScrolledPlaces:
    """Places one below the other, and which of their lines are on the screen.

    Lines count from the first one on the screen; those above it are negative. ``room`` is how many the screen has.
    """

    def __init__(self) -> None:
        self.places: list[Place] = []
        self._tops = [0]  # the first line of each place, and one more: the number of lines
        self.top = 0  # the line of all that is the first one on the screen

    def replace(self, of: list[Place]) -> None:
        """Take other places; the screen stays on the line it was on until it is scrolled."""
        self.places, self._tops = of, [0, *accumulate(p.lines for p in of)]

    def lines(self, index: int) -> range:
        return range(self._tops[index] - self.top, self._tops[index + 1] - self.top)

    def index_at(self, line: int) -> int | None:
        """The place on this line; None: there is none."""
        index = bisect_right(self._tops, line + self.top) - 1
        return index if 0 <= index < len(self.places) else None

    def shown(self, room: int) -> list[Place]:
        """The places of which a line is on the screen."""
        return [p for i, p in enumerate(self.places) if self.lines(i).start < room and self.lines(i).stop > 0]

    def put(self, index: int, line: int) -> None:
        """Scroll so that a place begins on this line, as far as there is as much above it."""
        self.top = max(0, self._tops[index] - line)

    def scroll(self, by: int, room: int) -> bool:
        """Scroll by some lines, not beyond the ends; True if that moved anything."""
        before, self.top = self.top, min(max(self.top + by, 0), max(0, self._tops[-1] - room))
        return self.top != before

    def scroll_to(self, index: int, room: int) -> bool:
        """Scroll a place into view, with a heading right above it; True if that moved anything."""
        first, last = self._tops[index], self._tops[index + 1]
        if index and self.places[index - 1].row is None:
            first -= 1
        before = self.top
        self.top = max(0, min(self.top, self._tops[-1] - room))
        self.top = max(min(self.top, first), last - room)
        return self.top != before
