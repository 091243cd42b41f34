"""Against real PyTorch for the CPU (tests/environments.py); ``TORCH_PYTHON`` may name a Python that has it.

A job trains from a seed and says the loss of the fortieth step, so that a changed value shows. A line on its standard
input ends it; "again" has it begin anew from the same seed. The plain job alone loads all that PyTorch loads: for the
others torch.compile, which the optimizer and the profiler import, is left out, as it takes longer than all the rest.
Those that nobody prepares are forked from one process.
"""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import pytest

from gputop.analysis.steps.steps import find_steps
from gputop.core.errors import GputopError
from gputop.launch import environment, serve
from gputop.launch.serve import switch_on
from gputop.profiler.capture import safe_capture
from gputop.profiler.capture.multi_worker import capture_workers
from gputop.profiler.capture.request import CaptureRequest
from gputop.profiler.kineto import jobs, recorder
from gputop.profiler.kineto.clients import client_of
from gputop.profiler.kineto.guard import UsedBefore
from gputop.profiler.recording import EmptyTrace, RecordingOrder
from gputop.profiler.ways import recorder_of
from gputop.trace.readers.load import load
from tests import environments
from tests.forked_processes import WITHOUT_COMPILE, Forked
from tests.launch.jobs import environment as clean_environment
from tests.listening import free_port

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 only before Python 3.14")

_JOB = WITHOUT_COMPILE + """
import os, threading, time
torch.set_num_threads(1)
MODE = sys.argv[1]
if MODE == "used":
    from torch.profiler import profile
    with profile() as profiler:
        torch.ones(3).sum()
if MODE == "ddp":
    torch.distributed.init_process_group("gloo")

class Data(torch.utils.data.Dataset):
    def __len__(self): return 1 << 30
    def __getitem__(self, i): return torch.full((64,), float(i % 7))

def train():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    workers = {"fork": 2, "spawn": 1}.get(MODE, 0)
    how = dict(num_workers=workers, multiprocessing_context=MODE) if workers else {}
    for step, batch in enumerate(torch.utils.data.DataLoader(Data(), batch_size=8, **how)):
        optimizer.zero_grad()
        loss = model(batch).pow(2).mean()
        loss.backward()
        if MODE == "ddp":
            for weights in model.parameters():
                torch.distributed.all_reduce(weights.grad)
        optimizer.step()
        time.sleep(0.03)  # a recording of a tighter loop takes long to write, and other tests want the processor
        if step == (2 if MODE == "native" else 1):
            os.write(1, f"ready {os.getpid()}\\n".encode())  # whole, where several ranks have one standard output
        yield step, float(loss.detach())

def wait():
    asked.append(os.read(0, 100))  # not sys.stdin, whose lock a forked child would find taken
    if asked[0] == b"again\\n":
        asked.append(os.read(0, 100))

def run(asked_before):
    for step, loss in train():
        if step == 40:
            print("value", loss.hex(), torch.__version__, flush=True)
        if MODE == "native" and step == 2:
            threading.Event().wait()  # no Python runs in it
        if len(asked) > asked_before and step > 40:
            break

asked = []
if __name__ == "__main__":
    threading.Thread(target=wait, daemon=True).start()
    run(0)
    if asked[0] == b"again\\n":
        run(1)
    print("environment", os.environ.get("KINETO_USE_DAEMON"), os.environ.get("TEARDOWN_CUPTI"), flush=True)
    if MODE == "plain":
        sys.exit(7)
    os._exit(7)  # does not wait for loaders
"""
_MAX_JOB_S = 300.0
_PYTHON = ""  # that has PyTorch


@contextlib.contextmanager
def _job(tmp_path: Path, mode: str = "plain", *, ranks: int = 1, **environ: str) -> Iterator[
        tuple[subprocess.Popen[str] | Forked, list[int]]]:
    """A job that steps, and the PIDs that train."""
    script = tmp_path / "train.py"
    script.write_text(_JOB)
    port = str(free_port())
    with (tmp_path / "stderr").open("w") as stderr:
        processes = [_start(script, mode, {**environ, **(
            {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), "RANK": str(rank)}
            if mode == "ddp" else {})}, stderr) for rank in range(ranks)]
    watchdogs = [threading.Timer(_MAX_JOB_S, process.kill) for process in processes]
    for watchdog in watchdogs:
        watchdog.start()
    try:
        for process in processes:
            assert next(process.stdout, "").startswith("ready"), (tmp_path / "stderr").read_text()
        yield processes[0], [process.pid for process in processes]
    finally:
        for watchdog, process in zip(watchdogs, processes, strict=True):
            watchdog.cancel()
            process.kill()
            if not process.stdout.closed:
                process.communicate()


