"""A DataLoader's epochs: workers that are started anew, one odd batch, fit() for each piece of data; times are
microseconds."""

from __future__ import annotations

import pytest

from gputop.analysis.steps.pytorch_ops import workers_started
from gputop.analysis.steps.steps import find_steps
from gputop.core.findings import Finding
from gputop.diagnosis.diagnose import analyze_trace
from tests.analysis.steps.pytorch_loop import Loop
from tests.trace.build import Builder, keras_steps

NEXT = "enumerate(DataLoader)#_{}DataLoaderIter.__next__"
MANY, ONE = NEXT.format("MultiProcessing"), NEXT.format("SingleProcess")


def epochs(first_us: float, *, batches: int = 10, count: int = 6, name: str = MANY, start_us: float = 60_000,
           end_us: float = 20_000, trains: bool = True) -> Loop:
    """Epochs whose first batch takes ``first_us``, and a start of the workers between two of them."""
    loop = Loop()
    for _ in range(count):
        for batch in range(batches):
            loop.op(name, first_us if batch == 0 else 300).step().forward()
            if trains:
                loop.zero().backward().update()
            loop.sleep(300)
        loop.op(name, end_us)  # finds no further batch
        loop.op("aten::empty").op("aten::random_").op("aten::item", pause=start_us)
    return loop


def findings(loop: Loop) -> dict[str, Finding]:
    return {finding.id: finding for finding in analyze_trace(loop.b.build()).findings}


@pytest.mark.parametrize("batches", [4, 10, 40])
def test_workers_that_each_epoch_starts_anew(batches):
    loop = epochs(40_000, batches=batches)
    _, anew = workers_started(loop.b.build())
    assert len(anew.start) == 5 and anew.total == pytest.approx(5 * 120_000_000, rel=0.01)  # 20 + 60 + 40 ms each
    found = findings(loop)
    assert found and all("persistent_workers=True" in f.action for f in found.values()), found
    assert {"input_bound", "time_outside_steps", "step_gap_host", "long_steps"} & set(found)


@pytest.mark.parametrize("loop", [
    epochs(300, start_us=300, end_us=300, batches=40), epochs(40_000, name=ONE), epochs(40_000, count=1)])
def test_workers_that_stay_or_are_none_or_start_once(loop):
    assert not [f for f in findings(loop).values() if "restarting its workers" in f"{f.title} {f.why}"]


def started(*, wait_us: float, rows: bool = False, stay: bool = False, steps: int = 1, pause_us: float = 1_000) -> Loop:
    """A recording that begins before its loop's iterator, or before a pass of workers that ``stay``."""
    loop = Loop()
    for drawn in (False,) * (not stay) + (True,) * rows:
        loop.op("aten::empty").op("aten::random_").op("aten::item", pause=0 if drawn else pause_us)
        if drawn:
            loop.op("aten::randperm")
    for step in range(steps):
        loop.op(MANY, 300 if step else wait_us).step().forward()
        if steps > 1:
            loop.zero().backward().update()
        loop.sleep(300)
    return loop


@pytest.mark.parametrize("rows", [False, True])
def test_the_wait_for_the_first_batch_after_workers_start_is_no_slow_input(rows):
    a = analyze_trace(started(wait_us=12_000_000, rows=rows).b.build())
    (f,) = a.findings
    assert f.id == "input_bound" and "12.0 s to start its workers" in f.title and "once in this recording" in f.title
    assert "num_workers=0" in f.action and f.snippet is None and f.gain.step_time is None
    assert a.wall_time.unexplained is None, "it claims the wait"


@pytest.mark.parametrize("loop", [
    started(wait_us=12_000_000, rows=True, stay=True), started(wait_us=12_000_000, stay=True)])
def test_a_first_batch_of_workers_that_had_started_before_is_no_start_of_them(loop):
    (f,) = findings(loop).values()
    assert "Input wait takes" in f.title and not len(workers_started(loop.b.build())[0].start)


def test_an_epochs_last_call_is_no_batch_and_no_step_ends_in_while_workers_start():
    trace = epochs(2_000, trains=False).b.build()
    assert find_steps(trace).count == pytest.approx(60, abs=2)
    f = findings(started(wait_us=10_000, steps=30, pause_us=5_000_000))["unfinished_step"]
    assert f.title.endswith("the DataLoader starting its workers") and "num_workers=0" in f.action


def odd(long_us: float, at: tuple[int, ...], steps: int = 60) -> Loop:
    loop = Loop()
    for step in range(steps):
        loop.op(ONE, long_us if step in at else 200).step().forward().zero().backward().update().sleep(2_000)
    return loop


def test_one_odd_batch_is_a_long_step_and_no_input_that_is_slow():
    found = findings(odd(600_000, (20,)))
    assert "waiting for a batch" in found["long_steps"].title and "input_bound" not in found
    assert "input_bound" in findings(odd(600_000, (10, 20, 30, 40, 50)))


@pytest.mark.parametrize(("late", "told"), [(2, False), (50, True)])
def test_a_late_batch_right_after_the_workers_start_is_no_odd_one(late, told):
    loop = Loop().op("aten::empty").op("aten::random_").op("aten::item", pause=40_000)
    for step in range(60):
        loop.op(MANY, 60_000 if step == late else 200 if step else 5_000)
        loop.step().forward().zero().backward().update().sleep(2_000)
    assert ("waiting for a batch" in getattr(findings(loop).get("long_steps"), "title", "")) == told


def test_fit_for_each_piece_of_data_is_called_once_instead():
    b, at = Builder(gpus=0), 0.0
    for _ in range(6):
        keras_steps(b, 8, 1_500, 1_400, at)
        at += 8 * 1_500
        for name, length in (("tf.function-graph_building", 40_000), ("TensorDataset", 8_000), ("MapDataset", 8_000),
                             ("MakeIterator::RootDataset", 30_000), ("TFE_DeleteTensorHandle", 35_000),
                             ("convert_to_tensor", 30_000)):
            b.host(name, at, length)
            at += length
    keras_steps(b, 8, 1_500, 1_400, at)
    found = {f.id: f for f in analyze_trace(b.build()).findings}
    first = next(iter(found.values()))
    assert "datasets and their iterators" in first.title and "fit() once" in first.action
