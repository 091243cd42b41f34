"""The figures of a session as metrics: names, units, what is absent, and what Prometheus's own checkers say."""

from __future__ import annotations

import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as text_0_0_4_to_metric_families

from gputop.core.samples import FAILED, LOST, AdapterSample, GpuSample, PodContainer, Reading, XidEvent
from gputop.export.openmetrics import STALE_S, Exporter, families
from gputop.profiler.capture.records import CaptureStatus
from tests.export import scene
from tests.fakes import StillSession, reading
from tests.records import replace
from tests.tool_modules import made_pages

_UNITS = ("seconds", "bytes", "bytes_per_second", "ratio", "watts", "celsius", "hertz")


def samples(session: StillSession, name: str) -> dict[tuple[str, ...], float]:
    """The samples of one name by the values of their labels, in the order of the labels' names."""
    return {tuple(labels[key] for key in sorted(labels)): value
            for family, labels, value in Exporter(session).figures() if family.name == name}


def test_names_end_with_the_base_unit_or_what_the_type_asks_for() -> None:
    names = [family.name for family in families()]
    assert len(names) == len(set(names))
    for family in families():
        assert family.name.endswith({"counter": "_total", "info": "_info"}.get(family.type, family.unit)), family.name
        assert family.unit in ("", *_UNITS) and (family.help[0].isupper() or family.help[0].isdigit())
    assert {"gputop_gpu_sm_active_ratio", "gputop_gpu_util_ratio", "gputop_gpu_power_watts",
            "gputop_gpu_memory_used_bytes", "gputop_gpu_temperature_celsius", "gputop_gpu_sm_clock_hertz",
            "gputop_gpu_pcie_rx_bytes_per_second", "gputop_gpu_ecc_uncorrected_total", "gputop_gpu_row_remap_pending",
            "gputop_host_cpu_ratio"} <= set(names)


def test_values_are_those_of_the_newest_sample() -> None:
    session = StillSession(gpus=2)
    power = samples(session, "gputop_gpu_power_watts")
    assert power == {(str(g.info.index), g.info.uuid): g["power_w"].value for g in session.feed.sample.gpus}
    assert samples(session, "gputop_host_memory_used_bytes") == {(): 212 * 2**30}
    assert samples(session, "gputop_gpu_processes") == {("0", "GPU-test-0"): 1, ("1", "GPU-test-1"): 1}
    assert samples(session, "gputop_gpu_info") == {
        ("0", "NVIDIA H100 80GB HBM3", "0000:00:00.0", "GPU-test-0"): 1,
        ("1", "NVIDIA H100 80GB HBM3", "0000:01:00.0", "GPU-test-1"): 1}
    assert samples(session, "gputop_step_period_seconds")[()] == pytest.approx(20.0, rel=0.02)
    assert 0.4 <= samples(session, "gputop_step_period_confidence_ratio")[()] <= 1


@pytest.mark.parametrize("state", [LOST, FAILED])
def test_what_is_not_known_is_absent_and_never_zero(state: str) -> None:
    def change(gpu: GpuSample, tick: int) -> GpuSample:
        if gpu.info.index == 1:
            return replace(gpu, state=state, readings={}, processes=(), processes_reason="lost", message="lost",
                           clock_events_reason="lost")
        return replace(gpu, readings={**gpu.readings, "power_w": reading(float("nan"), "W")})

    session = StillSession(gpus=2, fine=False, change=change, ticks=3)
    assert samples(session, "gputop_gpu_sm_active_ratio") == {}
    assert set(samples(session, "gputop_gpu_util_ratio")) == {("0", "GPU-test-0")}
    assert samples(session, "gputop_gpu_up") == {("0", "GPU-test-0"): 1, ("1", "GPU-test-1"): 0}
    assert set(samples(session, "gputop_gpu_processes")) == {("0", "GPU-test-0")}
    assert {key[0] for key in samples(session, "gputop_gpu_slowdown_active")} == {"0"}
    assert samples(session, "gputop_host_net_tx_bytes_per_second") == {}
    assert samples(session, "gputop_step_period_seconds") == {}
    assert b"gputop_gpu_power_watts" not in Exporter(session).render(openmetrics=True)  # NaN


