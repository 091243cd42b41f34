"""Questions to a server that limits the length of a query."""

from __future__ import annotations

import re

import pytest

from gputop.cluster.collect import QUERIES, Collector, complete_fleet
from gputop.cluster.figure_client import FigureClient
from gputop.cluster.model import FleetView
from gputop.cluster.prometheus import QueryTooLong, QueryTooSlow, Series
from tests.cluster.fleets import LIMITS, NOW, CannedClient
from tests.cluster.stragglers import DCGM, JOB, LOW, NODE_1, NODE_2, by_label

FIGURES = {name: f'{name}{{long="{"x" * 100}"}}' for name in ("a", "b", "c", "d")}


class Limited(CannedClient):
    """Refuses queries of more than ``most`` bytes, and names ``said`` as its limit."""

    most, said = 10**6, 0

    def _count(self, query: str) -> None:
        super()._count(query)
        if len(query.encode()) > self.most and '"scrapes"' not in query:
            raise QueryTooLong("too long", self.said or None)

    def taken(self) -> list[str]:
        return [query for query in self.queries if len(query.encode()) <= self.most or '"scrapes"' in query]


def limited(most: int, said: int) -> Limited:
    client = Limited({}, **{name: [({}, 1.0)] for name in FIGURES})
    client.most, client.said = most, said
    return client


def names(answer: list[Series]) -> list[str]:
    return [series.labels["figure"] for series in answer]


@pytest.mark.parametrize(("said", "asked"), [(400, 1 + 2), (0, 1 + 2), (10**9, 1 + 2), (399, 1 + 2), (1, 1)])
def test_a_refused_question_becomes_several_queries_and_the_limit_is_remembered(said: int, asked: int) -> None:
    client = limited(400, said)
    figures = FigureClient(client)  # type: ignore[arg-type]
    assert names(figures.instant(FIGURES)) == (list(FIGURES) if said != 1 else [])
    assert len(client.queries) == asked and figures.left_out == (set() if said != 1 else set(FIGURES))
    client.queries.clear()
    figures.instant(FIGURES)
    assert len(client.queries) == asked - 1  # none is refused again


def test_a_figure_without_room_is_left_out_of_the_present_and_refused_of_the_past() -> None:
    client = limited(400, 400)
    figures = FigureClient(client)  # type: ignore[arg-type]
    wide = {**FIGURES, "b": "x" * 500}
    assert names(figures.instant(wide)) == ["a", "c", "d"] and figures.left_out == {"b"}
    sent = len(client.queries)
    with pytest.raises(QueryTooLong, match="at most 400 bytes, but b would exceed"):
        figures.range(wide, NOW - 60, NOW, 60.0)
    assert len(client.queries) == sent


def test_a_server_that_refuses_everything_is_not_asked_for_ever() -> None:
    client = limited(-1, 0)
    figures = FigureClient(client)  # type: ignore[arg-type]
    assert figures.instant(FIGURES) == [] and figures.left_out == set(FIGURES)
    assert len(client.queries) <= 5


def cluster() -> Limited:
    low = {**JOB, **LOW}
    return Limited({**DCGM, "DCGM_FI_DEV_SM_CLOCK": 1600}, ["hpc_job"], activity=[(JOB, 0.9), ({**low}, 0.5)],
                   gpus=[(JOB, 32)], nodes=[(JOB, 4)], lowest=[(JOB, 0.5)], median=[(JOB, 0.9)], mad=[(JOB, 0.01)],
                   low_gpu=[(low, 0.5)], power_w=[(JOB, 2e4)], sm_clock_hz=[(low, 1.1e9)],
                   node_activity=[({**JOB, **NODE_1}, 0.8), ({**JOB, **NODE_2}, 0.9)])


def test_the_fleet_is_the_same_in_shorter_queries_and_says_what_they_cost() -> None:
    view = FleetView(open_jobs=("7",), open_nodes=(("7", "n1"),))
    whole = complete_fleet(Collector(cluster(), LIMITS, clock=lambda: NOW), view)  # type: ignore[arg-type]
    client = cluster()
    client.most = client.said = 1500
    collector = Collector(client, LIMITS, clock=lambda: NOW)  # type: ignore[arg-type]
    fleet = complete_fleet(collector, view)
    assert fleet.jobs == whole.jobs and fleet.gpus == whole.gpus and fleet.queries > whole.queries
    refused = len(client.queries) - len(client.taken())
    assert refused == 1  # the limit is remembered
    again = collector.refresh(view)
    (problem,) = (p for p in again.problems if "bytes" in p.message)
    assert again.queries > QUERIES and re.search(
        rf"at most 1,500 bytes, so this refresh sent {again.queries} queries instead of at most 4$", problem.message)
    assert "-search.maxQueryLen" in problem.fix
    assert not any("bytes" in p.message for p in whole.problems)


def test_a_figure_without_room_is_named() -> None:
    client = cluster()
    collector = Collector(client, LIMITS, clock=lambda: NOW)  # type: ignore[arg-type]
    collector.refresh(FleetView())
    client.most = client.said = 700
    fleet = collector.refresh(FleetView())
    (problem,) = (p for p in fleet.problems if "did not fit" in p.message)
    assert re.search(r"sent \d+ queries instead of at most 4; low_clock did not fit$", problem.message)
    assert fleet.jobs[0].activity is not None


def test_what_comes_in_time_is_shown_and_the_rest_is_named() -> None:
    client = by_label()
    client.fails['"power_w"'] = QueryTooSlow("did not answer within 20 s")
    collector = Collector(client, LIMITS, clock=lambda: NOW)  # type: ignore[arg-type]
    fleet = collector.refresh(FleetView())
    assert fleet.gpus == 56 and {job.id: job.activity for job in fleet.jobs} == {"7": 0.9, "8": 0.5}
    assert any("did not answer in time about power_w" in problem.message for problem in fleet.problems)
    client.fails['"activity"'] = QueryTooSlow("did not answer within 20 s")
    assert any("within 20 s" in problem.message for problem in collector.refresh(FleetView()).problems)
