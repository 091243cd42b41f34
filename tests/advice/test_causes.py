"""Which finding is folded under which, by the seconds that both claim, and what stays of those explained in part."""

from __future__ import annotations

import pytest

from gputop.advice import savings
from gputop.advice.causes import Claimed, fold_consequences
from gputop.advice.merge import merge_findings
from gputop.core.codec import convert, to_document
from gputop.core.findings import Finding, Gain, ranked, severity_of
from gputop.trace.intervals import union
from tests.records import replace


def made(id_: str, share: float | None, **evidence: float) -> Finding:
    return Finding(id=id_, severity=severity_of(share or 0), title=id_, why="why", evidence=evidence, action="do",
                   source="rule", gain=Gain(share, "how", by="bound"), gpus=(0,))


def at(*edges: int, gpu: int = 0, part: float = 1.0, waits: tuple[int, int] | None = None) -> Claimed:
    """Claimed from one edge to the next along a GPU; ``waits``: along GPU 1 meanwhile."""
    others = {} if waits is None else {1: union([waits[0]], [waits[1]])}
    return Claimed({gpu: union(edges[::2], edges[1::2])}, part, others)


def folded(*claims: tuple[Finding, Claimed]) -> dict[str, tuple[str, ...]]:
    return {f.id: tuple(c.id for c in f.consequences) for f in tops(*claims)}


def tops(*claims: tuple[Finding, Claimed]) -> tuple[Finding, ...]:
    return fold_consequences([f for f, _ in claims], {f.id: claimed for f, claimed in claims})


SYNC, EAGER, LAUNCH = made("sync_copies", 0.2), made("eager_execution", 0.3), made("launch_bound", 0.3)


def test_of_two_that_claim_the_same_seconds_the_narrower_cause_stands_above():
    assert folded((LAUNCH, at(0, 30)), (EAGER, at(0, 30))) == {"eager_execution": ("launch_bound",)}
    assert folded((LAUNCH, at(0, 30)), (SYNC, at(0, 20))) == {"sync_copies": ("launch_bound",)}
    # Elsewhere in time, or on another GPU, they are two.
    assert len(folded((LAUNCH, at(0, 30)), (EAGER, at(40, 70)))) == 2
    assert len(folded((LAUNCH, at(0, 30)), (EAGER, at(0, 30, gpu=1)))) == 2
    assert len(folded((made("input_bound", 0.3), at(0, 30)), (made("tensor_cores_unused", 0.2), at(0, 30)))) == 2
    (finding,) = tops((made("copies_pageable", 0.2), at(0, 20)), (made("sync_copies", 0.1), at(10, 20)))
    document = to_document(finding)
    assert [c["id"] for c in document["consequences"]] == ["sync_copies"]
    assert convert(document, Finding) == finding
    assert convert({k: v for k, v in document.items() if k != "consequences"}, Finding).consequences == ()


@pytest.mark.parametrize("until", [5, 17, 18, 30])
def test_what_a_cause_does_not_explain_stays_with_the_rest_as_gain(until):
    found = tops((LAUNCH, at(0, 30)), (SYNC, at(0, until)))
    assert len(found) == (2 if until < 18 else 1)  # three fifths
    if until < 18:
        launch = next(f for f in found if f.id == "launch_bound")
        assert launch.gain.step_time == pytest.approx(0.3 * (1 - until / 30)) and launch.gain.claim == "at most"
        assert launch.gain.assumption == "The saving of sync_copies is subtracted."
        assert launch.severity == severity_of(0.3 * (1 - until / 30))


