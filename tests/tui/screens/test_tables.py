"""The tables of a capture: every figure of the analysis, sorted, filtered; where there are none, why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from textual.widgets import DataTable

from gputop.diagnosis.diagnose import analyze
from gputop.diagnosis.tables import tables
from gputop.render.table import widths
from gputop.tui.screens.dialogs import Ask, Popup
from gputop.tui.screens.tables_screen import TablesScreen, Tabs
from gputop.tui.widgets.cached_lines import LinesWidget
from tests.analyses import make_analysis
from tests.diagnosis.real_capture import CAPTURE
from tests.records import replace
from tests.tui.found import FoundSession, box_text, piloted, text_of
from tests.tui.screens.tabled import STACKS, TabledSession, found
from tests.tui.textual_private import messages

EMPTY = make_analysis(gpus=[{"gpu": 0}])


def test_an_op_not_traced_on_the_host_took_no_known_time_there() -> None:
    matmul = {"type": "MatMul", "placement": "gpu", "count": 0, "host_s": 0.0, "device_s": 1.0,
              "example": "dense/MatMul"}
    ops = next(t for t in tables(make_analysis(ops={"types": [matmul]})) if t.name == "Host ops")
    assert ops.rows[0][:5] == ("MatMul", "gpu", None, None, 1.0)


def test_every_table_tells_what_the_analysis_holds() -> None:
    kernels, by_op, collectives, memory, copies, ops, functions, pipeline = tables(found())[:8]
    assert [c.text(v) for c, v in zip(kernels.columns, kernels.rows[0], strict=True)] == [
        "80%", "100 ms", "5", "20.0 ms", "bf16", "100%", "0-1", "25%", "gemm_[bold]x"]
    assert kernels.rows[1][-1] == "and 7 more" and kernels.rows[1][4:8] == (None, None, "0", None)
    assert kernels.rows[1][1] == pytest.approx(0.05), "of the one GPU that runs them"
    assert kernels.note.startswith("Times and counts per step for each GPU that runs the kernel.")
    assert by_op.rows == () and "have no op names" in by_op.empty
    assert collectives.rows[0][:4] == ("AllReduce", 1.0, 0.5 / 5, pytest.approx(0.1 / 5)), "each as long as the mean"
    assert "per GPU in each step." in collectives.note and "(GPU 1 last at 3, GPU 0 last at 1)" in collectives.note
    assert [row[-1] for row in memory.rows][2] == "Conv2D" and memory.rows[2][2] == pytest.approx(0.75)
    assert memory.rows[0][3] == pytest.approx(0.5) and "Allocated before" in str(memory.rows[3][-1])
    assert copies.rows[0][:5] == (" 0", "h2d", "pageable", 3 / 4, 250) and copies.rows[1][6] is None
    assert copies.rows[1][0] == "mean" and copies.rows[1][5] == pytest.approx(0.1 / 8)
    assert {row[1] for row in ops.rows} == {"host", "eager"} and ops.rows[0][3] == pytest.approx(0.1 / 4)
    assert functions.rows[0][:3] == (5 / 4, 1.0 / 4, 2) and functions.rows[0][5] == "yes"
    assert "tracings in the window. XLA compiled once, in 2.00 s" in functions.note
    assert pipeline.rows[0][:4] == (0.2, 0.25, 0.9 / 4, 2.5)
    assert "waits 100 ms for its batch (40% of the step)" in pipeline.note and "Prefetch/Map" in pipeline.note


def test_without_steps_the_figures_are_those_of_the_window_and_say_so() -> None:
    without = tables(found(steps=None))
    kernels = without[0]
    assert any("waits 100 ms for each batch (40% of the window)" in table.note for table in without)
    assert kernels.rows[0][1] == pytest.approx(0.4) and kernels.note.startswith("Times and counts in the window for")
    # Twice as much work as the whole steps and the two that the window cuts can be: an evaluation, for example.
    assert "in the window" in tables(found(trace={"window_s": 8.0}))[0].note
    # Their work tells better than the window, of which half was a pause.
    sizes = [{"gpu": g, "bounds_s": [], "count": [], "time_s": [2.0], "count_per_step": [], "time_s_per_step": [0.5],
              "below_20us": None, "below_40us": None} for g in (0, 1)]
    paused = tables(found(trace={"window_s": 8.0}, kernel_sizes=sizes))[0]
    assert paused.rows[0][1] == pytest.approx(0.1) and "per step" in paused.note


def test_python_has_a_tab_where_stacks_were_to_be_sampled() -> None:
    assert "Python" not in [table.name for table in tables(found())]
    python = tables(found(stacks=STACKS))[-1]
    assert python.name == "Python" and python.unfolded({0}) == [0, 1, 3]
    assert python.rows[1] == (pytest.approx(0.75), 0.075, 0.07, "metrics.py:112 confusion_matrix")
    assert "70.0 ms of each step: metrics.py:112 confusion_matrix, mostly in numpy/core.py:3 add" in python.note
    without = tables(found(stacks={"reason": "py-spy is not installed"}))[-1]
    assert not without.rows and without.empty.endswith("py-spy is not installed")


def test_layers_unfold_and_the_limit_is_in_order() -> None:
    layers, limit, _, path, *_ = tables(found())[8:]
    assert layers.unfolded({0, 3}) == [0, 1, 3] and layers.unfolded({0, 1}) == [0, 1, 2, 3]
    assert layers.unfolded({1}) == [0, 3]
    assert layers.branch(1, {0})[-1] == "  ▸ dense  (train.py:7)" and "CUDA graphs" in str(layers.rows[3][-1])
    assert layers.rows[1][4:6] == (4e9, pytest.approx(2e11))
    assert [row[2] for row in limit.rows] == ["launch wait", "the work at the limit"]
    assert "limit of the H100 SXM. MFU 40.0%, HFU 50.0% with recomputation" in limit.note
    assert "90% of the compute time, at bf16 989.4 TFLOP/s (a data sheet)." in limit.note
    assert "enter" not in limit.note and "No roofline" in limit.picture[0]
    assert [row[:5] for row in path.rows] == [
        ("host work", 0.08, pytest.approx(0.8), 0.0, 0.0), ("kernels", 0.02, pytest.approx(0.2), 0.01, 0.05),
        ("kernels", 0.0, 0.0, 0.01, float("inf"))]
    assert path.columns[4].text(path.rows[2][4]) == "any" and path.rows[2][5:] == ("GPU 0 stream 7", 4, "gemm")
    assert "Step 3 takes 100 ms" in path.note and path.note.endswith("Not sure.")


def test_the_ranks_with_least_median_and_most_load_stand_first() -> None:
    ranks = [{"gpu": g, "host": f"n{g // 2}", "rank": g, "load_s": load, "communication_s": 0.01, "waiting_s": waiting,
              "other_s": 0.0, "most_steps": 4 * (g == 1)}
             for g, (load, waiting) in enumerate([(0.08, 0.02), (0.1, 0.0), (0.05, 0.05), (0.09, None)])]
    table = tables(found(ranks=ranks))[10]
    assert table.name == "Ranks" and [row[:2] for row in table.rows] == [
        ("least", "GPU 2"), ("median", "GPU 0"), ("most", "GPU 1"), ("", "GPU 3")]
    assert table.rows[0][2:] == (0.05, 0.01, 0.05, 0.0, 0.0, "n1") and table.rows[3][4] is None
    assert "mean of 4" in table.note
    assert "nothing to compare" in tables(found(ranks=ranks[:1]))[10].empty
    assert "by step" in tables(found(ranks=ranks, steps=None))[10].empty


def test_empty_tables_say_why() -> None:
    for table in tables(EMPTY):
        assert (table.rows == ()) == (table.name != "GPUs") and table.empty.endswith(".")
    assert "no GPUs exchange data" in tables(EMPTY)[2].empty
    assert all("could not be analyzed" in t.empty for t in tables(None))


def test_a_narrow_screen_leaves_columns_out_and_never_the_name() -> None:
    kernels = tables(found())[0]
    names = {room: [kernels.columns[i].title for i in widths(kernels, kernels.rows, room)] for room in (60, 78, 200)}
    assert len(names[200]) == len(kernels.columns) > len(names[78]) >= len(names[60])
    assert {"share", "time", "count", "kernel"} <= set(names[60])


def test_the_analysis_of_a_real_trace_fills_them() -> None:
    found = {t.name: t for t in tables(analyze([str(CAPTURE)]))}
    assert all(len(row) == len(t.columns) for t in found.values() for row in t.rows)
    assert found["Host ops"].rows and found["Functions"].rows


async def test_keys_and_mouse_of_the_tables() -> None:
    async with piloted(TabledSession()) as (app, pilot):
        await pilot.press("T")
        screen = app.screen
        assert isinstance(screen, TablesScreen) and screen.table.name == "Kernels"
        grid = screen.query_one(DataTable)
        await pilot.press("o", "o", "o")
        assert screen._by == 2 and [row[2] for row in screen._rows] == [5, 2.25]
        await pilot.press("O")
        assert [row[2] for row in screen._rows] == [2.25, 5]
        await pilot.press("slash")
        assert isinstance(app.screen, Ask)
        await pilot.press(*"BOLD", "enter")
        assert [row[-1] for row in screen._rows] == ["gemm_[bold]x"] and grid.row_count == 1
        await pilot.press("enter")
        assert isinstance(app.screen, Popup) and "gemm_[bold]x" in box_text(app)
        await pilot.press("escape", "tab")
        assert screen.table.name == "By op"
        await pilot.pause()
        assert not grid.display and "have no op names" in text_of(screen.query_one("#tables-empty", LinesWidget))
        await pilot.press("shift+tab", "shift+tab")
        assert screen.table.name == "GPUs"
        await pilot.press("escape")
        assert app.screen is screen and screen._pattern == "", "escape shows all rows first"
        await pilot.press("9", "down", "space")
        assert [str(row[-1]).strip()[0] for row in screen._rows] == ["▾", "▾", "M", "n"]
        await pilot.press("space", "up", "space")
        assert len(screen._rows) == 2


async def test_a_table_is_written_as_csv(tmp_path: Path) -> None:
    session = TabledSession()
    session.control.options = replace(session.control.options, logdir=tmp_path)
    async with piloted(session) as (app, pilot):
        await pilot.press("T", "1", "e")
        await pilot.pause()
        [path] = tmp_path.glob("gputop-kernels*.csv")
        screen = app.screen
        head, *rows = path.read_text().splitlines()
        assert head.split(",") == [column.title for column in screen.table.columns]
        assert len(rows) == len(screen._rows) and path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("width", [120, 200])
async def test_all_tabs_fit_one_line_and_name_their_keys(width: int) -> None:
    async with piloted(TabledSession(), (width, 40)) as (app, pilot):
        await pilot.press("T")
        await pilot.pause()
        tabs = text_of(app.screen.query_one(Tabs)).splitlines()[0]
        assert len(tabs) <= width
        assert re.findall(r"(?:^| )(\S)[ :](?=[A-Z])", tabs) == [*"1234567890RPWG"]


async def test_names_of_tables_stay_whole_where_they_need_several_lines() -> None:
    async with piloted(TabledSession(), (60, 24)) as (app, pilot):
        await pilot.press("T")
        tabs = app.screen.query_one(Tabs)
        shown = text_of(tabs)
        assert all(table.name in shown for table in tables(found()))
        lines = shown.splitlines()
        at = next((line.index("Limit"), y) for y, line in enumerate(lines) if "Limit" in line)
        assert at[1] > 0
        await pilot.click(Tabs, offset=at)
        assert app.screen.table.name == "Limit"


@pytest.mark.parametrize("size", [(80, 24), (20, 5), (200, 50)])
async def test_they_draw_at_any_size(size: tuple[int, int]) -> None:
    async with piloted(TabledSession(), size) as (app, pilot):
        await pilot.press("T", *"123456780", *"9 ")
        await pilot.resize_terminal(60, 20)
        await pilot.pause()
        assert isinstance(app.screen, TablesScreen)


def test_a_window_without_kernels_is_not_a_trace_without() -> None:
    assert tables(make_analysis(kernels={"by_name": []}))[0].empty == "No kernel ran in the window."


async def test_without_a_capture_the_key_says_what_to_do() -> None:
    session = FoundSession()
    session.results.last_capture = None
    async with piloted(session, (80, 24)) as (app, pilot):
        await pilot.press("T")
        await pilot.pause()
        assert any("Press c" in message for message in messages(app))
