"""The app under a pilot: keys, sizes, faults. What it looks like is in the SVG snapshots."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from gputop.core.errors import NoDataError
from gputop.core.findings import Advice, Finding
from gputop.core.samples import GpuSample, HostSample
from gputop.profiler.capture.records import CaptureStatus
from gputop.session.capture.captures import EarlierCaptures
from gputop.session.session import Options, Session
from gputop.telemetry.sampler import Sampler
from gputop.tui.app import GputopApp
from gputop.tui.monitor import messages, time_axis
from gputop.tui.monitor.columns import METRICS
from gputop.tui.monitor.findings_panel import ActionsPanel, CaptureView
from gputop.tui.monitor.gpu_table import GpuTable
from gputop.tui.monitor.process_panel import ProcessPanel
from gputop.tui.screens.dialogs import Popup
from gputop.tui.widgets.cached_lines import LinesWidget
from tests.analyses import make_analysis
from tests.fakes import StillSession
from tests.records import replace
from tests.telemetry.node_doubles import Node
from tests.tui.found import COMBINED, HEAVY, SMALL, FoundSession, piloted, text_of
from tests.tui.textual_private import messages as notices
from tests.waiting import PATIENCE_S

SIZES = [(80, 24), (120, 40), (200, 50)]


def test_main_screen(snap_compare: object) -> None:
    assert snap_compare(GputopApp(FoundSession()), terminal_size=(120, 40))  # type: ignore[operator]


async def test_metrics_go_round_intervals_are_round_and_pausing_holds_the_screen() -> None:
    session = StillSession()
    async with piloted(session) as (app, pilot):
        table = app.query_one(GpuTable)
        await pilot.press("M")
        assert table.metric == METRICS[-1]
        await pilot.press("plus")
        assert session.feed.interval_s == 0.5
        await pilot.press("minus", "minus")
        assert session.feed.interval_s == 2.0
        first = table.sample
        session.advance()
        await pilot.pause()
        held = table.sample
        assert held is not first
        await pilot.press("p")
        assert "PAUSED" in text_of(app._header)
        session.advance()
        await pilot.pause()
        assert table.sample is held
        await pilot.press("space")
        assert "PAUSED" not in text_of(app._header)


async def test_the_axis_is_made_only_where_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    axis, made = time_axis.axis, []
    monkeypatch.setattr(time_axis, "axis", lambda *made_of: made.append(made_of) or axis(*made_of))
    async with piloted(StillSession()) as (app, _):
        table = app.query_one(GpuTable)
        assert made
        made.clear()
        app._redraw_table()
        app._redraw_table()
        assert made == []
        table.time.zoom(1)
        app._redraw_table()
        assert len(made) == 1


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_what_if_the_chosen_findings_were_cured(size: tuple[int, int]) -> None:
    session = FoundSession()
    findings = [replace(f, gain=replace(f.gain, by="replay")) for f in (HEAVY, SMALL)]
    session.change_capture(analysis=make_analysis(
        steps={"median_s": 0.412, "mean_s": 0.412}, findings=findings, what_if=COMBINED))
    session.results.refresh()
    async with piloted(session, size) as (app, pilot):
        panel = app.query_one(ActionsPanel)
        await pilot.press("r", "w")
        assert "With this fix: 412 → 255 ms (38% less); next:" in text_of(panel)
        await pilot.press("down", "w")
        assert "With these 2 fixes: 412 → 239 ms (42% less). No other" in text_of(panel)
        assert "[x] " + SMALL.title in text_of(panel)
        await pilot.press("w")
        assert panel.chosen == {HEAVY.id} and not app.paused
        await pilot.press("up", "w")
        assert "chosen" not in text_of(panel) and "[x]" not in text_of(panel)
        panel.update_view((findings[0],), "What to do")
        await pilot.press("w")
        assert not panel.chosen, "with one saving there is nothing to add up"


async def test_a_filter_of_processes_stays_until_another_is_written() -> None:
    async with piloted(StillSession()) as (app, pilot):
        panel = app.query_one(ProcessPanel)
        await pilot.press("slash", *"nobody", "enter")
        assert "no process matches" in text_of(panel)
        await pilot.press("slash", "escape")
        assert panel.pattern == "nobody"


async def test_what_to_do_is_whole_before_the_others_have_a_line_and_spare_lines_unfold_them() -> None:
    lead, step = ("No problem found so far.", "Press c."), {"compute": 0.1, "host": 0.1}
    why, action = "The others wait. " * 9 + "So much.", "Keep metrics off GPU 0. " * 9
    long = replace(HEAVY, why=why, action=action, gain=replace(HEAVY.gain, by="replay"))
    async with piloted(FoundSession(), (80, 24)) as (app, _):
        panel = app.query_one(ActionsPanel)

        def shown(*findings: Finding, lead: tuple[str, ...] = ()) -> str:
            panel.update_view(findings, "What to do", lead, CaptureView(step, 0.2))
            return " ".join(text_of(panel).split())

        text = shown(long, *(replace(SMALL, id=f"rule_{n}") for n in range(20)), lead=lead)
        assert action.strip() in text and "Why The others wait." in text and "So much." not in text
        assert lead[0] in text and lead[1] not in text and "Step time" not in text and SMALL.title not in text
        assert "20 more: ↑ ↓" in panel.border_subtitle
        text = shown(replace(long, action="Wait.", why="They wait."), replace(SMALL, id="a"), lead=())
        assert "Step time 200 ms" in text and SMALL.title in text, "where there is room"
        assert text.count(" Do ") == 1 and HEAVY.snippet in text, "its code comes before the next one's lines"
        text = shown(replace(long, action="Wait.", why="", snippet=None), replace(SMALL, id="a", action="Copy less."))
        assert "Do Copy less." in text, "what to do of the next one, where there is room"
        assert "Nothing found." in shown(lead=("Nothing found.",)) and "more" not in panel.border_subtitle


async def test_all_findings_of_a_what_if_are_on_the_screen_with_their_marks() -> None:
    saving = replace(HEAVY, action="Keep metrics off GPU 0. " * 9, gain=replace(HEAVY.gain, by="replay"))
    async with piloted(FoundSession(), (80, 24)) as (app, pilot):
        panel = app.query_one(ActionsPanel)
        others = (replace(SMALL, id=f"rule_{n}", gain=replace(SMALL.gain, by="replay")) for n in range(3))
        panel.update_view((saving, *others), "What to do", (), CaptureView({"compute": 0.2}, 0.2))
        panel.focus()
        await pilot.press("w")
        text = text_of(panel)
        assert text.count("[x]") == 1 and text.count("[ ]") == 3 and "With this fix" in text


async def test_snapshot_into_a_folder_that_cannot_be_written_says_so_and_goes_on(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    async with piloted(StillSession(logdir=blocked / "sub")) as (app, pilot):
        await pilot.press("s")
        await app.workers.wait_for_complete()
        await pilot.pause()
        assert any("Cannot write" in message for message in notices(app))
        assert app.is_running


@pytest.mark.parametrize("sizes", [
    *([size, (120, 40), size] for size in ((20, 5), (1, 1), (40, 12), (79, 23), (300, 90))),
    [(20, 60), (200, 60), (1, 1), (240, 70), (20, 60), (120, 40)]])  # columns of one size and lanes of another
async def test_every_size_draws_and_quits(sizes: list[tuple[int, int]]) -> None:
    async with piloted(FoundSession(), sizes[0]) as (app, pilot):
        for size in sizes[1:]:
            await pilot.resize_terminal(*size)
        await pilot.pause()
        await pilot.press("q")
    assert app.return_code == 0


async def test_a_resized_terminal_is_laid_out_like_a_fresh_one() -> None:
    def layout(app: GputopApp) -> list[object]:
        return [app.query_one(GpuTable).rows.per_gpu, *(app.query_one(name).region for name in (
            "#host", "#job", "#actions", "#processes"))]

    fresh = {}
    for size in SIZES:
        async with piloted(FoundSession(), size) as (app, pilot):
            fresh[size] = layout(app)
    async with piloted(FoundSession(), SIZES[1]) as (app, pilot):
        for size in (SIZES[0], SIZES[2], (20, 5), SIZES[1], SIZES[0]):
            await pilot.resize_terminal(*size)
            await pilot.pause()
            assert size == (20, 5) or layout(app) == fresh[size], size


async def test_sixteen_gpus_scroll() -> None:
    async with piloted(StillSession(gpus=16), (80, 24)) as (app, pilot):
        table = app.query_one(GpuTable)
        table.focus()
        await pilot.press(*["down"] * 15)
        await pilot.pause()
        assert table.selected == 15 and app.query_one("#gpus-box").scroll_offset.y > 0


async def test_a_source_that_fails_ends_the_app_with_its_reason() -> None:
    session = StillSession()
    async with piloted(session, (80, 24)) as (app, pilot):
        session.sampling_failed(NoDataError("no GPU", "plug one in"))
        await pilot.pause()
    assert app.error is not None and app.return_value == 3


async def test_a_sample_that_comes_while_the_screen_is_taken_down_is_harmless() -> None:
    async with piloted(StillSession(ticks=3)) as (app, pilot):
        await app.screen.query("*").remove()
        for change in ("sample", "servers", "capture"):
            app.post_message(GputopApp.Changed(change))
        await pilot.pause()


async def test_where_nothing_is_wrong_the_panel_says_what_the_limit_is() -> None:
    session = FoundSession()
    session.results.last_capture = None
    async with piloted(session):
        session.results.live = Advice(limit="No problem found so far. GPUs 0-7 are busy.")
        session.results.refresh()
        nothing, press = messages.panel_intro(session)
        assert nothing == "No problem found so far. GPUs 0-7 are busy." and "Press c" in press
        session.watch.earlier = EarlierCaptures(2)
        assert messages.panel_intro(session)[2].startswith("J: 2 captures from earlier, in ")
        session.watch.earlier = EarlierCaptures(0)
        session.control.status = CaptureStatus("analyzing", "run", 10.0)
        assert messages.panel_intro(session)[1].startswith("The trace is being analyzed")
        session.control.status = None
        session.results.live = Advice((replace(SMALL, id="memory_preallocated", origin="live"),), limit="Not checked.")
        session.results.refresh()
        assert messages.panel_intro(session)[0] == "Not checked."
        session.results.live = Advice((replace(SMALL, id="low_sm_active", origin="live"),))
        session.results.refresh()
        assert messages.panel_intro(session) == (press,)  # time is lost: only why is not known


async def test_gpus_that_have_been_seen_are_shown_while_the_host_does_not_answer() -> None:
    node = Node()
    answers = threading.Event()
    read = node.host.read

    def late(now_s: float) -> HostSample:
        answers.wait(12 * PATIENCE_S)  # longer than a loaded machine takes to draw
        return read(now_s)

    node.host.read = late  # type: ignore[method-assign]
    sampler = Sampler(node, 60.0)
    sampler.start()
    assert sampler.first_gpus_ready.wait(PATIENCE_S)
    session = Session(node, Options(discover=False), sampler=sampler)
    async with piloted(session) as (app, pilot):
        assert session.feed.sample is None and app.query_one(GpuTable).sample is sampler.first_gpus
        assert "2×H100" in text_of(app._header)
        assert not text_of(app._host).strip()
        answers.set()
        while "CPU" not in text_of(app._host) or not app.query_one(ProcessPanel)._rows:
            await pilot.pause()
    session.close()


async def test_the_top_finding_and_the_step_time_are_on_the_smallest_screen() -> None:
    async with piloted(FoundSession(), (80, 24)) as (app, _):
        shown = text_of(app.query_one(ActionsPanel))
        assert "GPU 0 does 2.2× the work of the others" in shown and "fix: 412 → 255 ms at best" in shown
        assert "  Do    Keep metrics" in shown
        assert "step time 412 ms" in text_of(app.query_one("#job", LinesWidget))


async def test_a_high_terminal_of_few_columns_gets_wide() -> None:
    """For a moment the columns are those of the one size and the lanes those of the other."""
    async with piloted(FoundSession(), (20, 60)) as (app, pilot):
        for size in ((20, 60), (200, 60), (1, 1), (240, 70), (20, 60), (120, 40)):
            await pilot.resize_terminal(*size)
        await pilot.pause()
        assert app.query_one(GpuTable).rows.per_gpu >= 1
        await pilot.press("q")
    assert app.return_code == 0


async def test_markup_and_escape_codes_in_names_are_shown_literally() -> None:
    def rename(gpu: GpuSample, tick: int) -> GpuSample:
        return replace(gpu, info=replace(gpu.info, name="[bold red]\x1b[2Jevil[/]"))

    async with piloted(StillSession(change=rename), (200, 50)) as (app, pilot):
        header = text_of(app.query_one("#header", LinesWidget))
        assert "[bold red]�[2Jevil[/]" in header
        await pilot.press("tab")
        app.query_one(GpuTable).focus()
        await pilot.press("enter")
        await pilot.pause()
        assert isinstance(app.screen, Popup)
