"""A fleet from the nodes' own snapshots: jobs, means over time, what is compared and what is not."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean, median
from typing import Any

import pytest

from benchmarks.cluster_lab import scraping, wait_for
from gputop.advice.fleet.advise import fleet_advice
from gputop.cluster.collect import Collector, NodesCollector, complete_fleet
from gputop.cluster.endpoint import Credentials, parse_endpoint
from gputop.cluster.model import FleetView
from gputop.cluster.prometheus import Client
from gputop.core import codec
from gputop.core.errors import GputopError
from gputop.core.samples import LOST, GpuSample, Reading, XidEvent
from gputop.telemetry.agents import FIGURES, GpuHolder, NodeAnswer, NodeGpu, NodeProblem, answer_of, read_line
from gputop.telemetry.history import History
from tests.cluster.fleets import LIMITS, NOW
from tests.fakes import node_sample
from tests.records import replace

VIEW = FleetView(span_s=3600.0, step_s=60.0)
Work = Callable[[str, int, float], float]


class Cluster:
    """Nodes that answer at once: ``work`` of a node's GPU at a time is its SM activity."""

    def __init__(self, work: Work, **changes: Any) -> None:
        self.now_s = NOW
        self.work = work
        self.problems: dict[str, NodeProblem] = {}
        self.changes = changes
        self.clock_hz: Callable[[str, int, float], float] = lambda node, gpu, at_s: 1.98e9
        self.model: Callable[[str], str] = lambda node: "NVIDIA H100"
        self.closed = False
        self.asked: list[str] = []

    def __call__(self) -> float:
        return self.now_s

    def ask(self, nodes: Sequence[str]) -> None:
        self.asked += nodes

    def take(self, most_s: float) -> tuple[str, NodeAnswer | NodeProblem, int] | None:
        node = self.asked.pop() if self.asked else ""
        return (node, self.problems.get(node) or self.answer(node), 1000) if node else None

    def answer(self, node: str) -> NodeAnswer:
        def change(gpu: GpuSample, tick: int) -> GpuSample:
            index = gpu.info.index
            return replace(gpu, info=replace(gpu.info, uuid=f"{node}-{index}", name=self.model(node)), readings={
                **gpu.readings, "sm_active": Reading(self.work(node, index, self.now_s), "ratio", "GPM"),
                "sm_clock_hz": Reading(self.clock_hz(node, index, self.now_s), "Hz", "NVML")})

        sample = node_sample(0, change=change)
        process = replace(sample.processes[0], **self.changes)
        sample = replace(sample, host=replace(sample.host, hostname=f"{node}.cluster"), processes=(process,))
        return read_line(io.BytesIO(codec.encode(answer_of(sample, History(), 1.0))), NodeAnswer)

    def close(self) -> None:
        self.closed = True


def collector(cluster: Cluster, names: list[str], squeue: Callable[[], bytes] | None = None) -> NodesCollector:
    return NodesCollector(names, cluster, LIMITS, squeue, 15.0, cluster, wait_s=30.0)  # type: ignore[arg-type]


