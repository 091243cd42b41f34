"""The queries: what is asked for which exporters, labels that hold anything, and what a series is of."""

from __future__ import annotations

import pytest

from gputop.cluster.promql import Found, Queries, matchers, quoted, regex, which_labels
from gputop.cluster.schemas import ACTIVITY, LIMITS, SCHEMAS, gpu_of, job_of, node_of
from tests.cluster import dcgm_pages

SM, GR, UTIL = "DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_DEV_GPU_UTIL"


def queries(*labels: str, **names: int) -> Queries:
    return Queries(Found(names, ("dcgm",), labels))


def test_every_exporter_has_activity_memory_and_power() -> None:
    names = [name.name for schema in SCHEMAS for own in schema.figures.values() for name in own]
    assert len(names) == len(set(names))
    for schema in SCHEMAS:
        assert {"memory_used_bytes", "power_w"} <= set(schema.figures) and set(ACTIVITY) & set(schema.figures)


@pytest.mark.parametrize(("names", "kind"), [
    ({SM: 8, GR: 8, UTIL: 8}, "sm_active"), ({GR: 8, UTIL: 8}, "gr_active"), ({UTIL: 8}, "util"),
    ({"DCGM_FI_PROF_SM_UTIL_RATIO": 8, UTIL: 8}, "sm_active"), ({"all_smi_gpu_utilization": 8}, "util"),
    ({"gpu_utilization_Percentage": 8}, "util"), ({SM: 4, UTIL: 8}, ""), ({SM: 4, GR: 4, "DCGM_FI_DEV_FB_USED": 8}, ""),
])
def test_the_best_figure_of_activity_that_each_gpu_has(names: dict[str, int], kind: str) -> None:
    assert queries(**names).kind == kind


def test_a_fall_back_is_told_apart_and_scaled() -> None:
    text = queries(**{SM: 4, UTIL: 8}).activity()
    assert '"kind", "sm_active"' in text and " or ignoring (kind) " in text and f"{UTIL} * 0.01" in text
    assert text.index(SM) < text.index(UTIL)
    assert GR not in queries(**{SM: 8, GR: 8}).activity("5m")


def test_a_gpu_of_two_exporters_is_taken_once() -> None:
    text = queries(**{SM: 8, "gputop_gpu_sm_active_ratio": 8}).activity()
    assert text.count(" or on (UUID) ") == 1 and '"UUID", "$1", "uuid", "(.+)"' in text


def test_a_gpu_beside_its_instances_is_left_out() -> None:
    own = Queries(Found({"gputop_gpu_sm_active_ratio": 8, "gputop_gpu_power_watts": 8}, divided=True))
    assert 'mig=""} <= 1.05) unless on (instance, uuid) {__name__=~"gputop_gpu_sm_active_ratio", mig!=""} or ' in (
        own.activity())
    assert "unless" not in own.figure("power_w", mig=False)
    assert "unless" not in queries(gputop_gpu_sm_active_ratio=8).activity()


def test_jobs_of_gputops_own_exporter_are_joined() -> None:
    own = queries("slurm_job_id", gputop_gpu_sm_active_ratio=8, gputop_gpu_job_info=8)
    assert "group_left (slurm_job_id) topk by (instance, uuid, mig) (1, gputop_gpu_job_info)" in own.activity()
    assert "gputop_gpu_job_info" in which_labels(own.found)


def test_groups_are_jobs_where_labels_name_them_else_nodes() -> None:
    assert "avg by (hpc_job)" in queries("hpc_job", **{SM: 8}).figures(0.01, 900.0)
    assert "avg by (Hostname, hostname, node, instance)" in queries(**{SM: 8}).figures(0.01, 900.0)
    pods = queries("exported_pod", **{SM: 8}).figures(0.01, 900.0)
    assert "avg by (exported_pod, exported_namespace)" in pods


def test_power_of_a_divided_gpu_is_counted_once_and_no_value_of_dcgm_is_dropped() -> None:
    text = queries(**{SM: 8, "DCGM_FI_DEV_POWER_USAGE": 8, "DCGM_FI_DEV_FB_USED": 8}).figures(0.01, 900.0)
    power, memory = (next(arm for arm in text.split("label_replace(") if name in arm)
                     for name in ("POWER_USAGE", "FB_USED"))
    assert "GPU_I_ID" not in power and "GPU_I_ID" in memory and "DCGM_FI_DEV_POWER_USAGE < 1e+14" in power


@pytest.mark.parametrize("one", [one for one in (*dcgm_pages.METRICS, *dcgm_pages.ADDED) if one.figure],
                         ids=lambda one: one.new)
