"""Whether a job has what a capture makes it take: a table of facts, and the reading of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from gputop.core import job_limits
from gputop.core.errors import GputopError
from gputop.core.job_limits import LimitFacts, read_limits
from gputop.profiler.capture import requirements as limits
from gputop.profiler.capture.requirements import Need, check_limits, need_of, shortage
from tests.processes import once_ready

MIB = 1 << 20
NEED = Need(6, 64 * MIB, 16)
ALL = 64 * MIB + 6 * 8 * MIB  # with the stacks


@pytest.mark.parametrize(("facts", "what", "left", "limit"), [
    (LimitFacts(), None, 0, ""),
    (LimitFacts(limits={"Max processes": 4096}, user="ana", user_threads=4090), None, 0, ""),
    (LimitFacts(limits={"Max processes": 4096}, user="ana", user_threads=4091), "threads", 5,
     "ulimit -u is 4,096, and user ana has 4,091 threads"),
    (LimitFacts(limits={"Max processes": 100}, user="ana", user_threads=400), "threads", -300, "ulimit -u is 100"),
    (LimitFacts(limits={"Max processes": 10}, user_threads=None), None, 0, ""),  # root: that limit does not hold
    (LimitFacts(groups=(("/g", 500, 100), ("/g/slurm/step_0", 64, 60))), "threads", 4,
     "pids.max of /g/slurm/step_0 is 64, and the group holds 60 threads"),
    (LimitFacts(groups=(("/g", 106, 100),)), None, 0, ""),
    (LimitFacts(limits={"Max address space": 1000 * MIB}, size_bytes=1000 * MIB - ALL + 1),
     "address space (ulimit -v)", ALL - 1, "the limit is 1.0 GiB, and the job uses 888 MiB"),
    (LimitFacts(limits={"Max address space": 1000 * MIB}, size_bytes=1000 * MIB - ALL), None, 0, ""),
    (LimitFacts(limits={"Max address space": 1000 * MIB}, size_bytes=None), None, 0, ""),
    (LimitFacts(limits={"Max data size": 1000 * MIB}, data_bytes=990 * MIB), "data size (ulimit -d)", 10 * MIB, ""),
    # Stacks of a megabyte leave more; those without a limit count as usual.
    (LimitFacts(limits={"Max address space": 80 * MIB, "Max stack size": MIB}, size_bytes=10 * MIB), None, 0, ""),
    (LimitFacts(limits={"Max address space": 80 * MIB, "Max stack size": 1 << 40}, size_bytes=10 * MIB),
     "address space (ulimit -v)", 70 * MIB, ""),
    (LimitFacts(limits={"Max open files": 1024}, files=1010), "file descriptors", 14, "ulimit -n is 1,024"),
    (LimitFacts(limits={"Max open files": 1024}, files=None), None, 0, ""),
    (LimitFacts(limits={"Max file size": MIB}, folder="/tmp"), "bytes in a file (ulimit -f)", MIB, ""),
    (LimitFacts(limits={"Max file size": MIB}), None, 0, ""),  # it writes none
    (LimitFacts(folder="/tmp", disk_bytes=0), "disk space in /tmp", 0, "the job writes its trace there"),
    (LimitFacts(folder="/tmp", disk_bytes=None), None, 0, ""),
])
def test_the_first_limit_that_leaves_too_little_is_named(facts, what, left, limit):
    short = shortage(facts, NEED, 7)
    assert (short.what, short.left) == (what, left) if short is not None else what is None
    assert short is None or (limit in short.limit and short.fix)


def test_jobs_that_are_recorded_at_once_share_what_a_user_a_group_and_a_disk_have():
    user = LimitFacts(limits={"Max processes": 100}, user="ana", user_threads=80)
    group, disk = LimitFacts(groups=(("/g", 100, 80),)), LimitFacts(folder="/tmp", disk_bytes=100 * MIB)
    own = LimitFacts(limits={"Max open files": 100}, files=80)
    for facts in (user, group, disk):
        assert shortage(facts, NEED, 7, 1) is None and shortage(facts, NEED, 7, 4) is not None
    assert shortage(own, NEED, 7, 4) is None


def test_what_is_needed_grows_with_the_cpus_as_far_as_grpc_does():
    assert [need_of("jax", cpus, 1).threads for cpus in (2, 16, 256)] == [14, 28, 28]
    assert need_of("pytorch", 2, 1) == need_of("pytorch", 256, 1)


def test_threads_take_arenas_as_long_as_there_are_fewer_than_eight_for_a_cpu():
    assert [need_of("tensorflow", 2, threads).bytes // MIB for threads in (7, 15, 17)] == [8 * 64 + 32, 64 + 32, 32]
    assert need_of("pytorch", 64, 10).bytes == 3 * 64 * MIB + 16 * MIB


def _process(proc: Path, pid: int, uid: int = 1000, threads: int = 1, capabilities: int = 0,
             namespace: str = job_limits.FIRST_USER_NAMESPACE) -> None:
    folder = proc / str(pid)
    (folder / "ns").mkdir(parents=True)
    (folder / "ns/user").symlink_to(namespace)
    (folder / "fd").mkdir()
    (folder / "status").write_text(f"Name:\tx\nUid:\t{uid}\t0\t0\t0\nVmSize:\t 2048 kB\nVmData:\t 1024 kB\n"
                                   f"Threads:\t{threads}\nCapEff:\t{capabilities:016x}\n")
    (folder / "limits").write_text(
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        "Max processes             100                  200                  processes \n"
        "Max address space         unlimited            unlimited            bytes     \n"
        "Max data size             2097152              unlimited            bytes     \n")
    (folder / "cgroup").write_text("8:pids:/slurm/job\n0::/slurm/job\n")


@pytest.mark.parametrize(("uid", "capabilities", "namespace", "counted"), [
    (1000, 0, job_limits.FIRST_USER_NAMESPACE, 12),
    (1000, 1 << 24, job_limits.FIRST_USER_NAMESPACE, None),  # CAP_SYS_RESOURCE
    (1000, 1 << 21, job_limits.FIRST_USER_NAMESPACE, None),  # CAP_SYS_ADMIN
    (1000, 1 << 19, job_limits.FIRST_USER_NAMESPACE, 12),  # CAP_SYS_PTRACE
    (0, 0, job_limits.FIRST_USER_NAMESPACE, None),
    (0, (1 << 40) - 1, "user:[4026532001]", 12),  # root of a container of its own users
])
def test_threads_of_the_user_count_unless_the_kernel_exempts_the_job(tmp_path, uid, capabilities, namespace, counted):
    _process(tmp_path, 7, uid, 2, capabilities, namespace)
    _process(tmp_path, 8, uid, 10)
    _process(tmp_path, 9, uid + 1, 100)
    facts = read_limits(7, proc=tmp_path, root=tmp_path)
    assert facts.user_threads == counted
    assert facts.limits == {"Max processes": 100, "Max data size": 2 * MIB}
    assert (facts.size_bytes, facts.data_bytes, facts.files) == (2 * MIB, MIB, 0)
    assert facts.memory_left_bytes == MIB


def test_tasks_are_limited_by_each_control_group_up_to_the_top_of_both_versions(tmp_path):
    _process(tmp_path / "proc", 7)
    root = tmp_path / "cgroup"
    for group, most, now in (("pids/slurm", "500", 40), ("pids/slurm/job", "max", 39), ("slurm/job", "64", 39)):
        (root / group).mkdir(parents=True, exist_ok=True)
        (root / group / "pids.max").write_text(f"{most}\n")
        (root / group / "pids.current").write_text(f"{now}\n")
    assert set(read_limits(7, proc=tmp_path / "proc", root=root).groups) == {
        (str(root / "pids/slurm"), 500, 40), (str(root / "slurm/job"), 64, 39)}


def test_what_cannot_be_read_is_no_limit(tmp_path):
    assert read_limits(7, proc=tmp_path) == LimitFacts()
    _process(tmp_path, 7)
    for name in ("limits", "status", "cgroup"):
        (tmp_path / "7" / name).write_bytes(b"\xff: 99999999999999999999999999 kB\nMax\n")
    assert read_limits(7, proc=tmp_path) == LimitFacts()


def test_a_process_at_its_limit_is_refused_with_number_and_way_out_and_not_touched(monkeypatch):
    code = ("import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (20, 4096)); "
            "print('ready', flush=True); sys.stdin.read()")
    monkeypatch.setattr(limits, "loaded_frameworks", lambda maps: frozenset({"jax"}))
    with once_ready(sys.executable, "-c", code) as process, pytest.raises(
            GputopError, match=r"JAX may need 24 file descriptors, .* has \d+ left") as caught:
        check_limits(process.pid)
    assert "gputop did not touch it" in caught.value.message
    assert f"prlimit --pid {process.pid} --nofile=51:" in caught.value.fix


def test_a_process_that_has_no_framework_or_has_ended_is_not_judged():
    check_limits(os.getpid())
    check_limits(None)
    check_limits(2**22 + 1)
