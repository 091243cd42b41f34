"""No clean bill while time of the recording is unnamed: of all shared real traces, and of the smallest cases."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from msgspec import structs

from gputop.analysis.results import Analysis, LayerRow, Layers, RankWallTime, WallPart, WallTime
from gputop.core.findings import TraceNote
from gputop.diagnosis.diagnose import analyze_trace
from gputop.diagnosis.report import limit_of, short_report, text_report
from gputop.diagnosis.wall_text import ENOUGH_STEPS, WORTH_SAYING, not_enough, wall_rows, wall_sentence, worth_saying
from tests.advice.evidence import check_evidence
from tests.analysis.host.traces_of_epochs import MS, train
from tests.diagnosis.real_traces import DATA, analysis_of, needs_data, shared_inputs
from tests.trace.build import Builder, keras_steps

CLEAN = ("NO PROBLEM FOUND", "NO LARGE PROBLEM FOUND")
# What every recording has: whole steps, those that its edges cut, and the profiler's own time.
OF_EVERY_RECORDING = ("steps", "periods", "edges", "profiler")


@needs_data
@pytest.mark.parametrize("files", shared_inputs() if DATA.is_dir() else [],
                         ids=lambda files: "/".join(files[0].parts[-2:]))
def test_findings_rest_on_something_and_no_time_is_unnamed(files: tuple[Path, ...]) -> None:
    a = analysis_of(*files)
    check_evidence(a)
    wall = a.wall_time
    assert wall is not None and wall.recorded_s > 0
    for one in (wall, *wall.ranks):
        assert math.fsum(part.time_s for part in one.parts) == pytest.approx(one.total_s, rel=1e-9)
        outside_s = math.fsum(part.time_s for part in one.parts if part.id not in (*OF_EVERY_RECORDING, "evaluation",
                                                                                   "prediction", "unrecorded"))
        if outside_s > WORTH_SAYING * one.recorded_s:
            assert not limit_of(a).startswith(CLEAN)
    # Whatever has no finding of its own stands in the table and in the sentence, with its name and its share.
    text = " ".join(text_report(a, 10_000).split())
    names = {row.name for row in wall_rows(wall) if row.share >= WORTH_SAYING}
    assert all(name in text for name in names)
    sentence = " ".join(short_report(a, 10_000).split())
    assert not worth_saying(wall) or wall_sentence(wall) in sentence
    if a.steps is None or a.steps.count < ENOUGH_STEPS:
        assert not limit_of(a).startswith(CLEAN)


def clean() -> Analysis:
    a = analyze_trace(keras_steps(Builder(gpus=0), 200, 10 * MS, 9.9 * MS).build())
    assert not a.findings
    return a


def with_parts(a: Analysis, **shares: float) -> Analysis:
    """The analysis, its recording divided so; the rest are steps."""
    parts = tuple(WallPart(id_, share, 1, "python") for id_, share in shares.items())
    steps = WallPart("steps", 1 - sum(shares.values()), 200)
    return structs.replace(a, wall_time=WallTime(1.0, 1.0, (steps, *parts)))


def test_small_pieces_that_are_much_together_are_no_clean_bill() -> None:
    a = clean()
    assert not_enough(with_parts(a, between=0.02, open=0.02)) is None
    doubt = limit_of(with_parts(a, between=0.03, open=0.03))
    assert "NO VERDICT: whole steps take only 94%" in doubt and "between steps 3%" in doubt


@pytest.mark.parametrize(("recorded_s", "asked"), [
    (1.0, "60 (add --force"), (30.0, "60 (add --force"), (117.0, "240, or"), (156.0, "360, or")])
def test_the_longer_capture_that_is_asked_for_is_longer_than_the_one_that_is_judged(recorded_s, asked) -> None:
    a = with_parts(clean(), between=0.06)
    assert a.wall_time is not None
    parts = [structs.replace(part, time_s=part.time_s * recorded_s) for part in a.wall_time.parts]
    wall = structs.replace(a.wall_time, recorded_s=recorded_s, total_s=recorded_s, parts=tuple(parts))
    assert f"gputop capture PID --seconds {asked} " in limit_of(structs.replace(a, wall_time=wall))


def test_one_rank_that_does_something_else_is_no_clean_bill() -> None:
    a = with_parts(clean(), between=0.04)
    assert a.wall_time is not None
    ranks = tuple(RankWallTime(rank, f"n{rank}", 1.0, 1.0, with_parts(a, between=share).wall_time.parts)
                  for rank, share in enumerate((0.0, 0.0, 0.0, 0.16)))
    assert not_enough(a) is None
    doubt = limit_of(structs.replace(a, wall_time=structs.replace(a.wall_time, ranks=ranks)))
    assert "whole steps take only 84% of the 1.00 s recorded by rank 3" in doubt and "between steps 16%" in doubt


def test_a_trace_without_a_gpu_and_without_an_input_pipeline_is_judged_by_its_time() -> None:
    few = Builder(gpus=0)
    train(few, 0, 5)
    text = limit_of(analyze_trace(few.build()))
    assert text.startswith("NO VERDICT: 4 steps seen, 20 needed\nDo: ")
    assert limit_of(structs.replace(clean(), cpu_layers=None)) == (
        "NO PROBLEM FOUND: the trace shows no GPU work")


@pytest.mark.parametrize(("no_op_runs", "clean_bill"), [(0.1, True), (0.2, False)])
def test_a_cpu_that_runs_no_op_for_a_good_part_of_the_step_gets_no_clean_bill(
        no_op_runs: float, clean_bill: bool) -> None:
    computing = 1 - no_op_runs
    rows = (LayerRow("forward", None, 0.6 * computing, 0.0, 0.6, 10.0), LayerRow("aten::mm", 0, 0.1, 0.0, 0.1, 1.0),
            LayerRow("backward", None, 0.4 * computing, 0.0, 0.4, 10.0),
            LayerRow("no op runs", None, 0.0, no_op_runs, 0, 0))
    text = limit_of(structs.replace(clean(), cpu_layers=Layers("step", 1.0, 0, rows)))
    if clean_bill:
        assert text.startswith(CLEAN) and text.endswith("step: forward 54%, backward 36%")
    else:
        assert text == "NO CAUSE FOUND: the CPU runs no op of the model for 20% of the step"


def test_what_ended_the_recording_is_said_in_the_verdict() -> None:
    a = clean()
    ended = "gputop ended the recording after 2.9 of 10 s, because the job's memory had grown by 460 MiB."
    a = structs.replace(a, trace=structs.replace(a.trace, quality=(*a.trace.quality, TraceNote("ended_early", ended))))
    assert limit_of(a).endswith(f"\nFrom: {ended}") and limit_of(a).startswith(CLEAN)
    for text in (text_report(a, 10_000), short_report(a, 10_000)):
        assert text.count(ended) == 1
