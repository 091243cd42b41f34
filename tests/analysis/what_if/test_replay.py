"""The replay against jobs whose step with the cure is known."""

from __future__ import annotations

import random
from itertools import permutations

import numpy as np
import pytest

from gputop.advice.rule import Rule
from gputop.advice.trace.advise import Cures, combinations_saved
from gputop.advice.trace.inputs import MISSING
from gputop.advice.trace_rules import TRACE_RULES
from gputop.advice.verdict import Verdict
from gputop.analysis.gpu.device_time import timelines
from gputop.analysis.results import Analysis
from gputop.analysis.steps.steps import find_steps
from gputop.analysis.what_if.cure import AS_RECORDED, Cure, combined
from gputop.analysis.what_if.host_waits import host_waits
from gputop.analysis.what_if.replay import TOLERANCE, Replay, event_times, idle_saved, replay_window
from gputop.core.findings import Gain, with_cures
from gputop.diagnosis.diagnose import analyze_to_facts, analyze_trace
from gputop.trace.intervals import union
from gputop.trace.model import Kind, Trace
from tests.analyses import make_analysis
from tests.analysis.what_if.paced_traces import (
    NCCL,
    STEP,
    STEPS,
    any_job,
    gpu_paced,
    host_paced,
    late_batches,
    unexplained,
)
from tests.records import replace
from tests.trace.build import Builder, keras_steps
from tests.tui.found import HEAVY


def replay(trace: Trace) -> Replay:
    found = replay_window(trace, timelines(trace), find_steps(trace))
    assert found is not None
    return found


def kernels(trace: Trace, ratio: float) -> Cure:
    return Cure(assumes="", scaled=((np.flatnonzero(trace.device.kind == Kind.COMPUTE), ratio),))


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


def paused(gpu_us: list[float], pause_us: list[float], waits: bool) -> Trace:
    """A kernel in each step of 20 ms; the next is launched a pause after its end, or, by a busy host, a pause after
    its own launch. No call that waits is in the trace."""
    at = [50.0]
    for length, pause in zip(gpu_us, pause_us, strict=True):
        at.append(at[-1] + pause + (length + 10 if waits else 0))
    b = Builder()
    for length, begin, end in zip(gpu_us, at[:-1], at[1:], strict=True):
        b.host("EagerExecute", begin - 50, end - begin - 50, is_func=1,
               eager_op="__inference_multi_step_on_iterator_42")
        b.run(0, begin + 5, length, launch=begin)
    return b.build()


def test_a_pause_that_may_be_a_wait_is_told_both_ways() -> None:
    """15 ms of kernels, then a pause of 5 ms: with kernels twice as fast it saves 37.5% if the host waited."""
    trace = paused([15_000] * 12, [5_000] * 12, waits=True)
    found = replay(trace)
    assert found.error < TOLERANCE
    assert found.saved(kernels(trace, 0.5)) == pytest.approx(0.0, abs=0.01)
    assert found.saved_if_waiting(kernels(trace, 0.5)) == pytest.approx(0.375, abs=0.01)
    assert found.saved_if_waiting(Cure(assumes="")) == 0.0
    verdict = Verdict(gpus=(0,), share=0.5, cure=kernels(trace, 0.5))
    saved, why = Cures(analyze_to_facts(trace)).saved(verdict)
    assert saved is None and "37% if the host waits and 0% if it is busy" in why


def test_what_saves_more_than_its_bound_is_an_upper_bound() -> None:
    trace = gpu_paced()
    cures = Cures(analyze_to_facts(trace))
    assert cures.saved(Verdict(gpus=(0,), share=0.6, cure=kernels(trace, 0.5)))[0] == pytest.approx(0.45, abs=0.02)
    saved, why = cures.saved(Verdict(gpus=(0,), share=0.2, cure=kernels(trace, 0.5)))
    assert saved is None and "larger savings (45%)" in why


def test_what_is_judged_large_does_not_vanish_because_a_replay_saves_nothing() -> None:
    analysis = analyze_trace(host_paced())
    kept = {id_ for finding in analysis.findings for id_ in finding.ids}
    kept |= {abstained.id for abstained in analysis.abstained}
    assert {rule.id for rule in large_verdicts(host_paced())} <= kept


def large_verdicts(trace: Trace) -> list[Rule]:
    """The rules that judge a tenth of the step and more."""
    facts = analyze_to_facts(trace)
    out = []
    for rule in TRACE_RULES:
        if not any(MISSING[need](facts) for need in rule.needs):
            verdict = rule.function("judge")(facts)
            if isinstance(verdict, Verdict) and (verdict.most or 0.0) >= 0.1:
                out.append(rule)
    return out


