"""Asks a Prometheus for a fleet, again and again: at most four queries each time, and only for what has changed.

Each refresh asks for the present figures of all groups and for what differs from its peers. The other queries are for
what is on the screen and for the past; where more is wanted than two of them bring, the next refresh brings the rest.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple, Protocol

from gputop.cluster import slurm
from gputop.cluster.model import (
    NO_JOB,
    Fleet,
    Gpu,
    Group,
    History,
    Job,
    LowClock,
    Mapped,
    Node,
    Problem,
    fields_of,
    less_active,
    together,
    upper_median,
)
from gputop.cluster.prometheus import Client, Series
from gputop.cluster.promql import COMPARED, WHAT_IS_THERE, Found, Queries, matchers, which_labels
from gputop.cluster.schemas import (
    ACTIVITY,
    CLUSTER_LABEL,
    JOB_LABELS,
    NODE_LABELS,
    SCHEMAS,
    UUID_LABELS,
    gpu_of,
    job_of,
    node_of,
)
from gputop.core.errors import EXIT_NO_DATA, GputopError
from gputop.text.units import seconds

QUERIES = 4  # of a refresh, at most
REDISCOVER_S = 600.0
_SKEW_S = 60.0  # between the clocks: below it, it may be the time that an answer took
_GROUPS_AT_ONCE = 60  # whose history is asked for at once
_LOW_GPUS = 12  # that are looked at
_PEER_NODES = 32  # of a job, that a node of it is compared with
_MAX_GPUS, _MAX_ON_NODE = 10**7, 1000  # that are counted, whatever a server says
_MAX_PASTS = 100_000  # that are kept: a server may name other groups each time
_DIGITS = re.compile(r"\d+$")

_NO_JOBS = Problem("no job is known: the metrics have no job label, and there is no squeue here",
                   "Label them (dcgm-exporter --hpc-job-mapping-dir, or gputop export on the nodes), or start gputop "
                   "where squeue runs; from there Prometheus can be reached as ssh://LOGIN/http://…, too.")

Key = tuple[str, str]  # of a group: its label and value; of a node: "" and its name


class Limits(NamedTuple):
    """What is asked for: GPUs that have not passed the activity ``idle`` for ``idle_s``, and GPUs whose activity is
    ``below`` the median by so much; and those more active than ``busy`` whose SM clock is below ``clock`` of the
    median. The rules decide."""

    idle: float
    idle_s: float
    below: float
    busy: float
    clock: float


@dataclass(frozen=True, slots=True)
class View:
    """What somebody looks at. ``jobs``: those whose history is wanted first; none: all."""

    span_s: float = 3 * 3600.0
    step_s: float = 120.0
    jobs: tuple[str, ...] = ()
    open_jobs: tuple[str, ...] = ()
    open_nodes: tuple[tuple[str, str], ...] = ()  # job, node


class FleetCollector(Protocol):
    """What can be asked for a fleet, again and again; from one thread."""

    settled: bool  # whether nothing more is wanted: the next refresh can wait

    def refresh(self, view: View) -> Fleet:
        """The fleet now. Raises GputopError only before the first answer."""
        ...


def find_metrics(client: Client) -> tuple[Queries, set[str], bool]:
    """The queries for the metrics that a Prometheus has, by two of them; its clusters, where it has several; and
    whether what it has is simulated. Raises GputopError."""
    names: dict[str, int] = {}
    scrape_jobs: dict[str, None] = {}
    known = {name.name for schema in SCHEMAS for own in schema.figures.values() for name in own}
    known |= {schema.jobs for schema in SCHEMAS}
    for series in client.instant(WHAT_IS_THERE):
        name = series.labels.get("__name__", "")
        if name in known and series.value >= 1:
            names[name] = names.get(name, 0) + int(series.value)
            scrape_jobs[series.labels.get("job", "")] = None
    found = Found(names, tuple(job for job in scrape_jobs if job))
    if not found.schemas():
        raise GputopError(
            f"{client.endpoint.url} has no metrics of GPUs",
            "It must scrape dcgm-exporter, gputop export, nvitop-exporter or all-smi on the nodes.", EXIT_NO_DATA)
    there = client.instant(which_labels(found))
    labels = {series.labels.get("figure") for series in there}
    clusters = {s.labels.get(CLUSTER_LABEL, "") for s in there if s.labels.get("figure") == "cluster"}
    if "exported_pod" in labels:
        labels.discard("pod")  # then it is the exporter's own
    queries = Queries(replace(found, job_labels=tuple(label for label in JOB_LABELS if label in labels),
                              clusters=len(clusters) > 1, divided="divided" in labels))
    return queries, clusters if len(clusters) > 1 else set(), "simulated" in labels


def node_means(client: Client, window: str) -> dict[str, dict[str, float]]:
    """By short name of a node the means over its GPUs in a ``window`` ("2m"): of its activity, by the names of
    :data:`ACTIVITY`, and of ``power_w``. By three queries. A name that several nodes have is missing.

    Raises GputopError.
    """
    queries, _, _ = find_metrics(client)
    of_node: dict[str, dict[str, list[float]]] = {}
    names: dict[str, set[str]] = {}
    for series in client.instant(queries.node_means(window)):
        node, figure = node_of(series.labels), series.labels.get("figure", "")
        figure = series.labels.get("kind", queries.kind) if figure == "activity" else figure
        of_node.setdefault(node, {}).setdefault(figure, []).append(series.value)
        for label in NODE_LABELS:
            if series.labels.get(label):
                names.setdefault(_short_name(series.labels[label]), set()).add(node)
    return {name: {figure: fmean(values) for figure, values in of_node[next(iter(nodes))].items()}
            for name, nodes in names.items() if len(nodes) == 1}


def _short_name(name: str) -> str:
    """Of a label that may end in a port."""
    host, _, port = name.rpartition(":")
    return slurm.short_name(host if port.isdecimal() else name)


class Collector:
    """Keeps what is known between refreshes. From one thread."""

    def __init__(self, client: Client, limits: Limits, squeue: Callable[[], bytes] | None = None,
                 clock: Callable[[], float] = time.time) -> None:
        """``squeue`` prints the jobs as JSON; it raises OSError where there is no Slurm."""
        self._client, self._limits, self._clock = client, limits, clock
        self._ahead_s = 0.0  # of Prometheus's clock before this machine's
        self._queries: Queries | None = None
        self._found_s = -1e9
        self._slurm = slurm.JobQueue(squeue)
        self._simulated = False
        self._clusters: set[str] = set()  # by their label; empty where there is only one
        self._asked = dict.fromkeys(("history", "gpus", "nodes", "gpu_history", "node_history"), -1.0)
        self._tried_once: set[str] = set()
        self._round = 0.0
        self._figures: dict[Key, dict[str, Series]] = {}  # by group and figure
        self._kinds: dict[Key, str] = {}
        self._group_labels: dict[Key, Mapping[str, str]] = {}
        self._outliers: list[Series] = []
        self._past: dict[Key, dict[str, dict[int, float]]] = {}  # by group: figure, slot
        self._past_of: dict[Key, int] = {}  # the newest slot that was asked for
        self._gpu_past: dict[str, dict[int, float]] = {}  # by UUID
        self._clock_past: dict[str, dict[int, float]] = {}  # by UUID; of GPUs with a low clock
        self._clocks: dict[tuple[Key, str], dict[str, float]] = {}  # by group and model: how they spread
        self._low_clock_nodes: frozenset[Key] = frozenset()  # all GPUs of which are slower than those of their job
        self._gpus: dict[str, Gpu] = {}  # by UUID
        self._holders: dict[str, set[Key]] = {}  # by UUID: the groups that a GPU is in
        self._peers: dict[Key, dict[str, float]] = {}
        self._nodes: dict[Key, list[Node]] = {}  # of open jobs
        self._node_past: dict[tuple[Key, str], dict[int, float]] = {}
        self._step_s = 0.0
        self._fleet: Fleet | None = None
        self.settled = False  # whether nothing more is wanted

    # -- a refresh ----------------------------------------------------------------------------------

    def refresh(self, view: View) -> Fleet:
        """The fleet now; where something cannot be had, with what went wrong and what is known of before.

        Raises GputopError only before the first answer.
        """
        cost = self._client.cost
        before = replace(cost)
        now_s = self._clock() + self._ahead_s
        problems: list[Problem] = []
        self._slurm.update(now_s)
        figures_s = self._fleet.figures_s if self._fleet is not None else None
        try:
            self._discover(now_s)
            self._ask_figures()
            now_s = self._clock() + self._ahead_s
            figures_s = now_s
            self._ask_more(view, now_s, QUERIES - (cost.queries - before.queries), problems)
        except GputopError as error:
            if self._fleet is None:
                raise
            problems.append(Problem(error.message, error.fix))
            self.settled = True
        if self._ahead_s:
            problems.append(Problem(
                f"the clock of this machine is {seconds(abs(self._ahead_s))} "
                f"{'behind' if self._ahead_s > 0 else 'ahead of'} Prometheus's, whose time is shown here",
                "Synchronize both: chronyc tracking, or timedatectl."))
        problems += [*self._target_problems(),
                     *(Problem(f"Prometheus warns: {text}") for text in self._client.warnings)]
        if self._slurm.problem is not None:
            problems.append(self._slurm.problem)
        elif not self._slurm.is_there and self._queries is not None and not self._queries.by_job:
            problems.append(_NO_JOBS)
        if self._clusters and self._slurm.jobs and not any(map(self._is_here, self._slurm.jobs)):
            problems.append(Problem(
                f"this Prometheus has {len(self._clusters)} clusters, and none of their labels names that of squeue: "
                "its jobs cannot be told from those of the others, so that users, names and ages are missing",
                "Let the label cluster be the ClusterName of Slurm's slurm.conf."))
        jobs, free, free_nodes = self._jobs(view)
        queries = self._queries
        names = ", ".join(s.title for s in queries.schemas) if queries is not None else ""
        self._fleet = Fleet(
            time_s=now_s, source=f"{self._client.endpoint.url} ({names})", jobs=jobs, free=free,
            free_nodes=free_nodes, simulated=self._simulated,
            gpus=sum(_count(own, "all_gpus" if queries is not None and queries.by_job else "gpus") or 0
                     for own in self._figures.values()),
            kinds=tuple(k for k in ACTIVITY if k in self._kinds.values()), figures_s=figures_s,
            problems=tuple(problems), queries=cost.queries - before.queries,
            bytes=cost.bytes - before.bytes, seconds=cost.seconds - before.seconds)
        return self._fleet

    def _discover(self, now_s: float) -> None:
        if self._queries is not None and now_s - self._found_s < REDISCOVER_S:
            return
        self._queries, self._clusters, self._simulated = find_metrics(self._client)
        self._found_s = now_s

    def _ask_figures(self) -> None:
        assert self._queries is not None
        answer = self._client.instant(self._queries.figures(self._limits.idle, self._limits.idle_s))
        if not answer:
            self._found_s = -1e9  # the exporters may have been exchanged for others
            raise GputopError(f"{self._client.endpoint.url} has no metrics of GPUs at this time",
                              "Its page of targets shows whether the exporters answer.")
        if not any(series.labels.get("figure") == "activity" for series in answer):
            self._found_s = -1e9  # a counter was taken off the exporters' list: others may tell of the activity
            raise GputopError(f"{self._client.endpoint.url} has no activity of GPUs any more",
                              "gputop looks again which metrics there are.")
        ahead_s = answer[0].points[-1][0] - self._clock()
        self._ahead_s = ahead_s if abs(ahead_s) > _SKEW_S else 0.0
        before = {key for key in self._figures if key[1]}
        self._figures, self._kinds = {}, {}
        for series in answer:
            key = self._key(series.labels)
            figure = series.labels.get("figure", "")
            own = self._figures.setdefault(key, {})
            kind = series.labels.get("kind", self._queries.kind)
            if figure == "activity":
                self._group_labels[key] = series.labels
                self._kinds[key] = kind if self._kinds.get(key, kind) == kind else "mixed"
            own[f"{figure} {kind}" if series.labels.get("kind") else figure] = series
        if 2 * len(before & set(self._figures)) < len(before):
            self._found_s = -1e9  # so many do not end at once: their label may have another name now

    def _key(self, labels: Mapping[str, str]) -> Key:
        assert self._queries is not None
        return job_of(labels) if self._queries.by_job else ("", node_of(labels))

    def _ask_more(self, view: View, now_s: float, left: int, problems: list[Problem]) -> None:
        """What differs, and what is wanted most of the rest."""
        assert self._queries is not None
        kept: tuple[Sized, ...] = (self._past, self._past_of, self._gpu_past, self._node_past, self._clock_past,
                                   self._peers)
        if view.step_s != self._step_s or sum(map(len, kept)) > _MAX_PASTS:
            self._peers = {}
            self._past, self._past_of, self._gpu_past, self._node_past, self._clock_past = {}, {}, {}, {}, {}
            self._step_s = view.step_s
        asks: dict[str, Callable[[], bool]] = {
            "history": lambda: self._ask_history(view, now_s), "gpus": lambda: self._ask_gpus(view),
            "nodes": lambda: self._ask_nodes(view), "gpu_history": lambda: self._ask_gpu_history(view, now_s),
            "node_history": lambda: self._ask_node_history(view, now_s)}
        known = len(problems)
        self._round += 1
        if left > 0:
            left -= self._tried(self._ask_outliers, problems)
        for name in sorted(asks, key=lambda name: self._asked[name]):
            if left <= 0:
                break
            if asked := self._tried(asks[name], problems):
                self._asked[name] = self._round
                left -= asked
            self._tried_once.add(name)
        failed = len(problems) > known
        self.settled = failed or (self._tried_once >= set(asks)
                                  and all(key in self._past_of for key in self._history_keys(view)))

    def _tried(self, ask: Callable[[], bool], problems: list[Problem]) -> int:
        """Whether something was asked; what goes wrong with one question does not end the others."""
        try:
            return int(ask())
        except GputopError as error:
            problems.append(Problem(error.message, error.fix))
            return 1

    def _ask_outliers(self) -> bool:
        assert self._queries is not None
        keys = [key for key in self._figures if key[1] and self._differs(key)]
        of_these = (self._key_matchers(keys) or [""]) if keys else []
        asked = self._client.instant(self._queries.outliers(
            self._limits.below, of_these, self._limits.busy, self._limits.clock,
            self._key_matchers(sorted(self._low_clock_nodes)) if self._low_clock_nodes else (),
            node_clocks=not self._queries.by_job and any(len(job.gpus) > 1 for job in self._slurm.jobs)))
        empty = set(self._target_names("empty_target"))
        self._outliers = [Series({**s.labels, "figure": _DIGITS.sub("", s.labels.get("figure", ""))}, s.points)
                          for s in asked]
        if self._fleet is not None and not empty.issuperset(self._target_names("empty_target")):
            self._found_s = -1e9  # these may have other metrics than before
        if (low := self._with_low_node_clock()) != self._low_clock_nodes:
            self._low_clock_nodes = low
            self._tried_once -= {"gpus", "gpu_history"}  # their GPUs come with the next look
        return True

    def _with_low_node_clock(self) -> frozenset[Key]:
        """Where groups are nodes: those whose clock is low among the nodes that a job of Slurm holds."""
        clocks = {(self._key(s.labels), s.labels.get("model", "")): s.value for s in self._outliers
                  if s.labels.get("figure") == "node_clock"}
        nodes = self._node_rows() if clocks else {}
        by_name = self._by_short_name(nodes)
        low: set[Key] = set()
        for job in self._slurm.jobs if clocks else ():
            keys = {by_name[short] for node, count in job.gpus.items()
                    if (short := self._slurm_name(job, node)) in by_name and nodes[by_name[short]].gpus <= count}
            for model in {model for key, model in clocks if key in keys}:
                own = {key: clocks[key, model] for key in keys if (key, model) in clocks}
                median = upper_median(own.values()) or 0.0
                low |= {key for key, clock in own.items() if clock < self._limits.clock * median}
        return frozenset(sorted(low)[:_LOW_GPUS])

    def _differs(self, key: Key) -> bool:
        """Whether a GPU of the group is far below its median, so that it is worth a question."""
        own: dict[str, dict[str, float]] = {}
        for series in self._figures[key].values():
            own.setdefault(series.labels.get("kind", ""), {})[series.labels.get("figure", "")] = series.value
        # The median of a group with GPUs that are low is above its mean, by how much is not known here.
        return any(f.get("lowest", 1.0) < f.get("activity", 0.0) - self._limits.below / 2 for f in own.values())

    # -- the past -----------------------------------------------------------------------------------

    def _slots(self, view: View, now_s: float) -> tuple[int, int]:
        last = int(now_s // view.step_s)
        return last - int(view.span_s // view.step_s) + 1, last

    def _ask_history(self, view: View, now_s: float) -> bool:
        assert self._queries is not None
        first, last = self._slots(view, now_s)
        wanted = self._history_keys(view)
        new = [key for key in wanted if key not in self._past_of][:_GROUPS_AT_ONCE]
        old = [key for key in wanted if self._past_of.get(key, last) < last][:_GROUPS_AT_ONCE]
        keys = new or old
        if not keys:
            return False
        begin = first if new else max(first, min(self._past_of[key] for key in old) + 1)
        query = self._queries.history(f"{view.step_s:g}s", self._limits.idle, self._key_matchers(keys))
        for series in self._client.range(query, begin * view.step_s, last * view.step_s, view.step_s):
            key = self._key(series.labels)
            own = self._past.setdefault(key, {}).setdefault(_DIGITS.sub("", series.labels.get("figure", "")), {})
            own.update((round(at_s / view.step_s), value) for at_s, value in series.points)
            for slot in [slot for slot in own if slot < first]:
                del own[slot]
        self._past_of.update(dict.fromkeys(keys, last))
        return True

    def _history_keys(self, view: View) -> list[Key]:
        assert self._queries is not None
        if self._queries.by_job:
            keys = [key for key in self._figures if key[1]]
            return sorted(keys, key=lambda key: key[1] not in view.jobs)
        if NO_JOB in view.open_jobs:
            return list(self._figures)
        held = {self._slurm_name(job, node) for job in self._slurm.jobs for node in job.gpus}
        return [key for key in self._figures if not held.isdisjoint(self._short_names(key))]

    def _is_here(self, job: slurm.SlurmJob) -> bool:
        return not self._clusters or job.cluster in self._clusters

    def _slurm_name(self, job: slurm.SlurmJob, node: str) -> str:
        """As :meth:`_short_names` have it."""
        return f"{job.cluster}/{slurm.short_name(node)}" if self._clusters else slurm.short_name(node)

    def _short_names(self, key: Key) -> set[str]:
        """All that Slurm may call a node."""
        labels = self._group_labels.get(key, {})
        cluster = f"{labels.get(CLUSTER_LABEL, '')}/" if self._clusters else ""
        names = {labels[label] for label in NODE_LABELS if labels.get(label)} | {key[1].removeprefix(cluster)}
        return {cluster + _short_name(name) for name in names}

    def _key_matchers(self, keys: Sequence[Key]) -> list[str]:
        """One matcher for each set of labels; none where all groups are wanted."""
        if len(keys) >= len([key for key in self._figures if key[1]]):
            return []
        values: dict[str, list[str]] = {}
        for key in keys:
            labels = self._group_labels.get(key, {})
            label = key[0] or next((label for label in NODE_LABELS if labels.get(label)), "")
            if label:
                values.setdefault(label, []).append(labels.get(label, key[1]))
        return [matchers({label: set(own)}) for label, own in values.items()]

    # -- single GPUs and nodes --------------------------------------------------------------------------

    def _low_gpus(self) -> list[Series]:
        low = [s for s in self._outliers if s.labels.get("figure") == "low_gpu" and self._key(s.labels)[1]]
        return sorted(low, key=lambda s: s.value)

    def _low_clocks(self) -> list[Series]:
        low = {_uuid(s.labels): s for s in self._outliers
               if s.labels.get("figure") == "low_clock" and self._key(s.labels)[1]}
        return sorted(low.values(), key=lambda s: s.value)[:_LOW_GPUS]

    def _gpu_matchers(self, view: View) -> list[str]:
        return _uuid_matchers([*self._low_gpus()[:_LOW_GPUS], *self._low_clocks()]) + [
            self._node_matcher(node) for _, node in view.open_nodes if self._node_matcher(node)]

    def _node_matcher(self, node: str) -> str:
        for own in (*(n for nodes in self._nodes.values() for n in nodes), *self._node_rows().values()):
            if own.name == node:
                return _node_matchers(own.labels)
        return ""

    def _ask_gpus(self, view: View) -> bool:
        assert self._queries is not None
        own = self._gpu_matchers(view)
        if not own:
            return False
        slow = {self._key(series.labels) for series in self._low_clocks()}
        low = slow | {self._key(series.labels) for series in self._low_gpus()[:_LOW_GPUS]}
        peers, of_clocks = ((self._key_matchers(sorted(self._with_peers(keys))) or [""]) if keys else []
                            for keys in (low, slow))
        gpus: dict[str, Gpu] = {}
        holders: dict[str, set[Key]] = {}
        clocks: dict[tuple[Key, str], dict[str, float]] = {}
        for series in self._client.instant(self._queries.gpus(own, peers, of_clocks, self._limits.busy,
                                                              self._limits.clock)):
            figure = _DIGITS.sub("", series.labels.get("figure", ""))
            if figure in ("clock_median", "clock_mad", "clocks", "low_clocks"):
                model = series.labels.get("model", "")
                clocks.setdefault((self._key(series.labels), model), {})[figure] = series.value
                continue
            if figure.startswith("peer_"):
                self._peers.setdefault(self._key(series.labels), {})[figure.removeprefix("peer_")] = series.value
                continue
            uuid = _uuid(series.labels)
            holders.setdefault(uuid, set()).add(self._key(series.labels))
            gpu = gpus.get(uuid) or Gpu(node=node_of(series.labels), gpu=gpu_of(series.labels), uuid=uuid)
            if figure == "activity":
                gpus[uuid] = replace(gpu, activity=series.value, kind=series.labels.get("kind", self._queries.kind))
            else:
                gpus[uuid] = replace(gpu, figures={**gpu.figures, figure: series.value})
        self._gpus, self._holders, self._clocks = gpus, holders, clocks
        return True

    def _with_peers(self, low: set[Key]) -> set[Key]:
        """The groups of GPUs that are low, and where groups are nodes, the other nodes of their jobs, some of them."""
        assert self._queries is not None
        if self._queries.by_job:
            return low
        by_name = self._by_short_name(self._figures)
        of_jobs = ({by_name[name] for node in job.gpus if (name := self._slurm_name(job, node)) in by_name}
                   for job in self._slurm.jobs)
        others = (sorted(keys - low)[:_PEER_NODES] for keys in of_jobs if not keys.isdisjoint(low))
        return low.union(*others)

    def _by_short_name(self, keys: Iterable[Key]) -> dict[str, Key]:
        """Groups that are nodes, by all that Slurm may call them."""
        return {name: key for key in keys for name in self._short_names(key)}

    def _ask_gpu_history(self, view: View, now_s: float) -> bool:
        assert self._queries is not None
        own = self._gpu_matchers(view)
        first, last = self._slots(view, now_s)
        slow = self._low_clocks()
        wanted = [_uuid(s.labels) for s in [*self._low_gpus()[:_LOW_GPUS], *slow]]
        wanted += [gpu.uuid for gpu in self._gpus.values()]
        missing = [uuid for uuid in wanted if last not in self._gpu_past.get(uuid, {})]
        missing += [uuid for s in slow if (uuid := _uuid(s.labels)) not in self._clock_past]
        if not own or not missing:
            return False
        known = [max(self._gpu_past[uuid], default=first) if uuid in self._gpu_past else first - 1 for uuid in missing]
        without = [s for s in slow if _uuid(s.labels) not in self._clock_past]
        begin = first if without else max(first, min(known) + 1)
        step = f"{view.step_s:g}s"
        query = self._queries.gpu_history(step, own)
        if slow:
            clocks = self._queries.clock_history(step, _uuid_matchers(slow))
            query = f'{query} or label_replace({clocks}, "figure", "clock", "", "")'
        for series in self._client.range(query, begin * view.step_s, last * view.step_s, view.step_s):
            pasts = self._clock_past if series.labels.get("figure") == "clock" else self._gpu_past
            past = pasts.setdefault(_uuid(series.labels), {})
            past.update((round(at_s / view.step_s), value) for at_s, value in series.points)
        for uuid in wanted:  # asked for, if without an answer
            self._gpu_past.setdefault(uuid, {}).setdefault(last, float("nan"))
        for series in slow:
            self._clock_past.setdefault(_uuid(series.labels), {})
        return True

    def _ask_node_history(self, view: View, now_s: float) -> bool:
        assert self._queries is not None
        if not self._queries.by_job:
            return False  # nodes are groups, and have theirs
        first, last = self._slots(view, now_s)
        known = {key: max((max(past) for (own, _), past in self._node_past.items() if own == key), default=0)
                 for key in self._figures if key[1] and key[1] in view.open_jobs}
        keys = [key for key, newest in known.items() if newest < last]
        if not keys:
            return False
        begin = max(first, min(known[key] for key in keys) + 1)
        query = self._queries.node_history(f"{view.step_s:g}s", self._key_matchers(keys) or [""])
        for series in self._client.range(query, begin * view.step_s, last * view.step_s, view.step_s):
            own = self._node_past.setdefault((self._key(series.labels), node_of(series.labels)), {})
            own.update((round(at_s / view.step_s), value) for at_s, value in series.points)
        for key in keys:  # asked for, if without an answer
            self._node_past.setdefault((key, ""), {})[last] = float("nan")
        return True

    def _ask_nodes(self, view: View) -> bool:
        """The nodes of the open jobs, where groups are jobs; else each node is a group."""
        assert self._queries is not None
        open_keys = [key for key in self._figures if key[1] in view.open_jobs and key[1]]
        if not self._queries.by_job or not open_keys:
            return False
        rows: dict[Key, dict[str, dict[str, Series]]] = {key: {} for key in open_keys}
        label_of: dict[tuple[Key, str], Mapping[str, str]] = {}
        for own in self._key_matchers(open_keys) or [""]:
            for series in self._client.instant(self._queries.nodes(own)):
                key, node = self._key(series.labels), node_of(series.labels)
                if key in rows:
                    rows[key].setdefault(node, {})[series.labels.get("figure", "")] = series
                    label_of[key, node] = series.labels
        self._nodes = {key: [self._node(name, figures, label_of[key, name]) for name, figures in sorted(nodes.items())]
                       for key, nodes in rows.items()}
        return True

    # -- what is known, as a fleet ----------------------------------------------------------------------

    def _jobs(self, view: View) -> tuple[tuple[Job, ...], Group | None, tuple[Node, ...]]:
        """The jobs; the GPUs of none, and their nodes."""
        if self._queries is None:
            return (), None, ()
        if self._queries.by_job:
            jobs = [self._job_of_label(key, view) for key in self._figures if key[1]]
            free = self._group(self._figures.get(("", ""), {}), "")
            return tuple(jobs), free if free.gpus else None, ()
        nodes = self._node_rows()
        held: set[Key] = set()
        jobs = self._jobs_of_slurm(nodes, view, held)
        rest = [self._with_gpus(replace(node, history=self._history([key], "activity", view)), view, NO_JOB)
                for key, node in sorted(nodes.items()) if key not in held]
        return tuple(jobs), together(rest) if rest else None, tuple(rest)

    def _job_of_label(self, key: Key, view: View) -> Job:
        figures = self._figures[key]
        own = {series.labels.get("figure", ""): series.value for series in figures.values()}
        apart = {s.labels["figure"]: s.value for s in self._outliers
                 if self._key(s.labels) == key and s.labels.get("figure") in ("median", "mad", "node_median")}
        low = [s for s in self._low_gpus() if self._key(s.labels) == key]
        prefix = f"{self._group_labels.get(key, {}).get(CLUSTER_LABEL, '')}/" if self._clusters else ""
        number = key[1].removeprefix(prefix)
        slurm_job = next((job for job in self._slurm.jobs if number in (job.number, job.id)
                          and (not self._clusters or f"{job.cluster}/" == prefix)), None)
        group = self._group(figures, self._kinds.get(key, ""))
        nodes = tuple(self._with_gpus(self._with_history(node, key, view), view, key[1], key)
                      for node in self._nodes.get(key, ()))
        return Job(
            **fields_of(group), id=key[1], label=key[0], labels=self._group_labels.get(key, {}),
            name=slurm_job.name if slurm_job is not None else "",
            user=slurm_job.user if slurm_job is not None else None,
            start_s=slurm_job.start_s if slurm_job is not None else None,
            number="" if slurm_job is None else slurm_job.id if slurm_job.id != number else slurm_job.number,
            nodes=_bounded(own["nodes"]) if "nodes" in own else None, node_names=tuple(node.name for node in nodes),
            idle_gpus=_count(figures, "idle_gpus"), watched_gpus=_count(figures, "watched_gpus"),
            median=apart.get("median") if group.kind != "mixed" else None,
            mad=apart.get("mad"), low_gpus=tuple(self._low_gpu(s, view) for s in low),
            low_clocks=self._with_low_clocks({key}, view), node_median=apart.get("node_median"),
            low_nodes=tuple(Node(gpus=0, activity=s.value, name=node_of(s.labels), labels=s.labels)
                            for s in self._outliers
                            if s.labels.get("figure") == "low_node" and self._key(s.labels) == key),
            peers=self._peers.get(key, {}), history=self._history([key], "activity", view),
            idle_history=self._history([key], "idle_gpus", view), each=nodes)

    def _jobs_of_slurm(self, nodes: Mapping[Key, Node], view: View, held: set[Key]) -> list[Job]:
        """Slurm's jobs on the nodes that have figures, which are added to ``held``. A job holds what is on its node
        where nobody else does."""
        by_name = self._by_short_name(nodes)
        middles = {self._key(s.labels): s.value for s in self._outliers if s.labels.get("figure") == "median"}
        jobs = []
        for job in self._slurm.jobs:
            keys = {by_name[short]: count for node, count in job.gpus.items()
                    if (short := self._slurm_name(job, node)) in by_name}
            if not keys:
                continue
            held |= set(keys)
            whole = all(nodes[key].gpus <= count for key, count in keys.items())
            mapped: Mapped = "node" if whole else "shared node"
            own = [replace(nodes[key], history=_since(self._history([key], "activity", view), job.start_s))
                   for key in sorted(keys)]
            group = together(own)
            low = [s for s in self._low_gpus() if self._key(s.labels) in keys] if whole else []
            one_kind = group.kind != "mixed"
            middle = upper_median(node.activity for node in own) if whole and one_kind else None
            # Of a node whose GPUs are alike the mean is the median, too.
            of_gpus = upper_median(middles.get(key, nodes[key].activity) for key in keys
                                   for _ in range(min(nodes[key].gpus, _MAX_ON_NODE))) if whole and one_kind else None
            peers = {figure: value for figure in COMPARED if (value := upper_median(
                self._peers.get(key, {}).get(figure) for key in keys)) is not None} if whole else {}
            below = less_active(own, None if middle is None else middle - self._limits.below)
            each = tuple(self._with_gpus(node, view, job.id) for node in own) if job.id in view.open_jobs else ()
            jobs.append(Job(
                **{**fields_of(group), "gpus": sum(job.gpus.values())}, id=job.id, number=job.number, mapped=mapped,
                name=job.name, user=job.user, start_s=job.start_s, nodes=len(job.gpus), node_names=tuple(job.gpus),
                idle_gpus=sum(_count(self._figures[key], "idle_gpus") or 0 for key in keys) if whole else None,
                watched_gpus=sum(_count(self._figures[key], "watched_gpus") or 0 for key in keys) if whole else None,
                median=of_gpus, low_gpus=tuple(self._low_gpu(s, view) for s in low), peers=peers,
                low_clocks=self._with_low_clocks(set(keys), view) if whole else (), node_median=middle, low_nodes=below,
                history=_since(self._history(sorted(keys), "activity", view), job.start_s),
                idle_history=_since(self._history(sorted(keys), "idle_gpus", view), job.start_s) if whole else None,
                each=each))
        return jobs

    def _node_rows(self) -> dict[Key, Node]:
        """Each group as a node, where groups are nodes."""
        if self._queries is None or self._queries.by_job:
            return {}
        return {key: self._node(key[1], figures, self._group_labels.get(key, {}))
                for key, figures in self._figures.items() if key[1] and key in self._group_labels}

    def _node(self, name: str, figures: Mapping[str, Series], labels: Mapping[str, str]) -> Node:
        assert self._queries is not None
        kind = labels.get("kind", self._queries.kind)
        return Node(**fields_of(self._group(figures, kind)), name=name, labels=labels)

    def _with_history(self, node: Node, key: Key, view: View) -> Node:
        past = self._node_past.get((key, node.name))
        return replace(node, history=self._grid([past], [1], view)) if past else node

    def _with_gpus(self, node: Node, view: View, job: str, group: Key | None = None) -> Node:
        """With its GPUs, if they are wanted; of a ``group`` only those that are in it."""
        if (job, node.name) not in view.open_nodes:
            return node
        own = [replace(gpu, history=self._gpu_history(gpu.uuid, view)) for gpu in self._gpus.values()
               if gpu.node == node.name and (group is None or group in self._holders.get(gpu.uuid, ()))]
        return replace(node, each=tuple(sorted(own, key=lambda gpu: (len(gpu.gpu), gpu.gpu))))

    def _low_gpu(self, series: Series, view: View) -> Gpu:
        assert self._queries is not None
        uuid = _uuid(series.labels)
        known = self._gpus.get(uuid)
        return Gpu(node=node_of(series.labels), gpu=gpu_of(series.labels), uuid=uuid, activity=series.value,
                   kind=series.labels.get("kind", self._queries.kind), figures=known.figures if known else {},
                   history=self._gpu_history(uuid, view))

    def _with_low_clocks(self, keys: set[Key], view: View) -> tuple[LowClock, ...]:
        """The GPUs of a job, whose groups are ``keys``, with low clocks, as far as is known how those of all spread."""
        assert self._queries is not None
        out = []
        for series in self._low_clocks():
            model, uuid = series.labels.get("model", ""), _uuid(series.labels)
            all_of = [own for (key, name), own in self._clocks.items() if key in keys and name == model]
            known = self._gpus.get(uuid)
            if self._key(series.labels) not in keys or known is None or not all_of:
                continue
            median, mad = (upper_median(own.get(name) for own in all_of) for name in ("clock_median", "clock_mad"))
            if median is None or mad is None:
                continue
            past = self._clock_past.get(uuid)
            out.append(LowClock(
                gpu=replace(known, history=self._gpu_history(uuid, view)), clock_hz=series.value, median_hz=median,
                # Where groups are nodes, these may differ more than the GPUs of each.
                mad_hz=max(mad, upper_median(abs(own["clock_median"] - median) for own in all_of
                                             if "clock_median" in own) or 0.0),
                gpus=int(sum(own.get("clocks", 0.0) for own in all_of)),
                low=int(sum(own.get("clocks" if own.get("clock_median", median) < self._limits.clock * median
                                    else "low_clocks", 0.0) for own in all_of)),
                history=self._grid([past], [1], view) if past else None))
        return tuple(out)

    def _gpu_history(self, uuid: str, view: View) -> History | None:
        past = self._gpu_past.get(uuid)
        return self._grid([past], [1], view) if past else None

    def _history(self, keys: Sequence[Key], figure: str, view: View) -> History | None:
        """Of several groups the mean by their GPUs, or the sum of what is counted."""
        asked = [key for key in keys if key in self._past_of]
        if len(asked) < len(keys):
            return None
        past = [self._past.get(key, {}).get(figure, {}) for key in keys]
        if figure != "activity":
            activity = [self._past.get(key, {}).get("activity", {}) for key in keys]
            # A count of nothing is no sample at all: it is 0 where there was activity to count.
            past = [{slot: own.get(slot, 0.0) for slot in there} for own, there in zip(past, activity, strict=True)]
            return self._grid(past, [1] * len(keys), view, summed=True)
        return self._grid(past, [_count(self._figures.get(key, {}), "gpus") or 1 for key in keys], view)

    def _grid(self, past: Sequence[Mapping[int, float]], weights: Sequence[int], view: View, *,
              summed: bool = False) -> History:
        first, last = self._slots(view, self._clock() + self._ahead_s)
        values: list[float | None] = []
        for slot in range(first, last + 1):
            there = [(own[slot], weight) for own, weight in zip(past, weights, strict=True)
                     if slot in own and own[slot] == own[slot]]
            total = sum(value * weight for value, weight in there)
            values.append(None if not there else total if summed else total / sum(weight for _, weight in there))
        return History(first * view.step_s, view.step_s, tuple(values))

    def _group(self, figures: Mapping[str, Series], kind: str) -> Group:
        values = {series.labels.get("figure", ""): series.value for series in figures.values()}
        by_kind = {name: s.value for name, s in figures.items() if s.labels.get("figure") == "activity"}
        counts = {name.replace("activity", "gpus", 1): value for name, value in by_kind.items()}
        gpus = sum(figures[name].value for name in counts if name in figures)
        weighed = sum(value * figures[name].value for name, value in counts.items() if name in figures)
        # What is used and free; the driver's own part is no room for a job.
        parts = [values[name] for name in ("memory_used_bytes", "memory_free_bytes") if name in values]
        whole = values.get("memory_total_bytes", sum(parts) if len(parts) == 2 else None)
        return Group(gpus=_bounded(gpus), activity=weighed / gpus if gpus else None, kind=kind,
                     tensor_active=values.get("tensor_active"), memory_used_bytes=values.get("memory_used_bytes"),
                     memory_total_bytes=whole, power_w=values.get("power_w"))

    def _target_problems(self) -> list[Problem]:
        """Exporters that do not answer: what is missing of the fleet."""
        counts = {s.labels.get("figure"): s.value for s in self._outliers}
        targets = counts.get("targets", 0)
        out = []
        if down := int(counts.get("down", 0)):
            names = self._target_names("down_target")
            out.append(Problem(f"{down} of {targets:.0f} exporters {'does' if down == 1 else 'do'} not answer: "
                               f"{_some(names, down)}; the GPUs there are missing here",
                               "On the node: systemctl status nvidia-dcgm-exporter, or the pod's log."))
        if empty := self._target_names("empty_target"):
            out.append(Problem(f"exporters answer without metrics of GPUs: {_some(empty, len(empty))}",
                               "dcgm-exporter does so while it starts, and when the host engine has lost the GPU: read "
                               "its log."))
        return out

    def _target_names(self, figure: str) -> list[str]:
        own = [s.labels for s in self._outliers if s.labels.get("figure") == figure]
        if not self._clusters:
            own = [{name: text for name, text in labels.items() if name != CLUSTER_LABEL} for labels in own]
        return sorted(map(node_of, own))


def _since(history: History | None, start_s: float | None) -> History | None:
    """Without what was before the job: then its nodes were others'."""
    if history is None or start_s is None:
        return history
    return replace(history, values=tuple(None if history.time_s(i) - history.step_s < start_s else value
                                         for i, value in enumerate(history.values)))