def _start(script: Path, mode: str, environ: dict[str, str], stderr: IO[str]) -> subprocess.Popen[str] | Forked:
    command, env = [_PYTHON, str(script), mode], clean_environment(None, environ)
    if mode in ("ddp", "fork", "native", "used"):
        return Forked(command, env, stderr.fileno(), WITHOUT_COMPILE)
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, env=env)


def _end(process: subprocess.Popen[str] | Forked) -> tuple[int, str]:
    """Status and output of a job that is asked to end."""
    out, _ = process.communicate("end\n")
    return process.wait(), out


def _prepared() -> dict[str, str]:
    return {"PYTHONPATH": str(environment.INSIDE)}


@pytest.fixture(scope="module", autouse=True)
def pytorch():
    global _PYTHON
    _PYTHON = os.environ.get("TORCH_PYTHON") or str(environments.environment(environments.PYTORCH).python)


@pytest.fixture(autouse=True)
def short_probes(monkeypatch):
    monkeypatch.setattr(safe_capture, "PROBE_S", 0.2)


def _capture(pid: int, logdir: Path, seconds: float = 0.5, *, hold: bool = False, force: bool = False,
             on_progress=lambda _: None):
    """A capture of an ordinary length, without a probe if ``force``; its trace has steps. Returns its plan.

    On a loaded machine a recording of half a second may hold too few of them: then there is another one.
    """
    switch_on(pid, hold=hold)
    for number in range(5):
        request = CaptureRequest(seconds, logdir / str(number), force)
        result, plan, _ = safe_capture.capture_with_probe(
            recorder_of(f"pid:{pid}"), request, on_progress, lambda _: None, threading.Event())
        steps = find_steps(load([result.path]))
        if steps is not None and steps.times.count > 2:
            break
    assert steps is not None and steps.times.count > 2
    return plan


class _Job(NamedTuple):
    """One that some tests share. ``loss``: of the fortieth step, before anybody asked the job for something."""

    process: subprocess.Popen[str] | Forked
    pid: int
    loss: str = ""
    version: str = ""


def _value(process: subprocess.Popen[str]) -> list[str]:
    """Loss of the fortieth step, and the version of PyTorch."""
    return next(line for line in process.stdout if line.startswith("value")).split()[1:]


@pytest.fixture(scope="module")
def plain_job(pytorch, tmp_path_factory) -> Iterator[_Job]:
    """Of the first tests here; the last of them ends it."""
    with _job(tmp_path_factory.mktemp("plain")) as (process, (pid,)):
        yield _Job(process, pid, *_value(process))


def test_the_version_is_read_from_the_process_s_own_files(plain_job):
    assert jobs.torch_version(plain_job.pid) == plain_job.version


def test_an_unprepared_job_is_recorded_and_not_changed(plain_job, tmp_path):
    """It trains twice from one seed, and is recorded at the second time."""
    process, pid, *value = plain_job
    assert client_of(pid) is None and process.stdin is not None
    process.stdin.write("again\n")
    process.stdin.flush()
    plan = _capture(pid, tmp_path, 1.2)
    assert plan.probe is None and "at most" in plan.why and not plan.shortened
    assert _value(process) == value


