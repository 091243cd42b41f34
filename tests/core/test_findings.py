from __future__ import annotations

import pytest

from gputop.advice.merge import merge_findings
from gputop.core.codec import convert, to_document
from gputop.core.findings import Abstained, Finding, Gain, at_most, collect, ranked, severity_of
from tests.records import replace

F = Finding(id="input_bound", severity="high", title="t", why="w", evidence={"wait_s": 0.2}, action="a", source="s",
            gain=Gain(0.5, "how"), gpus=(0, 1), snippet="x = 1")


def test_json_round_trip() -> None:
    assert convert(to_document(F), Finding) == F


def test_json_without_per_is_per_step() -> None:
    data = to_document(F)
    assert data["gain"].pop("per") == "step" and convert(data, Finding) == F
    sample = replace(F, gain=Gain(0.5, "how", "sample"))
    assert convert(to_document(sample), Finding) == sample


def test_the_lower_of_two_severities() -> None:
    assert [at_most(s, "medium") for s in ("high", "medium", "low")] == ["medium", "medium", "low"]


def test_severity_follows_the_contract() -> None:
    assert [severity_of(x) for x in (0.15, 0.149, 0.05, 0.049, 0.0)] == ["high", "medium", "medium", "low", "low"]


def test_ranked_by_severity_then_by_what_it_saves() -> None:
    low = replace(F, id="l", severity="low", gain=Gain(0.9, ""))
    more, unknown = replace(F, id="m", gain=Gain(0.6, "")), replace(F, id="u", gain=Gain(None, ""))
    assert [f.id for f in ranked([low, unknown, F, more])] == ["m", "input_bound", "u", "l"]


def test_collect_parts_findings_from_abstentions() -> None:
    advice = collect([None, F, Abstained("launch_bound", "no GPU in the trace")])
    assert advice.findings == (F,) and advice.abstained[0].id == "launch_bound"


def test_one_cause_seen_live_and_in_a_trace_is_one_entry() -> None:
    live = replace(F, id="gpu0_oversubscribed", origin="live", gain=Gain(None, ""))
    idle = replace(live, id="idle_gpu")
    trace = replace(F, id="gpu0_oversubscribed")
    assert [(f.id, f.origin) for f in merge_findings([trace], [live, idle])] == [
        ("gpu0_oversubscribed", "trace"), ("idle_gpu", "live")]
    assert [f.id for f in merge_findings([replace(F, id="replica_imbalance")], [live])] == ["replica_imbalance"]


def test_what_keeps_all_gpus_idle_stands_before_what_a_capture_saves() -> None:
    live = replace(F, id="job_on_cpu", origin="live", gain=Gain(None, ""))
    merged = merge_findings([F], [live, replace(live, id="collective_hang"), replace(live, id="idle_gpu")])
    assert [f.id for f in merged] == ["collective_hang", "job_on_cpu", "input_bound", "idle_gpu"]


def test_what_telemetry_sees_of_a_cause_is_folded_under_it() -> None:
    low = replace(F, id="low_sm_active", severity="low", origin="live", gain=Gain(None, ""))
    cpu, link, stuck = (replace(low, id=i, severity="medium")
                        for i in ("host_cpu_saturated", "pcie_saturated", "spinning"))
    merged = merge_findings([F], [low, cpu, link, stuck])
    assert [f.id for f in merged] == ["input_bound", "pcie_saturated", "spinning"]
    assert merged[0].consequences == (low, cpu) and merged[0].gain == F.gain
    copies = replace(F, id="copies_excessive", severity="medium", gain=Gain(0.1, "how"))
    merged = merge_findings([copies, F], [link, low])
    assert [f.id for f in merged] == ["input_bound", "copies_excessive"]  # under the main cause that fits
    assert [c.id for f in merged for c in f.consequences] == ["low_sm_active", "pcie_saturated"]


def test_a_cause_found_below_another_folds_what_follows_too() -> None:
    low = replace(F, id="low_sm_active", severity="low", origin="live", gain=Gain(None, ""))
    above = replace(F, id="sync_copies", consequences=(replace(F, id="launch_bound"),))
    assert [f.id for f in merge_findings([above], [low])] == ["sync_copies"]


def test_an_old_trace_or_a_small_cause_explains_nothing_of_now() -> None:
    low = replace(F, id="low_sm_active", severity="low", origin="live", gain=Gain(None, ""))
    assert [f.id for f in merge_findings([F], [low], 899.0)] == ["input_bound"]
    assert [f.id for f in merge_findings([F], [low], 901.0)] == ["input_bound", "low_sm_active"]
    small = replace(F, severity="low", gain=Gain(0.03, ""))
    assert [f.id for f in merge_findings([small], [low])] == ["input_bound", "low_sm_active"]


def test_the_advice_to_capture_for_the_head_room_is_done_once_a_trace_tells_it() -> None:
    reserved = replace(F, id="memory_preallocated", severity="low", origin="live")
    assert [f.id for f in merge_findings([], [reserved])] == ["memory_preallocated"]
    assert merge_findings([], [reserved], allocators_known=True) == ()


@pytest.mark.parametrize(("claim", "by", "key"), [
    ("measured", "replay", None), ("at most", "bound", None), ("at most", "replay", "at_most"),
    ("at least", "replay", "at_least"), ("at least", "bound", "at_least"), ("about", "bound", "estimate")])
def test_a_document_before_the_claims_tells_the_same(claim, by, key) -> None:
    gain = Gain(0.5, "how", by=by, claim=claim)
    document = to_document(gain)
    assert {name for name in ("at_most", "at_least", "estimate") if document[name]} == ({key} if key else set())
    del document["claim"]
    assert convert(document, Gain) == gain


def test_the_arrow_ends_where_the_share_does() -> None:
    gain = Gain(0.54, "how", before_s=0.643)
    assert gain.after_s == pytest.approx(0.643 * (1 - 0.54))
    assert replace(gain, before_s=None).after_s is None and Gain(None, "", before_s=0.6).after_s is None
    assert Gain(None, "how").claim is None
