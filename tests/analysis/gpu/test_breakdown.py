from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gputop.analysis.gpu.breakdown import breakdown_by_step, parts_by_gpu
from gputop.analysis.gpu.device_time import timelines
from gputop.diagnosis.diagnose import analyze_trace
from gputop.trace.model import Kind
from tests.trace.build import Builder, keras_steps

KINDS = list(Kind)


def parts(b: Builder, lo: float, hi: float) -> dict[str, float]:
    """Breakdown of one stretch, in µs."""
    trace = b.build()
    bounds = [(round(lo * 1000), round(hi * 1000))]
    found = breakdown_by_step(trace, parts_by_gpu(trace, timelines(trace), bounds), bounds)
    return {name: round(s * 1e6, 6) for name, (s,) in found.items() if s}


def test_each_instant_goes_to_one_part_in_order_of_precedence():
    b = (Builder().run(0, 0, 30).run(0, 20, 30, "nccl", kind=Kind.COLLECTIVE)
         .run(0, 40, 30, "MemcpyH2D", kind=Kind.H2D).run(0, 60, 30, "MemcpyD2H", kind=Kind.D2H))
    assert parts(b, 0, 100) == {"compute": 30, "collectives": 20, "h2d": 20, "d2h": 20, "idle": 10}


def test_input_counts_only_while_no_gpu_works():
    b = Builder(gpus=2).run(0, 0, 50).run(1, 0, 20)
    b.host("IteratorGetNextOp::DoCompute", 30, 60)
    # GPU 0 is free from 50, GPU 1 from 20; no GPU is busy from 50, the wait ends at 90.
    assert parts(b, 0, 100) == {"compute": 35, "input": 40, "idle": 25}


def test_idle_between_close_launches_is_launch_and_the_long_pause_is_host():
    b = Builder()
    for burst in (100, 5100):
        for i in range(5):
            b.run(0, burst + i * 20, 4, launch=burst + i * 20 - 10)
    found = parts(b, 100, 5184)
    assert found["launch"] == pytest.approx(8 * 16 + 10)  # and the last launch before the second burst's first kernel
    assert found["host"] == pytest.approx(5000 - 84 - 10)
    assert found["compute"] == 40


def test_gaps_between_tf_functions_are_host_work_however_short():
    b = keras_steps(Builder(), 2, 200, 100)
    for t in (10, 60, 210, 260):
        b.run(0, t + 10, 20, launch=t)
    found = parts(b, 0, 300)
    # Idle 40-70 within the call; 90-220 of which 100-200 lies between the calls; 240-270 within, and 290-300, behind
    # the last launch. Work from before the recording may have run up to 30.
    assert found["host"] == pytest.approx(100 + 10) and found["launch"] == pytest.approx(30 + 30 + 30)


def test_work_that_was_queued_is_not_the_hosts_fault():
    b = Builder().run(0, 60, 10, launch=0).run(0, 90, 10, launch=20)
    assert parts(b, 60, 100) == {"compute": 20, "idle": 20}


def test_a_launching_call_that_is_not_done_keeps_the_gpu_waiting_until_it_is_but_for_what_it_has_launched():
    b = Builder().run(0, 100, 10, launch=90).run(0, 190, 10, launch=105, launch_length=65)  # done at 170
    assert parts(b, 100, 200) == {"compute": 20, "launch": 60, "idle": 20}
    # The kernels of one launch follow each other as they depend.
    b = Builder().run(0, 100, 10, launch=90, launch_length=200).run(0, 150, 10, launch=90, launch_length=200)
    assert parts(b, 100, 160) == {"compute": 20, "idle": 40}


def test_a_launch_held_up_amidst_another_gpus_work_is_no_waiting_for_that_gpu():
    b = Builder(gpus=2).run(0, 100, 2_000, launch=80).run(0, 5_000, 1_000, launch=4_990)
    b.run(1, 100, 5_900, launch=80)
    found = parts(b, 100, 6_000)
    assert found["compute"] == (3_000 + 5_900) / 2 and found.get("idle", 0) == 0
    assert found.get("launch", 0) + found.get("host", 0) == 2_900 / 2


def test_waiting_for_a_busier_gpu_is_not_launching():
    b = Builder(gpus=2)
    for i in range(3):
        b.run(0, 100 + i * 10_000, 9_500, launch=80 + i * 10_000)
        b.run(1, 100 + i * 10_000, 4_000, launch=80 + i * 10_000)
    found = parts(b, 100, 20_100)
    assert found["compute"] == 13_500 and found["idle"] == 5_500
    assert found.get("launch", 0) + found.get("host", 0) == pytest.approx(1_000)  # the half millisecond of both


def test_two_gpus_that_starve_together_do_not_wait_for_each_other():
    b = Builder(gpus=2)
    for i in range(100):
        for gpu in range(2):
            b.run(gpu, 100 + i * 40 + gpu * 20, 10, launch=95 + i * 40 + gpu * 20)
    b.run(0, 5_000, 10, launch=4_990)
    assert parts(b, 100, 4_000)["launch"] > 2_500


