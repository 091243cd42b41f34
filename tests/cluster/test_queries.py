"""The queries: what is asked for which exporters; their whole text is in the folder ``queries``.

``pytest tests/cluster/test_queries.py --snapshot-update`` writes it anew; look at the difference.
"""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path

import pytest

from gputop.cluster.available_metrics import AvailableMetrics, label_counts
from gputop.cluster.gpu_values import GpuValues, ReadingWay
from gputop.cluster.queries import Figures, Queries
from gputop.sources.exporters import LIMITS as FIGURE_LIMITS
from gputop.sources.exporters import SCHEMAS
from tests.cluster import dcgm_pages
from tests.cluster.fleets import LIMITS

FOLDER = Path(__file__).parent / "queries"
SM, GR, UTIL = "DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_DEV_GPU_UTIL"


def metrics(*labels: str, **names: int) -> AvailableMetrics:
    return AvailableMetrics(names, ("dcgm",), labels)


def values(**names: int) -> GpuValues:
    return GpuValues(metrics(**names))


def queries(*labels: str, **names: int) -> Queries:
    return Queries(metrics(*labels, **names), LIMITS)


@pytest.mark.parametrize(("names", "kind"), [
    ({SM: 8, GR: 8, UTIL: 8}, "sm_active"), ({GR: 8, UTIL: 8}, "gr_active"), ({UTIL: 8}, "util"),
    ({"DCGM_FI_PROF_SM_UTIL_RATIO": 8, UTIL: 8}, "sm_active"), ({"all_smi_gpu_utilization": 8}, "util"),
    ({"gpu_utilization_Percentage": 8}, "util"), ({SM: 4, UTIL: 8}, ""), ({SM: 4, GR: 4, "DCGM_FI_DEV_FB_USED": 8}, ""),
])
def test_the_best_figure_of_activity_that_each_gpu_has(names: dict[str, int], kind: str) -> None:
    assert metrics(**names).common_kind() == kind


def test_a_gpu_beside_its_instances_is_left_out() -> None:
    names = {"gputop_gpu_sm_active_ratio": 8, "gputop_gpu_power_watts": 8}
    own = GpuValues(AvailableMetrics(names, divided=True))
    assert 'mig=""} <= 1.05) unless on (uuid) {__name__=~"gputop_gpu_sm_active_ratio", mig!=""} or ' in (
        own.activity(ReadingWay()))
    # What selects the GPUs may have a name like that of the label.
    assert " unless on " in own.activity(ReadingWay('Hostname="migrate"'))
    assert "unless" not in own.figure("power_w", ReadingWay(instances=False))
    assert "unless" not in values(gputop_gpu_sm_active_ratio=8).activity(ReadingWay())


def test_jobs_of_gputops_own_exporter_are_joined() -> None:
    own = metrics("slurm_job_id", gputop_gpu_sm_active_ratio=8, gputop_gpu_job_info=8)
    assert ("group_left (slurm_job_id) topk by (uuid, mig) (1, gputop_gpu_job_info)"
            in GpuValues(own).activity(ReadingWay()))
    assert "gputop_gpu_job_info" in label_counts(own)
    pods = metrics("exported_pod", gputop_gpu_sm_active_ratio=8, gputop_gpu_job_info=8)
    assert ("group_left (exported_pod, exported_namespace) topk by (uuid, mig) (1, gputop_gpu_job_info)"
            in GpuValues(pods).activity(ReadingWay()))
    other = metrics("hpc_job", gputop_gpu_sm_active_ratio=8, gputop_gpu_job_info=8)
    assert "group_left (slurm_job_id)" in GpuValues(other).activity(ReadingWay())


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
        assert metric in values(**{SM: 8, metric: 8}).figure(one.figure, ReadingWay())


def test_every_figure_of_a_page_is_one_of_the_table() -> None:
    (schema,) = (own for own in SCHEMAS if own.id == "dcgm")
    known = {name.name: figure for figure, names in schema.figures.items() for name in names}
    for new in (False, True):
        page = dcgm_pages.values(new=new)
        figures = {one.figure for one in dcgm_pages.METRICS if one.figure}
        assert {known[name] for name in page if name in known} == figures and len(figures) == 12


def test_what_a_figure_cannot_be_is_left_out() -> None:
    clock, ratio = "DCGM_FI_DEV_SM_CLOCK_HERTZ", "DCGM_FI_PROF_TENSOR_UTIL_RATIO"
    own = values(**{SM: 8, clock: 8, ratio: 8})
    assert f"{clock} >= 10000000 <= 10000000000" in own.figure("sm_clock_hz", ReadingWay())
    assert f"{ratio} <= 1.05" in own.figure("tensor_active", ReadingWay())
    least, most = FIGURE_LIMITS["sm_clock_hz"]
    assert least is not None and 1.9e6 < least < 1e8 and 3e9 < most < 1.9e15


