"""The memory that is free to this process, from trees of our own making, and its place before the OOM killer."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from gputop.core import own_memory as memory
from gputop.core.errors import GputopError
from gputop.trace.readers import content


def _tree(folder: Path, group: str, limits: dict[str, int], version: int = 2) -> tuple[Path, Path]:
    proc, root = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    1000 kB\n")
    (proc / "self" / "cgroup").write_text(f"0::{group}\n" if version == 2 else f"5:cpu:/x\n4:memory:{group}\n")
    names = {2: ("memory.max", "memory.current"), 1: ("memory.limit_in_bytes", "memory.usage_in_bytes")}[version]
    top = root if version == 2 else root / "memory"
    (top / group.strip("/")).mkdir(parents=True)
    for name, limit in limits.items():
        for file, value in zip((*names, "memory.stat"), (limit, 1000, "inactive_file 0"), strict=True):
            (top / name / file).write_text(f"{value}\n")
    return proc, root


@pytest.mark.parametrize("version", [1, 2])
def test_the_least_of_node_and_all_groups_above_is_free(tmp_path, version):
    assert memory.free_bytes(*_tree(tmp_path / "a", "/job/gputop", {}, version)) == 1000 * 1024
    assert memory.free_bytes(*_tree(tmp_path / "b", "/job/gputop", {"job": 500_000}, version)) == 499_000
    both = {"job": 500_000, "job/gputop": 9000}
    assert memory.free_bytes(*_tree(tmp_path / "c", "/job/gputop", both, version)) == 8000


def test_own_limits_count():
    code = ("import resource\nfrom gputop.core.own_memory import free_bytes\n"
            "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, resource.RLIM_INFINITY))\n"
            "assert 0 < free_bytes() < 1 << 30, free_bytes()")
    assert resource.getrlimit(resource.RLIMIT_AS)
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_analysis_goes_before_the_monitor_and_a_job_keeps_its_place():
    code = ("from gputop.core.own_memory import *\nimport subprocess, tempfile, pathlib, os\n"
            "from gputop.launch.job import StartedJob\n"
            "own = lambda: int(open('/proc/self/oom_score_adj').read())\n"
            "before = own()\n"
            "log = pathlib.Path(tempfile.mkdtemp(), 'log')\n"
            "job = StartedJob(['cat', '/proc/self/oom_score_adj'], dict(os.environ), log)\n"
            "job.ended.wait(60)\n"
            "assert int(log.read_text()) == before and own() == max(before, 500), (log.read_text(), own())\n"
            "offer_to_oom_killer(ANALYSIS_SCORE); offer_to_oom_killer(MONITOR_SCORE)\n"
            "assert own() == 1000")
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's allocator can be told")
def test_memory_that_an_analysis_frees_is_there_for_its_next_array():
    # Pages that are given back and taken anew are faults. An array of 16 MB has 4,096 of them, or 8 huge ones.
    code = ("import resource, numpy as np\n"
            "from gputop.core.own_memory import keep_freed_memory\n"
            "keep_freed_memory()\n"
            "def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
            "np.ones(2 << 20); before = faults()\n"
            "for _ in range(200): np.ones(2 << 20)\n"
            "assert faults() - before < 200, faults() - before\n"
            "import gc; assert gc.get_threshold()[0] == 10_000  # so many new objects, not 700, until it is searched")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_decoding_stops_where_it_takes_too_much_or_others_leave_too_little(monkeypatch):
    used, free = [100], [1000.0]
    monkeypatch.setattr(memory, "resident_bytes", lambda pid: used[0])
    monkeypatch.setattr(memory, "free_bytes", lambda: free[0])
    monkeypatch.setattr(content, "_CHECK_PERIOD_S", 0.0)
    watch = content.MemoryWatch(500)
    watch.check("a")
    used[0] = 700
    with pytest.raises(GputopError, match="a needs more than"):
        watch.check("a")
    used[0], free[0] = 200, 50.0
    with pytest.raises(GputopError, match="memory ran low while gputop read a"):
        watch.check("a")
    content.MemoryWatch(float("inf")).check("a")


def test_a_real_group_with_a_limit(tmp_path):
    own = next((line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines()
                if line.split(":")[1] == "memory"), None)
    if own is None:
        pytest.skip("no memory controller of cgroup v1 here")
    group = Path("/sys/fs/cgroup/memory", own.strip("/"), f"gputop-test-{tmp_path.name}")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no group can be made here: {error.strerror}")
    try:
        (group / "memory.limit_in_bytes").write_text(str(1 << 28))
        code = ("import os, sys\nopen(sys.argv[1], 'w').write(str(os.getpid()))\n"
                "from gputop.core.own_memory import free_bytes\nassert 0 < free_bytes() <= 1 << 28, free_bytes()")
        subprocess.run([sys.executable, "-c", code, str(group / "cgroup.procs")], check=True)
    finally:
        group.rmdir()


@pytest.mark.parametrize("group", [b"/a\xff\xfe", b"/../../../tmp", b"", b"/" + b"a" * 5000, b"/a\x85b"])
def test_a_group_of_any_name_ends_no_capture(tmp_path, group):
    """A capture reads the groups of the job's process, whose user made them; outside of the mounted ones it looks
    at none."""
    proc, root = _tree(tmp_path, "/job", {"job": 500_000})
    (proc / "7").mkdir()
    (proc / "7" / "cgroup").write_bytes(b"0::" + group + b"\nno group\n\n::\n")
    assert memory.control_groups(7, proc, root) == {root}
