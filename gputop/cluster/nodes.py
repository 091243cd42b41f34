"""A fleet from the nodes themselves: gputop on each is asked for its figures, and the past is what was seen since."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from gputop.cluster import slurm
from gputop.cluster.fleet import fleet_of
from gputop.cluster.model import Fleet, FleetLimits, FleetView
from gputop.cluster.node_series import Watched, series_of
from gputop.cluster.series_store import SeriesStore
from gputop.core.errors import EXIT_FAILED, GputopError
from gputop.core.findings import Problem
from gputop.telemetry.agents import NodeProblem, Ssh, by_cause
from gputop.text.units import seconds

WAIT_S = 3.0  # of a refresh: what has not come by then comes with one of the next
_GAP_S = 120.0  # not seen for longer: what was before says nothing of the time between


class NodesCollector:
    """Satisfies what the screen asks of a :class:`gputop.cluster.collect.Collector`. From one thread."""

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
