from __future__ import annotations

import random

import numpy as np
import pytest

from gputop.advice.trace.known_work import host_words
from gputop.analysis.gpu.device_time import timelines
from gputop.analysis.host.stack_lines import python_of
from gputop.analysis.host.wall_time import SAMPLED, divide, wall_time
from gputop.analysis.host.work_kinds import COMPILES
from gputop.analysis.results import WallPart, WallTime
from gputop.analysis.steps.steps import detect_steps
from gputop.core.findings import TraceNote
from gputop.trace.model import Trace
from tests.analysis.host.stack_samples import sampled
from tests.analysis.host.traces_of_epochs import MS, TEST, TRAIN, epochs, evaluate, train, with_stacks
from tests.analysis.host.wall_time_traces import overview_of, two_grains
from tests.diagnosis.real_traces import needs_data, trace_of
from tests.records import replace
from tests.trace.build import Builder


def divided(trace: Trace | Builder) -> WallTime:
    trace, steps = detect_steps(trace.build() if isinstance(trace, Builder) else trace)
    found = wall_time(divide(trace, timelines(trace), steps, python_of(trace)))
    assert found is not None
    return found


def seconds_by(wall: WallTime) -> dict[str, float]:
    out: dict[str, float] = {}
    for part in wall.parts:
        out[part.id] = out.get(part.id, 0.0) + part.time_s
    return out


def longest_pause(trace: Trace | Builder) -> WallPart:
    return max((part for part in divided(trace).parts if part.id == "between"), key=lambda part: part.time_s)


def test_epochs_are_divided_without_a_rest():
    wall = divided(epochs())
    parts = seconds_by(wall)
    assert wall.total_s == pytest.approx(sum(part.time_s for part in wall.parts), abs=1e-12)
    # Up to the begin of the next: of an epoch's eight steps, and of the last one the one that has a next.
    assert parts["steps"] == pytest.approx(0.33, rel=0.01) and parts["evaluation"] == pytest.approx(0.08, rel=0.02)
    (pause,) = (part for part in wall.parts if part.id == "between")
    assert (pause.time_s, pause.count, pause.every_steps) == (pytest.approx(1.2, rel=0.01), 4, 8)
    assert pause.kind == "python" and pause.silent_s == pytest.approx(pause.time_s)
    assert pause.longest_s == pytest.approx(0.3, rel=0.01)
    # Wall time counts what lies between the steps.
    assert wall.per_step_s == pytest.approx((0.32 + 0.08 + 1.2) / 33, rel=0.05)


def test_the_end_of_an_epoch_without_an_evaluation_is_no_part_of_its_last_step():
    b, at = Builder(gpus=0), 0.0
    for _ in range(4):
        end = train(b, at, 8)
        b.host("SaveV2", end, 290 * MS)
        at = end + 300 * MS
    train(b, at, 2)
    wall = divided(b)
    (pause,) = (part for part in wall.parts if part.id == "between")
    assert (pause.kind, pause.count, pause.every_steps) == ("checkpoint", 4, 8)
    assert pause.time_s == pytest.approx(1.2, rel=0.01) and seconds_by(wall)["steps"] == pytest.approx(0.33, rel=0.02)


def with_pauses(names: tuple[str, ...], long_ms: float = 80.0, other: str = "") -> Builder:
    """Steps of 30 ms, 20 of which the host works behind the call; three such pauses take ``long_ms``, with ``other``
    work if it has a name."""
    b, at = Builder(gpus=0), 0.0
    for i in range(31):
        end, pause = train(b, at, 1), (long_ms if i % 10 == 5 else 20.0) * MS
        work = (other,) if other and i % 10 == 5 else names
        for k, name in enumerate(work):
            b.host(name, end + k * pause / len(work), pause / len(work))
        at = end + pause
    return b


@pytest.mark.parametrize(("names", "other", "outside"), [
    (("TFE_Py_FastPathExecute_C",), "", False),  # the same work took longer this time
    (("TFE_Py_FastPathExecute_C",), "SaveV2", True), ((), "SaveV2", True),
])
def test_a_pause_with_the_work_of_every_pause_belongs_to_its_step(names, other, outside):
    assert ("between" in seconds_by(divided(with_pauses(names, other=other)))) == outside


def test_pauses_within_the_usual_spread_belong_to_their_steps():
    b, at, dice = Builder(gpus=0), 0.0, random.Random(2)
    for _ in range(60):
        at = train(b, at, 1) + dice.uniform(10, 70) * MS
    assert "between" not in seconds_by(divided(b))


