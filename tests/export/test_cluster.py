"""A fleet as text, JSON and HTML."""

from __future__ import annotations

import json

import pytest

from gputop.advice.fleet.advise import FleetReport, fleet_advice
from gputop.cluster.model import Group, Job
from gputop.core.findings import Problem
from gputop.export.cluster import age, cells, fleet_columns, fleet_table, power, render
from gputop.render.table import bars, widths
from tests.cluster.fleets import NOW, fleet, gpu, job, past
from tests.records import replace

HOSTILE = "a\x1b[2J<script>&\n\u202e"


def laid_out(width: int, *jobs: Job) -> dict[str, int]:
    columns = fleet_columns(jobs)
    table = fleet_table(columns, [cells(job, NOW) for job in jobs])
    return {[*columns][i]: size for i, size in widths(table, table.rows, width).items()}


def report(hostile: bool = False) -> FleetReport:
    idle = job(id=HOSTILE if hostile else "8", idle_gpus=32, median=0.0, activity=0.0, user="ada", start_s=NOW - 7200,
               history=past((136, 0.9), (42, 0.0)))
    slow = job(low_gpus=(gpu(0.55, "n4:3", past((178, 0.55)), sm_clock_hz=1.1e9),), peers={"sm_clock_hz": 1.98e9})
    own = replace(fleet(slow, idle, job(id="9", mapped="shared node", tensor_active=0.5, power_w=21_000.0)),
                  free=Group(gpus=8, activity=0.0), problems=(Problem("1 exporter does not answer", "start it"),))
    return FleetReport(own, *fleet_advice(own))


def test_the_text_has_a_row_a_job_and_what_was_found() -> None:
    text = render(report(), "text", 120)
    row = next(line for line in text.splitlines() if line.startswith("8 "))
    assert "ada" in row and "4×8" in row and "2.0 h" in row and "held, idle 42 min" in row and "▁" in row
    assert "● straggler n4:3" in text and "its power is limited" not in text and "1100 MHz" in text
    assert "! 1 exporter does not answer" in text and "GPU hours lost since" in text
    assert "~90%" in text and "values of whole nodes" in text
    assert ("held_idle, low_clock_gpu, partly_used_job, slow_node, straggler_gpu cannot be evaluated"
            in text.replace("\n  ", " "))
    assert all(len(line) <= 120 for line in text.splitlines())


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_every_line_fits(width: int) -> None:
    shown = laid_out(width)
    assert {"job", "size", "activity"} <= set(shown) and min(shown.values()) >= 0
    assert sum(shown.values()) + len(shown) - 1 <= max(width, 56)
    assert all(len(line) <= width for line in render(report(), "text", width).splitlines())


def test_long_names_are_whole_where_there_is_room() -> None:
    pod = job(id="team-a/notebook-of-a-long-name")
    assert laid_out(200, pod)["job"] == len(pod.id) and laid_out(80, pod)["job"] < 16
    assert laid_out(200, job(id="x" * 500))["job"] == 36


def test_columns_of_which_nothing_is_known_are_left_out() -> None:
    assert "user" not in laid_out(200, job()) and "user" in laid_out(200, job(user="ada"))
    known, unknown = render(report(), "html"), render(FleetReport(fleet(job()), (), ()), "html")
    assert ">user</th>" in known and ">user</th>" not in unknown and "<th>power</th>" in unknown


def test_json_has_null_for_unknown_and_ratios() -> None:
    document = json.loads(render(report(), "json"))
    assert document["schema"] == "gputop.cluster/1" and document["gpus"] == 96
    jobs = {own["id"]: own for own in document["jobs"]}
    assert jobs["7"]["user"] is None and jobs["7"]["power_w"] is None and jobs["7"]["activity"] == 0.9
    assert jobs["8"]["history"]["values"][-1] == 0.0 and jobs["9"]["mapped"] == "shared node"
    finding = next(own for own in document["findings"] if own["id"] == "straggler_gpu")
    assert finding["job"] == "7" and finding["places"] == ["n4:3"] and finding["evidence"]["gpu_hours_lost"] > 0
    assert document["problems"] == [{"message": "1 exporter does not answer", "fix": "start it"}]
    assert {own["id"] for own in document["abstained"]} >= {"held_idle"}


def test_names_from_outside_are_harmless_everywhere() -> None:
    page = render(report(hostile=True), "html")
    assert "<script" not in page and "\x1b" not in page and "http-equiv" in page
    text = render(report(hostile=True), "text", 100)
    assert "\x1b" not in text and "\u202e" not in text
    assert json.loads(render(report(hostile=True), "json"))["jobs"][1]["id"] == HOSTILE


def test_small_texts() -> None:
    assert [age(s) for s in (90, 7200, 3 * 86400)] == ["2 min", "2.0 h", "3.0 d"]
    assert power(640) == "640 W" and power(39_400) == "39 kW"
    assert bars((*[1.0] * 6, None, None, *[0.0] * 4), 6) == "███·▁▁" and bars((), 2) == "··"
    assert cells(job(nodes=3, gpus=32), NOW)["size"] == "3, 32" and cells(job(kind="util"), NOW)["activity"] == "90%*"