def test_the_time_before_the_first_event_is_the_hosts_if_that_was_launched_late():
    b = Builder().host("aten::linear", 0, 7_000).run(0, 5_000, 100, launch=4_990)
    # What was launched earlier may have run for 110 µs, as the recorded kernel from its launch on.
    assert parts(b, 0, 5_100) == {"compute": 100, "launch": 10, "host": 4_990 - 110, "idle": 110}
    assert parts(b, 4_000, 5_100) == {"compute": 100, "launch": 10, "host": 990}


def test_work_from_before_the_recording_may_run_as_long_as_recorded_work_does():
    b = Builder().host("aten::linear", 0, 20_000).run(0, 5_000, 100, launch=4_990).run(0, 7_000, 6_000, launch=6_000)
    assert parts(b, 0, 5_100) == {"compute": 100, "idle": 5_000}
    b.host("cudaDeviceSynchronize", 200, 1_800)
    assert parts(b, 0, 5_100) == {"compute": 100, "launch": 10, "host": 2_990, "idle": 2_000}


@pytest.mark.parametrize(("host", "launch"), [(True, 0), (True, 2_000), (True, None), (False, 4_990)], ids=[
    "before the step", "in a queue", "launch not known", "no event of the host"])
def test_the_time_before_the_first_event_has_no_cause_if_that_had_waited_or_the_host_shows_none(host, launch):
    b = Builder().run(0, 5_000, 100, launch=launch)
    if host:
        b.host("aten::linear", 0, 7_000)
    assert parts(b, 1_000, 5_100) == {"compute": 100, "idle": 4_000}


def test_a_large_part_of_the_steps_before_the_first_event_that_has_no_cause_is_noted():
    def notes(first_us: float) -> list[str]:
        b = keras_steps(Builder(), 4, 10_000, 9_900)
        for i in range(4):
            b.run(0, i * 10_000 + first_us, 5_000, launch=i * 10_000 + first_us - 10)
        return [note.message for note in analyze_trace(b.build()).trace.quality if note.id == "unseen_head"]

    assert notes(4_900) == ["GPU 0 has no event in the first 4.9 ms of the steps. The GPU may have run work "
                            "launched before the recording, so gputop names no cause for that time."]
    assert notes(1_000) == []


def test_the_time_after_the_last_event_is_the_hosts_if_nothing_is_launched_any_more():
    b = Builder().host("aten::linear", 0, 7_000).run(0, 0, 100, launch=0)
    assert parts(b, 0, 7_500) == {"compute": 100, "host": 6_900, "idle": 500}
    b.host("cuLaunchKernel", 3_000, 5)  # a kernel that the recording has lost
    assert parts(b, 0, 7_500) == {"compute": 100, "idle": 7_400}


def test_a_gpu_that_waits_at_an_edge_for_another_ones_work_does_not_wait_for_its_host():
    b = Builder(gpus=2).host("aten::linear", 0, 20_000).run(0, 100, 9_900, launch=80).run(1, 10_010, 90, launch=10_000)
    found = parts(b, 100, 10_100)
    assert found["compute"] == (9_900 + 90) / 2 and found["idle"] == 9_900 / 2


def test_gpus_that_took_no_part_are_not_averaged_in_and_without_any_the_rest_is_host():
    assert parts(Builder(gpus=8).run(3, 0, 60), 0, 100) == {"compute": 60, "idle": 40}
    b = Builder(gpus=0).host("IteratorGetNextOp::DoCompute", 10, 40)
    assert parts(b, 0, 100) == {"input": 40, "host": 60}


events = st.lists(st.tuples(
    st.integers(0, 2), st.integers(0, 5000), st.integers(1, 1500), st.integers(0, len(KINDS) - 1),
    st.one_of(st.none(), st.integers(0, 3000)),
), max_size=25)
hosts = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 800)), max_size=6)


def made(device, waiting) -> Builder:
    b = keras_steps(Builder(gpus=3), 6, 1000, 700)
    for gpu, start, length, kind, before in device:
        launch = None if before is None else max(start - before, 0)
        b.run(gpu, start, length, KINDS[kind].name, kind=KINDS[kind], launch=launch)
    for start, length in waiting:
        b.host("IteratorGetNextOp::DoCompute", start, length, line="tf_data_iterator_get_next/1")
    return b


@given(events, hosts)
def test_parts_sum_to_the_step(device, waiting):
    analysis = analyze_trace(made(device, waiting).build())
    if device:
        assert analysis.breakdown is not None and analysis.steps is not None
        assert analysis.breakdown.total == pytest.approx(analysis.steps.mean_s, abs=1e-12)
        assert min(analysis.breakdown.known.values()) >= 0


@settings(max_examples=30)
@given(events, hosts, st.integers(0, 1000))
@example([(1, 0, 1, 0, 0), (1, 0, 1, 1, 0)], [], 1)  # two of one stream and instant
def test_the_order_of_events_lines_and_names_does_not_matter(device, waiting, seed):
    b = made(device, waiting)
    assert analyze_trace(b.build()).to_json() == analyze_trace(b.build(shuffle=seed)).to_json()


def test_what_an_idle_gpu_starts_long_after_its_launch_is_not_held_up_by_its_host():
    """As where programs share a GPU by turns."""
    b = Builder().run(0, 0, 10, launch=0)
    for i in range(1, 5):
        b.run(0, i * 2000, 10, launch=(i - 1) * 2000 + 15)
    found = parts(b, 0, 8010)
    assert found["idle"] == 4 * 1980 and found["launch"] + found["host"] == 4 * 10
