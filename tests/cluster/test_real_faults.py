"""A fleet where something is not as it should be, behind a real Prometheus: GPUs that are scraped twice, exporters that
are exchanged, gaps, and a Prometheus that is young. What is true is computed from what the stubs print."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from functools import partial

import pytest

from benchmarks.cluster_lab import Page, scraping, wait_for
from gputop.advice.fleet.advise import FleetReport, asked_limits, report_of
from gputop.cli import main
from gputop.cluster.collect import Collector, complete_fleet
from gputop.cluster.endpoint import Credentials, parse_endpoint
from gputop.cluster.model import FleetView
from gputop.cluster.prometheus import Client
from gputop.core.errors import GputopError
from gputop.export.cluster import to_text
from tests.cluster.exporters import Exporter, openmetrics, seconds
from tests.cluster.squeue_double import squeue

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None or shutil.which("promtool") is None,
                                reason="no prometheus here (tests/debian_packages.sh unpacks it)")
WASTES_NOTHING = "gputop sees no job that wastes its GPUs"


def report(address: str, slurm: bytes | None = None, **view: object) -> FleetReport:
    client = Client(parse_endpoint(address), Credentials())
    said = None if slurm is None else lambda: slurm
    try:
        return report_of(complete_fleet(Collector(client, asked_limits(), said), FleetView(**view)), "")  # type: ignore
    finally:
        client.close()


def seen(pages: Mapping[str, Page], past: Sequence[str] = (), slurm: bytes | None = None,
         jobs: Mapping[str, Sequence[str]] | None = None, **view: object) -> FleetReport:
    with scraping(pages, past=openmetrics(past) if past else (), jobs=jobs) as address:
        wait_for(address, "count(up)", sum(map(len, jobs.values())) if jobs else len(pages))
        wait_for(address, "count(scrape_samples_scraped > 0)", sum(map(len, jobs.values())) if jobs else len(pages))
        return report(address, slurm, **view)


NODES = ("n1", "n2", "n3")


@pytest.mark.parametrize("labeled", [True, False])
def test_a_gpu_that_two_scrape_jobs_have_is_one(labeled: bool) -> None:
    pages: dict[str, Page] = {node: Exporter(node, "7" * labeled).page for node in NODES}
    slurm = squeue(nodes="n[1-3]", gres_detail=["gpu:h100:8(IDX:0-7)"] * 3)
    again = {f"{node}-operator": page for node, page in pages.items()}  # at another address
    fleet = seen({**pages, **again}, slurm=slurm, jobs={"dcgm": NODES, "operator": list(again)}).fleet
    (job,) = fleet.jobs
    assert (fleet.gpus, job.gpus, job.nodes, job.power_w, job.activity) == (24, 24, 3, 24 * 500.0, pytest.approx(0.9))
    assert fleet.free is None


@pytest.mark.parametrize("labeled", [True, False])
def test_a_gpu_that_two_releases_of_an_exporter_have_is_one(labeled: bool) -> None:
    """Only the older one knows the job."""
    pages: dict[str, Page] = {node: Exporter(node, "7" * labeled).page for node in NODES}
    pages |= {f"{node}-new": Exporter(node, "", new=True).page for node in NODES}
    slurm = squeue(nodes="n[1-3]", gres_detail=["gpu:h100:8(IDX:0-7)"] * 3)
    fleet = seen(pages, slurm=slurm, open_jobs=("7",), open_nodes=(("7", "n2"),)).fleet
    (job,) = fleet.jobs
    assert (fleet.gpus, job.gpus, job.nodes, job.power_w) == (24, 24, 3, 24 * 500.0) and fleet.free is None
    assert [(node.name, node.gpus, node.power_w) for node in job.each] == [(node, 8, 4000.0) for node in NODES]
    assert sorted(gpu.name for node in job.each for gpu in node.each) == [f"n2:{i}" for i in range(8)]
    assert job.history is not None


@pytest.mark.parametrize("everywhere", [False, True])
def test_an_exporter_that_is_exchanged_takes_no_history_with_it(everywhere: bool) -> None:
    """On n1 by one of another release, and on n2 by one at another address, ten minutes ago; or ``everywhere`` by one
    of another release, so that no series has the older names now."""
    def held(gpu: int, ago_s: float) -> float | None:
        return 0.9 if ago_s > 2400 else 0.0

    def partly(gpu: int, ago_s: float) -> float | None:
        return 0.9 if gpu < 4 or ago_s > 5400 else 0.0

    now_s, past = time.time(), []
    pages: dict[str, Page] = {}
    levels = {"n1": held, "n2": held, "n3": partly}
    for node, level in levels.items():
        old = Exporter(node, f"job-{node}", level=level)
        new = Exporter(node, f"job-{node}", level=level, new=everywhere or node != "n2")
        past += old.past(f"10.0.0.{node[1]}:9400", [ago_s for ago_s in seconds(3) if ago_s >= 600], now_s)
        past += new.past(f"{node}:9400", [ago_s for ago_s in seconds(3) if ago_s < 600], now_s)
        pages[node] = new.page
    found = {finding.job: finding for finding in seen(pages, past).findings if finding.id != "activity_drop"}
    assert {job: finding.id for job, finding in found.items()} == {
        "job-n1": "held_idle", "job-n2": "held_idle", "job-n3": "partly_used_job"}
    for job, minutes in (("job-n1", 40), ("job-n2", 40), ("job-n3", 90)):
        assert found[job].since_exact
        assert found[job].evidence["lasts_s"] / 60 == pytest.approx(minutes, abs=3)


def test_of_a_young_prometheus_it_is_said_what_cannot_be_judged() -> None:
    idle = Exporter("n1", level=lambda gpu, ago_s: 0.0)
    now_s = time.time()
    young = seen({"n1": idle.page}, idle.past("n1:9400", [ago_s for ago_s in seconds(1) if ago_s <= 60], now_s))
    assert not young.findings and {"held_idle", "partly_used_job"} <= {one.id for one in young.abstained}
    assert WASTES_NOTHING not in to_text(young, 100)


def test_of_gpus_without_samples_it_is_said_that_they_cannot_be_judged() -> None:
    def gap(gpu: int, ago_s: float) -> float | None:
        return None if 60 < ago_s < 1000 and gpu >= 4 else 0.0

    own = Exporter("n1", level=gap)
    found = seen({"n1": own.page}, own.past("n1:9400", seconds(2), time.time()))
    assert not found.findings and "held_idle" in {one.id for one in found.abstained}
    assert WASTES_NOTHING not in to_text(found, 100)


def test_windows_follow_the_scrapes() -> None:
    def held(gpu: int, ago_s: float) -> float | None:
        return 0.9 if ago_s > 3600 else 0.0

    own, busy = Exporter("n1", level=held), Exporter("n2", "8")
    now_s = time.time()
    past = [line for each in (own, busy) for line in each.past(f"{each.node}:9400", seconds(3, 240.0), now_s)]
    with scraping({"n1": own.page, "n2": busy.page}, interval_s=240, past=openmetrics(past)) as address:
        wait_for(address, "count(DCGM_FI_PROF_SM_ACTIVE)", 16)
        found = report(address)
    (finding,) = found.findings
    assert (finding.id, finding.job, finding.since_exact) == ("held_idle", "7", True)
    assert finding.evidence["lasts_s"] / 60 == pytest.approx(60, abs=8)
    assert sum(value is not None for job in found.fleet.jobs for value in job.history.values) > 150  # type: ignore


def test_a_gap_of_one_node_is_no_evidence() -> None:
    def idle(gpu: int, ago_s: float) -> float | None:
        return 0.9 if ago_s > 3600 else 0.0

    def away(gpu: int, ago_s: float) -> float | None:
        return None if 1500 < ago_s < 1740 else idle(gpu, ago_s)

    exporters = [Exporter("n1", level=idle), Exporter("n2", level=away)]
    now_s = time.time()
    past = [line for one in exporters for line in one.past(f"{one.node}:9400", seconds(3), now_s)]
    (finding,) = seen({one.node: one.page for one in exporters}, past).findings
    assert (finding.id, finding.since_exact) == ("held_idle", True)
    assert finding.evidence["lasts_s"] / 60 == pytest.approx(60, abs=3)
    assert finding.gpu_hours_lost == pytest.approx(16, abs=1)


def test_exporters_that_are_all_down_are_the_cause() -> None:
    with scraping({node: lambda: None for node in NODES}) as address:
        wait_for(address, "count(up == 0)", 3)
        with pytest.raises(GputopError, match=r"do not answer \(up == 0\): all 3 of scrape job dcgm"):
            report(address)


def test_metrics_that_no_table_has_are_named() -> None:
    with scraping({"n1": lambda: b'nvidia_gpu_duty_cycle{minor_number="0"} 50\n'}) as address:
        wait_for(address, "count(nvidia_gpu_duty_cycle)", 1)
        with pytest.raises(GputopError, match="it has nvidia_gpu_duty_cycle, which gputop does not read"):
            report(address)


def test_nvidia_gpu_exporter_is_read_and_its_uuids_are_those_of_others() -> None:
    def smi(node: str) -> Page:
        own = [f'uuid="{node}-{i}"' for i in range(8)]
        lines = [f'nvidia_smi_gpu_info{{{uuid},name="H100"}} 1' for uuid in own]
        lines += [f"nvidia_smi_utilization_gpu_ratio{{{uuid}}} 0.75" for uuid in own]
        lines += [f"nvidia_smi_power_draw_watts{{{uuid}}} 400" for uuid in own]
        return lambda: "".join(f"{line}\n" for line in lines).encode()

    fleet = seen({"n1": smi("n1"), "n2": smi("n2"), "dcgm-n1": Exporter("n1").page}).fleet
    (job,) = fleet.jobs
    assert (fleet.gpus, job.gpus, job.power_w) == (16, 8, 4000.0) and fleet.free is not None
    assert (fleet.free.gpus, fleet.free.activity, fleet.free.power_w) == (8, 0.75, 8 * 400.0)
    alone = seen({"n1": smi("n1"), "n2": smi("n2")}).fleet
    assert (alone.gpus, alone.kinds) == (16, ("util",)) and {node.name for node in alone.free_nodes} == {"n1", "n2"}


def test_a_gpu_without_a_value_in_one_exporter_keeps_its_job_from_the_other() -> None:
    own = Exporter("n1", level=lambda gpu, ago_s: float("nan") if gpu == 3 else 0.9)
    nvitop = "".join(f'gpu_utilization_Percentage{{devicename="H100",hostname="n1",index="{i}",uuid="GPU-n1-{i}"}} 80\n'
                     for i in range(8)).encode()
    fleet = seen({"n1": own.page, "nvitop": lambda: nvitop}).fleet
    (job,) = fleet.jobs
    assert (fleet.gpus, job.gpus, fleet.free) == (8, 8, None)
    assert job.activity == pytest.approx((7 * 0.9 + 0.8) / 8)


def test_a_straggler_in_a_job_that_uses_some_of_its_gpus() -> None:
    """Half of the GPUs do nothing; of those that work, one works less."""
    def level(gpu: int, slow: bool) -> float:
        return 0.0 if gpu >= 4 else 0.5 if slow and gpu == 2 else 0.9

    exporters = [Exporter(node, level=lambda gpu, ago_s, node=node: level(gpu, node == "n2")) for node in NODES]
    now_s = time.time()
    past = [line for one in exporters for line in one.past(f"{one.node}:9400", seconds(3), now_s)]
    found = {finding.id: finding for finding in seen({one.node: one.page for one in exporters}, past).findings}
    assert set(found) == {"partly_used_job", "straggler_gpu"}
    assert found["straggler_gpu"].places == ("n2:2",) and found["partly_used_job"].evidence["idle_gpus_count"] == 12
    assert found["straggler_gpu"].evidence["lasts_s"] / 60 == pytest.approx(180, abs=6)


def test_pods_of_one_job_are_one_row_where_a_label_joins_them() -> None:
    pages: dict[str, Page] = {
        node: Exporter(node, "", labels=f',exported_pod="train-{node}",exported_namespace="team",'
                                        'training_kubeflow_org_job_name="train"').page for node in NODES}
    (job,) = seen(pages).fleet.jobs
    assert (job.id, job.gpus, job.nodes) == ("team/train", 24, 3)


def test_some_jobs_of_gputops_own_exporter_are_asked_for_by_the_metric_that_names_them() -> None:
    """The figures themselves have no label of a job: what is asked of two of the three jobs comes all the same."""
    def level(job: str, gpu: int, ago_s: float) -> float:
        held = job == "1" and ago_s < 2400
        return 0.0 if held else 0.5 if job == "2" and gpu == 5 else 0.9

    now_s, activity, jobs = time.time(), [], []
    pages: dict[str, Page] = {}
    for job in ("1", "2", "3"):
        own = [f'gpu="{i}",uuid="GPU-{job}-{i}"' for i in range(8)]
        scraped = f',instance="n{job}:9400",job="dcgm"'
        for ago_s in seconds(3):
            at = f"{now_s - ago_s:.3f}"
            activity += [f"gputop_gpu_sm_active_ratio{{{gpu}{scraped}}} {level(job, i, ago_s)} {at}\n"
                         for i, gpu in enumerate(own)]
            jobs += [f'gputop_gpu_job_info{{{gpu}{scraped},slurm_job_id="{job}"}} 1 {at}\n' for gpu in own]
        lines = [f"gputop_gpu_sm_active_ratio{{{gpu}}} {level(job, i, 0)}" for i, gpu in enumerate(own)]
        lines += [f'gputop_gpu_job_info{{{gpu},slurm_job_id="{job}"}} 1' for gpu in own]
        pages[f"n{job}"] = partial("\n".join([*lines, ""]).encode)
    found = {finding.job: finding for finding in seen(pages, [*activity, *jobs]).findings}
    assert {job: finding.id for job, finding in found.items()} == {"1": "held_idle", "2": "straggler_gpu"}
    assert found["1"].since_exact and found["1"].evidence["lasts_s"] / 60 == pytest.approx(40, abs=3)
    assert found["2"].places == ("n2:5",)


def test_the_report_of_a_job_that_has_ended(capsys: pytest.CaptureFixture[str]) -> None:
    """It ended ten minutes ago, after two hours; two of its GPUs did nothing, and another job runs."""
    def level(gpu: int, ago_s: float) -> float | None:
        return None if ago_s < 600 or ago_s > 7800 else 0.0 if gpu >= 6 else 0.8

    ended = [Exporter(node, "4711", level=level) for node in ("n1", "n2")]
    now_s = time.time()
    past = [line for one in ended for line in one.past(f"{one.node}:9400", seconds(4), now_s)]
    with scraping({"n3": Exporter("n3", "9").page}, past=openmetrics(past)) as address:
        wait_for(address, "count(DCGM_FI_PROF_SM_ACTIVE)", 8)
        assert main(["report", "--job", "4711", "--prometheus", address]) == 0
        text = capsys.readouterr().out
        assert main(["report", "--job", "12", "--prometheus", address]) == 3
    held, worked = 16 * 2, 16 * 2 * 0.8 * 12 / 16
    said = dict(line.split(None, 1) for line in text.splitlines() if line)
    assert text.startswith("Job 4711: 2 nodes, 16 GPUs, 2.0 h") and len(text.splitlines()) <= 20
    first, second, *_ = (float(word) for word in said["GPU"].split() if word.replace(".", "").isdecimal())
    assert first == pytest.approx(held, rel=0.03) and second == pytest.approx(worked, rel=0.03)
    assert said["idle"].startswith("4 of 16 GPUs were idle the whole time: n1:6, n1:7, n2:6, n2:7")
