"""Asks a Prometheus for a fleet, again and again: at most four questions each time, and only for what has changed.

A question is one query; of a server that limits the length of a query it is as many as are needed
(:mod:`gputop.cluster.prometheus`), and the fleet says that.

A refresh:

1. Ask Slurm for its jobs, if it is time to.
2. Find out which metrics there are: the first time, every ten minutes, and after answers that look as if they have
   changed.
3. Ask for the present figures of all groups. If that fails, the fleet is made of what is known of before.
4. Ask for what stands out.
5. With the questions that are left ask for what was asked for longest ago: the GPUs that stand out or are on the
   screen, the nodes of open jobs, and the past of groups, nodes and GPUs. Where more is wanted than this brings, the
   next refresh brings the rest.
6. Make the fleet of all answers (:func:`gputop.cluster.fleet.fleet_of`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from gputop.cluster import slurm
from gputop.cluster.answers import FleetSeries
from gputop.cluster.available_metrics import AvailableMetrics, find_metrics
from gputop.cluster.fleet import fleet_of
from gputop.cluster.model import Fleet, FleetLimits, FleetView
from gputop.cluster.node_series import Watched, series_of
from gputop.cluster.prometheus import Client, FigureClient, figure_of
from gputop.cluster.queries import Figures, Queries
from gputop.cluster.series_store import PastQuestion, SeriesStore, SlotGrid
from gputop.cluster.wanted import GROUPS, Wanted, low_clock_nodes
from gputop.core.errors import EXIT_FAILED, GputopError
from gputop.core.findings import Problem
from gputop.telemetry.agents import NodeProblem, Ssh, by_cause
from gputop.text.units import seconds

QUERIES = 4  # of a refresh, at most, of a server that takes queries of any length
REDISCOVER_S = 600.0
_REFRESHES = 30  # of a complete fleet, at most; one of 1,500 nodes under Slurm needs as many
_SKEW_S = 60.0  # between the clocks: below it, it may be the time that an answer took
_LONG_S = 2.0
_NEVER = -1e9

_NO_JOBS = Problem("gputop cannot see any jobs: the metrics have no job label, and squeue is not available here",
                   "Label the metrics (dcgm-exporter --hpc-job-mapping-dir, or gputop export on the nodes), or run "
                   "gputop on a machine with squeue, where gputop can reach Prometheus as ssh://LOGIN/http://….")


def complete_fleet(collector: FleetCollector, view: FleetView) -> Fleet:
    """The fleet once nothing more is wanted, with what all refreshes have cost. Raises GputopError."""
    queries, came, took_s = 0, 0, 0.0
    for _ in range(_REFRESHES):
        fleet = collector.refresh(view)
        queries, came, took_s = queries + fleet.queries, came + fleet.bytes, took_s + fleet.seconds
        if collector.settled:
            break
    return replace(fleet, queries=queries, bytes=came, seconds=took_s)


class Collector:
    """Keeps the answers between refreshes. From one thread."""

    def __init__(self, client: Client, limits: FleetLimits, squeue: Callable[[], bytes] | None = None,
                 clock: Callable[[], float] = time.time) -> None:
        """``squeue`` prints the jobs as JSON; it raises OSError where there is no Slurm."""
        self._client, self._limits, self._clock = client, limits, clock
        self._figures = FigureClient(client)
        self._slurm = slurm.JobQueue(squeue)
        self._ahead_s = 0.0  # of Prometheus's clock before this machine's
        self._metrics: AvailableMetrics | None = None
        self._discovered_s = _NEVER
        self._series: FleetSeries | None = None
        self._figures_s: float | None = None
        self._round = 0
        self._asked_in: dict[str, int] = {}  # by question: the round in which it was asked last
        self._considered: set[str] = set()  # questions whose turn has come, wanted or not
        self.settled = False  # whether nothing more is wanted: the next refresh can wait

    def refresh(self, view: FleetView) -> Fleet:
        """The fleet now; if something cannot be had, with what went wrong and what is known of before.

        Raises GputopError only before the first answer.
        """
        cost = self._client.cost
        before = replace(cost)
        problems: list[Problem] = []
        now_s = self._now_s()
        self._slurm.update(now_s)
        try:
            if self._metrics is None or abs(now_s - self._discovered_s) >= REDISCOVER_S:
                self._metrics, self._discovered_s = find_metrics(self._client), now_s
                self._figures.alone = False
            left = QUERIES - (cost.queries - before.queries) - 1
            is_first = self._series is None
            self._ask_figures()
            if is_first and cost.seconds - before.seconds > _LONG_S:
                left = 0  # a slow server: what has come is shown first
            self._ask_more(view, left, problems)
        except GputopError as error:
            if self._series is None:
                raise
            problems.append(Problem(error.message, error.fix))
            self._series = replace(self._series, time_s=now_s)
            self.settled = True
        fleet = fleet_of(self._answers, self._slurm.jobs, view)
        return replace(
            fleet, source=f"{self._client.endpoint.url} ({fleet.source})", figures_s=self._figures_s,
            problems=(*problems, *self._clock_problems(), *self._length_problems(cost.queries - before.queries),
                      *fleet.problems,
                      *(Problem(f"Prometheus warns: {text}") for text in self._client.warnings),
                      *self._job_problems(self._answers.metrics)),
            queries=cost.queries - before.queries, bytes=cost.bytes - before.bytes,
            seconds=cost.seconds - before.seconds)

    def _now_s(self) -> float:
        """Return the time by Prometheus's clock."""
        return self._clock() + self._ahead_s

    # -- asking -------------------------------------------------------------------------------------

    def _ask_figures(self) -> None:
        assert self._metrics is not None
        url = self._client.endpoint.url
        answer = self._figures.instant(Queries(self._metrics, self._limits).figures())
        if not answer:
            self._discovered_s = _NEVER  # the exporters may have been exchanged for others
            raise GputopError(f"{url} has no GPU metrics for this time",
                              "Its targets page shows whether the exporters answer.")
        if not any(figure_of(series) == "activity" for series in answer):
            self._discovered_s = _NEVER  # a counter was taken off the exporters' list: others may have the activity
            raise GputopError(f"{url} no longer has GPU activity", "gputop is searching for its metrics again.")
        ahead_s = answer[0].points[-1][0] - self._clock()
        self._ahead_s = ahead_s if abs(ahead_s) > _SKEW_S else 0.0
        self._figures_s = self._now_s()
        old = self._series or FleetSeries(self._metrics, self._limits, self._figures_s)
        self._series = replace(old, metrics=self._metrics, time_s=self._figures_s, figure_series=answer)
        if 2 * len(old.jobs.keys() & self._series.jobs.keys()) < len(old.jobs):
            self._discovered_s = _NEVER  # so many do not end at once: their label may have another name now

    def _ask_more(self, view: FleetView, left: int, problems: list[Problem]) -> None:
        """Ask for what stands out, and for what is wanted most of the rest; by ``left`` questions at most."""
        in_turn: dict[str, Callable[[Wanted], bool]] = {
            "group_past": lambda wanted: self._ask_past(wanted.group_past(), view),
            "idle_past": lambda wanted: self._ask_past(wanted.idle_past(), view),
            "gpus": lambda wanted: self._ask_now("gpu_series", wanted.gpus()),
            "nodes": lambda wanted: self._ask_now("node_series", wanted.nodes()),
            "gpu_past": lambda wanted: self._ask_past(wanted.gpu_past(), view),
            "node_past": lambda wanted: self._ask_past(wanted.node_past(), view)}
        problems_before = len(problems)
        self._round += 1
        if left > 0:
            left -= self._try(self._ask_outliers, view, problems)
        for name in sorted(in_turn, key=lambda name: self._asked_in.get(name, 0)):
            if left <= 0:
                break
            if asked := self._try(in_turn[name], view, problems):
                self._asked_in[name] = self._round
                left -= asked
            self._considered.add(name)
        groups = self._wanted(view).group_past().subjects
        self.settled = len(problems) > problems_before or (
            self._considered >= in_turn.keys() and self._answers.past.is_known(GROUPS, groups))

    def _try(self, ask: Callable[[Wanted], bool], view: FleetView, problems: list[Problem]) -> int:
        """Ask, and return how many questions were asked, 0 or 1; what goes wrong with one question does not end the
        others."""
        try:
            return int(ask(self._wanted(view)))
        except GputopError as error:
            problems.append(Problem(error.message, error.fix))
            return 1

    @property
    def _answers(self) -> FleetSeries:
        """All that was answered; after the first figures."""
        assert self._series is not None
        return self._series

    def _wanted(self, view: FleetView) -> Wanted:
        return Wanted(self._answers, self._slurm.jobs, view)

    def _ask_outliers(self, wanted: Wanted) -> bool:
        before, jobs = self._answers, self._slurm.jobs
        self._series = after = replace(before, outlier_series=self._figures.instant(wanted.outliers()),
                                       idle_keys=frozenset(wanted.quiet))
        if before.outlier_series and not set(after.outliers.empty_targets).issubset(before.outliers.empty_targets):
            self._discovered_s = _NEVER  # these may have other metrics than before
        if low_clock_nodes(after, jobs) != low_clock_nodes(before, jobs):
            self._considered -= {"gpus", "gpu_past"}  # their GPUs come with the next look
        return True

    def _ask_now(self, series: str, figures: Figures) -> bool:
        """Ask for present figures, if any are wanted, and keep the answer as these ``series``."""
        if figures:
            self._series = replace(self._answers, **{series: self._figures.instant(figures)})
        return bool(figures)

    def _ask_past(self, question: PastQuestion, view: FleetView) -> bool:
        return self._answers.past.range(self._figures, question, SlotGrid.of(view, self._answers.time_s))

    # -- what is missing ----------------------------------------------------------------------------

    def _clock_problems(self) -> list[Problem]:
        if not self._ahead_s:
            return []
        return [Problem(f"the clock of this machine is {seconds(abs(self._ahead_s))} "
                        f"{'behind' if self._ahead_s > 0 else 'ahead of'} the clock of Prometheus, whose time is shown "
                        "here", "Synchronize both clocks; check with chronyc tracking or timedatectl.")]

    def _length_problems(self, queries: int) -> list[Problem]:
        """Says why a refresh had so many queries, and what it lacks."""
        too_slow, self._figures.too_slow = sorted(self._figures.too_slow), set()
        if too_slow:
            return [Problem(f"Prometheus did not answer in time about {', '.join(too_slow)}; this view is incomplete",
                            "To wait longer: gputop cluster --timeout S. To reduce the server's load: --refresh 60.")]
        left_out, self._figures.left_out = sorted(self._figures.left_out), set()
        if self._figures.max_bytes is None or (queries <= QUERIES and not left_out):
            return []
        lacks = f"; {', '.join(left_out)} did not fit" if left_out else ""
        return [Problem(f"this server accepts queries of at most {self._figures.max_bytes:,} bytes, so this refresh "
                        f"sent {queries} queries instead of at most {QUERIES}{lacks}",
                        "Start VictoriaMetrics with -search.maxQueryLen=256KiB.")]

    def _job_problems(self, metrics: AvailableMetrics) -> list[Problem]:
        problems = []
        if self._slurm.problem is not None:
            problems.append(self._slurm.problem)
        elif not self._slurm.is_there and not metrics.by_job:
            problems.append(_NO_JOBS)
        if metrics.clusters and self._slurm.jobs and not any(job.cluster in metrics.clusters
                                                             for job in self._slurm.jobs):
            problems.append(Problem(
                f"this Prometheus has {len(metrics.clusters)} clusters, and none of their labels matches squeue's "
                "cluster. gputop cannot tell the clusters' jobs apart, so users, names and ages are missing",
                "Set the cluster label to the ClusterName in slurm.conf."))
        return problems