def test_a_host_that_waits_for_room_in_the_queue_does_so_to_the_end_of_the_recording() -> None:
    """The last launches have no kernel in the trace, as the queue holds the work of several steps."""
    b = keras_steps(Builder(), STEPS, STEP, STEP - 50)
    ahead, length = 100, 1_000.0
    for k in range(round(STEPS * STEP / length)):
        begin = k * length
        if k >= ahead:
            b.run(0, begin, length - 2, launch=begin - ahead * length, launch_length=length - 10)
        else:
            b.run(0, begin, length - 2)
        if k >= STEPS * STEP / length - ahead:
            b.host("cudaLaunchKernel", begin, length - 10, line="launch 0")
    trace = b.build()
    assert replay(trace).saved(kernels(trace, 1 / 3)) == pytest.approx(2 / 3, abs=0.05)


def test_a_copy_in_a_call_that_waits_for_another_stream_comes_sooner_with_it() -> None:
    """A copy to pageable memory is made in a call that waits for the kernels first."""
    b = keras_steps(Builder(), STEPS, STEP, STEP - 50)
    for i in range(STEPS):
        begin = i * STEP + 100
        b.run(0, begin, 18_000, launch=begin - 5, launch_length=4)
        b.run(0, begin + 18_030, 10, "MemcpyD2H", kind=Kind.D2H, launch=begin, launch_length=18_050, stream=2)
    trace = b.build()
    assert replay(trace).error < TOLERANCE
    assert replay(trace).saved(kernels(trace, 0.5)) == pytest.approx(9_000 / STEP, abs=0.01)


@pytest.mark.parametrize("waits", [True, False])
def test_pauses_of_a_steady_length_tell_what_the_host_does(waits: bool) -> None:
    rng = random.Random(1)
    gpu_us = [rng.uniform(13_000, 16_000) for _ in range(24)]
    trace = paused(gpu_us, [(5_000 if waits else 20_000) + rng.uniform(0, 100) for _ in gpu_us], waits)
    found = replay(trace)
    expected = 0.5 * sum(gpu_us) / sum(length + 5_060 for length in gpu_us) if waits else 0.0
    assert found.saved(kernels(trace, 0.5)) == pytest.approx(expected, abs=0.02)
    assert found.saved_if_waiting(kernels(trace, 0.5)) == pytest.approx(expected, abs=0.02)


def test_removed_host_time_counts_as_far_as_nothing_else_takes_its_place() -> None:
    trace = gpu_paced()
    rest = union([int((i * STEP + 18_200) * 1e3) for i in range(STEPS)],
                 [int((i * STEP + 19_200) * 1e3) for i in range(STEPS)])
    cure = Cure(assumes="", host={0: rest})
    assert replay(trace).saved(cure) == pytest.approx(1_000 / STEP, abs=0.01)
    assert replay(trace).saved(combined([cure, kernels(trace, 0.5)])) == pytest.approx(10_000 / STEP, abs=0.02)


def test_a_batch_comes_no_sooner_because_it_is_asked_for_sooner() -> None:
    found = replay(late_batches())
    assert found.saved(Cure(assumes="", launching=True)) < 0.1
    assert found.saved(Cure(assumes="", input_left=0.0)) == pytest.approx(8_000 / STEP, abs=0.03)
    assert found.saved(Cure(assumes="", input_left=0.5)) == pytest.approx(4_000 / STEP, abs=0.03)


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
    assert replay(unexplained()).error > 0.5


@pytest.mark.parametrize("other", [True, False])
def test_a_wait_costs_nothing_while_another_thread_launches_on(other: bool) -> None:
    """A thread waits for 2 ms in each step; the host goes on in the ``other`` one meanwhile, or not at all."""
    b = keras_steps(Builder(), STEPS, STEP, STEP - 50)
    for i in range(STEPS):
        begin = i * STEP + 50
        b.run(0, begin + 5, 20, launch=begin, thread="waiting")
        b.host("cuStreamSynchronize", begin + 8, 2_000, line="waiting")
        for k in range(1, 190):
            at = begin + 100 * k + (0 if other else 1_000)
            if at > begin + 2_010 or other:
                b.run(0, at + 5, 20, launch=at, thread="other" if other else "waiting")
    trace = b.build()
    cure = Cure(assumes="", calls=host_waits(trace, 0).calls)
    assert replay(trace).saved(cure) == pytest.approx(0.0 if other else 2_000 / STEP, abs=0.005)


@pytest.mark.parametrize("seed", range(8))
def test_nothing_changed_changes_nothing(seed: int) -> None:
    found = replay(any_job(seed).build())
    assert found.saved(Cure(assumes="")) == 0.0
    begin, end = event_times(found.graph, AS_RECORDED)
    assert (begin == found.graph.events.start).all() and (end == found.graph.events.end).all()
    assert not any(spans.total for spans in idle_saved(found.graph, Cure(assumes="")).values())
    calls = host_waits(found.graph.trace, 0).calls
    assert found.saved(Cure(assumes="", launching=True, pauses=True, calls=calls)) >= 0.0


