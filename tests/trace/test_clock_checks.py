from __future__ import annotations

import pytest

from gputop.trace.complete_part import up_to_last_gpu_event
from gputop.trace.gpu_clocks import clock_notes
from gputop.trace.model import Kind, Trace
from tests.trace.build import Builder

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
HOUR_US = 3600e6


def job(gpus: int = 4, off_us: dict[int, float] | None = None, launches: bool = True, apart: float = 1000) -> Trace:
    """Forty short kernels on each GPU, launched 10 µs before each, and a collective after every second one."""
    b = Builder(gpus=gpus)
    for gpu in range(gpus):
        off = (off_us or {}).get(gpu, 0.0)
        for i in range(40):
            at = 20_000 + i * apart
            b.run(gpu, at + off, 100, launch=at - 10 if launches else None)
            if i % 2:
                b.run(gpu, at + 300 + off, 100, NCCL, kind=Kind.COLLECTIVE, launch=at + 290 if launches else None)
    return b.build()


def notes(trace: Trace) -> list[str]:
    assert all(note.id == "clock" for note in clock_notes(trace))
    return [note.message for note in clock_notes(trace)]


@pytest.mark.parametrize("gpus", [1, 4])
def test_clocks_that_agree_are_worth_no_word(gpus):
    assert notes(job(gpus)) == [] == notes(job(gpus, launches=False))


def test_a_gpu_that_is_ahead_though_nothing_held_its_kernels_up():
    said = notes(job(off_us={1: 5000}, apart=20_000))
    assert any("GPU 1" in message and "5.0 ms ahead" in message for message in said)


def test_a_gpu_that_is_off_by_its_collectives():
    said = notes(job(off_us={3: 5000}, launches=False))
    assert len(said) == 1 and "The collectives of GPU 3 all end 5.0 ms after" in said[0]


def test_a_jump_of_an_hour():
    b = Builder()
    for i in range(20):
        b.run(0, i * 1000 + (HOUR_US if i >= 12 else 0), 100)
    said = notes(b.build())
    assert len(said) == 1 and "The clock jumped" in said[0] and "(12 before and 8 after" in said[0]
    assert notes(b.host("train", 0, HOUR_US + 30_000).build()) == []  # something lasted as long


def test_a_trace_whose_gpu_events_end_early_is_judged_up_to_there():
    b = Builder()
    for i in range(1000):
        b.host("cuLaunchKernel", i * 100, 5, step_num=i)
        if i < 700:
            b.run(0, i * 100 + 10, 50)
    trace = up_to_last_gpu_event(b.build())
    assert [note.id for note in trace.quality] == ["clipped"] and "launches 300 more times" in trace.quality[0].message
    assert trace.window_ns[1] <= 700 * 100_000 and len(trace.host) == 700
    assert trace.host.stats["step_num"][1].tolist() == list(range(700))


@pytest.mark.parametrize("until", [690, 30])
def test_a_host_that_does_something_else_at_the_end_is_not_cut(until):
    b = Builder()
    for i in range(700):
        b.run(0, i * 100 + 10, 50)
    for i in range(until, 700 + until % 40):
        b.host("cuLaunchKernel", i * 100, 5)
    b.host("save", 70_000, 100_000)
    trace = b.build()
    assert up_to_last_gpu_event(trace) is trace
