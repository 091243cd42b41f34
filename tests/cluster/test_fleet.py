"""The fleet that follows from the series of a Prometheus and from Slurm's jobs; no server, no clock."""

from __future__ import annotations

from typing import Any

import pytest

from gputop.cluster.answers import FleetSeries
from gputop.cluster.available_metrics import AvailableMetrics
from gputop.cluster.fleet import fleet_of
from gputop.cluster.model import NO_JOB, Fleet, FleetView
from gputop.cluster.prometheus import Series
from gputop.cluster.series_store import PastQuestion, SeriesStore, SlotGrid
from gputop.cluster.slurm import SlurmJob
from gputop.cluster.wanted import ACTIVITY, CLOCK, GPUS, GROUPS, IDLE, NODES
from tests.cluster.fleets import LIMITS, NOW
from tests.records import replace

SM, UTIL = "DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_DEV_GPU_UTIL"
BY_JOB = AvailableMetrics({SM: 64}, ("dcgm",), ("hpc_job",))
BY_NODE = AvailableMetrics({SM: 64}, ("dcgm",))
TWO_KINDS = AvailableMetrics({SM: 32, UTIL: 64}, ("dcgm",), ("hpc_job",))
VIEW = FleetView(span_s=600.0, step_s=120.0)
JOB, OTHER = {"hpc_job": "7"}, {"hpc_job": "8"}
N1, N2, N3 = ({"Hostname": f"n{i}.site", "instance": f"10.0.0.{i}:9400"} for i in (1, 2, 3))
GPU = {"UUID": "GPU-1", "gpu": "3", **N1}


def said(*rows: tuple[str, float] | tuple[str, float, dict[str, str]]) -> list[Series]:
    """An answer: figure, value, labels."""
    return [Series({**(labels[0] if labels else {}), "figure": figure}, [(NOW, value)])
            for figure, value, *labels in rows]


def of(metrics: AvailableMetrics, *figures: Any, **answers: Any) -> FleetSeries:
    return FleetSeries(metrics, LIMITS, NOW, said(*figures), **answers)


def running(gpus: dict[str, int], **changes: Any) -> SlurmJob:
    return replace(SlurmJob("7", "7", "train", "ada", NOW - 3600, gpus), **changes)


def with_past(store: SeriesStore, topic: str, subjects: list[Any], *series: Series) -> None:
    class Said:
        def range(self, figures: object, begin_s: float, end_s: float, step_s: float) -> list[Series]:
            return list(series)

    def series_id(labels: dict[str, str]) -> Any:
        if topic == GPUS:
            return labels["UUID"]
        key = ("hpc_job", labels["hpc_job"]) if "hpc_job" in labels else ("", labels["Hostname"])
        return (key, labels["Hostname"]) if topic == NODES else key

    asked = PastQuestion(topic, subjects, lambda some: {"activity": "up"}, series_id)
    store.range(Said(), asked, SlotGrid.of(VIEW, NOW))  # type: ignore[arg-type]


def line(figure: str, *levels: float | None, **labels: str) -> Series:
    """The last slots of the grid, up to the newest."""
    last = SlotGrid.of(VIEW, NOW).last
    return Series({**labels, "figure": figure}, [(120.0 * (last - i), level) for i, level in enumerate(levels[::-1])
                                                 if level is not None])


def test_the_groups_are_jobs_and_the_rest_is_free() -> None:
    fleet = fleet_of(of(BY_JOB, ("activity", 0.9, JOB), ("activity", 0.5, OTHER), ("activity", 0.0), ("gpus", 32, JOB),
                        ("levels:0", 3, OTHER), ("levels:10", 5, OTHER), ("gpus", 16), ("nodes", 4, JOB),
                        ("power_w", 2e4, JOB), ("all_gpus", 55),
                        ("memory_used_bytes", 3e9, JOB), ("memory_free_bytes", 1e9, JOB),
                        outlier_series=said(("idle:1", 3, OTHER), ("idle:0", 5, OTHER), ("seen", 8, OTHER)),
                        idle_keys=frozenset({("hpc_job", OTHER["hpc_job"])})),
                     [running({"elsewhere": 8})], VIEW)
    job, other = fleet.jobs
    assert (job.id, job.label, job.gpus, job.nodes, job.activity, job.kind, job.mapped) == (
        "7", "hpc_job", 32, 4, 0.9, "sm_active", "label")
    assert (job.user, job.name, job.start_s, job.power_w) == ("ada", "train", NOW - 3600, 2e4)
    assert (job.memory_used_bytes, job.memory_total_bytes, job.idle_gpus) == (3e9, 4e9, 0)
    assert (other.user, other.nodes, other.power_w, other.idle_gpus, other.history) == (None, None, None, 3, None)
    assert fleet.free is not None and (fleet.free.gpus, fleet.free.activity) == (16, 0.0)
    assert (fleet.gpus, fleet.kinds, fleet.time_s, fleet.source) == (55, ("sm_active",), NOW, "dcgm-exporter")
    assert fleet.problems == () and fleet.free_nodes == ()


