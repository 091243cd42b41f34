"""Which finding is folded under which, and what stays of those that are explained in part."""

from __future__ import annotations

import pytest

from gputop.advice.causes import fold_consequences
from gputop.advice.merge import merge_findings
from gputop.core.codec import convert, to_document
from gputop.core.findings import Finding, Gain, severity_of
from tests.records import replace


def made(id_: str, share: float | None, gpus: tuple[int, ...] = (0,), **evidence: float) -> Finding:
    return Finding(id=id_, severity=severity_of(share or 0), title=id_, why="why", evidence=evidence, action="do",
                   source="rule", gain=Gain(share, "how"), gpus=gpus)


def folded(*findings: Finding) -> dict[str, tuple[str, ...]]:
    return {f.id: tuple(c.id for c in f.consequences) for f in fold_consequences(findings)}


def test_waiting_for_a_gpu_with_more_work_is_imbalance():
    assert folded(made("replica_imbalance", 0.2, (3,)), made("collective_waiting", 0.3, (3,))) == {
        "replica_imbalance": ("collective_waiting",)}
    assert folded(made("gpu0_oversubscribed", 0.2, (0,)), made("collective_waiting", 0.3, (0,))) == {
        "gpu0_oversubscribed": ("collective_waiting",)}
    # Another GPU is late: a cause of its own.
    assert set(folded(made("replica_imbalance", 0.2, (3,)), made("collective_waiting", 0.3, (5,)))) == {
        "replica_imbalance", "collective_waiting"}


def test_what_a_cause_does_not_explain_stays_with_the_rest_as_gain():
    waiting, slow = fold_consequences([made("allreduce_slow", 0.05), made("communication_exposed", 0.3)])
    assert (waiting.id, waiting.severity) == ("communication_exposed", "high")
    assert waiting.gain.step_time == pytest.approx(0.25)
    assert slow.consequences == ()
    assert waiting.gain.by == "bound" and waiting.gain.assumption.endswith("of allreduce_slow is subtracted.")
    assert folded(made("allreduce_slow", 0.2), made("communication_exposed", 0.3)) == {
        "allreduce_slow": ("communication_exposed",)}


@pytest.mark.parametrize(("rest", "listed"), [(0.28, 2), (0.1, 1), (0.0, 1)])
def test_what_is_replayed_keeps_its_gain_or_is_folded_by_what_it_saves_beside_its_cause(rest, listed):
    effect = replace(made("communication_exposed", 0.3), gain=Gain(0.3, "how", by="replay"))
    found = fold_consequences([made("allreduce_slow", 0.1), effect], lambda effect, cause: rest)
    assert len(found) == listed
    if listed == 2:
        assert found[0].gain == effect.gain


@pytest.mark.parametrize(("pace_s", "main"), [(15e-6, "small_kernels"), (25e-6, "launch_bound")])
def test_short_kernels_and_late_launches_are_one_cause(pace_s, main):
    found = folded(made("small_kernels", 0.3, launch_pace_s=pace_s), made("launch_bound", 0.3))
    assert list(found) == [main] and len(found[main]) == 1


def test_the_cure_of_a_part_is_told_with_that_of_the_whole():
    part = replace(made("optimizer_unfused", 0.04), action="Fuse.", snippet="fused=True")
    whole = replace(made("launch_bound", 0.3), snippet="compile()")
    found, = fold_consequences([part, whole])
    assert (found.id, found.action, found.snippet) == ("launch_bound", "do Fuse.", "compile()\nfused=True")
    assert found.gain.step_time == 0.3 and found.consequences[0].action == "Fuse."
    # Where it is most of it, it is the cause.
    most, = fold_consequences([replace(part, gain=Gain(0.2, "how")), whole])
    assert (most.id, most.action) == ("optimizer_unfused", "Fuse.")


def test_chains_hang_together():
    found = fold_consequences([made("serial_gpus", 0.6), made("staggered_launch", 0.5),
                               made("collective_waiting", 0.4)])
    assert [f.id for f in found] == ["serial_gpus"]
    assert {"staggered_launch", "collective_waiting"} <= found[0].ids


def test_copies_within_the_gpu_are_not_a_matter_of_pinning():
    assert len(folded(made("copies_pageable", 0.2), made("copies_excessive", 0.1, d2d_count_per_step=3.0))) == 2
    assert folded(made("copies_pageable", 0.2), made("copies_excessive", 0.2, h2d_count_per_step=3.0)) == {
        "copies_pageable": ("copies_excessive",)}


def test_unrelated_findings_stay_and_documents_keep_what_is_folded():
    assert len(folded(made("input_bound", 0.3), made("tensor_cores_unused", 0.2))) == 2
    (finding,) = fold_consequences([made("copies_pageable", 0.2), made("sync_copies", 0.1)])
    document = to_document(finding)
    assert [c["id"] for c in document["consequences"]] == ["sync_copies"]
    assert convert(document, Finding) == finding
    assert convert({k: v for k, v in document.items() if k != "consequences"}, Finding).consequences == ()


def test_a_live_finding_that_a_trace_has_folded_is_not_listed_again():
    main, = fold_consequences([made("serial_gpus", 0.4), made("gpu0_oversubscribed", 0.2)])
    assert [f.id for f in merge_findings([main], [made("gpu0_oversubscribed", None), made("idle_gpu", None)])] == [
        "serial_gpus", "idle_gpu"]
