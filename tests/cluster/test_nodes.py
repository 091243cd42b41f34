"""A fleet from the nodes' own snapshots: jobs, means over time, what is compared and what is not."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import pytest

from benchmarks.cluster_lab import scraping, wait_for
from gputop.advice.fleet.advise import fleet_advice
from gputop.cluster.collect import Collector, complete_fleet
from gputop.cluster.endpoint import Credentials, parse_endpoint
from gputop.cluster.nodes import NodesCollector
from gputop.cluster.prometheus import Client
from gputop.cluster.view import FleetView
from gputop.core import codec
from gputop.core.errors import GputopError
from gputop.core.samples import GpuSample, Reading
from gputop.telemetry.agents import NodeProblem, read_line
from gputop.telemetry.history import History
from gputop.telemetry.node_answer import NodeAnswer, answer_of
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
    return 0.4 if (node, gpu) == ("n2", 3) else 0.9


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
    assert fleet.jobs[0].history.values[-1] == pytest.approx((23 * 0.9 + 0.4) / 24)


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


def test_slurm_says_which_nodes_a_job_holds_where_no_process_does() -> None:
    cluster = Cluster(lambda node, gpu, at_s: 0.0, gpus={})
    jobs = [{"job_id": number, "job_state": "RUNNING", "nodes": nodes, "gres_detail": gpus, "start_time": 100}
            for number, nodes, gpus in ((8, "gpu[1-2]", ["gpu:8(IDX:0-7)"] * 2), (9, "gpu3", ["gpu:2(IDX:0-1)"]))]
    squeue = json.dumps({"jobs": jobs}).encode()
    job, shared = watch(cluster, collector(cluster, ["gpu1", "ana@gpu2", "gpu3", "gpu4"], lambda: squeue), 0).jobs
    assert (job.id, job.mapped, job.gpus, job.nodes) == ("8", "node", 16, 2)
    assert (shared.id, shared.mapped, shared.gpus, shared.idle_gpus) == ("9", "shared node", 2, None)


def test_nodes_that_fail_are_told_together_and_the_rest_goes_on() -> None:
    cluster = Cluster(slow_gpu, container="slurm 7")
    names = [f"n{i}" for i in range(12)]
    cluster.problems = {name: NodeProblem("it does not answer", "ssh NODE true") for name in names[2:]}
    asked = collector(cluster, names)
    fleet = watch(cluster, asked, 0)
    problem, young = fleet.problems
    assert "held and idle GPUs after 15 min" in young.message
    assert problem.message == "n2, n3, n4, n5, n6, n7, n8, n9 and 2 more: it does not answer"
    assert problem.fix == "ssh n2 true" and fleet.jobs[0].gpus == 16 and fleet.source == "2 of 12 nodes by ssh"
    cluster.problems = {}
    cluster.now_s += 15
    assert len(asked.refresh(VIEW).problems) == 1 and asked.settled
    asked.close()
    assert cluster.closed
    cluster.problems = {"n1": NodeProblem("it does not answer", "ssh NODE true")}
    with pytest.raises(GputopError, match=r"no node answers\. n1: it does not answer"):
        collector(cluster, ["n1"]).refresh(VIEW)


def test_a_node_that_answers_no_more_is_left_out_after_a_while() -> None:
    cluster = Cluster(slow_gpu, container="slurm 7")
    asked = collector(cluster, ["n1", "n2"])
    watch(cluster, asked, 30)
    cluster.problems = {"n2": NodeProblem("it does not answer", "ssh NODE true")}
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
