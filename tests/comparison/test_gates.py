"""Gates, baselines and Markdown: what stops a pipeline, and that only what is certain does."""

from __future__ import annotations

import json
import os
import re
from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from gputop.advice.trace_rules import TRACE_RULES
from gputop.advice.user_rules import install
from gputop.analysis.results import Analysis
from gputop.cli import main
from gputop.comparison.compare import Comparison, compare_sides
from gputop.comparison.gates import (
    broken_budgets,
    budgets,
    exit_status,
    gates_of_analysis,
    gates_of_comparison,
    parse_gates,
)
from gputop.comparison.report_lines import markdown
from gputop.comparison.sides import Side
from gputop.core.errors import EXIT_GATE, EXIT_NO_DATA, EXIT_OK, GputopError
from gputop.core.findings import Abstained
from gputop.diagnosis.diagnose import analyze
from gputop.rules.rule_file import read_rules
from gputop.simulation.scenarios import find_scenario
from gputop.text.markup import without_marks
from tests.comparison.captures import captured

TRACE = str(Path(__file__).parents[1] / "data" / "keras3_slow_input.xplane.pb.gz")


@cache
def analyzed() -> Analysis:
    return analyze(TRACE)


def analysis_of(scenario: str, *, cured: bool = False, begin_s: int = 33) -> Analysis:
    """Of a capture of a simulated job, some time after its start."""
    job = find_scenario(scenario)
    found = captured(job.with_fix() if cured else job, begin_s).analysis
    assert found is not None
    return found


def compared(a: Analysis, b: Analysis) -> Comparison:
    return compare_sides(Side("a", "analysis", a), Side("b", "analysis", b))


def status(gate: str, comparison: Comparison) -> int:
    return exit_status(gates_of_comparison(parse_gates([gate], of_comparison=True), comparison))


def test_a_seeded_regression_stops_and_its_cure_and_a_rerun_do_not() -> None:
    slow, cured, rerun = analysis_of("input-bound"), *(analysis_of("input-bound", cured=True, begin_s=begin_s)
                                                       for begin_s in (33, 39))
    assert status("regression", compared(cured, slow)) == EXIT_GATE
    assert status("regression:20%", compared(cured, slow)) == EXIT_GATE
    assert status("regression:500%", compared(cured, slow)) == EXIT_OK
    assert status("regression", compared(slow, cured)) == EXIT_OK
    assert status("regression", compared(cured, rerun)) == status("regression", compared(rerun, cured)) == EXIT_OK


def test_what_cannot_be_compared_did_not_pass() -> None:
    slow = analysis_of("input-bound")
    without = analyzed()
    stepless = Analysis.from_json({**without.to_json(), "steps": None})
    assert status("regression", compared(slow, stepless)) == EXIT_NO_DATA


def test_gates_of_an_analysis() -> None:
    analysis = analyzed()
    for gates, expected in (("high", EXIT_GATE), ("input_bound", EXIT_GATE), ("medium,retracing", EXIT_GATE),
                            ("step_gap_host", EXIT_OK), ("communication_exposed", EXIT_NO_DATA),
                            ("communication_exposed,high", EXIT_GATE)):
        found = gates_of_analysis(parse_gates([gates], of_comparison=False), analysis)
        assert exit_status(found) == expected, found


def test_a_severity_says_what_could_not_be_judged_and_is_not_passed_where_nothing_could() -> None:
    analysis = replace(analyzed(), findings=())
    (passed,) = gates_of_analysis(["high"], analysis)
    assert passed.outcome == "passed" and f"{len(analysis.abstained)} causes could not be checked" in passed.why
    nothing = replace(analysis, abstained=tuple(Abstained(rule.id, "a whole step") for rule in TRACE_RULES))
    (unjudged,) = gates_of_analysis(["low"], nothing)
    assert unjudged.outcome == "cannot be told" and "a whole step" in unjudged.why
    assert gates_of_analysis(["high"], replace(nothing, findings=analyzed().findings))[0].outcome == "failed"


def test_budgets() -> None:
    install([read_rules('[budget]\nstep = "step.time < 300ms"\nwait = "step.input_wait / step.time < 5%"\n'
                        'gpus = "gpu.busy > 90%"\n', "r.toml")])
    found = {own.gate: own for own in budgets(analyzed())}
    assert {name.removeprefix("budget "): own.outcome for name, own in found.items()} == {
        "step": "passed", "wait": "failed", "gpus": "cannot be told"}
    assert "step.time is 105 ms" in found["budget step"].why
    assert {own.outcome for own in budgets(None)} == {"cannot be told"}
    broken = {name for name, own in found.items() if own.outcome == "failed"}
    told = broken_budgets(analyzed())
    assert len(told) == len(broken) and all(f"{name} is exceeded: " in "".join(told) for name in broken)


@pytest.mark.parametrize(("gate", "of_comparison"), [
    ("regresion", True), ("regression:x%", True), ("high", True), ("regression", False), ("no_such", False),
    ("budget", True), ("budget", False), ("idle_gpu", False)])  # a rule on live samples finds nothing in a trace
