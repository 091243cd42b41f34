"""The queries, written for the exporters and labels that are there. Pure.

An arm of a query is one figure of all groups; arms are joined by ``or`` and told apart by the label ``figure``, so that
one query brings several. A GPU that a MIG or time-slicing set-up lists several times is taken once in each group: the
largest value of its UUID.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gputop.cluster.prometheus import LARGEST
from gputop.cluster.schemas import (
    ACTIVITY,
    CLUSTER_LABEL,
    COUNTERS,
    GPU_LABELS,
    JOB_LABELS,
    LIMITS,
    MIG_LABELS,
    NAMESPACE_OF,
    NODE_LABELS,
    PATTERN,
    SCHEMAS,
    UUID_LABELS,
    Name,
    Schema,
)

RECENT = "5m"  # that a group's present figures are of
_OUTLIERS = 4  # GPUs and nodes of each group that are asked for by name
_SINCE_PARTS = 3  # of the time for which a GPU must have been there: none longer than the 5 min that a sample stays
_SINCE_GAP = "2m"  # that a GPU may be away for, as when a scrape fails
_TARGETS = 8  # targets without an answer that are asked for by name
SUMMED = ("memory_used_bytes", "memory_free_bytes", "memory_reserved_bytes", "memory_total_bytes", "power_w")
DETAILS = ("tensor_active", "memory_used_bytes", "memory_free_bytes", "memory_reserved_bytes", "memory_total_bytes",
           "power_w", "power_limit_w", "sm_clock_hz", "temperature_c", "memory_temperature_c", "pcie_width", "xid",
           "rows_remap_failed", "ecc_uncorrected", "clock_reasons", *COUNTERS)

COMPARED = ("sm_clock_hz", "pcie_width", "temperature_c", "power_limit_w")  # of which the median of the peers is asked

# Without what DCGM prints in place of a missing value: a GPU with that alone has another figure.
WHAT_IS_THERE = f'count by (__name__, job) ({{__name__=~"{PATTERN}"}} < {LARGEST:g})'

Matchers = Mapping[str, Collection[str]]  # a label, and the values of which it has one


@dataclass(frozen=True, slots=True)
class Found:
    """What a Prometheus has: series by metric name, the scrape jobs they come from, and the labels that name jobs."""

    names: Mapping[str, int]
    scrape_jobs: tuple[str, ...] = ()
    job_labels: tuple[str, ...] = ()
    clusters: bool = False  # several, told apart by a label
    divided: bool = False  # gputop export tells of GPUs beside their MIG instances

    def schemas(self) -> tuple[Schema, ...]:
        """Those that are there, the one that knows jobs first: of a GPU with two, the first tells."""
        there = [s for s in SCHEMAS if any(self.spellings(s, kind) for kind in ACTIVITY)]
        return tuple(sorted(there, key=lambda s: s.jobs not in self.names))

    def spellings(self, schema: Schema, figure: str) -> tuple[Name, ...]:
        return tuple(name for name in schema.figures.get(figure, ()) if name.name in self.names)

    def kinds(self, schema: Schema) -> tuple[str, ...]:
        """The figures of activity that are needed so that each GPU has one, the best first."""
        # The GPUs of a cluster may spell a figure in two ways; those that have both limits of power have one only once.
        series = {figure: sum(self.names[n.name] for n in self.spellings(schema, figure))
                  for figure in schema.figures if figure != "power_limit_w"}
        whole = max(series.values())
        needed = []
        for kind in ACTIVITY:
            if series.get(kind):
                needed.append(kind)
            if series.get(kind, 0) >= whole:
                break
        return tuple(needed)


def which_labels(found: Found) -> str:
    """How many series have which of the labels that name a job."""
    names = {name.name for s in found.schemas() for kind in ACTIVITY for name in found.spellings(s, kind)}
    one = sorted(names) + [s.jobs for s in found.schemas() if s.jobs in found.names]
    arms = {label: f'count({{__name__=~"{"|".join(one)}", {label}!=""}})' for label in JOB_LABELS}
    arms["divided"] = f'count({{__name__=~"{"|".join(one)}", mig!=""}})'
    arms["cluster"] = f'count by ({CLUSTER_LABEL}) ({{__name__=~"{"|".join(one)}"}})'
    arms["simulated"] = f'count({{__name__=~"{"|".join(one)}", simulated="true"}})'
    return _joined(arms)


def _joined(arms: Mapping[str, str]) -> str:
    return " or ".join(f'label_replace({arm}, "figure", "{name}", "", "")' for name, arm in arms.items())


class Queries:
    """Writes the queries for what was found. ``by_job``: groups are jobs as the labels name them, else nodes."""

    def __init__(self, found: Found) -> None:
        self.found = found
        self.schemas = found.schemas()
        self.by_job = bool(found.job_labels)
        jobs = [*found.job_labels, *(NAMESPACE_OF[label] for label in found.job_labels if label in NAMESPACE_OF)]
        self.several_kinds = len({kind for s in self.schemas for kind in found.kinds(s)}) > 1
        self._kind = ["kind"] if self.several_kinds else []
        cluster = [CLUSTER_LABEL] if found.clusters else []
        self._nodes = [*NODE_LABELS, *([] if self.by_job else cluster)]
        self._jobs = jobs = [*jobs, *(cluster if self.by_job else [])]
        self._key = [*UUID_LABELS, *MIG_LABELS, *GPU_LABELS, *self._nodes, *jobs]
        self._group = jobs if self.by_job else self._nodes

    @property
    def kind(self) -> str:
        """The figure of activity of all GPUs; "" where they differ, each row then has it as its label."""
        return "" if self.several_kinds else self.found.kinds(self.schemas[0])[0]

    # -- one figure of single GPUs -----------------------------------------------------------------

    def figure(self, figure: str, matchers: str = "", *, mig: bool = True) -> str:
        """The newest value of a figure in its base unit, of a counter its increase of late; one series a GPU; "" where
        nobody exports it."""
        window = RECENT if figure in COUNTERS else ""
        return self._of_schemas([self._one(s, figure, matchers, window, mig=mig) for s in self.schemas])

    def busy_clock(self, busy: float, matchers: str = "") -> str:
        """The mean SM clock of late of each GPU that is active more than ``busy``, with its ``model``; a GPU whose
        model nobody tells is left out. "" where nobody exports clocks."""
        clocks = self._of_schemas([self._one(s, "sm_clock_hz", matchers, RECENT, model=True) for s in self.schemas])
        return clocks and f"({clocks} and ignoring (model, kind) ({self.activity(RECENT, matchers)} > {busy:g}))"

    def activity(self, window: str = "", matchers: str = "", over: str = "avg", *, still: bool = True,
                 since_s: float = 0.0) -> str:
        """How much each GPU works, 0-1: the best figure that it has, by ``kind`` where there are several.

        ``over`` a ``window``, of series that are there ``still``, and have been for ``since_s``, with the same job.
        """
        of_schemas = []
        for schema in self.schemas:
            arms = []
            for kind in self.found.kinds(schema):
                arm = self._one(schema, kind, matchers, window, over, still=still, since_s=since_s)
                arms.append(f'label_replace({arm}, "kind", "{kind}", "", "")' if self.several_kinds else arm)
            of_schemas.append(_chained(arms, " or ignoring (kind) "))
        return self._of_schemas(of_schemas)

    def _of_schemas(self, arms: Sequence[str]) -> str:
        """Of a GPU that two exporters tell of, the first."""
        there = [arm for arm in arms if arm]
        if len(there) > 1:
            for label in UUID_LABELS[1:]:
                there = [f'label_replace({arm}, "UUID", "$1", "{label}", "(.+)")' for arm in there]
        return _chained(there, " or on (UUID) ")

    def _one(self, schema: Schema, figure: str, matchers: str, window: str = "", over: str = "avg", *,
             still: bool = True, since_s: float = 0.0, mig: bool = True, model: bool = False) -> str:
        if self.found.divided and schema.jobs and mig and "mig" not in matchers:
            # A GPU beside its instances would be counted once more.
            parts, whole = (self._one(schema, figure, ", ".join(filter(None, (matchers, own))), window, over,
                                      still=still, since_s=since_s, model=model) for own in ('mig!=""', 'mig=""'))
            names = "|".join(name.name for name in self.found.spellings(schema, figure))
            return parts and f'({whole} unless on (instance, uuid) {{__name__=~"{names}", mig!=""}} or {parts})'
        arms = []
        if model and not schema.info:
            matchers = ", ".join(filter(None, (matchers, f'{schema.model}!=""')))
        function = "increase" if figure in COUNTERS else f"{over}_over_time"
        for name in self.found.spellings(schema, figure):
            now = f"{name.name}{{{matchers}}}" if matchers else name.name
            value = f"{function}({now}[{window}])" if window else now
            if window and still:
                value = f"({value} and {now})"
            for part in range(1, _SINCE_PARTS + 1) if since_s else ():
                # A scrape that failed ends a series: one that was there shortly before each of these times was there
                # between, but for a scrape or two.
                then = f"{now}[{_SINCE_GAP}] offset {since_s * part / _SINCE_PARTS:g}s"
                value = f"({value} and present_over_time({then}))"
            if name.factor != 1.0:
                value = f"{value} * {name.factor:.17g}"
            value = f"{value} {_within(figure)}"
            on = ", ".join(schema.join)
            if model and schema.info:
                value = f"({value}) * on ({on}) group_left ({schema.model}) topk by ({on}) (1, {schema.info})"
            if model:
                value = f'label_replace({value}, "model", "$1", "{schema.model}", "(.+)")'
            if schema.jobs in self.found.names:
                jobs = f"({schema.jobs} and {schema.jobs} offset {since_s:g}s)" if since_s else schema.jobs
                joined = f"({value}) * on ({on}) group_left (slurm_job_id) topk by ({on}) (1, {jobs})"
                value = f"{joined} or on ({on}) ({value})"
            key = self._key if mig else [label for label in self._key if label not in MIG_LABELS]
            key = [*key, "model"] if model else key
            arms.append(f"max by ({', '.join(key)}) ({value})")
        return _chained(arms, " or ")

    # -- queries ------------------------------------------------------------------------------------

    def figures(self, idle: float, idle_s: float) -> str:
        """The present figures of all groups. ``idle``: the activity that idle GPUs have not passed for ``idle_s``."""
        return _joined(self._group_arms([*self._group], "", idle, idle_s))

    def nodes(self, matchers: str) -> str:
        """The same of the nodes that match, each for itself."""
        return _joined(self._group_arms([*self._nodes, *self._jobs], matchers))

    def _group_arms(self, group: list[str], matchers: str, idle: float | None = None,
                    idle_s: float = 0.0) -> dict[str, str]:
        recent, now = self.activity(RECENT, matchers), self.activity("", matchers)
        by = f"by ({', '.join([*group, *self._kind])})"
        arms = {"activity": f"avg {by} ({recent})", "gpus": f"count {by} ({now})"}
        if idle is not None:
            still = self.activity(f"{idle_s:g}s", matchers, "max", since_s=idle_s)
            arms["idle_gpus"] = f"count {by} ({still} < {idle:g})"
            arms["watched_gpus"] = f"count {by} ({still})"
            arms["lowest"] = f"min {by} ({recent})"
        if idle is not None and self.by_job:
            each = [label for label in self._key if label not in self._jobs]
            arms["all_gpus"] = f"count(count by ({', '.join(each)}) ({now}))"
            arms["nodes"] = f"count by ({', '.join(group)}) (count by ({', '.join([*group, *self._nodes])}) ({now}))"
        if tensor := self.figure("tensor_active", matchers):
            arms["tensor_active"] = f"avg by ({', '.join(group)}) ({tensor})"
        for figure in SUMMED:
            # Of a GPU that is divided into instances, each tells the power of the whole.
            if value := self.figure(figure, matchers, mig=figure != "power_w"):
                arms[figure] = f"sum by ({', '.join(group)}) ({value})"
        return arms

    def node_means(self, window: str) -> str:
        """Of each node the mean activity of its GPUs over a ``window``, and their mean power."""
        nodes = [*NODE_LABELS, *([CLUSTER_LABEL] if self.found.clusters else [])]
        arms = {"activity": f"avg by ({', '.join([*nodes, *self._kind])}) ({self.activity(window)})"}
        if power := self._of_schemas([self._one(s, "power_w", "", window, mig=False) for s in self.schemas]):
            arms["power_w"] = f"avg by ({', '.join(nodes)}) ({power})"
        return _joined(arms)

    def outliers(self, below: float, matchers: Sequence[str], busy: float, clock: float,
                 low_nodes: Sequence[str] = (), *, node_clocks: bool = False) -> str:
        """Of the groups that match: how far their GPUs differ, and the GPUs and nodes that are ``below`` the median;
        of all groups the ``busy`` GPUs whose SM clock is below the median of their model by the ratio ``clock``, and
        some of those of ``low_nodes`` (matchers), which are low as a whole; the targets that do not answer.
        ``node_clocks``: also the median clock of the busy GPUs of each group, by model."""
        arms = {}
        if clocks := self.busy_clock(busy):
            arms["low_clock"] = f"bottomk by ({', '.join(self._group)}) ({_OUTLIERS}, {self._low(clocks, clock)})"
            if node_clocks:
                arms["node_clock"] = f"quantile by ({', '.join([*self._group, 'model'])}) (0.5, {clocks})"
            for i, own in enumerate(low_nodes):
                # Numbered like the others, so that a GPU that is low on its node, too, is there twice.
                arms[f"low_clock{i}"] = (f"bottomk by ({', '.join(self._group)}) ({_OUTLIERS}, "
                                         f"{self.busy_clock(busy, own)})")
        group = ", ".join([*self._group, *self._kind])
        for i, own in enumerate(matchers):
            recent = self.activity(RECENT, own)
            median = f"quantile by ({group}) (0.5, {recent})"
            arms[f"median{i}"] = median
            arms[f"mad{i}"] = f"quantile by ({group}) (0.5, abs({recent} - on ({group}) group_left () {median}))"
            arms[f"low_gpu{i}"] = (f"bottomk by ({group}) ({_OUTLIERS}, {recent} < on ({group}) group_left () "
                                   f"({median} - {below:g}))")
            if self.by_job:
                nodes = f"avg by ({', '.join([*self._group, *self._nodes, *self._kind])}) ({recent})"
                middle = f"quantile by ({group}) (0.5, {nodes})"
                arms[f"node_median{i}"] = middle
                arms[f"low_node{i}"] = (f"bottomk by ({group}) ({_OUTLIERS}, {nodes} < on ({group}) group_left () "
                                        f"({middle} - {below:g}))")
        jobs = "|".join(map(regex, self.found.scrape_jobs))
        up = f'up{{job=~"{jobs}"}}'
        now = " or ".join(name.name for kind in self.found.kinds(self.schemas[0])
                          for name in self.found.spellings(self.schemas[0], kind))
        arms |= {"down": f"count({up} == 0)", "targets": f"count({up})",
                 "down_target": f"topk({_TARGETS}, {up} == 0)"}
        if len(self.schemas) == 1 and self.schemas[0].id != "all-smi":  # whose own "instance" may replace Prometheus's
            arms["empty_target"] = f"topk({_TARGETS}, {up} == 1 unless on (job, instance) ({now}))"
        return _joined(arms)

    def history(self, step: str, idle: float, matchers: Sequence[str]) -> str:
        """For a range query: activity and idle GPUs of the groups that match, of each step."""
        arms = {}
        by = f"by ({', '.join(self._group)})"
        for i, own in enumerate(matchers or [""]):
            value = self.activity(step, own, still=False)
            arms[f"activity{i}"] = f"avg {by} ({value})"
            arms[f"idle_gpus{i}"] = f"count {by} ({value} < {idle:g})"
        return _joined(arms)

    def node_history(self, step: str, matchers: Sequence[str]) -> str:
        """For a range query: the activity of the nodes of the jobs that match, of each step."""
        by = f"by ({', '.join([*self._nodes, *self._jobs])})"
        return _chained([f"avg {by} ({self.activity(step, own, still=False)})" for own in matchers], " or ")

    def gpu_history(self, step: str, matchers: Iterable[str]) -> str:
        """For a range query: the activity of each GPU that matches, of each step."""
        return _chained([self.activity(step, own, still=False) for own in matchers], " or ")

    def _low(self, clocks: str, ratio: float) -> str:
        by = ", ".join([*self._group, "model"])
        return f"({clocks} < on ({by}) group_left () ({ratio:g} * quantile by ({by}) (0.5, {clocks})))"

    def clock_history(self, step: str, matchers: Iterable[str]) -> str:
        """For a range query: the mean SM clock of each GPU that matches, of each step."""
        return _chained([self._of_schemas([self._one(s, "sm_clock_hz", own, step, still=False) for s in self.schemas])
                         for own in matchers], " or ")

    def gpus(self, matchers: Iterable[str], peers: Sequence[str] = (), of_clocks: Sequence[str] = (),
             busy: float = 0.0, clock: float = 0.0) -> str:
        """Everything there is of each GPU that matches; medians of the groups that match ``peers``, "" being all
        groups; and how the SM clocks of ``busy`` GPUs spread in the groups that match ``of_clocks``, by model."""
        arms: dict[str, str] = {}
        by = ", ".join([*self._group, "model"])
        for i, own in enumerate(of_clocks):
            clocks = self.busy_clock(busy, own)
            middle = f"quantile by ({by}) (0.5, {clocks})"
            arms |= {f"clock_median{i}": middle, f"clocks{i}": f"count by ({by}) ({clocks})",
                     f"clock_mad{i}": f"quantile by ({by}) (0.5, abs({clocks} - on ({by}) group_left () {middle}))",
                     f"low_clocks{i}": f"count by ({by}) {self._low(clocks, clock)}"}
        for i, own in enumerate(peers):
            for figure in COMPARED:
                if value := self.figure(figure, own):
                    arms[f"peer_{figure}{i}"] = f"quantile by ({', '.join(self._group)}) (0.5, {value})"
        for i, own in enumerate(matchers):
            arms[f"activity{i}"] = self.activity(RECENT, own)
            arms |= {f"{figure}{i}": value for figure in DETAILS if (value := self.figure(figure, own))}
        return _joined(arms)


def _within(figure: str) -> str:
    """The comparisons that leave out what the figure cannot be."""
    if figure not in LIMITS:
        return f"< {LARGEST:g}"
    least, most = LIMITS[figure]
    return f"<= {most:.17g}" if least is None else f">= {least:.17g} <= {most:.17g}"


def matchers(values: Matchers) -> str:
    """``{"Hostname": ["n1", "n2"]}`` → ``Hostname=~"n1|n2"``; one value: an equality."""
    parts = []
    for label, texts in values.items():
        own = sorted(texts)
        parts.append(f'{label}="{quoted(own[0])}"' if len(own) == 1 else f'{label}=~"{"|".join(map(regex, own))}"')
    return ", ".join(parts)


def quoted(text: str) -> str:
    """``text`` between the quotes of a string of PromQL."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def regex(text: str) -> str:
    """``text`` as a regular expression (RE2) that matches only itself, between quotes."""
    return quoted(re.sub(r"([\\.+*?()|\[\]{}^$])", r"\\\1", text))


def _chained(arms: Sequence[str], operator: str) -> str:
    there = [arm for arm in arms if arm]
    return f"({operator.join(there)})" if len(there) > 1 else "".join(there)