def test_both_generations_of_dcgm_exporter_say_the_same(one: dcgm_pages.Renamed) -> None:
    (schema,) = (own for own in SCHEMAS if own.id == "dcgm")
    factors = {name.name: name.factor for name in schema.figures[one.figure]}
    if "violation" in one.figure:  # only that it grows counts
        assert {one.old, one.new} <= set(factors)
    else:
        assert one.value / one.unit * factors[one.old] == pytest.approx(one.value * factors[one.new])
        assert one.value * factors[one.new] == one.value
    for metric in (one.old, one.new):
        assert metric in queries(**{SM: 8, metric: 8}).figure(one.figure)


def test_every_figure_of_a_page_is_one_of_the_table() -> None:
    (schema,) = (own for own in SCHEMAS if own.id == "dcgm")
    known = {name.name: figure for figure, names in schema.figures.items() for name in names}
    for new in (False, True):
        page = dcgm_pages.values(new=new)
        figures = {one.figure for one in dcgm_pages.METRICS if one.figure}
        assert {known[name] for name in page if name in known} == figures and len(figures) == 12


def test_what_a_figure_cannot_be_is_left_out() -> None:
    clock, ratio = "DCGM_FI_DEV_SM_CLOCK_HERTZ", "DCGM_FI_PROF_TENSOR_UTIL_RATIO"
    own = queries(**{SM: 8, clock: 8, ratio: 8})
    assert f"{clock} >= 10000000 <= 10000000000" in own.figure("sm_clock_hz")
    assert f"{ratio} <= 1.05" in own.figure("tensor_active")
    least, most = LIMITS["sm_clock_hz"]
    assert least is not None and 1.9e6 < least < 1e8 and 3e9 < most < 1.9e15


def test_a_cluster_of_two_generations_asks_for_all_that_each_gpu_has() -> None:
    gr, sm = "DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO", "DCGM_FI_PROF_SM_UTIL_RATIO"
    mixed = queries("hpc_job", **{GR: 8, gr: 8, sm: 8, UTIL: 8, "DCGM_FI_DEV_GPU_UTIL_RATIO": 8})
    assert mixed.found.kinds(mixed.schemas[0]) == ("sm_active", "gr_active")
    assert all(name in which_labels(mixed.found) for name in (GR, gr, sm))


@pytest.mark.parametrize("text", ['n"1', "a|b", "x\\", "n.1", 'a"} or vector(1)#', "line\nend"])
def test_labels_from_outside_stay_between_the_quotes(text: str) -> None:
    for written in (quoted(text), regex(text)):
        rest = written.replace("\\\\", "").replace('\\"', "")
        assert '"' not in rest and "\n" not in rest
    assert matchers({"hpc_job": [text]}) == f'hpc_job="{quoted(text)}"'
    assert "|" not in regex("a|b").replace("\\\\|", "")


@pytest.mark.parametrize(("labels", "node"), [
    ({"Hostname": "n1", "instance": "x:9400"}, "n1"), ({"hostname": "n2", "instance": "x:9400"}, "n2"),
    ({"instance": "n3:9400"}, "n3"), ({"instance": "[fe80::1]:9400"}, "fe80::1"), ({"instance": "n4"}, "n4"), ({}, ""),
])
def test_the_node_of_a_series(labels: dict[str, str], node: str) -> None:
    assert node_of(labels) == node


@pytest.mark.parametrize(("labels", "job"), [
    ({"hpc_job": "7", "pod": "p"}, ("hpc_job", "7")), ({"pod": "p", "namespace": "n"}, ("pod", "n/p")),
    ({"exported_pod": "w", "exported_namespace": "n", "pod": "dcgm-exporter-x"}, ("exported_pod", "n/w")),
    ({"pod": "nvidia-dcgm-exporter-abc", "namespace": "gpu"}, ("", "")), ({"hpc_job": ""}, ("", "")),
])
def test_the_job_of_a_series(labels: dict[str, str], job: tuple[str, str]) -> None:
    assert job_of(labels) == job


def test_the_number_of_a_gpu() -> None:
    assert gpu_of({"gpu": "3"}) == "3" and gpu_of({"gpu": "0", "GPU_I_ID": "2"}) == "0:2"
    assert gpu_of({"gpu": "NVIDIA H100", "index": "5"}) == "5" and gpu_of({}) == "?"
    assert gpu_of({"gpu": "NVIDIA H100", "gpu_index": "5", "mig_instance": "2"}) == "5:2"
