"""Whom findings name, and where on the timeline that is."""

from __future__ import annotations

import numpy as np
import pytest

from gputop.advice.trace.facts import idle_before
from gputop.analysis.results import StackLine
from gputop.core.findings import Culprit, Finding
from gputop.diagnosis.diagnose import analyze_to_facts
from gputop.timeline.model import IdleGap, Range
from gputop.timeline.read_timeline import Timeline
from gputop.tui.timeline.trace_file import gap_before, place_of
from tests.advice.trace.host_jobs import contended, eager, gap, placed, retraced
from tests.advice.trace.stalls import allocating, one_stream, staggered
from tests.advice.trace.traces import KERNEL, STEP, STEPS, findings, input_bound, job, launch_bound, launched_ahead
from tests.records import replace
from tests.timeline.make import timeline_of
from tests.trace.build import Builder, ns


def named(f: Finding) -> list[str]:
    return [culprit.name for culprit in f.culprits if culprit.name]


def place(b: Builder, f: Finding) -> IdleGap | Range | None:
    timeline = timeline_of(b.build())
    found = place_of(timeline, f)
    return timeline.idle_gaps[found] if isinstance(found, int) else found


def late_layer() -> Builder:
    """In each step kernels of two layers; those of the decoder each wait 150 µs for their launch, the others 10 µs."""
    b = job()
    for i in range(STEPS):
        t = i * STEP + 50
        while t < (i + 1) * STEP - 400:
            for layer, pause in (("encoder", 10), ("decoder", 150)):
                t += pause
                b.run(0, t, 40, KERNEL, launch=t - 5, op=f"model/{layer}/MatMul:MatMul")
                t += 40
    return b


def test_launches_that_come_late_name_the_layers_that_wait_for_them() -> None:
    b = late_layer()
    f = findings(b)["launch_bound"]
    first, second = f.culprits
    assert (first.name, second.name) == ("model/decoder/MatMul", "model/encoder/MatMul")
    kernels = len([e for e in b._device if "decoder" in e["op"]]) / STEPS
    assert first.time_s == pytest.approx(150e-6 * kernels, rel=0.05)
    assert (first.time_s or 0) + (second.time_s or 0) == pytest.approx(f.evidence["launch_wait_s"], rel=0.02)
    there = place(b, f)
    assert isinstance(there, IdleGap) and (there.cause, there.finding) == ("dispatch", "launch_bound")
    ended_by = timeline_of(b.build()).range(*(there.ends or (0, 0)))
    assert ended_by.tf_op == "model/decoder/MatMul:MatMul", "the gap before a kernel of that layer"
    assert findings(launch_bound())["launch_bound"].culprits == ()  # a launch without an op names nothing


def test_before_a_kernel_whose_launch_was_late_there_is_its_gap() -> None:
    b = late_layer()
    f, timeline = findings(b)["launch_bound"], timeline_of(b.build())
    at_ns = round((f.culprits[0].at_s or 0) * 1e9)
    kernel = next(r for row in timeline.rows if row.kind == "stream" for r in timeline.ranges(row.key, at_ns, at_ns + 1)
                  if r.start_ns == at_ns)
    assert gap_before(timeline, f, kernel) == (at_ns - ns(150), at_ns)
    assert gap_before(timeline, replace(f, id="small_kernels"), kernel) is None
    inside = replace(kernel, start_ns=kernel.start_ns + 1)
    assert gap_before(timeline, f, inside) is None


@pytest.mark.parametrize("b", [launch_bound(2), late_layer(), gap(0.3), input_bound(), staggered(800)])
def test_all_waiting_of_a_part_is_charged_to_the_kernel_after_it(b: Builder) -> None:
    facts = analyze_to_facts(b.build())
    device = facts.trace.device
    for part in ("input", "launch", "host"):
        idle_ns = np.zeros(len(device), np.int64)
        for rows, time_ns in idle_before(facts, part):
            idle_ns[rows] = time_ns
        for gpu, parts in facts.parts.items():
            after_the_last = parts[part].end > device.start_ns[device.gpu == gpu].max()  # no kernel ends it
            of_none = int((parts[part].end - parts[part].start)[after_the_last].sum())
            assert int(idle_ns[device.gpu == gpu].sum()) == parts[part].total - of_none


def test_input_names_the_stage_and_goes_to_the_wait_for_it_or_to_its_longest_call() -> None:
    b = input_bound()
    f = findings(b)["input_bound"]
    assert [(c.name, c.kind) for c in f.culprits] == [("Map", "stage")]
    there = place(b, f)
    assert isinstance(there, IdleGap) and there.cause == "input"
    b = Builder(gpus=0)  # input on a CPU goes to the longest call of the stage
    for i in range(STEPS):
        slow = 9_000 if i == 3 else 8_000
        b.host("IteratorGetNextOp::DoCompute", i * STEP + 20, slow, line="tf_data_iterator_get_next/1")
        b.host("Iterator::Root::Prefetch::Map", i * STEP, slow, line="tf_data_private_threadpool/1")
        b.host("EagerExecute", i * STEP, STEP - 50, is_func=1, eager_op="__inference_multi_step_on_iterator_42")
    f = findings(b)["input_bound"]
    there = place(b, f)
    assert isinstance(there, Range) and there.name.endswith("Map") and there.start_ns == ns(3 * STEP)


