"""Choice of what is asked for next, of what the answers say so far and of what is on the screen. Pure.

Each method writes the figures of one question, or one question about the past; no figures or no subjects: nothing is
wanted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gputop.cluster import answers
from gputop.cluster.model import NO_JOB, FleetView, upper_median
from gputop.cluster.queries import Figures, Queries
from gputop.cluster.series_store import PastQuestion
from gputop.cluster.slurm import SlurmJob
from gputop.sources.exporters import node_of

GROUPS, IDLE, GPUS, NODES = "groups", "idle", "gpus", "nodes"  # the topics of the past
ACTIVITY, CLOCK = "gpu_activity", "gpu_clock"  # the figures of a GPU's past
_PEER_NODES = 32  # of a job, that a node of it is compared with

Jobs = tuple[SlurmJob, ...]
GpuSubject = tuple[str, answers.Selection]  # a figure, and the GPUs


class Wanted:
    def __init__(self, series: answers.FleetSeries, jobs: Jobs, view: FleetView) -> None:
        self.view = view
        self._series, self._jobs = series, jobs
        self._queries = Queries(series.metrics, series.limits)

    # -- now ----------------------------------------------------------------------------------------

    def outliers(self) -> Figures:
        """Write the figures of what stands out in the groups whose GPUs differ, and among the clocks of all."""
        series = self._series
        differing = [key for key, figures in series.jobs.items() if figures.has_low_gpu(series.limits.below)]
        low_nodes = self._conditions(self._selections(low_clock_nodes(series, self._jobs)))
        several_nodes = any(len(job.gpus) > 1 for job in self._jobs)
        return {**self._queries.outliers(self._where(differing), low_nodes,
                                         node_clocks=not series.metrics.by_job and several_nodes),
                **self._queries.idle(self._where(self.quiet))}

    @property
    def quiet(self) -> list[answers.Key]:
        """The groups of jobs that have GPUs that do nothing."""
        return [key for key in self._groups_of_jobs() if key in self._series.groups and self._series.groups[key].quiet]

    def gpus(self) -> Figures:
        """Everything of the GPUs that stand out, and of those of the nodes that are open."""
        selections = [selection for _, selection in self._gpu_subjects()]
        outliers = self._series.outliers
        slow, low = ({self._series.key(gpu.labels) for gpu in gpus}
                     for gpus in (outliers.low_clocks, outliers.asked_gpus))
        return self._queries.gpus(self._conditions(selections), self._where(self._with_peers(low)),
                                  self._where(self._with_peers(slow))) if selections else {}

    def nodes(self) -> Figures:
        """The nodes of the open jobs; where groups are nodes, each is known already."""
        jobs = self._open_jobs()
        return self._queries.nodes(self._where(jobs)) if jobs else {}

    # -- the past -----------------------------------------------------------------------------------

    def group_past(self) -> PastQuestion:
        """The past of all jobs, those on the screen first; where groups are nodes, that of the nodes of jobs."""
        return PastQuestion(
            GROUPS, self._past_groups(),
            lambda keys: self._queries.group_history(self.view.step_s, self._where(keys)), self._series.key)

    def idle_past(self) -> PastQuestion:
        """The past of the jobs that have GPUs that do nothing: how many of these did."""
        return PastQuestion(
            IDLE, self.quiet, lambda keys: self._queries.idle_history(self.view.step_s, self._where(keys)),
            self._series.key)

    def gpu_past(self) -> PastQuestion:
        """The past of the GPUs that stand out, and of those of the nodes that are open."""
        def figures(subjects: Sequence[GpuSubject]) -> Figures:
            where, clocks_where = (self._conditions(selection for figure, selection in subjects if figure == wanted)
                                   for wanted in (ACTIVITY, CLOCK))
            return self._queries.gpu_history(self.view.step_s, where, clocks_where)

        return PastQuestion(GPUS, self._gpu_subjects(), figures, answers.gpu_id)

    def node_past(self) -> PastQuestion:
        """The past of the nodes of the open jobs; where groups are nodes, :meth:`group_past` has it."""
        return PastQuestion(
            NODES, self._open_jobs(), lambda keys: self._queries.node_history(self.view.step_s, self._where(keys)),
            lambda labels: (self._series.key(labels), node_of(labels)))

    # -- which --------------------------------------------------------------------------------------

    def _past_groups(self) -> list[answers.Key]:
        if self._series.metrics.by_job:
            return sorted(self._series.jobs, key=lambda key: key[1] not in self.view.jobs)
        if NO_JOB in self.view.open_jobs:
            return [("", node) for node in self._series.nodes]
        return self._groups_of_jobs()

    def _groups_of_jobs(self) -> list[answers.Key]:
        """The groups that jobs are made of: these themselves, or the nodes of Slurm's jobs."""
        if self._series.metrics.by_job:
            return list(self._series.jobs)
        return [("", node) for node in self._series.slurm_nodes.held_by(self._jobs)]

    def _open_jobs(self) -> list[answers.Key]:
        if not self._series.metrics.by_job:
            return []
        return [key for key in self._series.jobs if key[1] in self.view.open_jobs]

    def _gpu_subjects(self) -> list[GpuSubject]:
        outliers = self._series.outliers
        gpus = [answers.gpu_selection(gpu.labels) for gpu in outliers.asked_gpus]
        rows = (*self._series.job_nodes.values(), self._series.nodes)
        nodes = [next((answers.node_selection(row[node].labels) for row in rows if node in row), ())
                 for _, node in self.view.open_nodes]
        clocks = [answers.gpu_selection(gpu.labels) for gpu in outliers.low_clocks]
        return [(figure, selection) for figure, selections in ((ACTIVITY, [*gpus, *nodes]), (CLOCK, clocks))
                for selection in dict.fromkeys(selections) if selection]

    def _with_peers(self, keys: set[answers.Key]) -> list[answers.Key]:
        """Return these groups; where groups are nodes, also other nodes of their jobs, some of them."""
        if self._series.metrics.by_job:
            return sorted(keys)
        of_jobs = ({("", node) for node in self._series.slurm_nodes.gpus_of(job)} for job in self._jobs)
        others = (sorted(nodes - keys)[:_PEER_NODES] for nodes in of_jobs if not nodes.isdisjoint(keys))
        return sorted(keys.union(*others))

    def _where(self, keys: Sequence[answers.Key]) -> list[str]:
        return [""] if keys and len(keys) >= len(self._series.jobs) else self._conditions(self._selections(keys))

    def _conditions(self, selections: Iterable[answers.Selection]) -> list[str]:
        """Matchers for these; where one label of the answers stands for several, for each of them."""
        metrics = self._series.metrics
        labels = (*metrics.hosts, "instance") if metrics.scattered else ()
        return answers.conditions(
            ((label, text), *rest) for (first, text), *rest in filter(None, selections)
            for label in (labels if first == "instance" and labels else (first,)))

    def _selections(self, keys: Iterable[answers.Key]) -> list[answers.Selection]:
        groups = self._series.groups
        return [answers.group_selection(key, groups[key].labels if key in groups else {}) for key in keys]


def low_clock_nodes(series: answers.FleetSeries, jobs: Jobs) -> tuple[answers.Key, ...]:
    """Return, where groups are nodes, those whose clock is low among the nodes that a job of Slurm holds alone."""
    clocks = series.outliers.node_clocks
    low: set[answers.Key] = set()
    for job in jobs if clocks else ():
        nodes = {node for node, gpus in series.slurm_nodes.gpus_of(job).items() if series.nodes[node].gpus <= gpus}
        for model in {model for (_, node), model in clocks if node in nodes}:
            of_model = {key: clock for (key, name), clock in clocks.items() if name == model and key[1] in nodes}
            median = upper_median(of_model.values()) or 0.0
            low |= {key for key, clock in of_model.items() if clock < series.limits.clock * median}
    return tuple(sorted(low)[:answers.MOST_LOW_GPUS])