def test_pauses_in_which_a_gpu_works_or_the_loop_waits_belong_to_the_steps():
    b, at = Builder(), 0.0
    for step in range(32):
        length = 300 * MS if step % 8 == 7 else 10 * MS
        b.host("EagerExecute", at, 9 * MS, is_func=1, eager_op=TRAIN)
        b.run(0, at + 1 * MS, length - 2 * MS, launch=at + 1)
        at += length
    assert "between" not in seconds_by(divided(b))


@pytest.mark.parametrize("saves", [False, True])
def test_what_xla_computes_on_the_cpu_after_the_call_is_the_steps(saves):
    b, at = Builder(gpus=0), 0.0
    for step in range(32):
        b.host("PjitFunction(train_step)", at, 0.1 * MS)
        b.host("ThunkExecutor::Execute", at + 1 * MS, 9 * MS, line="tf_XLAPjRtCpuClient/1")
        at += (40 if saves and step % 8 == 7 else 10.1) * MS
    parts = seconds_by(divided(b))
    assert parts.get("between", 0) == (pytest.approx(0.09, rel=0.02) if saves else 0)
    assert parts["steps"] == pytest.approx(0.31, rel=0.05)


def test_a_pause_behind_the_last_whole_step_is_not_joined_with_the_partial_step_after_it():
    b, at = Builder(gpus=0), 0.0
    for _ in range(2):
        at = train(b, at, 8) + 300 * MS
    b.host("EagerExecute", at, 9 * MS, is_func=1, eager_op=TRAIN)
    parts = seconds_by(divided(b))
    assert parts["between"] == pytest.approx(0.6, rel=0.01) and parts["edges"] == pytest.approx(0.009, rel=0.01)


@pytest.mark.parametrize(("events", "kind", "what"), [
    (("SaveV2", "MergeV2Checkpoints"), "checkpoint", "MergeV2Checkpoints"),
    (("WriteScalarSummary",), "summary", "WriteScalarSummary"),
    (("tf.function-graph_building",), "compilation", "tf.function-graph_building"),
    (("backend_compile_and_load",), "compilation", "backend_compile_and_load"), (("py_hash",), "op", "py_hash"),
])
def test_what_the_host_did_names_a_pause(events, kind, what):
    pause = longest_pause(epochs(events=events))
    assert (pause.kind, pause.what) in {(kind, what), (kind, events[0])}
    assert pause.work[0].name in events and pause.work[0].count == 4


@pytest.mark.parametrize(("histograms", "named"), [
    (False, ("checkpoint", "ReadVariableOp")), (True, ("summary", "OneHot"))])
def test_reading_many_variables_is_a_checkpoint_but_for_histograms(histograms, named):
    b, apart = epochs(), (20 if histograms else 1) * MS
    starts = [e[2] for e in b._host if dict(e[4]).get("eager_op") == TEST]
    for first in starts[3::4]:  # in the pause behind each evaluation
        for at in (first + 6 * MS + i * apart for i in range(12)):
            b.host("ReadVariableOp", at, 50)
            if histograms:
                b.host("OneHot", at + 1 * MS, 17 * MS).host("WriteSummary", at + 19 * MS, 500)
    pause = longest_pause(b)
    assert (pause.kind, pause.what) == named


def test_loops_of_ops_that_read_their_variables_save_no_checkpoint():
    """Without steps, and without a function where one step takes long."""
    b, at = Builder(gpus=0), 0.0
    for i in range(40):
        b.host("TFE_Py_FastPathExecute_C", i * 100 * MS, 300).host("ReadVariableOp", i * 100 * MS + 300, 50)
        b.host("MatMul", i * 100 * MS + 400, 50).host("Mul", i * 100 * MS + 500, 50)
    assert {(part.id, part.kind == "checkpoint") for part in divided(b).parts} == {("no_steps", False)}
    b = Builder(gpus=0)
    for step in range(20):
        b.host("EagerExecute", at, 100, eager_op="IteratorGetNext", is_func=0)
        pause = (400 if step == 10 else 30) * MS
        for i in range(20):
            b.host("EagerLocalExecute: ReadVariableOp", at + 200 + i * pause / 20, 50)
        at += 200 + pause
    assert not {"checkpoint"} & {part.kind for part in divided(b).parts}


def test_a_line_of_python_names_a_pause():
    pause = longest_pause(with_stacks(epochs().build(), 11))
    assert (pause.kind, pause.what, pause.count) == ("line", "train.py:11 Save.on_epoch_end", 4)


