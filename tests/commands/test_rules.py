"""``gputop rules``, the cookbook of docs/tasks/custom-rules.md, and where rules of one's own are seen."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from gputop.advice.registry import RULES as BUILT_IN
from gputop.analysis.results import Analysis
from gputop.cli import main
from gputop.commands.rules import names_table
from gputop.core.samples import GpuSample, NodeSample, Reading
from gputop.diagnosis.diagnose import analyze_trace
from gputop.diagnosis.rules_in_process import use_rules
from gputop.replay.format import RecordingWriter
from gputop.replay.rule_trials import over_samples, over_trace
from gputop.rules.read_files import RulePath
from gputop.trace.readers.load import load
from tests.advice.live.scene import Scene
from tests.records import replace
from tests.tui.scenes import capture_of

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/tasks/custom-rules.md").read_text(encoding="utf-8"), re.S)
RULES = '''[[rule]]
id = "slow_loader"
on = "trace"
when = "step.input_wait / step.time > 20%"
severity = "high"
title = "Our loader"
[budget]
step = "step.time < 10ms"
count = "step.count > 0"
mfu = "limits.mfu > 30%"
[limits]
input_bound.share = 0.1
'''
DATA = ROOT / "tests" / "data"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "r.toml").write_text(RULES)
    return tmp_path / "r.toml"


# -- the cookbook -----------------------------------------------------------------------------------

ON_TRACES = {"loader_share": "input-bound", "uneven_work": "gpu0-oversubscribed",
             "exposed_communication": "gpu0-oversubscribed", "tiny_kernels": "launch-bound",
             "traced_again": "tf_retracing", "long_tail": "keras3_slow_input"}


def hot(gpu: GpuSample, t: float) -> GpuSample:
    return replace(gpu, readings={**gpu.readings, "temperature_c": Reading(84.0, "°C"),
                                  "temperature_slowdown_c": Reading(87.0, "°C")})


ON_SAMPLES: dict[str, tuple[Scene, int]] = {  # with its seconds
    "one_gpu_ahead": (Scene({0: 0.95, 1: 0.6, 2: 0.6}, gpus=3), 150),
    "held_and_idle": (Scene({0: 0.0}, gpus=1, util=0.0), 620),
    "near_slowdown": (Scene({0: 0.9}, gpus=1, change=hot), 150),
    "host_memory": (Scene({0: 0.9}, gpus=1), 150)}


def filled(sample: NodeSample) -> NodeSample:
    readings = {**sample.host.readings, "memory_total_bytes": Reading(2.0 ** 38, "bytes"),
                "memory_used_bytes": Reading(0.95 * 2 ** 38, "bytes")}
    return replace(sample, host=replace(sample.host, readings=readings))


def cookbook(tmp_path: Path, block: int = 1) -> None:
    (tmp_path / "cookbook.toml").write_text(BLOCKS[block])
    assert not use_rules([RulePath(str(tmp_path / "cookbook.toml"), "named")])


def test_each_rule_of_the_cookbook_on_traces_holds_where_it_should_alone(tmp_path: Path) -> None:
    analyses: dict[str, Analysis | None] = {}  # made before the rules are in use: captures are kept for other tests
    for name in ("input-bound", "gpu0-oversubscribed", "launch-bound", "healthy", "tf_retracing", "keras3_slow_input"):
        recorded = DATA / f"{name}.xplane.pb.gz"
        analyses[name] = analyze_trace(load([str(recorded)])) if recorded.exists() else capture_of(name).analysis
    cookbook(tmp_path)
    held: dict[str, set[str]] = {}
    for name, analysis in analyses.items():
        assert analysis is not None
        held[name] = {trial.id for trial in over_trace(analysis) if trial.outcome == "holds"}
    assert not held["healthy"]
    assert all(id_ in held[name] for id_, name in ON_TRACES.items()), held
    assert not held["input-bound"] - {"loader_share"} and not held["tf_retracing"] - {"traced_again"}


def test_each_live_rule_of_the_cookbook_holds_where_it_should_alone(tmp_path: Path) -> None:
    cookbook(tmp_path)
    for id_, (scene, seconds) in ON_SAMPLES.items():
        change = filled if id_ == "host_memory" else lambda sample: sample
        trials = over_samples(change(scene.sample(float(t))) for t in range(seconds))
        assert {trial.id for trial in trials if trial.outcome == "holds"} == {id_}
    assert not any(trial.outcome == "holds" for trial in over_samples(
        Scene(dict.fromkeys(range(4), 0.9), gpus=4).sample(float(t)) for t in range(150)))
    assert set(re.findall(r'id = "(\w+)"', BLOCKS[1])) == ON_TRACES.keys() | ON_SAMPLES.keys()


def test_all_toml_in_the_document_is_read_without_a_mistake(tmp_path: Path) -> None:
    cookbook(tmp_path, 0)


# -- the command ------------------------------------------------------------------------------------


def test_a_file_is_checked(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules", "check", "r.toml"]) == 0
    assert "r.toml: 1 rule, 1 limit, 3 budgets, 0 mistakes" in capsys.readouterr().out
    file.write_text(RULES.replace("step.time > 20%", "step.tim > 20%\x1b[31m"[:-5]))
    assert main(["rules", "check", "r.toml"]) == 1
    out = capsys.readouterr().out
    assert "r.toml:4:27: the name step.tim does not exist: did you mean step.time?" in out
    assert '  when = "step.input_wait / step.tim > 20%"\n' + " " * 28 + "^" in out


def test_rules_are_tried_over_a_trace_and_a_recording(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = str(DATA / "keras3_slow_input.xplane.pb.gz")
    assert main(["rules", "test", "r.toml", trace, "--json"]) == 0
    trials = {trial["id"]: trial for trial in json.loads(capsys.readouterr().out)["trials"]}
    assert {id_: trial["outcome"] for id_, trial in trials.items()} == {
        "slow_loader": "holds", "step": "exceeded", "count": "kept", "mfu": "cannot be told"}
    assert trials["step"]["evidence"]
    assert trials["slow_loader"]["evidence"]["step_input_wait_s"] == pytest.approx(0.0508, rel=0.01)

    file.write_text("[[rule]]\nid = 'low'\non = 'live'\nwhen = 'sm_active < 0.4'\nfor = '10s'\ntitle = 'x'\n")
    writer, scene = RecordingWriter(Path("x.gputop")), Scene({0: lambda t: 0.2 if 40 <= t < 60 else 0.9}, gpus=1)
    for t in range(100):
        writer.append(scene.sample(float(t)))
    writer.close()
    assert main(["rules", "test", "r.toml", "x.gputop"]) == 0
    out = capsys.readouterr().out
    assert "low: HOLDS on GPU 0" in out and "once, first at" in out and "in 15% of the samples" in out


@pytest.mark.parametrize("words", [["test", "r.toml"], ["test"], ["explain"], ["explain", "no_such"], ["list", "x"],
                                   ["test", "absent.toml", "--demo"]])
def test_wrong_usage(file: Path, words: list[str]) -> None:
    assert main(["rules", *words]) == 2


@pytest.mark.parametrize(("word", "near"), [
    ("inputbound", "input_bound"), ("Input_Bound", "input_bound"), ("idle", "idle_gpu or held_idle"),
    ("wait", "collective_waiting"), ("xyz", "To list all rules: gputop rules list")])
def test_near_ids_are_suggested(file: Path, capsys: pytest.CaptureFixture[str], word: str, near: str) -> None:
    assert main(["rules", "explain", word]) == 2
    assert near in capsys.readouterr().err


def test_rules_in_python_are_said_to_be_unread(monkeypatch, capsys):
    point = metadata.EntryPoint("theirs", "m:f", "gputop.rules")
    monkeypatch.setattr(metadata, "entry_points", lambda **group: [point] if group == {"group": point.group} else [])
    assert main(["rules", "list"]) == 0 and "(theirs): write them in TOML" in capsys.readouterr().err


def test_lists_and_explanations(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rules", "r.toml", "rules", "list"]) == 0
    out = capsys.readouterr().out
    assert main(["rules", "--rules", "r.toml"]) == 0 and capsys.readouterr().out == out, "what it does alone"
    assert re.search(r"slow_loader +trace +r\.toml:1", out)
    assert re.search(r"input_bound.share +0.1 ratio +0.05 ratio +yours", out)
    assert main(["rules", "list", "--json", "--rules", "r.toml"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [own["id"] for own in document["limits"] if own["yours"]] == ["input_bound.share"]
    assert {"id": "idle_gpu", "on": "live", "origin": "gputop"} in document["rules"]
    for id_, expected, own in (("slow_loader", "mean length of a step", True), ("input_bound", ".share = 10%", True),
                               ("input_bound", "input_bound.share = 5%", False)):
        assert main(["rules", "explain", id_, *(["--rules", "r.toml"] if own else [])]) == 0
        assert expected in capsys.readouterr().out
    for id_ in {id_ for rule in BUILT_IN for id_ in rule.ids}:
        assert main(["rules", "explain", id_]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"{id_}: ") and "\nWhen it is wrong\n" in out and "](" not in out
    assert main(["rules", "names"]) == 0
    assert capsys.readouterr().out.strip() == "\n".join(names_table()).strip()


# -- elsewhere --------------------------------------------------------------------------------------


def test_the_project_s_file_is_read_by_analyze_and_what_is_wrong_in_it_is_said(
        file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.rename("gputop.toml")
    trace = str(DATA / "keras3_slow_input.xplane.pb.gz")
    assert main(["analyze", trace, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    found = next(own for own in document["findings"] if own["id"] == "slow_loader")
    assert found["yours"] == "gputop.toml:1" and found["origin"] == "trace" and found["gain"]["step_time"] is None
    assert main(["analyze", trace]) == 0
    assert "Our loader    [slow_loader, yours]" in capsys.readouterr().out
    Path("gputop.toml").write_text(RULES.replace("[budget]", "[budgets]"))
    assert main(["analyze", trace]) == 0
    assert "gputop.toml:7:1: “budgets” is not allowed here" in capsys.readouterr().err
    assert main(["analyze", trace, "--rules", "gputop.toml"]) == 2


def test_the_process_that_analyzes_for_the_monitor_judges_by_them_too(file: Path) -> None:
    from gputop.diagnosis.worker import analyze_in_worker

    use_rules([RulePath(str(file), "named")])
    found = analyze_in_worker([str(DATA / "keras3_slow_input.xplane.pb.gz")])
    assert "slow_loader" in {own.id for own in found.analysis.findings}
    assert "[slow_loader, yours]" in found.report


def captures_on(rule: str, scene: Scene, seconds: int) -> list[str]:
    from gputop.session.auto_capture import Trigger, parse_rule
    from gputop.telemetry.history import History

    history, trigger, out = History(), Trigger(parse_rule(rule)), []
    for t in range(seconds):
        history.append(sample := scene.sample(float(t)))
        if (found := trigger.check(history, sample)) is not None:
            out.append(f"{t} {found.text(found.uuid)}")
    return out


def test_on_dip_takes_a_condition() -> None:
    level: Callable[[float], float] = lambda t: 0.2 if 40 <= t < 60 or 80 <= t < 83 else 0.9  # noqa: E731
    scene = Scene({0: 0.9, 1: level}, gpus=2)
    assert captures_on("sm_active < 40% and gpus.max(sm_active) > 50% for 5s", scene, 100) == [
        "45 GPU GPU-1: sm_active < 40% and gpus.max(sm_active) > 50% for 5 s"]


@pytest.mark.parametrize(("rule", "message"), [("sm_activ < 40%  and power_w > 3W", "did you mean sm_active"),
                                               ("host.cpu_ratio > 90%", "per-GPU metric"),
                                               ("sm<0.6*medan for 5s", "sm<0.6.median, sm<40%"),
                                               ("power > 3", "power<200W"), ("sm_active < 1 for 2h", "1 to 3600")])
def test_what_is_no_condition_for_a_dip(rule: str, message: str) -> None:
    from gputop.core.errors import GputopError
    from gputop.session.auto_capture import parse_rule

    with pytest.raises(GputopError, match=message):
        parse_rule(rule)
