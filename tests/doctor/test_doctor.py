"""`gputop doctor`: each check on made-up trees and facts. The whole over a fake driver: test_doctor_driver."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest

from gputop.core.errors import GputopError
from gputop.doctor import dcgm, driver, jobs, node
from gputop.doctor.check import Check, Result, RunningTasks, Task
from gputop.doctor.driver_facts import DriverFacts, GpuFacts, facts_from
from gputop.doctor.examine import Examination, examine, print_report, to_text
from gputop.profiler.discovery import Discovery, ProfilerServer
from tests import dcgm_double
from tests.dcgm_double.scene import Scene
from tests.listening import free_port
from tests.waiting import until

H100 = "NVIDIA H100 80GB HBM3"
OPEN_MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.10.01  Release Build\nGCC version: 12"
FINE = DriverFacts(nvml_path="/usr/lib/libnvidia-ml.so.580.65.06", init_code=0, driver="580.65.06", cuda=13, count=2,
                   gpus=tuple(GpuFacts(i, 0, H100, f"GPU-{i}", sm_active=True) for i in range(2)))
COARSE = DriverFacts(init_code=0, driver="550.1", count=1, gpus=(
    GpuFacts(0, 0, "NVIDIA A100", sm_active_reason="this GPU has no GPM"),))
NO_LIBRARY = DriverFacts(load_error="libnvidia-ml.so.1: cannot open shared object file")


def put(root: Path, path: str, text: str | bytes = "") -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def process(root: Path, pid: int, command: str, *, parent: int = 1, maps: str = "", caps: int = 0) -> None:
    folder = f"proc/{pid}"
    put(root, f"{folder}/comm", command.split()[0][:15] + "\n")
    put(root, f"{folder}/cmdline", command.replace(" ", "\0") + "\0")
    put(root, f"{folder}/stat", f"{pid} ({command.split()[0]}) S {parent} " + " ".join(["0"] * 30))
    put(root, f"{folder}/maps", maps)
    put(root, f"{folder}/status", f"Name:\tx\nCapEff:\t{caps:016x}\n")


# -- running them -------------------------------------------------------------------------------


def test_a_check_that_breaks_or_hangs_hides_no_other() -> None:
    never = threading.Event()

    def broken() -> Result:
        raise ZeroDivisionError("oh")

    def refused() -> Result:
        raise GputopError("not allowed", "sudo make it so")

    def hanging() -> Result:
        never.wait()
        raise AssertionError

    running = RunningTasks([Task("a", "A", broken), Task("b", "B", hanging), Task("c", "C", refused),
                       Task("d", "D", lambda: Result("ok", "works"))], 0.3)
    until(lambda: len(running._results) == 3)
    a, b, c, d = running.results()
    never.set()
    assert (a.status, a.title) == ("unknown", "A") and "ZeroDivisionError: oh" in a.detail
    assert b.status == "unknown" and "no answer within 0.3 s" in b.detail
    assert (c.status, c.detail, c.fix) == ("fail", "not allowed", "sudo make it so")
    assert d == Check("d", "ok", "D", "works")


def test_text_is_aligned_and_fixes_stand_alone() -> None:
    checks = (Check("a", "ok", "Short", "word " * 40), Check("b", "fail", "Longer title", "bad", "one\ntwo"))
    report = Examination(checks, False)
    lines = to_text(report, 80).splitlines()
    assert max(map(len, lines)) <= 80
    starts = {line.index(word) for line in lines for word in ("word", "bad", "one", "two") if word in line}
    assert len(starts) == 1
    assert any(line.strip() == "one" for line in lines) and any(line.strip() == "two" for line in lines)
    assert "\x1b" not in "".join(lines) and "\x1b[31mfail" in to_text(report, 80, color=True)
    assert lines[-1] == "1 ok, 1 failed."


@pytest.mark.parametrize(("statuses", "no_gpu", "code"), [
    (("ok", "warn", "unknown"), False, 0), (("ok", "fail"), False, 1), (("fail",), True, 3), (("ok",), True, 3),
])
def test_exit_status(statuses: tuple[str, ...], no_gpu: bool, code: int) -> None:
    checks = tuple(Check("x", status, "X", "") for status in statuses)  # type: ignore[arg-type]
    assert Examination(checks, no_gpu).exit_code == code


# -- what the driver said -----------------------------------------------------------------------


def test_facts_survive_a_line_cut_short_and_a_gpu_without_answer() -> None:
    lines = ['{"nvml_path": "/l"}', '{"calling": "nvmlInit"}', '{"init_code": 0, "count": 2, "driver": "580.1"}',
             '{"gpu": 1, "name": "H", "code": 0, "pids": [5, 4]}', '{"gpu": 0, "na']
    facts = facts_from(lines, hung=True)
    assert (facts.nvml_path, facts.count, facts.hung_in, facts.pids) == ("/l", 2, "", (4, 5))
    assert [gpu.code for gpu in facts.gpus] == [None, 0]
    assert facts_from(lines[:2], hung=True).hung_in == "nvmlInit"
    assert facts_from(['{"done": true}'], died="by SIGSEGV").died == ""


def test_no_driver_names_what_is_missing_where(tmp_path: Path) -> None:
    put(tmp_path, "etc/os-release", 'NAME="x"\nID=pop\nID_LIKE="ubuntu debian"\n')
    for number, vendor, kind in ((0, "0x10de", "0x030200"), (1, "0x10de", "0x040300"), (2, "0x8086", "0x030000")):
        put(tmp_path, f"sys/bus/pci/devices/{number}/vendor", vendor)
        put(tmp_path, f"sys/bus/pci/devices/{number}/class", kind)
    check = driver.nvml_library(NO_LIBRARY, tmp_path)
    assert check.status == "fail" and "has 1 NVIDIA GPU." in check.detail and "cannot open" in check.detail
    assert check.fix is not None and "ubuntu-drivers" in check.fix
    assert driver.no_gpu(NO_LIBRARY)
    put(tmp_path, "proc/1/cgroup", "0::/kubepods/pod1\n")
    inside = driver.nvml_library(NO_LIBRARY, tmp_path)
    assert inside.fix is not None and "docker run --gpus all" in inside.fix
    assert driver.nvml(NO_LIBRARY, tmp_path).status == driver.gpus(NO_LIBRARY)[0].status == "unknown"


def test_a_machine_without_gpu_gets_no_install_command(tmp_path: Path) -> None:
    put(tmp_path, "sys/bus/pci/devices/0/vendor", "0x8086")
    check = driver.nvml_library(NO_LIBRARY, tmp_path)
    assert check.status == "fail" and check.fix is None and "no NVIDIA GPU on the PCI bus either" in check.detail


def test_kernel_module(tmp_path: Path) -> None:
    unloaded = DriverFacts(nvml_path="/l", init_code=9)
    check = driver.kernel_module(unloaded, tmp_path)
    assert check.status == "fail" and check.fix is not None and check.fix.startswith("sudo modprobe nvidia")
    assert driver.no_gpu(unloaded)
    assert driver.kernel_module(FINE, tmp_path).status == "unknown"
    put(tmp_path, "proc/driver/nvidia/version", OPEN_MODULE)
    loaded = driver.kernel_module(FINE, tmp_path)
    assert loaded.status == "ok" and loaded.detail.startswith("NVIDIA UNIX Open Kernel Module for x86_64 570.10.01")
    assert driver.module_version(tmp_path) == "570.10.01"


def test_mismatch_names_both_versions(tmp_path: Path) -> None:
    put(tmp_path, "proc/driver/nvidia/version", OPEN_MODULE)
    check = driver.nvml(DriverFacts(nvml_path="/usr/lib/libnvidia-ml.so.580.65.06", init_code=18), tmp_path)
    assert check.status == "fail" and "Module 570.10.01, library 580.65.06." in check.detail
    assert check.fix is not None and "sudo reboot" in check.fix and "rmmod" in check.fix
    put(tmp_path, ".dockerenv")
    inside = driver.nvml(DriverFacts(init_code=18), tmp_path)
    assert inside.fix == "# restart this container" and "library unknown" in inside.detail


@pytest.mark.parametrize(("facts", "words"), [
    (DriverFacts(nvml_path="/l", hung_in="nvmlInit"), "nvmlInit did not return"),
    (DriverFacts(nvml_path="/l", died="by SIGSEGV"), "by SIGSEGV"),
    (DriverFacts(nvml_path="/l", init_code=4), "no permission"),
    (DriverFacts(nvml_path="/l", init_code=999), "an unknown error"),
    (DriverFacts(nvml_path="/l", import_error="ImportError: x"), "nvidia-ml-py"),
])
def test_a_driver_that_cannot_be_talked_to(facts: DriverFacts, words: str, tmp_path: Path) -> None:
    check = driver.nvml(facts, tmp_path)
    assert check.status == "fail" and words in check.detail and check.fix
    assert not driver.no_gpu(facts)


def test_a_driver_that_a_starved_host_asked_is_not_accused(tmp_path: Path) -> None:
    check = driver.nvml(DriverFacts(nvml_path="/l", hung_in="nvmlInit", starved_s=5.0), tmp_path)
    assert check.status == "unknown" and "the host is overloaded" in check.detail and "hang" not in check.detail


def test_device_files(tmp_path: Path) -> None:
    def checked(*refused: str, facts: DriverFacts = FINE) -> Check:
        return driver.device_files(facts, tmp_path, lambda path, mode: path.name not in refused)

    assert checked().status == "unknown"
    unloaded = DriverFacts(init_code=9)
    assert checked(facts=unloaded).status == "unknown"
    put(tmp_path, "proc/driver/nvidia/version", OPEN_MODULE)
    missing = checked(facts=unloaded)
    assert missing.status == "fail" and missing.fix == "sudo nvidia-modprobe -c 0 -u"
    put(tmp_path, "dev/nvidiactl")
    assert checked().status == "warn"
    put(tmp_path, "dev/nvidia0")
    put(tmp_path, "dev/nvidia-uvm")
    assert checked().status == "ok" and "1 GPU can" in checked().detail
    refused = checked("nvidia0")
    assert refused.status == "fail" and "/dev/nvidia0 (group" in refused.detail
    assert refused.fix is not None and refused.fix.startswith("ls -l /dev/nvidia0\nsudo ")


def test_gpus_that_work_and_those_that_do_not() -> None:
    codes = (0, 15, 16, 4, None, 0)
    facts = DriverFacts(init_code=0, count=6, gpus=tuple(GpuFacts(i, code, H100, mig=i == 5)
                                                        for i, code in enumerate(codes)))
    good, *bad = driver.gpus(facts)
    assert good.status == "ok" and good.detail == f"2 of 6 answer; 0: {H100}; 5: {H100}, MIG mode"
    assert [check.id for check in bad] == ["gpu_1", "gpu_2", "gpu_3", "gpu_4"]
    assert all(check.status == "fail" and check.fix for check in bad)
    assert "is lost" in bad[0].detail and "--gpu-reset -i 2" in (bad[1].fix or "")
    assert "/dev/nvidia3" in (bad[2].fix or "") and "not responding" in bad[3].detail
    none = driver.gpus(DriverFacts(init_code=0, count=0))[0]
    assert none.status == "fail" and driver.no_gpu(DriverFacts(init_code=0, count=0))


def test_sm_activity_says_which_gpus_lack_it_and_what_gives_it() -> None:
    assert driver.sm_activity(FINE).status == "ok"
    mixed = driver.sm_activity(DriverFacts(count=2, gpus=(FINE.gpus[0], GpuFacts(1, 0, sm_active_reason="no GPM"))))
    assert mixed.status == "warn" and "on GPU 0; GPU 1: no GPM" in mixed.detail and "DCGM host engine" in mixed.detail
    assert mixed.fix is not None and mixed.fix.startswith("gputop --dcgm-watch")
    denied = GpuFacts(0, 0, sm_active_reason="no permission: run as root (GPM)")
    assert (driver.sm_activity(DriverFacts(count=1, gpus=(denied,))).fix or "").startswith("sudo ")
    assert driver.sm_activity(DriverFacts()).status == "unknown"


# -- DCGM ---------------------------------------------------------------------------------------


def test_dcgm_is_missed_only_where_gpm_is_missing(tmp_path: Path) -> None:
    assert dcgm.installation(FINE, tmp_path, {}).status == "ok"
    missed = dcgm.installation(COARSE, tmp_path, {})
    assert missed.status == "warn" and "datacenter-gpu-manager-4-cuda12" in (missed.fix or "")
    assert dcgm.installation(NO_LIBRARY, tmp_path, {}).status == "unknown"


def test_dcgm_bindings_and_library_of_one_major(tmp_path: Path) -> None:
    dcgm_double.install(tmp_path, 4, library=False)
    half = dcgm.installation(FINE, tmp_path, {})
    assert "half installed" in half.detail and "libdcgm.so.4" in half.detail and "apt-get install" in (half.fix or "")
    dcgm_double.install_library(tmp_path / "opt/dcgm", 3)
    env = {"LD_LIBRARY_PATH": "/opt/dcgm:/nowhere"}
    mismatch = dcgm.installation(FINE, tmp_path, env)
    assert mismatch.status == "warn" and "different major" in mismatch.detail and mismatch.fix
    dcgm_double.install(tmp_path, 3, library=False)
    matching = dcgm.installation(FINE, tmp_path, env)
    assert matching.status == "ok" and matching.detail.startswith("DCGM 3:")
    dcgm_double.install_library(tmp_path / "usr/lib64", 4)
    assert dcgm.installation(FINE, tmp_path, env).detail.startswith("DCGM 4:")
    elsewhere = dcgm.installation(FINE, tmp_path, {}, tmp_path / "mine")
    assert elsewhere.status == "warn" and "--dcgm-bindings" in elsewhere.detail


@pytest.fixture
def dcgm_node(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path, 3, 4)
    yield scene
    scene.close()


def engine_check(scene: Scene, facts: DriverFacts = COARSE, address: str | None = None) -> Check:
    return dcgm.engine(facts, scene.root, {}, address or scene.engine.address, wall_clock=lambda: scene.now_s)


def test_host_engine_that_nobody_has_watch_profiling_fields(dcgm_node: Scene) -> None:
    check = engine_check(dcgm_node)
    assert check.status == "warn" and "DCGM 4.6.0 answers" in check.detail and "with 2 GPUs" in check.detail
    assert "No program watches the profiling fields" in check.detail and "gputop --dcgm-watch" in (check.fix or "")
    assert not dcgm_node.engine.watched() and not dcgm_node.engine.clients, "nothing is left on the engine"
    assert engine_check(dcgm_node, FINE).status == "ok"


def test_host_engine_that_reads_through_gpm_needs_no_consent(dcgm_node: Scene) -> None:
    dcgm_node.engine.figures |= {(0, 63): 9 << 16, (1, 63): 9 << 16}
    check = engine_check(dcgm_node)
    assert check.status == "ok" and "gputop --source dcgm watches them" in check.detail and not check.fix
    assert not dcgm_node.engine.watched() and not dcgm_node.engine.clients, "nothing is left on the engine"
    dcgm_node.engine.figures[1, 63] = 8 << 16
    assert "--dcgm-watch" in (engine_check(dcgm_node).fix or "")


def test_host_engine_that_is_watched_says_what_and_by_whom(dcgm_node: Scene) -> None:
    dcgm_node.engine.watched_by_others([1001, 1002, 1004])
    dcgm_node.engine.other_groups = [("dcgm-exporter", [1001, 1002, 1004])]
    assert "watched: 1001-1002,1004 (field groups that hold them: dcgm-exporter)" in engine_check(dcgm_node).detail
    dcgm_node.engine.update()
    dcgm_node.now_s += 30
    assert engine_check(dcgm_node).status == "ok"
    dcgm_node.now_s += 90
    assert engine_check(dcgm_node).status == "warn"


def test_what_stays_readable_after_a_watch_is_not_called_watched(dcgm_node: Scene) -> None:
    dcgm_node.engine.watched_by_others([1001, 1002, 1004])
    dcgm_node.engine.update()
    dcgm_node.engine.watched_by_nobody_else()
    dcgm_node.now_s += 1
    assert "No program watches the profiling fields" in engine_check(dcgm_node).detail


def test_host_engine_with_a_lost_gpu(dcgm_node: Scene) -> None:
    dcgm_node.engine.lost.add(1)
    check = engine_check(dcgm_node)
    assert check.status == "warn" and "Lost: GPU 1 (DCGM's numbering)" in check.detail


def test_host_engine_of_gpus_without_profiling(dcgm_node: Scene) -> None:
    dcgm_node.engine.gpus[0].profiling = None
    some = engine_check(dcgm_node)
    assert "not available on GPU 0: the engine's profiling module is not loaded" in some.detail and some.fix
    dcgm_node.engine.gpus[1].profiling = None
    none = engine_check(dcgm_node)
    assert "GPU 0-1:" in none.detail and none.fix is None
    dcgm_node.engine.gpus.clear()
    assert "cannot read any of them" in engine_check(dcgm_node).detail


def test_host_engine_older_than_the_newest_bindings(dcgm_node: Scene) -> None:
    dcgm_node.engine.version = "3.3.9"
    assert "DCGM 3.3.9 answers" in engine_check(dcgm_node).detail


@pytest.mark.parametrize(("function", "words"), [
    ("dcgmConnect_v2", "DCGM 4 cannot communicate with"), ("dcgmGetAllDevices", "DCGM 4 cannot communicate with"),
    ("dcgmEntitiesGetLatestValues", "answers, but not completely"),
    ("dcgmProfGetSupportedMetricGroups", "answers, but not completely"),
])
def test_host_engine_that_fails_half_way(dcgm_node: Scene, function: str, words: str) -> None:
    dcgm_node.engine.fails[function] = -21
    check = engine_check(dcgm_node)
    assert check.status == "warn" and words in check.detail and "the connection broke" in check.detail and check.fix


def test_something_else_in_place_of_the_host_engine(dcgm_node: Scene) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert "cannot communicate with the program" in engine_check(dcgm_node, address=address).detail
        bare = dcgm.engine(COARSE, dcgm_node.root / "bare", {}, address)
        assert bare.status == "warn" and "something listens" in bare.detail and "apt-get install" in (bare.fix or "")


def test_host_engine_that_serves_another_address(dcgm_node: Scene) -> None:
    dcgm_node.engine.stop()
    process(dcgm_node.root, 77, "nv-hostengine -n")
    check = engine_check(dcgm_node)
    assert check.status == "warn" and "pid 77" in check.detail and "name that with --dcgm" in check.detail
    assert "/proc/77/cmdline" in (check.fix or "")


def test_host_engine_that_is_installed_but_stopped(dcgm_node: Scene) -> None:
    dcgm_node.engine.stop()
    assert "systemctl start nvidia-dcgm" in (engine_check(dcgm_node).fix or "")
    none = dcgm.engine(COARSE, dcgm_node.root / "bare", {}, dcgm_node.engine.address)
    assert none.status == "fail" and "for DCGM on another machine" in none.detail  # it was asked for


# -- jobs ---------------------------------------------------------------------------------------


def test_profiling_rights(tmp_path: Path) -> None:
    held = DriverFacts(init_code=0, driver="580.1", count=1, gpus=(GpuFacts(0, 0, pids=(10, 11)),))
    assert jobs.profiling_rights(held, tmp_path).status == "unknown"
    put(tmp_path, "proc/driver/nvidia/params", "ResmanDebugLevel: 4294967295\nRmProfilingAdminOnly: 0\n")
    assert jobs.profiling_rights(held, tmp_path).status == "ok"
    put(tmp_path, "proc/driver/nvidia/params", "ResmanDebugLevel: 4294967295\nRmProfilingAdminOnly: 1\n")
    put(tmp_path, "proc/self/status", f"CapEff:\t{1 << 21:016x}\n")
    assert jobs.profiling_rights(FINE, tmp_path).status == "ok"
    process(tmp_path, 10, "python a.py", caps=1 << 21)
    process(tmp_path, 11, "python b.py", caps=1 << 38)  # CAP_PERFMON
    assert jobs.profiling_rights(held, tmp_path).status == "ok"
    older = DriverFacts(init_code=0, driver="550.1", count=1, gpus=held.gpus)
    denied = jobs.profiling_rights(older, tmp_path)
    assert denied.status == "warn" and "without permission: 11." in denied.detail
    assert "NVreg_RestrictProfilingToAdminUsers=0' | sudo tee /etc/modprobe.d/" in (denied.fix or "")
    assert "update-initramfs" in (denied.fix or "")
    put(tmp_path, "usr/bin/dracut")
    put(tmp_path, ".dockerenv")
    inside = jobs.profiling_rights(older, tmp_path)
    assert "--cap-add=SYS_ADMIN" in (inside.fix or "") and "dracut" in (inside.fix or "")


def test_jobs_without_a_server_get_the_line_to_add(tmp_path: Path) -> None:
    facts = DriverFacts(count=1, gpus=(GpuFacts(0, 0, pids=(10, 11, 12, 13, 14, 15, 99)),))
    process(tmp_path, 10, "python served.py")
    process(tmp_path, 15, "python worker.py", parent=10)
    process(tmp_path, 11, "python tf.py", maps="7f /x/site-packages/tensorflow/libtensorflow_cc.so.2\n")
    process(tmp_path, 12, "python jax.py", maps="7f /x/jaxlib/a.so\n7f /x/tensorflow/libtensorflow_cc.so.2\n")
    process(tmp_path, 13, "python torch\x1b[2J.py --pass hunter2", maps="7f /x/torch/lib/libtorch_cuda.so\n")
    process(tmp_path, 14, "nvidia-cuda-mps-server")
    server = ProfilerServer("127.0.0.1:6009", 10, "ana", "python served.py --token hunter2", "JAX", "0.7")
    first, *lacking = jobs.servers(facts, tmp_path, lambda: Discovery((server,), ("a note",)))
    assert first.status == "ok" and "127.0.0.1:6009 JAX 0.7, pid 10: served.py" in first.detail
    assert "a note" in first.detail and "1 more" in first.detail
    assert "hunter2" not in first.detail + lacking[2].detail, "secrets are hidden here, too"
    assert [check.id for check in lacking] == ["process_11", "process_12", "process_13"]
    assert "tf.profiler" in (lacking[0].fix or "") and "jax" not in (lacking[0].fix or "")
    assert "jax.profiler" in (lacking[1].fix or "") and "tf.profiler" not in (lacking[1].fix or "")
    assert "gputop capture 13" in (lacking[2].fix or "") and "\x1b" not in lacking[2].detail
    assert "gputop attach 11 " in (lacking[0].fix or "") and "gputop attach 12 " in (lacking[1].fix or "")
    assert "attach" not in (lacking[2].fix or "")


def test_a_job_that_any_user_can_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process(tmp_path, 10, "python train.py", maps="7f /x/torch/lib/libtorch_cpu.so\n")
    put(tmp_path, "proc/10/net/unix", "0: 2 0 0 2 01 41 @dynoconfigclient0-1@\n")
    put(tmp_path, "proc/10/ns/net", "")
    put(tmp_path, "proc/10/status", "Uid:\t0\t0\t0\t0\n")
    (tmp_path / "proc/10/fd").mkdir()
    (tmp_path / "proc/10/fd/3").symlink_to("socket:[41]")
    checks = {check.id: check for check in jobs.servers(DriverFacts(), tmp_path, Discovery)}
    check = checks["process_10_kineto"]
    assert check.status == "warn" and "Any user of this node" in check.detail and "gputop run" in (check.fix or "")
    monkeypatch.setattr(jobs, "servers", lambda facts, root: [check])
    ids = [check.id for check in examine(tmp_path, env={}, root=tmp_path).checks]
    assert ids.index("process_10_kineto") < ids.index("disk")


def test_without_a_gpu_the_jobs_are_those_that_have_a_framework_loaded(tmp_path: Path) -> None:
    process(tmp_path, 10, "python other.py")
    none, *lacking = jobs.servers(DriverFacts(), tmp_path, Discovery)
    assert none.status == "warn" and "no process holds a GPU" in none.detail and none.fix and not lacking
    process(tmp_path, 11, "python tf.py",
            maps="7f00-7f01 r-xp 0000 08:01 1   /x/site-packages/tensorflow/libtensorflow_cc.so.2\n")
    _, job = jobs.servers(DriverFacts(), tmp_path, Discovery)
    assert job.id == "process_11"
    assert "has TensorFlow, JAX or PyTorch loaded but has no profiler server: tf.py" in job.detail
    assert "gputop attach 11 " in (job.fix or "")


def test_a_server_asked_for_that_does_not_answer_fails() -> None:
    check = jobs.attached(f"127.0.0.1:{free_port()}")
    assert check.status == "fail" and "nothing listens" in check.detail and check.fix


# -- the node -----------------------------------------------------------------------------------


def test_container(tmp_path: Path) -> None:
    assert node.container(tmp_path, {}).status == "unknown"
    link = tmp_path / "proc/self/ns/pid"
    link.parent.mkdir(parents=True)
    link.symlink_to("pid:[4026531836]")
    assert node.container(tmp_path, {}).detail.startswith("none: this is the host")
    put(tmp_path, "run/.containerenv")
    assert node.container(tmp_path, {}).status == "ok" and "host's PID" in node.container(tmp_path, {}).detail
    link.unlink()
    link.symlink_to("pid:[4026532999]")
    assert "--pid=host" in (node.container(tmp_path, {}).fix or "")
    assert "hostPID: true" in (node.container(tmp_path, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}).fix or "")


IN_POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
POD_GROUP = f"0::/kubepods/pod1b2c3d4e-5f60-4718-92a3-b4c5d6e7f809/{'a' * 64}\n"


def own_process(root: Path, namespace: str = "pid:[4026532999]", caps: int = 0) -> None:
    link = root / "proc/self/ns/pid"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(namespace)
    put(root, "proc/self/status", f"Name:\tx\nCapEff:\t{caps:016x}\n")


def test_outside_of_kubernetes_there_is_no_check_of_a_pod(tmp_path: Path) -> None:
    own_process(tmp_path)
    put(tmp_path, "proc/self/cgroup", f"0::/system.slice/docker-{'a' * 64}.scope\n")
    assert node.pod_rights(NO_LIBRARY, tmp_path, {}) is None
    put(tmp_path, "proc/self/cgroup", POD_GROUP)
    check = node.pod_rights(NO_LIBRARY, tmp_path, {})
    assert check is not None and check.status == "warn"


def test_a_pod_learns_which_rights_it_lacks_and_which_lines_grant_them(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    unknown = node.pod_rights(FINE, tmp_path, IN_POD)
    assert unknown.status == "unknown" and unknown.fix is None
    own_process(tmp_path)
    check = node.pod_rights(NO_LIBRARY, tmp_path, IN_POD)
    assert check.status == "warn"
    assert all(word in check.detail for word in ("PID namespace", "SYS_PTRACE", "driver", "/var/log/containers"))
    spec = yaml.safe_load(check.fix)["spec"]
    assert spec["hostPID"] is True and spec["runtimeClassName"] == "nvidia"
    (container,) = spec["containers"]
    assert container["securityContext"] == {"runAsUser": 0, "capabilities": {"add": ["SYS_PTRACE"]}}
    assert {one["name"] for one in container["env"]} == {"NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"}
    assert [one["name"] for one in container["volumeMounts"]] == [one["name"] for one in spec["volumes"]]
    assert container["volumeMounts"][0]["readOnly"] is True


@pytest.mark.parametrize(("lacking", "lines"), [
    ("PID namespace", {"spec": {"hostPID": True}}),
    ("SYS_PTRACE", {"spec": {"containers": [{"name": "gputop", "securityContext": {
        "runAsUser": 0, "capabilities": {"add": ["SYS_PTRACE"]}}}]}}),
    ("", None)])
def test_a_pod_with_all_rights_but_one_gets_the_lines_for_that_one(
        tmp_path: Path, lacking: str, lines: dict[str, object] | None) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    own_process(tmp_path, "pid:[4026532999]" if lacking == "PID namespace" else "pid:[4026531836]",
                0 if lacking == "SYS_PTRACE" else 1 << 19)
    (tmp_path / "var/log/containers").mkdir(parents=True)
    check = node.pod_rights(FINE, tmp_path, IN_POD)
    assert check.status == ("warn" if lacking else "ok") and lacking in check.detail and ";" not in check.detail
    assert (check.fix and yaml.safe_load(check.fix)) == lines


def test_host_tells_hidden_processes(tmp_path: Path) -> None:
    assert node.host(tmp_path).status == "fail" and "/proc/stat: No such file" in node.host(tmp_path).detail
    for name in ("stat", "meminfo", "self/stat"):
        put(tmp_path, f"proc/{name}", "x")
    put(tmp_path, "proc/self/mounts", "proc /proc proc rw,nosuid,hidepid=invisible,gid=4 0 0\n")
    assert node.host(tmp_path, euid=0).status == "ok"
    hidden = node.host(tmp_path, euid=1000)
    assert hidden.status == "warn" and "hidepid=invisible" in hidden.detail and "remount" in (hidden.fix or "")
    put(tmp_path, "proc/self/mounts", "proc /proc proc rw,hidepid=0 0 0\n")
    assert node.host(tmp_path, euid=1000).status == "ok"


@pytest.mark.parametrize(("env", "size", "encoding", "status", "words"), [
    ({"TERM": "xterm-256color", "COLORTERM": "truecolor"}, (200, 50), "UTF-8", "ok", "200×50"),
    ({"TERM": "xterm-kitty", "NO_COLOR": "1"}, (80, 24), "utf8", "ok", "NO_COLOR"),
    ({"TERM": "xterm-256color"}, (80, 24), "ANSI_X3.4-1968", "warn", "UTF-8"),
    ({"TERM": "dumb"}, (80, 24), "UTF-8", "warn", "cannot draw on"),
    ({"TERM": "linux"}, (80, 24), "UTF-8", "warn", "glyphs"),
    ({"TERM": "xterm"}, (80, 24), "UTF-8", "warn", "few colors"),
    ({"TERM": "xterm-256color"}, (0, 0), "UTF-8", "warn", "smaller"),
    ({"TERM": "xterm-256color"}, None, "UTF-8", "unknown", "no terminal here"),
])
def test_terminal(env: dict[str, str], size: tuple[int, int] | None, encoding: str, status: str, words: str) -> None:
    check = node.terminal(env, lambda: os.terminal_size(size) if size else None, encoding)
    assert check.status == status and words in check.detail


def test_logdir_is_tried_and_not_made(tmp_path: Path) -> None:
    wanted = tmp_path / "a/b"
    check = node.logdir(wanted)
    assert check.status == "ok" and "can be created" in check.detail and not wanted.parent.exists()
    put(tmp_path, "file")
    bad = node.logdir(tmp_path / "file" / "x")
    assert bad.status == "fail" and "cannot write" in bad.detail and bad.fix


def test_disk(tmp_path: Path) -> None:
    usage = namedtuple("usage", "total used free")

    def free(count: int) -> Check:
        return node.disk(tmp_path / "not/there", lambda path: usage(1 << 40, 0, count))

    assert [free(n).status for n in (1 << 20, 1 << 30, 1 << 35)] == ["fail", "warn", "ok"]
    assert str(tmp_path) in (free(1).fix or "")


def test_dependencies_of_this_environment_work() -> None:
    check = node.dependencies()
    assert check.status == "ok" and "nvidia-ml-py" in check.detail


def test_the_old_pynvml_package_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "pynvml/__init__.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    check = node.dependencies()
    assert check.status == "warn" and "uninstall -y pynvml" in (check.fix or "")
    sys.modules.pop("pynvml", None)



def test_json_of_a_report_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(Examination((Check("a", "ok", "A", "fine"),), False), as_json=True)
    assert json.loads(capsys.readouterr().out) == {"schema": "gputop.doctor/1", "checks": [
        {"id": "a", "status": "ok", "title": "A", "detail": "fine", "fix": None}]}