def test_a_pause_is_named_though_the_recording_ends_in_the_next_one():
    b = Builder(gpus=0)
    for step in range(24):
        b.host("PjitFunction(step)", step * 20 * MS + (1500 * MS if step > 11 else 0), 15 * MS)
    b.host("block_until_ready", 3480 * MS, 100)
    named = {part.id: part.what for part in divided(with_stacks(b.build(), 9)).parts if part.kind == "line"}
    assert named == dict.fromkeys(("between", "open"), "train.py:9 Save.on_epoch_end")


def test_the_first_evaluation_at_the_end_of_a_recording_is_compiled():
    b = Builder(gpus=0)
    for step in range(24):
        b.host("PjitFunction(step)", step * 20 * MS, 15 * MS)
    b.host("PjitFunction(evaluate)", 480 * MS, 900 * MS).host("backend_compile_and_load", 500 * MS, 850 * MS)
    part = next(part for part in divided(b).parts if part.kind == "compilation")
    assert (part.what, host_words(part)) == ("evaluate", "tracing or compiling a function (evaluate)")


@pytest.mark.parametrize(("where", "compiles"), [
    ("/x/site-packages/jax/_src/compiler.py jax/…/compiler.py:353 backend_compile_and_load", True),
    ("/x/torch/_inductor/codecache.py torch/…/codecache.py:99 CppCodeCache.load_async.compile", True),
    ("/x/torch/_dynamo/eval_frame.py torch/…/eval_frame.py:655 compile_wrapper", False),
    ("/home/me/compiler.py compiler.py:3 run", False)])
def test_a_call_that_compiles_and_has_not_ended_is_told_by_its_line(where, compiles):
    assert (COMPILES.search(where) is not None) == compiles


def test_a_wrapper_of_a_library_names_nothing_and_ends_the_evaluation():
    wrapped = with_stacks(epochs().build(), 117, "/x/site-packages/keras/src/utils/traceback_utils.py")
    parts = seconds_by(divided(wrapped))
    # No callback runs in the pause: Keras' evaluate returns, and frees what it has used.
    assert "between" not in parts and parts["evaluation"] == pytest.approx(0.08 + 1.2, rel=0.02)
    pause = longest_pause(with_stacks(epochs().build(), 117,
                                      "/x/site-packages/keras/src/callbacks/model_checkpoint.py"))
    assert pause.kind == "line" and "model_checkpoint.py" in pause.what


@pytest.mark.parametrize(("file", "function", "what"), [
    ("lightning/pytorch/callbacks/model_checkpoint.py", "ModelCheckpoint._save_topk_checkpoint",
     "lightning/…/model_checkpoint.py:591 ModelCheckpoint._save_topk_checkpoint"),
    ("torch/serialization.py", "save", "torch/serialization.py:591 save"),
    ("transformers/trainer.py", "Trainer._save_checkpoint", "transformers/trainer.py:591 Trainer._save_checkpoint"),
    ("torch/serialization.py", "load", "line fsspec/…/local.py:480 write"),
    ("torch/utils/checkpoint.py", "CheckpointFunction.save_inputs", "line fsspec/…/local.py:480 write"),
    ("numpy/lib/npyio.py", "save", "line numpy/…/npyio.py:591 save")])
def test_a_library_that_saves_is_named_and_not_what_it_writes_with(file: str, function: str, what: str) -> None:
    traced = with_stacks(epochs().build(), 591, f"/x/site-packages/{file}", function=function,
                         library="/x/site-packages/fsspec/implementations/local.py")
    pause = longest_pause(traced)
    kind, line = ("line", what.removeprefix("line ")) if what.startswith("line ") else ("checkpoint", what)
    assert (pause.kind, pause.what) == (kind, line)


def test_a_loop_that_waits_for_a_batch_by_its_stacks_waits_for_input():
    pause = longest_pause(with_stacks(epochs().build(), 3478, function="iterator_get_next",
                                      file="/x/site-packages/tensorflow/python/ops/gen_dataset_ops.py"))
    assert (pause.kind, pause.what) == ("input", "")


def test_begin_and_end_are_the_profilers_own():
    b = Builder(gpus=0)
    train(b, 0, 20)
    trace = replace(b.build(), rank_windows_ns={0: (-int(2e9), int(3e9))}, profile_window_ns=(-int(2e9), int(3e9)))
    wall = divided(trace)
    parts = seconds_by(wall)
    assert wall.known_by == "profiler" and wall.recorded_s == 5.0
    # No step for 2 s before the first and 2.8 s after the last: something that had begun before, or had not ended.
    assert parts["open"] == pytest.approx(4.81, rel=0.01) and parts["steps"] == pytest.approx(0.19)
    assert all(part.kind == "python" for part in wall.parts if part.id == "open")