def _some(names: Sequence[str], count: int) -> str:
    shown = ", ".join(names[:4])
    return shown if count <= len(names[:4]) else f"{shown} and {count - len(names[:4])} more"


def _uuid_matchers(gpus: Iterable[Series]) -> list[str]:
    uuids: dict[str, set[str]] = {}
    for series in gpus:
        if label := next((label for label in UUID_LABELS if series.labels.get(label)), ""):
            uuids.setdefault(label, set()).add(series.labels[label])
    return [matchers({label: own}) for label, own in uuids.items()]


def _uuid(labels: Mapping[str, str]) -> str:
    """A GPU's UUID, a MIG instance's with its number; without one, node and number."""
    uuid = next((labels[label] for label in UUID_LABELS if labels.get(label)), "")
    mig = gpu_of(labels).partition(":")[2]
    return f"{uuid}:{mig}" if uuid and mig else uuid or f"{node_of(labels)}:{gpu_of(labels)}"


def _node_matchers(labels: Mapping[str, str]) -> str:
    label = next((label for label in NODE_LABELS if labels.get(label)), "")
    own = {name: [labels[name]] for name in (label, CLUSTER_LABEL) if labels.get(name)}
    return matchers(own) if label else ""


def _bounded(count: float) -> int:
    return int(min(max(count, 0.0), _MAX_GPUS))


def _count(figures: Mapping[str, Series], figure: str) -> int | None:
    """A number of GPUs, over all kinds of activity. None: there are no GPUs to count; none counted is 0."""
    own = [s.value for s in figures.values() if s.labels.get("figure") == figure]
    return _bounded(sum(own)) if own or any(s.labels.get("figure") == "gpus" for s in figures.values()) else None
