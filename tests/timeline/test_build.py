"""Which rows a trace has, what links a launch and its kernel, and texts from outside."""

from __future__ import annotations

import io
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from gputop.advice.trace.facts import TraceFacts
from gputop.analysis.gpu.device_time import gpu_number, timelines
from gputop.analysis.steps.steps import detect_steps
from gputop.core.captured_samples import CounterLane, GpuCounters
from gputop.core.errors import GputopError
from gputop.diagnosis.diagnose import analyze_to_facts, analyze_with_steps
from gputop.timeline.build import RowsWritten
from gputop.timeline.model import KINDS, Range
from gputop.timeline.read_timeline import Timeline
from gputop.trace.intervals import coverage
from gputop.trace.model import Kind, Trace
from gputop.trace.readers.load import load
from tests.diagnosis.real_traces import facts_of, needs_data
from tests.timeline.make import build, timeline_of
from tests.trace.build import Builder, keras_steps

DATA = Path(__file__).resolve().parents[1] / "data"


def test_rows_stand_by_gpu_then_threads_then_stages():
    b = Builder(gpus=2)
    b.run(1, 10, 5, launch=1).run(1, 30, 5, stream=2).run(1, 40, 20, stream=2)
    b.run(0, 20, 5, launch=2, thread="tf_Compute/1")
    b.host("Work", 0, 100, "tf_data_private_threadpool/3")
    b.host("Iterator::Root::Prefetch", 1, 5).host("Iterator::Root::Prefetch::Map[2]", 2, 2)
    b.host("Iterator::Root::Map", 3, 1)
    timeline = timeline_of(b.build())
    assert [(row.kind, row.label, row.group, row.gpu) for row in timeline.rows] == [
        ("gpu", "GPU 0", "GPU 0", 0), ("stream", "Stream #1", "GPU 0", 0),
        ("gpu", "GPU 1", "GPU 1", 1), ("stream", "Stream #2", "GPU 1", 1), ("stream", "Stream #1", "GPU 1", 1),
        ("thread", "launch 1", "Host node", None), ("thread", "tf_Compute", "Host node", None),
        ("thread", "python", "Host node", None), ("thread", "tf_data", "Host node", None),
        ("stage", "Map", "tf.data", None), ("stage", "Prefetch", "tf.data", None),
        ("stage", "Prefetch::Map", "tf.data", None),
    ]
    assert [row.key for row in timeline.rows] == list(range(len(timeline.rows)))
    # What an input thread does is input, and so are a training loop's calls for a batch.
    kinds = {row.label: set(timeline.coverage.picture([row.key], 0, 100_000, 50)[1][0].tolist()) - {0}
             for row in timeline.rows}
    assert {KINDS[k] for k in kinds["tf_data"]} == {KINDS[k] for k in kinds["python"]} == {"input"}


def test_two_stages_of_one_name_are_distinguished_by_their_paths():
    b = Builder().host("Iterator::Root::Map", 0, 5).host("Iterator::Root::Map::Batch::Map", 1, 2)
    labels = [row.label for row in timeline_of(b.build()).rows if row.kind == "stage"]
    assert labels == ["Map", "Map::Batch::Map"]


def steady() -> Builder:
    b = keras_steps(Builder(), 6, 1_000, 900)
    for i in range(6):
        b.run(0, 1_000 * i + 50, 700, launch=1_000 * i + 10, op="model/dense/MatMul")
    return b


def test_steps_window_critical_path_and_what_the_trace_is():
    trace = steady().build()
    trace.simulated = True
    facts = analyze_to_facts(trace)
    timeline, path = timeline_of(facts), facts.analysis.critical_path
    assert facts.steps is not None and path is not None and path.segments
    row = next(row for row in timeline.rows if row.kind == "path")
    spans = timeline.ranges(row.key, *timeline.window_ns)
    assert [(r.start_ns, r.end_ns) for r in spans] == [(s.start_ns, s.end_ns) for s in path.segments]
    assert "host work: cuLaunchKernel" in [r.name for r in spans]
    assert [tuple(step) for step in timeline.steps_ns.tolist()] == list(facts.steps.bounds_ns)
    assert timeline.window_ns == trace.window_ns and timeline.events == trace.event_count
    assert timeline.simulated and timeline.paths == ("synthetic",)
    assert timeline.quality == tuple((note.id, note.message) for note in facts.analysis.trace.quality)