def test_a_wait_for_a_batch_that_did_not_come_is_told_by_the_input_pipelines_threads():
    b = Builder(gpus=0)
    train(b, 0, 20)
    for i in range(200):  # a shuffle buffer that fills
        b.host("Iterator::Shuffle::Map", 205 * MS + i * 10 * MS, 9.9 * MS, line="tf_data_private_threadpool/1")
    wall = divided(b)
    (left,) = (part for part in wall.parts if part.id == "open")
    assert left.kind == "input" and left.time_s == pytest.approx(2.0, rel=0.02)


def test_partial_steps_at_the_edges_are_no_open_wait():
    b = Builder(gpus=0)
    end = train(b, 15 * MS, 20)
    b.host("x", 0, 10).host("x", end + 10 * MS, 10)
    assert set(seconds_by(divided(b))) == {"steps", "edges"}


def test_gpu_work_between_steps_is_not_the_hosts():
    b = epochs()
    b.gpus = 1
    trace = b.build()
    pauses = [part for part in divided(trace).parts if part.id == "between"]
    assert pauses
    for step in range(34):
        b.run(0, step * 10 * MS, 5 * MS, launch=step * 10 * MS + 1)
    b.run(0, 100 * MS, 250 * MS, launch=50 * MS)  # over most of the first pause
    parts = seconds_by(divided(b))
    assert parts["gpu_work"] > 0.1 and parts["between"] < sum(part.time_s for part in pauses)


def test_without_steps_the_idle_time_of_the_gpus_is_the_hosts():
    b = Builder().run(0, 0, 20 * MS, launch=0)
    b.host("cudaLaunchKernel", 30 * MS, 900 * MS, line="launch 0").run(0, 940 * MS, 10 * MS, "k2", launch=30 * MS + 1)
    wall = divided(b)
    parts = seconds_by(wall)
    assert parts["no_steps"] == pytest.approx(0.92, rel=0.01) and parts["gpu_work"] == pytest.approx(0.03)
    (idle,) = (part for part in wall.parts if part.id == "no_steps")
    assert (idle.kind, idle.what) == ("op", "cudaLaunchKernel")


def test_what_was_not_recorded_is_its_own_part():
    b = Builder(gpus=0)
    train(b, 0, 20)
    train(b, 1000 * MS, 20)
    trace = replace(b.build(), unrecorded_ns=((int(0.2e9), int(1.0e9)),))
    parts = seconds_by(divided(trace))
    assert parts["unrecorded"] == pytest.approx(0.8)
    clipped = replace(b.build(), quality=[TraceNote("clipped", "")], rank_windows_ns={0: (0, int(3e9))})
    assert seconds_by(divided(clipped))["unrecorded"] == pytest.approx(3.0 - 1.2, rel=0.01)


def test_the_profilers_own_begin_and_end_are_no_work_of_the_job_whatever_lies_before_its_end():
    b = Builder(gpus=0).host("$profiler.py:101 start_trace", 0, 900 * MS)
    end = train(b, 900 * MS, 20)
    parts = seconds_by(divided(b))
    assert parts["profiler"] == pytest.approx(0.9) and "open" not in parts
    b.host("$train.py:9 save", end, 300 * MS).host("$profiler.py:213 stop_trace", end + 300 * MS, 200 * MS)
    parts = seconds_by(divided(b))
    assert parts["profiler"] == pytest.approx(0.9 + 0.2) and parts["open"] == pytest.approx(0.3, rel=0.05)


def two_ranks(job: Builder) -> Trace:
    """The job on two hosts that do the same at the same time."""
    trace = job.build()
    lines = [*trace.lines, *(replace(line, rank=1, host="other") for line in trace.lines)]
    two = trace.host
    both = type(two)(
        np.concatenate([two.line, two.line + len(trace.lines)]), np.tile(two.name, 2), np.tile(two.start_ns, 2),
        np.tile(two.end_ns, 2))
    order = np.argsort(both.start_ns, kind="stable")
    both = type(two)(*(column[order] for column in (both.line, both.name, both.start_ns, both.end_ns)))
    place = np.argsort(order)
    both.stats = {name: (np.sort(np.concatenate([place[rows], place[rows + len(two)]])), np.repeat(values, 2))
                  for name, (rows, values) in two.stats.items()}
    return replace(trace, lines=lines, host=both, hosts=["node", "other"])


def test_each_rank_has_its_own_division():
    wall = divided(replace(two_ranks(epochs()), rank_windows_ns={1: (0, int(3e9))}))
    assert [rank.rank for rank in wall.ranks] == [0, 1] and wall.ranks[1].recorded_s == 3.0
    for rank in wall.ranks:
        assert sum(part.time_s for part in rank.parts) == pytest.approx(rank.total_s, abs=1e-12)
    assert wall.recorded_s == pytest.approx((wall.ranks[0].recorded_s + 3.0) / 2)
    assert sum(part.time_s for part in wall.parts) == pytest.approx(wall.total_s, abs=1e-12)


