"""The range of a trace that is on screen, and the labels beside it: pure arithmetic on nanoseconds."""

from __future__ import annotations

from msgspec import Struct

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