@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_events_in_a_file_and_their_names_do_not_count(seed: int) -> None:
    def figures(trace: Trace) -> list[object]:
        found = replay(trace)
        cures = [kernels(trace, 0.5), Cure(assumes="", launching=True),
                 Cure(assumes="", calls=host_waits(trace, 0).calls)]
        idle = {gpu: spans.total for gpu, spans in idle_saved(found.graph, cures[-1]).items()}
        return [found.recorded_ns, found.modeled_ns, found.ambiguous_wait_ratio, idle,
                *map(found.saved, [*cures, combined(cures)])]

    expected = figures(any_job(seed).build())
    assert figures(any_job(seed).build(shuffle=seed + 1)) == expected
    assert figures(any_job(seed, renamed=True).build(shuffle=seed + 2)) == expected


def test_sets_of_cures_are_replayed_and_grow_only() -> None:
    """Of the first five every set; of all the first two, three and so on; as far as the replays go."""
    def saved(ids: tuple[str, ...]) -> float:
        return 0.05 if ids == ("a", "b") else sum(alone[own] for own in ids) ** 1.5

    alone = {"a": 0.2, "b": 0.1, "c": 0.08, "d": 0.05, "e": 0.04, "f": 0.02}
    found = combinations_saved(alone, saved, 100)
    assert len(found) == len({frozenset(ids) for ids in found}) == 2 ** 5 + 1 and ("a", "b", "f") not in found
    assert found["a", "b"] == 0.2, "no less than the first alone"
    for ids, share in found.items():
        assert all(share >= other for fewer, other in found.items() if set(fewer) <= set(ids))
    few = combinations_saved(alone, saved, 2)
    assert [ids for ids in few if len(ids) > 1] == [
        ("a", "b"), ("a", "c"), ("a", "d"), ("a", "b", "c"), ("a", "b", "c", "d"), tuple("abcde"), tuple("abcdef")]
    assert combinations_saved({}, saved, 2) == {} and combinations_saved({"a": 0.2}, saved, 2) == {("a",): 0.2}


def test_what_the_first_findings_save_at_once_is_their_gain_together() -> None:
    """Kernels of 20 µs every 100 µs: back to back, and as many of a third of the length."""
    trace = host_paced()
    cures = Cures(analyze_to_facts(trace))
    cures._replay = replay(trace)
    cures.by_finding = {"launches": Cure(assumes="", launching=True), "kernels": kernels(trace, 1 / 3)}
    cures.by_finding["half"] = kernels(trace, 1 / 2)
    findings, table = cures.together([
        replace(HEAVY, id=id_, gain=Gain(cures._replay.saved(cure), "", by="replay"))
        for id_, cure in cures.by_finding.items()])
    saved = {gain.findings: gain.step_time for gain in table}
    assert set(saved) == {("launches", "kernels"), ("launches", "half"), ("kernels", "half"),
                          ("launches", "kernels", "half")}
    for i in range(2, 4):
        first = findings[:i]
        assert first[-1].gain.together == saved[tuple(f.id for f in first)]
        for some in permutations(f.id for f in first):
            assert with_cures(findings, some, table)[0] == first[-1].gain.together
    share, others = with_cures(findings, {"launches"}, table)
    assert share == findings[0].gain.step_time
    assert others == [(findings[1], saved["launches", "kernels"] - share),
                      (findings[2], saved["launches", "half"] - share)]
    assert with_cures(findings, {"kernels", "half"}, ()) == (None, None)
    document = make_analysis(what_if=table).to_json()
    assert Analysis.from_json(document).what_if == table
    del document["what_if"]  # as before there was one
    assert Analysis.from_json(document).what_if == ()


def test_sets_of_cures_save_the_lesser_where_it_is_unclear_what_the_host_does(monkeypatch: pytest.MonkeyPatch) -> None:
    cures = Cures(analyze_to_facts(paused([15_000] * 12, [5_000] * 12, waits=True)))
    assert cures._replay is not None and 0.2 < cures._replay.ambiguous_wait_ratio <= 1.0
    cures.by_finding = {"a": Cure(assumes=""), "b": Cure(assumes="")}
    findings = [replace(HEAVY, id=id_, gain=Gain(0.1, "", by="replay")) for id_ in cures.by_finding]
    for busy, waiting, least in ((0.3, 0.2, 0.2), (0.2, 0.3, 0.2), (0.05, 0.3, 0.1)):
        monkeypatch.setattr(Replay, "saved", lambda self, cure, busy=busy: busy)
        monkeypatch.setattr(Replay, "saved_if_waiting", lambda self, cure, waiting=waiting: waiting)
        assert cures.together(findings)[1][0].step_time == least