@pytest.mark.parametrize("seed", range(60))
def test_the_parts_sum_to_the_recording_whatever_is_in_it(seed):
    rng = random.Random(seed)
    b = Builder(gpus=rng.choice((0, 0, 1, 2)))
    at = rng.uniform(0, 50) * MS
    for _ in range(rng.randrange(1, 6)):
        kind = rng.random()
        if kind < 0.6:
            at = train(b, at, rng.randrange(1, 12), rng.uniform(2, 20) * MS)
        elif kind < 0.8:
            at = evaluate(b, at, rng.randrange(1, 12), rng.uniform(1, 9) * MS)
        else:
            b.host(rng.choice(("SaveV2", "x", "tf.function-graph_building", "HLO Transforms:x")), at,
                   rng.uniform(1, 80) * MS)
        at += rng.choice((0.0, 0.1, 5.0, 200.0)) * MS
    for gpu in range(b.gpus):
        for _ in range(rng.randrange(0, 40)):
            start = rng.uniform(0, at + MS)
            b.run(gpu, start, rng.uniform(0.01, 30) * MS, launch=start - min(start, 20), stream=rng.randrange(3))
    trace = b.build(seed)
    end = trace.window_ns[1]
    if rng.random() < 0.5:
        trace.rank_windows_ns = {0: (-rng.randrange(10**9), end + rng.randrange(10**9))}
    if rng.random() < 0.3:
        begin = rng.randrange(max(end, 1))
        trace.unrecorded_ns = ((begin, rng.randrange(begin, end + 1)),)
    judged, _ = detect_steps(trace)
    if judged.window_ns[0] == judged.window_ns[1]:  # nothing was recorded but what is missing
        return
    wall = divided(trace)
    assert sum(part.time_s for part in wall.parts) == pytest.approx(wall.total_s, rel=1e-12, abs=1e-12)
    assert all(part.time_s > 0 for part in wall.parts) and wall.total_s > 0


@needs_data
def test_kineto_tells_when_it_began_and_ended():
    wall = divided(trace_of("a100"))
    # "PyTorch Profiler (0)" of the file: 696.2 ms, and kernels go on for 17 ms after it.
    assert wall.known_by == "profiler" and wall.recorded_s == pytest.approx(0.713, abs=0.001)


def test_an_overview_is_divided_like_the_trace():
    detail = Builder(gpus=0)
    evaluate(detail, train(detail, 0, 30) + 100, 4)
    wall = divided(two_grains(detail, epochs(), by_s=0.5))
    parts = seconds_by(wall)
    # The overview shows no op: the trace tells which function trains.
    assert parts["steps"] == pytest.approx(0.29 + 0.33, rel=0.03) and parts["evaluation"] > 0.09
    assert parts["between"] == pytest.approx(1.2, rel=0.02)
    assert parts["unrecorded"] == pytest.approx(0.5 - 0.3199, rel=0.02)
    assert wall.total_s == pytest.approx(sum(part.time_s for part in wall.parts), abs=1e-12)
    (steps,) = (part for part in wall.parts if part.id == "steps")
    assert steps.count == 30 + 33
    assert wall.per_step_s == pytest.approx((0.3 + 0.32 + 0.08 + 1.2) / 63, rel=0.05)
    assert len(wall.pauses_s) == 29 and wall.overview is not None and wall.steps == 63
    assert len(wall.overview.pauses_s) + 1 == len(wall.overview.durations_s) == 33


def of_rank(overview: Trace, rank: int) -> Trace:
    return replace(overview, lines=[replace(line, rank=rank) for line in overview.lines],
                   rank_windows_ns={rank: overview.rank_windows_ns[0]})