def linked(timeline: Timeline, name: str) -> list[tuple[str, int] | None]:
    """For each range of this name what it leads to, and that it leads back."""
    found = []
    for row in timeline.rows:
        for r in timeline.ranges(row.key, *timeline.window_ns) if row.kind in ("stream", "thread") else []:
            if r.name == name:
                other = timeline.linked(r)
                found.append(None if other is None else (other.name, other.start_ns))
                if other is not None and timeline.rows[r.row].kind == "thread":
                    back = timeline.linked(other)
                    assert back is not None and (back.row, back.index) == (r.row, r.index)
    return found


def test_a_kernel_leads_to_its_launch_and_back():
    b = Builder(gpus=2)
    b.run(0, 100, 5, "first", launch=10).run(0, 110, 5, "second", launch=20)
    b.run(1, 100, 5, "other", launch=10)  # at the same time, from a thread of its own
    b.run(0, 120, 5, "unknown")
    b.host("not a launch", 10, 3, "python")
    timeline = timeline_of(b.build())
    assert linked(timeline, "first") == [("cuLaunchKernel", 10_000)]
    assert linked(timeline, "second") == [("cuLaunchKernel", 20_000)]
    assert linked(timeline, "unknown") == linked(timeline, "not a launch") == [None]
    assert sorted(linked(timeline, "cuLaunchKernel")) == [("first", 100_000), ("other", 100_000), ("second", 110_000)]
    other = next(row for row in timeline.rows if row.label == "launch 1")
    launch = timeline.ranges(other.key, 0, 10**6)[0]
    kernel = timeline.linked(launch)
    assert kernel is not None and kernel.name == "other" and timeline.rows[kernel.row].gpu == 1


def test_of_calls_that_begin_at_once_the_one_that_ends_so_is_the_launch():
    b = Builder()
    b.run(0, 100, 5, "kernel", launch=10, launch_length=4)
    b.host("cudaGraphLaunch", 10, 8, "launch 0").host("inside", 10, 2, "launch 0")
    timeline = timeline_of(b.build())
    assert linked(timeline, "kernel") == [("cuLaunchKernel", 10_000)]
    assert linked(timeline, "inside") == linked(timeline, "cudaGraphLaunch") == [None]


def test_a_launch_of_several_kernels_leads_to_the_first():
    b = Builder()
    b.run(0, 100, 5, "kernel a", launch=10).run(0, 110, 5, "kernel b", launch=10)
    trace = b.build()
    # One call for both, as for a CUDA graph.
    rows = [i for i, start in enumerate(trace.host.start_ns.tolist()) if start == 10_000]
    trace.host.start_ns[rows[1]], trace.host.end_ns[rows[1]] = 20_000, 21_000
    timeline = timeline_of(trace)
    assert linked(timeline, "kernel a") == linked(timeline, "kernel b") == [("cuLaunchKernel", 10_000)]
    launch = timeline.ranges(2, 10_000, 10_001)[0]
    first = timeline.linked(launch)
    assert first is not None and first.name == "kernel a"


def test_texts_from_outside_are_made_harmless_and_found():
    b = Builder(hosts=("no\x1b[31mde",))
    b.run(0, 10, 5, "ker[red]nel\x1b[2J\nline", op="a\tb:Op", launch=1)
    b.host("\udcffbad", 20, 5, "thr\x07ead")
    timeline = timeline_of(b.build())
    texts = [text for row in timeline.rows for text in (row.label, row.group)]
    texts += [text for row in timeline.rows for r in timeline.ranges(row.key, *timeline.window_ns)
              for text in (r.name, r.tf_op)]
    assert all(text.isprintable() for text in texts)
    found = timeline.search("[RED]", 0, -1)
    assert found is not None and found.name == "ker[red]nel\ufffd[2J line" and found.tf_op == "a b:Op"


