"""Verdicts on figures: their direction, their thresholds, what they need."""

from __future__ import annotations

import json
import math
import random
import re
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gputop.analysis.results import Analysis
from gputop.comparison.compare import compare_sides
from gputop.comparison.figures import PART_ORDER, ComparedRow, Verdict, all_rows
from gputop.comparison.report_lines import _bounds, text_report
from gputop.comparison.sides import Side
from gputop.core.errors import GputopError, NoDataError
from tests.comparison import sides
from tests.comparison.sides import changed, finding, side
from tests.records import replace


def verdicts(a: Side, b: Side) -> dict[tuple[str, str, int | None], str]:
    return {(row.group, row.id, row.gpu): row.verdict for row in all_rows(a, b)}


def the(a: Side, b: Side, group: str, id_: str, gpu: int | None = None) -> ComparedRow:
    return next(row for row in all_rows(a, b) if (row.group, row.id, row.gpu) == (group, id_, gpu))


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(5, 40), st.floats(0, 0.3))
def test_a_job_against_itself_is_noise_everywhere(seed, steps, spread):
    job = side(seed, steps, spread=spread)
    assert set(verdicts(job, job).values()) == {"noise"}


def test_unchanged_jobs_give_few_false_verdicts():
    false, untold, judged = 0, 0, 0
    runs_with_any = 0
    for seed in range(60):
        found = list(verdicts(side(2 * seed), side(2 * seed + 1)).values())
        wrong = sum(v in ("better", "worse", "changed") for v in found)
        false, judged, runs_with_any = false + wrong, judged + len(found), runs_with_any + (wrong > 0)
        untold += found.count("cannot be told")
    assert false / judged < 0.002
    assert runs_with_any / 60 < 0.05  # all figures of a comparison together
    assert untold / judged < 0.05


def test_ten_percent_less_is_better_and_more_is_worse():
    for seed in range(10):
        slow, fast = side(seed, spread=0.02), side(seed + 100, mean_s=0.18, spread=0.02)
        for id_ in ("median_s", "mean_s"):
            assert the(slow, fast, "steps", id_).verdict == "better"
            assert the(fast, slow, "steps", id_).verdict == "worse"


def test_swapping_the_sides_swaps_every_verdict():
    opposite = {"better": "worse", "worse": "better"}
    for seed, mean_s in ((0, 0.2), (1, 0.19), (2, 0.15), (3, 0.203)):
        a, b = side(seed), side(seed + 50, mean_s=mean_s, spread=0.02)
        there, back = verdicts(a, b), verdicts(b, a)
        assert {key: opposite.get(v, v) for key, v in there.items()} == back


def test_what_is_sure_but_small_is_noise():
    row = the(side(0, 400, spread=0.002), side(1, 400, mean_s=0.2012, spread=0.002), "steps", "mean_s")
    assert row.verdict == "noise" and row.reason == "a change too small to matter"


def test_the_interval_holds_the_change():
    row = the(side(0), side(1, mean_s=0.17), "steps", "median_s")
    assert row.a is not None and row.b is not None and row.low is not None and row.high is not None
    assert row.low < row.b - row.a < row.high < 0


def test_a_part_is_measured_against_the_step():
    parts = {**sides.PARTS, "d2h": 0.002}
    doubled = the(side(0, parts=parts), side(1, parts={**parts, "d2h": 0.004}), "breakdown", "d2h")
    assert doubled.verdict == "noise"  # surely doubled, and 0.2% of the step
    gone = the(side(0, parts=parts), side(1, parts={**parts, "input": 0.0}), "breakdown", "input")
    assert gone.verdict == "better" and gone.b == 0


def test_saved_documents_tell_the_step_time_but_no_parts():
    a, b = side(0, with_series=False), side(1, mean_s=0.17)
    found = verdicts(a, b)
    assert found["steps", "mean_s", None] == "better"
    assert found["breakdown", "input", None] == "cannot be told"
    row = the(a, b, "breakdown", "compute")
    assert row.reason is not None and "A" in row.reason and "traces themselves" in row.reason and row.low is None


def test_documents_without_durations_say_what_is_missing():
    a, b = (changed(one, lambda document: document["steps"].pop("durations_s")) for one in (
        side(0, with_series=False), side(1, mean_s=0.1, with_series=False)))
    row = the(a, b, "steps", "mean_s")
    assert row.verdict == "cannot be told" and row.a == pytest.approx(0.2, rel=0.05)
    assert row.reason is not None and "A and B" in row.reason