def test_two_gputops_get_a_trace_each(plain_job, tmp_path):
    results = []
    switch_on(plain_job.pid)
    threads = [threading.Thread(target=lambda name=name: results.append(
        _capture(plain_job.pid, tmp_path / name, force=True))) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2


def test_a_job_that_ends_while_it_is_recorded_ends_as_it_would_have(plain_job, tmp_path):
    process, ended = plain_job.process, []

    def on_progress(progress) -> None:
        if progress.phase == "recording" and not ended:
            ended.append(process.stdin.write("end\n"))
            process.stdin.flush()

    switch_on(plain_job.pid)
    with contextlib.suppress(EmptyTrace):  # it ended before its next step
        recorder_of(f"pid:{plain_job.pid}").record(RecordingOrder(1.5, tmp_path), on_progress, threading.Event())
    assert ended
    status, out = _end(process)
    assert status == 7 and out.endswith("environment None 0\n")
    assert Path(plain_job.process.args[-2]).with_name("stderr").read_text() == ""


def test_a_prepared_job_is_recorded_without_being_attached_to(tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "_inject", lambda *_: pytest.fail("attached"))
    with _job(tmp_path, "spawn", **_prepared()) as (process, (pid,)):
        _capture(pid, tmp_path, force=True)
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        assert children and not any(client_of(child) for child in children)
        folder = client_of(pid).folder
        status, out = _end(process)
    assert status == 7 and "environment None 0" in out
    assert folder is not None


@pytest.fixture(scope="module")
def fork_job(pytorch, tmp_path_factory) -> Iterator[_Job]:
    """With loader workers; the second of its tests kills it."""
    with _job(tmp_path_factory.mktemp("fork"), "fork") as (process, (pid,)):
        yield _Job(process, pid)


def test_loader_workers_are_no_clients(fork_job, tmp_path):
    pid = fork_job.pid
    _capture(pid, tmp_path, force=True)
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    assert len(children) >= 2 and not any(client_of(child) for child in children)


def test_a_job_that_ends_meanwhile_is_told(fork_job, tmp_path):
    with pytest.raises(GputopError, match="ended by SIGKILL while it was being recorded"):
        _capture(fork_job.pid, tmp_path, 0.9,
                 on_progress=lambda p: p.phase == "recording" and fork_job.process.kill())


def test_ranks_are_recorded_over_the_same_seconds(tmp_path):
    with _job(tmp_path, "ddp", ranks=2) as (_, pids):
        for pid in pids:
            switch_on(pid)
        captured = capture_workers([recorder_of(f"pid:{pid}") for pid in pids],
                                   CaptureRequest(1.0, tmp_path, force=True), lambda _: None, lambda _: None,
                                   threading.Event())
    assert [outcome.error for outcome in captured.outcomes] == [None, None]
    assert captured.start_spread_s is not None and captured.start_spread_s < 1.0
    trace = load([captured.run_dir])
    assert {line.rank for line in trace.lines} == {0, 1}


def test_a_job_that_used_torch_profiler_is_asked_about(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "_MAX_HOLD_S", 0.1)  # fewer events are recorded
    with _job(tmp_path, "used") as (process, (pid,)):
        with pytest.raises(UsedBefore, match="has used torch"):
            switch_on(pid)
        plan = _capture(pid, tmp_path, 60.0, hold=True)
        assert plan.chosen_s < 60 and client_of(pid).holds
        assert _end(process)[0] == 7


def test_a_job_that_runs_no_python_is_told_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "ANSWER_TIMEOUT_S", 2.0)
    with _job(tmp_path, "native") as (process, (pid,)):
        with pytest.raises(GputopError, match="did not answer within 2 s"):
            switch_on(pid)
        assert process.poll() is None and client_of(pid) is None


def test_an_unsafe_job_is_refused(tmp_path):
    with _job(tmp_path, "light", KINETO_USE_DAEMON="1", KINETO_LOG_LEVEL="5") as (_, (pid,)), \
            pytest.raises(GputopError, match="Any user of this node"):
        assert pid in jobs.find_jobs().unprotected
        switch_on(pid)


def test_with_a_gpu_nothing_is_begun_before_the_job_itself_uses_cuda(tmp_path):
    """As the job would have it on a node with a GPU: the driver is there, and CUDA is used later."""
    script = tmp_path / "train.py"
    script.write_text("""
import sys, threading, time, torch
sys.path.insert(0, sys.argv[1])
import gputop_kineto
gputop_kineto._DRIVER, gputop_kineto._POLL_S = "/dev/null", 0.01
torch.version.cuda = "12.0"
used = []
torch.cuda.is_initialized = lambda: bool(used)
told = []
gputop_kineto.listen(lambda: True, lambda version: told.append(threading.current_thread() is threading.main_thread()))
print(gputop_kineto._switch_on("/tmp/x")[0], told)
used.append(1)
while not told:
    time.sleep(0.01)
print(told)
""")
    job = Forked([_PYTHON, str(script), str(environment.INSIDE)], clean_environment(), 2, WITHOUT_COMPILE)
    assert job.communicate() == ("no CUDA yet []\n[True]\n", None)
