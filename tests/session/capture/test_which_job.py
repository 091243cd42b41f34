"""Which job is meant, as values: a restart is known by user and command, jobs are ordered by what they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gputop.core.proc import boot_time_s, started_s
from gputop.core.samples import ProcessSample
from gputop.profiler.capture.records import CaptureRecord, Server
from gputop.session.capture.which_job import (
    HeldGpus,
    gpu_use,
    in_order,
    is_of_earlier_job,
    jobs_of,
    only_job_on_gpus,
    same_job,
)
from gputop.text.commands import script_of
from tests.fakes import GIB, node_sample, reading
from tests.records import replace

ENDED = Server("127.0.0.1:1", "TensorFlow 2.21.0: python -u /a/train.py --lr 1", 7, user="ana", started_s=100.0)


def holder(pid: int, *gib: float, **more: Any) -> ProcessSample:
    """A process that holds so much memory of the first GPUs."""
    (process,), held = node_sample(1).processes, {}
    for gpu, amount in enumerate(gib):
        held[gpu] = replace(process.gpus[0], pid=pid, memory_bytes=reading(amount * GIB, "bytes"))
    return replace(process, pid=pid, gpus=held, **more)


@pytest.mark.parametrize(("change", "same"), [
    ({}, True),
    ({"address": "127.0.0.1:9"}, True),
    ({"description": "rank 0: python3 /a/train.py --lr 2 --fast"}, True),
    ({"description": "python /a/train.py", "address": "127.0.0.1:9"}, False),
    ({"description": "python /b/train.py --lr 1"}, False),
    ({"description": "python -c train.py"}, False),
    ({"description": ""}, False),
    ({"user": "eve", "owner": "eve"}, False),
    ({"user": ""}, False),
    ({"pid": None}, False),
])
def test_a_restart_is_of_the_same_user_and_script(change: dict[str, Any], same: bool) -> None:
    assert same_job(replace(ENDED, **({"pid": 8, "started_s": 200.0} | change)), ENDED) is same


@pytest.mark.parametrize(("command", "script"), [
    ("/usr/bin/python3.11 -u -X dev /a/train.py --lr 1", "/a/train.py"),
    ("python -m pkg.train --lr 1", "-m pkg.train"),
    ("python -c import_train", "python -c import_train"),
    ("python", "python"),
    ("torchrun --nproc 8 train.py", "torchrun --nproc 8 train.py"),
    ("", ""),
])
def test_the_script_of_a_command_is_what_its_options_do_not_change(command: str, script: str) -> None:
    assert script_of(command) == script


def test_what_a_server_holds_is_that_of_its_process_and_its_children() -> None:
    processes = (holder(7, 10), holder(8, 20, 30, parent_pid=7), holder(9, 40), holder(1007, 5, local_pid=11))
    assert gpu_use(ENDED, processes) == HeldGpus((0, 1), 60 * GIB)
    assert gpu_use(replace(ENDED, pid=11), processes) == HeldGpus((0,), 5 * GIB)
    assert gpu_use(replace(ENDED, pid=None), processes) == gpu_use(ENDED, ()) == HeldGpus()


def test_the_jobs_of_gputop_s_user_and_those_on_gpus_come_first() -> None:
    cpu, small, large = (replace(ENDED, address=f"127.0.0.1:{pid}", pid=pid, description=f"python {pid}.py")
                         for pid in (20, 21, 22))
    worker, bob = replace(small, address="127.0.0.1:23", pid=23), replace(large, pid=24, owner="bob")
    broken, named = replace(cpu, problem="refused"), replace(cpu, asked=True)
    processes = (holder(21, 10), holder(23, 25), holder(22, 30), holder(24, 70))
    assert jobs_of([broken, named, bob, cpu, large, small, worker], processes) == [small, large, cpu, bob]
    assert in_order([bob, cpu, small, large], None, processes) == (large, small, cpu, bob)
    assert in_order([bob, cpu, small, large, named], small, processes) == (named, small, large, cpu, bob)
    near = (holder(21, 29), holder(22, 30))
    assert in_order([large, small], None, near, shown=small) == (small, large), "it does not change with each sample"
    assert in_order([small, large], None, processes, shown=small) == (large, small)
    assert only_job_on_gpus([small, cpu], processes) == small
    assert only_job_on_gpus([cpu], processes) is only_job_on_gpus([small, large], processes) is None
    assert only_job_on_gpus([bob, cpu], processes) is None, "another user's is never taken unasked"


@pytest.mark.parametrize(("record", "servers", "earlier"), [
    ({"pid": 7, "started_s": 100.5}, [ENDED], False),
    ({"pid": 7, "started_s": 50.0}, [ENDED], True),  # the PID again
    ({"pid": 6, "started_s": 100.0}, [ENDED], True),
    ({"pid": 6, "started_s": 99.0}, [ENDED, replace(ENDED, pid=6, started_s=99.0)], False),  # one of its workers
    ({"pid": 6, "started_s": 99.0}, [replace(ENDED, asked=True), Server("n:1", "b.py", 6, asked=True)], False),
    ({"time_s": 90.0}, [ENDED], True),  # before it started
    ({}, [ENDED], False),  # not known, as of earlier versions
    ({"job": "TensorFlow 2.20.0: python -u /a/train.py --lr 1"}, [ENDED], False),
    ({"job": "python eval.py"}, [ENDED], True),
    ({"job": "python eval.py"}, [Server("n1:6009", "attached", asked=True)], False),
    ({"pid": 6}, [], False),
])
def test_a_capture_is_known_by_its_process(record: dict[str, Any], servers: list[Server], earlier: bool) -> None:
    made = CaptureRecord("127.0.0.1:1", Path("x"), **({"time_s": 200.0, "asked_s": 1.0, "took_s": 1.0} | record))
    assert is_of_earlier_job(made, servers) is earlier


def test_the_start_of_a_process_is_read_from_proc(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu 1\nbtime 1000\n")
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text("7 (a) b) S " + " ".join(["0"] * 18) + " 500 0 0")
    assert boot_time_s(tmp_path) == 1000.0 and started_s(7, tmp_path) == 1005.0
    (tmp_path / "7" / "stat").write_text("7 (a")
    assert started_s(7, tmp_path) is None and started_s(8, tmp_path) is None
    assert boot_time_s(tmp_path / "none") is None