def test_without_steps_there_are_no_rows_of_steps():
    a, b = side(0), side(1)
    def without_steps(document):
        document["steps"] = None
        document["gpus"][0]["busy"] = 0.5

    a = replace(changed(a, without_steps), series=None)
    row = the(a, b, "steps", "mean_s")
    assert row.a is None and row.b is not None and row.verdict == "cannot be told"
    assert row.reason == "no training steps were found in A"
    assert the(a, b, "gpus", "busy", 0).reason == row.reason


def test_a_damaged_file_is_the_reason():
    def damage(document):
        document.update(steps=None, gpus=[])
        document["trace"]["quality"] = [{"id": "incomplete", "message": ""}]

    a = replace(changed(side(0), damage), series=None)
    comparison = compare_sides(a, side(1))
    assert comparison.headline == "CANNOT BE TOLD: the file of A is damaged."
    assert [note.id for note in comparison.notes] == ["damaged"], "that it holds no GPU says nothing"


def test_packed_iterations_are_unpacked():
    one, ten = side(0), side(1, step_s=side(1).series.step_s * 10, iterations=10.0, h2d_bytes=1e9)
    stepless = replace(changed(one, lambda document: document.update(steps=None)), series=None)
    for a, b, verdict in ((one, ten, "noise"), (replace(one, series=None), replace(ten, series=None), "noise"),
                          (stepless, ten, "cannot be told")):
        row = the(a, b, "steps", "median_s")
        assert row.verdict == verdict and row.b == pytest.approx(0.2, rel=0.05)


def test_what_two_recordings_differ_by_may_be_no_more_than_reruns_do():
    a, b = side(0, 400, spread=0.002), side(1, 400, mean_s=0.204, spread=0.002)
    row = the(a, b, "steps", "mean_s")
    assert row.verdict == "noise" and row.reason is not None
    assert row.reason == "these captures allow any change from −1% to +5%"
    found = compare_sides(a, b)
    assert found.verdict == "noise" and found.repeat is not None and found.to_json()["repeat"] is True
    assert "captures of each would be enough" in " ".join(text_report(found).split())
    runs = [side(n, 400, mean_s=0.204, spread=0.002) for n in (2, 3, 4)]
    more = compare_sides(replace(a, repeats=tuple(side(n, 400, spread=0.002) for n in (5, 6, 7))),
                         replace(b, repeats=tuple(runs)))
    assert more.verdict == "worse" and more.repeat is None


def test_what_else_ran_on_the_cpus_is_no_change_of_the_job():
    def with_cpus(of, others):
        cpus = {"allowed": 2.0, "used": 2.0 - others, "others": others}
        return changed(of, lambda document: document["trace"].update(job_cpus=cpus))

    a, b = side(0, 100, spread=0.01), side(1, 100, mean_s=0.3, spread=0.01)
    quiet, loaded = with_cpus(a, 0.1), with_cpus(b, 1.0)
    assert compare_sides(a, b).verdict == compare_sides(quiet, with_cpus(b, 0.1)).verdict == "worse"
    found = compare_sides(quiet, loaded)
    assert found.verdict == "noise" and [n.id for n in found.notes] == ["other_load"]
    assert "0.1 of 2 CPUs in A and 1 of 2 CPUs in B" in found.notes[0].message


def test_drifting_steps_are_distinguished_where_they_are_far_apart():
    drift = np.concatenate((np.linspace(1, 1.5, 10), np.linspace(1.5, 1, 10)))
    a, b = side(0, step_s=drift), side(1, step_s=drift * 0.3)
    assert the(a, b, "steps", "median_s").verdict == "better"
    assert the(b, a, "steps", "median_s").verdict == "worse"
    assert the(a, b, "steps", "mean_s").verdict == "better"
    near = side(1, step_s=drift * 0.95)
    assert {the(a, near, "steps", id_).verdict for id_ in ("median_s", "mean_s")} == {"noise"}


def test_figures_without_a_better_are_changed():
    a, b = side(0), side(1)
    for peak_bytes, verdict in ((2**31, "changed"), (2**30 + 1000, "noise")):
        b = changed(b, lambda document: document["memory"][0].update(peak_bytes=peak_bytes))  # noqa: B023
        assert the(a, b, "memory", "GPU_0_bfc").verdict == verdict


def test_only_gpus_of_both_sides_are_compared():
    found = {row.gpu for row in all_rows(side(0, gpus=4), side(1, gpus=2)) if row.group == "gpus"}
    assert found == {0, 1}


