"""Which GPU of the node a job means: every form of CUDA_VISIBLE_DEVICES, and what cannot be known."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gputop.advice.merge import merge_findings
from gputop.core.findings import Finding, Gain
from gputop.core.samples import GpuInfo, GpuProcess, ProcessSample, Reading
from gputop.session.gpu_numbers import GpuNumbers, gpu_numbers, job_process, on_node, unknown

NONE = Reading.missing("bytes", "test")
LIKE = [GpuInfo(i, f"GPU-{i}{i}{i}{i}aaaa-0000", "NVIDIA H100", f"0000:{i:02x}:00.0") for i in range(8)]
MIXED = [*LIKE[:2], GpuInfo(2, "GPU-2222bbbb-0000", "NVIDIA T4", "0000:02:00.0")]
MIG = [GpuInfo(0, "GPU-0000aaaa-0000", "NVIDIA H100", mig_mode=True),
       GpuInfo(0, "MIG-aaaa-1", "NVIDIA H100 1g", mig=1), GpuInfo(1, "MIG-bbbb-1", "NVIDIA H100 1g", mig=0)]


def process(held: Sequence[int], visible: str | None = None, order: str | None = None, container: str | None = None,
            reasons: dict[str, str] | None = None, pid: int = 7) -> ProcessSample:
    gpus = {i: GpuProcess(pid, "C", None, NONE, NONE) for i in held}
    return ProcessSample(pid, "ana", "train.py", NONE, NONE, gpus=gpus,
                         cuda_visible_devices=visible, cuda_device_order=order, container=container,
                         reasons=reasons or {})


@pytest.mark.parametrize(("visible", "held", "expected"), [
    (None, [0, 1, 2, 3, 4, 5, 6, 7], {i: i for i in range(8)}),
    ("2", [2], {0: 2}),
    ("3,1", [1, 3], {0: 3, 1: 1}),
    (" 4 , 5 ", [4, 5], {0: 4, 1: 5}),
    (f"5,{'9' * 5000}", [5], {0: 5}), ("9" * 5000, [5], None),  # more digits than int() takes
    ("5,-1,6", [5], {0: 5}),  # what follows an invalid entry is hidden
    ("6,99,1", [6], {0: 6}),
    ("GPU-3333", [3], {0: 3}),  # a UUID may be cut while it is one device's
    ("GPU-6666aaaa-0000,GPU-0", [0, 6], {0: 6, 1: 0}),
    ("gpu-", [0], None), ("", [0], None), ("NoDevFiles", [0], None), ("1,1", [1], None), ("99", [1], None),
])
def test_like_gpus_by_their_environment(visible: str | None, held: list[int], expected: dict[int, int] | None) -> None:
    found = gpu_numbers(process(held, visible), LIKE, range(len(expected or {0: 0, 1: 1})))
    assert (dict(found.by_ordinal) or None) == expected and (found.reason is None) == (expected is not None)


def test_unlike_gpus_need_an_order_or_uuids() -> None:
    by_number = gpu_numbers(process([1, 2], "1,2"), MIXED, [0, 1])
    assert not by_number.by_ordinal and "fastest first" in (by_number.reason or "")
    assert gpu_numbers(process([1, 2], "1,2", "PCI_BUS_ID"), MIXED, [0, 1]).by_ordinal == {0: 1, 1: 2}
    assert gpu_numbers(process([2], "GPU-2222"), MIXED, [0]).by_ordinal == {0: 2}
    assert "fastest first" in (gpu_numbers(process([0, 1, 2]), MIXED, [0, 1, 2]).reason or "")


def test_mig_by_uuid_of_either_form_but_not_by_number() -> None:
    assert gpu_numbers(process([1], "MIG-bbbb"), MIG, [0]).by_ordinal == {0: 1}
    assert gpu_numbers(process([0], "MIG-GPU-0000aaaa-0000/1/0"), MIG, [0]).by_ordinal == {0: 0}
    assert "MIG" in (gpu_numbers(process([0, 1], "0"), MIG, [0]).reason or "")


def test_in_a_container_only_what_the_driver_confirms_is_believed() -> None:
    renumbered = gpu_numbers(process([2, 3], "0,1", container="docker 0123"), LIKE, [0, 1])
    assert renumbered.by_ordinal == {0: 2, 1: 3} and "Assumes" in renumbered.text()
    assert gpu_numbers(process([3], "0,1", container="docker 0123"), LIKE, [0, 1]).reason is not None
    assert gpu_numbers(process([0, 1], "0,1", container="docker 0123"), LIKE, [0, 1]).same


def test_what_the_driver_says_overrules_the_environment() -> None:
    assert "not match" in (gpu_numbers(process([5, 6], "1"), LIKE, [0]).reason or "")
    assert "contains GPU 1" in (gpu_numbers(process([4], "4"), LIKE, [0, 1]).reason or "")


def test_unreadable_environment_watched_part_and_no_process() -> None:
    denied = {"cuda_visible_devices": "permission denied"}
    assert "permission denied" in gpu_numbers(process([1], reasons=denied), MIXED, [0, 1]).text()
    assert gpu_numbers(process([4, 5], reasons=denied), LIKE, [0, 1]).by_ordinal == {0: 4, 1: 5}
    assert "not watch all" in (gpu_numbers(process([2]), LIKE[2:4], [0, 1], whole_node=False).reason or "")
    assert gpu_numbers(process([3], "1,3"), LIKE[2:4], [0, 1], whole_node=False).by_ordinal == {0: 1, 1: 3}
    assert "not among the processes" in (gpu_numbers(None, LIKE, [0]).reason or "")
    assert "no GPU" in (gpu_numbers(process([0]), LIKE, []).reason or "")


def test_the_process_behind_a_server() -> None:
    one, other = process([0]), process([1], pid=8)
    assert job_process([one, other], 8, local=True) is other
    assert job_process([one, other], None, local=True) is None
    assert job_process([one], None, local=True) is one
    assert job_process([one], None, local=False) is None and job_process([one], 99, local=True) is None


FINDING = Finding(id="gpu0_oversubscribed", severity="high", title="GPU 0 does more", why="why", evidence={},
                  action="act", source="test", gain=Gain(0.3, ""), gpus=(0,))
LIVE = Finding(id="low_sm_active", severity="medium", title="low", why="why", evidence={}, action="act",
               source="test", gain=Gain(None, ""), gpus=(2,), origin="live")


def test_findings_speak_of_the_nodes_gpus_and_say_how() -> None:
    numbers = GpuNumbers({0: 2, 1: 3}, "By test.")
    moved = on_node(FINDING, numbers)
    assert moved.gpus == (2,) and "GPU 0 of the process = GPU 2 of the node" in numbers.text()
    assert numbers.remark(moved) == "The job's GPU 0 is GPU 2 on this node. "
    assert numbers.remark(LIVE) == "" and GpuNumbers({0: 0}).remark(FINDING) == ""
    assert on_node(FINDING, unknown("no idea")) is FINDING and "no idea" in unknown("no idea").text()
    assert on_node(FINDING, GpuNumbers({1: 3})) is FINDING  # half known is not known


def test_a_live_finding_on_a_gpu_of_another_job_is_no_consequence_of_the_trace() -> None:
    (merged,) = merge_findings([FINDING], [LIVE], job_gpus=[2, 3])
    assert merged.consequences == (LIVE,)
    assert len(merge_findings([FINDING], [LIVE], job_gpus=[0, 1])) == 2
