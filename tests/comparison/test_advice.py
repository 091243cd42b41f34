"""Which advice was followed, and what it brought."""

from __future__ import annotations

import re

import numpy as np
import pytest

from gputop.advice.verdict import ONCE
from gputop.comparison.advice import FollowedAdvice, followed
from gputop.comparison.compare import compare_sides
from gputop.comparison.report_lines import text_report
from gputop.comparison.sides import LiveFigures, Side
from gputop.core.codec import convert
from gputop.core.findings import Finding
from tests.comparison.sides import changed, finding, side
from tests.records import replace


def advice(a: Side, b: Side) -> dict[str, FollowedAdvice]:
    return {entry.id: entry for entry in compare_sides(a, b).advice}


@pytest.mark.parametrize(("left", "outcome", "fulfilled"), [
    (0.7, "as promised", "kept"), (0.74, "as promised", "kept"), (0.5, "more than promised", "kept"),
    (0.85, "less than promised", "partly kept"), (1.0, "less than promised", "broken"),
    (1.2, "less than promised", "broken"),
])
def test_a_cured_cause_against_its_estimated_saving(left, outcome, fulfilled):
    a = side(0, 100, spread=0.01, findings=[finding("input_bound", 0.3)])
    entry = advice(a, side(1, 100, mean_s=0.2 * left, spread=0.01))["input_bound"]
    assert (entry.status, entry.promised, entry.outcome, entry.fulfilled) == ("gone", 0.3, outcome, fulfilled)
    assert entry.measured == pytest.approx(1 - left, abs=0.05)
    assert entry.low is not None and entry.high is not None and entry.low < entry.measured < entry.high


def watched(of: Side, seen_s: float, idle_s: float = 0.0, period_s: float | None = None) -> Side:
    live = {"period_s": [], "confidence": 0.0, "stretch_s": 1.0, "interval_s": 1.0, "seen_s": seen_s, "idle_s": idle_s,
            "idle_period_s": period_s}
    return changed(of, lambda document: document["trace"].update(live_steps=live))


@pytest.mark.parametrize(("before", "after", "fulfilled", "words"), [
    ((300, 5.3, 41), (70,), "kept", "5.22 s once in A, none in B; REACHED: it occurred every 41.0 s before, 13% of the "
                                    "run, and not in the 70.0 s before B's capture"),
    ((300, 5.3, 41), (300, 0.3, 41), "kept", "REACHED"),
    ((300, 5.3, 41), (300, 1.5, 41), "partly kept", "PARTLY REACHED"),
    ((300, 5.3, 41), (300, 5.0, 41), "broken", "NOT REACHED: it occurred every 41.0 s before, 13% of the run, and 5.00 "
                                               "s every 41.0 s"),
    # B holds none by chance, or may: what A shows is not what came again and again, or B has only begun.
    ((300, 5.3, 41), (50,), None, "B was watched for 50.0 s before its capture; capture B again after it has run for "
                                  "61.5 s"),
    ((300, 12.0, 41), (70,), None, "how often it occurred is unknown"),
    ((300,), (300,), None, "how often it occurred is unknown"),
])
def test_what_came_once_is_gone_where_the_live_signal_shows_that_it_no_longer_returns(before, after, fulfilled, words):
    once = finding("long_steps", None) | {"gain": {"step_time": None, "how": ONCE}, "claims": {"host": 5.22}}
    compared = compare_sides(watched(side(0, findings=[once]), *before), watched(side(1), *after))
    entry, = compared.advice
    assert (entry.status, entry.fulfilled, entry.once_s) == ("gone", fulfilled, (5.22, 0.0))
    assert words in " ".join(text_report(compared).split())
    unwatched = advice(side(0, findings=[once]), side(1))["long_steps"]
    assert (unwatched.fulfilled, unwatched.outcome) == (None, "cannot be told")