@pytest.mark.parametrize("seed", range(40))
def test_a_document_edited_or_of_another_version_never_fails(seed):
    """Any value of a saved analysis may be missing or of any type: it is compared, or refused as damaged."""
    rng = random.Random(seed)
    junk = (None, True, -1, 0, math.nan, math.inf, 10**400, "x", [], {}, [1], [{}], {"a": 1}, [[1]])

    def spoil(value, depth=0):
        if depth and rng.random() < 0.1:
            return rng.choice(junk)
        if isinstance(value, dict):
            return {k: spoil(v, depth + 1) for k, v in value.items() if depth == 0 or rng.random() > 0.1}
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return [spoil(v, depth + 1) for v in value]
        return rng.choice(junk) if depth and rng.random() < 0.2 else value

    a, b = (side(i, 6, with_series=False, findings=[finding("input_bound")], abstained=["x"]) for i in (0, 1))
    try:
        spoiled = replace(b, analysis=Analysis.from_json(spoil(b.analysis.to_json())))
    except GputopError as error:
        assert "damaged" in error.message and error.fix
        return
    for first, second in ((a, spoiled), (spoiled, a), (spoiled, spoiled)):
        try:
            comparison = compare_sides(first, second)
        except NoDataError:
            continue
        json.dumps(comparison.to_json())
        text_report(comparison)


def test_every_part_has_a_row():
    assert {row.id for row in all_rows(side(0), side(1)) if row.group == "breakdown"} == set(PART_ORDER)


def live(of: Side, *period_s: float, confidence: float = 0.9, interval_s: float = 0.05) -> Side:
    """The side with what the live signal showed in the minutes before."""
    steps = {"period_s": period_s, "confidence": confidence, "stretch_s": 60.0, "interval_s": interval_s}
    return changed(of, lambda document: document["trace"].update(live_steps=steps))


STEADY = (0.2, 0.201, 0.199, 0.2, 0.2)


@pytest.mark.parametrize(("before", "after", "verdict"), [
    (STEADY, [1.15 * s for s in STEADY], "worse"),  # as the captures say
    (STEADY, STEADY, "noise"),  # the captures differ, and the job did not
    (STEADY, [0.95 * s for s in STEADY], "noise"),
    ([4 * s for s in STEADY], [4 * 1.15 * s for s in STEADY], "worse"),  # a period of four steps
    (STEADY[:4], STEADY[:4], "worse"),  # too few minutes: as without
    ((0.17, 0.2, 0.23, 0.18, 0.22), (0.25, 0.18, 0.22, 0.24, 0.2), "noise"),  # a job that drifts by more than that
    ((0.31,) * 5, (0.31,) * 5, "worse"),  # no whole number of steps
])
def test_what_the_job_did_in_the_minutes_before_tells_a_change_from_drift(before, after, verdict):
    a, b = side(1, spread=0.01), side(2, mean_s=0.23, spread=0.01)
    row = the(live(a, *before), live(b, *after), "steps", "mean_s")
    assert row.verdict == verdict
    assert the(a, b, "steps", "mean_s").verdict == "worse"
    assert the(live(a, *STEADY), b, "steps", "mean_s").verdict == "worse"


def test_a_change_that_the_live_steps_rule_out_offers_a_repeat():
    c = compare_sides(live(side(1, spread=0.01), *STEADY), live(side(2, mean_s=0.23, spread=0.01), *STEADY))
    assert c.repeat is not None and c.captures_needed == 2 and "only +0.0%" in (c.repeat.reason or "")
    assert "live, minutes before the capture" in text_report(c, everything=True)
    words = re.findall(r"%  ([a-z ]+)$", text_report(c), re.M)
    assert "not proven" in words and set(words) <= {*get_args(Verdict), "not proven"}


@pytest.mark.parametrize("doubt", [{"confidence": 0.5}, {"interval_s": 0.15}])
def test_live_steps_that_are_not_sure_do_not_count(doubt):
    a, b = side(1, spread=0.01), side(2, mean_s=0.23, spread=0.01)
    assert the(live(a, *STEADY, **doubt), live(b, *STEADY, **doubt), "steps", "mean_s").verdict == "worse"


@pytest.mark.parametrize(("row", "bounds"), [
    (ComparedRow("steps", "mean_s", "s", 0.04, 0.01, "better", low=-0.05, high=-0.01), ("−100.0%", "−25.0%")),
    (ComparedRow("steps", "mean_s", "s", 0.04, 0.08, "worse", low=0.01, high=0.09), ("+25.0%", "+225.0%")),
    (ComparedRow("steps", "mean_s", "s", 0.04, 0.08, "worse"), None),
])
def test_no_change_is_said_to_be_below_minus_all_of_it(row, bounds):
    assert _bounds(row) == bounds