def test_before_the_first_sample_and_after_the_last_there_are_no_figures() -> None:
    session = StillSession(gpus=1, ticks=0)
    assert {f.name for f, _, _ in Exporter(session).figures()} == {
        "gputop_build_info", "gputop_sample_interval_seconds", "gputop_captures_total",
        "gputop_process_cpu_seconds_total", "gputop_process_resident_memory_bytes"}
    session.advance(2)
    assert samples(session, "gputop_gpu_up")
    session.tick += int(STALE_S) + 1  # the clock goes on, no sample comes
    assert not samples(session, "gputop_gpu_up") and not samples(session, "gputop_host_cpu_ratio")
    assert samples(session, "gputop_sample_timestamp_seconds")[()] == session.feed.sample.time_s


def test_slowdowns_and_faults_have_their_reason_and_number() -> None:
    def change(gpu: GpuSample, tick: int) -> GpuSample:
        return replace(gpu, clock_event_reasons=("idle", "power cap"), xids=(XidEvent(7.0, 79), XidEvent(9.0, 79)),
                       readings={"ecc_uncorrected": Reading(3, "count"), "row_remap_pending": Reading(1, "count")})

    session = StillSession(gpus=1, change=change, ticks=2)
    slowdowns = samples(session, "gputop_gpu_slowdown_active")
    assert {key[1] for key, value in slowdowns.items() if value} == {"power cap"}
    assert {key[1] for key, value in slowdowns.items() if not value} == {
        "power brake", "thermal", "hw thermal", "hw slowdown"}
    assert list(samples(session, "gputop_gpu_clock_event_reasons").values()) == [0x01 | 0x04]
    assert samples(session, "gputop_gpu_xid_last_timestamp_seconds") == {("0", "GPU-test-0", "79"): 9.0}
    assert list(samples(session, "gputop_gpu_ecc_uncorrected_total").values()) == [3]
    assert list(samples(session, "gputop_gpu_row_remap_pending").values()) == [1]


def test_an_rdma_adapter_has_its_traffic_and_whether_its_link_works() -> None:
    session = StillSession(gpus=1, ticks=2)
    port = AdapterSample("mlx5_0", "DOWN", "Ethernet", None, {"rdma_rx_bytes_per_s": reading(7e9, "bytes/s"),
                                                              "rdma_retransmits": reading(3, "count")})
    session.feed.sample = replace(session.feed.sample, host=replace(session.feed.sample.host, adapters=(port,)))
    assert samples(session, "gputop_rdma_up") == {("mlx5_0",): 0}
    assert samples(session, "gputop_rdma_rx_bytes_per_second") == {("mlx5_0",): 7e9}
    assert samples(session, "gputop_rdma_retransmits_total") == {("mlx5_0",): 3}
    assert samples(session, "gputop_rdma_tx_bytes_per_second") == {}


def test_a_mig_instance_has_its_number_and_a_slurm_job_its_gpus() -> None:
    def change(gpu: GpuSample, tick: int) -> GpuSample:
        return replace(gpu, info=replace(gpu.info, index=0, mig=3 + gpu.info.index, uuid=f"MIG-{gpu.info.index}"),
                       processes=tuple(replace(p, mig=3 + gpu.info.index) for p in gpu.processes))

    session = StillSession(gpus=2, change=change, ticks=2)
    assert set(samples(session, "gputop_gpu_up")) == {("0", "3", "MIG-0"), ("0", "4", "MIG-1")}
    assert samples(session, "gputop_gpu_job_info") == {}
    process = session.feed.sample.processes[0]
    session.feed.sample = replace(session.feed.sample, processes=(replace(process, container="slurm 4711"),
                                                        replace(process, container="docker 0123456789ab")))
    assert samples(session, "gputop_gpu_job_info") == {("0", "4", "4711", "MIG-1"): 1}  # on the one that it names


