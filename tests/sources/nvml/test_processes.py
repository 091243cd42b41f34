"""Processes as NVML lists them, over the fake driver library."""

from __future__ import annotations

import pytest

from gputop.sources.nvml.processes import LIST_PERIOD_S, SHARE_PERIOD_S
from tests.nvml_fake import FakeNvml
from tests.sources.nvml.nodes import Node

MIB = 1 << 20


def opened(fake: FakeNvml, *settings: str) -> Node:
    return Node(fake, "gpus 1", *settings)


def test_compute_and_graphics_are_merged(fake: FakeNvml) -> None:
    node = opened(fake, "process 0 10 1000 C 40", "process 0 11 50 G 3", "process 0 12 20 B -1")
    sample = node.sample()
    assert sample.processes_reason is None
    found = {p.pid: p for p in sample.processes}
    assert {pid: p.kind for pid, p in found.items()} == {10: "C", 11: "G", 12: "C+G"}
    assert found[10].memory_bytes.value == 1000 * MIB
    assert found[10].sm_ratio.value == 0.4
    assert found[12].sm_ratio.value is None


def test_more_processes_than_there_was_room_for(fake: FakeNvml) -> None:
    node = opened(fake, *(f"process 0 {100 + i} {i} C 1" for i in range(60)))
    assert [p.pid for p in node.sample().processes] == [100 + i for i in range(60)]


def test_memory_that_the_driver_does_not_tell_is_missing(fake: FakeNvml) -> None:
    node = opened(fake, "process 0 10 -1 C 40")
    (process,) = node.sample().processes
    assert process.memory_bytes.value is None


@pytest.mark.parametrize("refused", [("_v3",), ("_v3", "_v2")])
def test_older_drivers_have_the_call_under_older_names(fake: FakeNvml, refused: tuple[str, ...]) -> None:
    rules = [f"refuse nvmlDeviceGet{kind}RunningProcesses{v} 13" for v in refused for kind in ("Compute", "Graphics")]
    node = opened(fake, *rules, "process 0 10 1000 C 40", "process 0 11 -1 G 1")
    for _ in range(2):
        first, second = node.sample().processes
        assert (first.pid, first.memory_bytes.value) == (10, 1000 * MIB)
        assert (second.pid, second.memory_bytes.value) == (11, None)
        node.clock.advance(LIST_PERIOD_S)
    assert fake.calls("nvmlDeviceGetComputeRunningProcesses_v3") == 1


def test_a_refused_list_says_why_and_a_refused_graphics_list_is_no_fault(fake: FakeNvml) -> None:
    node = opened(fake, "refuse nvmlDeviceGetComputeRunningProcesses_v3 4")
    node.sample()
    assert "permission" in (node.sample(after_s=LIST_PERIOD_S).processes_reason or "")
    assert fake.calls("nvmlDeviceGetComputeRunningProcesses_v3") == 1
    node = opened(fake, "refuse nvmlDeviceGetGraphicsRunningProcesses_v3 3", "process 0 10 1 C 1")
    sample = node.sample()
    assert sample.processes_reason is None
    assert len(sample.processes) == 1


def test_slow_calls_have_their_own_period(fake: FakeNvml) -> None:
    node = opened(fake, "process 0 10 1000 C 40")
    node.sample(after_s=1.0, times=12)
    assert fake.calls("nvmlDeviceGetComputeRunningProcesses_v3") == 6
    assert fake.calls("nvmlDeviceGetProcessUtilization") == 3
    assert SHARE_PERIOD_S > LIST_PERIOD_S


def test_nothing_new_is_not_a_share_of_0(fake: FakeNvml) -> None:
    node = opened(fake, "process 0 10 1000 C 40", "refuse nvmlDeviceGetProcessUtilization 6")
    (process,) = node.sample().processes
    assert "no new value" in (process.sm_ratio.reason or "")
    fake.allow_everything()
    (process,) = node.sample(after_s=4.0).processes
    assert process.sm_ratio.value == 0.4


def test_refused_shares_are_asked_for_once(fake: FakeNvml) -> None:
    node = opened(fake, "process 0 10 1000 C 40", "refuse nvmlDeviceGetProcessUtilization 3")
    (process,) = node.sample(after_s=5.0, times=4).processes
    assert "not supported" in (process.sm_ratio.reason or "")
    assert fake.calls("nvmlDeviceGetProcessUtilization") == 1


def test_an_impossible_share_is_dropped(fake: FakeNvml) -> None:
    node = opened(fake, "process 0 10 1000 C 4096")
    (process,) = node.sample().processes
    assert process.sm_ratio.value is None


@pytest.mark.parametrize("pattern", ["ff", "a5", "random"])
@pytest.mark.parametrize(("what", "reason"), [
    ("nvmlDeviceGetComputeRunningProcesses_v3", "as the list length"), ("process", "impossible")])
def test_a_list_or_an_entry_that_cannot_be_is_no_process(fake: FakeNvml, what: str, reason: str, pattern: str) -> None:
    node = opened(fake, "process 0 10 1000 C 40", f"fault {what} 0 1 2 garbage {pattern}")
    sample = node.sample()
    assert sample.processes == () and reason in (sample.processes_reason or "")
    assert [p.pid for p in node.sample(after_s=LIST_PERIOD_S).processes] == [10]


@pytest.mark.parametrize("pattern", ["ff", "a5", "random"])
def test_shares_that_cannot_be_leave_the_processes(fake: FakeNvml, pattern: str) -> None:
    node = opened(fake, "process 0 10 1000 C 40", f"fault nvmlDeviceGetProcessUtilization 0 1 2 garbage {pattern}")
    (process,) = node.sample().processes
    assert process.memory_bytes.value == 1000 * MIB
    assert "as the list length" in (process.sm_ratio.reason or "")
    (process,) = node.sample(after_s=SHARE_PERIOD_S + LIST_PERIOD_S).processes
    assert process.sm_ratio.value == 0.4
