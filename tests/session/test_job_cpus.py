"""The CPUs of a captured job, from the files of /proc."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from gputop.core.captured_samples import JobCpus
from gputop.profiler.recording import Progress
from gputop.session import cpu_watch as job_cpus
from gputop.session.cpu_watch import JobCpusWatch

PID = 4242


def job(root: Path, ticks: int, busy: tuple[int, ...]) -> None:
    """``ticks`` of the job and of each core so far."""
    for folder in (f"proc/{PID}", "proc/self", "cg/a"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / f"proc/{PID}/stat").write_text(f"{PID} (py) R 1 1 1 0 0 0 0 0 0 0 {ticks} 0 0 0 20 0 9 0 5 0 7 0 0 0\n")
    (root / f"proc/{PID}/cgroup").write_text("0::/a\n")
    (root / "proc/self/cgroup").write_text("0::/\n")
    (root / "proc/self/mountinfo").write_text("30 20 0:26 / /cg rw - cgroup2 cgroup2 rw\n")
    (root / "cg/a/cpu.max").write_text("150000 100000\n")
    cores = "".join(f"cpu{n} {b} 0 0 0 0 0 0 0\n" for n, b in enumerate(busy))
    (root / "proc/stat").write_text(f"cpu {sum(busy)} 0 0 0 0 0 0 0\n{cores}")


def test_what_a_job_used_and_what_others_did_while_it_was_recorded(tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    now_s = 100.0
    monkeypatch.setattr(job_cpus.time, "monotonic", lambda: now_s)
    reported: list[Progress] = []
    job(tmp_path, 0, (0, 0, 0))
    watch = JobCpusWatch([("a:1", PID), ("b:1", None)], reported.append, tmp_path)
    tick = os.sysconf("SC_CLK_TCK")
    for phase, seconds, used, cores in (("probing", 1, 9, (9, 9, 9)), ("recording", 2, 10, (10, 10, 10)),
                                        ("recording", 4, 12, (12.5, 11, 12)), ("receiving", 9, 90, (90, 90, 90))):
        now_s = 100.0 + seconds
        job(tmp_path, round(used * tick), tuple(round(core * tick) for core in cores))
        watch(Progress(phase, seconds))  # type: ignore[arg-type]
    found = watch.cpus("a:1")
    assert found == JobCpus(2.0, 1.5, used=1.0, others=0.75), "of two seconds, on the two CPUs it may run on"
    assert found.limit == 1.5 and found.free == 1.25 and watch.cpus("b:1") is None and len(reported) == 4
    now_s = 112.0
    job(tmp_path, round(13 * tick), tuple(round(core * tick) for core in (14, 15, 15)))
    watch(Progress("overview", 3.0))
    found = watch.cpus("a:1")
    assert found is not None and (found.used, found.others) == (0.3, pytest.approx(0.6)), "of both grains"


def test_how_many_of_its_threads_waited_for_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One waits half of the time, one began meanwhile and waits a quarter, one ended; both CPUs are one core."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    now_s = 100.0
    monkeypatch.setattr(job_cpus.time, "monotonic", lambda: now_s)
    tick = os.sysconf("SC_CLK_TCK")

    def tasks(**waited_s: float) -> None:
        (tmp_path / f"proc/{PID}/schedstat").write_text(f"{round(waited_s.get('main', 0.0) / 4 * 1e9)} 0 5\n")
        shutil.rmtree(tmp_path / f"proc/{PID}/task", ignore_errors=True)
        for thread, seconds in waited_s.items():
            folder = tmp_path / f"proc/{PID}/task/{thread}"
            folder.mkdir(parents=True)
            (folder / "schedstat").write_text(f"77 {round(seconds * 1e9)} 5\n")

    job(tmp_path, 0, (0, 0))
    tasks(main=3.0, gone=9.0)
    watch = JobCpusWatch([("a:1", PID)], lambda _: None, tmp_path)
    watch(Progress("recording", 0.0))
    now_s = 104.0
    job(tmp_path, 2 * tick, (4 * tick, 4 * tick))
    tasks(main=5.0, new=1.0)
    watch(Progress("recording", 4.0))
    found = watch.cpus("a:1")
    assert found is not None and found.waited == pytest.approx(0.75)
    assert found.used == 0.5 and found.stretch == pytest.approx(2.5)
    assert found.threads == 2 and found.main == pytest.approx(0.125) and found.cores is None
    assert found.asleep == pytest.approx(0.5 * 0.75)
    (tmp_path / f"proc/{PID}/task/new/comm").write_text("grpcpp_sync_ser\n")
    profiled = watch.cpus("a:1")
    assert profiled is not None and (profiled.waited, profiled.threads, profiled.asleep) == pytest.approx((0.5, 1, 0.5))
    for cpu in (0, 1):
        (folder := tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology").mkdir(parents=True)
        (folder / "thread_siblings_list").write_text("0-1\n")
    assert (found := watch.cpus("a:1")) is not None and found.cores == 1
    tasks()
    now_s = 105.0
    watch(Progress("recording", 5.0))
    found = watch.cpus("a:1")
    assert found is not None and found.waited is None is found.stretch


def test_of_a_process_that_cannot_be_seen_nothing_is_known(tmp_path: Path) -> None:
    watch = JobCpusWatch([("a:1", 2**22 + 1)], lambda _: None, tmp_path)
    watch(Progress("recording", 0.0))
    assert watch.cpus("a:1") is None


@pytest.mark.parametrize(("cpus", "free"), [
    (JobCpus(8), 8), (JobCpus(8, used=1.0, others=6.5), 1.5), (JobCpus(2, used=1.8, others=1.0), 1.8),
    (JobCpus(64, 2.0, 1.0, 4.0), 2.0), (JobCpus(2, 0.5, 0.2, 2.0), 0.5),
])
def test_the_cpus_that_are_left_for_a_job(cpus: JobCpus, free: float) -> None:
    assert cpus.free == free
