"""A real PyTorch job with one thread that never sleeps, at each of its limits and then recorded: it trains the same
segment over and over, and says so where a result differs in a bit from the first."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gputop.core.errors import GputopError
from gputop.core.proc import status_fields
from gputop.launch.serve import switch_on
from gputop.profiler.capture.request import CaptureRequest
from gputop.profiler.capture.safe_capture import capture_with_probe
from gputop.profiler.ways import recorder_of
from tests import environments
from tests.forked_processes import WITHOUT_COMPILE
from tests.launch.jobs import environment
from tests.processes import once_ready

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 only before Python 3.14")

_JOB = WITHOUT_COMPILE + """
import hashlib, select
torch.set_num_threads(1)
def segment():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(200):
        loss = model(torch.randn(8, 32)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
first = segment()
print("ready", flush=True)
while True:
    if segment() != first:
        print("differs", flush=True)
    if select.select([sys.stdin], [], [], 0)[0]:
        print("segment" if sys.stdin.readline() else "end", flush=True)
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Iterator[subprocess.Popen[str]]:
    python = os.environ.get("TORCH_PYTHON") or str(environments.environment(environments.PYTORCH).python)
    with once_ready(python, "-c", _JOB, "plain", env=environment(None, {"OMP_NUM_THREADS": "1"})) as process:
        yield process


def _goes_on(process: subprocess.Popen[str]) -> None:
    """It trains on, and no result has differed."""
    assert process.stdin is not None and process.stdout is not None
    print("next", file=process.stdin, flush=True)
    assert process.stdout.readline() == "segment\n"


def _taken(pid: int, name: bytes) -> int:
    return 1024 * int(status_fields(pid)[name].split()[0])


@contextlib.contextmanager
def _limited(pid: int, which: int, most: int) -> Iterator[None]:
    before = resource.prlimit(pid, which)
    resource.prlimit(pid, which, (most, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, which, before)


@pytest.mark.parametrize(("which", "words"), [
    (resource.RLIMIT_AS, "address space"), (resource.RLIMIT_DATA, "data size"),
    (resource.RLIMIT_NOFILE, "file descriptors"), (resource.RLIMIT_FSIZE, "bytes in a file")])
def test_a_job_at_a_limit_is_refused_and_goes_on(job, which, words):
    most = {resource.RLIMIT_AS: _taken(job.pid, b"VmSize") + (20 << 20),
            resource.RLIMIT_DATA: _taken(job.pid, b"VmData") + (20 << 20),
            resource.RLIMIT_NOFILE: len(list(Path(f"/proc/{job.pid}/fd").iterdir())) + 1,
            resource.RLIMIT_FSIZE: 1 << 20}[which]
    with _limited(job.pid, which, most), pytest.raises(GputopError, match=f"PyTorch may need .*{words}") as caught:
        switch_on(job.pid)
    assert f"prlimit --pid {job.pid}" in caught.value.fix
    _goes_on(job)


def test_a_job_in_a_full_control_group_is_refused_and_goes_on(job):
    group = Path(f"/sys/fs/cgroup/pids/gputop-test-{os.getpid()}")
    try:
        group.mkdir()
        (group / "cgroup.procs").write_text(f"{job.pid}\n")
        (group / "pids.max").write_text("2\n")
    except OSError:
        pytest.skip("no control group for tasks can be made here")
    try:
        with pytest.raises(GputopError, match=r"need 7 threads.*pids\.max of \S+ is 2, .* holds 1 thread\."):
            switch_on(job.pid)
        _goes_on(job)
    finally:
        (group.parent / "cgroup.procs").write_text(f"{job.pid}\n")
        group.rmdir()


def test_a_job_that_never_sleeps_is_recorded_and_its_results_are_equal(job, tmp_path):
    """The last here: from now on it has a thread of kineto's, which sleeps."""
    assert len(list(Path(f"/proc/{job.pid}/task").iterdir())) <= 2  # OpenMP's own, if any, waits in a futex
    switch_on(job.pid)
    result, _, _ = capture_with_probe(recorder_of(f"pid:{job.pid}"), CaptureRequest(1.0, tmp_path, force=True),
                                      lambda _: None, lambda _: None, threading.Event())
    assert result.bytes > 0
    _goes_on(job)