WAIT_S = 3.0  # of a refresh: what has not come by then comes with one of the next
_GAP_S = 120.0  # not seen for longer: what was before says nothing of the time between


class NodesCollector:
    """A fleet from the nodes themselves: gputop on each is asked for its figures, and the past is what was seen since.
    From one thread."""

    def __init__(self, names: Sequence[str], ssh: Ssh, limits: FleetLimits,
                 squeue: Callable[[], bytes] | None = None, period_s: float = 15.0,
                 clock: Callable[[], float] = time.time, wait_s: float = WAIT_S) -> None:
        """A node is asked again after ``period_s``. ``squeue`` as of the other collector."""
        self._ssh, self._limits, self._clock = ssh, limits, clock
        self._period_s, self._wait_s, self._gap_s = period_s, wait_s, max(_GAP_S, 3 * period_s)
        self._nodes = {name: Watched() for name in names}
        self._began_s = clock()
        self._slurm = slurm.JobQueue(squeue)
        self._past = SeriesStore(live=True)
        self.settled = False

    def close(self) -> None:
        self._ssh.close()

    # -- asking -------------------------------------------------------------------------------------

    def refresh(self, view: FleetView) -> Fleet:
        """The fleet now. Raises GputopError before any node has answered, where all have failed."""
        began_s = self._clock()
        due = [name for name, node in self._nodes.items()
               if not node.running and began_s - node.asked_s >= self._period_s]
        for name in due:
            self._nodes[name].asked_s, self._nodes[name].running = began_s, True
        self._ssh.ask(due)
        self._slurm.update(began_s)
        came = self._take()
        self.settled = not any(node.running for node in self._nodes.values())
        answered = [node for node in self._nodes.values() if node.answer is not None]
        problems = self._problems()
        if not answered and self.settled:
            first = problems[0] if problems else Problem("no nodes were queried")
            raise GputopError(f"no node answered. {first.message}", first.fix, EXIT_FAILED)
        now_s = self._clock()
        series = series_of(self._nodes, self._slurm.jobs, self._limits, view, now_s, self._past)
        fleet = fleet_of(series, self._slurm.jobs, view)
        return replace(
            fleet, source=f"{len(answered)} of {len(self._nodes)} nodes over ssh", problems=tuple(problems),
            figures_s=self._figures_s(now_s), queries=len(due), bytes=came, seconds=now_s - began_s)

    def _figures_s(self, now_s: float) -> float | None:
        """Now, as long as any node answers in its turn."""
        newest_s = max((node.got_s for node in self._nodes.values() if node.answer is not None), default=None)
        return now_s if newest_s is not None and now_s - newest_s <= 2 * self._period_s else newest_s

    def _take(self) -> int:
        """Take what the nodes have answered, as far as it comes in time; returns its bytes."""
        ends_s, came = time.monotonic() + self._wait_s, 0
        while any(node.running for node in self._nodes.values()) and (
                taken := self._ssh.take(ends_s - time.monotonic())) is not None:
            name, answer, count = taken
            node, came = self._nodes[name], came + count
            node.running = False
            if isinstance(answer, NodeProblem):
                node.problem = answer
                if self._clock() - node.got_s > self._gap_s:
                    node.answer = None  # too old to be taken for now
            else:
                node.problem = None
                node.remember(answer, self._clock(), self._limits.idle, self._gap_s)
        return came

    def _problems(self) -> list[Problem]:
        """Nodes with one cause together; then what a node says of itself."""
        problems = {name: node.problem for name, node in self._nodes.items() if node.problem is not None}
        problems |= {name: NodeProblem(f"the node has no GPU: {node.answer.source}", "ssh NODE gputop doctor")
                     for name, node in self._nodes.items()
                     if node.problem is None and node.answer is not None and not node.answer.gpus}
        out = by_cause(problems)
        if self._slurm.problem is not None:
            out.append(self._slurm.problem)
        watched_s = self._clock() - self._began_s
        if watched_s < self._limits.idle_s:
            out.append(Problem(f"watched for {seconds(watched_s)} so far; gputop can detect held but idle GPUs after "
                               f"{seconds(self._limits.idle_s)}"))
        return out


FleetCollector = Collector | NodesCollector
