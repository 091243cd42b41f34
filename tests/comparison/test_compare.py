"""Whole comparisons: real and simulated pairs, what is said first, the document and the text."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path

import pytest

import gputop
from gputop.analysis.results import Analysis
from gputop.analysis.steps import steps
from gputop.cli import main
from gputop.comparison.compare import Comparison, compare_sides
from gputop.comparison.figures import ComparedRow
from gputop.comparison.report_lines import text_report
from gputop.core.codec import to_document
from gputop.core.errors import EXIT_USAGE, GputopError, NoDataError
from gputop.export.snapshot import document as snapshot_document
from gputop.export.snapshot import to_json as snapshot_json
from gputop.replay.compared_files import compare, read_side
from gputop.simulation.loop import SimulatedLoop
from gputop.simulation.scenarios import Scenario, find_scenario
from gputop.simulation.xspace import build_xspace
from gputop.trace.readers.xspace import reader
from tests.comparison.sides import PARTS, changed, finding, side
from tests.fakes import START_S, StillSession
from tests.records import replace
from tests.trace.shares import NEEDS_SHARED, SHARED

DATA = Path(__file__).resolve().parents[1] / "data"
SLOW, FAST = DATA / "keras3_slow_input.xplane.pb.gz", DATA / "keras3_fast.xplane.pb.gz"


def with_job(scenario: Scenario, **changes: object) -> Scenario:
    return replace(scenario, job=replace(scenario.job, **changes))


OVERSUBSCRIBED = with_job(find_scenario("gpu0-oversubscribed"), produce_ms=120.0)  # never the limit, cured or not
CURED = with_job(OVERSUBSCRIBED, gpu0_extra_ms=0.0, gpu0_extra_kernels=0, gather_mb=0.0)
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason=NEEDS_SHARED)


def simulated(folder: Path, name: str, scenario: Scenario, begin_s: float = 20) -> Path:
    path = folder / f"{name}.xplane.pb"
    begin_ns, length_ns = int(begin_s * 1e9), 2_800_000_000
    loop = SimulatedLoop(scenario)
    path.write_bytes(build_xspace(loop, begin_ns, begin_ns + length_ns, 1_700_000_000 * 10**9, "node"))
    return path


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("simulated")
    return {"before": simulated(folder, "before", OVERSUBSCRIBED), "after": simulated(folder, "after", CURED),
            "later": simulated(folder, "later", CURED, begin_s=31), "healthy": simulated(
                folder, "healthy", find_scenario("healthy"))}


read_once = cache(read_side)


def compared(a: Path, b: Path) -> Comparison:
    """As ``compare``, with each trace read once for all tests."""
    return compare_sides(read_once(a), read_once(b))


def verdict(c: Comparison, group: str, id_: str, gpu: int | None = None) -> str:
    return next(row.verdict for row in c.rows if (row.group, row.id, row.gpu) == (group, id_, gpu))


def test_each_trace_is_read_and_analyzed_once(monkeypatch, tmp_path, capsys):
    """In whatever way it is named, and however often."""
    folder = tmp_path / "logs" / "plugins" / "profile" / "2026_01_01_00_00_00"
    folder.mkdir(parents=True)
    a, b = tmp_path / "a.xplane.pb.gz", folder / "b.xplane.pb.gz"
    for path, trace in ((a, SLOW), (b, FAST)):
        path.write_bytes(trace.read_bytes())
    (tmp_path / "link").symlink_to(a)
    whole, analyzed = [], []
    read_all, find_steps = reader.read_all, steps.find_steps
    monkeypatch.setattr(reader, "read_all", lambda path, *more: (whole.append(path), read_all(path, *more))[1])
    monkeypatch.setattr(steps, "find_steps", lambda trace: (analyzed.extend(trace.paths), find_steps(trace))[1])
    assert main(["compare", str(a), str(tmp_path / "logs"), "--fail-on", "regression", "--json"]) == 0
    assert whole == [a, b] and analyzed == [str(a), str(b)]
    assert main(["compare", str(a), str(b), "--again-a", str(tmp_path / "link")]) == EXIT_USAGE
    assert "two runs need two captures" in capsys.readouterr().err and len(whole) == 2
    whole.clear(), analyzed.clear()
    assert main(["compare", str(a), str(tmp_path / "link")]) == 0 and whole == [a] and len(analyzed) == 1
    assert main(["analyze", str(b), "--save-baseline", "main", "--logdir", str(tmp_path)]) == 0
    assert main(["compare", "--baseline", "main", "--logdir", str(tmp_path), str(a), "--markdown"]) == 0
    assert whole == [a, b, a] and len(analyzed) == 3


def test_the_real_pair_with_slow_and_fast_input():
    there = compare(SLOW, FAST)
    assert verdict(there, "breakdown", "input") == "better"
    # The step is shorter by 36%, but those of A drift from 77 ms to 156 and back within the capture.
    assert there.verdict == "noise" and there.repeat is not None and "−67% to +26%" in (there.repeat.reason or "")
    entry = next(e for e in there.advice if e.id == "input_bound")
    assert entry.status == "gone" and entry.promised is not None and 0.3 < entry.promised < 0.6
    assert entry.measured is not None and 0.2 < entry.measured < 0.5
    back = compare(FAST, SLOW)
    assert verdict(back, "breakdown", "input") == "worse"
    assert next(e for e in back.advice if e.id == "input_bound").status == "new"


def test_a_cured_gpu_0_saves_as_estimated(node):
    c = compared(node["before"], node["after"])
    assert c.verdict == "better" and c.sample_change is None
    assert verdict(c, "breakdown", "collectives") == "better" == verdict(c, "gpus", "collectives_exposed", 1)
    assert verdict(c, "collectives", "waiting") == "better" == verdict(c, "gpus", "kernels", 0)
    assert verdict(c, "breakdown", "input") == "noise" == verdict(c, "collectives", "count_per_step")
    entry = next(e for e in c.advice if e.id == "gpu0_oversubscribed")
    assert (entry.status, entry.outcome) == ("gone", "as promised")
    # Its advice was to spread the extra work over the GPUs; here that work is gone altogether.
    assert entry.measured == pytest.approx(entry.promised, abs=0.1)


def test_the_same_job_later_is_noise(node):
    c = compared(node["after"], node["later"])
    assert c.verdict == "noise" and {row.verdict for row in c.rows} == {"noise"}


def test_another_batch_size_is_said_and_reckoned(node):
    c = compared(node["before"], node["healthy"])  # 160 against 256 examples per GPU
    assert "other_batch" in [note.id for note in c.notes]
    step = 1 + (c.sample_change or 0)
    assert step == pytest.approx(c.decisive.b / c.decisive.a * 160 / 256, rel=0.01)
    text = " ".join(text_report(c).split())
    # The kernels of a batch 1.6 times as large take longer to match: times are compared per sample.
    assert "FASTER, certain: 343 → 184 ms on average for as many samples as a step of A has (−" in text
    assert "B's times are divided by 1.6" in text
    assert verdict(c, "steps", "mean_s") == "better" and verdict(c, "breakdown", "compute") != "worse"
    row = c.to_json()["rows"][0]
    assert row["per"] == "sample" and row["change"] == row["b"] - row["a"] != row["change_for_same_work"]


def test_more_bytes_with_the_same_kernel_times_may_be_other_data():
    c = compare_sides(side(0), side(1, mean_s=0.25, h2d_bytes=4e8))
    assert verdict(c, "steps", "mean_s") == "worse" and c.verdict == "cannot be told"
    text = " ".join(text_report(c).split())
    assert "or the data may differ" in text and "CANNOT BE TOLD which is better: 199 → 25" in text
    assert c.sample_change == pytest.approx(-0.69, abs=0.02)
    assert c.to_json()["batch_factor"] == 4


def test_bytes_and_kernels_that_shrink_alike_with_another_number_type_are_no_smaller_batch():
    def in_type(of, name):
        return changed(of, lambda document: [gpu.update(kernel_time_by_type={name: 0.9}) for gpu in document["gpus"]])

    a, b = side(0), side(1, mean_s=0.1, h2d_bytes=5e7)
    assert compare_sides(in_type(a, "fp32"), in_type(b, "fp32")).decisive.work == 0.5
    c = compare_sides(in_type(a, "fp32"), in_type(b, "bf16"))
    assert c.decisive.work == 1.0 and c.verdict in ("better", "cannot be told")


def test_a_saved_analysis_stands_for_its_trace(node, tmp_path):
    saved = tmp_path / "before.json"
    saved.write_text(json.dumps(read_once(node["before"]).analysis.to_json()))
    whole, half = compared(node["before"], node["after"]), compared(saved, node["after"])
    assert half.a.kind == "analysis" and half.verdict == "better"
    assert [r for r in half.rows if r.group == "steps"] == [r for r in whole.rows if r.group == "steps"]
    assert half.advice == whole.advice
    assert verdict(half, "breakdown", "collectives") == "cannot be told"


@pytest.mark.parametrize("how", ["plain", "sorted", "gz"])
def test_saved_documents_are_known_however_they_were_written(tmp_path, how):
    text = json.dumps(side(0).analysis.to_json(), sort_keys=how == "sorted", indent=None if how == "gz" else 1)
    path = tmp_path / "a.json"
    path.write_bytes(gzip.compress(text.encode()) if how == "gz" else text.encode())
    assert read_side(path).kind == "analysis"


def test_a_chrome_trace_is_still_a_trace(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 10 * i, "dur": 5, "pid": 0, "tid": 7,
         "args": {"device": 0, "stream": 7}} for i in range(9)]}))
    assert read_side(path).kind == "trace"


@pytest.mark.parametrize(("text", "message"), [
    ('{"schema": "gputop.analysis/1", "steps": {', "damaged"),
    ('{"schema": "gputop.analysis/2"}', "gputop.analysis/2"),
    ('{"schema": "gputop.doctor/1", "checks": []}', "gputop.doctor/1"),
    ('{"loss": 0.3}', "trace.json"),
])
def test_what_cannot_be_compared_says_why(tmp_path, text, message):
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(GputopError, match=message) as caught:
        compare(path, path)
    assert caught.value.fix


def snapshot(folder: Path, name: str, sm: list[float | None], **more: object) -> Path:
    path = folder / f"{name}.json"
    document = json.loads(snapshot_json(snapshot_document(StillSession(ticks=2, gpus=1))))
    uuid = document["gpus"][0]["uuid"]
    history = {"start_s": START_S, "slice_s": 5.0, "slices": len(sm), "gpus": {uuid: {"sm_active": {"mean": sm}}}}
    path.write_text(json.dumps({**document, "findings": [], "abstained": [], "capture": None,
                                "history": history if sm else None, **more}))
    return path


def captured(analysis: Analysis) -> dict[str, object]:
    return {"address": "a:1", "path": "/t", "time_s": START_S, "asked_s": 1.0, "took_s": 1.0, "notes": [],
            "analysis": analysis.to_json()}


def test_snapshots_are_compared_by_their_lanes(tmp_path):
    idle = snapshot(tmp_path, "idle", [None, 0.41, 0.4, 0.42, 0.4, 0.41, 0.43, 0.4])
    busy = snapshot(tmp_path, "busy", [0.9, 0.91, 0.9, 0.93, 0.9, 0.92, 0.91])
    short = snapshot(tmp_path, "short", [0.9])
    assert verdict(compare(idle, busy), "live", "sm_active", 0) == "better"
    assert verdict(compare(busy, idle), "live", "sm_active", 0) == "worse"
    c = compare(idle, short)
    assert verdict(c, "live", "sm_active", 0) == "cannot be told" == c.verdict
    assert "--seconds 60" in text_report(c, everything=True)


def test_a_snapshot_as_gputop_writes_it(tmp_path):
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, fine in zip(paths, (True, False), strict=True):
        path.write_text(snapshot_json(snapshot_document(StillSession(fine=fine, ticks=100))))
    c = compare(paths[0], paths[0])
    assert {row.verdict for row in c.rows if row.group == "live"} == {"noise"}
    assert {"sm_active", "power_w"} <= {row.id for row in c.rows}
    assert "sm_active" not in {row.id for row in compare(*paths).rows}  # B's GPU does not tell it
    text_report(c)


def test_a_snapshots_capture_is_compared_too(tmp_path):
    lanes = [0.4, 0.41, 0.42, 0.4, 0.41]
    before = snapshot(tmp_path, "before", lanes, capture=captured(side(0).analysis),
                      findings=[finding("input_bound", 0.3)])
    bare = snapshot(tmp_path, "bare", lanes)
    after = tmp_path / "after.json"
    after.write_text(json.dumps(side(1, mean_s=0.14).analysis.to_json()))
    c = compare(before, after)
    assert c.verdict == "better" and c.advice[0].outcome == "as promised"
    c = compare(before, bare)
    assert "no_capture" in [n.id for n in c.notes] and {row.group for row in c.rows} == {"live"}
    with pytest.raises(NoDataError, match="no value in common"):
        compare(bare, after)
    with pytest.raises(NoDataError, match="neither a GPU nor a capture"):
        compare(snapshot(tmp_path, "empty", [], gpus=[]), after)


@pytest.mark.parametrize(("a", "b", "note"), [
    (side(0, gpus=8), side(1, gpus=4), "gpu_count"),
    (side(0, kernels=("a", "b")), side(1, kernels=("c", "d", "e", "f", "a")), "other_kernels"),
    (side(0, simulated=True), side(1), "simulated_against_real"),
    (side(0, simulated=True), side(1, simulated=True), "simulated"),
    (side(0), side(1, iterations=10, h2d_bytes=1e9), "per_iteration"),
    (side(0), side(1, h2d_bytes=2e8), "other_batch"),
    (replace(side(0), gpu_names=("V100",)), replace(side(1), gpu_names=("A100",)), "gpu_model"),
])
def test_what_is_not_alike_is_said_first(a, b, note):
    c = compare_sides(a, b)
    assert [n.id for n in c.notes] == [note]
    text = " ".join(text_report(c).split())
    assert 0 < text.index(c.notes[0].message[:40]) < text.index("Advice")


def test_other_phases_and_unsure_steps_are_said():
    a = side(0)
    b = changed(side(1), lambda document: document["steps"].update(phase="evaluation", confidence="low"))
    c = compare_sides(a, b)
    assert [n.id for n in c.notes] == ["other_phase", "unsure_steps"] and c.verdict == "cannot be told"
    assert {row.unit for row in c.rows if row.group == "breakdown"} == {"ratio"}  # shares, each of its own step


def test_another_number_of_gpus_or_inference_decides_nothing():
    few = compare_sides(side(0, gpus=8), side(1, gpus=1, mean_s=0.4))
    assert few.verdict == "cannot be told" and few.headline.endswith("; A has 8 GPUs and B 1 GPU.")
    assert {row.verdict for row in few.rows if row.group == "breakdown"} <= {"changed", "noise"}
    assert compare_sides(side(0, gpus=0), side(1, mean_s=0.1)).verdict == "better"  # the job moved onto its GPUs
    train, infer = (changed(of, lambda document, anchor=anchor: document["steps"].update(
        anchor=anchor, phase="unknown", count=1)) for of, anchor in (
            (side(0), "calls of Optimizer.step"), (side(1, mean_s=0.1), "batches of the DataLoader, without a backward "
                                                                        "pass")))
    c = compare_sides(train, infer)
    assert c.verdict == "cannot be told" and "training, B's inference" in c.notes[0].message
    assert "1 step by calls" in text_report(c)


def test_alike_sides_have_no_notes():
    assert compare_sides(side(0), side(1)).notes == ()


def test_the_document_is_typed_and_whole(node):
    document = compared(node["before"], node["after"]).to_json()
    assert json.loads(json.dumps(document, allow_nan=False)) == json.loads(json.dumps(to_document(document)))
    assert document["schema"] == "gputop.compare/1" and document["verdict"] == "better"
    for row in document["rows"]:
        assert row["verdict"] in ("better", "worse", "changed", "noise", "cannot be told")
        assert row["reason"] is not None or row["verdict"] != "cannot be told"
        assert row["a"] is not None and row["b"] is not None and row["change"] == pytest.approx(row["b"] - row["a"])
    assert document["a"]["steps"]["count"] > 5 and document["a"]["gpus"] == 8


@pytest.mark.parametrize("width", [80, 100])
def test_the_text_fits_and_carries_no_escapes(width):
    def with_escapes(document):
        document["memory"][0]["allocator"] = "\x1b]0;GPU\x07" + "x" * 60
        document["steps"]["anchor"] = "calls of \x1b[31mf"

    hostile = finding("input_bound") | {"title": "\x1b[2Jtitle" + " of many words" * 20}
    a, b = (changed(one, with_escapes) for one in (
        side(0, gpus=16, findings=[hostile]), side(1, mean_s=0.1, gpus=16)))
    text = text_report(compare_sides(replace(a, path="\x1b[1ma"), b), width, everything=True)
    assert "\x1b" not in text and "\x07" not in text
    assert max(map(len, text.splitlines())) <= width
    assert text.startswith("FASTER, certain: 199 → 100 ms per step on average (−") and "GONE: " in text


def test_idle_shares_that_grow_with_a_shorter_step_are_explained():
    a, b = side(0), side(1, mean_s=0.1, parts={name: share / 2 for name, share in PARTS.items()})
    for gpu in b.series.gpus.values():
        gpu["idle"] += 0.2
    assert "the same idle time is a larger share" in " ".join(text_report(compare_sides(a, b)).split())


def test_a_mean_and_a_typical_step_that_disagree_are_both_reported():
    a, b = side(0, 200), side(1, 200, mean_s=0.22)
    slow = a.series.step_s.copy()
    slow[::5] *= 2
    c = compare_sides(side(0, step_s=slow), b)
    assert (verdict(c, "steps", "median_s"), verdict(c, "steps", "mean_s"), c.verdict) == ("worse", "better", "better")
    assert "typical step is worse, though" in " ".join(text_report(c).split())


def test_temperatures_have_their_unit_and_no_shares():
    c = compare_sides(side(0), side(1))
    cooler = ComparedRow("live", "temperature_c", "°C", 57.5, 35.0, "changed", gpu=0)
    text = text_report(replace(c, rows=(*c.rows, cooler)))
    assert "Temperature, GPU 0                   58 °C     35 °C   -22 °C  changed" in text


def test_nothing_changed_and_nothing_known_are_sentences():
    text = text_report(compare_sides(side(0), side(0)))
    assert text.startswith("NO CHANGE: 199") and "did not change beyond noise (31). --verbose" in text
    few = text_report(compare_sides(side(0, 3), side(1, 3)))
    assert few.startswith("CANNOT BE TOLD: 2") and "; too few steps: each side needs 5" in " ".join(few.split())


@needs_shared
def test_two_real_jobs_are_reported_as_different():
    c = compare(SHARED / "nsys" / "h100_2gpu_1s.sqlite", SHARED / "nsys" / "mfu_2gpu_before.sqlite")
    assert c.notes[0].id == "other_kernels" and c.verdict == "cannot be told"
    c = compare(SHARED / "kineto" / "a100_launch_bound.json.gz", SHARED / "kineto" / "v100_healthy.json.gz")
    assert {"gpu_model", "other_kernels"} & {note.id for note in c.notes}
    assert verdict(c, "steps", "mean_s") == "cannot be told"  # 3 and 5 steps
    assert next(e.status for e in c.advice if e.id == "launch_bound") == "gone"


@needs_shared
def test_a_folder_of_ranks_is_one_side():
    c = compare(SHARED / "dlrm_8gpu_v100", SHARED / "dlrm_8gpu_v100")
    assert c.notes[0].id == "same_file" and len({row.gpu for row in c.rows if row.group == "gpus"}) == 8
    assert all(row.verdict in ("noise", "cannot be told") for row in c.rows)


def test_the_command_prints_text_or_one_document(capsys):
    assert main(["compare", str(SLOW), str(FAST)]) == 0
    output = capsys.readouterr()
    assert "3 captures of each would be enough." in " ".join(output.out.split()) and output.err == ""
    assert "--again-a A2 --again-b B2" in output.out
    assert "GONE: Input wait takes" in output.out and "Welch" not in output.out
    assert main(["compare", str(SLOW), str(FAST), "--verbose"]) == 0
    assert "Welch" in capsys.readouterr().out
    assert main(["compare", str(SLOW), str(FAST), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "noise"


def test_the_commands_exit_statuses(tmp_path, capsys):
    empty = tmp_path / "empty.xplane.pb"
    empty.write_bytes(b"")
    assert main(["compare", str(SLOW), str(tmp_path / "gone.pb")]) == 1
    assert main(["compare", str(SLOW), str(empty)]) == 3
    output = capsys.readouterr()
    assert output.out == "" and "gone.pb does not exist" in output.err
    assert main(["compare", str(SLOW)]) == main(["compare", str(SLOW), str(SLOW), str(SLOW)]) == 2


def test_the_package_offers_it_lazily():
    assert gputop.compare is compare


@pytest.mark.parametrize(("before", "after", "told"), [
    ("calls of PjitFunction(add)", "calls of PjitFunction(step)", False),
    ("calls of PjitFunction(loss)", "calls of PjitFunction(step), by their kernels: the host runs ahead", False),
    ("calls of the tf.function __inference_train_12", "calls of the tf.function __inference_train_977", True),
    ("calls of the tf.function __inference_train_12", "calls of the tf.function __inference_part_9", False),
    ("calls of PjitFunction(step)", "train markers with step_num", True),
    ('ranges "step N"', "ProfilerStep# markers", True),
])
def test_steps_that_are_calls_of_other_functions_decide_nothing(before, after, told):
    """A loop of eager ops once had "steps" of 0.05 ms, and its fix was called SLOWER +820%."""
    a, b = (changed(side(seed, mean_s=time_s), lambda document, anchor=anchor: document["steps"].update(anchor=anchor))
            for seed, time_s, anchor in ((0, 0.009, before), (1, 0.0014, after)))
    c = compare_sides(a, b)
    assert c.verdict == ("better" if told else "cannot be told")
    assert ("other_functions" in [note.id for note in c.notes]) != told
    assert told or "one may be a part of the other" in c.headline