def test_several_causes_explain_together_and_what_is_replayed_keeps_its_gain():
    found = folded((LAUNCH, at(0, 30)), (SYNC, at(0, 12)), (made("host_placement", 0.1), at(12, 22)))
    assert found == {"sync_copies": ("launch_bound",), "host_placement": ()}
    effect = replace(LAUNCH, gain=Gain(0.3, "how", by="replay"))
    assert {f.id: f.gain.step_time for f in tops((effect, at(0, 30)), (SYNC, at(0, 10)))} == {
        "launch_bound": 0.3, "sync_copies": 0.2}
    exposed = made("communication_exposed", 0.3)  # a fix that takes a part of the same seconds claims that part
    slow, whole = made("allreduce_slow", 0.05), made("allreduce_slow", 0.28)
    assert folded((slow, at(0, 30, part=1 / 6)), (exposed, at(0, 30))) == {
        "communication_exposed": (), "allreduce_slow": ()}
    assert folded((whole, at(0, 30, part=0.9)), (exposed, at(0, 30))) == {"allreduce_slow": ("communication_exposed",)}


def test_ops_that_a_function_between_steps_runs_stand_under_it_and_small_ops_under_those_of_a_metric():
    ops, gap = made("ops_without_gradient", 0.3), made("step_gap_host", 0.35)
    assert folded((ops, at(0, 30)), (gap, at(0, 35))) == {"step_gap_host": ("ops_without_gradient",)}
    assert folded((ops, at(0, 30)), (EAGER, at(0, 35))) == {"ops_without_gradient": ("eager_execution",)}
    assert len(folded((ops, at(0, 30)), (gap, at(25, 60)))) == 2
    # By its samples the function takes more than the gaps, in which no op runs.
    seconds = {gap.id: replace(gap, gpus=(), claims={"host": 30e-9}), ops.id: replace(ops, claims={"host": 40e-9}),
               EAGER.id: replace(EAGER, claims={"host": 90e-9})}
    assert folded(*((seconds[id_], at(*edges)) for id_, edges in (
        (gap.id, (0, 6)), (ops.id, (10, 50)), (EAGER.id, (60, 150))))) == {gap.id: (ops.id,), EAGER.id: ()}


def test_a_part_stands_under_the_whole_with_a_fix_of_its_own():
    part = replace(made("optimizer_unfused", 0.04), action="Fuse.", snippet="fused=True")
    whole = replace(LAUNCH, snippet="compile()")
    found, = tops((part, at(0, 4)), (whole, at(0, 30)))
    assert (found.id, found.action, found.snippet) == ("launch_bound", "do Fuse.", "compile()\nfused=True")
    assert found.gain.step_time == 0.3 and found.consequences[0].action == "Fuse."
    # Where it is most of it, it is the cause.
    most, = tops((part, at(0, 20)), (whole, at(0, 30)))
    assert (most.id, most.action) == ("optimizer_unfused", "Fuse.")
    # Another cause that is a part stays beside it: its fix is another one.
    assert len(folded((SYNC, at(0, 4)), (whole, at(0, 30)))) == 2


@pytest.mark.parametrize(("until", "apart"), [(30, False), (8, True)])
def test_collectives_that_are_long_in_some_steps_are_waits_for_a_late_gpu(until, apart):
    """Where most of the communication is in those steps; otherwise most of it is there in each step."""
    found = folded((made("communication_exposed", 0.3), at(0, 32)), (made("long_steps", 0.3), at(0, until)))
    assert found == ({"communication_exposed": (), "long_steps": ()} if apart else
                     {"long_steps": ("communication_exposed",)})


@pytest.mark.parametrize(("pace_s", "main"), [(15e-6, "small_kernels"), (25e-6, "launch_bound")])
def test_short_kernels_and_late_launches_are_one_cause(pace_s, main):
    found = folded((made("small_kernels", 0.3, launch_pace_s=pace_s), at(0, 30)), (LAUNCH, at(0, 30)))
    assert list(found) == [main] and len(found[main]) == 1