def test_each_rank_has_the_overview_of_its_own():
    """One saves between its steps, the other waits for it within a step, as in any collective."""
    saving, waiting, detail = epochs(events=("SaveV2",)), Builder(gpus=0), Builder(gpus=0)
    at = 0.0
    for _ in range(4):
        at = train(waiting, at, 7)
        at = train(waiting, at + 100, 1, 330 * MS) + 100
    train(waiting, at, 2)
    train(detail, 0, 30)
    trace = two_ranks(detail)
    end = trace.window_ns[1]
    overviews = {0: of_rank(overview_of(saving, by_s=0.5), 0), 1: of_rank(overview_of(waiting, by_s=0.5), 1)}
    wall = divided(replace(trace, rank_windows_ns={0: (0, end), 1: (0, end)}, overviews=overviews))
    by_rank = [{(part.id, part.kind): part.time_s for part in rank.parts} for rank in wall.ranks]
    assert by_rank[0]["between", "checkpoint"] == pytest.approx(1.2, rel=0.02)
    assert ("between", "checkpoint") not in by_rank[1] and by_rank[1]["steps", ""] > 1.5
    assert all(rank[("unrecorded", "")] == pytest.approx(0.2, rel=0.02) for rank in by_rank)
    for one in (wall, *wall.ranks):
        assert sum(part.time_s for part in one.parts) == pytest.approx(one.total_s, rel=1e-12)
    assert wall.overview is not None and len(wall.overview.durations_s) == 33, "of one rank: both show the same steps"
    alone = divided(replace(trace, rank_windows_ns={0: (0, end), 1: (0, end)}, overviews={1: overviews[1]}))
    assert alone.ranks[0].total_s == pytest.approx(0.3, rel=0.02) and alone.ranks[1].total_s > 1.5


def test_the_python_of_one_process_names_nothing_of_another_rank():
    trace = two_ranks(epochs())
    one = with_stacks(trace, 11)
    assert not any("train.py:11" in part.what for part in divided(one).parts), "of which rank is not known"
    both = replace(one, stacks=one.stacks * 2)
    assert any("train.py:11" in part.what for part in divided(both).parts)


def test_steps_that_only_the_overview_shows():
    detail = Builder(gpus=0).host("EagerExecute", 0, 4000 * MS, is_func=1, eager_op=TRAIN)
    long = Builder(gpus=0)
    train(long, 0, 5, 4000 * MS)
    parts = seconds_by(divided(two_grains(detail, long, by_s=4.1)))
    # Four whole steps, and the call of the detail, which is one by itself.
    assert parts["steps"] == pytest.approx(20.0, rel=0.01) and "no_steps" not in parts
    early = Builder(gpus=0).host("convert_to_tensor", 0, 10).host("convert_to_tensor", 2000 * MS, 10)
    parts = seconds_by(divided(two_grains(early, long, by_s=2.1)))
    assert parts["steps"] == pytest.approx(16.0, rel=0.01) and parts["edges"] > 2.0 and "no_steps" not in parts


def in_samples(line: str, pause: tuple[float, float] = (3.0, 5.0), each: tuple[str, ...] = ()) -> Trace:
    """Detail of 0.3 s; an overview of 0.25 s, and every 0.4 s one of 20 ms, with steps in all but the pause.
    Stacks are of all of it, in turns with those of ``each`` while steps run."""
    detail, overview = Builder(gpus=0), Builder(gpus=0)
    train(detail, 0, 30)
    train(overview, 0, 25)
    begins = [0.4 * n for n in range(2, 20)]
    for begin in begins:
        if not pause[0] <= begin + 0.5 < pause[1]:
            train(overview, begin * 1e3 * MS, 2)
    cuts = [0.75, *(edge + 0.5 for begin in begins for edge in (begin, begin + 0.02))][:-1]
    trace = two_grains(detail, overview, by_s=0.5)
    (rare,) = trace.overviews.values()
    rare = replace(rare, unrecorded_ns=tuple((round(a * 1e9), round(b * 1e9)) for a, b in zip(
        cuts[::2], cuts[1::2], strict=True)))
    steps = [(t / 100, each[t % len(each)] if each else "train.py:3 main > tensorflow/execute.py:53 quick_execute")
             for t in range(820)]
    stacks = [one for one in steps if not pause[0] <= one[0] < pause[1]] + [(pause[0], line)]
    return replace(trace, overviews={0: rare}, origin_ns=1000 * 10**9,
                   stacks=(sampled({"MainThread": sorted(stacks)}, 8.2),))


@pytest.mark.parametrize("each", [
    (), tuple(f"train.py:{3 + n % 2} main > jax/ufunc_api.py:{n} call" for n in range(40)),
    tuple(f"train.py:{20 + n} main" for n in range(40))])
def test_stacks_tell_of_the_time_between_an_overviews_samples(each):
    wall = divided(in_samples("train.py:5 main > train.py:11 Save.on_epoch_end", each=each))
    (pause,) = (part for part in wall.parts if part.id == "between")
    assert (pause.what, pause.count) == ("train.py:11 Save.on_epoch_end", 1)
    assert pause.time_s == pytest.approx(2.0, abs=0.02)
    (seen,) = (part for part in wall.parts if part.kind == SAMPLED)
    assert seen.id == "steps" and seen.time_s == pytest.approx(seen.count * 0.01, rel=0.1) and 4.8 < seen.time_s < 5.3
    assert wall.recorded_s == pytest.approx(wall.total_s - 0.2, abs=0.01)
    assert wall.total_s == pytest.approx(sum(part.time_s for part in wall.parts), abs=1e-12)


