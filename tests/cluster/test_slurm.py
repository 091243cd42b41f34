"""What a real Slurm 22.05 said (tests/data/slurm/squeue.json, its fields that are read), and what newer ones say."""

from __future__ import annotations

import pytest

from gputop.cluster.slurm import JobQueue, gpu_count, parse_squeue
from gputop.core.errors import GputopError
from gputop.profiler.addresses import short_name
from tests.cluster.squeue_double import SAID, squeue


def test_running_jobs_with_gpus_of_a_real_slurm() -> None:
    jobs = {job.id: job for job in parse_squeue(SAID.read_bytes())}
    # 7, 8 and the rest of the array wait, 9 has no GPU; tasks of the array are named by it, parts of a heterogeneous
    # job by its first part.
    assert set(jobs) == {"1", "2", "3_0", "3_1", "4+0", "4+1", "6"}
    assert dict(jobs["1"].gpus) == {"gpu1": 3, "gpu2": 3} and jobs["1"].user == "root"
    assert jobs["3_0"].number == "10" and dict(jobs["3_0"].gpus) == {"gpu1": 1}
    assert jobs["1"].start_s == 1795344322


@pytest.mark.parametrize("fields", [
    {"job_state": ["RUNNING"]}, {"job_id": {"set": True, "infinite": False, "number": 7}},
    {"start_time": {"set": True, "infinite": False, "number": 100}}, {"array_job_id": {"set": False, "number": 0}},
])
def test_newer_releases_wrap_their_values(fields: dict[str, object]) -> None:
    (job,) = parse_squeue(squeue(**fields))
    assert (job.id, job.start_s, dict(job.gpus)) == ("7", 100, {"n1": 8, "n2": 8})


@pytest.mark.parametrize("fields", [
    {"job_state": "COMPLETED"}, {"job_state": ["COMPLETING"]}, {"gres_detail": []}, {"gres_detail": None},
    {"nodes": "n[1-99999999]"}, {"nodes": "n[x"}, {"job_id": None}, {"gres_detail": ["gpu:8"]},
    {"nodes": "n" + "[1]" * 5000}, {"nodes": "[" + ":" * 300_000}, {"nodes": f"n[{'0' * 5000}1-2]"},
    {"job_id": -1e300}, {"job_id": 10 ** 400}, {"job_id": 1e300}, {"nodes": ["n1"]},
], ids=range(15))
def test_what_does_not_run_or_is_damaged_is_left_out(fields: dict[str, object]) -> None:
    assert parse_squeue(squeue(**fields)) == ()


def test_no_time_is_one_that_no_clock_has() -> None:
    for start in (-1e300, 1e300, 10 ** 400, -5):
        (job,) = parse_squeue(squeue(start_time=start))
        assert job.start_s is None


def test_names_cannot_repaint_the_terminal() -> None:
    (job,) = parse_squeue(squeue(name="a\x1b[2Jb" + "x" * 999))
    assert job.name.isprintable() and len(job.name) <= 100


@pytest.mark.parametrize("text", [b"", b"[]", b'{"jobs": 3}', b"squeue: error", b'{"jobs": NaN}'])
def test_what_is_no_answer_of_squeue_is_said(text: bytes) -> None:
    with pytest.raises(GputopError, match="unknown form"):
        parse_squeue(text)


@pytest.mark.parametrize(("text", "count"), [
    ("gpu:h100:3(IDX:0-2)", 3), ("gpu:8(IDX:0-7)", 8), ("gpu:a100:2(IDX:0,2),gpu:v100:1(IDX:4),mps:10", 3),
    ("mps:10", 0), ("", 0), ("gpu:h100:0(IDX:)", 0), ("gpu:2", 2), ("gpu:999999999", 0),
])
def test_gpus_are_counted(text: str, count: int) -> None:
    assert gpu_count(text) == count


def test_a_node_has_one_short_name() -> None:
    assert short_name("N01.cluster.example") == "n01" and short_name("10.0.0.7") == "10.0.0.7"


def test_slurm_is_asked_every_half_a_minute_and_after_a_clock_was_set_back() -> None:
    asked: list[float] = []
    now_s = 0.0

    def said() -> bytes:
        asked.append(now_s)
        return squeue()

    queue = JobQueue(said)
    for now_s in (1e6, 1e6 + 20, 1e6 + 1000, 1e6 + 990, 1e6 - 3600, 1e6 - 3590):
        queue.update(now_s)
    assert asked == [1e6, 1e6 + 1000, 1e6 - 3600] and [job.id for job in queue.jobs] == ["7"]
