"""The JSON Schemas hold for the documents that are printed, key by key, by a checker that knows no type of gputop."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gputop.advice.fleet.advise import FleetReport, fleet_advice
from gputop.advice.registry import limit
from gputop.cli import main
from gputop.commands.arguments import parser
from gputop.commands.schema import SCHEMAS, json_schema
from gputop.core.codec import to_document
from gputop.doctor.check import Check
from gputop.doctor.examine import DoctorDocument
from gputop.export import cluster, snapshot
from gputop.profiler.capture.facts import facts_of
from gputop.session.notifier import Notification
from tests.cluster.fleets import fleet, gpu, job
from tests.commands.schema_problems import problems
from tests.tui.scenes import Scene, capture_of

ROOT = Path(__file__).parents[2]
TRACE = str(ROOT / "tests" / "data" / "keras3_slow_input.xplane.pb.gz")
FAST = str(ROOT / "tests" / "data" / "keras3_fast.xplane.pb.gz")
RULES = '[[rule]]\nid = "a"\non = "trace"\nwhen = "step.time > 1ms"\ntitle = "T"\n' \
        '[limits]\nlaunch_bound.share = 0.1\n[budget]\nstep = "step.time < 300ms"\n'


@pytest.fixture
def printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
            capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """The document that a command prints, in a folder with rules and two runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gputop.toml").write_text(RULES)
    for run in ("one", "two"):
        folder = tmp_path / "logs" / "plugins" / "profile" / run
        folder.mkdir(parents=True)
        shutil.copy(FAST, folder / "host.xplane.pb.gz")

    def document(*words: str) -> Any:
        capsys.readouterr()
        assert main([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)
    return document


def test_each_command_that_prints_json_has_a_schema() -> None:
    helped = {name: command.format_help() for name, command in parser()._commands.choices.items()}
    print_json = {name for name, text in helped.items() if "  --json" in text}
    assert len(print_json) > 5
    assert print_json <= SCHEMAS.keys(), "a document is an entry of gputop.commands.schema.SCHEMAS"


@pytest.mark.parametrize(("name", "words"), [
    ("analyze", ["analyze", TRACE]), ("analyze", ["analyze", TRACE, "--idle-gaps", "3"]),
    ("analyze-all", ["analyze", "logs", "--all"]), ("compare", ["compare", TRACE, FAST, "--fail-on", "budget"]),
    ("rules", ["rules", "list"]), ("rules-test", ["rules", "test", "gputop.toml", TRACE]),
])
def test_what_a_command_prints_is_what_its_schema_says(printed: Callable[..., Any], name: str,
words: list[str]) -> None:
    assert not problems(name, printed(*words))


@pytest.mark.parametrize("scenario", ["gpu0-oversubscribed", "input-bound"])
def test_snapshots_captures_and_comparisons_of_a_simulated_node(scenario: str) -> None:
    scene = Scene(scenario)
    record = scene.capture()
    assert not problems("snapshot", snapshot.document(scene))
    assert not problems("capture", {**record.analysis.to_json(), "capture": to_document(facts_of(record))})
    assert not problems("analyze", record.analysis.to_json())


def test_notifications() -> None:
    told = Notification.of("finding", 1.5, "node-07", "GPU 0 idles", "Look at it.", False, 2)
    assert not problems("notification", to_document(told))


def test_captures_of_several_workers() -> None:
    analysis = capture_of("input-bound").analysis
    failed = {"address": "b:1", "path": None, "took_s": None, "began_s": None, "overview_s": 0.0,
              "clock_offset_s": None, "clock_error_s": None, "cost": None,
              "error": {"message": "refused", "fix": "start it"}}
    facts = {"address": "a:1", "path": "/t", "time_s": 1.0, "asked_s": 10.0, "took_s": 9.0, "notes": [],
             "workers": [failed]}
    assert not problems("capture", {**analysis.to_json(), "capture": facts})
    facts["workers"] = [{**failed, "error": "refused"}]
    assert problems("capture", {**analysis.to_json(), "capture": facts})


def test_baselines(printed: Callable[..., Any]) -> None:
    assert main(["analyze", TRACE, "--save-baseline", "main", "--logdir", "logs"]) == 0
    assert main(["analyze", FAST, "--save-baseline", "other", "--logdir", "logs"]) == 0
    Path("logs/baselines/other.json").write_text("no JSON")
    document = printed("compare", "--baselines", "--logdir", "logs")
    assert not problems("baselines", document)
    assert {own["name"]: own["readable"] for own in document["baselines"]} == {"main": True, "other": False}


def test_the_cluster_and_the_doctor() -> None:
    own = fleet(job(), job(id="2", low_gpus=(gpu(0.1),)))
    assert not problems("cluster", cluster.to_document(FleetReport(own, *fleet_advice(own))))
    checks = (Check("a", "ok", "A", "fine"), Check("b", "fail", "B", "broken", "mend it"))
    assert not problems("doctor", to_document(DoctorDocument(checks)))


def test_the_checker_sees_what_is_wrong() -> None:
    document = capture_of("input-bound").analysis.to_json()  # type: ignore[union-attr]
    for change in ({"gpus": 3}, {"new_key": 1}, {"findings": [{"id": "x"}]}, {"steps": {**document["steps"],
    "count": "3"}},
                   {"findings": [{**document["findings"][0], "severity": "grave"}]}):
        assert problems("analyze", {**document, **change}), change
    del document["trace"]
    assert problems("analyze", document)


def test_a_key_with_a_default_is_always_written_and_one_that_may_be_left_out_is_not_required() -> None:
    defs = json_schema("capture")["$defs"]
    assert {"consequences", "culprits", "brief"} <= set(defs["Finding"]["required"])
    facts = defs["CaptureFacts"]
    assert set(facts["required"]) == {"address", "path", "time_s", "asked_s", "took_s", "notes"}
    assert {"cost", "probe", "workers"} <= facts["properties"].keys()


def test_the_command_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0 and capsys.readouterr().out.split() == list(SCHEMAS)
    assert main(["schema", "no_such"]) == 2
    capsys.readouterr()
    assert main(["schema", "compare"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "gputop compare"


def test_what_agents_are_told_exists() -> None:
    """Commands, options and keys that SKILL.md names."""
    text = (ROOT / "gputop" / "SKILL.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 60
    keys = set(json_schema("analyze")["$defs"]["AnalyzeDocument"]["properties"])
    assert {"findings", "abstained", "what_if", "trace", "steps", "simulated"} <= keys & set(re.findall(r"\w+", text))
    needs_s = limit("idle_gpu.age_s") + limit("slow_rank.window_s")
    assert f"`--seconds {needs_s:.0f}`" in text and f"run for {needs_s / 60:.0f} min" in text
    for line in re.findall(r"`gputop ([^`]+)`", text):
        words = [word for word in line.replace("\n", " ").split() if word.startswith("--")]
        command = line.split()[0]
        parser = __import__("gputop.commands.arguments", fromlist=["parser"]).parser((command,))
        known = parser._commands.choices[command]._option_string_actions
        assert all(word in known for word in words if command != "run"), line
