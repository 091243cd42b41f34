"""Nodes of Slurm's jobs among those that a Prometheus names. Pure.

An exporter may name a node with its domain, by an address or with a port, Slurm mostly by its short name: each node is
known by all of its names, without domain and port, in small letters; where there are several clusters, in its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from gputop.cluster.slurm import SlurmJob
from gputop.profiler.addresses import short_name
from gputop.sources.exporters import CLUSTER_LABEL, NODE_LABELS


class SlurmNodes:
    """The nodes of a Prometheus by the names that Slurm may have for them."""

    def __init__(self, labels_of: Mapping[str, Mapping[str, str]], clusters: Set[str]) -> None:
        """``labels_of``: by name of a node, "cluster/node" where there are several ``clusters``, its labels."""
        self._clusters = clusters
        self._names = {node: self._names_of(node, labels) for node, labels in labels_of.items()}
        self._by_name = {name: node for node, names in self._names.items() for name in names}

    def gpus_of(self, job: SlurmJob) -> dict[str, int]:
        """The nodes of a job that are known here, and how many GPUs it holds on each."""
        return {self._by_name[name]: gpus for node, gpus in job.gpus.items()
                if (name := self._name(job, node)) in self._by_name}

    def held_by(self, jobs: tuple[SlurmJob, ...]) -> list[str]:
        """The nodes that any of these jobs holds GPUs of."""
        held = {self._name(job, node) for job in jobs for node in job.gpus}
        return [node for node, names in self._names.items() if not held.isdisjoint(names)]

    def _name(self, job: SlurmJob, node: str) -> str:
        return f"{job.cluster}/{short_name(node)}" if self._clusters else short_name(node)

    def _names_of(self, node: str, labels: Mapping[str, str]) -> set[str]:
        cluster = f"{labels.get(CLUSTER_LABEL, '')}/" if self._clusters else ""
        names = {labels[label] for label in NODE_LABELS if labels.get(label)} | {node.removeprefix(cluster)}
        return {cluster + short_host(name) for name in names}


def short_host(name: str) -> str:
    """The short name of a node in a label, which may end in a port."""
    host, _, port = name.rpartition(":")
    return short_name(host if port.isdecimal() else name)
