from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from gputop.core.errors import GputopError
from gputop.core.samples import (
    FAILED,
    LOST,
    NO_LIMIT,
    GpuInfo,
    GpuProcess,
    GpuSample,
    HostProcess,
    PodContainer,
    ProcessSample,
    Reading,
    XidEvent,
)
from gputop.export.snapshot import document, render, to_json, to_text, write_snapshot
from gputop.render.gpu_columns import unread_text
from gputop.replay.snapshot_document import from_document
from gputop.tui.monitor.messages import panel_intro
from tests.fakes import StillSession, cgroup_sample
from tests.records import replace


def test_unknown_is_null_with_its_reason_and_never_zero() -> None:
    doc = json.loads(to_json(document(StillSession(fine=False))))
    sm = doc["gpus"][0]["readings"]["sm_active"]
    assert sm["value"] is None and "Hopper" in sm["reason"]
    util = doc["gpus"][0]["readings"]["gpu_util"]
    assert util["coarse"] is True and util["unit"] == "ratio" and 0 <= util["value"] <= 1
    assert doc["gpus"][0]["readings"]["fp64_active"] == {
        "value": None, "unit": "ratio", "source": None, "reason": "not sampled", "coarse": False}
    assert doc["host"]["readings"]["net_tx_bytes_per_s"]["value"] is None


def test_history_holds_the_lanes_and_null_where_nothing_was_measured() -> None:
    doc = document(StillSession(ticks=100))
    lane = doc["history"]["gpus"]["GPU-test-0"]["sm_active"]["mean"]
    assert len(lane) == doc["history"]["slices"]
    assert lane[0] is None and lane[-1] is not None
    assert all(v is None or 0 <= v <= 1 for v in lane)


def test_the_step_period_is_an_estimate_and_without_one_there_is_its_reason() -> None:
    doc = json.loads(to_json(document(session := StillSession())))
    period = doc["rhythm"]
    assert period["estimate"] is True and period["period_s"] == pytest.approx(20.0, rel=0.02)
    assert period["metric"] == "sm_active" and period["gpus"] == [f"GPU-test-{i}" for i in range(8)]
    assert period["reason"] is None and 0.4 <= period["confidence"] <= 1 and period["interval_s"] == 1.0
    assert "Step period, estimated from the load: 20.0 s" in to_text(session)
    none = document(short_session := StillSession(ticks=10))["rhythm"]
    assert none["period_s"] is none["confidence"] is None and none["reason"] == "fewer than three samples so far"
    assert "Step period" not in to_text(short_session)


def test_text_names_the_coarse_and_the_lost() -> None:
    def lose(gpu: GpuSample, tick: int) -> GpuSample:
        return replace(gpu, state=LOST, readings={}, message="fell off the bus\x1b[2J") if gpu.info.index == 1 else gpu

    text = to_text(StillSession(fine=False, change=lose))
    assert "lost: fell off the bus�[2J" in text and "\x1b" not in text
    assert "~" in text and "coarse utilization" in text
    assert "0B" not in text.split("Host")[0]


@pytest.mark.parametrize(("place", "message", "said"), [
    (range(8), "the connection to the host engine was lost. sudo systemctl start nvidia-dcgm",
     "GPU 0-7 cannot be read: the connection to the host engine was lost."),
    (range(3, 4), "GPU 3 cannot be read: no value since 12:00:00.", "GPU 3 cannot be read: no value since"),
])
def test_gpus_that_cannot_be_read_are_no_lack_of_problems(place: range, message: str, said: str) -> None:
    def fail(gpu: GpuSample, tick: int) -> GpuSample:
        return replace(gpu, state=FAILED, readings={}, message=message) if gpu.info.index in place else gpu

    session = StillSession(ticks=3, change=fail)
    text = " ".join(to_text(session).split())
    assert said in text and "no problem visible" not in text
    assert panel_intro(session)[0].startswith(said) and "No problem found so far" not in " ".join(panel_intro(session))
    assert unread_text(StillSession(ticks=3).feed.sample) == ""


def test_gpus_that_cannot_be_read_for_several_reasons() -> None:
    def fail(gpu: GpuSample, tick: int) -> GpuSample:
        why = "the engine is gone" if gpu.info.index < 2 else f"other {gpu.info.index}"
        return replace(gpu, state=FAILED, readings={}, message=why) if gpu.info.index < 4 else gpu

    sample = StillSession(ticks=3, change=fail).feed.sample
    assert unread_text(sample) == "GPU 0-1 cannot be read: the engine is gone. GPU 2-3 cannot be read either."


