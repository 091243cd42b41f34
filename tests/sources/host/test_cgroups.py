"""Made-up control groups of both versions: limits, what is used, throttling; what cannot be seen says why."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gputop.core.metrics import CGROUP_METRICS
from gputop.core.samples import NO_LIMIT, CgroupSample
from gputop.sources.host import cgroups as cg
from gputop.sources.host.cgroups import Cgroups
from tests.sources.host.proc_tree import Ticking

V2 = "30 20 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "30 20 0:26 {} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
V1_MEMORY = "31 20 0:27 {} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
GiB = 1 << 30


class Tree:
    """A machine of 64 cores whose groups are of the test's choice."""

    def __init__(self, root: Path, mountinfo: str = V2) -> None:
        self.root, self.ticking = root, Ticking()
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/mountinfo").write_text(mountinfo)
        (root / "sys/fs/cgroup").mkdir(parents=True)
        self.cgroups = Cgroups(self.ticking, root, online=lambda: 64)

    def write(self, files: dict[str, str]) -> None:
        for name, content in files.items():
            path = self.root / "sys/fs/cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content + "\n")

    def own(self, cgroup: str) -> CgroupSample:
        (self.root / "proc/self/cgroup").write_text(cgroup)
        found = self.cgroups.own()
        assert found is not None
        return found

    def later(self, cgroup: str, files: dict[str, str], seconds: float = 2.0) -> CgroupSample:
        """What another process's group shows after that, its counters then being those of ``files``."""
        self.cgroups.read(cgroup.encode())
        self.ticking.now_s += seconds
        self.write(files)
        return self.cgroups.read(cgroup.encode())