@pytest.mark.parametrize(("called", "phase"), [
    ("keras/src/backend/tensorflow/trainer.py:510 TensorFlowTrainer.evaluate", "evaluation"),
    ("train.py:40 validate", "evaluation"), ("train.py:50 Report.predict_on_batch", "prediction"),
    ("train.py:60 evaluate_cost", "between")])
def test_loops_of_evaluations_between_samples_are_told_by_their_functions(called, phase):
    parts = seconds_by(divided(in_samples(f"train.py:3 main > {called} > tensorflow/execute.py:53 quick_execute")))
    assert parts[phase] == pytest.approx(2.0, abs=0.02)


def test_torn_stacks_of_short_steps_are_no_pause():
    """Each sample of the stacks is of several moments: no two in a row have the same call."""
    torn = [f"train.py:3 main > x/y.py:{n} f" for n in range(60)]
    trace = in_samples(torn[0], each=tuple(torn))
    stacks = [(t / 100, torn[t % 60] if t % 60 < 30 else torn[t * 7 % 60]) for t in range(820)]
    wall = divided(replace(trace, stacks=(sampled({"MainThread": stacks}, 8.2),)))
    assert "between" not in seconds_by(wall)


@pytest.mark.parametrize("seed", range(20))
def test_the_parts_of_a_sampled_overview_sum_to_it(seed):
    rng = random.Random(seed)
    begin = rng.uniform(0.2, 7.5)
    trace = in_samples(rng.choice((
        "train.py:3 main > train.py:11 Save.on_epoch_end", "train.py:3 main > train.py:40 validate > x/y.py:3 f", "",
        "train.py:3 main > keras/src/backend/tensorflow/trainer.py:397 TensorFlowTrainer.fit")),
        (begin, begin + rng.uniform(0.05, 4.0)),
        tuple(f"train.py:{3 + n % 3} main > x/y.py:{n} f" for n in range(rng.choice((0, 2, 10, 40)))))
    if rng.random() < 0.7:
        (overview,) = trace.overviews.values()
        cuts = sorted(rng.randrange(500_000_000, 8_300_000_000) for _ in range(2 * rng.randrange(1, 12)))
        trace = replace(trace, overviews={0: replace(overview, unrecorded_ns=tuple(zip(
            cuts[::2], cuts[1::2], strict=True)))})
    wall = divided(trace)
    assert sum(part.time_s for part in wall.parts) == pytest.approx(wall.total_s, rel=1e-12)
    assert all(part.time_s > 0 for part in wall.parts)


@pytest.mark.parametrize(("line", "each", "kind"), [
    ("train.py:3 main > keras/src/backend/tensorflow/trainer.py:397 TensorFlowTrainer.fit", (), "freeing"),
    ("train.py:5 main", ("train.py:5 main > tensorflow/python/data/ops/iterator_ops.py:826 OwnedIterator.__next__",
                         "train.py:6 main > tensorflow/execute.py:53 quick_execute"), "freeing"),
    ("train.py:5 main", ("train.py:6 main > tensorflow/execute.py:53 quick_execute",), "line")])
def test_a_line_that_drops_an_iterator_shows_no_event_and_calls_nothing(line, each, kind):
    wall = divided(in_samples(line, each=each))
    assert [part.kind for part in wall.parts if part.id == "between"] == [kind]


@pytest.mark.parametrize("changes", [
    {"pause": (3.0, 3.2)},  # too short to be sure
    {"line": "train.py:3 main > tensorflow/execute.py:53 quick_execute"}])  # a step that takes longer
def test_stacks_that_steps_have_too_tell_of_no_pause(changes):
    wall = divided(in_samples(**{"line": "train.py:3 main > train.py:11 Save.on_epoch_end", **changes}))
    assert "between" not in seconds_by(wall)


def test_an_overview_without_a_step_is_open_and_one_of_an_instant_changes_nothing():
    detail = Builder(gpus=0)
    train(detail, 0, 30)
    silent = Builder(gpus=0).host("convert_to_tensor", 0, 10).host("convert_to_tensor", 5000 * MS, 10)
    assert seconds_by(divided(two_grains(detail, silent, by_s=0.4)))["open"] == pytest.approx(5.0, rel=0.01)
    instant = two_grains(detail, Builder(gpus=0).host("x", 0, 0), by_s=0.4)
    assert divided(instant).recorded_s == pytest.approx(0.3, rel=0.01)