class Full(io.BytesIO):
    def write(self, data) -> int:
        if self.tell() > 100:
            raise OSError(28, "No space left on device")
        return super().write(data)


def test_a_full_disk_is_said_with_its_remedy():
    b = Builder().run(0, 10, 5)
    with pytest.raises(GputopError, match="No space left on device") as caught:
        build(analyze_to_facts(b.build()), Full())
    assert "TMPDIR" in caught.value.fix


@needs_data
@pytest.mark.parametrize("name", ["dlrm", "a100", "mfu", "amd_8gpu"])
def test_shared_traces(name):
    shows_all_of(facts_of(name))


@pytest.mark.parametrize("name", ["keras3_slow_input", "jax_cpu", "tf_retracing"])
def test_traces_of_cpus(name):
    shows_all_of(analyze_to_facts(load([DATA / f"{name}.xplane.pb.gz"])))


def shows_all_of(facts: TraceFacts) -> None:
    trace, timeline = facts.trace, timeline_of(facts)
    low, high = timeline.window_ns
    of_kind: Counter[str] = Counter()
    shown = 0
    for row in timeline.rows:
        count = timeline.count(row.key, low, high + 1)
        ranges = timeline.ranges(row.key, low, high + 1, count + 1)
        assert len(ranges) == count > 0
        assert [r.start_ns for r in ranges] == sorted(r.start_ns for r in ranges)
        if row.kind in ("stream", "thread"):
            of_kind.update(row.kind for _ in ranges)
            shown += sum(timeline.linked(r) is not None for r in ranges if row.kind == "stream")
            assert {r.kind for r in ranges} <= set(KINDS[1:])
    assert of_kind == Counter({k: n for k, n in (("stream", len(trace.device)), ("thread", len(trace.host))) if n})
    assert shown == int((trace.device.launch_line >= 0).sum())  # each launch that is known is found
    agrees_with_the_analysis(trace, timeline)
    searched = [row for row in timeline.rows if row.kind not in ("gpu", "layer")]
    every = {r.name for row in searched for r in all_of(timeline, row.key)}
    for name in sorted(every)[:20]:
        found = timeline.search(name, 0, low - 1)
        assert name == "" or (found is not None and name.casefold() in found.name.casefold())


def all_of(timeline: Timeline, row: int) -> list[Range]:
    low, high = timeline.window_ns
    return timeline.ranges(row, low, high + 1, 10**9)