def test_pytorchs_input_names_what_runs_in_the_loader() -> None:
    b = Builder()
    for i in range(STEPS):
        begin = i * STEP
        b.host(f"ProfilerStep#{i}", begin, STEP, line="python 1")
        b.host("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", begin + 10, 9_000, line="python 1")
        b.host("aten::stack", begin + 3_000, 5_000, line="python 1")
        b.host("aten::mm", begin + 9_020, 20, line="python 1")
        for k in range(50):
            b.run(0, begin + 9_100 + k * 200, 198, KERNEL, launch=begin + 9_050 + k, launch_length=0.5,
                  thread="python 1")
    f = findings(b)["input_bound"]
    assert named(f) == ["aten::stack", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"]
    assert f.culprits[0].time_s == pytest.approx(5e-3, rel=0.01)


@pytest.mark.parametrize(("b", "id_", "name", "cause"), [
    (gap(0.3), "step_gap_host", "Mean", "gap"), (placed(0.3), "host_placement", "model/py", "placement"),
    (retraced(0.3), "retracing", "train_step", "tracing"), (eager(100, 40), "eager_execution", "MatMul", "eager")])
def test_work_of_the_host_goes_to_the_gap_that_it_lies_in(b: Builder, id_: str, name: str, cause: str) -> None:
    f = findings(b)[id_]
    first = f.culprits[0]
    assert name in first.name and first.kind == "host" and first.gpu is None and first.at_s is not None
    there = place(b, f)
    assert isinstance(there, IdleGap) and there.cause == cause and there.finding == id_


def test_without_a_gpu_work_of_the_host_goes_to_its_longest_event_between_the_steps() -> None:
    b = Builder(gpus=0)
    for i in range(STEPS):
        b.host("EagerExecute", i * STEP, STEP / 2, is_func=1, eager_op="__inference_multi_step_on_iterator_42")
        b.host("SaveV2", i * STEP + STEP / 2 + 100, 8_000 if i == 2 else 7_000)
        b.host("SaveV2", i * STEP + 100, 9_000)  # within the step: not what the finding is about
    f = findings(b)["step_gap_host"]
    there = place(b, f)
    assert named(f)[0] == "SaveV2" and isinstance(there, Range)
    assert (there.name, there.start_ns) == ("SaveV2", ns(2 * STEP + STEP / 2 + 100))


def test_allocations_go_to_their_longest_call() -> None:
    b = allocating("cudaFree")
    f = findings(b)["allocation_in_steps"]
    there = place(b, f)
    assert named(f) == ["cudaFree"] and isinstance(there, IdleGap) and there.finding == "allocation_in_steps"
    assert f.culprits[0].time_s == pytest.approx(f.evidence["calls_s"])


def test_threads_are_named_without_a_time() -> None:
    f = findings(contended(8))["thread_contention"]
    assert named(f) and all(c.time_s is None and c.kind == "host" for c in f.culprits)
    f = findings(staggered(800))["staggered_launch"]  # the thread that launches to one GPU after the other
    assert [(c.name, c.kind) for c in f.culprits] == [("python", "thread")]


def test_gpus_that_work_by_turns_name_the_layers_of_each() -> None:
    b = job(2)
    for i in range(STEPS):
        for gpu, layer in enumerate(("encoder", "decoder")):
            for k in range(40):
                begin = i * STEP + 100 + gpu * 4_000 + k * 100
                b.run(gpu, begin, 98, KERNEL, launch=begin - 90, op=f"model/{layer}/block_{k % 2}/MatMul:MatMul")
    f = findings(b)["serial_gpus"]
    assert [(c.name, c.only_on) for c in f.culprits] == [("model/encoder/block_0/MatMul", (0,)),
                                                         ("model/decoder/block_0/MatMul", (1,)),
                                                         ("model/encoder/block_1/MatMul", (0,)),
                                                         ("model/decoder/block_1/MatMul", (1,))]


def test_copies_on_the_stream_of_the_kernels_are_named_by_the_call_that_made_them() -> None:
    b = launched_ahead(one_stream())
    for i in range(STEPS):
        b.host("aten::copy_", i * STEP, 2, line="launch 0")
    f = findings(b)["default_stream"]
    assert named(f) == ["aten::copy_"]
    there = place(b, f)
    assert isinstance(there, Range) and there.kind == "h2d"


def test_the_place_of_a_line_and_of_host_events_is_a_gap() -> None:
    class Gaps(Timeline):
        def __init__(self) -> None:
            lines = [(StackLine("other.py:1 f", "other.py", 0.1, 1.0),), (StackLine("m.py:2 g", "m.py", 0.1, 1.0),)]
            self.rows, self.idle_totals = [], ()
            self.idle_gaps = tuple(IdleGap((0,), i, i + 1, 1, "host", "gap", "", "", "step_gap_host", python=own)
                                   for i, own in enumerate(lines))

    f = findings(gap(0.3))["step_gap_host"]
    own = (Culprit("m.py:2 g", "line", 0.1),)
    assert place_of(Gaps(), replace(f, culprits=own)) == 1
    b = gap(0.3)  # the place of host events is found by name where two begin at once
    at = int(np.round((findings(b)["step_gap_host"].culprits[0].at_s or 0) * 1e6))
    b.host("elsewhere", at, 3, line="another")
    f = findings(b)["step_gap_host"]
    assert isinstance(place(b, f), IdleGap)