def test_a_pod_has_the_labels_of_dcgm_exporter_and_one_without_a_name_its_uid() -> None:
    session = StillSession(gpus=1, ticks=2)
    process = session.feed.sample.processes[0]
    named = PodContainer("u-1", "c" * 64, "llama-0", "ml", "train")
    unnamed = PodContainer("u-2", "d" * 64, reason="no link")
    session.feed.sample = replace(session.feed.sample, processes=(
        replace(process, kubernetes=named), replace(process, kubernetes=unnamed),
        replace(process, container="docker 0123456789ab")))
    labels = [labels for family, labels, _ in Exporter(session).figures() if family.name == "gputop_gpu_job_info"]
    device = {"gpu": "0", "uuid": "GPU-test-0"}
    assert labels == [{**device, "pod_uid": "u-1", "namespace": "ml", "pod": "llama-0", "container": "train"},
                      {**device, "pod_uid": "u-2"}]


def test_findings_and_captures() -> None:
    session = scene.session(gpus=1, ticks=30)
    exporter = Exporter(session)
    assert samples(session, "gputop_finding_active") == {
        ("input_bound", "trace", "high"): 1, ("idle_gpu", "live", "low"): 1}
    assert samples(session, "gputop_finding_saving_ratio") == {("input_bound", "step"): 0.46}
    assert samples(session, "gputop_last_capture_step_seconds")[()] == session.results.last_capture.median_step_s
    for phase in ("recording", "done", "connecting", "failed", "recording", "done"):
        session.control.set_status(CaptureStatus(phase, "localhost:6009", 10.0))
    counted = {labels["result"]: value for family, labels, value in exporter.figures()
               if family.name == "gputop_captures_total"}
    assert counted == {"done": 2, "failed": 1}


def test_simulated_figures_say_so_in_each_sample() -> None:
    session = StillSession(gpus=1, ticks=2)
    real = Exporter(session).render(openmetrics=True)
    session.feed.sample = replace(session.feed.sample, simulated=True)
    lines = [line for line in Exporter(session).render(openmetrics=True).decode().splitlines() if line[0] != "#"]
    assert lines and all('simulated="true"' in line for line in lines) and b"simulated" not in real


@pytest.mark.parametrize("name", ["", scene.HOSTILE], ids=["usual", "hostile"])
def test_both_formats_are_read_by_the_parsers_of_prometheus_client(name: str) -> None:
    session = scene.session(gpus=2, name=name, ticks=30)
    exporter = Exporter(session)
    exporter.requests[200] += 1
    openmetrics = exporter.render(openmetrics=True).decode()
    assert openmetrics.endswith("# EOF\n") and "\x1b" not in openmetrics
    told: dict[str, set[str]] = defaultdict(set)
    for family in text_string_to_metric_families(openmetrics):
        assert family.documentation and family.samples
        told[family.type] |= {sample.name for sample in family.samples}
        for sample in family.samples:
            assert all(len(text) <= 256 for text in sample.labels.values())
    assert {"gputop_gpu_info", "gputop_build_info"} <= told["info"]
    assert {"gputop_captures_total", "gputop_http_requests_total"} <= told["counter"]
    older = exporter.render(openmetrics=False).decode()
    assert {s.name for f in text_0_0_4_to_metric_families(older) for s in f.samples} == set().union(*told.values())


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
@pytest.mark.parametrize("name", ["", scene.HOSTILE], ids=["usual", "hostile"])
def test_promtool_finds_no_fault(name: str) -> None:
    document = Exporter(scene.session(gpus=2, name=name, ticks=30)).render(openmetrics=False)
    done = subprocess.run(["promtool", "check", "metrics"], input=document, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_the_document_lists_every_metric() -> None:
    table = "\n".join(f"| `{f.name}` | {f.type} | {', '.join(f.labels)} | {f.help} |" for f in families())
    assert table in made_pages()[Path("reference/metrics.md")], f"another table than\n{table}"