def test_a_weaker_cause_is_measured_against_what_was_promised():
    entry = advice(side(0, findings=[finding("input_bound", 0.3)]),
                   side(1, mean_s=0.16, findings=[finding("input_bound", 0.125, severity="medium")]))["input_bound"]
    assert (entry.status, entry.promised, entry.outcome, entry.fulfilled) == (
        "weaker", 0.3, "less than promised", "partly kept")
    assert (entry.severity_a, entry.severity_b) == ("high", "medium")


def test_a_smaller_share_of_a_longer_step_is_not_weaker_and_what_grew_is_not_gone():
    a = side(0, findings=[finding("input_bound", 0.3), {**finding("communication_exposed"), "claims": {
        "collectives": 0.1}}])
    b = side(1, mean_s=0.6, findings=[{**finding("input_bound", 0.2), "title": "Less"}])
    found = advice(a, b)
    assert (found["input_bound"].status, found["input_bound"].title_b) == ("same", "Less")
    hidden = found["communication_exposed"]
    assert hidden.status == "not judged" and (hidden.reason or "").startswith("exposed communication takes longer in B")


def test_the_range_of_a_longer_step_reads_as_its_change():
    a, b = side(0, findings=[finding("input_bound", 0.3)]), side(1, mean_s=0.4)
    text = " ".join(text_report(compare_sides(a, b)).split())
    assert re.search(r"measured (\d+)% more \(\d+% to \d+%\); NOT REACHED", text), text


def test_several_cures_are_measured_together():
    found = advice(side(0, findings=[finding("input_bound", 0.3), finding("launch_bound", 0.2)]), side(1, mean_s=0.1))
    assert {e.outcome for e in found.values()} == {"cannot be told"}
    assert all(e.measured == pytest.approx(0.5, abs=0.05) and "together" in (e.reason or "") for e in found.values())
    # 30 and 20% alone: together 30 to 50, and half was gained.
    assert {(e.together, e.fulfilled) for e in found.values()} == {((0.3, 0.5), "kept")}


def test_what_stays_what_grows_and_what_is_new():
    a = side(0, findings=[finding("same", 0.2), finding("grows", 0.06, severity="medium")])
    b = side(1, findings=[finding("same", 0.21), finding("grows", 0.2), finding("fresh", 0.1)])
    found = advice(a, b)
    assert {id_: e.status for id_, e in found.items()} == {"same": "same", "grows": "stronger", "fresh": "new"}
    assert all(e.outcome is None for e in found.values())
    assert {id_: e.promised for id_, e in found.items()} == {"same": 0.2, "grows": 0.06, "fresh": None}


def test_advice_that_helped_less_than_promised_is_told_although_the_finding_is_still_there():
    """A slow map on two cores: promised were 75%, its snippet brought half, and the step still waits."""
    a = side(0, findings=[finding("input_bound", 0.75)])
    entry = advice(a, side(1, mean_s=0.1, findings=[finding("input_bound", 0.73)]))["input_bound"]
    assert (entry.status, entry.promised, entry.fulfilled) == ("same", 0.75, "partly kept")
    assert entry.measured == pytest.approx(0.5, abs=0.05) and entry.outcome is None
    text = " ".join(text_report(compare_sides(a, side(1, mean_s=0.1, findings=[finding("input_bound", 0.73)]))).split())
    assert "STILL THERE" in text and "estimated 75% less; measured 50% less" in text and "PARTLY REACHED" in text
    none = advice(a, side(1, mean_s=0.2, findings=[finding("input_bound", 0.75)]))["input_bound"]
    assert none.promised == 0.75 and none.fulfilled is None and none.reason is not None


def test_the_promise_is_what_the_capture_said():
    """Another version may find another figure in the same trace, or nothing; somebody followed what was shown."""
    said = (convert(finding("input_bound", 0.76), Finding), convert(finding("forgotten", 0.1), Finding))
    a = replace(side(0, findings=[finding("input_bound", 0.28)]), findings_at_capture=said)
    found = advice(a, side(1, mean_s=0.14))
    assert found["input_bound"].promised == 0.76 and found["input_bound"].when == "capture"
    assert found["forgotten"].status == "gone" and found["forgotten"].promised == 0.1
    now = advice(replace(a, findings_at_capture=None), side(1, mean_s=0.14))["input_bound"]
    assert (now.promised, now.when, now.fulfilled) == (0.28, "now", "kept")


