"""Time that no finding claims: it is told whatever else was found, and never more than there is."""

from __future__ import annotations

import math

import pytest
from msgspec import structs

from gputop.advice.causes import unexplained
from gputop.analysis.layers.tree import NO_OP_RUNS
from gputop.analysis.results import (
    Account,
    AccountLine,
    AccountPart,
    Breakdown,
    GapWork,
    LayerRow,
    Layers,
    StepGaps,
    WallTime,
)
from gputop.core.findings import Finding, Gain
from gputop.diagnosis.report import text_report, unexplained_text
from tests.analyses import make_analysis
from tests.diagnosis.real_traces import DATA, analysis_of, needs_data, shared_inputs
from tests.records import replace

LAYERS = [GapWork(f"ensure_layer_{i}_weights", 0.011, 1.0) for i in range(8)]
GAPS = StepGaps("while no GPU is busy within the step", 0.1, 8.0, 0.002, tuple(LAYERS), ())
STEP = Breakdown(input=0.0, h2d=0.0, compute=0.28, collectives=0.0, d2h=0.0, launch=0.02, host=0.1, idle=0.0)


PARTS = tuple(AccountPart(part, 10 * time_s, "steps") for part, time_s in STEP.known.items() if time_s)
ACCOUNT = Account((AccountLine(0, "", 0, PARTS),), "step", 10, 0.4, 0.4)


def finding(id_: str, **claims: float) -> Finding:
    return Finding(id=id_, severity="low", title="", why="", evidence={}, action="", gain=Gain(None, "how"), source="",
                   claims=claims)


def analysis(step: Breakdown = STEP):
    a = make_analysis(steps={"median_s": 0.4}, gpus=[{"gpu": 0}])
    return structs.replace(a, breakdown=step, gaps=GAPS, wall_time=WallTime(4.0, 4.0, (), account=ACCOUNT))


def test_names_that_differ_in_numbers_alone_are_one() -> None:
    left = unexplained(analysis(), ())
    assert left is not None and left.parts == {"host": 0.1, "launch": 0.02} and left.of_s == pytest.approx(0.4)
    assert [(work.name, work.count) for work in left.work] == [("ensure_layer_#_weights", 8)]
    assert left.work[0].time_s == pytest.approx(0.088)
    copies = tuple(GapWork(f"h2d_w{i}", 0.05, 1.0) for i in (1, 2))  # a number within a word is no count
    left = unexplained(structs.replace(analysis(), gaps=structs.replace(GAPS, main=copies)), ())
    assert left is not None and [work.name for work in left.work] == ["h2d_w#"]


@pytest.mark.parametrize(("claimed_s", "parts"), [
    (0.2, {"host": 0.08, "launch": 0.02}),  # a fifth of the host's part has a cause, and all else none
    (0.8, None)])  # most of it
def test_a_small_finding_does_not_silence_what_is_left(claimed_s: float, parts: dict[str, float] | None) -> None:
    left = unexplained(analysis(), [finding("host_placement", host=claimed_s)])
    assert (left.parts if left is not None else None) == (parts and pytest.approx(parts))


def test_what_is_claimed_or_little_is_not_told() -> None:
    cause = structs.replace(finding("eager_execution", host=0.5), consequences=(finding("launch_bound", host=0.4),))
    assert unexplained(analysis(), [cause]) == unexplained(analysis(), [finding("eager_execution", host=0.5)])
    assert unexplained(analysis(replace(STEP, host=0.01)), ()) is None  # little is not told
    assert unexplained(analysis(), [finding("tensor_cores_unused", compute=2.4)]) == unexplained(analysis(), ())


def test_time_in_which_functions_are_compiled_on_a_cpu_is_explained() -> None:
    rows = (LayerRow(NO_OP_RUNS, None, 0.0, 0.1, 0.25, 0),)
    a = structs.replace(analysis(), breakdown=None, gpus=(), cpu_layers=Layers("step", 0.4, 0, rows))
    left = unexplained(a, ())
    assert left is not None and left.parts == pytest.approx({"host": 0.1})
    assert unexplained(a, (), tracing_s=0.1) is None


@needs_data
@pytest.mark.parametrize("files", shared_inputs() if DATA.is_dir() else [],
                         ids=lambda files: "/".join(files[0].parts[-2:]))
def test_no_more_is_unexplained_than_there_is(files) -> None:
    a = analysis_of(*files)
    left = a.wall_time.unexplained
    if left is None:
        assert "Unexplained" not in text_report(a)
        return
    assert math.fsum(left.parts.values()) == pytest.approx(left.time_s) and 0 < left.time_s <= left.of_s * (1 + 1e-6)
    if a.breakdown is not None and a.gpus:
        assert all(time_s <= a.breakdown.known[part] + 1e-12 for part, time_s in left.parts.items())
    assert all(work.time_s >= 0.1 * left.time_s for work in left.work)
    assert " is unexplained: " in unexplained_text(a)
