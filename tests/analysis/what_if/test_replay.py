"""The replay against jobs whose step with the cure is known."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gputop.analysis.gpu.device_time import timelines
from gputop.analysis.steps.steps import find_steps
from gputop.analysis.what_if.cure import Cure, combined
from gputop.analysis.what_if.replay import TOLERANCE, Replay
from gputop.trace.intervals import union
from gputop.trace.model import Kind, Trace
from tests.trace.build import Builder, keras_steps

STEPS, STEP = 6, 20_000.0  # µs
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def replay(trace: Trace) -> Replay:
    return Replay(trace, timelines(trace), find_steps(trace))


def kernels(trace: Trace, ratio: float) -> Cure:
    return Cure(assumes="", scaled=((np.flatnonzero(trace.device.kind == Kind.COMPUTE), ratio),))


def host_paced() -> Trace:
    """A kernel of 20 µs every 100 µs, each launched as late as that."""
    b = keras_steps(Builder(), STEPS, STEP, STEP - 50)
    for i in range(STEPS):
        for k in range(199):
            at = i * STEP + 50 + 100 * k
            b.run(0, at + 5, 20, launch=at)
    return b.build()


def gpu_paced(wait: bool = True) -> Trace:
    """180 kernels of 100 µs, launched in the first millisecond of the step; then the host waits for them."""
    b = keras_steps(Builder(), STEPS, STEP, STEP - 50)
    for i in range(STEPS):
        begin = i * STEP + 50
        for k in range(180):
            b.run(0, begin + 10 + 100 * k, 100, launch=begin + 5 * k, launch_length=4)
        if wait:
            b.host("cuStreamSynchronize", begin + 1_000, 18_010 - 1_000 + 5, line="launch 0")
    return b.build()


def test_faster_kernels_bring_nothing_to_a_host_that_paces_the_job() -> None:
    trace = host_paced()
    found = replay(trace)
    assert found.error < 0.001
    assert found.saved(kernels(trace, 1 / 3)) == pytest.approx(0.0, abs=0.002)
    left = found.saved(Cure(assumes="", launching=True))
    assert left == pytest.approx(0.8 * 199 * 100 / STEP, abs=0.03)  # kernels back to back


@pytest.mark.parametrize("wait", [True, False])
def test_faster_kernels_shorten_the_wait_of_the_host(wait: bool) -> None:
    """Whether the call that waits is in the trace or not."""
    trace = gpu_paced(wait)
    found = replay(trace)
    assert found.error < 0.001
    assert found.saved(kernels(trace, 0.5)) == pytest.approx(9_000 / STEP, abs=0.02)
    assert found.saved(Cure(assumes="", launching=True)) == pytest.approx(0.0, abs=0.01)


def test_removed_host_time_counts_as_far_as_nothing_else_takes_its_place() -> None:
    trace = gpu_paced()
    rest = union([int((i * STEP + 18_200) * 1e3) for i in range(STEPS)],
                 [int((i * STEP + 19_200) * 1e3) for i in range(STEPS)])
    cure = Cure(assumes="", host={0: rest})
    assert replay(trace).saved(cure) == pytest.approx(1_000 / STEP, abs=0.01)
    assert replay(trace).saved(combined([cure, kernels(trace, 0.5)])) == pytest.approx(10_000 / STEP, abs=0.02)


def test_a_batch_comes_no_sooner_because_it_is_asked_for_sooner() -> None:
    b = keras_steps(Builder(), STEPS, STEP, STEP - 50)
    for i in range(STEPS):
        b.host("IteratorGetNextOp::DoCompute", i * STEP + 20, 8_000, line="launch 0")
        b.host("Iterator::Root::Prefetch::Map", i * STEP, 15_000, line="tf_data_private_threadpool/1")
        for k in range(100):
            at = i * STEP + 8_050 + 100 * k
            b.run(0, at + 5, 95, launch=at)
    trace = b.build()
    assert replay(trace).saved(Cure(assumes="", launching=True)) < 0.1
    assert replay(trace).saved(Cure(assumes="", input_left=0.0)) == pytest.approx(8_000 / STEP, abs=0.03)
    assert replay(trace).saved(Cure(assumes="", input_left=0.5)) == pytest.approx(4_000 / STEP, abs=0.03)


def test_a_collective_ends_when_the_last_gpu_has_come() -> None:
    b = keras_steps(Builder(gpus=2), STEPS, STEP, STEP - 50)
    for i in range(STEPS):
        for gpu in range(2):
            begin, length = i * STEP + 100, 8_000 + 4_000 * gpu
            b.run(gpu, begin, length, launch=begin - 5)
            b.run(gpu, begin + length, 16_000 - length, NCCL, kind=Kind.COLLECTIVE, launch=begin - 2)
            b.host("cuStreamSynchronize", begin + 5, 16_000, line=f"launch {gpu}")
    trace = b.build()
    found = replay(trace)
    both = np.flatnonzero(trace.device.kind == Kind.COMPUTE)
    late = both[trace.device.gpu[both] == 1]
    early = both[trace.device.gpu[both] == 0]
    assert found.saved(Cure(assumes="", scaled=((early, 0.5),))) == pytest.approx(0.0, abs=0.005)
    assert found.saved(Cure(assumes="", scaled=((late, 0.5),))) == pytest.approx(4_000 / STEP, abs=0.01)
    assert found.saved(Cure(assumes="", together=True)) == pytest.approx(4_000 / STEP, abs=0.03)


def test_an_event_that_waited_for_another_stream_waits_for_it_again() -> None:
    b = keras_steps(Builder(), STEPS, STEP, STEP - 50)
    for i in range(STEPS):
        begin = i * STEP + 100
        b.run(0, begin, 9_000, launch=begin - 5)
        b.run(0, begin + 9_002, 9_000, launch=begin - 3, stream=2)
        b.host("cuStreamSynchronize", begin + 5, 18_010, line="launch 0")
    trace = b.build()
    assert replay(trace).error < TOLERANCE
    assert replay(trace).saved(kernels(trace, 0.5)) == pytest.approx(9_000 / STEP, abs=0.01)


def test_what_a_trace_does_not_explain_is_an_error() -> None:
    """Half of the kernels begin milliseconds after their launch, and nothing ran before them."""
    b = keras_steps(Builder(), STEPS, STEP, STEP - 50)
    for i in range(STEPS):
        b.run(0, i * STEP + 100, 100, launch=i * STEP + 90)
        b.run(0, i * STEP + 12_000, 7_500, launch=i * STEP + 110)
        b.host("cuStreamSynchronize", i * STEP + 200, 19_310, line="launch 0")
    assert replay(b.build()).error > 0.5


@pytest.mark.parametrize("seed", range(8))
def test_nothing_changed_changes_nothing(seed: int) -> None:
    """Jobs of any kind: several streams and threads, unknown launches, waits."""
    rng = random.Random(seed)
    b = keras_steps(Builder(gpus=2), STEPS, STEP, STEP - 50)
    for gpu in range(2):
        free = [0.0] * 3
        host = 50.0
        while host < STEPS * STEP - 500:
            host += rng.expovariate(1 / 120)
            stream = rng.randrange(3)
            start = max(host + 5, free[stream], rng.choice(free))
            free[stream] = start + rng.expovariate(1 / 100)
            b.run(gpu, start, free[stream] - start, stream=stream, launch=host if rng.random() < 0.9 else None)
            if rng.random() < 0.05:
                b.host("cuStreamSynchronize", host + 5, max(free) - host, line=f"launch {gpu}")
                host = max(max(free), host + 5) + 5
    found = replay(b.build())
    assert found.saved(Cure(assumes="")) == 0.0
    assert found.saved(Cure(assumes="", launching=True, pauses=True, waits=np.array([-1]))) >= 0.0
