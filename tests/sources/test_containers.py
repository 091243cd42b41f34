"""Which container a cgroup's path names, and how much CPU the control groups grant."""

from __future__ import annotations

from pathlib import Path

import pytest

from gputop.sources.containers import container_of, cpu_quota_cores

ID = "0123456789abcdef" * 4
POD = "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1b2c_3d.slice"


@pytest.mark.parametrize(("path", "name"), [
    (f"0::/system.slice/docker-{ID}.scope", "docker 0123456789ab"),
    (f"12:cpu,cpuacct:/docker/{ID}", "docker 0123456789ab"),
    (f"0::/system.slice/docker-{ID}.scope/init", "docker 0123456789ab"),
    (f"0::/{POD}/cri-containerd-{ID}.scope", "containerd 0123456789ab"),
    (f"0::/{POD}:cri-containerd:{ID}", "containerd 0123456789ab"),
    (f"0::/{POD}/crio-{ID}.scope", "cri-o 0123456789ab"),
    (f"4:memory:/kubepods/burstable/pod1b2c-3d/{ID}", "kubernetes 0123456789ab"),
    (f"0::/machine.slice/libpod-{ID}.scope/container", "podman 0123456789ab"),
    (f"0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope", "podman 0123456789ab"),
    (f"0::/system.slice/nerdctl-{ID}.scope", "containerd 0123456789ab"),
    (f"0::/default/{ID}", "container 0123456789ab"),
    ("0::/lxc.payload.train/init.scope", "lxc train"),
    ("3:devices:/lxc/train", "lxc train"),
    ("0::/machine.slice/systemd-nspawn@train.service/payload", "nspawn train"),
    ("0::/machine.slice/machine-my\\x2dbox.scope", "nspawn my-box"),
    ("0::/system.slice/slurmstepd.scope/job_1234/step_0/user/task_0", "slurm 1234"),
    ("7:freezer:/slurm/uid_1000/job_1234/step_batch", "slurm 1234"),
    ("7:freezer:/slurm_node7/uid_1000/job_1234/step_0/task_0", "slurm 1234"),
    (f"0::/system.slice/slurmstepd.scope/job_1234/step_0/docker-{ID}.scope", "docker 0123456789ab"),  # innermost
    (f"0::/../docker-{ID}.scope", "docker 0123456789ab"),  # a neighbour, seen from within a cgroup namespace
    ("0::/machine.slice/machine-\\x1b.scope", "nspawn \ufffd"),
    ("0::/", None),  # gputop itself in a container with a cgroup namespace
    ("0::/..", None),
    ("0::/user.slice/user-1000.slice/session-3.scope", None),
    (f"0::/machine.slice/libpod-conmon-{ID}.scope", None),  # the monitor outside of the container
    (f"0::/{POD}/crio-conmon-{ID}.scope", None),
    ("0::/machine.slice/machine-qemu\\x2d1\\x2dvm.scope", None),  # a virtual machine
    ("0::/builds/job_1234/step", None),  # no Slurm
    ("0::/system.slice/docker-0123.scope", None),
    ("", None),
    ("nonsense", None),
])
def test_container(path: str, name: str | None) -> None:
    assert container_of(f"{path}\n".encode()) == name


def test_any_of_the_hierarchies_may_name_it() -> None:
    lines = f"9:name=systemd:/\n4:memory:/docker/{ID}\n0::/\n"
    assert container_of(lines.encode()) == "docker 0123456789ab"
    assert container_of(b"\xff\xfe:\n0::/\xff/docker-" + ID.encode() + b".scope\n") == "docker 0123456789ab"


def groups(root: Path, mountinfo: str, cgroup: str, files: dict[str, str]) -> float | None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text(mountinfo)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, content in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    return cpu_quota_cores(root)


V2 = "30 20 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "30 20 0:26 {} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"


@pytest.mark.parametrize(("mountinfo", "cgroup", "files", "cores"), [
    (V2, "0::/\n", {"cpu.max": "800000 100000"}, 8.0),  # in a container with a cgroup namespace
    (V2, "0::/a/b\n", {"cpu.max": "max 100000", "a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 1.5),
    (V2, "0::/a/b\n", {"a/cpu.max": "400000 100000", "a/b/cpu.max": "200000 100000"}, 2.0),
    (V2, "0::/a\n", {"a/cpu.max": "max 100000"}, None),
    (V2, "0::/../other\n", {"cpu.max": "300000 100000"}, 3.0),
    (V2, "0::/a\n", {"a/cpu.max": "garbage"}, None),
    (V2, "0::/a\n", {"a/cpu.max": "100 0"}, None),
    (V2, "", {"cpu.max": "300000 100000"}, None),
    (V1.format("/"), "4:cpu,cpuacct:/a\n1:cpuset:/x\n",
     {"cpu,cpuacct/a/cpu.cfs_quota_us": "250000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"}, 2.5),
    (V1.format("/"), "4:cpu,cpuacct:/a\n",
     {"cpu,cpuacct/a/cpu.cfs_quota_us": "-1", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"}, None),
    # Without a cgroup namespace the path is the host's, and the container's end of it is what is mounted.
    (V1.format("/docker/x"), "4:cpu,cpuacct:/docker/x\n",
     {"cpu,cpuacct/cpu.cfs_quota_us": "600000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 6.0),
    ("too short\n", "0::/\n", {"cpu.max": "300000 100000"}, None),
])
def test_cpu_quota(tmp_path: Path, mountinfo: str, cgroup: str, files: dict[str, str], cores: float | None) -> None:
    assert groups(tmp_path, mountinfo, cgroup, files) == cores


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert cpu_quota_cores(tmp_path) is None
