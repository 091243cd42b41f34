"""Asks a server for figures by name: by one query, or by several of a server that limits the length of a query.

Prometheus takes queries of any length; VictoriaMetrics takes 16,384 bytes (``-search.maxQueryLen``), which the figures
of gputop's own exporter exceed.

1. Ask for all figures by one query.
2. If the server refuses it as too long, note the limit that the refusal names, or half of the length that it refused,
   and ask again by as few queries as have room for all figures. The limit holds for all further questions.
3. A figure that has no room alone is left out of the present figures and noted. A question about the past raises
   instead: it can be asked for fewer subjects (:mod:`gputop.cluster.series_store`).
4. If the answer about the present does not come in time, ask for each figure alone, the most wanted first, until one of
   them does not come in time either: what has come is shown, and the rest is noted. For some minutes all questions are
   asked so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gputop.cluster.prometheus import Client, QueryTooLong, QueryTooSlow, Series
from gputop.cluster.promql import queries_by_figure

_ATTEMPTS = 5  # of a question: each halves the length of a server that does not name its limit, or not the truth

Figures = Mapping[str, str]


class FigureClient:
    """Asks one server, and keeps how long a query it takes. From one thread."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.max_bytes: int | None = None  # of a query; None: none was too long
        self.left_out: set[str] = set()  # figures without room; whoever reports them clears it
        self.too_slow: set[str] = set()  # figures that did not come in time; likewise
        self.alone = False  # ask for each present figure alone

    def instant(self, figures: Figures) -> list[Series]:
        """The present figures, as far as they have room and come in time. Raises GputopError."""
        if not self.alone:
            try:
                return self._ask(figures, self._client.instant, leave_out=True)
            except QueryTooSlow:
                self.alone = True
        series: list[Series] = []
        wanted = [name for name, value in figures.items() if value]
        for i, name in enumerate(wanted):
            try:
                series += self._ask({name: figures[name]}, self._client.instant, leave_out=True)
            except QueryTooSlow:
                if not series:
                    raise
                self.too_slow.update(wanted[i:])
                break
        return series

    def range(self, figures: Figures, begin_s: float, end_s: float, step_s: float) -> list[Series]:
        """Answer as :meth:`Client.range` does. Raises GputopError, of which QueryTooLong if a figure has no room."""
        return self._ask(figures, lambda query: self._client.range(query, begin_s, end_s, step_s), leave_out=False)

    def _ask(self, figures: Figures, send: Callable[[str], list[Series]], *, leave_out: bool) -> list[Series]:
        for attempt in range(_ATTEMPTS):
            queries, too_long = queries_by_figure(figures, self.max_bytes)
            if too_long and not leave_out:
                raise QueryTooLong(f"the server accepts queries of at most {self.max_bytes:,} bytes, but "
                                   f"{', '.join(too_long)} would exceed this", self.max_bytes)
            try:
                series = [one for query in queries for one in self._sent(query, send)]
            except QueryTooLong:
                if attempt == _ATTEMPTS - 1:
                    raise
            else:
                self.left_out.update(too_long)
                return series
        raise AssertionError("the last attempt returns or raises")

    def _sent(self, query: str, send: Callable[[str], list[Series]]) -> list[Series]:
        try:
            return send(query)
        except QueryTooLong as refusal:
            sent = len(query.encode())
            named = refusal.max_bytes or 0
            self.max_bytes = named if 0 < named < sent else sent // 2
            raise
