"""Means that a Prometheus has of single nodes: how much their GPUs work, and their power."""

from __future__ import annotations

from statistics import fmean

from gputop.cluster.available_metrics import AvailableMetrics, find_metrics
from gputop.cluster.figure_client import FigureClient
from gputop.cluster.gpu_values import GpuValues, ReadingWay
from gputop.cluster.prometheus import Client
from gputop.cluster.promql import FIGURE, grouped
from gputop.cluster.slurm_nodes import short_host
from gputop.sources.exporters import CLUSTER_LABEL, NODE_LABELS, node_of


def node_means(client: Client, window: str) -> dict[str, dict[str, float]]:
    """Return by short name of a node the means over its GPUs in a ``window`` ("2m"): of its activity, by the names of
    :data:`gputop.sources.exporters.ACTIVITY`, and of ``power_w``. By three queries. A name that several nodes have is
    missing.

    Raises GputopError.
    """
    metrics = find_metrics(client)
    common_kind = metrics.common_kind()
    values: dict[str, dict[str, list[float]]] = {}
    nodes: dict[str, set[str]] = {}
    for series in FigureClient(client).instant(_figures(metrics, window)):
        node, figure = node_of(series.labels), series.labels.get(FIGURE, "")
        figure = series.labels.get("kind", common_kind) if figure == "activity" else figure
        values.setdefault(node, {}).setdefault(figure, []).append(series.value)
        for label in NODE_LABELS:
            if series.labels.get(label):
                nodes.setdefault(short_host(series.labels[label]), set()).add(node)
    return {name: {figure: fmean(each) for figure, each in values[next(iter(of_name))].items()}
            for name, of_name in nodes.items() if len(of_name) == 1}


def _figures(metrics: AvailableMetrics, window: str) -> dict[str, str]:
    """Return the queries for each node's mean activity of its GPUs, and their mean power."""
    node = tuple(dict.fromkeys((*metrics.node_labels, *((CLUSTER_LABEL,) if metrics.clusters else ()))))
    kind = () if metrics.common_kind() else ("kind",)
    values = GpuValues(metrics)
    power = values.figure("power_w", ReadingWay(window=window, instances=False))
    return {"activity": grouped("avg", (*node, *kind), values.activity(ReadingWay(window=window))),
            "power_w": power and grouped("avg", node, power)}