def test_a_fleet_is_the_same_each_time() -> None:
    series = of(BY_JOB, ("activity", 0.9, JOB), ("gpus", 32, JOB), outlier_series=said(
        ("median", 0.9, JOB), ("low_gpu", 0.1, {**JOB, **GPU})))
    assert fleet_of(series, [], VIEW) == fleet_of(series, [], VIEW) == fleet_of(replace(series), [], VIEW)


def test_what_stands_out_in_a_job_of_two_kinds() -> None:
    def gpu(number: int, **labels: str) -> dict[str, str]:
        return {**JOB, **N1, "UUID": f"GPU-{number}", "gpu": str(number), **labels}

    sm, util = {"kind": "sm_active"}, {"kind": "util"}
    series = of(TWO_KINDS, ("activity", 0.5, JOB | sm), ("activity", 1.0, JOB | util), ("gpus", 6, JOB | sm),
                ("gpus", 2, JOB | util), outlier_series=said(
        ("median", 0.6, JOB | sm), ("median", 1.0, JOB | util), ("low_gpu", 0.44, gpu(0, **sm)),
        ("low_gpu", 0.7, gpu(2, **util)), ("low_gpu", 0.2, gpu(3, **sm)), ("low_gpu", 0.0, {**GPU, **sm}),
        ("low_gpu", 0.0, {**OTHER, **GPU, **sm}), ("node_median", 0.6, JOB | sm),
        ("low_node", 0.3, {**JOB, **N2, **sm}), ("low_node", 0.5, {**OTHER, **N1, **sm})))
    (job,) = fleet_of(series, [], VIEW).jobs
    assert [(low.uuid, low.activity, low.kind) for low in job.low_gpus] == [
        ("GPU-3", 0.2, "sm_active"), ("GPU-0", 0.44, "sm_active"), ("GPU-2", 0.7, "util")]
    assert [(low.name, low.activity) for low in job.low_nodes] == [("n2.site", 0.3)]
    assert (job.kind, job.gpus, job.activity, job.median, job.node_median) == (
        "mixed", 8, pytest.approx(0.625), None, 0.6)


def test_a_low_clock_needs_to_be_known_how_the_clocks_of_all_spread() -> None:
    low = {**JOB, **GPU, "model": "H100"}
    series = of(BY_JOB, ("activity", 0.9, JOB), ("gpus", 32, JOB), outlier_series=said(
        ("low_clock", 1.2e9, low), ("low_clock", 1.2e9, low), ("low_clock", 1e9, {**low, "UUID": "GPU-2"})))
    assert fleet_of(series, [], VIEW).jobs[0].low_clocks == ()
    model = JOB | {"model": "H100"}
    series = replace(series, gpu_series=said(
        ("activity", 0.97, JOB | GPU), ("sm_clock_hz", 1.25e9, JOB | GPU), ("clock_median", 2e9, model),
        ("clock_mad", 1e7, model), ("clocks", 31, model), ("low_clocks", 1, model), ("peer_sm_clock_hz", 1.98e9, JOB)))
    with_past(series.past, GPUS, [(CLOCK, (("UUID", "GPU-1"),))], line(CLOCK, 1.9e9, None, 1.2e9, UUID="GPU-1"))
    (job,) = fleet_of(series, [], VIEW).jobs
    (clock,) = job.low_clocks
    assert (clock.clock_hz, clock.median_hz, clock.mad_hz, clock.gpus, clock.low) == (1.2e9, 2e9, 1e7, 31, 1)
    assert (clock.gpu.name, clock.gpu.activity, clock.gpu.figures) == ("n1.site:3", 0.97, {"sm_clock_hz": 1.25e9})
    assert clock.history is not None and clock.history.values == (None, None, 1.9e9, None, 1.2e9)
    assert clock.gpu.history is None and job.peers == {"sm_clock_hz": 1.98e9}