def agrees_with_the_analysis(trace: Trace, timeline: Timeline) -> None:
    """A GPU's row covers what its busy time is, and shows compute where the breakdown does."""
    low, high = timeline.window_ns
    columns = 37
    edges = [low + (high - low) * i // columns for i in range(columns + 1)]
    lines = {gpu_number(trace, timeline.gpu): timeline for timeline in timelines(trace)}
    for row in timeline.rows:
        if row.kind != "gpu" or row.gpu not in lines:
            continue
        line = lines[row.gpu]
        (share,), (kinds,) = timeline.coverage.picture([row.key], low, high, columns)
        busy = coverage(line.busy, edges[:-1], edges[1:])
        for i in range(columns):
            assert share[i] == pytest.approx(busy[i] / (edges[i + 1] - edges[i]), abs=1e-5)
        computes = coverage(line.compute, edges[:-1], edges[1:])
        assert all(kinds[i] == KINDS.index("compute") for i in range(columns) if computes[i] * 2 > busy[i])
        assert Kind.COMPUTE == 0 and KINDS[1] == "compute"


def test_phases_and_layers_of_the_busiest_gpu_are_a_row_of_spans():
    b = Builder(gpus=2)
    for step in range(3):
        begin = step * 1000
        b.host("train", begin, 900, step_num=step, _r=1)
        for i, op in enumerate(("model/dense_0/MatMul:MatMul", "model/dense_0/Relu:Relu",
                                "model/dense_1/up/MatMul:MatMul",
                                "gradient_tape/model/dense_1/up/MatMul/MatMul_1:MatMul",
                                "gradient_tape/model/dense_0/MatMul/MatMul_1:MatMul",
                                "adam/w/Apply:ResourceApplyAdam")):
            b.run(1, begin + 100 * i, 90, f"kernel_{i}", launch=begin + 10 * i, op=op)
        b.run(0, begin, 100, "kernel_0", launch=begin, op="model/dense_0/MatMul:MatMul")
    timeline = timeline_of(b.build())
    row = next(row for row in timeline.rows if row.kind == "layer")
    assert (row.label, row.gpu, row.depth) == ("phase", 1, 2)
    spans = [(r.name, r.depth, r.start_ns // 1000, r.end_ns // 1000) for r in timeline.ranges(row.key, 0, 600_000)]
    assert spans == [
        ("forward", 0, 0, 290), ("dense_0", 1, 0, 190), ("dense_1", 1, 200, 290), ("up", 2, 200, 290),
        ("backward", 0, 300, 490), ("dense_1", 1, 300, 390), ("up", 2, 300, 390), ("dense_0", 1, 400, 490),
        ("MatMul", 2, 400, 490), ("optimizer", 0, 500, 590)]
    assert timeline.count(row.key, 0, 10**9) == 3 * len(spans)


def test_phases_and_layers_of_a_cpus_job_are_a_row_in_which_the_op_that_began_first_counts():
    b = Builder(gpus=0)
    for step in range(3):
        begin = step * 1000
        b.host("train", begin, 900, step_num=step, _r=1)
        for thread, at, length, op in (
                (1, 0, 300, "model/dense_0/MatMul:MatMul"), (2, 100, 20, "Adam/update/ResourceApplyAdam:AddV2"),
                (2, 250, 100, "model/dense_1/MatMul:MatMul"), (1, 350, 50, "model/dense_1/Relu:Relu"),
                (1, 500, 90, "gradient_tape/model/dense_1/MatMul/MatMul_1:MatMul"),
                (1, 590, 10, "gradient_tape/model/dense_0/MatMul/MatMul_1:MatMul")):
            b.host(op, begin + at, length, line=f"tf_Compute/{thread}")
    timeline = timeline_of(b.build())
    row = next(row for row in timeline.rows if row.kind == "layer")
    assert (row.label, row.gpu) == ("phase", None)
    spans = [(r.name, r.depth, r.start_ns // 1000, r.end_ns // 1000) for r in timeline.ranges(row.key, 0, 999_000)]
    assert [own for own in spans if own[1] < 2] == [
        ("forward", 0, 0, 400), ("dense_0", 1, 0, 300), ("dense_1", 1, 300, 400),
        ("backward", 0, 500, 600), ("dense_1", 1, 500, 590), ("dense_0", 1, 590, 600)], "the update beside is hidden"


@pytest.mark.parametrize("file", ["keras2_tf215", "keras3_fast", "keras3_slow_input"])
def test_where_one_op_runs_the_phase_of_a_real_cpus_job_is_that_ops(file: str):
    trace = load([str(DATA / f"{file}.xplane.pb.gz")])
    timeline = timeline_of(trace)
    row = next(row for row in timeline.rows if row.kind == "layer")
    host = trace.host
    ops = np.array([name.startswith(("gradient_tape/", "StatefulPartitionedCall/gradient_tape/", "sequential",
                                     "StatefulPartitionedCall/sequential")) and ":" in name for name in trace.names])
    any_op = np.array([":" in name and "::" not in name for name in trace.names])
    rows, others = np.flatnonzero(ops[host.name]), np.flatnonzero(any_op[host.name])
    rows = rows[host.end_ns[rows] - host.start_ns[rows] > 20_000]
    seen = 0
    for at in rows.tolist():
        when = int(host.start_ns[at] + host.end_ns[at]) // 2
        running = others[(host.start_ns[others] <= when) & (host.end_ns[others] > when)]
        if len(running) == 1:
            phase = next(r.name for r in timeline.ranges(row.key, when, when + 1) if r.depth == 0)
            assert phase == ("backward" if "gradient_tape/" in trace.names[host.name[at]] else "forward")
            seen += 1
    assert seen >= 5


def test_threads_are_numbered_in_the_order_of_their_rows():
    b = Builder()
    for thread in ("tf_Compute/-77", "tf_Compute/123456", "python/99", "tf_data_private_threadpool/7", "launch 0"):
        b.host("Work", 0, 100, thread)
    b.run(0, 20, 5, launch=2, thread="tf_Compute/123456")
    labels = [row.label for row in timeline_of(b.build()).rows if row.kind == "thread"]
    assert labels[0] == "tf_Compute 1"
    assert sorted(labels) == ["launch 0", "python", "tf_Compute 1", "tf_Compute 2", "tf_data"]


def test_the_rows_come_first_and_stay_as_they_are():
    """Keys, ranges and pictures of all rows but that of the critical path, which is the last."""
    facts = analyze_to_facts(steady().build())
    whole = timeline_of(facts)
    with tempfile.TemporaryFile(buffering=0) as file:
        written = RowsWritten(facts.trace, facts.steps, file)
        place = written.describe(facts.trace)
        at = file.tell()
        rows = Timeline.open(file, place)
        assert file.tell() == at, "the writer goes on there"
        begin, end = rows.window_ns
        pictures = [own.tolist() for own in rows.coverage.picture([row.key for row in rows.rows], begin, end, 50)]
        done = Timeline.open(file, written.finish(facts))
        assert Timeline.open(file, place).rows == rows.rows
    assert rows.pending and not rows.idle_gaps and not done.pending and done.idle_gaps == whole.idle_gaps
    assert rows.rows == done.rows == whole.rows and {"layer", "thread", "stream"} < {row.kind for row in rows.rows}
    path = rows.rows[-1]
    assert path.kind == "path" and not any(map(any, (pictures[0][path.key], pictures[1][path.key])))
    assert pictures == [own.tolist() for own in rows.coverage.picture([row.key for row in rows.rows], begin, end, 50)]
    drawn = done.coverage.picture([row.key for row in done.rows], begin, end, 50)
    for row in rows.rows:
        assert done.ranges(row.key, begin, end) == whole.ranges(row.key, begin, end)
        if row is not path:
            assert [own[row.key] for own in pictures] == [own[row.key].tolist() for own in drawn]
            assert rows.ranges(row.key, begin, end) == done.ranges(row.key, begin, end)
    assert rows.ranges(path.key, begin, end) == [] and done.count(path.key, begin, end) > 1
    for ask in (Timeline.at, Timeline.next_range):
        assert ask(rows, path.key, begin) is None
    assert rows.coverage.next_gap(path.key, begin, 1) is None
    assert rows.search("matmul", path.key, begin) == done.search("matmul", path.key, begin)
    with tempfile.TemporaryFile(buffering=0) as file:  # without steps there is no path to wait for
        written = RowsWritten(facts.trace, None, file)
        assert all(row.kind != "path" for row in Timeline.open(file, written.describe(facts.trace)).rows)


UNIX_S = 1_800_000_000


def sampled(*gpus: int, at_s: float = 0.0) -> GpuCounters:
    """Ten samples a second apart, the first one at the trace's begin; power at 100 to 1,000 W of 1,000 W."""
    values = tuple(100.0 * (i + 1) for i in range(10))
    missing = (None, *values[1:])
    return GpuCounters(tuple(UNIX_S + at_s + i for i in range(10)), 1.0, {gpu: {
        "nvlink_rx_bytes_per_s": CounterLane(tuple(1e7 * v for v in values)), "power_w": CounterLane(values, 1000.0),
        "sm_active": CounterLane(tuple(v and v / 1000 for v in missing), 1.0)} for gpu in gpus})


def ten_seconds(counters: GpuCounters | None, origin_ns: int = UNIX_S * 10**9) -> Trace:
    b = Builder(gpus=2)
    for gpu in (0, 1):
        b.run(gpu, 0, 9_000_000)
    trace = b.build()
    trace.origin_ns, trace.counters = origin_ns, counters
    return trace


def test_samples_of_a_gpu_are_rows_of_it_on_the_clock_of_the_trace():
    timeline = timeline_of(ten_seconds(sampled(1)))
    rows = [row for row in timeline.rows if row.kind == "counter"]
    assert [(r.label, r.gpu, r.group) for r in rows] == [
        (label, 1, "GPU 1") for label in ("SM active", "NVLink RX GB/s", "Power")]
    power = rows[2].key
    assert timeline.rows[power - 3].kind == "stream"
    ranges = timeline.ranges(power, *timeline.window_ns)
    assert [(r.start_ns / 1e9, r.end_ns / 1e9) for r in ranges] == [(i, i + 1) for i in range(9)]  # none after the end
    assert ranges[0].name == "Power 200W of 1000W" and {r.kind for r in ranges} == {"counter"}
    levels = timeline.columns.levels(power, 0, 9 * 10**9, 9).tolist()
    assert levels == [pytest.approx(0.2 + 0.1 * i) for i in range(9)]
    assert timeline.columns.levels(power, 500_000_000, 1_500_000_000, 1).tolist() == [pytest.approx(0.25)]
    # The largest of all is its scale.
    assert timeline.columns.levels(rows[1].key, 8 * 10**9, 9 * 10**9, 1).tolist() == [1.0]
    assert timeline.at(rows[0].key, 0).name == "SM active 20%" and not timeline.no_counters


@pytest.mark.parametrize(("trace", "why"), [
    (ten_seconds(GpuCounters(reason="no GPU")), "no GPU"), (ten_seconds(GpuCounters()), "no GPU was sampled"),
    (ten_seconds(sampled(0), origin_ns=0), "does not show when"),
    (ten_seconds(sampled(0, at_s=3600.0)), "there are no samples in the recorded time"),
])
def test_why_a_timeline_has_no_samples(trace: Trace, why: str):
    timeline = timeline_of(trace)
    assert why in timeline.no_counters and not [row for row in timeline.rows if row.kind == "counter"]


def test_a_sample_after_a_pause_tells_of_one_interval_alone():
    counters = GpuCounters((UNIX_S + 1.0, UNIX_S + 7.0), 1.0, {0: {"sm_active": CounterLane((0.5, 0.25), 1.0)}})
    timeline = timeline_of(ten_seconds(counters))
    (row,) = (row.key for row in timeline.rows if row.kind == "counter")
    levels = timeline.columns.levels(row, 0, 9 * 10**9, 9)
    assert [None if v != v else v for v in levels.tolist()] == [0.5, None, None, None, None, None, 0.25, None, None]


def test_the_timeline_has_the_start_and_the_idle_gaps_of_what_follows():
    b, at = Builder(), 0.0
    for i in range(200):  # the second launch loads libraries for a second, then the host pauses now and then
        call = 1_000_000.0 if i == 1 else 5.0
        b.run(0, at + call + 2, 50, f"kernel_{i % 7}", launch=at, launch_length=call)
        at += call + (300 if i % 9 == 0 else 60)
    trace, steps = detect_steps(b.build())
    assert steps is None
    with tempfile.TemporaryFile() as file:
        rows = RowsWritten(trace, steps, file)
        rows.describe(trace)
        facts = analyze_with_steps(trace, steps)
        assert len(facts.trace.device) < len(trace.device)
        timeline = Timeline.open(file, rows.finish(facts))
    assert timeline.window_ns == trace.window_ns and timeline.idle_gaps
    for idle_gap in timeline.idle_gaps:
        assert idle_gap.start_ns >= 1_000_000_000 and idle_gap.ends is not None
        ender = timeline.range(*idle_gap.ends)
        assert ender.start_ns == idle_gap.end_ns and ender.name in idle_gap.ended_by