def test_a_cluster_of_two_generations_asks_for_all_that_each_gpu_has() -> None:
    gr, sm = "DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO", "DCGM_FI_PROF_SM_UTIL_RATIO"
    mixed = metrics("hpc_job", **{GR: 8, gr: 8, sm: 8, UTIL: 8, "DCGM_FI_DEV_GPU_UTIL_RATIO": 8})
    assert mixed.kinds(mixed.schemas()[0]) == ("sm_active", "gr_active")
    assert all(name in label_counts(mixed) for name in (GR, gr, sm))


CLUSTERS = {
    "dcgm-by-job": AvailableMetrics(dict.fromkeys((
        SM, "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_FREE", "DCGM_FI_DEV_POWER_USAGE",
        "DCGM_FI_DEV_SM_CLOCK", "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_POWER_VIOLATION"), 64), ("dcgm",), ("hpc_job",)),
    "gputop-by-node": AvailableMetrics(dict.fromkeys((
        "gputop_gpu_sm_active_ratio", "gputop_gpu_memory_used_bytes", "gputop_gpu_power_watts",
        "gputop_gpu_sm_clock_hertz"), 64), ("gputop",), divided=True),
    "several-by-pod": AvailableMetrics(
        {SM: 32, "DCGM_FI_PROF_SM_UTIL_RATIO": 16, UTIL: 64, "DCGM_FI_DEV_SM_CLOCK_HERTZ": 16, "gpu_clock_sm_MHz": 8,
         "gpu_utilization_Percentage": 8}, ("dcgm", "nvitop"), ("exported_pod",), clusters=frozenset("ab")),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_text_of_all_queries(name: str, request: pytest.FixtureRequest) -> None:
    written = Queries(CLUSTERS[name], LIMITS)
    job, gpu = 'JOB="7"', 'UUID="GPU-1"'
    questions = [(Queries.figures, written.figures()), (Queries.nodes, written.nodes([job])),
                 (Queries.outliers, written.outliers([job], ['Hostname="n3"'], node_clocks=True)),
                 (Queries.gpus, written.gpus([gpu], [job], [job])),
                 (Queries.group_history, written.group_history(120.0, [job])),
                 (Queries.idle, written.idle([job])), (Queries.idle_history, written.idle_history(120.0, [job])),
                 (Queries.node_history, written.node_history(120.0, [job])),
                 (Queries.gpu_history, written.gpu_history(120.0, [gpu], [gpu]))]
    text = "\n".join(section(question.__name__, inspect.getdoc(question) or "", figures)
                     for question, figures in questions)
    file = FOLDER / f"{name}.txt"
    if request.config.getoption("--snapshot-update", default=False):
        FOLDER.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()


def section(name: str, sentences: str, figures: Figures) -> str:
    lines = [f"## {name}", *textwrap.wrap(sentences, 118, initial_indent="# ", subsequent_indent="# "), ""]
    return "\n".join([*lines, *(f"{figure}\n    {text}" for figure, text in figures.items() if text)]) + "\n"


def test_several_sets_of_labels_are_one_figure() -> None:
    two = queries("hpc_job", **{SM: 8}).nodes(['Hostname=~"a|b"', 'hostname="c"'])
    assert two["activity"].startswith("(avg by (") and ") or avg by (" in two["activity"]
    assert two["activity"].count('Hostname=~"a|b"') == 2 and two["activity"].count('hostname="c"') == 2


def test_a_fall_back_is_told_apart_and_scaled() -> None:
    text = values(**{SM: 4, UTIL: 8}).activity(ReadingWay())
    assert '"kind", "sm_active"' in text and " or on (UUID, GPU_I_ID) " in text and f"{UTIL} * 0.01" in text
    assert text.index(SM) < text.index(UTIL)
    assert GR not in values(**{SM: 8, GR: 8}).activity(ReadingWay(window="5m"))


def test_a_gpu_of_two_exporters_is_taken_once() -> None:
    text = values(**{SM: 8, "gputop_gpu_sm_active_ratio": 8}).activity(ReadingWay())
    assert text.count(" or on (UUID) ") == 1 and '"UUID", "GPU-$1", "uuid", "(?:GPU-)?(.+)"' in text