def test_what_is_no_gate_is_wrong_usage(gate: str, of_comparison: bool) -> None:
    with pytest.raises(GputopError) as caught:
        parse_gates([gate], of_comparison=of_comparison)
    assert caught.value.exit_code == 2


def test_a_baseline_is_kept_listed_compared_with_and_replaced_on_request(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    save = ["analyze", TRACE, "--save-baseline", "main", "--logdir", "logs"]
    assert main(save) == 0 and (tmp_path / "logs/baselines/main.json").is_file()
    assert main(save) == 1 and "--replace" in capsys.readouterr().err
    assert main([*save, "--replace"]) == 0
    (tmp_path / "logs/baselines/broken.json").write_text("{")
    os.mkfifo(tmp_path / "logs/baselines/pipe.json")
    capsys.readouterr()
    assert main(["compare", "--baselines", "--logdir", "logs"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"main .* 17 steps, median 95.3 ms", out) and re.search(r"broken .* cannot be read", out)
    assert main(["compare", "--baseline", "main", TRACE, "--logdir", "logs", "--fail-on", "regression", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["a"]["path"] == "logs/baselines/main.json" and document["gates"][0]["outcome"] == "passed"
    for words in (["compare", "--baseline", "../x", TRACE], ["compare", "--baseline", "main", TRACE, TRACE],
                  ["compare", TRACE]):
        assert main(words) == 2
    assert main(["compare", "--baseline", "mian", TRACE, "--logdir", "logs"]) == 1
    assert "Saved: broken, main" in capsys.readouterr().err


def test_paths_may_stand_around_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", TRACE, "--json", TRACE]) == 0
    assert json.loads(capsys.readouterr().out)["notes"][0]["id"] == "same_file"


def test_the_gates_of_analyze_are_told_and_stand_in_json(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gputop.toml").write_text('[budget]\nstep = "step.time < 10ms"\n')
    assert main(["analyze", TRACE]) == 0 and "FAILED: budget step: step.time < 10ms" in capsys.readouterr().out
    assert main(["analyze", TRACE, "--fail-on", "budget", "--json"]) == EXIT_GATE
    (gate,) = json.loads(capsys.readouterr().out)["gates"]
    assert (gate["gate"], gate["outcome"]) == ("budget step", "failed")


@pytest.mark.parametrize("text", ['[budget]\nok = "step.time < 9min"\nbad = "step.time < 3W"\n',
                                  '[budget]\nok = "step.time < 9min"\n[[rule]]\nid = "x"\non = "trace"\n'])
def test_a_gate_does_not_pass_for_want_of_a_budget_or_rule_with_a_mistake(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gputop.toml").write_text(text)
    for words in (["analyze", TRACE], ["compare", TRACE, TRACE]):
        assert main(words) == 0
        capsys.readouterr()
        assert main([*words, "--fail-on", "budget"]) == 2
        said = capsys.readouterr()
        assert "gputop.toml:" in said.err and not said.out


def test_markdown_pastes_as_it_stands() -> None:
    """In a chat neither HTML nor Markdown's entities, tables or headings are shown as what they mean."""
    slow, fast = analysis_of("input-bound"), analysis_of("input-bound", cured=True)
    comparison = compared(slow, fast)
    text = markdown(comparison, gates_of_comparison(["regression"], comparison))
    head, gate, rest = text.split("\n\n", 2)
    assert head == f"gputop: SIMULATED. {comparison.headline}" and "(−" in head
    assert gate == f"- ✅ passed: regression: {comparison.headline}"
    assert rest.startswith("```\n") and rest.endswith("\n```\n") and rest.count("```") == 2
    assert not re.search(r"&#|</?\w+>|^\||^#", text, re.M)


def test_markdown_holds_nothing_that_others_could_write_as_markup() -> None:
    slow = analysis_of("input-bound")
    comparison = compare_sides(Side("````</details><img src=x>|", "analysis", slow), Side("b", "analysis", slow))
    install([read_rules('[budget]\nx = "layer(\'<b>|`@all\').time < 1s"\n', "r.toml")])
    text = markdown(comparison, gates_of_comparison(["budget"], comparison))
    head, rest = text.split("\n\n`````\n")
    assert "SIMULATED" in head and "`` layer('<b>|`@all').time ``" in head
    assert not re.search(r"[<>@|]", re.sub(r"(`+).*?\1", "", head)), "outside of code"
    assert rest.endswith("\n`````\n") and rest.count("`````") == 1


@pytest.mark.parametrize(("text", "plain"), [
    ("344 → 184 ms (−46.5%); train_step", "344 → 184 ms (−46.5%); train_step"),
    ("calls of __inference_a, @all", "calls of `__inference_a,` `@all`"), ("see http://x", "see `http://x`"),
    ("a``b", "``` a``b ```"), ("x *y* #12", "x `*y*` `#12`"),
])
def test_words_that_could_be_marks_are_code(text: str, plain: str) -> None:
    assert without_marks(text) == plain
