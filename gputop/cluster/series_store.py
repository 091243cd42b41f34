"""Keeps the past of a Prometheus's series, and asks for what is missing of it; all histories come from here.

Time is cut into slots of one step: slot i is the time up to ``i * step_s``, so that the newest slot that is asked for
is complete. A *subject* is what is asked for at once: a job, a node, a GPU.

1. Of the subjects that are wanted take those that were never asked for, a bounded number of them, from the first slot
   of the grid on; if there are none, those that lack the newest slots, from the earliest of these on.
2. Ask for them by one question, or for fewer of them if the server takes no query so long. If it fails, nothing has
   changed, and the next call asks for the same.
3. Put the points of the answer on their slots. All subjects are then known up to the newest slot, with or without
   points: a slot without a point (a gap, a Prometheus that is younger than the grid) was not measured, and is not asked
   for again.
4. Drop what has left the grid. After a clock was set back, forget what is known of the future: it is asked for anew,
   and so is everything for a grid of other or more slots.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from gputop.cluster.model import FleetView, History
from gputop.cluster.prometheus import FigureClient, QueryTooLong, Series, figure_of

SUBJECTS_AT_ONCE = 60
_MAX_SERIES = 100_000  # a server may name other groups each time
_SET_BACK = 1  # slots by which the time may go back without a clock that was set


class SlotGrid(Struct, frozen=True):
    """The slots of a view at a time, from ``first`` to ``last``."""

    step_s: float
    first: int
    last: int

    @classmethod
    def of(cls, view: FleetView, now_s: float) -> SlotGrid:
        last = int(now_s // view.step_s)
        return cls(view.step_s, last - int(view.span_s // view.step_s) + 1, last)

    @property
    def slots(self) -> int:
        return self.last - self.first + 1

    def history(self, value: Callable[[int], float | None]) -> History:
        return History(self.first * self.step_s, self.step_s, tuple(map(value, range(self.first, self.last + 1))))


class PastQuestion(Struct, frozen=True):
    """Question about the past. ``subjects``: those that are wanted most first; ``write``: the figures for some of them,
    by name; ``series_id``: what a series of the answer is of, by its labels."""

    topic: str
    subjects: Sequence[Hashable]
    write: Callable[[Sequence[Any]], Mapping[str, str]]
    series_id: Callable[[Mapping[str, str]], Hashable]


class SeriesStore:
    """The points of series by slot, and up to which slot each subject is known.

    ``live``: nobody is asked: points are put in as they are seen, and the newest slot is the one that goes on.
    """

    def __init__(self, *, live: bool = False) -> None:
        self._live = live
        self._points: dict[tuple[str, Hashable], dict[int, float]] = {}  # by figure and what the series is of
        self._known_to: dict[tuple[str, Hashable], int] = {}  # by topic and subject: the newest slot
        self._grid = SlotGrid(0.0, 0, 0)

    def __len__(self) -> int:
        return len(self._points) + len(self._known_to)

    def range(self, client: FigureClient, question: PastQuestion, grid: SlotGrid) -> bool:
        """Ask for what is missing of this, by one question at most; whether something was. Raises GputopError."""
        self.fit(grid)
        known_to = {subject: self._known_to.get((question.topic, subject)) for subject in question.subjects}
        new = [subject for subject, slot in known_to.items() if slot is None][:SUBJECTS_AT_ONCE]
        behind = {subject: slot for subject, slot in known_to.items() if slot is not None and slot < grid.last}
        subjects = new or list(behind)[:SUBJECTS_AT_ONCE]
        if not subjects:
            return False
        first = grid.first if new else max(grid.first, min(behind[subject] for subject in subjects) + 1)
        span = (first * grid.step_s, grid.last * grid.step_s, grid.step_s)
        asked, answer = _answer(client, question, subjects, span)
        for series in answer or ():
            slots = self._points.setdefault((figure_of(series), question.series_id(series.labels)), {})
            slots.update((slot, value) for time_s, value in series.points
                         if first <= (slot := round(time_s / grid.step_s)) <= grid.last)
        self._known_to.update({(question.topic, subject): grid.last for subject in asked})
        return answer is not None

    def is_known(self, topic: str, subjects: Sequence[Hashable]) -> bool:
        """Return whether all of these were asked for, whatever came."""
        return self._live or all((topic, subject) in self._known_to for subject in subjects)

    def points(self, figure: str, series_id: Hashable) -> Mapping[int, float]:
        """Return the points by slot; slots that were not measured are missing."""
        return self._points.get((figure, series_id), {})

    def put(self, figure: str, series_id: Hashable, slot: int, value: float) -> None:
        """Set a point that was seen; the grid must fit."""
        self._points.setdefault((figure, series_id), {})[slot] = value

    def grid(self, view: FleetView, now_s: float) -> SlotGrid:
        return SlotGrid.of(view, now_s + view.step_s if self._live else now_s)

    def fit(self, grid: SlotGrid) -> None:
        """Forget what this grid does not have."""
        if grid.step_s != self._grid.step_s or grid.slots > self._grid.slots or len(self) > _MAX_SERIES:
            self._points, self._known_to = {}, {}
        elif grid != self._grid:
            newest = grid.last + _SET_BACK
            self._known_to = {subject: slot for subject, slot in self._known_to.items() if grid.first <= slot <= newest}
            in_grid = {series: {slot: value for slot, value in slots.items() if grid.first <= slot <= newest}
                       for series, slots in self._points.items()}
            self._points = {series: slots for series, slots in in_grid.items() if slots}
        self._grid = grid


def _answer(client: FigureClient, question: PastQuestion, subjects: Sequence[Any], span: tuple[float, float, float],
            ) -> tuple[Sequence[Any], list[Series] | None]:
    """Return those of the ``subjects`` that one question has room for, and its answer; None: no label selects any of
    them. ``span``: begin, end and step. Raises GputopError."""
    figures = question.write(subjects)
    if not any(figures.values()):
        return subjects, None
    try:
        return subjects, client.range(figures, *span)
    except QueryTooLong:
        if len(subjects) == 1:
            raise
    return _answer(client, question, subjects[:len(subjects) // 2], span)