@pytest.mark.parametrize(("mountinfo", "cgroup", "files", "cores"), [
    (V2, "0::/\n", {"cpu.max": "800000 100000"}, 8.0),  # in a container with a cgroup namespace
    (V2, "0::/a/b\n", {"cpu.max": "max 100000", "a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 1.5),
    (V2, "0::/a/b\n", {"a/cpu.max": "400000 100000", "a/b/cpu.max": "200000 100000"}, 2.0),
    (V2, "0::/a\n", {"a/cpu.max": "max 100000"}, None),
    (V2, "0::/../other\n", {"cpu.max": "300000 100000"}, 3.0),
    (V2, "0::/a\n", {"a/cpu.max": "garbage"}, None),
    (V2, "0::/a\n", {"a/cpu.max": "100 0"}, None),
    (V2, "", {"cpu.max": "300000 100000"}, None),
    (V2, "0::/a/b\n", {"a/cpuset.cpus.effective": "0-7,16-23", "a/b/cpu.max": "max 100000"}, 16.0),
    (V2, "0::/a\n", {"a/cpuset.cpus.effective": "0-63", "a/cpu.max": "max 100000"}, None),  # all there are
    (V2, "0::/a\n", {"a/cpuset.cpus.effective": "3", "a/cpu.max": "400000 100000"}, 1.0),
    (V1.format("/"), "4:cpu,cpuacct:/a\n1:cpuset:/x\n",
     {"cpu,cpuacct/a/cpu.cfs_quota_us": "250000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"}, 2.5),
    (V1.format("/"), "4:cpu,cpuacct:/a\n",
     {"cpu,cpuacct/a/cpu.cfs_quota_us": "-1", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"}, None),
    # Without a cgroup namespace the path is the host's, and the container's end of it is what is mounted.
    (V1.format("/docker/x"), "4:cpu,cpuacct:/docker/x\n",
     {"cpu,cpuacct/cpu.cfs_quota_us": "600000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 6.0),
    ("too short\n", "0::/\n", {"cpu.max": "300000 100000"}, None),
])
def test_the_cores_granted_to_gputop(tmp_path: Path, mountinfo: str, cgroup: str, files: dict[str, str],
                                     cores: float | None) -> None:
    tree = Tree(tmp_path, mountinfo)
    tree.write(files)
    assert tree.own(cgroup)["cpu_limit_cores"].value == cores


def test_without_proc_nothing_is_known(tmp_path: Path) -> None:
    assert Cgroups(Ticking(), tmp_path).own() is None


def test_a_job_that_is_throttled_and_near_its_memory_limit(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    job = "slurm/job_7"
    tree.write({
        f"{job}/cpu.max": "400000 100000", f"{job}/cpu.stat": "usage_usec 1000000\nnr_periods 100\nnr_throttled 10",
        f"{job}/memory.max": str(64 * GiB), f"{job}/memory.high": "max", f"{job}/memory.current": str(62 * GiB),
        f"{job}/memory.stat": f"anon 5\ninactive_file {2 * GiB}", f"{job}/memory.events": "low 0\noom 1\noom_kill 3",
        f"{job}/step_0/cpu.max": "max 100000", f"{job}/step_0/cpu.stat": "usage_usec 500000",
        f"{job}/step_0/memory.max": "max", f"{job}/step_0/memory.current": str(GiB)})
    cgroup = f"0::/{job}/step_0\n"
    first = tree.cgroups.read(cgroup.encode())
    assert first["cpu_used_cores"].reason == first["cpu_throttled_ratio"].reason == cg.FIRST
    group = tree.later(cgroup, {f"{job}/cpu.stat": "usage_usec 8600000\nnr_periods 120\nnr_throttled 25"})
    assert group.name == "slurm 7"
    assert {metric: r.value for metric, r in group.readings.items()} == {
        "cpu_limit_cores": 4.0, "cpu_used_cores": pytest.approx(3.8),  # of the whole job: the limit is its own
        "cpu_throttled_ratio": 0.75, "memory_limit_bytes": 64 * GiB, "memory_used_bytes": 60 * GiB, "oom_kills": 3}
    assert tree.cgroups.read(cgroup.encode()) is group, "between the periods the last look stands"
    idle = tree.later(cgroup, {})
    assert idle["cpu_throttled_ratio"].value == 0.0, "no period has passed"


def test_version_1_says_the_same_in_other_files(tmp_path: Path) -> None:
    tree = Tree(tmp_path, V1.format("/") + V1_MEMORY.format("/"))
    cpu, memory = "cpu,cpuacct/job", "memory/job"
    tree.write({
        f"{cpu}/cpu.cfs_quota_us": "200000", f"{cpu}/cpu.cfs_period_us": "100000", f"{cpu}/cpuacct.usage": "5000000000",
        f"{cpu}/cpu.stat": "nr_periods 50\nnr_throttled 5\nthrottled_time 1000",
        f"{memory}/memory.limit_in_bytes": str(8 * GiB), f"{memory}/memory.usage_in_bytes": str(4 * GiB),
        "memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": str(90 * GiB),
        f"{memory}/memory.stat": f"inactive_file 0\ntotal_inactive_file {GiB}",
        f"{memory}/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0"})
    group = tree.later("4:cpu,cpuacct:/job\n3:memory:/job\n", {
        f"{cpu}/cpuacct.usage": "8000000000", f"{cpu}/cpu.stat": "nr_periods 70\nnr_throttled 10\nthrottled_time 2000"})
    assert {metric: r.value for metric, r in group.readings.items()} == {
        "cpu_limit_cores": 2.0, "cpu_used_cores": pytest.approx(1.5), "cpu_throttled_ratio": 0.25,
        "memory_limit_bytes": 8 * GiB, "memory_used_bytes": 3 * GiB, "oom_kills": 0}


def test_max_is_no_limit_and_is_said(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.write({"a/cpu.max": "max 100000", "a/cpu.stat": "usage_usec 7", "a/memory.max": "max",
                "a/memory.current": "1000", "a/memory.stat": "anon 1"})
    group = tree.later("0::/a\n", {})
    assert group["cpu_limit_cores"].reason == group["memory_limit_bytes"].reason == NO_LIMIT
    assert group["cpu_throttled_ratio"].reason == cg.NO_QUOTA
    assert group["memory_used_bytes"].value == 1000 and group["memory_used_bytes"].coarse, "with the page cache"
    assert group["oom_kills"].value is None and group.name == "/a"


def test_a_limit_that_comes_makes_no_rate_of_two_groups_counters(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.write({"job/cpu.max": "max 100000", "job/cpu.stat": "usage_usec 900000000",
                "job/task/cpu.max": "max 100000", "job/task/cpu.stat": "usage_usec 1000000"})
    assert tree.later("0::/job/task\n", {"job/task/cpu.stat": "usage_usec 2000000"})["cpu_used_cores"].value == 0.5
    group = tree.later("0::/job/task\n", {"job/cpu.max": "400000 100000"}, cg.LIMITS_PERIOD_S)
    assert group["cpu_limit_cores"].value == 4.0 and group["cpu_used_cores"].reason == cg.FIRST
    group = tree.later("0::/job/task\n", {"job/cpu.stat": "usage_usec 906000000"})
    assert group["cpu_used_cores"].value == pytest.approx(3.0)


def test_of_several_memory_limits_the_tightest_counts(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.write({"pod/memory.max": "1000", "pod/memory.current": "950", "pod/memory.stat": "inactive_file 0",
                "pod/box/memory.max": "500", "pod/box/memory.current": "300", "pod/box/memory.high": "900"})
    group = tree.cgroups.read(b"0::/pod/box\n")
    assert (group["memory_used_bytes"].value, group["memory_limit_bytes"].value) == (950, 1000)
    tree.write({"pod/box/memory.high": "310"})
    tree.ticking.now_s += cg.LIMITS_PERIOD_S
    group = tree.cgroups.read(b"0::/pod/box\n")
    assert group["memory_limit_bytes"].value == 310 and group["memory_limit_bytes"].source == "memory.high"


@pytest.mark.parametrize(("mountinfo", "cgroup"), [
    (V2, "0::/../other\n"),  # seen from another container
    (V2, "0::/gone\n"),
    (V2, "nonsense\n"),
    (V1.format("/docker/x") + V1_MEMORY.format("/docker/x"), "4:cpu,cpuacct:/docker/xy\n3:memory:/docker/xy\n"),
    ("", "0::/\n"),
])
def test_the_groups_of_others_are_never_taken_for_what_is_mounted_here(
        tmp_path: Path, mountinfo: str, cgroup: str) -> None:
    tree = Tree(tmp_path, mountinfo)
    tree.write({"cpu.max": "100000 100000", "cpu,cpuacct/cpuacct.usage": "1", "memory/memory.usage_in_bytes": "1"})
    group = tree.cgroups.read(cgroup.encode())
    assert group.readings.keys() == CGROUP_METRICS.keys()
    assert {r.reason for r in group.readings.values()} == {cg.UNSEEN}


def test_a_group_that_vanishes_and_comes_back(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.write({"a/cpu.max": "100000 100000", "a/cpu.stat": "usage_usec 1000000\nnr_periods 9\nnr_throttled 9"})
    tree.cgroups.read(b"0::/a\n")
    (tree.root / "sys/fs/cgroup/a/cpu.stat").write_text("usage_usec x\n")
    tree.ticking.now_s += 2.0
    assert "could not read" in (tree.cgroups.read(b"0::/a\n")["cpu_used_cores"].reason or "")
    # Made anew, its counters begin again: no rate goes below zero.
    group = tree.later("0::/a\n", {"a/cpu.stat": "usage_usec 10\nnr_periods 1\nnr_throttled 0"})
    assert group["cpu_used_cores"].reason == cg.FIRST and group["cpu_throttled_ratio"].value is None
    assert tree.later("0::/a\n", {"a/cpu.stat": "usage_usec 10\nnr_periods 1\nnr_throttled 0"})[
        "cpu_used_cores"].value == 0.0


def test_groups_that_nobody_asks_for_are_forgotten(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    for number in range(20):
        tree.cgroups.read(f"0::/job_{number}\n".encode())
        tree.ticking.now_s += 30.0
    assert len(tree.cgroups._known) <= 4


def test_this_machine() -> None:
    own = Cgroups(time.monotonic).own()
    assert own is not None and own.name
    for reading in own.readings.values():
        assert reading.value is None or reading.value >= 0