def test_an_overview_of_other_steps_is_not_used():
    detail = Builder(gpus=0)
    for i in range(20):
        detail.host("train", i * 10 * MS, 9 * MS, step_num=i, _r=1)
    wall = divided(two_grains(detail, epochs(), by_s=0.4))
    assert wall.recorded_s == pytest.approx(0.199) and set(seconds_by(wall)) <= {"steps", "edges"}


def test_the_time_in_which_the_profiler_stops_is_no_unfinished_step():
    b = Builder(gpus=0)
    end = train(b, 0, 20)
    trace = replace(b.build(), rank_windows_ns={0: (0, round(end * 1000) + int(0.6e9))})
    wall = divided(trace)
    assert "open" not in seconds_by(wall) and wall.recorded_s == pytest.approx(end / 1e6)


def test_the_last_call_has_ended_and_is_no_part_of_an_unfinished_step():
    b = Builder(gpus=0)
    train(b, 0, 20)
    b.host("EagerExecute", 200 * MS, 24 * MS, is_func=1, eager_op=TRAIN)
    b.host("gradient_tape/x/MatMul:MatMul", 226 * MS, 14 * MS, line="tf_Compute/1")  # of the next one
    assert "open" not in seconds_by(divided(b))
    b.host("gradient_tape/x/MatMul:MatMul", 226 * MS, 60 * MS, line="tf_Compute/1")
    (left,) = (part for part in divided(b).parts if part.id == "open")
    assert left.time_s == pytest.approx(0.062, rel=0.01)


@pytest.mark.parametrize("last", ["FlushSummaryWriter", "TFE_Py_FastPathExecute_C"])
def test_what_tensorboards_callback_writes_where_it_ends_the_recording_is_no_unfinished_step(last: str):
    b = Builder(gpus=0)
    end = train(b, 0, 20)
    b.host("WriteSummary", end + 700 * MS, 2 * MS).host("FlushSummaryWriter", end + 800 * MS, 20 * MS)
    b.host(last, end + 830 * MS, 1 * MS)
    parts = seconds_by(divided(b))
    of_callback, other = ("profiler", "open") if last == "FlushSummaryWriter" else ("open", "profiler")
    assert parts[of_callback] == pytest.approx(0.831, rel=0.01) and other not in parts


@pytest.mark.parametrize(("thread", "kind"), [("julia", "silent"), ("python", "python")])
def test_only_a_program_of_python_runs_python_without_an_event(thread: str, kind: str):
    b = Builder(gpus=0).host("PjRtStreamExecutorLoadedExecutable::Execute", 0, 6 * MS, line=thread)
    b.host("BufferFromHostBuffer", 90 * MS, 1 * MS, line=thread)
    (part,) = divided(b).parts
    assert (part.id, part.kind) == ("no_steps", kind)


def test_an_overview_of_one_instant_changes_nothing():
    detail = Builder(gpus=0)
    train(detail, 0, 30)
    trace = two_grains(detail, Builder(gpus=0).host("x", 0, 0), by_s=0.4)
    assert divided(trace).recorded_s == pytest.approx(0.3, rel=0.01)


def test_reading_many_variables_in_silence_is_a_checkpoint():
    b = epochs()
    starts = [e[2] for e in b._host if dict(e[4]).get("eager_op") == TEST]
    for at in starts[3::4]:  # in the pause behind each evaluation
        for i in range(12):
            b.host("ReadVariableOp", at + 6 * MS + i * MS, 50)
    pause = max((p for p in divided(b).parts if p.id == "between"), key=lambda part: part.time_s)
    assert (pause.kind, pause.what) == ("checkpoint", "ReadVariableOp")


def test_reading_many_variables_for_histograms_is_no_checkpoint():
    b = epochs()
    starts = [e[2] for e in b._host if dict(e[4]).get("eager_op") == TEST]
    for at in starts[3::4]:
        for i in range(12):
            b.host("ReadVariableOp", at + 6 * MS + i * 20 * MS, 50).host("OneHot", at + 7 * MS + i * 20 * MS, 17 * MS)
            b.host("WriteSummary", at + 25 * MS + i * 20 * MS, 500)
    pause = max((p for p in divided(b).parts if p.id == "between"), key=lambda part: part.time_s)
    assert (pause.kind, pause.what) == ("summary", "OneHot")


def test_warm_up_steps_are_the_start():
    b = Builder(gpus=0)
    b.host("EagerExecute", 0, 990 * MS, is_func=1, eager_op=TRAIN)
    train(b, 1000 * MS, 20)
    parts = seconds_by(divided(b))
    assert parts["start"] == pytest.approx(1.0)
