from __future__ import annotations

import gzip

import pytest

from gputop.analysis.host.gaps import marks
from gputop.analysis.steps.phases import EVALUATION
from gputop.analysis.steps.steps import find_steps
from gputop.diagnosis.diagnose import analyze
from gputop.replay.compared_files import compare
from gputop.trace.lookups import host_rows
from gputop.trace.readers.nsys import read_nsys
from tests.trace.build import Builder
from tests.trace.readers.nsight import numbered_report
from tests.trace.shares import NEEDS_SHARED, SHARED

CASES = SHARED / "cases"


def loop(b: Builder, mark: str, count: int = 12, length: float = 100, pause: float = 50, *, line: str = "python",
         first: int = 5) -> Builder:
    for i in range(count):
        begin = i * (length + pause)
        b.host(mark.format(first + i), begin, length, line)
        b.run(0, begin + 10, length - 20, launch=begin + 2, thread=line)
    return b


@pytest.mark.parametrize("mark", ["step {}", "iteration {}", "Iter {}", "batch {}", "train_step_{}", "trainStep {}",
                                  "epoch 2: batch {}", "Step [{}/400]", "global_step={}", "iteration: {}"])
def test_numbered_ranges_are_steps(mark):
    steps = find_steps(loop(Builder(), mark).build())
    assert steps is not None and steps.times.confidence == "high" and steps.times.anchor.startswith("ranges ")
    assert steps.count == 11 and steps.times.median_s == pytest.approx(150e-6)


@pytest.mark.parametrize("mark", ["layer {}", "epoch {}", "block {}", "microbatch {}", "micro_batch {}", "request {}",
                                  "stepper {}", "timestep embedding", "stage step {}", "footstep{}"])
def test_other_ranges_are_none(mark):
    steps = find_steps(loop(Builder(), mark).build())
    assert steps is None or "ranges" not in steps.times.anchor


@pytest.mark.parametrize("mark", [
    "EagerLocalExecute: __inference_train_step_{}", "PjitFunction(train_step_{})", "step {}"])
@pytest.mark.parametrize("numbers", [(21889,), (21889, 30412), (12, 7)])
def test_a_number_that_does_not_count_is_none(mark: str, numbers: tuple[int, ...]) -> None:
    """Functions have numbers of their own, and a mark may hold a constant."""
    b = Builder()
    for i in range(12):
        b.host(mark.format(numbers[i % len(numbers)]), i * 150, 100).run(0, i * 150 + 10, 80, launch=i * 150 + 2)
    steps = find_steps(b.build())
    assert steps is None or "ranges" not in steps.times.anchor


