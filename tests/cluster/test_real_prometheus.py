"""What a real Prometheus makes of the queries, of every exporter's names and labels, and of jobs and exporters that
come and go: nobody is accused of what was not measured."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Sequence
from functools import partial
from urllib.parse import parse_qs

import pytest

from benchmarks.cluster_lab import Page, scraping, wait_for
from gputop.advice.fleet.advise import FleetFinding, FleetReport, asked_limits, report_of
from gputop.cluster.collect import Collector, complete_fleet
from gputop.cluster.endpoint import Credentials, parse_endpoint
from gputop.cluster.model import Fleet, FleetView
from gputop.cluster.prometheus import Client
from gputop.sources.exporters import SCHEMAS
from tests.cluster import dcgm_pages
from tests.cluster.squeue_double import squeue

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None or shutil.which("promtool") is None,
                                reason="no prometheus here (tests/debian_packages.sh unpacks it)")


def once_report(collector: Collector, view: FleetView, job: str) -> FleetReport:
    return report_of(complete_fleet(collector, view), job)


def seen(address: str) -> tuple[Fleet, tuple[FleetFinding, ...]]:
    with contextlib.closing(Client(parse_endpoint(address), Credentials())) as client:
        report = once_report(Collector(client, asked_limits()), FleetView(), "")
    return report.fleet, report.findings


def page(*lines: str) -> Page:
    return lambda: "".join(f"{line}\n" for line in lines).encode()


def all_smi(node: str, gpu: str, *, divided: bool = False) -> Page:
    """``gpu`` begins its labels of the GPU: "gpu_" since 0.21."""
    lines = []
    for i in range(8):
        own = f'gpu="NVIDIA H100 80GB HBM3",instance="{node}",{gpu}uuid="GPU-{node}-{i}",{gpu}index="{i}"'
        lines += [f"all_smi_gpu_memory_used_bytes{{{own}}} 6e10", f"all_smi_gpu_power_consumption_watts{{{own}}} 500"]
        if divided and i == 0:
            lines += [f'all_smi_mig_instance_utilization_gpu{{{own},mig_instance="{n}"}} 50' for n in (1, 2)]
        else:
            lines.append(f"all_smi_gpu_utilization{{{own}}} 90")
    return page(*lines)


def test_every_gpu_of_every_exporter_is_counted_once() -> None:
    nvitop = [f'gpu_utilization_Percentage{{devicename="H100",hostname="10.0.0.4",index="{i}",uuid="GPU-4-{i}"}} 80.0'
              for i in range(8)]
    dcgm = [f'DCGM_FI_DEV_GPU_UTIL{{gpu="{i}",UUID="GPU-n1-{i}",Hostname="n1"}} 90' for i in range(8)]  # those of n1
    pages = {"n1": all_smi("n1", "gpu_"), "n2": all_smi("n2", ""), "n3": all_smi("n3", "gpu_", divided=True),
             "n4": page(*nvitop), "n5": page(*dcgm)}
    with scraping(pages) as address:
        wait_for(address, "count(up == 1)", 5)
        fleet, _ = seen(address)
    assert fleet.gpus == 4 * 8 + 1 and fleet.free is not None
    assert fleet.free.activity == pytest.approx((23 * 0.9 + 2 * 0.5 + 8 * 0.8) / 33)


ENGINES = pytest.mark.parametrize("engine", ["prometheus", pytest.param("victoria-metrics", marks=pytest.mark.skipif(
    shutil.which("victoria-metrics") is None, reason="no victoria-metrics (tests/debian_packages.sh unpacks it)"))])


@ENGINES
def test_two_generations_of_dcgm_exporter_in_one_job(engine: str) -> None:
    pages: dict[str, Page] = {"n1": lambda: dcgm_pages.page("n1", new=False),
                              "n2": lambda: dcgm_pages.page("n2", new=True)}
    with scraping(pages, engine=engine) as address:
        wait_for(address, "count(up == 1)", 2)
        fleet, findings = seen(address)
        (job,) = fleet.jobs
        with contextlib.closing(Client(parse_endpoint(address), Credentials())) as client:
            report = once_report(Collector(client, asked_limits()), FleetView(
                open_jobs=frozenset({job.id}), open_nodes=frozenset({(job.id, "n1"), (job.id, "n2")})), "")
    assert not findings and (job.gpus, job.nodes, job.kind) == (16, 2, "gr_active")
    mib = dcgm_pages.MIB
    assert (job.activity, job.tensor_active, job.power_w) == pytest.approx((0.96, 0.45, 16 * 655.5))
    assert (job.memory_used_bytes, job.memory_total_bytes) == (16 * 70000 * mib, 16 * 80000 * mib)
    said = {one.figure: one.value for one in dcgm_pages.METRICS if one.figure not in ("", "util", "gr_active")}
    gpus = [gpu for node in report.fleet.jobs[0].each for gpu in node.each]
    assert {gpu.node for gpu in gpus} == {"n1", "n2"} and len(gpus) == 16
    for gpu in gpus:
        assert dict(gpu.figures) == pytest.approx(said)


@ENGINES
def test_what_a_metric_cannot_be_is_not_believed(engine: str) -> None:
    wrong = {"DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO": 97.0, "DCGM_FI_DEV_GPU_UTIL_RATIO": 97.0,
             "DCGM_FI_DEV_SM_CLOCK_HERTZ": 1.9e6, "DCGM_FI_PROF_TENSOR_UTIL_RATIO": 45.0}
    pages: dict[str, Page] = {"n1": lambda: dcgm_pages.page("n1", new=True, job="1", **wrong),
                              "n2": lambda: dcgm_pages.page("n2", new=True, job="2", DCGM_FI_DEV_SM_CLOCK_HERTZ=1.9e6,
                                                            DCGM_FI_PROF_TENSOR_UTIL_RATIO=45.0)}
    with scraping(pages, engine=engine) as address:
        wait_for(address, "count(up == 1)", 2)
        fleet, findings = seen(address)
        with contextlib.closing(Client(parse_endpoint(address), Credentials())) as client:
            report = once_report(Collector(client, asked_limits()), FleetView(open_jobs=frozenset({"2"}),
                                                                              open_nodes=frozenset({("2", "n2")})), "")
    assert not findings and [(job.id, job.activity, job.tensor_active) for job in fleet.jobs if job.gpus] == [
        ("2", 0.96, None)]
    (job,) = (job for job in report.fleet.jobs if job.id == "2")
    gpus = [gpu for node in job.each for gpu in node.each]
    assert len(gpus) == 8 and all("sm_clock_hz" not in gpu.figures and "power_w" in gpu.figures for gpu in gpus)


def gputop_page(node: str) -> Page:
    """Of gputop export, a metric of each figure; n2:5 of the job is slow, and the GPUs of n4 are divided."""
    (schema,) = (one for one in SCHEMAS if one.id == "gputop")
    values = {"sm_active": 0.9, "gr_active": 0.95, "util": 1.0, "tensor_active": 0.4, "sm_clock_hz": 1.75e9}
    lines = []
    for i in range(8):
        slow = (node, i) == ("n2", 5)
        own = f'gpu="{i}",uuid="GPU-{node}-{i}"' + ',mig="1"' * (node == "n4")
        lines += [f'gputop_gpu_info{{{own},name="H100"}} 1', f'gputop_gpu_job_info{{{own},slurm_job_id="7"}} 1']
        for figure, (name, *_) in schema.figures.items():
            value = {"sm_active": 0.3, "sm_clock_hz": 0.9e9}.get(figure) if slow else None
            lines.append(f"{name.name}{{{own}}} {values.get(figure, 70.0) if value is None else value}")
    return page(*lines)


@ENGINES
def test_gputops_own_exporter_has_questions_longer_than_victoria_metrics_takes(engine: str) -> None:
    nodes = [f"n{i}" for i in range(1, 5)]
    with scraping({node: gputop_page(node) for node in nodes}, engine=engine) as address:
        wait_for(address, "count(up == 1)", 4)
        with contextlib.closing(Client(parse_endpoint(address), Credentials())) as client:
            sent: list[int] = []
            send = client._send
            client._send = lambda method, path, form: (  # type: ignore[method-assign]
                sent.extend(map(len, parse_qs(form).get("query", []))), send(method, path, form))[1]
            collector = Collector(client, asked_limits())
            view = FleetView(open_jobs=("7",), open_nodes=tuple(("7", node) for node in nodes))
            fleet = complete_fleet(collector, view)
            asked = len(sent)
            again = collector.refresh(view)
    (job,) = fleet.jobs
    assert (job.gpus, job.nodes, job.median) == (32, 4, 0.9)
    assert [low.name for low in job.low_gpus] == ["n2:5"] and [low.gpu.name for low in job.low_clocks] == ["n2:5"]
    gpus = [gpu for node in job.each for gpu in node.each]
    assert len(gpus) == 32 and all("temperature_c" in gpu.figures and "power_w" in gpu.figures for gpu in gpus)
    if engine == "prometheus":
        assert max(sent) > 16384 and not fleet.problems
    else:
        assert max(sent[:asked]) > 16384 >= max(sent[asked:]) and sum(size > 16384 for size in sent) == 1
        (problem,) = again.problems
        assert "at most 16,384 bytes" in problem.message


def test_a_whole_node_at_low_clocks_is_found_among_the_nodes_of_its_job() -> None:
    def clocks(node: str, clock_hz: float) -> Page:
        lines = []
        for i in range(8):
            own = f'gpu="{i}",uuid="GPU-{node}-{i}"'
            hz = 1.2e9 if (node, i) == ("n2", 5) else clock_hz
            lines += [f'gputop_gpu_info{{{own},name="H100"}} 1', f"gputop_gpu_sm_active_ratio{{{own}}} 0.9",
                      f"gputop_gpu_sm_clock_hertz{{{own}}} {hz}",
                      f"gputop_gpu_clock_event_reasons{{{own}}} {4 if hz < 1.5e9 else 0}"]
        return page(*lines)

    pages = {f"n{n}": clocks(f"n{n}", 9e8 if n == 3 else 1.75e9) for n in range(1, 7)}
    with scraping(pages) as address:
        wait_for(address, "count(up == 1)", 6)
        with contextlib.closing(Client(parse_endpoint(address), Credentials())) as client:
            said = squeue(nodes="n[1-6]", gres_detail=["gpu:h100:8(IDX:0-7)"] * 6)
            report = once_report(Collector(client, asked_limits(), lambda: said), FleetView(), "")
    (job,) = report.fleet.jobs
    assert {low.gpu.node for low in job.low_clocks} == {"n2", "n3"} and job.low_clocks[0].median_hz == 1.75e9
    assert {(low.gpus, low.low) for low in job.low_clocks} == {(48, 9)}
    assert all(low.gpu.figures["clock_reasons"] == 4 for low in job.low_clocks)
    assert {low.gpu.name for low in job.low_clocks} >= {"n2:5", "n3:0"} and len(job.low_clocks) == 5


def exported(node: str, *, job: str, job_s: float, gap_s: tuple[float, float] = (0.0, 0.0), busy_before_s: float = 1e9,
             now_s: float) -> tuple[list[str], list[str]]:
    """Of gputop export the minutes before: activity, and the job since ``job_s`` ago. ``gap_s``: from when to when ago
    the exporter did not answer."""
    activity, jobs = [], []
    for i in range(8):
        own = f'gpu="{i}",uuid="GPU-{node}-{i}",instance="{node}:9400",job="dcgm"'
        for ago_s in range(3 * 3600, 0, -30):
            if not gap_s[0] <= ago_s <= gap_s[1]:
                value = 0.9 if ago_s > busy_before_s else 0.0
                activity.append(f"gputop_gpu_sm_active_ratio{{{own}}} {value} {now_s - ago_s:.3f}\n")
                if ago_s <= job_s:
                    jobs.append(f'gputop_gpu_job_info{{{own},slurm_job_id="{job}"}} 1 {now_s - ago_s:.3f}\n')
    return activity, jobs


def openmetrics(parts: Sequence[tuple[list[str], list[str]]]) -> Iterator[str]:
    for i, name in enumerate(("gputop_gpu_sm_active_ratio", "gputop_gpu_job_info")):
        yield f"# TYPE {name} gauge\n"
        for part in parts:
            yield from part[i]
    yield "# EOF\n"


def test_what_was_not_measured_is_nobodys_fault() -> None:
    now_s = time.time()
    make = partial(exported, now_s=now_s)
    parts = [
        make("young", job="1", job_s=20.0),  # on GPUs that have been idle for hours
        make("away", job="2", job_s=1e9, gap_s=(40.0, 870.0), busy_before_s=1000.0),  # idle before and after a gap
        make("idle", job="3", job_s=1e9, gap_s=(1200.0, 8400.0)),  # for 20 minutes, and not measured for two hours
        make("gone", job="4", job_s=1e9, busy_before_s=2400.0),  # idle for 40 minutes, as was measured
    ]

    def now(node: str, job: str) -> Page:
        info = f',slurm_job_id="{job}"'
        return page(*(f'{name}{{gpu="{i}",uuid="GPU-{node}-{i}"{more}}} {value}' for i in range(8) for name, more, value
                      in (("gputop_gpu_sm_active_ratio", "", 0), ("gputop_gpu_job_info", info, 1))))

    pages = {node: now(node, job) for node, job in (("young", "1"), ("away", "2"), ("idle", "3"), ("gone", "4"))}
    with scraping(pages, past=openmetrics(parts)) as address:
        wait_for(address, "count(up == 1)", 4)
        fleet, findings = seen(address)
    assert {job.id: job.idle_gpus for job in fleet.jobs} == {"1": 0, "2": 0, "3": 8, "4": 8}
    assert {f.job: f.id for f in findings} == {"3": "held_idle", "4": "held_idle"}
    lasts_s = {f.job: (round(f.evidence["lasts_s"] / 60), f.since_exact) for f in findings}
    assert lasts_s["3"][0] in range(19, 24) and not lasts_s["3"][1]
    assert lasts_s["4"][0] in range(38, 43) and lasts_s["4"][1]
