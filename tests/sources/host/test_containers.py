"""Which container a cgroup's path names."""

from __future__ import annotations

import pytest

from gputop.sources.host.containers import container_of

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
    (f"0::/../docker-{ID}.scope", "docker 0123456789ab"),  # a neighbor, seen from within a cgroup namespace
    ("0::/machine.slice/machine-\\x1b.scope", "nspawn \ufffd"),
    ("0::/", None),  # gputop itself in a container with a cgroup namespace
    ("0::/..", None),
    ("0::/user.slice/user-1000.slice/session-3.scope", None),
    (f"0::/machine.slice/libpod-conmon-{ID}.scope", None),  # the monitor outside of the container
    (f"0::/{POD}/crio-conmon-{ID}.scope", None),
    ("0::/machine.slice/machine-qemu\\x2d1\\x2dvm.scope", None),  # a virtual machine
    ("0::/system.slice/node7_slurmstepd.scope/job_1234/step_0", "slurm 1234"),
    ("0::/../../system.slice/slurmstepd.scope/job_1234/step_0", "slurm 1234"),
    (f"0::/{POD}/cri-containerd-{ID}.scope/system.slice/slurmstepd.scope/job_1234/step_0", "slurm 1234"),
    ("7:freezer:/slurm/job_1234", "slurm 1234"),
    ("0::/builds/job_1234/step", None),  # no Slurm
    # What a user can make below a group that systemd has delegated.
    ("0::/user.slice/user-1000.slice/user@1000.service/slurmstepd.scope/job_1234", None),
    ("0::/user.slice/user-1000.slice/user@1000.service/system.slice/slurmstepd.scope/job_1234/step_0", None),
    ("0::/user.slice/user-1000.slice/user@1000.service/kubepods/system.slice/slurmstepd.scope/job_1234", None),
    ("1:name=systemd:/user.slice/user-1000.slice/slurm/uid_0/job_1234", None),
    ("0::/system.slice/of-bob.service/slurmstepd.scope/job_1234", None),
    ("0::/system.slice/of-bob.service/slurm/uid_0/job_1234", None),
    ("0::/slurmy/uid_0/job_1234", None),
    ("0::/system.slice/docker-0123.scope", None),
    ("", None),
    ("nonsense", None),
])
def test_container(path: str, name: str | None) -> None:
    assert container_of(f"{path}\n".encode()) == name


def test_any_of_the_hierarchies_may_name_it() -> None:
    lines = f"9:name=systemd:/\n4:memory:/docker/{ID}\n0::/\n"
    assert container_of(lines.encode()) == "docker 0123456789ab"
    forged = f"0::/user.slice/x\u20289:a:/docker/{ID}\x8510:b:/docker/{ID}-\n"  # one line of the kernel's
    assert container_of(forged.encode()) is None
    assert container_of(b"\xff\xfe:\n0::/\xff/docker-" + ID.encode() + b".scope\n") == "docker 0123456789ab"
