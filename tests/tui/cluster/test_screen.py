"""The screen of a cluster: what its rows say, what it asks for, and what it does with answers."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from textual.pilot import Pilot

from gputop.advice.fleet.advise import FleetReport, fleet_advice
from gputop.cluster.model import NO_JOB, FleetView, together
from gputop.core.errors import GputopError
from gputop.core.findings import Problem
from gputop.core.own_program import gputop_command
from gputop.export.cluster import to_html, to_text
from gputop.tui.cluster import cluster_app as app
from gputop.tui.cluster import fleet_rows as rows
from gputop.tui.cluster.cluster_app import ClusterApp
from gputop.tui.cluster.fleet_rows import ORDERS, State
from tests.cluster.fleets import NOW, StillAsker, fleet, gpu, job, node, past
from tests.records import replace
from tests.tui.found import line_text as plain
from tests.tui.textual_private import draw_when_settled


def report(**changes: object) -> FleetReport:
    slow = gpu(0.55, "n4:3", past((178, 0.55)), sm_clock_hz=1.1e9)
    nodes = (replace(node(0.9, "n1"), history=past((178, 0.9))), replace(node(0.86, "n4"), each=(slow,)))
    jobs = (job(id="1", user="ada", power_w=100.0),
            job(id="2", user="bob", gpus=64, activity=0.0, idle_gpus=64, median=0.0,
                history=past((136, 0.9), (42, 0.0))),
            job(id="3", low_gpus=(slow,), each=nodes, node_names=("n1", "n4")))
    own = replace(fleet(*jobs), **changes)
    return FleetReport(own, *fleet_advice(own))


def state(**changes: object) -> State:
    return State(FleetView(), report(**changes))


def ids(own: State) -> list[str]:
    return [row.job.id for row in own.rows()]


def test_jobs_with_the_worst_findings_stand_first() -> None:
    own = state()
    assert ids(own) == ["2", "3", "1"]
    orders = {order: ids(replace(own, order=order))[0] for order in ORDERS}
    assert orders == {"finding": "2", "job": "1", "user": "1", "GPUs": "2", "activity": "2", "power": "1"}


def test_rows_keep_their_order_under_the_finger_until_they_are_sorted() -> None:
    own = state()
    idle = report()
    own.report = FleetReport(idle.fleet, (), idle.abstained)  # the first answer: nothing is judged yet
    assert ids(own) == ["1", "2", "3"] and "finding ▾" in plain(rows.heading(own, 120))
    own.report = idle
    assert ids(own) == ["2", "3", "1"]  # nobody has moved yet
    own.hold()
    own.report = FleetReport(idle.fleet, (), idle.abstained)
    assert ids(own) == ["2", "3", "1"] and "finding (o: sort)" in plain(rows.heading(own, 120))
    own.report = replace(idle, fleet=fleet(*idle.fleet.jobs, job(id="9")))
    assert ids(own) == ["2", "3", "1", "9"] and own.is_sorted  # a new one comes last, where it belongs by its findings
    own.report = FleetReport(idle.fleet, (), idle.abstained)
    own.sort()
    assert ids(own) == ["1", "2", "3"] and own.order == "finding"
    own.sort()
    assert own.order == "job" and "finding, by job ▾" in plain(rows.heading(own, 120))


def test_a_young_prometheus_has_lanes_of_what_it_knows() -> None:
    young = replace(fleet(job(id="1", history=past((172, None), (8, 0.9))), job(id="2", history=past((180, None)))))
    own = State(FleetView(), FleetReport(young, (), ()))
    assert "last 10 min" in plain(rows.heading(own, 120)) and own.span_s == 600.0
    text = plain(rows.line(own, own.rows()[0], 120, False))
    assert text.count("·") < rows.history_columns(own, 120) / 2
    assert "last 10 min" in to_text(FleetReport(young, (), ()), 120)
    assert "last 10 min" in to_html(FleetReport(young, (), ()))
    old = State(FleetView(), report())
    assert "last 3 h" in plain(rows.heading(old, 120)) and old.span_s == 3 * 3600.0


def test_a_filter_finds_by_user_node_and_finding() -> None:
    own = state()
    for pattern, found in (("bob", ["2"]), ("N4", ["3"]), ("held", ["2"]), ("straggler", ["3"]), ("x", [])):
        own.pattern = pattern
        assert ids(own) == found
    assert "No job matches the filter" in plain(rows.details(own, None, 80, 7)[0])
    own.pattern = ""
    unknown = replace(own.rows()[-1], job=replace(job(id="1"), history=None))
    assert "No finding yet" in plain(rows.details(own, unknown, 80, 7)[1]), "it is not called healthy"


def test_unfolding_shows_nodes_and_gpus_and_asks_for_them() -> None:
    own = state()
    own.open_jobs.add("3")
    own.open_nodes.add(("3", "n4"))
    shown = own.rows()
    assert [row.key for row in shown] == [("2", "", ""), ("3", "", ""), ("3", "n1", ""), ("3", "n4", ""),
                                          ("3", "n4", "GPU-n4:3"), ("1", "", "")]
    texts = [plain(rows.line(own, row, 100, False)) for row in shown]
    assert "▾ n4" in texts[3] and "straggler n4:3" in texts[3] and "straggler" not in texts[2]
    assert "1100MHz" in texts[4] and "55%" in texts[4]
    asked = own.asked(shown)
    assert asked.open_jobs == ("3",) and asked.open_nodes == (("3", "n4"),) and asked.jobs == ("2", "3", "1")
    own.at = ("3", "n4", "GPU-gone")
    assert own.place(shown) == 3  # the row above what is gone


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_every_line_is_as_wide_as_the_screen(width: int) -> None:
    own = state()
    own.open_jobs.add("3")
    lines = [rows.heading(own, width), *(rows.line(own, row, width, True) for row in own.rows())]
    assert {len(plain(line)) for line in lines} == {width}
    assert all(len(plain(line)) <= width for row in own.rows() for line in rows.details(own, row, width, 7))


def test_the_cursor_tells_the_activity_of_then() -> None:
    own = state()
    own.cursor = 60 if rows.history_columns(own, 200) > 61 else 20
    (first, *_) = own.rows()
    text = plain(rows.line(own, first, 200, False))
    assert "┃" in text and " 90%" in text and "0%" in plain(rows.line(replace(own, cursor=None), first, 200, False))
    assert "active then" in plain(rows.heading(own, 200))


def test_what_is_missing_is_said() -> None:
    own = state(problems=(Problem("a is gone", "mend it"), Problem("b")), figures_s=NOW - 90)
    lines = [plain(line) for line in rows.header(own, 100)]
    assert "data 90 s old" in lines[0] and "! a is gone" in lines[1] and "(+1: p)" in lines[1]
    text = plain(rows.problems(own.report))
    assert "a is gone" in text and "mend it" in text and "b" in text


def test_commands_for_a_node_take_no_name_for_an_option() -> None:
    assert rows.commands_for("n07.cluster", "ada@login") == {
        "enter": ["ssh", "-J", "ada@login", "-t", "n07.cluster", "gputop"],
        "a": ["gputop", "--attach", "n07.cluster", "--profiler-port", "6009"]}
    for name in ("-oProxyCommand=x", "a b", "$(x)", "", "n;x"):
        assert rows.commands_for(name) == {}


@asynccontextmanager
async def shown(own: State) -> AsyncIterator[tuple[ClusterApp, Pilot, StillAsker]]:
    asker = StillAsker()
    app = ClusterApp(own, asker, rows.commands_for, Path(), period_s=15.0)  # type: ignore[arg-type]
    draw_when_settled(app)
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        yield app, pilot, asker


async def test_answers_change_the_screen_and_faults_leave_it() -> None:
    own = state()
    async with shown(own) as (app, pilot, asker):
        assert asker.wanted[-1].jobs == ("2", "3", "1")
        await pilot.press("down", "space")
        assert asker.wanted[-1].open_jobs == ("3",)
        asker.listener(report(problems=(Problem("new"),)))
        await pilot.pause()
        assert own.report.fleet.problems[0].message == "new"
        asker.listener(GputopError("the job is gone", "look for it"))
        await pilot.pause()
        assert own.report.fleet.problems == (Problem("the job is gone", "look for it"),) and own.rows()
        await pilot.press("down", "down", "enter", "enter")
    assert app.return_value == ["ssh", "-t", "n4", "gputop"]


async def test_what_is_shown_gets_older_while_no_answer_comes() -> None:
    own = state()
    async with shown(own) as (app, pilot, asker):
        app._main.show_age()
        assert own.late_s == 0.0
        app._main._answered_s -= 62.0
        app._main.show_age()
        assert own.late_s == pytest.approx(62.0, abs=5.0)
        assert f"data {own.late_s:.0f} s old" in plain(rows.header(own, 100)[0])
        asker.listener(report())
        await pilot.pause()
        assert own.late_s == 0.0 and "old" not in plain(rows.header(own, 100)[0])


def test_gpus_of_no_job_are_the_last_row_and_unfold_to_their_nodes() -> None:
    free = (replace(node(0.3, "n7"), each=(gpu(0.3, "n7:0"),)), node(0.1, "n8"))
    own = state(free=together(free), free_nodes=free)
    assert ids(own)[-1] == NO_JOB and own.report.of_job(NO_JOB) == []
    row = own.rows()[-1]
    assert "2×8" in plain(rows.line(own, row, 120, False))
    assert "No job holds these GPUs" in plain(rows.details(own, row, 120, 7)[1])
    own.unfold(row)
    own.open_nodes.add((NO_JOB, "n7"))
    assert [r.node.name for r in own.rows() if r.node is not None and r.gpu is None] == ["n7", "n8"]
    assert own.rows()[-2].gpu is not None and own.asked([row]).open_jobs == (NO_JOB,)
    own.pattern = "n8"
    assert ids(own)[0] == NO_JOB


def test_a_program_that_fails_leaves_its_words_until_they_are_read(monkeypatch: pytest.MonkeyPatch,
                                                                  capsys: pytest.CaptureFixture[str]) -> None:
    read: list[str] = []
    monkeypatch.setattr("builtins.input", lambda: read.append("enter") or "")
    app.run_program(["sh", "-c", "exit 0"])
    assert not read and not capsys.readouterr().err
    app.run_program(["sh", "-c", "exit 127"])
    said = capsys.readouterr().err
    assert read == ["enter"] and "exited with status 127" in said and "--remote-command /PATH/gputop" in said
    app.run_program(["/no/such/program"])
    assert read == ["enter"] * 2 and "cannot start" in capsys.readouterr().err


def test_jobs_are_sorted_by_the_numbers_in_their_names() -> None:
    jobs = (job(id=name) for name in ("10001", "9999", "ml/b-10", "ml/b-9"))
    own = State(FleetView(), FleetReport(fleet(*jobs), (), ()), order="job")
    assert ids(own) == ["9999", "10001", "ml/b-9", "ml/b-10"]


async def test_a_snapshot_goes_to_a_folder_of_one_s_own_alone(tmp_path: Path) -> None:
    folder = tmp_path / "home" / "out"
    app = ClusterApp(state(), StillAsker(), rows.commands_for, folder)  # type: ignore[arg-type]
    said: list[str] = []
    app.notify = lambda message, **_: said.append(message)  # type: ignore[assignment,misc]
    app.action_snapshot()
    assert said[-1].startswith(f"Wrote {folder}") and len(list(folder.iterdir())) == 3
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    if os.geteuid() == 0:
        os.chown(tmp_path / "home", 12345, -1)
        app.action_snapshot()
        assert "belongs to another user" in said[-1] and len(list(folder.iterdir())) == 3


def test_gputop_that_is_run_is_this_very_one(monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[list[str]] = []

    def note(words: list[str]) -> subprocess.CompletedProcess[bytes]:
        run.append(words)
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(app.subprocess, "run", note)
    app.run_program(["gputop", "--attach", "n7"])
    app.run_program(["ssh", "n7", "gputop"])
    assert run == [[*gputop_command(), "--attach", "n7"], ["ssh", "n7", "gputop"]]
