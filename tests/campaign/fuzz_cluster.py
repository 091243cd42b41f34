"""What the campaign attacks of ``gputop cluster``: the answers of a Prometheus, of squeue, and of nodes by ssh."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gputop.advice.fleet.advise import FleetReport, fleet_advice
from gputop.cluster.collect import Collector, NodesCollector
from gputop.cluster.endpoint import Credentials, parse_endpoint
from gputop.cluster.model import NO_JOB, FleetView
from gputop.cluster.prometheus import Client, Series
from gputop.cluster.slurm import parse_squeue
from gputop.core import codec
from gputop.core.errors import GputopError
from gputop.export.cluster import render
from gputop.telemetry.agents import NodeAnswer, answer_of, read_line
from gputop.text import console
from gputop.tui.cluster import fleet_rows as rows
from tests.campaign.target import Target
from tests.cluster.fleets import LIMITS, NOW, CannedClient
from tests.cluster.squeue_double import SAID, squeue
from tests.cluster.stragglers import LOW, NODE_1, NODE_2, by_label, straggler
from tests.records import replace

_MOST_CPU_S, _MOST_BYTES = 10.0, 150 << 20
_REFRESHES = 5
_VIEW = FleetView(span_s=3600.0, open_jobs=("7", NO_JOB), open_nodes=(("7", "n1"), (NO_JOB, "n2")))


class _Answers(Client):
    """A client to which a server says one document after the other, the last again and again."""

    def __init__(self, answers: list[bytes]) -> None:
        super().__init__(parse_endpoint("http://prom:9090"), Credentials())
        self._answers = itertools.chain(answers, itertools.repeat(answers[-1]))

    def _send(self, method: str, path: str, form: str) -> tuple[int, bytearray]:
        return 200, bytearray(next(self._answers))


class _Nodes:
    """An Ssh that every node answers with one document."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def ask(self, nodes: Sequence[str]) -> None:
        self._nodes = list(nodes)

    def take(self, most_s: float) -> tuple[str, NodeAnswer, int] | None:
        return (self._nodes.pop(), read_line(io.BytesIO(self._answer), NodeAnswer), len(self._answer)) if (
            self._nodes) else None

    def close(self) -> None:
        """There is nothing to end."""


class _Noted(CannedClient):
    """Notes what it answers as a Prometheus would have written it."""

    def __init__(self, of: CannedClient) -> None:
        self.__dict__.update(of.__dict__)
        self.answers: list[dict[str, Any]] = []

    def instant(self, query: str) -> list[Series]:
        return self._note("vector", super().instant(query))

    def range(self, query: str, begin_s: float, end_s: float, step_s: float) -> list[Series]:
        return self._note("matrix", super().range(query, begin_s, end_s, step_s))

    def metric_names(self) -> frozenset[str]:
        names = super().metric_names()
        self.answers.append({"status": "success", "data": sorted(names)})
        return names

    def _note(self, kind: str, found: list[Series]) -> list[Series]:
        points = ([[at_s, str(value)] for at_s, value in series.points] for series in found)
        result = [{"metric": dict(series.labels), **({"value": own[0]} if kind == "vector" else {"values": own})}
                  for series, own in zip(found, points, strict=True)]
        self.answers.append({"status": "success", "data": {"resultType": kind, "result": result}})
        return found


def _looks(collector: Collector) -> None:
    """Some refreshes, each judged, written in every form, and drawn."""
    for number in range(_REFRESHES):
        fleet = collector.refresh(_VIEW)
        report = FleetReport(fleet, *fleet_advice(fleet))
        if number % 2:
            continue
        for form in ("text", "json", "html"):
            console.write_document(render(report, form))
        state = rows.State(_VIEW, report, open_jobs={*_VIEW.open_jobs}, open_nodes={*_VIEW.open_nodes})
        lines = [*rows.header(state, 100), rows.heading(state, 100)]
        for row in state.rows()[:50]:
            lines += [rows.line(state, row, 100, True), *rows.details(state, row, 100, 12)]
        assert all(text.isprintable() for line in lines for text, _ in line)