def watch(cluster: Cluster, asked: NodesCollector, seconds: float, view: FleetView = VIEW) -> Any:
    fleet = asked.refresh(view)
    for _ in range(int(seconds // 15)):
        cluster.now_s += 15.0
        fleet = asked.refresh(view)
    return fleet


def slow_gpu(node: str, gpu: int, at_s: float) -> float:
    return {("n2", 3): 0.4, ("n1", 0): 0.8}.get((node, gpu), 0.9)


def test_a_job_of_slurm_by_its_control_groups_and_its_straggler() -> None:
    cluster = Cluster(slow_gpu, container="slurm 4711", started_s=NOW - 7200.0)
    asked = collector(cluster, ["n1", "n2", "n3"])
    fleet = watch(cluster, asked, 30)
    job, = fleet.jobs
    assert (job.id, job.label, job.mapped, job.gpus, job.nodes) == ("4711", "slurm_job_id", "label", 24, 3)
    assert fleet.gpus == 24 and fleet.free is None and fleet.kinds == ("sm_active",) and fleet.bytes == 3000
    assert not fleet_advice(fleet)[0]  # three seconds are too few to compare
    fleet = watch(cluster, asked, 90, replace(VIEW, open_jobs=("4711",), open_nodes=(("4711", "n2"),)))
    found, = fleet_advice(fleet)[0]
    assert found.id == "straggler_gpu" and found.places == ("n2:3",)
    n2 = next(node for node in fleet.jobs[0].each if node.name == "n2")
    assert [gpu.gpu for gpu in n2.each] == [str(i) for i in range(8)] and n2.each[3].activity == pytest.approx(0.4)
    assert fleet.jobs[0].history.values[-1] == pytest.approx((22 * 0.9 + 0.8 + 0.4) / 24)
    assert [low.name for low in fleet.jobs[0].low_gpus] == ["n2:3"]


def test_a_busy_gpu_at_a_low_clock_is_found_among_gpus_of_its_model() -> None:
    cluster = Cluster(lambda node, gpu, at_s: 0.97 if (node, gpu) == ("n2", 3) else 0.9, container="slurm 4711",
                      started_s=NOW - 7200.0)
    cluster.clock_hz = lambda node, gpu, at_s: 1.2e9 if (node, gpu) == ("n2", 3) and at_s > NOW + 300 else 1.98e9
    asked = collector(cluster, ["n1", "n2", "n3"])
    assert not fleet_advice(watch(cluster, asked, 360))[0]  # its mean is still that of before
    found, = fleet_advice(watch(cluster, asked, 540))[0]
    assert found.id == "low_clock_gpu" and found.places == ("n2:3",) and "1,200 MHz" in found.why
    assert found.since_s == pytest.approx(NOW + 300, abs=60) and found.since_exact
    cluster.model = lambda node: "NVIDIA A100" if node == "n2" else "NVIDIA H100"
    cluster.clock_hz = lambda node, gpu, at_s: 1.41e9 if node == "n2" else 1.98e9
    asked = collector(cluster, ["n1", "n2", "n3"])
    assert not fleet_advice(watch(cluster, asked, 900))[0]


def test_a_job_that_has_stopped_is_held_idle_after_a_quarter_of_an_hour_of_it() -> None:
    cluster = Cluster(lambda node, gpu, at_s: 0.9 if at_s < NOW + 120 else 0.0, container="slurm 7")
    asked = collector(cluster, ["n1"])
    assert not fleet_advice(watch(cluster, asked, 960))[0]
    found, = fleet_advice(watch(cluster, asked, 120))[0]
    assert found.id == "held_idle" and found.evidence["lasts_s"] == pytest.approx(960, abs=60)


def test_a_time_that_nobody_saw_is_not_called_idle() -> None:
    cluster = Cluster(lambda node, gpu, at_s: 0.0, container="slurm 7")
    asked = collector(cluster, ["n1"])
    watch(cluster, asked, 60)
    cluster.now_s += 3000.0  # the laptop slept
    assert watch(cluster, asked, 60).jobs[0].idle_gpus == 0


def test_without_slurm_user_and_program_name_a_row_and_its_gpus_are_not_compared() -> None:
    cluster = Cluster(slow_gpu, command="/opt/python /home/ana/train.py --lr 0.1", user="ana")
    fleet = watch(cluster, collector(cluster, ["n1", "n2", "n3"]), 150)
    job, = fleet.jobs
    assert (job.id, job.mapped, job.user, job.gpus) == ("ana/train.py", "process", "ana", 24)
    found, abstained = fleet_advice(fleet)
    assert not found and {own.id for own in abstained} >= {"straggler_gpu", "slow_node"}


def test_nodes_that_fail_are_told_together_and_the_rest_goes_on() -> None:
    cluster = Cluster(slow_gpu, container="slurm 7")
    names = [f"n{i}" for i in range(12)]
    cluster.problems = {name: NodeProblem("the node does not answer", "ssh NODE true") for name in names[2:]}
    asked = collector(cluster, names)
    fleet = watch(cluster, asked, 0)
    problem, young = fleet.problems
    assert "held but idle GPUs after 15 min" in young.message
    assert problem.message == "n2, n3, n4, n5, n6, n7, n8, n9 and 2 more: the node does not answer"
    assert problem.fix == "ssh n2 true" and fleet.jobs[0].gpus == 16 and fleet.source == "2 of 12 nodes over ssh"
    cluster.problems = {}
    cluster.now_s += 15
    assert len(asked.refresh(VIEW).problems) == 1 and asked.settled
    asked.close()
    assert cluster.closed
    cluster.problems = {"n1": NodeProblem("the node does not answer", "ssh NODE true")}
    with pytest.raises(GputopError, match=r"no node answered\. n1: the node does not answer"):
        collector(cluster, ["n1"]).refresh(VIEW)


def test_a_node_that_answers_no_more_is_left_out_after_a_while() -> None:
    cluster = Cluster(slow_gpu, container="slurm 7")
    asked = collector(cluster, ["n1", "n2"])
    watch(cluster, asked, 30)
    cluster.problems = {"n2": NodeProblem("the node does not answer", "ssh NODE true")}
    assert watch(cluster, asked, 60).gpus == 16  # as it was a minute ago
    fleet = watch(cluster, asked, 120)
    assert fleet.gpus == 8 and fleet.figures_s == cluster.now_s and "n2" in fleet.problems[0].message


def test_what_a_node_says_is_made_safe_to_show() -> None:
    cluster = Cluster(slow_gpu, container="slurm 7\x1b[2J")
    fleet = watch(cluster, collector(cluster, ["n1"]), 15)
    assert fleet.jobs[0].id.isprintable() and fleet.jobs[0].gpus == 8


def test_gpus_that_a_node_no_longer_names_are_forgotten() -> None:
    cluster = Cluster(slow_gpu, container="slurm 7")
    answer, asked = cluster.answer, collector(cluster, ["n1"])
    cluster.answer = lambda node: answer(f"n{cluster.now_s}")  # type: ignore[method-assign]
    watch(cluster, asked, 300)
    assert len(asked._nodes["n1"].gpus) == 8


def test_a_node_that_is_named_twice_counts_once() -> None:
    cluster = Cluster(slow_gpu, container="slurm 7")
    answer = cluster.answer
    cluster.answer = lambda node: answer("n1")  # type: ignore[method-assign]
    fleet = watch(cluster, collector(cluster, ["n1", "n1.cluster"]), 0)
    assert fleet.gpus == 8 and fleet.jobs[0].nodes == 1


def test_a_node_answers_with_two_kilobytes_of_what_the_columns_need() -> None:
    history = History()
    for tick in range(5):
        history.append(sample := node_sample(tick, gpus=8))
    line = codec.encode(answer_of(sample, history, 2.5))
    assert len(sample.gpus) == 8 and len(line) < 2600
    answer = read_line(io.BytesIO(line), NodeAnswer)
    for own, gpu in zip(answer.gpus, sample.gpus, strict=True):
        metric, _ = gpu.activity()
        assert (own.uuid, own.label, own.model, own.kind) == (gpu.info.uuid, gpu.info.label, gpu.info.name, metric)
        for name in ("sm_active", "power_w", "memory_used_bytes", "sm_clock_hz", "tensor_active", "power_limit_w"):
            values = [node_sample(tick, gpus=8).gpus[gpu.info.index][name].value for tick in (2, 3, 4)]
            assert own.figures.get(name) == (None if None in values else pytest.approx(fmean(values), rel=1e-4)), name
        assert own.activity == own.figures["sm_active"]
    with pytest.raises(NodeProblem, match="without an answer"):
        read_line(io.BytesIO(line.replace(b"[[", b"[[[")), NodeAnswer)


# -- by hand --------------------------------------------------------------------------------------------

def gpus(node: str, activities: Sequence[float | None], *holders: GpuHolder, first: int = 0, kind: str = "sm_active",
         clocks: Sequence[float | None] = (1.98e9,) * 8, **figures: float) -> tuple[NodeGpu, ...]:
    return tuple(NodeGpu(f"{node}-{i}", str(i), "NVIDIA H100", kind if activity is not None else "", activity, tuple(
        {**figures, "sm_clock_hz": clock}.get(name) for name in FIGURES), holders)
                 for i, (activity, clock) in enumerate(zip(activities, clocks, strict=False), first))


def slurm(number: int) -> GpuHolder:
    return GpuHolder("ana", "train.py", f"slurm {number}", NOW - 600, 7)


def by_hand(answers: Callable[[float], Mapping[str, NodeAnswer]], *jobs: tuple[Mapping[str, Any], str, Sequence[int]],
            ) -> tuple[Cluster, NodesCollector]:
    """``jobs``: what Slurm says of them, their nodes, and the GPUs on each."""
    cluster = Cluster(lambda node, gpu, at_s: 0.0)
    cluster.answer = lambda node: answers(cluster.now_s)[node]  # type: ignore[method-assign]
    queue = json.dumps({"jobs": [{"job_state": "RUNNING", "start_time": 100, "nodes": nodes, "gres_detail": [
        f"gpu:{count}" for count in counts], **job} for job, nodes, counts in jobs]}).encode()
    return cluster, collector(cluster, list(answers(NOW)), (lambda: queue) if jobs else None)


def test_each_gpu_is_in_the_jobs_that_hold_it() -> None:
    docker = [GpuHolder("ana", "a\x1b.py", "docker 4f", NOW - start_s, 8) for start_s in (600, 900, 300)]
    answers = {
        "n1": NodeAnswer(hostname="n1.cluster", gpus=(
            *gpus("n1", [0.9] * 4, slurm(77), memory_used_bytes=1e9), *gpus("n1", [0.9] * 4, slurm(78), first=4,
                                                                           memory_used_bytes=1e9))),
        "n2": NodeAnswer(hostname="n2.cluster", gpus=gpus("n2", [0.5] * 8, slurm(78))),
        "alias": NodeAnswer(hostname="n3.cluster", gpus=(*gpus("n3", [0.01] * 6, slurm(79)), *gpus("n3", [0.01] * 2,
                                                                                            first=6))),
        **{name: NodeAnswer(hostname=f"ip-{name}", gpus=gpus(name, [0.9] * 7 + [0.1])) for name in (
            "n4", "ana@n5", "n6")},
        "n7": NodeAnswer(hostname="n7", gpus=(
            *(own for i, holder in enumerate(docker) for own in gpus("n7", [0.9], holder, first=i)),
            *gpus("n7", [0.9], first=3)))}
    cluster, asked = by_hand(
        lambda at_s: answers, ({"job_id": 77, "array_job_id": 70, "array_task_id": 1}, "n1", [4]),
        ({"job_id": 78}, "n[1-2],n9", [4, 8, 8]), ({"job_id": 79, "user_name": "bob"}, "n3", [8]),
        ({"job_id": 80}, "n4", [2]), ({"job_id": 81}, "n4", [5]), ({"job_id": 82}, "n[5-6]", [8, 4]))
    fleet = watch(cluster, asked, 90, replace(VIEW, open_jobs=("78",)))
    jobs = {job.id: job for job in fleet.jobs}
    assert {id_: (job.label, job.mapped, job.gpus, job.nodes, job.number) for id_, job in jobs.items()} == {
        "77": ("slurm_job_id", "label", 4, 1, "70_1"), "78": ("slurm_job_id", "label", 20, 3, "78"),
        "79": ("", "node", 8, 1, "79"), "80": ("", "shared node", 2, 1, "80"), "81": ("", "shared node", 5, 1, "81"),
        "82": ("", "shared node", 12, 2, "82"), "ana/a\ufffd.py": ("", "process", 3, 1, "")}
    assert fleet.gpus == 8 * 6 + 4 and fleet.free.gpus == 1, "of two jobs on a node each GPU counts once"
    assert (jobs["79"].user, jobs["77"].start_s, jobs["ana/a\ufffd.py"].start_s) == ("bob", 100, NOW - 900)
    assert (jobs["77"].memory_used_bytes, jobs["78"].memory_used_bytes) == (4e9, None), "unknown of some GPUs"
    assert (jobs["79"].idle.quiet, jobs["78"].idle.quiet, jobs["80"].idle.quiet) == (8, 0, None)
    assert [(node.name, node.gpus, node.activity) for node in jobs["78"].each] == [
        ("n1", 4, pytest.approx(0.9)), ("n2", 8, pytest.approx(0.5))]
    assert not any(job.low_gpus or job.low_nodes for job in fleet.jobs if job.mapped in ("shared node", "process"))


def test_outliers_are_those_that_statistics_of_all_gpus_show() -> None:
    """Two jobs of three nodes: the truth is from the very activities and clocks."""
    dice = random.Random(234)
    activity = {node: [dice.choice((0.0, 0.15, 0.3, 0.5, 0.8, 0.85, 0.9, 0.95)) for _ in range(8)] for node in "abcdef"}
    activity["b"] = [0.3, *[0.4] * 7]
    clock = {node: [dice.choice((1.2e9, 1.9e9, 1.95e9, 1.98e9)) for _ in range(8)] for node in "abcdef"}
    answers = {node: NodeAnswer(hostname=node, gpus=gpus(node, activity[node], slurm(1 + (node > "c")),
                                                         clocks=clock[node], power_limit_w=700.0 + i))
               for i, node in enumerate("abcdef")}
    cluster, asked = by_hand(lambda at_s: answers)
    fleet = watch(cluster, asked, 120)
    for job, nodes in zip(sorted(fleet.jobs, key=lambda job: job.id), ("abc", "def"), strict=True):
        working = {f"{node}:{i}": value for node in nodes for i, value in enumerate(activity[node]) if value > 0.01}
        middle = median(working.values())
        means = {node: fmean(value for value in activity[node] if value > 0.01) for node in nodes}
        assert (job.median, job.node_median) == (pytest.approx(middle), pytest.approx(median(means.values())))
        assert job.mad == pytest.approx(median(abs(value - middle) for value in working.values()))
        low = sorted(value for value in working.values() if value < middle - LIMITS.below)
        assert [own.activity for own in job.low_gpus] == pytest.approx(low[:4]) and len(low) > 4
        assert {own.name for own in job.low_nodes} == {
            node for node, mean in means.items() if mean < median(means.values()) - LIMITS.below}
        still = {f"{node}:{i}" for node in nodes for i, value in enumerate(activity[node]) if value < LIMITS.idle}
        assert still >= {*job.idle.names} and len(job.idle.names) == min(4, len(still)) > 0
        assert job.idle.quiet == len(still)
        busy = [clock[node][i] for node in nodes for i, value in enumerate(activity[node]) if value > LIMITS.busy]
        middle = median(busy)
        slow = [hz for hz in busy if hz < LIMITS.clock * middle]
        assert {own.clock_hz for own in job.low_clocks} == {1.2e9} and len(job.low_clocks) == min(4, len(slow))
        assert {(own.median_hz, own.mad_hz, own.gpus, own.low) for own in job.low_clocks} == {
            (middle, median(abs(hz - middle) for hz in busy), len(busy), len(slow))}
        assert job.peers["power_limit_w"] == 700.0 + "abcdef".index(nodes[1])


def test_the_past_is_the_mean_of_what_was_seen_in_each_step() -> None:
    """A node falls silent after two minutes: what is newer is of the other one alone."""
    def answers(at_s: float) -> dict[str, NodeAnswer]:
        level = 0.2 if at_s % 60 < 30 else 0.6
        return {"n1": NodeAnswer(hostname="n1", gpus=gpus("n1", [level, *[0.9] * 6, 0.0], slurm(5), clocks=[
                    1.0e9 + at_s - NOW, *[2e9] * 7])),
                "n2": NodeAnswer(hostname="n2", gpus=gpus("n2", [0.9] * 8, slurm(5)))}

    view = replace(VIEW, open_jobs=("5",), open_nodes=(("5", "n1"),))
    cluster, asked = by_hand(answers)
    watch(cluster, asked, 105, view)
    cluster.problems = {"n2": NodeProblem("the node does not answer", "")}
    (job,) = watch(cluster, asked, 75, view).jobs
    both, alone = (0.4 + 6 * 0.9 + 8 * 0.9) / 16, (0.4 + 6 * 0.9) / 8
    assert job.history.values[-4:-1] == pytest.approx((both, both, alone))
    assert job.history.time_s(len(job.history.values) - 1) == NOW + 240
    assert job.idle_history.values[-4:-1] == (1.0, 1.0, 1.0) and job.idle.busy_history.values[-4:-1] == (15, 15, 7)
    (n1,) = (node for node in job.each if node.name == "n1")
    assert n1.history.values[-4:-1] == pytest.approx((alone,) * 3)
    assert n1.each[0].history.values[-4:-1] == pytest.approx((0.4,) * 3)
    (slow,) = job.low_clocks
    assert slow.history.values[-4:-1] == pytest.approx([1.0e9 + 22.5 + 60 * i for i in range(3)])


def test_a_gpu_is_idle_since_its_job_has_it() -> None:
    cluster, asked = by_hand(lambda at_s: {"n1": NodeAnswer(hostname="n1", gpus=gpus(
        "n1", [0.0] * 8, slurm(5 if at_s < NOW + 600 else 6)))})
    (job,) = watch(cluster, asked, 1200).jobs
    assert (job.id, job.idle_gpus, job.idle.watched, job.idle.seen, job.idle.quiet) == ("6", 0, 0, 8, 8)
    (job,) = watch(cluster, asked, 330).jobs
    assert (job.idle_gpus, job.idle.watched) == (8, 8)


def test_activities_of_two_kinds_are_not_compared_and_one_that_is_gone_is_not_known() -> None:
    """In the end a GPU has coarse utilization alone, another one nothing; the clock of a third was read twice."""
    def answers(at_s: float) -> dict[str, NodeAnswer]:
        late = at_s >= NOW + 90
        return {"n1": NodeAnswer(hostname="n1", gpus=(
            *gpus("n1", [0.9 if late else 0.3], slurm(5), kind="util" if late else "sm_active"),
            *gpus("n1", [0.2, *[0.9] * 6], slurm(5), first=1))),
                "n2": NodeAnswer(hostname="n2", gpus=(
            *gpus("n2", [None if late else 0.9], slurm(6)), *gpus("n2", [0.9] * 6, slurm(6), first=1),
            *gpus("n2", [0.9], slurm(6), first=7, clocks=[1e9 if at_s <= NOW + 15 else None])))}

    cluster, asked = by_hand(answers)
    view = replace(VIEW, open_jobs=("5", "6"), open_nodes=(("5", "n1"), ("6", "n2")))
    mixed, gone = sorted(watch(cluster, asked, 180, view).jobs, key=lambda job: job.id)
    assert (mixed.kind, mixed.low_gpus, mixed.each[0].each[0].activity) == ("mixed", (), pytest.approx(0.9))
    assert gone.each[0].each[0].activity is None and gone.activity == pytest.approx(0.9) and not gone.low_clocks


def test_nodes_are_asked_once_a_period_and_those_that_run_are_waited_for() -> None:
    queue, node = [], NodeAnswer(hostname="n", gpus=gpus("n", [0.9] * 8, slurm(7)), source="")
    cluster, silent = Cluster(slow_gpu), {"n2"}
    cluster.answer = lambda name: node if name == "n1" else NodeAnswer(hostname=name, gpus=(), source="no driver")  # type: ignore[method-assign]
    cluster.take = lambda most_s: next(  # type: ignore[method-assign]
        ((name, cluster.problems.get(name) or cluster.answer(name), 10) for name in [*cluster.asked]
         if name not in silent and not cluster.asked.remove(name)), None)  # type: ignore[func-returns-value]

    def squeue() -> bytes:
        queue.append(cluster.now_s)
        raise GputopError("slurm_load_jobs error")

    asked = collector(cluster, ["n1", "n2"], squeue)
    costs = []
    for seconds in (0, 5, 10, 15):
        cluster.now_s += seconds
        fleet = asked.refresh(VIEW)
        costs.append((fleet.queries, fleet.bytes, asked.settled))
    assert costs == [(2, 10, False), (0, 0, False), (1, 10, False), (1, 10, False)] and fleet.gpus == 8
    assert queue == [NOW, NOW + 30] and "slurm_load_jobs error" in [problem.message for problem in fleet.problems]
    silent.clear()
    fleet = asked.refresh(VIEW)
    assert asked.settled and "n2: the node has no GPU: no driver" in [problem.message for problem in fleet.problems]
    cluster.problems = dict.fromkeys(("n1", "n2"), NodeProblem("the node does not answer", ""))
    cluster.now_s += 60
    assert asked.refresh(VIEW).figures_s == cluster.now_s - 60, "the figures are those of the last answer"
    silent.update(("n1", "n2"))
    assert not collector(cluster, ["n1"]).refresh(VIEW).jobs, "an answer may still come"


def test_a_node_answers_with_who_computes_on_each_instance() -> None:
    """GPU 0 is divided into instances 1 and 2, GPU 1 draws a screen, GPU 2 is lost and had two Xids."""
    sample = node_sample(0, gpus=3)
    whole, drawing, lost = sample.gpus
    parts = [replace(whole, info=replace(whole.info, uuid=f"MIG-{mig}", mig=mig)) for mig in (1, 2)]
    use = sample.processes[0].gpus[0]
    held = {1: replace(use, kind="G"), 2: use}
    processes = [replace(sample.processes[0], command="/opt/bin/python -m /srv/jobs/train.py --a 1", gpus=own)
                 for own in ({0: replace(use, mig=2)}, held)]
    answer = answer_of(replace(
        sample, processes=tuple(processes), simulated=True, gpus=(
            replace(whole, info=replace(whole.info, mig_mode=True)), *parts, drawing,
            replace(lost, state=LOST, xids=(XidEvent(NOW, 31), XidEvent(NOW, 79)), readings={
                **lost.readings, "row_remap_failed": Reading(1.0, "count"), "power_w": Reading(123.456, "W")}))),
        History(), 1.0)
    assert [(own.label, len(own.holders), own.activity is None) for own in answer.gpus] == [
        ("0:1", 0, False), ("0:2", 1, False), ("1", 0, False), ("2", 1, True)] and answer.simulated
    assert answer.gpus[1].holders[0].program == "train.py"
    figures = answer.gpus[3].figures
    assert (figures["xid"], figures["rows_remap_failed"], figures["power_w"]) == (79, 1, 123.46)


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus here (tests/debian_packages.sh)")
def test_nodes_and_a_prometheus_of_the_same_figures_make_the_same_job() -> None:
    """Three nodes behind a real Prometheus, and by ssh: a slow GPU, a slow node, and a GPU that does nothing."""
    def work(node: str, gpu: int, at_s: float) -> float:
        return 0.0 if (node, gpu) == ("n1", 7) else 0.3 if (node, gpu) == ("n2", 5) else (
            0.6 + gpu / 1000 if node == "n3" else 0.9)

    def page(node: str) -> bytes:
        lines = []
        for gpu in range(8):
            labels = f'gpu="{gpu}",uuid="{node}-{gpu}"'
            lines += [f'gputop_gpu_info{{{labels},name="NVIDIA H100"}} 1',
                      f'gputop_gpu_job_info{{{labels},slurm_job_id="4711"}} 1',
                      f"gputop_gpu_sm_active_ratio{{{labels}}} {work(node, gpu, 0.0)}",
                      f"gputop_gpu_sm_clock_hertz{{{labels}}} 1.98e9"]
        return "".join(f"{line}\n" for line in lines).encode()

    nodes = ["n1", "n2", "n3"]
    with scraping({node: partial(page, node) for node in nodes}) as address:
        wait_for(address, "count(gputop_gpu_sm_active_ratio)", 24)
        with contextlib.closing(Client(parse_endpoint(address), Credentials())) as client:
            (theirs,) = complete_fleet(Collector(client, LIMITS), VIEW).jobs
    cluster = Cluster(work, container="slurm 4711")
    (ours,) = watch(cluster, collector(cluster, nodes), 150).jobs
    for name in ("id", "label", "mapped", "gpus", "nodes", "kind"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for name in ("activity", "median", "mad", "node_median"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name)), name
    for name in ("low_gpus", "low_nodes"):
        assert [(low.name, low.activity) for low in getattr(ours, name)] == [
            (low.name, pytest.approx(low.activity)) for low in getattr(theirs, name)], name
    assert ours.idle.names == theirs.idle.names == ("n1:7",) and ours.idle.quiet == theirs.idle.quiet == 1
    assert ours.low_gpus[0].name == "n2:5"