def test_a_rule_that_abstains_cures_nothing():
    entry = advice(side(0, findings=[finding("input_bound")]), side(1, abstained=["input_bound"]))["input_bound"]
    assert entry.status == "not judged" and entry.reason == "the rule needs the trace" and entry.outcome is None
    back = advice(side(1, abstained=["input_bound"]), side(0, findings=[finding("input_bound")]))["input_bound"]
    assert back.status == "new" and back.reason == "not checked in A: the rule needs the trace"


def test_what_a_side_cannot_show_is_not_gone():
    live = convert({**finding("idle_gpu", None), "origin": "live"}, Finding)
    figures = LiveFigures(False, 1, {}, (convert(finding("input_bound"), Finding), live), ())
    seen = replace(side(0), live=figures)
    only_trace = side(1)
    only_live = replace(seen, analysis=None, series=None, live=replace(figures, findings=()))
    for b, statuses in ((only_trace, ["gone", "not judged"]), (only_live, ["not judged", "gone"])):
        assert [(e.id, e.status) for e in followed(seen, b, None)] == list(
            zip(["input_bound", "idle_gpu"], statuses, strict=True))
    assert {e.reason for e in followed(only_trace, seen, None)} == {
        None, "not checked in A: the trace has no live samples"}


def test_a_cause_that_another_one_explains_is_not_gone():
    folded = finding("replica_imbalance", 0.4, consequences=(finding("collective_waiting", 0.3),))
    found = advice(side(0, findings=[finding("collective_waiting", 0.3)]), side(1, findings=[folded]))
    assert {id_: e.status for id_, e in found.items()} == {"collective_waiting": "same", "replica_imbalance": "new"}


def test_with_another_batch_size_the_estimated_saving_is_not_judged():
    a = side(0, findings=[finding("launch_bound", 0.5)])
    entry = advice(a, side(1, mean_s=0.2, h2d_bytes=2e8))["launch_bound"]
    assert entry.outcome == "cannot be told" and "2 times" in (entry.reason or "")
    assert "the time per sample changed by -50%" in (entry.reason or "")


def test_a_gain_per_sample_is_measured_per_sample():
    a = side(0, findings=[finding("batch_size_headroom", 0.4, per="sample")])
    entry = advice(a, side(1, mean_s=0.24, h2d_bytes=2e8))["batch_size_headroom"]
    assert entry.measured == pytest.approx(0.4, abs=0.03) and entry.outcome == "as promised"
    unknown = changed(side(1, mean_s=0.24), lambda document: document.update(copies=None))
    entry = advice(a, unknown)["batch_size_headroom"]
    assert entry.measured is None and "batch sizes" in (entry.reason or "")


def test_advice_to_change_the_batch_was_not_followed_where_the_batch_is_the_same():
    found = advice(side(0, findings=[finding("launch_bound", 0.5), finding("batch_size_headroom", 0.4, per="sample")]),
                   side(1, mean_s=0.1))
    assert found["launch_bound"].outcome == "as promised" and found["batch_size_headroom"].outcome is None


def test_without_an_estimated_saving_or_a_step_time_nothing_is_judged():
    a = side(0, findings=[finding("input_bound", None)])
    assert advice(a, side(1))["input_bound"].reason == "no saving was estimated"
    b = changed(side(1), lambda document: document.update(steps=None))
    entry = advice(side(0, findings=[finding("input_bound")]), b)["input_bound"]
    assert entry.outcome == "cannot be told" and entry.measured is None


def test_steps_that_vary_too_much_judge_no_estimated_saving():
    wild = np.random.default_rng(3).lognormal(0, 1, 12)
    entry = advice(side(0, step_s=wild, findings=[finding("input_bound", 0.1)]),
                   side(1, step_s=wild[::-1] * 1.02))["input_bound"]
    assert entry.outcome == "cannot be told" and "vary too much" in (entry.reason or "")