def _with(session: StillSession, process: ProcessSample) -> StillSession:
    host = replace(session.feed.sample.host, core_ratios=(1.0, 0.97, 0.5), cpu_limit_cores=8.0)
    session.feed.sample = replace(session.feed.sample, host=host, processes=(process,))
    return session


_ON_PART = GpuProcess(900, "C", 1, Reading(2.0**30, "bytes"), Reading(0.5, "ratio"))
_INSIDE = ProcessSample(
    900, "ana", "python train.py", Reading(6.4, "count"), Reading(1.0, "bytes"), gpus={0: _ON_PART}, local_pid=20,
    container="docker 0123456789ab", container_pid=7, cuda_visible_devices="0,1\x1b",
    cuda_device_order="PCI_BUS_ID",
    io_read_bytes_per_s=Reading(1.2e9, "bytes/s"), io_write_bytes_per_s=Reading(0.0, "bytes/s"),
    note="matched by its mapping of /dev/nvidia0", reasons={"user": "access denied"},
)


def test_host_and_processes_are_complete() -> None:
    session = _with(StillSession(ticks=3), _INSIDE)
    doc = json.loads(to_json(document(session)))
    assert doc["host"]["core_ratios"] == [1.0, 0.97, 0.5] and doc["host"]["cpu_limit_cores"] == 8.0
    (process,) = doc["processes"]
    assert (process["gpus"], process["devices"]) == ([0], "0:1")
    assert (process["pid"], process["local_pid"], process["container_pid"]) == (900, 20, 7)
    assert process["io_read_bytes_per_s"]["value"] == 1.2e9
    assert process["reasons"] == {"user": "access denied"}
    text = to_text(session)
    assert "CPU 31% of 96 cores, 2 full (granted here: 8)" in text
    assert "pid 900 (20 here)  ana  GPU 0:1  1.0G  train.py" in text
    assert ("CPU 6.4 cores  storage read 1.2 GB/s, written 0 B/s  docker 0123456789ab (pid 7 inside)"
            "  CUDA_VISIBLE_DEVICES=0,1\ufffd\n      matched by its mapping of /dev/nvidia0\n") in text


def test_the_pod_of_a_process_is_written_and_read_back() -> None:
    named = PodContainer("1b2c", "c" * 64, "llama-0", "ml<b>\x1b", "train")
    unnamed = PodContainer("9f8e", "d" * 64, reason="no link")
    session = _with(StillSession(ticks=3), replace(_INSIDE, kubernetes=named))
    doc = json.loads(to_json(document(session)))
    assert doc["processes"][0]["kubernetes"] == {
        "pod_uid": "1b2c", "container_id": "c" * 64, "pod": "llama-0", "namespace": "ml<b>\x1b", "container": "train",
        "reason": None}
    assert from_document(doc).sample.processes[0].kubernetes == named
    assert "  pod ml<b>\ufffd/llama-0, container train  " in to_text(session)
    page = render(session, "html")
    assert "pod ml&lt;b&gt;" in page and "\x1b" not in page
    session = _with(StillSession(ticks=3), replace(_INSIDE, kubernetes=unnamed))
    assert from_document(json.loads(to_json(document(session)))).sample.processes[0].kubernetes == unnamed
    assert "pod UID 9f8e" in to_text(session) and "pod UID 9f8e" in render(session, "html")


