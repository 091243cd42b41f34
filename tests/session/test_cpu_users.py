"""Who keeps the CPUs busy while a job is recorded, from the files of /proc."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from gputop.core.captured_samples import CpuUser
from gputop.profiler.recording import Progress
from gputop.session import cpu_watch as job_cpus
from gputop.session.cpu_watch import CpuUsers, JobCpusWatch

TICK = os.sysconf("SC_CLK_TCK")
JOB, CHILD, GRANDCHILD, RANK, OTHER, SIBLING = 100, 101, 102, 110, 200, 111


def process(root: Path, pid: int, parent: int, cpu_s: float, name: str = "python", command: str = "") -> None:
    folder = root / "proc" / str(pid)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stat").write_text(
        f"{pid} ({name}) R {parent} 1 1 0 0 0 0 0 0 0 {round(cpu_s * TICK)} 0 0 0 20 0 9 0 5 0 7 0 0 0\n")
    (folder / "schedstat").write_text(f"{round(cpu_s * 1e9)} {round(cpu_s * 0.5e9)} 9\n")
    (folder / "cmdline").write_bytes((command or f"{name} {pid}").replace(" ", "\0").encode())


def node(root: Path, at_s: float) -> None:
    """The job at 0.5 CPUs, its child and grandchild at 0.2 each, another rank at 0.4, another program at 0.3."""
    process(root, JOB, 50, 0.5 * at_s, command="python train.py --rank 0")
    process(root, CHILD, JOB, 0.2 * at_s, "worker")
    process(root, GRANDCHILD, CHILD, 0.2 * at_s, "worker")
    process(root, RANK, 50, 0.4 * at_s, command="python train.py --rank 1")
    process(root, SIBLING, 50, 0.1 * at_s, command="python other.py")
    process(root, OTHER, 60, 0.3 * at_s, "mypy\x1b")
    process(root, os.getpid(), 60, 0.25 * at_s, "gputop")


def test_children_ranks_gputop_and_others_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(job_cpus.time, "monotonic", lambda: now_s)
    node(tmp_path, 0.0)
    users = CpuUsers(tmp_path, [JOB])
    users.sample(begin=True)
    assert users.of(JOB, [JOB]) is None, "no time has passed"
    now_s = 4.0
    node(tmp_path, 4.0)
    users.sample(begin=False)
    found = users.of(JOB, [JOB])
    assert found[:3] == pytest.approx((0.4, 0.4, 0.25), abs=0.01)
    assert found.children_waited == pytest.approx(0.1), "half of what each ran"
    assert [(user.pid, user.child) for user in found.busiest] == [
        (OTHER, False), (CHILD, True), (GRANDCHILD, True), (SIBLING, False)]
    assert found.busiest[0].cpus == pytest.approx(0.3, abs=0.01) and "\x1b" not in found.busiest[0].name
    assert users.of(JOB, [JOB, OTHER]).ranks == pytest.approx(0.7, abs=0.01), "recorded together"  # type: ignore[union-attr]
    assert users.of(999, []) is None


def test_workers_that_start_and_end_while_recording_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(job_cpus.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1} if pid == GRANDCHILD else {0})
    process(tmp_path, JOB, 1, 0.0)
    users = CpuUsers(tmp_path)
    users.sample(begin=True)
    now_s = 2.0
    process(tmp_path, CHILD, JOB, 1.5, "worker")
    process(tmp_path, GRANDCHILD, JOB, 1.0, "may use other CPUs")
    users.sample(begin=False)
    now_s = 4.0
    shutil.rmtree(tmp_path / "proc" / str(CHILD))
    users.sample(begin=False)
    assert users.of(JOB, [JOB]) == (0.375, 0.0, 0.0, (CpuUser(CHILD, "worker", 0.375, True),), None)


def test_a_pid_that_was_given_again_is_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(job_cpus.time, "monotonic", lambda: now_s)
    process(tmp_path, JOB, 1, 0.0)
    process(tmp_path, OTHER, 1, 0.0)
    users = CpuUsers(tmp_path)
    users.sample(begin=True)
    now_s = 2.0
    process(tmp_path, OTHER, 1, 5.0)
    stat = tmp_path / "proc" / str(OTHER) / "stat"
    stat.write_text(stat.read_text().replace(" 5 0 7 ", " 99 0 7 "))
    users.sample(begin=False)
    assert users.of(JOB, [JOB]) == (0.0, 0.0, 0.0, (), None)


@pytest.mark.parametrize("cores", [1, 2])
def test_the_main_threads_wait_and_the_age_of_the_job_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                               cores: int) -> None:
    now_s = 100.0
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0})
    monkeypatch.setattr(job_cpus.time, "monotonic", lambda: now_s)

    def at(elapsed_s: float) -> None:
        node(tmp_path, elapsed_s)
        (tmp_path / "proc/self").mkdir(exist_ok=True)
        for of in ("self", str(JOB)):
            (tmp_path / f"proc/{of}/cgroup").write_text("0::/\n")
        (tmp_path / "proc/self/mountinfo").write_text("")
        (tmp_path / f"proc/{JOB}/schedstat").write_text(f"1 {round(elapsed_s * 0.3e9)} 9\n")
        (tmp_path / "proc/uptime").write_text(f"{300 + elapsed_s + 5 / TICK} 1\n")  # it began at tick 5
        (tmp_path / "proc/stat").write_text("".join(f"{cpu} {round(elapsed_s * TICK)} 0 0 0 0 0 0 0\n"
                                                    for cpu in ("cpu", "cpu0", "cpu1")[:cores + 1]))

    at(0.0)
    watch = JobCpusWatch([("a:1", JOB)], lambda _: None, tmp_path)
    for elapsed_s in (0.0, 4.0):
        now_s = 100.0 + elapsed_s
        at(elapsed_s)
        watch(Progress("recording", elapsed_s))
    found = watch.cpus("a:1")
    assert found is not None and found.held_up == pytest.approx(0.3) and found.age_s == pytest.approx(300)
    assert found.used == pytest.approx(0.5) and found.others == pytest.approx(0.5)
    assert found.children == pytest.approx(0.4, abs=0.01), "they run on the job's CPUs"
    if cores == 1:
        assert found.busiest[0].pid == OTHER and found.ranks == pytest.approx(0.4, abs=0.01)
    else:  # the node has a CPU that the job may not use, and any other program may run there
        assert found.busiest[0].pid == CHILD and found.ranks is None
