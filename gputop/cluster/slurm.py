"""The jobs that run, as ``squeue --json`` tells them (Slurm 22.05 and newer), and their nodes. Parsing is pure.

Releases differ: a state is a text, from 23.11 on a list; numbers are numbers, from 23.02 on objects with "set". Jobs
that have ended stay in the answer for some minutes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Set
from typing import Any

from msgspec import Struct

from gputop.core.errors import GputopError
from gputop.core.findings import Problem
from gputop.profiler.addresses import short_name
from gputop.profiler.workers import MAX_HOSTS, expand_hostlist
from gputop.sources.exporters import CLUSTER_LABEL, NODE_LABELS
from gputop.text.units import printable

MAX_BYTES = 64 << 20  # 3.5 kB a job
TIMEOUT_S = 10.0
_PERIOD_S = 30.0
_PER_ASKING = 20.0  # times as long as asking took: at most 5% of the time
COMMAND = ["squeue", "--json"]
_MAX_JOBS = 20_000
_NAME_CHARS = 100
_MAX_NUMBER = 4e9  # of jobs, and as Unix time the year 2096
_INDICES = re.compile(r"\([^)]*\)")
_GRES = re.compile(r"gpu(?::[^:]+)?:(\d{1,5})")


class SlurmJob(Struct, frozen=True):
    """A job that runs. ``gpus``: how many it holds on each of its nodes."""

    id: str  # as squeue prints it
    number: str  # as labels and cgroups have it
    name: str
    user: str
    start_s: float | None
    gpus: Mapping[str, int]
    cluster: str = ""  # Slurm's own name of it


def parse_squeue(text: bytes) -> tuple[SlurmJob, ...]:
    """The running jobs that hold GPUs; raises GputopError where it is no answer of squeue."""
    from gputop.core import codec

    try:
        document = codec.parse(text)
        jobs = document["jobs"]
        if not isinstance(jobs, list):
            raise TypeError
    except (ValueError, TypeError, KeyError):
        raise GputopError("squeue --json returned an unknown format",
                          "JSON output needs Slurm 22.05 or newer.") from None
    parsed = (_job(job) for job in jobs[:_MAX_JOBS] if isinstance(job, dict))
    return tuple(job for job in parsed if job is not None)


def _job(job: Mapping[str, Any]) -> SlurmJob | None:
    states = job.get("job_state")
    number = _number(job.get("job_id"))
    if "RUNNING" not in (states if isinstance(states, list) else [states]) or number is None:
        return None
    details = job.get("gres_detail")
    if not isinstance(details, list):
        return None
    try:
        nodes = expand_hostlist(str(job.get("nodes") or ""), min(len(details), MAX_HOSTS))
    except GputopError:
        return None
    if len(details) != len(nodes):
        return None
    held = {node: count for node, text in zip(nodes, details, strict=True) if (count := gpu_count(str(text)))}
    if not held:
        return None
    start_s = _number(job.get("start_time"))
    return SlurmJob(_id(job, int(number)), f"{number:.0f}", _text(job.get("name")), _text(job.get("user_name")),
                    start_s or None, held, _text(job.get("cluster")))


def _id(job: Mapping[str, Any], number: int) -> str:
    """Return the id as squeue prints it: a task of an array by the array's number, a part of a heterogeneous job by the
    first's."""
    for whole, part, mark in (("array_job_id", "array_task_id", "_"), ("het_job_id", "het_job_offset", "+")):
        first, index = _number(job.get(whole)), _number(job.get(part))
        if first and index is not None:
            return f"{first:.0f}{mark}{index:.0f}"
    return str(number)


def gpu_count(text: str) -> int:
    """GPUs in what a job holds on a node: ``gpu:a100:2(IDX:0,2),gpu:v100:1(IDX:4),mps:10`` → 3."""
    parts = (_GRES.fullmatch(part) for part in _INDICES.sub("", text).split(","))
    return sum(int(part[1]) for part in parts if part)


def _number(value: Any) -> float | None:
    if isinstance(value, dict):
        value = value.get("number") if value.get("set") else None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < _MAX_NUMBER else None


def _text(value: Any) -> str:
    return printable(str(value or ""))[:_NAME_CHARS]


class JobQueue:
    """Jobs of Slurm and what it says of them, asked every half a minute, or less often where it takes long.
    ``problem``: why its last answer could not be used."""

    def __init__(self, squeue: Callable[[], bytes] | None) -> None:
        """``squeue`` prints the jobs as JSON; it raises GputopError, or OSError where there is no Slurm. None: do not
        ask."""
        self.jobs: tuple[SlurmJob, ...] = ()
        self.problem: Problem | None = None
        self._squeue = squeue
        self._asked_s = self._due_s = -1e9

    @property
    def is_there(self) -> bool:
        """Return whether there is a Slurm, as far as is known."""
        return self._squeue is not None

    def update(self, now_s: float) -> None:
        """Ask, if it is time to. Blocks."""
        # A clock that was set back does not put it off.
        if self._squeue is None or self._asked_s - _PERIOD_S <= now_s < self._due_s:
            return
        self._asked_s = now_s
        began_s, self.problem = time.monotonic(), None
        try:
            self.jobs = parse_squeue(self._squeue())
        except FileNotFoundError:
            self._squeue = None
        except GputopError as error:
            self.problem = Problem(error.message, error.fix or "Run squeue manually. Without squeue, a job's user, "
                                                               "name and age are unknown.")
        except OSError as error:
            self.problem = Problem(f"cannot start squeue: {error.strerror or error}")
        # A controller that is down lets squeue wait, and the figures of the GPUs with it.
        self._due_s = now_s + max(_PERIOD_S, _PER_ASKING * (time.monotonic() - began_s))


class SlurmNodes:
    """The nodes of a Prometheus by the names that Slurm may have for them.

    An exporter may name a node with its domain, by an address or with a port, Slurm mostly by its short name.
    """

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