def test_limits_of_control_groups_and_busy_processes_without_a_gpu_are_written_and_read_back() -> None:
    group = cgroup_sample("slurm 7", cpu_limit_cores=8.0, cpu_used_cores=7.9, cpu_throttled_ratio=0.41,
                          memory_limit_bytes=64 * 2.0**30, memory_used_bytes=62 * 2.0**30, oom_kills=2.0)
    own = cgroup_sample("/user.slice", cpu_limit_cores=None, cpu_used_cores=0.1)
    session = _with(StillSession(ticks=3), replace(_INSIDE, cgroup=group))
    top = tuple(HostProcess(pid, "bob", f"make {pid}", Reading(cores, "count"), Reading(1e9, "bytes"))
                for pid, cores in ((20, 6.4), (31, 2.5), (32, 0.2)))  # 20 holds a GPU, 32 does little
    host = replace(session.feed.sample.host, cgroup=own, top_processes=top, top_reason=None)
    session.feed.sample = replace(session.feed.sample, host=host)
    doc = json.loads(to_json(document(session)))
    assert doc["processes"][0]["cgroup"]["readings"]["cpu_throttled_ratio"]["value"] == 0.41
    assert doc["host"]["cgroup"]["readings"]["cpu_limit_cores"]["reason"] == NO_LIMIT
    back = from_document(doc).sample
    assert back.host == session.feed.sample.host
    assert back.processes[0].cgroup == group and back.processes[0].cuda_device_order == "PCI_BUS_ID"
    text = to_text(session)
    assert ("control group: CPU 7.9 of 8 cores, throttled 41%, memory 62.0 GiB of 64.0 GiB, 2 OOM kills\n") in text
    assert "pid 31  bob  no GPU, CPU 2.5 cores  make 31\n" in text and "make 20" not in text and "make 32" not in text
    page = render(session, "html")
    assert "throttled 41%" in page and "make 31" in page


def test_what_is_not_known_of_a_process_is_null_with_its_reason() -> None:
    unknown = Reading.missing("count", "access denied")
    session = _with(StillSession(ticks=3), ProcessSample(901, None, None, unknown, unknown, gpus={1: _ON_PART},
                                                  reason="access denied", reasons={"container": "access denied"}))
    (process,) = document(session)["processes"]
    assert (process["command"], process["container"], process["reason"]) == (None, None, "access denied")
    assert process["io_read_bytes_per_s"]["value"] is None and process["io_read_bytes_per_s"]["reason"]
    assert "pid 901  ?  GPU 1:1  1.0G  N/A: access denied\n" in to_text(session)


def test_text_names_memory_nodes_instances_and_faults() -> None:
    def change(gpu: GpuSample, tick: int) -> GpuSample:
        if gpu.info.index == 0:
            counts = {"ecc_corrected": 12.0, "ecc_uncorrected": 0.0, "rows_remapped": 2.0, "row_remap_pending": 1.0,
                      "row_remap_failed": 1.0}
            readings = {**gpu.readings, **{m: Reading(v, "count", "NVML") for m, v in counts.items()}}
            xids = tuple(XidEvent(45_296.0 + i, 48) for i in range(5))
            return replace(gpu, info=replace(gpu.info, numa_node=0), readings=readings, xids=xids)
        if gpu.info.index == 1:
            return replace(gpu, info=GpuInfo(1, "MIG-1", "H100 MIG 1g.10gb", mig=2, numa_node=1))
        return replace(gpu, info=replace(gpu.info, numa_node=1))

    session = StillSession(ticks=3, gpus=4, change=change)
    text = to_text(session)
    assert "\n1:2  " in text
    assert "  NUMA node 0: GPU 0  NUMA node 1: GPU 2-3\n" in text
    (line,) = [line for line in text.splitlines() if line.startswith("GPU 0: ")]
    assert line.startswith("GPU 0: 5 Xid errors, the last: Xid 48 at ")
    assert line.endswith("ECC corrected 12, Rows remapped 2, a row of memory will be replaced at the next reset, a row "
                         "of memory could not be replaced")
    assert "GPU 2: " not in text
    gpus = document(session)["gpus"]
    assert [g["label"] for g in gpus] == ["0", "1:2", "2", "3"]
    assert gpus[0]["xids"][0] == {"time_s": 45_296.0, "xid": 48}


def test_a_simulated_snapshot_says_so_in_name_text_and_json(tmp_path: Path) -> None:
    session = StillSession(ticks=3)
    session.feed.sample = replace(session.feed.sample, simulated=True)
    paths = write_snapshot(session, tmp_path)
    assert all("SIMULATED" in p.name for p in paths)
    assert paths[1].read_text().startswith("*** SIMULATED")
    assert json.loads(paths[0].read_text())["simulated"] is True


def test_before_the_first_sample_there_is_nothing_to_write() -> None:
    for make in (document, to_text):
        with pytest.raises(GputopError, match="nothing has been sampled"):
            make(StillSession(ticks=0))


def test_files_are_private_and_never_overwritten(tmp_path: Path) -> None:
    first = write_snapshot(StillSession(ticks=3), tmp_path)
    second = write_snapshot(StillSession(ticks=3), tmp_path)
    assert not {p.name for p in first} & {p.name for p in second}
    assert stat.S_IMODE(first[0].stat().st_mode) == 0o600
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