def test_what_holds_one_gpu_up_and_what_the_others_wait_meanwhile_are_one():
    waiting = made("collective_waiting", 0.6)
    late = at(0, 30, gpu=0, waits=(10, 40))
    assert folded((waiting, late), (made("step_gap_host", 0.2), at(0, 30)),
                  (made("long_steps", 0.5), Claimed({0: union([0], [10]), 1: union([10], [40])}))) == {
        "collective_waiting": ("long_steps", "step_gap_host")}
    assert folded((waiting, late), (made("gpu0_oversubscribed", 0.5), at(0, 30))) == {
        "gpu0_oversubscribed": ("collective_waiting",)}
    assert len(folded((waiting, late), (made("gpu0_oversubscribed", 0.5), at(0, 30, gpu=1)))) == 2
    # Late at a step's begin, and waited for at its end.
    assert folded((waiting, late), (made("staggered_launch", 0.2), at(60, 90))) == {
        "staggered_launch": ("collective_waiting",)}


def test_a_larger_batch_is_told_with_what_it_helps_against_where_memory_has_room():
    fixed = at(0, 30)
    batch = replace(made("batch_size_headroom", 0.2), action="Increase the batch size.")
    with_room = replace(batch, evidence={"capacity_bytes": 8e10})
    for headroom, told in ((batch, LAUNCH.action), (with_room, f"{LAUNCH.action} Increase the batch size.")):
        finding, = tops((LAUNCH, fixed), (headroom, fixed))
        assert finding.ids == {"launch_bound", "batch_size_headroom"} and finding.action == told
        assert folded((EAGER, fixed), (headroom, fixed)) == {"eager_execution": ("batch_size_headroom",)}
    # What else does not grow with the batch is no matter of launches.
    assert len(folded((LAUNCH, at(0, 10)), (with_room, fixed))) == 2


def test_chains_hang_together_and_a_live_finding_that_is_folded_is_not_listed_again():
    found = tops((made("serial_gpus", 0.6), at(0, 60)), (made("launch_bound", 0.5), at(0, 50)),
                 (made("batch_size_headroom", 0.4), at(0, 40)))
    assert [f.id for f in found] == ["serial_gpus"]
    assert {"launch_bound", "batch_size_headroom"} <= found[0].ids
    main, = tops((made("serial_gpus", 0.4), at(0, 40)), (made("gpu0_oversubscribed", 0.2), at(0, 20)))
    assert [f.id for f in merge_findings([main], [made("gpu0_oversubscribed", None), made("idle_gpu", None)])] == [
        "serial_gpus", "idle_gpu"]


@pytest.mark.parametrize(("claim", "share", "part", "first"), [
    ("about", 0.25, "launch", "launch_bound"), ("about", 0.19, "launch", "batch_size_headroom"),
    ("at most", 0.25, "launch", "batch_size_headroom"), ("about", 0.25, "compute", "batch_size_headroom")])
def test_an_upper_bound_stands_behind_what_saves_nearly_as_much_of_the_same_part_and_is_none(claim, share, part, first):
    bound = replace(made("batch_size_headroom", 0.26), claims={"host": 0.1, "launch": 0.8})
    other = replace(LAUNCH, gain=Gain(share, "how", by="replay", claim=claim), claims={part: 0.9})
    assert ranked([bound, other])[0].id == first == ranked([other, bound])[0].id


@pytest.mark.parametrize(("saved", "apart"), [(0.02, True), (0.5, False)])
def test_a_wait_for_late_gpus_is_not_explained_by_a_fix_that_saves_little_of_it(saved, apart):
    """Each rank's host is slow: a GPU that always has work leaves the others to wait for the next host."""
    waiting = made("collective_waiting", 0.5)
    launch = replace(made("launch_bound", 0.1), gain=Gain(saved, "how", by="replay"))
    found = folded((waiting, at(0, 50)), (launch, at(0, 50)))
    assert found == ({"launch_bound": (), "collective_waiting": ()} if apart else
                     {"launch_bound": ("collective_waiting",)})


def test_removing_a_wait_saves_its_length_and_a_rate_its_share():
    assert savings.removed(0.03, 0.1) == pytest.approx(0.3)
    assert savings.removed(0.2, 0.1) == 1 and savings.removed(-0.1, 0.1) == 0 and savings.removed(1, 0) == 0
    assert savings.faster(0.06, 3, 0.1) == pytest.approx(0.4)  # work at three times the rate saves two thirds
    assert savings.faster(0.06, 1, 0.1) == 0
