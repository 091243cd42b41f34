"""``gputop analyze --idle-gaps``: as text and in the JSON document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gputop.cli import main
from gputop.diagnosis.diagnose import analyze_to_facts
from gputop.timeline.idle_gap_report import IdleGapRow, text_of
from gputop.timeline.idle_gaps import rank_idle_gaps
from gputop.tui.timeline.descriptions import idle_gap_lines, idle_total_lines
from tests.advice.trace.traces import healthy, input_bound, job
from tests.analysis.host.stack_samples import sampled
from tests.records import replace
from tests.timeline.make import find_idle_gaps, timeline_of
from tests.trace.build import Builder, keras_steps

DLRM = Path(__file__).resolve().parents[3] / "shared" / "data" / "dlrm_8gpu_v100"
CAPTURE = Path(__file__).resolve().parents[1] / "data" / "keras3_fast.xplane.pb.gz"


def report(b: Builder, limit: int = 2, width: int = 80) -> str:
    facts = analyze_to_facts(b.build())
    return text_of(rank_idle_gaps(facts, limit), facts, facts.trace.window_ns[0], width)


def test_text_tells_where_why_who_and_what_ended_it():
    lines = report(input_bound()).splitlines()
    assert lines[0] == "Idle gaps by cause per step, mean over the GPUs"
    assert lines[1] == "    8.0 ms  40% in 5 gaps: input wait [input_bound]"
    at = lines.index("Idle gaps by GPU time lost")
    assert lines[at + 1] == "  1. 8.2 ms: GPU 0 for 8.2 ms from 0.019846 s (step 0): input wait [input_bound]"
    text = " ".join(" ".join(lines).split())
    assert "input wait [input_bound]" in text
    assert "host: tf_data_private_threadpool/1: Iterator::Root::Prefetch::Map 98%" in text
    assert "ended by loop_add_fusion_3, launched by launch 0" in text
    assert all(len(line) <= 80 for line in lines)


def test_where_stacks_were_sampled_each_gap_has_its_lines():
    trace = input_bound().build()
    trace.origin_ns = 1000 * 10 ** 9
    main = "train.py:9 <module> > tensorflow/python/execute.py:53 quick_execute"
    changes = [(0.004 * i, f"data.py:{7 + i % 2} decode > PIL/Image.py:5 open") for i in range(25)]
    trace.stacks = (sampled({"MainThread": [(0.0, main)], "reader": changes}, 0.1, rate_hz=250.0),)
    facts = analyze_to_facts(trace)
    text = text_of(rank_idle_gaps(facts, 2), facts, 0, 80)
    assert " of each step: data.py:7 decode, mostly in PIL/Image.py:5 open" in text
    assert "     Python: data.py:" in text
    first = IdleGapRow.of(find_idle_gaps(facts, 1)[0], facts, 0)
    assert {own.line for own in first.python} == {"data.py:7 decode", "data.py:8 decode"}
    assert sum(own.time_s for own in first.python) == pytest.approx(first.cost_s, rel=0.05)
    timeline = timeline_of(trace)
    gap, total = timeline.idle_gaps[0], timeline.idle_totals[0]
    for lines in (idle_gap_lines(timeline, gap, 90, 9, []), idle_total_lines(timeline, total, [gap], 90, 9, [])):
        assert any("".join(part for part, _ in line).startswith("Python    ") for line in lines)


def test_times_count_from_the_first_event():
    b = input_bound()
    facts = analyze_to_facts(b.build())
    shifted = analyze_to_facts(b.build())
    for events in (shifted.trace.host, shifted.trace.device):
        events.start_ns += 10**9
        events.end_ns += 10**9
    shifted.trace.device.launch_ns += 10**9
    later = analyze_to_facts(replace(shifted.trace, found={}))
    (gap,), (moved,) = find_idle_gaps(facts, 1), find_idle_gaps(later, 1)
    row = IdleGapRow.of(gap, facts, facts.trace.window_ns[0])
    assert IdleGapRow.of(moved, later, later.trace.window_ns[0]) == row


def test_nothing_to_tell():
    assert "because no GPU in this trace ran anything" in report(keras_steps(Builder(gpus=0), 5, 1_000, 900))
    never = job()
    for i in range(6):
        never.run(0, i * 20_000, 20_000, launch=i * 20_000)
    assert "no GPU is idle within" in report(never)
    assert report(healthy()).startswith("Idle gaps by")


def test_long_names_of_kernels_are_cut():
    b = job()
    for i in range(6):
        b.run(0, i * 20_000 + 5_000, 9_000, "void at::native::" + "very_" * 60 + "long<float>", launch=i * 20_000 + 10)
    text = report(b)
    assert "…" in text and all(len(line) <= 80 for line in text.splitlines())


def test_json_holds_them_only_where_asked(capsys):
    if not DLRM.exists():
        pytest.skip(f"no {DLRM}")
    assert main(["analyze", str(DLRM), "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert main(["analyze", str(DLRM), "--json", "--bubbles", "3"]) == 0
    asked = json.loads(capsys.readouterr().out)
    found = asked.pop("bubbles")
    causes = asked.pop("idle_gap_causes")
    assert asked == plain and len(found) == 3
    assert causes[0] == {"cause": "dispatch", "part": "launch", "finding": "launch_bound", "gaps": 1554,
                         "python": [], "s_per_step": pytest.approx(plain["breakdown"]["launch"], rel=1e-6)}
    assert set(found[0]) == {"gpus", "start_s", "end_s", "cost_s", "step", "part", "cause", "finding", "ended_by",
                             "meanwhile", "host", "python"}
    waits = next(b for b in found if b["cause"] == "collective_wait")
    # The first AllToAll waits for GPU 7, which comes last (traces of that job are known to).
    assert waits["gpus"] == [1, 3, 4, 5] and waits["finding"] == "collective_waiting"
    assert waits["ended_by"].startswith("GPU 7, the last") and waits["cost_s"] == pytest.approx(0.0217, abs=1e-4)


def test_the_command_prints_them_after_the_report(capsys):
    assert main(["analyze", str(CAPTURE), "--idle-gaps", "5"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("Idle gaps: none, because no GPU in this trace ran anything.")


@pytest.mark.parametrize("number", ["0", "-1", "many", "1001", "1.5"])
def test_a_wrong_number_is_wrong_usage(number):
    with pytest.raises(SystemExit) as ended:
        main(["analyze", str(CAPTURE), "--bubbles", number])
    assert ended.value.code == 2
