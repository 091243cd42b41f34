from __future__ import annotations

import numpy as np
import pytest

from gputop.analysis.steps.steps import find_steps
from gputop.analysis.steps.user_ranges import named_ranges
from gputop.trace.model import Trace
from tests.trace.build import Builder

STEP = 10_000.0
STEPS = 8
Ranges = list[tuple[str, float, float]]


def loop(ranges: Ranges, *, steps: int = STEPS, launch: tuple[float, float] = (1_000, 9_000)) -> Builder:
    """A loop of ``STEP`` µs in Nsight's report: in each step these ranges (begin and end), "#" in a name is the step's
    number, and 20 kernels that are launched from ``launch[0]`` to ``launch[1]``."""
    b = Builder(format="nsys")
    for step in range(steps):
        for name, begin, end in ranges:
            b.host(name.replace("#", str(step)), step * STEP + begin, end - begin)
        for time in np.linspace(*launch, 20).tolist():
            b.run(0, step * STEP + time + 20, 100, launch=step * STEP + time, thread="python")
    return b


def steps_of(trace: Trace) -> tuple[int, float, str] | None:
    """Count, median (ms) and anchor."""
    steps = find_steps(trace)
    return None if steps is None else (steps.count, round(steps.times.median_s * 1e3, 3), steps.times.anchor)


@pytest.mark.parametrize("name", ["token_#_processing", "request #", "Inference #/100 (warm)", "step # of 80"])
def test_ranges_that_number_an_iteration_by_other_words(name):
    assert steps_of(loop([(name, 500, 9_900)]).build()) == (
        7, 10.0, f'ranges "{name.replace("#", "N").replace("80", "N").replace("100", "N")}"')


@pytest.mark.parametrize("name", ["train_step", "[pl][profile]run_training_batch", "TrainStep", "decode_step",
                                  "Model Forward Pass", "process batch"])
def test_ranges_that_a_word_calls_the_step(name):
    parts = [("loader", 100, 400), (name, 500, 9_900), ("forward", 600, 4_000), ("backward", 4_100, 9_000)]
    assert steps_of(loop(parts).build()) == (7, 10.0, f'ranges "{name}"')


@pytest.mark.parametrize("mark", ["execute_context_0(0)_generation_{0}({0})", "step[DECODE bs={0}]",
                                  "[Executor] _forward_step {1}: 0 ctx reqs, {0} gen reqs"])
def test_the_steps_of_an_inference_engine_whose_numbers_are_sizes(mark):
    b = Builder(format="nsys")
    for step, size in enumerate((32, 32, 31, 8, 8, 32)):
        b.host(mark.format(size, step), step * STEP, STEP - 100)
        for i in range(20):
            b.run(0, step * STEP + i * 400 + 20, 300, launch=step * STEP + i * 400, thread="python")
    assert steps_of(b.build()) == (6, 10.0, "ranges of an inference engine's steps that decode")


TURNS = [("data", 0, 300), ("forward", 500, 3_500), ("backward", 3_600, 8_000), ("optimizer step", 8_100, 9_500)]


def test_parts_in_turn_are_a_step_from_the_first_part_behind_the_optimizer():
    assert steps_of(loop(TURNS).build()) == (7, 10.0, 'ranges "optimizer step" after the passes')
    accumulated = [("forward", 500, 2_000), ("backward", 2_100, 4_000), ("forward", 4_500, 6_000),
                   ("backward", 6_100, 8_000), ("optimizer step", 8_100, 9_500)]
    assert steps_of(loop(accumulated).build())[:2] == (7, 10.0)


def test_a_recording_that_begins_amid_a_step_leaves_that_out():
    trace = loop(TURNS, launch=(4_000, 9_000)).build()
    ranges = named_ranges(trace)
    assert ranges is not None and len(ranges.start_ns) == STEPS
    b = loop(TURNS, launch=(4_000, 9_000))
    b._host = [event for event in b._host if event[2] >= 3_550]
    ranges = named_ranges(b.build())
    assert ranges is not None and ranges.start_ns.tolist() == [round(i * STEP * 1000) for i in range(1, STEPS)]


def test_two_optimizers_in_each_step_are_one_step():
    b = Builder(format="nsys")
    for step in range(STEPS):
        for half, kernels in ((0, 8), (STEP / 2, 20)):
            for name, begin, end in TURNS[1:]:
                b.host(name, step * STEP + half + begin / 2, (end - begin) / 2)
            for i in range(kernels):
                time = step * STEP + half + 300 + i * 200
                b.run(0, time + 20, 100, launch=time, thread="python")
    assert steps_of(b.build())[:2] == (7, 10.0)


@pytest.mark.parametrize("ranges", [
    [("forward", 500, 9_900)], [("attention", 500, 5_000), ("mlp", 5_100, 9_900)], [("layer # step", 500, 9_900)],
    [("decoder layer 3 inference", 500, 9_900)], [("block#.forward", 500, 9_900)], [("test", 500, 9_900)],
    [("forward", 500, 5_000), ("backward", 5_100, 9_900)], [("dispatch(F)", 500, 5_000), ("attn(B)", 5_100, 9_900)],
    [("micro_batch # forward", 500, 9_900)], [("step # forward", 500, 5_000), ("step # backward", 5_100, 9_900)],
], ids=lambda ranges: ranges[0][0])
def test_layers_and_parts_alone_are_no_steps(ranges):
    assert named_ranges(loop(ranges).build()) is None


@pytest.mark.parametrize("b", [
    loop([("step", 8_500, 9_100)]), loop([("train_step", 500, 9_900)], steps=2),
    loop([("train_step", 500, 10_600)]),
    loop([("optimizer", 1_000, 2_000), ("optimizer", 3_000, 4_000), ("forward", 4_100, 9_000)]),
], ids=["few launches", "two ranges", "overlapping", "optimizers without a pass between"])
def test_ranges_that_do_not_hold_the_loop_are_none(b):
    assert named_ranges(b.build()) is None


def test_ranges_that_launch_unlike_amounts_or_little_of_all_are_none():
    b = Builder(format="nsys")
    for step, kernels in enumerate((1, 2, 4, 8, 16, 32, 64)):
        b.host("train_step", step * STEP, 9_000)
        for i in range(kernels):
            b.run(0, step * STEP + i * 100 + 20, 50, launch=step * STEP + i * 100, thread="python")
    assert named_ranges(b.build()) is None
    b = loop([("train_step", 500, 9_900)], steps=4)
    for i in range(200):
        b.run(0, 50_000 + i * 100, 50, launch=50_000 + i * 100, thread="python")
    assert named_ranges(b.build()) is None


@pytest.mark.parametrize("profiler", ["xspace", "chrome"])
def test_names_of_other_profilers_are_no_ranges_of_the_users(profiler):
    b = loop([("train_step", 500, 9_900)])
    b.format = profiler
    assert named_ranges(b.build()) is None


def test_numbered_ranges_are_preferred():
    trace = loop([("step #", 0, 10_000), ("train_step", 500, 9_900)]).build()
    assert steps_of(trace) == (8, 10.0, 'ranges "step N"')