def test_the_past_of_a_job_and_of_what_is_open() -> None:
    series = of(BY_JOB, ("activity", 0.9, JOB), ("gpus", 2, JOB), ("activity", 0.1, OTHER), ("gpus", 1, OTHER),
                outlier_series=said(("median", 0.9, JOB), ("low_gpu", 0.1, JOB | GPU)),
                gpu_series=said(("activity", 0.1, JOB | GPU), ("power_w", 300.0, JOB | GPU),
                                ("activity", 0.5, OTHER | GPU | {"UUID": "GPU-2"})),
                node_series=said(("activity", 0.9, JOB | N2), ("gpus", 8, JOB | N2), ("activity", 0.8, JOB | N1),
                                 ("gpus", 8, JOB | N1), ("power_w", 800.0, JOB | N1)))
    job_key = ("hpc_job", "7")
    with_past(series.past, GROUPS, [job_key], line("activity", 0.5, 0.9, 0.9, hpc_job="7"))
    with_past(series.past, IDLE, [job_key], line("idle:0", 2.0, 2.0, hpc_job="7"),
              line("idle:1", 2.0, hpc_job="7"))
    with_past(series.past, NODES, [job_key], line("node_activity", 0.3, 0.4, hpc_job="7", Hostname="n1.site"))
    with_past(series.past, GPUS, [(ACTIVITY, (("Hostname", "n1.site"),))])
    view = replace(VIEW, open_jobs=("7",), open_nodes=(("7", "n1.site"),))
    job, other = fleet_of(series, [], view).jobs
    assert job.history is not None and job.history.values == (None, None, 0.5, 0.9, 0.9)
    assert job.idle_history is not None and job.idle_history.values == (None, None, None, 0.0, 2.0)
    assert job.idle.busy_history is not None and job.idle.busy_history.values == (None, None, None, 2.0, 2.0)
    assert other.history is None and other.each == ()
    first, second = job.each
    assert (first.name, first.power_w, second.name, second.each) == ("n1.site", 800.0, "n2.site", ())
    assert first.history is not None and first.history.values[-2:] == (0.3, 0.4) and second.history is None
    (gpu,) = first.each  # not that of the other job there
    assert gpu.uuid == "GPU-1" and gpu.figures == {"power_w": 300.0}
    assert gpu.history is not None and set(gpu.history.values) == {None}  # it was asked for, and nothing came
    assert job.node_names == ("n1.site", "n2.site")


def nodes(*levels: float) -> FleetSeries:
    figures = [row for labels, level, gpus in zip((N1, N2, N3), levels, (8, 4, 8), strict=False)
               for row in (("activity", level, labels), ("gpus", gpus, labels))]
    return of(BY_NODE, *figures)


def test_without_labels_a_job_of_slurm_has_its_nodes_and_the_rest_is_free() -> None:
    series = nodes(0.9, 0.5, 0.0)
    fleet = fleet_of(replace(series, outlier_series=said(("median", 0.91, N1))), [
        running({"n1": 8, "N2": 8}), running({"elsewhere": 8}, id="9", number="9")], VIEW)
    (job,) = fleet.jobs
    assert (job.id, job.mapped, job.gpus, job.nodes, job.node_names) == ("7", "node", 16, 2, ("n1", "N2"))
    assert (job.activity, job.median, job.node_median) == (pytest.approx(9.2 / 12), 0.91, 0.9)
    assert [(low.name, low.activity) for low in job.low_nodes] == [("n2.site", 0.5)]
    assert [node.name for node in fleet.free_nodes] == ["n3.site"] and fleet.gpus == 20
    assert fleet.free is not None and fleet.free.gpus == 8


def test_on_a_node_with_several_jobs_the_figures_are_nobodys() -> None:
    series = replace(nodes(0.9, 0.5), outlier_series=said(("median", 0.91, N1), ("low_gpu", 0.1, GPU)))
    (first, second) = fleet_of(series, [running({"n1": 5}), running({"n1": 3, "n2": 8}, id="8", number="8")], VIEW).jobs
    assert (first.mapped, first.activity, first.gpus) == ("shared node", 0.9, 5)
    assert (second.mapped, second.activity, second.gpus) == ("shared node", pytest.approx(9.2 / 12), 11)
    for job in (first, second):
        assert (job.median, job.idle_gpus, job.low_gpus, job.low_nodes, job.node_median) == (None, None, (), (), None)
    (alone,) = fleet_of(series, [running({"n1": 8})], VIEW).jobs
    assert [low.uuid for low in alone.low_gpus] == ["GPU-1"] and alone.idle_gpus == 0