def _no_slurm() -> bytes:
    raise FileNotFoundError


def _prometheus(slurm: Callable[[], bytes]) -> Callable[[Path, bytes], None]:
    def run(_: Path, data: bytes) -> None:
        try:
            answers = [json.dumps(document).encode() for document in json.loads(data)]
        except (ValueError, RecursionError, TypeError):
            answers = [data]
        _looks(Collector(_Answers(answers or [data]), LIMITS, slurm, clock=lambda: NOW))

    return run


def _noted(of: CannedClient, slurm: Callable[[], bytes]) -> bytes:
    client = _Noted(of)
    _looks(Collector(client, LIMITS, slurm, clock=lambda: NOW))  # type: ignore[arg-type]
    return json.dumps(client.answers).encode()


def _by_node() -> CannedClient:
    h100 = {**NODE_1, "model": "H100"}
    return straggler(activity=[(NODE_1, 0.8), (NODE_2, 0.9)], gpus=[(NODE_1, 8), (NODE_2, 8)],
                     lowest=[(NODE_1, 0.1), (NODE_2, 0.9)], median=[(NODE_1, 0.91)], low_gpu=[(LOW, 0.1)],
                     low_clock=[({**LOW, **h100}, 1.1e9)], clock_median=[(h100, 2e9)], clock_mad=[(h100, 1e7)],
                     clocks=[(h100, 8)], low_clocks=[(h100, 1)])


def _squeue(_: Path, data: bytes) -> None:
    parse_squeue(data)
    _looks(Collector(_by_node(), LIMITS, lambda: data, clock=lambda: NOW))  # type: ignore[arg-type]


def _nodes(_: Path, data: bytes) -> None:
    """Two nodes of that snapshot, which hold the same GPUs, with Slurm's jobs and without."""
    for slurm in (None, squeue):
        clock = itertools.count(NOW, 15.0)
        collector = NodesCollector(["n1", "n2"], _Nodes(data), LIMITS, slurm, 0.0,  # type: ignore[arg-type]
                                   lambda clock=clock: float(next(clock)), 60.0)
        try:
            _looks(collector)  # type: ignore[arg-type]
        finally:
            collector.close()


def _snapshot_of_a_node(_: Path) -> list[bytes]:
    from tests.fakes import StillSession, node_sample

    history = StillSession(20, gpus=2).feed.history
    return [codec.encode(answer_of(node_sample(20, gpus=2), history, 5.0)) + b"\n"]


def _raw(_: Path, data: bytes) -> None:
    """One answer of any bytes, packed or not: what the client itself makes of it."""
    client = _Answers([data])
    for kind in (client.instant, lambda query: client.range(query, NOW - 3600, NOW, 60.0)):
        try:
            for labels, points in kind("up"):
                assert all(text.isprintable() for text in labels.values()) and points
        except GputopError as error:
            console.print_error(error)


TARGETS = tuple(replace(target, most_cpu_s=_MOST_CPU_S, most_bytes=_MOST_BYTES) for target in (
    Target("prometheus", "json", lambda _: [_noted(by_label(), _no_slurm)], _prometheus(_no_slurm), 2),
    Target("prometheus-slurm", "json", lambda _: [_noted(_by_node(), squeue)], _prometheus(squeue), 2),
    Target("prometheus-raw", "json", lambda _: [json.dumps(own).encode() for own in json.loads(
        _noted(by_label(), _no_slurm))[2:6]], _raw),
    Target("squeue", "json", lambda _: [SAID.read_bytes(), squeue(), squeue(
        nodes="n[1-2],m3", gres_detail=["gpu:1"] * 3)], _squeue, 2),
    Target("nodes", "json", _snapshot_of_a_node, _nodes, 2),
))