def test_of_steps_and_their_parts_the_steps():
    b = loop(Builder(), "iteration {}", length=120, pause=10)
    for i in range(24):  # two batches in each iteration
        b.host(f"batch {i}", (i // 2) * 130 + (i % 2) * 55 + 1, 50)
    for i in range(48):
        b.host(f"layer {i % 4}", (i // 4) * 130 + (i % 4) * 20 + 2, 15)
    steps = find_steps(b.build())
    assert steps is not None and steps.times.anchor == 'ranges "iteration N"' and steps.count == 11
    assert steps.times.median_s == pytest.approx(130e-6)


UPDATE = "void at::native::multi_tensor_apply_kernel<Metadata<4>, FusedAdamMathFunctor<float>>(int)"


def rounds(mark: str, *, parts: int = 4, count: int = 10, first: int = 0, updates_each: bool = False,
           optimizer: bool = True) -> Builder:
    """``count`` rounds of ``parts`` ranges of 40 µs each, every 50; from the ``first`` on. The optimizer's kernel runs
    behind the last range of each round, or in each range."""
    b = Builder(format="nsys")
    for i in range(first, parts * count):
        begin = (i - first) * 50
        b.host(mark.format(i % parts, i // parts), begin, 40)
        b.run(0, begin + 2, 20, launch=begin + 1, thread="python")
        if optimizer and (updates_each or i % parts == parts - 1):
            b.run(0, begin + 30, 12, UPDATE, launch=begin + (30 if updates_each else 42), thread="python")
    return b


@pytest.mark.parametrize("mark", [
    "micro_batch {}", "microbatch {}", "micro-batch: {}", "Micro {}", "accum_step {}", "grad accumulation {}",
    "forward micro_batch {}", "micro_batch {} backward", "step {1} micro_batch {0}", "step {1}: batch {0}", "batch {}",
    "iter {}", "stage 1 micro_batch {}"])
@pytest.mark.parametrize("first", [0, 2])
def test_a_round_of_numbers_with_one_update_is_a_step(mark: str, first: int) -> None:
    steps = find_steps(rounds(mark, first=first).build())
    assert steps is not None and steps.times.anchor.startswith("rounds of ranges ")
    assert steps.times.median_s == pytest.approx(4 * 50e-6) and steps.times.confidence == "high"
    assert steps.count == (9 if first else 10)
    assert steps.bounds_ns[0][0] == (100_000 if first else 0)
    assert steps.call_ends_ns[0] - steps.bounds_ns[0][0] == 197_000  # the optimizer's launch


def test_without_an_update_what_follows_micro_batches_is_not_called_a_pause() -> None:
    steps = find_steps(rounds("micro_batch {}", optimizer=False).build())
    assert steps is not None and steps.count == 9 and not steps.call_ends_ns


def test_epochs_whose_numbers_start_over_are_steps_of_one_batch_each() -> None:
    for job in (rounds("batch {}", parts=10, count=4, updates_each=True),
                rounds("batch {}", parts=70, count=2, optimizer=False),  # no optimizer shows
                rounds("step {}", parts=10, count=4, optimizer=False),  # no range launches more
                rounds("epoch {1} batch {0}", parts=10, count=4)):  # numbers that rise
        steps = find_steps(job.build())
        assert steps is not None and steps.times.anchor.startswith("ranges ")
        assert steps.times.median_s == pytest.approx(50e-6)


def test_an_evaluation_between_epochs_belongs_to_one_step_at_most() -> None:
    b = Builder(format="nsys")
    for epoch in range(3):
        for i in range(20):
            begin = epoch * 10_000 + i * 100
            b.host(f"batch {i}", begin, 90).run(0, begin + 5, 50, launch=begin + 1, thread="python")
            b.run(0, begin + 60, 20, UPDATE, launch=begin + 30, thread="python")
        for i in range(30):
            b.run(0, begin + 200 + i * 100, 90, launch=begin + 150 + i * 100, thread="python")
    steps = find_steps(b.build())
    assert steps is not None and steps.times.anchor == 'ranges "batch N"'
    assert steps.times.median_s == pytest.approx(1e-4)


def test_numbers_that_start_over_without_an_update_show_no_steps() -> None:
    b = rounds("batch {}", optimizer=False)
    for i in range(10):  # runs once in a round: an update, or what follows an epoch
        b.run(0, i * 200 + 195, 3, "copy_kernel", launch=i * 200 + 190, thread="python")
    # So do layers, and a round and a half.
    for job in (b, rounds("layer {}"), rounds("batch {}", first=2, count=2)):
        steps = find_steps(job.build())
        assert steps is None or "ranges" not in steps.times.anchor


def test_micro_batches_within_numbered_steps_are_their_parts() -> None:
    b = rounds("micro_batch {}")
    for i in range(10):
        b.host(f"step {i}", i * 200, 199)
    steps = find_steps(b.build())
    assert steps is not None and steps.times.anchor == 'ranges "step N"' and steps.count == 10


def test_markers_whose_step_num_counts_micro_batches() -> None:
    b = Builder()
    for i in range(2, 42):
        b.host("micro_batch", i * 50, 45, step_num=i % 4).run(0, i * 50 + 2, 20, launch=i * 50 + 1, thread="python")
    steps = find_steps(b.build())
    assert steps is not None and steps.times.anchor == "rounds of micro_batch markers with step_num"
    assert steps.times.median_s == pytest.approx(200e-6)


@pytest.mark.parametrize("ranges", [
    [("iteration 7", 0, 1000), *((f"batch {i}", 10 + i * 100, 90) for i in range(8))],  # parts of the only step
    [(f"step {10 * i}", i * 1000, 90) for i in range(12)],  # a mark at every tenth iteration
    [(f"batch {i}", i * 100, 150) for i in range(12)],  # they overlap
    [(f"batch {i % 4}", i * 50, 40) for i in range(24)],  # numbers that start over without an update
], ids=lambda ranges: ranges[-1][0])
def test_numbered_ranges_that_are_no_steps(ranges: list[tuple[str, float, float]]) -> None:
    b = Builder()
    for name, begin, length in ranges:
        b.host(name, begin, length)
    assert find_steps(b.build()) is None


def test_a_thread_that_prepares_batches_does_not_mark_the_steps():
    b = loop(Builder(), "step {}", length=100, pause=0)
    for i in range(40):
        b.host(f"batch {i}", i * 20, 15, "loader")
    assert find_steps(b.build()).times.anchor == 'ranges "step N"'
    for i in range(12):  # also where the loop marks its part of the step by the same name
        b.host(f"batch {i}", i * 100 + 1, 90)
    assert find_steps(b.build()).times.anchor == 'ranges "step N"'


def test_evaluation_ends_a_step_and_is_a_loop_of_its_own():
    b = loop(Builder(), "train step {}", count=10, length=100, pause=0)
    for i in range(20):
        b.host(f"val step {i}", 1000 + i * 100, 95)
    steps = find_steps(b.build())
    assert steps is not None and steps.times.anchor == 'ranges "train step N"' and steps.count == 10
    assert steps.other_loops[EVALUATION].total == pytest.approx(1_995_000, rel=0.01)


def test_ranges_that_mark_steps_are_no_work_of_the_host():
    trace = loop(Builder(), "step {}").build()
    assert marks(trace)[host_rows(trace, "step ")].all()


def test_an_optimizers_calls_mark_steps_where_nothing_else_does():
    b = Builder(format="chrome")
    for i in range(10):
        b.run(0, i * 100 + 5, 60, launch=i * 100 + 1, thread="python")
        b.host("Optimizer.step#AdamW.step", i * 100 + 80, 10)
        b.host("Optimizer.zero_grad#AdamW.zero_grad", i * 100 + 92, 2)
    steps = find_steps(b.build())
    assert steps is not None and steps.times.anchor == "calls of Optimizer.step" and steps.count == 9
    assert steps.times.median_s == pytest.approx(100e-6) and steps.times.confidence == "medium"
    b.host("aten::mm", 0, 5, "other")
    for i in range(10):
        b.host(f"step {i}", i * 100, 99)
    assert find_steps(b.build()).times.anchor == 'ranges "step N"'


@pytest.mark.parametrize(("mark", "ops"), [("step {}", True), ("iteration {}", False), ("batch {}", True)])
def test_in_an_nsight_report_the_pause_between_ranges_is_first_of_all_the_dataloader(tmp_path, mark, ops):
    path = numbered_report(tmp_path / "report.sqlite", mark, ops=ops)
    steps = find_steps(read_nsys(path))
    assert steps is not None and steps.count == 29 and steps.times.median_s == pytest.approx(0.150)
    found = analyze([str(path)]).findings
    assert found[0].id == "step_gap_host" and found[0].severity == "high"
    assert "DataLoader" in found[0].why and "num_workers" in (found[0].snippet or "")
    assert not any("tf." in f"{finding.action}{finding.snippet}" for finding in found)
    assert found[0].gain.step_time == pytest.approx(0.6, abs=0.02)


@pytest.mark.parametrize(("mark", "restart", "step_s"), [
    ("micro_batch {}", 3, 0.45), ("batch {}", 10, 0.15), ("epoch 1 batch {}", 30, 0.15)])
def test_numbers_that_start_over_in_an_nsight_report(tmp_path, mark, restart, step_s):
    """No kernel is an optimizer's by its name: micro-batches by the ranges' name, epochs by their equal launches."""
    steps = find_steps(read_nsys(numbered_report(tmp_path / "report.sqlite", mark, restart=restart)))
    assert steps is not None and steps.times.median_s == pytest.approx(step_s)
    assert steps.times.confidence == "high"


@pytest.mark.skipif(not CASES.is_dir(), reason=NEEDS_SHARED)
@pytest.mark.parametrize("mark", ["iteration ", "train_step_"])
def test_record_function_numbers_steps_as_the_profiler_does(tmp_path, mark):
    text = gzip.decompress((CASES / "ddp_sigterm" / "rank0.pt.trace.json.gz").read_bytes())
    path = tmp_path / "rank0.pt.trace.json"
    path.write_bytes(text.replace(b"ProfilerStep#", mark.encode()))
    report = analyze([str(path)])
    assert report.steps is not None and report.steps.count == 8
    assert report.steps.median_s == pytest.approx(17.67e-3, rel=0.01)
    assert report.findings[0].id == "sync_copies"


def test_reports_with_numbered_ranges_are_compared(tmp_path):
    """As the same loop before and after its DataLoader got workers, marked by other words in each."""
    before = numbered_report(tmp_path / "before.sqlite", "iteration {}")
    after = numbered_report(tmp_path / "after.sqlite", "step {}", pause=5)
    found = compare(before, after)
    assert found.verdict == "better" and found.headline.startswith("FASTER, certain: 150 → 65.0 ms")


def test_two_optimizers_of_a_step_are_one_step():
    b = Builder(format="chrome")
    for i in range(10):
        for k in range(3):
            b.run(0, i * 100 + 5 + 10 * k, 8, launch=i * 100 + 1 + k, thread="python")
        b.host("Optimizer.step#Adam.step", i * 100 + 50, 5)  # the discriminator's
        b.run(0, i * 100 + 70, 8, launch=i * 100 + 60, thread="python")
        b.host("Optimizer.step#Adam.step", i * 100 + 90, 5)  # the generator's
    assert find_steps(b.build()).times.median_s == pytest.approx(100e-6)
