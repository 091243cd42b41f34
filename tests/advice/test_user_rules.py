"""Rules and limits of the user's own, judged beside gputop's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from msgspec.structs import replace as replace_row

from gputop.advice.live.advise import live_advice
from gputop.advice.live.user_rules import KEPT_S, HeldConditions
from gputop.advice.merge import merge_findings
from gputop.advice.registry import LIMITS, limit
from gputop.advice.trace.user_rules import judged, missing
from gputop.advice.user_registry import UserRules, user_rules
from gputop.advice.user_registry import use as use_user_rules
from gputop.advice.user_rules import in_words, install
from gputop.analysis.results import Analysis, GpuUse, KernelRow, LayerRow
from gputop.core.codec import convert, to_document
from gputop.core.findings import Advice, Finding
from gputop.rules.expression import condition
from gputop.rules.names import NAMES, TABLES
from gputop.rules.rule_file import read_rules
from gputop.telemetry.history import History
from tests.advice.live.scene import Scene, after, recorded
from tests.advice.trace.traces import analyzed, findings, healthy, input_bound, uneven
from tests.analyses import make_analysis

ROOT = Path(__file__).parents[2]


def use(text: str) -> list[str]:
    return [str(problem) for problem in install([read_rules(text, "r.toml")])]


def live_rule(when: str, more: str = "") -> str:
    return f"[[rule]]\nid = \"mine\"\non = \"live\"\ntitle = \"T\"\nwhen = '{when}'\n{more}\n"


def played(scene: Scene, seconds: int) -> list[Finding | None]:
    """The finding of the rule "mine", second by second."""
    history, held, out = History(), HeldConditions(), []
    for tick in range(seconds):
        history.append(sample := scene.sample(float(tick)))
        advice: Advice = live_advice(history, sample, (), held=held)
        out.append(next((f for f in advice.findings if f.id == "mine"), None))
    return out


def dip(t: float) -> float:
    """Low from 40 s to 60 s."""
    return 0.2 if 40 <= t < 60 else 0.9


def test_a_live_rule_holds_for_its_time_and_the_clock_may_be_set_back() -> None:
    assert not use(live_rule("sm_active < 40%", 'for = "10s"\nseverity = "high"\naction = "A"\nwhy = "W."'))
    out = played(Scene({0: 0.9, 1: dip}, gpus=2), 75)
    shown = [t for t, found in enumerate(out) if found is not None]
    assert shown == list(range(50, 60 + int(KEPT_S)))
    last = out[shown[-1]]
    assert last is not None and last.gpus == (1,) and last.severity == "high" and last.yours == "r.toml:1"
    assert last.evidence == {"sm_active_ratio": pytest.approx(0.2)}  # of when it held
    assert last.gain.step_time is None and last.origin == "live"
    use(live_rule("sm_active < 40%", "for = 10"))  # the clock may be set back
    history, held = History(), HeldConditions()
    for tick in (*range(9), *range(-500, -492)):
        history.append(sample := Scene({0: 0.1}, gpus=1).sample(float(tick)))
        assert "mine" not in {f.id for f in live_advice(history, sample, (), held=held).findings}


def test_a_rule_of_the_node_names_no_gpu_and_past_figures_abstain_without_readings() -> None:
    use(live_rule("gpus.count(sm_active.mean(30s) < 50%) == 1 and host.cpu_ratio.mean(10s) > 20%"))
    scene = Scene({0: 0.9, 1: 0.2}, gpus=2)
    (found,) = [f for f in after(scene, 60).findings if f.id == "mine"]
    assert found.gpus == ()
    assert [a.missing for a in after(scene, 5).abstained if a.id == "mine"]
    use(live_rule("tensor_active.max(30s) < 1%"))
    (missing,) = [a.missing for a in after(Scene({0: 0.9}, gpus=1, fine=False), 60).abstained if a.id == "mine"]
    assert "the test says so" in missing


def test_it_can_ask_for_gputop_s_own_findings() -> None:
    use(live_rule('finding("idle_gpu") and activity.max(30s) < 5%'))
    scene = Scene({g: 0.9 if g else 0.0 for g in range(4)}, gpus=4)
    advice = after(scene, 300)
    assert {f.id for f in advice.findings} >= {"idle_gpu", "mine"}
    assert "mine" in {f.id for f in merge_findings((), advice.findings)}


# -- traces -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("when", "holds"), [
    ("step.input_wait / step.time > 20%", True), ("step.input / step.time < 1%", False), ("step.count > 1", True),
    ("collectives.waiting > 0", None), ("memory.peak_ratio > 0.5", None), ("limits.mfu > 0", None),
    ("gpu.busy < 90%", True), ("gpus.max(gpu.busy) > 90%", False), ('kernel("*").count > 10', True),
    ('kernel("no such").time > 0', False), ('finding("input_bound")', True), ('finding("allreduce_slow")', False),
    ('op("*").time > 0', None), ("trace.window > 10ms and trace.events > 0", True)])
def test_figures_of_a_trace(when: str, holds: bool | None) -> None:
    assert judged(condition(when, "trace"), analyzed(input_bound()))[0] is holds


def fields_of(kind: Any) -> dict[str, Any]:
    """The fields of a type, or of what it is when it is not None."""
    kinds = [own for own in (get_args(kind) or (kind,)) if own is not type(None)]
    return get_type_hints(kinds[0]) if hasattr(kinds[0], "__struct_fields__") else {}


def test_every_name_of_a_trace_is_a_field_of_the_analysis() -> None:
    for quantity in NAMES["trace"].values():
        if quantity.name.startswith("memory."):
            continue
        kind: Any = GpuUse if quantity.per_gpu else Analysis
        for part in quantity.path.split("."):
            assert part in fields_of(kind), quantity
            kind = fields_of(kind)[part]
    for table in TABLES.values():
        row = LayerRow if table.name == "layer" else KernelRow
        assert all(own.path in fields_of(row) for own in table.fields.values())


def test_the_finding_names_the_gpus_and_the_figures() -> None:
    use('[[rule]]\nid = "mine"\non = "trace"\ntitle = "T"\n'
        'when = "gpu.compute_per_step > 1.3 * gpus.median(gpu.compute_per_step)"')
    found = findings(uneven(2, 2.0))["mine"]
    assert found.gpus == (2,) and found.yours == "r.toml:1" and found.gain.by is None
    assert found.evidence["gpu_compute_per_step_s"] == pytest.approx(12e-3, rel=0.1)
    assert convert(to_document(found), Finding) == found
    assert "mine" not in findings(healthy(4))


def test_layers_are_summed_once_and_what_several_figures_lack_is_said_once() -> None:
    rows = [{"name": name, "parent": parent, "device_s": s, "wait_s": 0.0, "share": s, "kernels": 1.0}
            for name, parent, s in (
        ("forward", None, 0.6), ("encoder", 0, 0.4), ("attention", 1, 0.3), ("decoder", 0, 0.2),
        ("backward", None, 0.4))]
    analysis = make_analysis(layers={"basis": "step", "total_s": 1.0, "gpus": 1, "rows": rows})
    for pattern, time_s in (("*", 1.0), ("encoder*", 0.4), ("*/encoder/*", 0.3), ("*coder", 0.6), ("nothing", 0.0)):
        assert judged(condition(f'abs(layer("{pattern}").time - {time_s}s) < 1us', "trace"), analysis)[0], pattern
    assert in_words(["a.b: steps", "c: GPUs", "d: steps", "a.b: steps", "a divisor"]) == (
        "a.b, d: steps; c: GPUs; a divisor")


@pytest.mark.parametrize(("when", "holds"), [
    ('kernel("gemm*").share > 60%', True), ('kernel("gemm*").share > 75%', None),
    ('kernel("gemm*").share > 95%', False), ('kernel("other").count > 0', None), ('kernel("gemm*").count == 0', False),
    ('kernel("gemm*").count == 20', None), ('kernel("*").count == 30', True),
    ('abs(kernel("gemm*").time - 0.75s) < 0.01s', None),
    ('kernel("other").count > 0 or kernel("gemm*").count > 3', True),
    ('kernel("gemm*").time > 3 * kernel("relu").time', None)])
def test_kernels_without_a_row_of_their_own_may_be_among_those_that_a_pattern_chooses(
        when: str, holds: bool | None) -> None:
    row = analyzed(input_bound()).kernels.by_name[0]
    rows = [replace_row(row, name=name, count=count, time_s=share, share=share, names=names)
            for name, count, share, names in (("gemm_a", 10, 0.4, 1), ("gemm_b", 5, 0.3, 1), ("relu", 5, 0.1, 1),
                                              ("", 10, 0.2, 7))]
    kernels = replace_row(analyzed(input_bound()).kernels, by_name=tuple(rows))
    found, outcomes = judged(condition(when, "trace"), make_analysis(kernels=kernels))
    assert found is holds
    assert holds is not None or "a row for each kernel: 7 kernels (20% of the time) share one row" in missing(outcomes)


@pytest.mark.parametrize(("on", "id_", "message"), [
    ("trace", "input_bond", "5:13: gputop has no rule input_bond: did you mean input_bound?"),
    ("live", "input_bound", '5:13: only rules with on = "trace" can have the finding input_bound'),
    ("trace", "mine", "5:13: gputop has no rule mine"), ("live", "idle_gpu", None)])
def test_a_rule_cannot_ask_for_what_is_never_found(on: str, id_: str, message: str | None) -> None:
    problems = use(live_rule(f'not finding("{id_}")').replace("live", on))
    assert (message is None) is (not problems) and all(message in problem for problem in problems)


def test_ids_are_taken_once() -> None:
    text = live_rule("sm_active < 1")
    assert "in use: r.toml:1" in use(text + text)[0]
    assert "gputop's own" in use(text.replace("mine", "idle_gpu"))[0] and not user_rules().rules


# -- limits -----------------------------------------------------------------------------------------


def test_a_limit_that_is_set_counts_and_the_finding_says_whose_it_is() -> None:
    assert "input_bound" in findings(input_bound())
    assert not use("[limits]\ninput_bound.share = '50%'")
    assert limit("input_bound.share") == 0.5 and "input_bound" not in findings(input_bound(4_000))
    use("[limits]\ninput_bound.share = '6%'")
    assert "yours (r.toml:2): 0.06 ratio" in findings(input_bound())["input_bound"].source
    use_user_rules(UserRules())
    assert limit("input_bound.share") == LIMITS["input_bound.share"].value


@pytest.mark.parametrize(("line", "message"), [
    ("input_bound.shar = 0.1", "did you mean input_bound.share"), ("input_bound.share = '3s'", "is in ratio"),
    ("input_bound.share = 2", "from 0.5% to 50%"), ("slice_s = 3", "cannot be set"),
    ("idle_gpu.enter = -1", "a number with its unit"), ("idle_gpu.window_s = '1h'", "from 6 to 600"),
    ("idle_gpu.window_s = '5%'", "from 6")])
def test_limits_that_cannot_be_set(line: str, message: str) -> None:
    (problem,) = use(f"[limits]\n{line}")
    assert message in problem and not user_rules().limits


def test_no_limit_that_can_be_set_breaks_a_rule() -> None:
    """All at an end of their range, or anywhere in it, over busy, idle and uneven nodes and traces."""
    random_ = random.Random(1)
    scenes = [Scene(), Scene({0: 0.9, 1: 0.0}, gpus=2), Scene({g: 0.3 if g else 0.9 for g in range(4)}, gpus=4)]
    nodes = [recorded(scene, 200) for scene in scenes]
    for round_ in range(6):
        lines = []
        for own in LIMITS.values():
            high = min(10 * own.value, 1.0) if own.unit == "ratio" and own.value <= 1 else 10 * own.value
            value = (own.value / 10, high)[round_] if round_ < 2 else random_.uniform(own.value / 10, high)
            if "." in own.id:
                lines.append(f'"{own.id}" = {value!r}')
        assert not use("[limits]\n" + "\n".join(lines[:200])) and not use("[limits]\n" + "\n".join(lines[-200:]))
        for history, samples in nodes:
            live_advice(history, samples[-1])
        for trace in (input_bound(), uneven(0, 2.0), healthy()):
            analyzed(trace)