def test_before_a_job_began_its_nodes_were_others() -> None:
    series = nodes(0.9, 0.5, 0.0)
    keys = [("", f"n{i}.site") for i in (1, 2, 3)]
    with_past(series.past, GROUPS, keys, *(line("activity", 0.2, 0.4, 0.6, level, Hostname=f"n{i}.site")
                                           for i, level in ((1, 0.8), (2, 0.6), (3, 0.0))))
    with_past(series.past, IDLE, keys[:2], *(line("idle:0", 8.0, 8.0, 8.0, 8.0, Hostname=f"n{i}.site") for i in (1, 2)))
    start_s = 120.0 * (SlotGrid.of(VIEW, NOW).last - 2)
    (job,) = fleet_of(series, [running({"n1": 8, "n2": 8}, start_s=start_s)], VIEW).jobs
    assert job.history is not None and job.history.values[:3] == (None,) * 3
    assert job.history.values[3:] == pytest.approx((0.6, 8.8 / 12))
    assert job.idle_history is not None and job.idle_history.values == (None, None, None, 0.0, 0.0)
    fleet = fleet_of(series, [], replace(VIEW, open_nodes=((NO_JOB, "n3.site"),)))
    assert [node.history.values[1:] for node in fleet.free_nodes if node.history is not None][2] == (0.2, 0.4, 0.6, 0.0)


def test_names_of_two_clusters_stay_apart() -> None:
    metrics = replace(BY_NODE, clusters=frozenset("ab"))
    a, b = N1 | {"cluster": "a"}, N1 | {"cluster": "b"}
    series = of(metrics, ("activity", 0.9, a), ("gpus", 8, a), ("activity", 0.1, b), ("gpus", 8, b))
    (job,) = fleet_of(series, [running({"n1": 8}, cluster="b")], VIEW).jobs
    assert job.activity == 0.1
    labeled = of(replace(BY_JOB, clusters=frozenset("ab")), ("activity", 0.9, JOB | {"cluster": "a"}),
                 ("activity", 0.1, JOB | {"cluster": "b"}), ("gpus", 8, JOB | {"cluster": "a"}),
                 ("gpus", 8, JOB | {"cluster": "b"}))
    assert [(job.id, job.user) for job in fleet_of(labeled, [running({}, cluster="b")], VIEW).jobs] == [
        ("a/7", None), ("b/7", "ada")]


def test_exporters_that_do_not_answer_are_named() -> None:
    silent = [("down_target", 0, {"instance": f"n{i}:9400", "cluster": "c"}) for i in range(5)]
    series = of(BY_JOB, ("activity", 0.9, JOB), ("gpus", 8, JOB), outlier_series=said(
        ("targets", 9), ("down", 6), *silent, ("empty_target", 1, {"instance": "n8:9400"})))
    down, empty = fleet_of(series, [], VIEW).problems
    assert down.message.startswith("6 of 9 exporters do not answer: n0, n1, n2, n3 and 2 more;")
    assert empty.message == "exporters answer without GPU metrics: n8"


@pytest.mark.parametrize("value", [9e13, -9e13, 0.0, -1.0, 0.5])
def test_no_number_of_a_server_is_more_than_there_can_be(value: float) -> None:
    figures = ("activity", "gpus", "idle_gpus", "watched_gpus", "nodes", "all_gpus", "power_w", "lowest")
    outliers = said(*((figure, value, JOB | GPU) for figure in ("median", "mad", "low_gpu", "low_clock", "down")))
    details = said(*((figure, value, JOB | GPU) for figure in ("activity", "clocks", "clock_median", "clock_mad")))
    fleets: list[Fleet] = []
    for metrics, labels in ((BY_JOB, JOB), (BY_NODE, N1)):
        series = of(metrics, *((figure, value, labels) for figure in figures), outlier_series=outliers,
                    gpu_series=details)
        fleets += [fleet_of(series, [running({"n1": 8})], VIEW), fleet_of(series, [], VIEW)]
    assert all(0 <= job.gpus <= 10**7 for fleet in fleets for job in fleet.jobs)
    assert all(0 <= fleet.gpus <= 10**7 for fleet in fleets)
