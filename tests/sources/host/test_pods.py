"""Which pod and container a control group names, and by which names the kubelet knows them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gputop.core.files import Folder
from gputop.core.samples import PodContainer
from gputop.sources.host import containers
from gputop.sources.host.containers import NO_FOLDER, NO_LINK, NOT_TRUSTED, RETRY_S, PodContainers, pod_container
from gputop.sources.host.gpu_processes import GpuProcessTable
from tests.sources.host.proc_tree import ProcTree, Ticking, on_gpus

ID, OTHER = "0123456789abcdef" * 4, "fedcba9876543210" * 4
UID, STATIC = "1b2c3d4e-5f60-4718-92a3-b4c5d6e7f809", "0f1e2d3c4b5a69788796a5b4c3d2e1f0"
SLICE = f"kubepods-burstable-pod{UID.replace('-', '_')}.slice"
SYSTEMD = f"/kubepods.slice/kubepods-burstable.slice/{SLICE}"
CGROUPFS = f"/kubepods/burstable/pod{UID}"


def v2(path: str) -> bytes:
    return f"0::{path}\n".encode()


def v1(path: str) -> bytes:
    return "".join(f"{n}:{name}:{path}\n" for n, name in ((12, "cpu,cpuacct"), (3, "memory"), (1, "name=systemd"))
                   ).encode() + b"0::/\n"


@pytest.mark.parametrize("version", [v1, v2])
@pytest.mark.parametrize(("path", "uid"), [
    # containerd
    (f"{SYSTEMD}/cri-containerd-{ID}.scope", UID),
    (f"{CGROUPFS}/{ID}", UID),
    (f"/system.slice/containerd.service/{SLICE}:cri-containerd:{ID}", UID),
    (f"/{SLICE}:cri-containerd:{ID}", UID),
    # CRI-O
    (f"{SYSTEMD}/crio-{ID}.scope", UID),
    (f"{SYSTEMD}/crio-{ID}.scope/container", UID),
    (f"{CGROUPFS}/crio-{ID}", UID),
    (f"/{SLICE}:crio:{ID}", UID),
    # Docker, by cri-dockerd
    (f"{SYSTEMD}/docker-{ID}.scope", UID),
    (f"/kubepods/besteffort/pod{UID}/{ID}", UID),
    # A guaranteed pod has no group of a class above it; a static pod has a hash in place of a UUID.
    (f"/kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice/cri-containerd-{ID}.scope", UID),
    (f"/kubepods/pod{STATIC}/{ID}", STATIC),
    # kind: the node is a container itself, and its kubelet has a root of its own.
    (f"/system.slice/docker-{OTHER}.scope/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/"
     f"kubelet-kubepods-besteffort-pod{UID.replace('-', '_')}.slice/cri-containerd-{ID}.scope", UID),
    (f"/docker/{OTHER}/kubelet/kubepods/burstable/pod{UID}/{ID}", UID),
    # From gputop's own pod, in a cgroup namespace.
    (f"/../../{SLICE}/cri-containerd-{ID}.scope", UID),
    (f"/../../../kubepods-besteffort.slice/kubepods-besteffort-pod{UID.replace('-', '_')}.slice/crio-{ID}.scope", UID),
    (f"/../../pod{UID}/{ID}", UID),
    (f"/../../../besteffort/pod{UID}/{ID}", UID),
    (f"/../..{SYSTEMD}/cri-containerd-{ID}.scope", UID),  # gputop in a container of Docker on the node
    (f"/../..{CGROUPFS}/{ID}", UID),
    # What a job makes below its group changes nothing.
    (f"{SYSTEMD}/cri-containerd-{ID}.scope/kubepods.slice/{SLICE}/crio-{OTHER}.scope", UID),
    (f"{CGROUPFS}/{ID}/{'x' * 255}/\x1b[2J", UID),
])
def test_the_group_names_pod_and_container(version: Callable[[str], bytes], path: str, uid: str) -> None:
    assert pod_container(version(path)) == PodContainer(uid, ID)


@pytest.mark.parametrize("path", [
    "/", "/..", "", f"/docker/{ID}", f"/system.slice/docker-{ID}.scope", "/system.slice/slurmstepd.scope/job_1",
    f"/../cri-containerd-{ID}.scope",  # gputop's own pod, whose UID is not shown
    f"{SYSTEMD}/crio-conmon-{ID}.scope",  # the monitor outside of the container
    SYSTEMD, f"{CGROUPFS}/{ID[:-1]}", f"{CGROUPFS}/{ID}0", f"{SYSTEMD}/cri-containerd-{ID.upper()}.scope",
    f"/kubepods/burstable/pod../{ID}", f"/kubepods/burstable/pod{UID}\x1b/{ID}",
    # What a user can make below a group that systemd has delegated.
    f"/user.slice/user-1000.slice/user@1000.service{SYSTEMD}/cri-containerd-{ID}.scope",
    f"/user.slice/user-1000.slice/user@1000.service/kubelet{CGROUPFS}/{ID}",
    f"/system.slice/of-bob.service{CGROUPFS}/{ID}",
    f"/../user@1000.service{SYSTEMD}/cri-containerd-{ID}.scope",
    f"/user.slice/x\u20289:a:{CGROUPFS}/{ID}", f"/user.slice/x\r9:a:{CGROUPFS}/{ID}",  # no lines of their own
    "/kubepods" + "/burstable" * 5000, "/.." * 20_000, "/kubepods/pod" + "0" * 10_000,
])
def test_everything_else_names_none(path: str) -> None:
    assert pod_container(v2(path)) is None
    assert pod_container(b"\xff\xfe\n" + v1(path)) is None


def test_without_a_pod_nothing_is_read_and_each_group_is_parsed_once(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed, opened = [], []
    monkeypatch.setattr(containers, "pod_container", lambda group: parsed.append(group) or pod_container(group))

    def counted(path: Path) -> Folder:
        opened.append(path)
        return Folder(path)

    monkeypatch.setattr(containers, "Folder", counted)
    ticking = Ticking()
    pods = PodContainers(ticking, tmp_path)
    for _ in range(50):
        assert pods.read(v2("/user.slice/user-1000.slice")) is None
        ticking.now_s += RETRY_S
    assert len(parsed) == 1 and opened == []
    links(tmp_path, f"llama-0_ml_train-{ID}.log")
    for _ in range(50):
        assert pods.read(v2(f"{CGROUPFS}/{ID}")) == NAMED
        ticking.now_s += RETRY_S
    assert len(parsed) == 2 and len(opened) == 1


def links(root: Path, *names: str) -> Path:
    folder = root / "var/log/containers"
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    for name in names:
        (folder / name).symlink_to("/var/log/pods/not-there")
    return folder


NAMED = PodContainer(UID, ID, "llama-0", "ml", "train")


def test_names_come_from_the_kubelets_links(tmp_path: Path) -> None:
    links(tmp_path, f"llama-0_ml_train-{ID}.log", f"web.1_default_side-car-{OTHER}.log")
    containers = PodContainers(Ticking(), tmp_path)
    assert containers.read(v2(f"{SYSTEMD}/cri-containerd-{ID}.scope")) == NAMED
    other = containers.read(v1(f"{CGROUPFS}/crio-{OTHER}"))
    assert other == PodContainer(UID, OTHER, "web.1", "default", "side-car")
    assert NAMED.label == "pod ml/llama-0, container train" and PodContainer(UID, ID).label == f"pod UID {UID}"


@pytest.mark.parametrize("name", [
    f"llama-0_ml_train-{ID}", f"llama-0_ml-{ID}.log", f"a_b_c_d-{ID}.log", f"LLAMA_ml_train-{ID}.log",
    f"llama\x1b[2J_ml_train-{ID}.log", f"llama-0_ml_tra in-{ID}.log", f"llama-0_ml_train-{ID[:40]}.log",
    f"llama-0_ml_train-{ID}.log\n", f"-_ml_train-{ID}.log", f"ｌlama_ml_train-{ID}.log", f"{'a' * 150}._x_y-{ID}.log",
])
def test_a_name_that_is_none_of_the_kubelets_is_not_believed(tmp_path: Path, name: str) -> None:
    links(tmp_path, name)
    assert PodContainers(Ticking(), tmp_path).read(v2(f"{CGROUPFS}/{ID}")) == PodContainer(UID, ID, reason=NO_LINK)


def test_bytes_that_are_no_text_and_two_names_of_one_container_name_nothing(tmp_path: Path) -> None:
    folder = links(tmp_path, f"a_ml_train-{ID}.log", f"b_ml_train-{ID}.log", f"c_ml_train-{OTHER}.log")
    (Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xfe_ml_train-" + ID.encode() + b".log"))).symlink_to("x")
    containers = PodContainers(Ticking(), tmp_path)
    assert containers.read(v2(f"{CGROUPFS}/{ID}")) == PodContainer(UID, ID, reason=NO_LINK)
    assert containers.read(v2(f"{CGROUPFS}/{OTHER}")) == PodContainer(UID, OTHER, "c", "ml", "train")


def test_a_link_is_listed_and_never_opened(tmp_path: Path) -> None:
    """A pipe behind the link would block whoever opens it."""
    folder = links(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (folder / f"llama-0_ml_train-{ID}.log").symlink_to(tmp_path / "pipe")
    assert PodContainers(Ticking(), tmp_path).read(v2(f"{CGROUPFS}/{ID}")) == NAMED


def test_a_name_that_comes_later_is_found_after_a_while(tmp_path: Path) -> None:
    ticking = Ticking()
    containers, group = PodContainers(ticking, tmp_path), v2(f"{CGROUPFS}/{ID}")
    assert containers.read(group) == PodContainer(UID, ID, reason=NO_FOLDER)
    links(tmp_path, f"llama-0_ml_train-{ID}.log")
    assert containers.read(group) == PodContainer(UID, ID, reason=NO_FOLDER)
    ticking.now_s += RETRY_S
    assert containers.read(group) == NAMED


def test_a_folder_that_others_can_write_or_that_is_a_link_or_a_file_names_nothing(tmp_path: Path) -> None:
    group = v2(f"{CGROUPFS}/{ID}")
    folder = links(tmp_path, f"llama-0_ml_train-{ID}.log")
    folder.chmod(0o777)
    assert PodContainers(Ticking(), tmp_path).read(group) == PodContainer(UID, ID, reason=NOT_TRUSTED)
    folder.chmod(0o755)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    linked = PodContainers(Ticking(), tmp_path).read(group)
    assert linked is not None and linked.pod is None and "cannot read" in (linked.reason or "")
    folder.unlink()
    folder.write_text("")
    plain = PodContainers(Ticking(), tmp_path).read(group)
    assert plain is not None and plain.pod is None and "cannot read" in (plain.reason or "")


def test_many_groups_do_not_fill_memory(tmp_path: Path) -> None:
    pods = PodContainers(Ticking(), tmp_path)
    for n in range(2000):
        pods.read(v2(f"/user.slice/{n}"))
    assert len(pods._by_group) <= containers._MAX_GROUPS


def test_a_process_has_its_pod_and_its_environment_is_not_believed(tmp_path: Path) -> None:
    links(tmp_path, f"llama-0_ml_train-{ID}.log")
    tree = ProcTree(tmp_path / "proc")
    claim = b"HOSTNAME=stolen\0KUBERNETES_SERVICE_HOST=10.0.0.1\0POD_NAME=stolen\0"
    tree.add(7, cgroup=v2(f"{SYSTEMD}/cri-containerd-{ID}.scope").decode(), environ=claim)
    tree.add(8, environ=claim)
    inside, outside = GpuProcessTable(Ticking(), tree.root).read(on_gpus(7, 8))
    assert inside.kubernetes == NAMED and inside.container == f"containerd {ID[:12]}"
    assert outside.kubernetes is None and "stolen" not in repr(outside)
