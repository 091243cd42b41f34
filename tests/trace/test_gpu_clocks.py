from __future__ import annotations

import json
import random
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest

from gputop.trace.gpu_clocks import set_right
from gputop.trace.model import Kind, Trace
from gputop.trace.readers.load import load
from tests.diagnosis.real_traces import needs_data, trace_of
from tests.trace.build import Builder

AT_US = 1_000_000.0


def moved(trace: Trace) -> tuple[list[str], list[float]]:
    """The notes, and by how much (µs) the first event of each GPU was moved."""
    before = trace.device.start_ns.copy()
    notes = list(set_right(trace.device, trace.host, trace.names, trace.gpus))
    by = (before - trace.device.start_ns) / 1000
    return notes, [float(by[trace.device.gpu == gpu][0]) for gpu in range(len(trace.gpus))]


def steps(off: float = 0, wait: str = "cudaDeviceSynchronize", gpus: int = 1, off_gpu: int = 0, seed: int = 1) -> Trace:
    """Ten steps on each GPU, twenty kernels launched ahead of it; the host then waits, or (wait "") does something."""
    b, rng = Builder(gpus=gpus), random.Random(seed)
    for gpu in range(gpus):
        shift, free, thread = off if gpu == off_gpu else 0, 0.0, f"launch {gpu}"
        for step in range(10):
            at = AT_US + step * 20_000 + rng.uniform(0, 500)
            for i in range(20):
                free = max(at + 20 * i + 40, free)
                b.run(gpu, free + shift, 300, launch=at + 20 * i)
                free += 301
            b.host(wait or "python", at + 420, free - at - 410, thread)
    return b.build()


@pytest.mark.parametrize("wait", ["cudaDeviceSynchronize_v3020", "hipDeviceSynchronize", "cuCtxSynchronize",
                                  "cudaStreamSynchronize"])
@pytest.mark.parametrize("off", [330_000, -150_000, 1_200, -300])
def test_a_clock_that_is_off_is_set_right_by_calls_that_wait(off, wait):
    notes, by = moved(steps(off, wait))
    assert len(notes) == 1 and ("ahead of" if off > 0 else "behind") in notes[0]
    assert abs(by[0] - off) < 50


def test_each_gpu_has_a_clock():
    notes, by = moved(steps(330_000, gpus=3, off_gpu=1))
    assert len(notes) == 1 and "GPU 1's clock is 330 ms ahead" in notes[0]
    assert by[0] == by[2] == 0 and abs(by[1] - 330_000) < 50


@pytest.mark.parametrize("off", [0, 15, -60])
@pytest.mark.parametrize("wait", ["cudaDeviceSynchronize", ""])
def test_clocks_that_agree_are_left(off, wait):
    assert moved(steps(off, wait)) == ([], [0.0])


@pytest.mark.parametrize("wait", ["cudaDeviceSynchronize", ""])
def test_a_deep_queue_is_no_offset(wait):
    """The host is 76 ms ahead all the time; the GPU pauses now and then for no reason that the trace shows."""
    b, rng, free = Builder(), random.Random(2), AT_US
    for i in range(600):
        length, pause = rng.uniform(50, 900), 60 if i % 5 == 0 else 1
        b.run(0, free, length, launch=free - 76_000 + rng.uniform(-5000, 5000))
        free += length + pause
        if wait and i % 200 == 199:
            b.host(wait, free - 70_000, 70_010, "launch 0")
    assert moved(b.build()) == ([], [0.0])


def test_a_wait_for_an_event_of_the_same_length_is_no_offset():
    b = Builder()
    for i in range(40):  # each kernel is launched after the one before, and begins 5 ms later
        b.run(0, AT_US + 20_000 * i + 5000, 100, launch=AT_US + 20_000 * i)
    assert moved(b.build()) == ([], [0.0])


@pytest.mark.parametrize("off", [300_000, -20_000])
def test_without_calls_that_wait_launches_onto_an_idle_gpu_decide(off):
    b, rng, at = Builder(), random.Random(3), AT_US
    for _ in range(200):
        at += rng.uniform(150, 900)
        b.run(0, at + off + 8, 100, launch=at)
    notes, by = moved(b.build())
    assert len(notes) == 1 and abs(by[0] - off) < 20


def test_kernels_before_their_launches_by_different_times_are_left_and_said():
    b, rng = Builder(), random.Random(4)
    for i in range(100):
        b.run(0, AT_US + 1000 * i - rng.uniform(1000, 40_000), 100, launch=AT_US + 1000 * i)
    notes, by = moved(b.build())
    assert by == [0.0] and len(notes) == 1
    assert "begin before the call that launched them, by up to" in notes[0] and "gputop corrects nothing" in notes[0]


