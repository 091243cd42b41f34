"""A Prometheus of canned answers, and jobs to judge."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any

from gputop.cluster.endpoint import parse_endpoint
from gputop.cluster.model import Fleet, FleetLimits, FleetView, Gpu, History, Job, Node
from gputop.cluster.prometheus import QueryCost, Series
from gputop.cluster.queries import LEVELS
from gputop.core.errors import GputopError
from gputop.sources.exporters import HOST_LABELS
from tests.records import replace

NOW = 1_800_000_000.0
LIMITS = FleetLimits(0.01, 900.0, 0.15, 0.2, 0.85)
STEP_S = 120.0
Rows = Sequence[tuple[Mapping[str, str], float]]


class CannedClient:
    """Answers a figure of a query with its rows; ``fails`` are words of queries that are refused. The past of a GPU is
    that of ``low_gpu``, unless there are rows for it."""

    def __init__(self, names: Mapping[str, int], labels: Sequence[str] = (), clusters: Sequence[str] = (),
                 **arms: Rows) -> None:
        self.endpoint = parse_endpoint("http://prom:9090")
        self.cost, self.warnings = QueryCost(), []
        self.queries: list[str] = []
        self.arms = dict(arms)
        self.fails: dict[str, GputopError] = {}
        self.history: Callable[[Mapping[str, str], float], float] = lambda labels, at_s: 0.9
        self._names, self._labels, self._clusters = dict(names), labels, clusters

    def instant(self, query: str) -> list[Series]:
        self._count(query)
        if query.startswith("count by (__name__, job)"):
            return [Series({"__name__": name, "job": "dcgm"}, [(NOW, float(n))]) for name, n in self._names.items()
                    if name in query]
        if '"figure", "scrapes"' in query:
            clusters = [Series({"figure": "cluster", "cluster": name}, [(NOW, 1.0)]) for name in self._clusters]
            return [*clusters, *(Series({"figure": label}, [(NOW, 1.0)]) for label in (*self._labels, *HOST_LABELS))]
        arms = {"gpus_before": self.arms.get("targets", ()), **self.arms, **self._counts()}
        return [Series({**labels, "figure": figure}, [(NOW, value)]) for figure in self._figures(query)
                for labels, value in arms.get(figure, ())]

    def metric_names(self) -> frozenset[str]:
        return frozenset(self._names)

    def _counts(self) -> dict[str, Rows]:
        """The arms "gpus", "lowest" and "idle_gpus" as the server counts them: how many GPUs have which value."""
        values = {name: {str(dict(labels)): value for labels, value in rows} for name, rows in self.arms.items()}
        levels, idle, seen = [], [], []
        for labels, gpus in self.arms.get("gpus", ()):
            group = str(dict(labels))
            activity = values.get("activity", {}).get(group, 0.0)
            still = values.get("idle_gpus", {}).get(group, 0.0)
            low = values.get("lowest", {}).get(group, activity)
            for level, count in ((0, still), (ceil((low - LIMITS.idle) * LEVELS), 1),
                                 (ceil((activity - LIMITS.idle) * LEVELS), gpus - still - 1)):
                if count > 0:
                    levels.append(({**labels, "value": str(max(0, level))}, count))
            idle += [({**labels, "value": "1"}, still), ({**labels, "value": "0"}, gpus - still)]
            seen.append((labels, gpus))
        return {"levels": levels, "idle": [row for row in idle if row[1]], "seen": seen}

    def range(self, query: str, begin_s: float, end_s: float, step_s: float) -> list[Series]:
        self._count(query)
        times = [begin_s + i * step_s for i in range(round((end_s - begin_s) / step_s) + 1)]
        rows = {"gpu_activity": self.arms.get("low_gpu", ()), **self.arms, "idle": ()}
        return [Series({**labels, "figure": figure}, [(t, self.history(labels, t)) for t in times])
                for figure in self._figures(query) for labels, _ in rows.get(figure, ())]

    @staticmethod
    def _figures(query: str) -> list[str]:
        return re.findall(r'"figure", "(\w+)"', query)

    def _count(self, query: str) -> None:
        self.queries.append(query)
        self.cost.queries += 1
        for word, error in self.fails.items():
            if word in query:
                raise error


class StillAsker:
    """Notes what is wanted."""

    def __init__(self) -> None:
        self.wanted: list[FleetView] = []
        self.listener: Callable[[Any], None] = lambda _: None

    def listen(self, listener: Callable[[Any], None]) -> None:
        self.listener = listener

    def want(self, view: FleetView) -> None:
        self.wanted.append(view)


def past(*levels: tuple[float, float | None]) -> History:
    """(minutes, level) one after the other, up to now."""
    values = [level for minutes, level in levels for _ in range(round(minutes * 60 / STEP_S))]
    return History(NOW - (len(values) - 1) * STEP_S, STEP_S, tuple(values))


def job(**changes: object) -> Job:
    """Four nodes of eight GPUs, healthy."""
    healthy = Job(gpus=32, activity=0.9, kind="sm_active", memory_used_bytes=8e10, memory_total_bytes=1e11, id="7",
                  label="hpc_job", nodes=4, idle_gpus=0, median=0.9, mad=0.02, node_median=0.9,
                  history=past((180, 0.9)), idle_history=past((180, 0.0)))
    own = replace(healthy, **changes)  # type: ignore[arg-type]
    if own.history is None:
        return replace(own, idle_history=None)
    if "idle_history" not in changes:
        idle = (None if value is None else float(own.gpus * (value <= LIMITS.idle)) for value in own.history.values)
        own = replace(own, idle_history=replace(own.history, values=tuple(idle)))
    if own.idle_history is None:
        return own
    busy = (None if value is None else own.gpus - value for value in own.idle_history.values)
    return replace(own, idle=replace(own.idle, busy_history=replace(own.idle_history, values=tuple(busy))))


def gpu(activity: float, name: str = "n4:3", history: History | None = None, **figures: float) -> Gpu:
    node, _, number = name.partition(":")
    return Gpu(node=node, gpu=number, uuid=f"GPU-{name}", activity=activity, kind="sm_active", figures=figures,
               history=history)


def node(activity: float, name: str = "n2") -> Node:
    return Node(gpus=8, activity=activity, name=name)


def fleet(*jobs: Job) -> Fleet:
    return Fleet(time_s=NOW, figures_s=NOW, source="http://prom:9090 (dcgm-exporter)", jobs=jobs, kinds=("sm_active",),
                 gpus=sum(own.gpus for own in jobs))
