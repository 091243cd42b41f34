"""FreeResources for a capture, from cgroup trees and file systems of our own making."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from gputop.core.own_memory import control_groups, left_in, resident_bytes
from gputop.profiler.capture import job_memory
from gputop.profiler.capture.job_memory import free_disk_bytes, free_resources, job_pid
from tests.profiler.fake_server import serving_process


def cgroup(folder: Path, limit: str, use: int = 0, cache: int = 0, version: int = 2) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    names = {2: ("memory.max", "memory.current", "inactive_file"),
             1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")}[version]
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{use}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\n")
    return folder


@pytest.mark.parametrize("version", [1, 2])
def test_left_below_a_limit_counts_caches_as_free(tmp_path, version):
    assert left_in(cgroup(tmp_path / "a", "1000", 700, 200, version)) == 500
    assert left_in(cgroup(tmp_path / "b", "1000", 1700, 0, version)) == 0
    assert left_in(cgroup(tmp_path / "c", "max" if version == 2 else str(2**63 - 4096), 5, 0, version)) is None
    assert left_in(tmp_path / "none") is None
    (tmp_path / "a" / "memory.stat").unlink()
    assert left_in(tmp_path / "a") is None


def test_cgroups_of_a_process_reach_to_the_top(tmp_path):
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "7").mkdir(parents=True)
    inner = cgroup(root / "kube" / "pod", "1000")
    (proc / "7" / "cgroup").write_text("0::/kube/pod\n")
    assert control_groups(7, proc, root) == {root, root / "kube", inner}
    v1 = cgroup(root / "memory" / "slurm", "1000", version=1)
    (proc / "7" / "cgroup").write_text("9:cpu,cpuacct:/kube\n5:memory:/slurm\n")
    assert control_groups(7, proc, root) == {root / "memory", v1}
    (proc / "7" / "cgroup").write_text("0::/seen/from/outside\n")  # in a container: only its own end is mounted
    assert control_groups(7, proc, root) == {root}
    assert control_groups(8, proc, root) == frozenset()


def test_limits_of_one_of_the_two_bind_only_that_one(tmp_path, monkeypatch):
    both = cgroup(tmp_path / "both", "1000", 400)
    job = cgroup(tmp_path / "job", "900", 800)
    own = cgroup(tmp_path / "own", "300", 100)
    groups = {os.getpid(): frozenset({both, own}), 4_000_000: frozenset({both, job})}
    monkeypatch.setattr(job_memory, "control_groups", lambda pid: groups[pid])
    found = free_resources("127.0.0.1:6009", 4_000_000, tmp_path / "not" / "there")
    assert (found.shared_bytes, found.job_bytes, found.own_bytes) == (600, 100, 200)
    assert found.job_here and found.unknown == ()
    assert found.disk_bytes is not None and found.disk_bytes > 0


def test_a_job_out_of_sight_is_said(tmp_path):
    far = free_resources("192.0.2.1:6009", None, tmp_path)  # a documentation address: nobody's
    assert not far.job_here and "another machine" in far.unknown[0]
    hidden = free_resources("127.0.0.1:6009", None, tmp_path)
    assert hidden.job_here and "process" in hidden.unknown[0]


def test_the_process_behind_a_local_port_is_found():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert job_pid(f"127.0.0.1:{listener.getsockname()[1]}", None) == os.getpid()
    with serving_process() as (tunnel, address):
        assert job_pid(address, None) is None, "it may lead to a server, it is not the job"
        assert job_pid(address, tunnel.pid) == tunnel.pid
    assert job_pid("192.0.2.1:1", None) is None
    assert job_pid("192.0.2.1:1", 1) == 1


def test_memory_and_disk_of_what_is_there_and_what_is_not(tmp_path):
    assert resident_bytes(os.getpid()) > 1e6
    assert resident_bytes(None) is None and resident_bytes(2**22 + 1) is None
    assert free_disk_bytes(tmp_path / "a" / "b") > 0