def test_a_clock_that_runs_at_another_rate_is_left_and_said():
    b = Builder()
    for i in range(100):  # 1 % slower: 10 ms behind at the end of a second, and each step waits for the GPU
        at = AT_US + 10_000 * i
        b.run(0, at - 100 * i, 4000, launch=at - 10).host("cudaDeviceSynchronize", at, 4010, "launch 0")
    notes, by = moved(b.build())
    assert by == [0.0] and len(notes) == 1 and "gputop corrects nothing" in notes[0]


def test_a_blocking_copy_to_the_host_waits_and_one_to_the_gpu_does_not():
    b = Builder()
    for i in range(20):
        at = AT_US + 5000 * i
        b.run(0, at + 90_020, 1000, launch=at)
        b.run(0, at + 91_030, 100, "MemcpyD2H", kind=Kind.D2H, launch=at + 50)
        b.host("cudaMemcpy", at + 50, 1090, "launch 0")
        b.run(0, at + 92_000, 500, "MemcpyH2D", kind=Kind.H2D, launch=at + 1990)
        b.host("cudaMemcpy", at + 1990, 200, "launch 0")  # returns before its copy has ended
    notes, by = moved(b.build())
    assert len(notes) == 1 and abs(by[0] - 90_000) < 50


def test_waiting_on_another_gpu_or_a_stream_of_several_says_nothing():
    b, rng, free = Builder(), random.Random(5), AT_US
    for i in range(300):
        length = rng.uniform(50, 900)
        b.run(0, free, length, launch=free - 50_000 - rng.uniform(0, 9000), stream=1 + i % 2)
        if i % 50 == 49:  # for the other stream, which is empty
            b.host("cudaStreamSynchronize", free - 40_000, 500, "launch 0")
        free += length + (70 if i % 7 == 0 else 1)
    assert moved(b.build()) == ([], [0.0])


@pytest.mark.parametrize("off", [400, 700])
@pytest.mark.parametrize("wait", ["cudaDeviceSynchronize", ""])
def test_an_offset_of_less_than_a_millisecond_is_set_right(wait, off):
    b, at = Builder(), AT_US
    for _ in range(60):
        b.run(0, at + off + 8, 100, launch=at)
        b.host(wait or "python", at + 10, 110, "launch 0")
        at += 300
    notes, by = moved(b.build())
    assert len(notes) == 1 and "ahead" in notes[0] and abs(by[0] - off) < 50


@pytest.mark.parametrize("off", [5_000_000, -5_000_000])
def test_without_calls_that_wait_a_full_queue_is_set_right_as_far_as_is_sure(off):
    b, free = Builder(), AT_US * 10
    for i in range(400):
        b.run(0, free + off, 2000, launch=AT_US * 10 - 8000 + 200 * i)
        free += 2001
    notes, by = moved(b.build())
    assert len(notes) == 1 and 0 <= by[0] - off < 80_000
    assert ("ahead of" if off > 0 else "by which they differ at least") in notes[0]


@needs_data
@pytest.mark.parametrize("name", ["a100", "v100", "resnet50", "mfu", "dlrm"])
@pytest.mark.parametrize("off_ns", [0, 330_000_000, -150_000_000, 3_000_000])
def test_real_traces_that_are_moved_come_back(name, off_ns):
    """Launch-bound, with a queue of 76 ms, with two GPUs, and with eight."""
    trace = trace_of(name)
    device = deepcopy(trace.device)
    for times in (device.start_ns, device.end_ns):
        times += off_ns
    before = device.start_ns.copy()
    notes = list(set_right(device, trace.host, trace.names, trace.gpus))
    assert len(notes) == (len(trace.gpus) if off_ns else 0)
    assert np.abs(before - device.start_ns - off_ns).max() < 50_000


def test_a_kineto_trace_is_set_right_before_anything_looks_at_it(tmp_path: Path):
    events = []
    for i in range(40):
        at, correlation = 5000.0 + 1000 * i, i + 1
        events += [
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": at, "dur": 5,
             "args": {"correlation": correlation}},
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaDeviceSynchronize", "pid": 1, "tid": 1, "ts": at + 10,
             "dur": 510, "args": {"correlation": 1000 + correlation}},
            {"ph": "X", "cat": "kernel", "name": "volta_sgemm_128x64_nn", "pid": 0, "tid": 7, "ts": at + 10 - 60_000,
             "dur": 500, "args": {"correlation": correlation, "device": 0, "stream": 7}}]
    path = tmp_path / "late.pt.trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    trace = load([path])
    assert [note.id for note in trace.quality] == ["clock"] and "60.0 ms behind" in trace.quality[0].message
    delay = trace.device.start_ns - trace.device.launch_ns
    assert (delay >= 0).all() and (delay < 50_000).all() and trace.window_ns[0] == 0
