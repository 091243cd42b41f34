"""What each key of each screen does: one line for each of its actions.

A stage is what has the keys, opened over the monitor of the simulated node; for each of its actions stands what to
press before, what is compared, and how that differs once the key was pressed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import structs
from textual.widgets import DataTable

from gputop.advice.fleet.advise import FleetReport
from gputop.cluster.model import FleetView
from gputop.core.errors import GputopError
from gputop.core.samples import LOST, NodeSample, ProcessSample
from gputop.profiler.capture.choose_workers import choose_workers
from gputop.profiler.capture.records import Server
from gputop.profiler.capture.request import CaptureQuestion, CaptureRequest, ask_job, ask_other_user, ask_workers
from gputop.ranks.stacks import ProcessStacks
from gputop.tui.app import GputopApp
from gputop.tui.cluster.cluster_app import ClusterApp, ClusterScreen, FleetTable, OpenNode
from gputop.tui.cluster.fleet_rows import State, commands_for
from gputop.tui.monitor.columns import METRICS
from gputop.tui.monitor.findings_panel import ActionsPanel
from gputop.tui.monitor.gpu_table import GpuTable
from gputop.tui.monitor.process_panel import ProcessPanel
from gputop.tui.run_app import Leave, Output, RunApp
from gputop.tui.screens.capture_questions import ChooseJob, StartServer, WorkersQuestion
from gputop.tui.screens.captures import CapturesScreen, SavedCaptures
from gputop.tui.screens.compare import CaptureAgain, CaptureList, Changes, CompareScreen
from gputop.tui.screens.dialogs import Ask, Confirm, Popup
from gputop.tui.screens.finding import FindingPopup
from gputop.tui.screens.process_screens import ProcessPopup, SignalList, SignalScreen, StacksPopup
from gputop.tui.screens.tables_screen import TablesScreen
from gputop.tui.terminal.terminal_app import TerminalApp
from gputop.tui.timeline.canvas import TimelineCanvas
from gputop.tui.timeline.idle_gap_list import IdleGapList
from gputop.tui.timeline.timeline_screen import TimelineScreen
from tests.cluster.fleets import StillAsker, fleet, job, node
from tests.ranks.rank_stacks import LOADS, WAITS, rank
from tests.records import replace
from tests.tui.scenes import Scene, capture_of, recorded, with_mig
from tests.tui.textual_private import message_text
from tests.waiting import PATIENCE_S

Differs = Callable[[Any, Any], bool]


def more(before: Any, after: Any) -> bool:
    return bool(after > before)


def less(before: Any, after: Any) -> bool:
    return bool(after < before)


def other(before: Any, after: Any) -> bool:
    return bool(after != before)


def to(value: Any) -> Differs:
    return lambda before, after: before != value and after == value


def by(count: int) -> Differs:
    return lambda before, after: after == before + count


@dataclass(frozen=True)
class Effect:
    """``seen`` of the app ``differs`` after the key; ``first``: keys before it."""

    seen: Callable[[Any], Any]
    differs: Differs
    first: tuple[str, ...] = ()


class AskedSession(Scene):
    """Notes what the job and its processes would be asked for; nothing of it is there."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.asked: list[Any] = []
        self.control.stop_capture = self._stop_capture  # type: ignore[method-assign]
        self.control.start_server = self._start_server  # type: ignore[method-assign]

    def start_capture(self, request: CaptureRequest | None = None) -> CaptureQuestion | None:
        self.asked.append(("capture", request.force))
        return None

    def _stop_capture(self) -> bool:
        self.asked.append("stop")
        return True

    def _start_server(self, pid: int, request: CaptureRequest) -> None:
        self.asked.append(("start", pid))

    def signal(self, process: ProcessSample, number: signal.Signals) -> None:
        self.asked.append((process.pid, number))


class HangingSession(AskedSession):
    """Processes with stacks, of which one stands elsewhere."""

    pids_to_read = (os.getpid(),)

    def read_stacks(self, pids: Sequence[int], native: bool) -> tuple[ProcessStacks, ...]:
        self.asked.append(("stacks", native))
        return tuple(rank(number, LOADS if number == 5 else WAITS) for number in range(8))

    def read_flight_recorder(self, pids: Sequence[int]) -> tuple[str, ...]:
        return ()


class OtherUserSession(AskedSession):
    """The only server belongs to another user."""

    def start_capture(self, request: CaptureRequest | None = None) -> CaptureQuestion | None:
        if request.allowed is not None:
            self.asked.append(("allow", request.allowed.address))
            return None
        return ask_other_user(request, Server("127.0.0.1:6009", "python train.py", 7, owner="bob"))


class SeveralJobsSession(AskedSession):
    """Two jobs with a profiler server."""

    def start_capture(self, request: CaptureRequest | None = None) -> CaptureQuestion | None:
        if request.job is not None:
            self.asked.append(("watch", request.job.address))
            return None
        return ask_job(request, [Server(f"127.0.0.1:{port}", "python train.py", port) for port in (1, 2)])


class ManyWorkersSession(AskedSession):
    """Nine workers."""

    def start_capture(self, request: CaptureRequest | None = None) -> CaptureQuestion | None:
        if request.workers is None:
            addresses = [f"n{number}:6009" for number in range(9)]
            return ask_workers(request, [Server(address) for address in addresses],
                               choose_workers(addresses, {}))
        self.asked.append(("capture", len(request.workers)))
        return None


class UnservedSession(AskedSession):
    """Two processes and no profiler server."""

    def start_capture(self, request: CaptureRequest | None = None) -> CaptureQuestion | None:
        raise GputopError("no profiler server")

    def processes_to_serve(self, chosen: ProcessSample | None = None) -> tuple[ProcessSample, ...]:
        return tuple(replace(self.feed.sample.processes[0], pid=pid) for pid in (8, 9))


def divided_and_lost(sample: NodeSample) -> NodeSample:
    """Several devices, processes and findings."""
    *rest, last = with_mig(sample).gpus
    lost = replace(last, readings={}, processes=(), state=LOST, message="the GPU fell off the bus (Xid 79)")
    return replace(with_mig(sample), gpus=(*rest, lost))


def monitor_session() -> AskedSession:
    """With two captures."""
    session = AskedSession(change=divided_and_lost)
    session.capture("input-bound", 90.0)
    session.capture("gpu0-oversubscribed")
    return session


def two_savings() -> AskedSession:
    """With a capture of which two findings have a saving by replay."""
    session = AskedSession()
    record, second = capture_of("gpu0-oversubscribed"), capture_of("input-bound")
    findings = (*record.findings, *second.findings)
    session.capture_ended(replace(record, time_s=session.now_s - 12.0, analysis=structs.replace(
        record.analysis, findings=findings)), session.watch.servers)
    return session


def three_captures() -> AskedSession:
    session = monitor_session()
    session.capture("healthy", 200.0)
    session.results.captures = (session.results.captures[-1], *session.results.captures[:-1])  # in their order in time
    return session


# -- what is compared ---------------------------------------------------------------------------


def screen(app: GputopApp) -> type:
    return type(app.screen)


def title(app: GputopApp) -> str:
    """Of the box that is open."""
    return str(getattr(app.screen, "_title", ""))


def depth(app: GputopApp) -> int:
    return len(app.screen_stack)


def asked(app: Any) -> list[Any]:
    return list(app.session.asked)


def last_asked(app: Any) -> Any:
    return app.session.asked[-1] if app.session.asked else None


def last_asked_of_startable(app: Any) -> Any:
    """As if TensorFlow ran in the processes that are offered."""
    if isinstance(app.screen, StartServer):
        app.screen._choices = [(process, pid, None) for process, pid, _ in app.screen._choices]
        app.screen.started = {pid: 1 for _, pid, _ in app.screen._choices}
    return last_asked(app)


def focused(app: GputopApp) -> type:
    return type(app.focused)


def copied(app: GputopApp) -> str:
    return app.clipboard


def ends(app: Any) -> bool:
    return bool(app.ends)


def table(app: GputopApp) -> GpuTable:
    return app.screen_stack[0].query_one(GpuTable)


def actions(app: GputopApp) -> ActionsPanel:
    return app.screen_stack[0].query_one(ActionsPanel)


def processes(app: GputopApp) -> ProcessPanel:
    return app.screen_stack[0].query_one(ProcessPanel)


def of(kind: type[Any] | str, what: Callable[[Any], Any]) -> Callable[[GputopApp], Any]:
    """Something of the widget of this class, or that is selected so, on the screen that is open."""
    return lambda app: what(app.screen.query_one(kind))


def on_screen(what: Callable[[Any], Any]) -> Callable[[GputopApp], Any]:
    return lambda app: what(app.screen)


def changes(app: GputopApp) -> int:
    return int(app.screen.query_one(Changes).scroll_offset.y)


# -- what the keys do ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """What has the keys: opened by ``keys`` from the monitor, or there with the focus on a widget."""

    effects: Mapping[str, Effect]
    keys: tuple[str, ...] = ()
    focus: type[Any] | None = None
    session: Callable[[], Any] = monitor_session
    app: Callable[..., Any] = GputopApp
    stays: bool = False  # open from one key to the next; else opened anew for each


CLOSES = Effect(depth, by(-1))
HELPS = Effect(title, to("Help"))
MONITOR_EFFECTS = {
    "next_job": Effect(lambda app: app.session.feed.source.label, other),
    "capture": Effect(last_asked, to(("capture", False))),
    "capture(True)": Effect(last_asked, to(("capture", True))),
    "stop_capture": Effect(last_asked, to("stop")),
    "open('timeline')": Effect(screen, to(TimelineScreen)),
    "open('tables')": Effect(screen, to(TablesScreen)),
    "open('mark')": Effect(lambda app: app.session.results.baseline is app.session.results.captures[-1], to(True)),
    "open('comparison')": Effect(screen, to(CompareScreen)),
    "open('host')": Effect(title, to("Host")),
    "open('job')": Effect(title, to("Job")),
    "open('captures')": Effect(screen, to(CapturesScreen)),
    "recommendations": Effect(focused, to(ActionsPanel), ("tab",)),
    "open('snapshot')": Effect(lambda app: {p.suffix for p in Path("traces").glob("*-SIMULATED-*")},
                               to({".json", ".txt", ".html"})),
    "metric(1)": Effect(lambda app: METRICS.index(table(app).metric), by(1)),
    "metric(-1)": Effect(lambda app: METRICS.index(table(app).metric), by(-1), ("m",)),
    "attach": Effect(title, to("Attach to HOST:PORT")),
    "interval(-1)": Effect(lambda app: app.session.feed.interval_s, less),
    "interval(1)": Effect(lambda app: app.session.feed.interval_s, more),
    "pause": Effect(lambda app: app.paused, other, ("tab",)),
    "cursor": Effect(lambda app: table(app).time.cursor.time_s is None, other),
    "cursor(-10)": Effect(lambda app: table(app).time.cursor.time_s, less, ("end", "v")),
    "cursor(10)": Effect(lambda app: table(app).time.cursor.time_s, more, ("end", "v", "shift+left", "shift+left")),
    "scroll(-1)": Effect(lambda app: table(app).time.end_s is None, to(False), ("end",)),
    "scroll(1)": Effect(lambda app: table(app).time.end_s, more, ("end", "left", "left")),
    "scroll_to_now": Effect(lambda app: table(app).time.end_s is None, to(True), ("left",)),
    "step_back": Effect(lambda app: table(app).time.end_s is None, to(True), ("left",)),
    "zoom(1)": Effect(lambda app: table(app).time.span_s, more),
    "zoom(-1)": Effect(lambda app: table(app).time.span_s, less),
    "sort": Effect(lambda app: processes(app).sort, other),
    "filter": Effect(title, to("Filter processes")),
    "open('stacks')": Effect(message_text, other),  # those of the demo have none
    "help": HELPS,
    "quit": Effect(ends, to(True)),
    "suspend_process": Effect(last_asked, to("suspend")),  # what comes of it: test_terminal_manners
}
REPLAY_EFFECTS = {
    "seek(-60)": Effect(lambda app: app.session.feed.player._seek_to, less, ("full_stop",)),
    "seek(60)": Effect(lambda app: app.session.feed.player._seek_to, more, ("comma",)),
    "interval(-1)": Effect(lambda app: app.session.feed.player.speed, more),
    "interval(1)": Effect(lambda app: app.session.feed.player.speed, less),
    "pause": Effect(lambda app: app.session.feed.player.paused, other),
}
POPUP_EFFECTS = {"app.help": HELPS, "dismiss": CLOSES}


def scrolled(app: Any) -> float:
    return float(app.screen.query_one("#popup").scroll_y)


def view(what: Callable[[Any], Any]) -> Callable[[GputopApp], Any]:
    """Something of what is shown of a timeline."""
    return of(TimelineCanvas, lambda canvas: what(canvas.view))


def selected(app: GputopApp) -> Any:
    canvas = app.screen.query_one(TimelineCanvas)
    return canvas.selected.start_ns if canvas.selected is not None else -1


def match(app: GputopApp) -> tuple[int, int]:
    canvas = app.screen.query_one(TimelineCanvas)
    return canvas.selected.row, canvas.selected.start_ns


def row(app: GputopApp) -> int:
    return int(app.screen.query_one(TimelineCanvas).index)


def gap(app: GputopApp) -> int:
    canvas = app.screen.query_one(TimelineCanvas)
    return canvas.gap[0] if canvas.gap is not None else -1


TOP = ("0", "pageup", "pageup", *["down"] * 4)  # below the levels of the phases and the critical path: GPU 0
ZOOMED = (*TOP, "full_stop", "plus", "plus", "plus")
CANVAS_EFFECTS = {
    "pan(-1)": Effect(view(lambda v: v.start_ns), less, (*ZOOMED, "end")),
    "pan(1)": Effect(view(lambda v: v.start_ns), more, (*ZOOMED, "home")),
    "pan(-8)": Effect(view(lambda v: v.start_ns), less, (*ZOOMED, "end")),
    "pan(8)": Effect(view(lambda v: v.start_ns), more, (*ZOOMED, "home")),
    "edge(-1)": Effect(view(lambda v: v.start_ns == v.window_ns[0]), to(True), (*ZOOMED, "end")),
    "edge(1)": Effect(view(lambda v: v.end_ns == v.window_ns[1]), to(True), (*ZOOMED, "home")),
    "zoom(-1)": Effect(view(lambda v: v.span_ns), less, TOP),
    "zoom(1)": Effect(view(lambda v: v.span_ns), more, ZOOMED),
    "fit": Effect(view(lambda v: v.span_ns), less, (*TOP, "full_stop")),
    "whole": Effect(view(lambda v: (v.start_ns, v.end_ns) == v.window_ns), to(True), ZOOMED),
    "back": Effect(view(lambda v: v.span_ns), more, ZOOMED),
    "place(-1)": Effect(row, less, ("pagedown",)),
    "place(1)": Effect(row, more, TOP),
    "place(-10)": Effect(row, less, ("pagedown",)),
    "place(10)": Effect(row, more, TOP),
    "range(1)": Effect(selected, more, (*TOP, "comma")),
    "range(-1)": Effect(selected, less, (*TOP, "full_stop", "full_stop")),
    "gap(1)": Effect(gap, more, ZOOMED),
    "gap(-1)": Effect(gap, less, (*ZOOMED, "n", "n")),
    "other_end": Effect(of(TimelineCanvas, lambda c: c.places[c.index].row.kind), other, (*TOP, "full_stop")),
    "fold": Effect(of(TimelineCanvas, lambda c: len(c.places)), other, TOP),
    "fold_all": Effect(of(TimelineCanvas, lambda c: len(c.places)), other),
    "details": Effect(screen, to(Popup), (*TOP, "full_stop")),
}


def moves(at: Callable[[Any], Any], *first: str) -> dict[str, Effect]:
    """Keys up and down in a list; ``at`` says which of its lines is selected."""
    return {"move(-1)": Effect(at, by(-1), ("down", *first)), "move(1)": Effect(at, by(1), ("up", "up", *first))}


def place(app: GputopApp) -> int:
    return int(app.screen.query_one(IdleGapList).at)


def entries(app: GputopApp) -> int:
    return len(app.screen.query_one(IdleGapList).entries)


class StillCluster(ClusterApp):
    """Three jobs, of which nobody is asked."""

    def __init__(self, session: Any) -> None:
        jobs = [job(id=str(i), each=(node(0.9, "n1"), node(0.5, "n2"))) for i in range(3)]
        self.session, self.trace = session, None
        self.state = State(FleetView(), FleetReport(fleet(*jobs), (), ()))
        super().__init__(self.state, StillAsker(), commands_for, Path())  # type: ignore[arg-type]


def fleet_place(app: Any) -> int:
    return int(app.state.place(app.state.rows()))


def fleet_rows(app: Any) -> int:
    return len(app.state.rows())


REPLAY = Stage(REPLAY_EFFECTS, session=recorded)
STAGES: dict[type, Stage] = {
    GputopApp: Stage(MONITOR_EFFECTS),
    TerminalApp: Stage({
        "redraw": Effect(last_asked, to("redraw")),  # what comes of it: test_terminal_manners
    }),
    GpuTable: Stage(moves(lambda app: table(app).selected) | {
        "details": Effect(title, to("GPU 0"), ("up",) * 5)}, focus=GpuTable),
    ActionsPanel: Stage(moves(lambda app: actions(app).findings.index(actions(app).selected)) | {
        "details": Effect(screen, to(FindingPopup)),
        "choose": Effect(lambda app: actions(app).chosen, other, ("up",) * 9),
        "copy": Effect(copied, other, ("up",) * 9),
        "copy(True)": Effect(copied, other, ("up",) * 9)}, focus=ActionsPanel, session=two_savings),
    ProcessPanel: Stage(moves(lambda app: processes(app)._processes.index(processes(app).selected)) | {
        "details": Effect(screen, to(ProcessPopup)),
        "signal": Effect(screen, to(SignalScreen)),
        "tree": Effect(lambda app: processes(app).as_tree, other)}, focus=ProcessPanel),
    FindingPopup: Stage({
        "markdown": Effect(copied, other),
        "place": Effect(lambda app: isinstance(app.screen, TimelineScreen) and app.screen._canvas.selected is not None,
                        to(True)),
        "app.open('stacks')": Effect(message_text, other)},
        ("r", *["up"] * 9, "enter")),
    StacksPopup: Stage({
        "again(False)": Effect(asked, to([("stacks", False)] * 2)),
        "again(True)": Effect(screen, to(Confirm))}, ("S",), session=HangingSession),
    WorkersQuestion: Stage({
        "answer('few')": Effect(last_asked, to(("capture", 3))),
        "answer('all')": Effect(last_asked, to(("capture", 9))),
        "answer('none')": CLOSES,
        "app.help": HELPS}, ("c",), session=ManyWorkersSession),
    Popup: Stage(POPUP_EFFECTS | {"copy": Effect(copied, other), "scroll(1)": Effect(scrolled, by(1)),
                                  "scroll(-1)": Effect(scrolled, by(-1), ("j", "j"))}, ("r", *["up"] * 9, "enter")),
    ProcessPopup: Stage({"signal": Effect(screen, to(SignalScreen))}, ("enter",), ProcessPanel),
    SignalScreen: Stage({
        "move(-1)": Effect(of(SignalList, lambda s: s.index), by(-1), ("down",)),
        "move(1)": Effect(of(SignalList, lambda s: s.index), by(1)),
        "ask": Effect(of(SignalList, lambda s: s.asked), to(True)),
        "send": Effect(lambda app: last_asked(app) and last_asked(app)[1], to(signal.SIGTERM), ("down", "enter")),
        "back": CLOSES,
        "app.help": HELPS}, ("K",), ProcessPanel),
    ChooseJob: Stage({
        "move(-1)": Effect(on_screen(lambda s: s._index), by(-1), ("down",)),
        "move(1)": Effect(on_screen(lambda s: s._index), by(1)),
        "choose": Effect(last_asked, to(("watch", "127.0.0.1:1"))),
        "dismiss": CLOSES,
        "app.help": HELPS}, ("c",), session=SeveralJobsSession),
    StartServer: Stage({
        "move(-1)": Effect(on_screen(lambda s: s._index), by(-1), ("down",)),
        "move(1)": Effect(on_screen(lambda s: s._index), by(1)),
        "start": Effect(last_asked_of_startable, to(("start", 8))),
        "answer": CLOSES,
        "address": Effect(screen, to(Ask)),
        "dismiss": CLOSES,
        "app.help": HELPS}, ("c",), session=UnservedSession),
    Ask: Stage({"dismiss": CLOSES}, ("a",)),
    Confirm: Stage({"answer(True)": Effect(last_asked, to(("allow", "127.0.0.1:6009"))), "answer(False)": CLOSES,
                    "app.help": HELPS}, ("c",), session=OtherUserSession),
    CompareScreen: Stage({
        "again('a')": Effect(on_screen(lambda s: len(s._again["a"])), more, ("tab", "up", "up")),
        "again('b')": Effect(on_screen(lambda s: len(s._again["b"])), more),
        "mark('a')": Effect(on_screen(lambda s: s._a.path), other, ("down", "a", "up")),
        "mark('b')": Effect(on_screen(lambda s: s._b.path), other, ("down", "b", "up")),
        "unfold": Effect(on_screen(lambda s: s._everything), other),
        "swap": Effect(on_screen(lambda s: (s._a, s._b)), other),
        "capture_again": Effect(screen, to(CaptureAgain)),
        "copy": Effect(message_text, other),
        "export": Effect(message_text, other),
        "app.help": HELPS,
        "dismiss": CLOSES}, ("B",), stays=True, session=three_captures),
    Changes: Stage({
        "scroll(-1)": Effect(changes, less, ("G",)),
        "scroll(1)": Effect(changes, more, ("g",)),
        "scroll(-1, True)": Effect(changes, less, ("G",)),
        "scroll(1, True)": Effect(changes, more, ("g",)),
        "end(-1)": Effect(changes, less, ("G",)),
        "end(1)": Effect(changes, more, ("g",))}, ("B", "u"), stays=True),
    CaptureAgain: Stage({
        "answer('a')": Effect(last_asked, to(("capture", False))),
        "answer('b')": Effect(last_asked, to(("capture", False))),
        "dismiss": CLOSES,
        "app.help": HELPS}, ("B", "c")),
    CapturesScreen: Stage({
        "open": Effect(lambda app: (len(app.screen_stack), app.session.results.last_capture), other, ("down",)),
        "mark('A')": Effect(on_screen(lambda s: s._list.marks.get("A")), other),
        "mark('B')": Effect(on_screen(lambda s: s._list.marks.get("B")), other),
        "delete": Effect(screen, to(Confirm)),
        "name": Effect(title, to("Name of the capture")),
        "filter": Effect(title, to("Filter captures")),
        "step_back": CLOSES,
        "app.help": HELPS,
        "dismiss": CLOSES}, ("J",)),
    SavedCaptures: Stage(moves(of(SavedCaptures, lambda c: c.index)) | {
        "move(-10)": Effect(of(SavedCaptures, lambda c: c.index), to(0), ("down",)),
        "move(10)": Effect(of(SavedCaptures, lambda c: c.index), to(1), ("up",)),
        "move(-1000)": Effect(of(SavedCaptures, lambda c: c.index), to(0), ("down",)),
        "move(1000)": Effect(of(SavedCaptures, lambda c: c.index), to(1), ("up",))}, ("J",), stays=True),
    CaptureList: Stage(moves(of(CaptureList, lambda c: c.index)), ("B", "tab"), stays=True),
    TablesScreen: Stage({
        "timeline": Effect(screen, to(TimelineScreen)),
        "turn(1)": Effect(on_screen(lambda s: s._index), by(1), ("1",)),
        "turn(-1)": Effect(on_screen(lambda s: s._index), by(-1), ("3",)),
        **{f"table({n})": Effect(on_screen(lambda s: s._index), to(n), ("2" if n == 0 else "1",)) for n in range(14)},
        "table(14)": Effect(message_text, other),  # no stacks
        "export": Effect(message_text, other),
        "step_back": CLOSES,
        "unfold": Effect(on_screen(lambda s: s._rows), other, ("9",)),
        "move(1)": Effect(on_screen(lambda s: s.query_one(DataTable).cursor_row), by(1), ("1",)),
        "move(-1)": Effect(on_screen(lambda s: s.query_one(DataTable).cursor_row), by(-1), ("1", "j")),
        "sort(1)": Effect(on_screen(lambda s: s._by), other),
        "reverse": Effect(on_screen(lambda s: s._rows), other, ("1", "o")),
        "filter": Effect(title, to("Filter rows")),
        "row": Effect(title, to("Kernels, row 1"), ("1",)),
        "copy": Effect(copied, other, ("1", "down")),
        "app.help": HELPS,
        "dismiss": CLOSES}, ("T",), stays=True),
    TimelineScreen: Stage({
        "leave": CLOSES,
        "idle_gaps": Effect(focused, to(IdleGapList)),
        "search": Effect(title, to("Search the timeline")),
        "found(1)": Effect(match, more, ("slash", *"nccl", "enter")),
        "found(-1)": Effect(match, less, ("slash", *"nccl", "enter", "n")),
        "report": Effect(title, to("The capture")),
        "help": HELPS,
        "close": CLOSES}, ("t",)),
    TimelineCanvas: Stage(CANVAS_EFFECTS, ("t",), stays=True),
    IdleGapList: Stage({
        "move(-1)": Effect(place, by(-1), ("home", "down")),
        "move(1)": Effect(place, by(1), ("home",)),
        "unfold(1)": Effect(entries, more, ("home", "left")),
        "unfold(-1)": Effect(entries, less, ("home", "right")),
        "move(-10)": Effect(place, less, ("pagedown",)),
        "move(10)": Effect(place, more, ("home",)),
        "move(-10000)": Effect(place, to(0), ("home", "down", "down")),
        "open": Effect(screen, lambda before, after: issubclass(after, Popup), ("home", "right", "down")),
        }, ("t", "b", "right"), stays=True),
    FleetTable: Stage({
        "move(-1)": Effect(fleet_place, by(-1), ("home", "down")),
        "move(1)": Effect(fleet_place, by(1), ("home",)),
        "move(-10)": Effect(fleet_place, to(0), ("home", "down")),
        "move(10)": Effect(fleet_place, more, ("home",)),
        "move(-100000)": Effect(fleet_place, to(0), ("end",)),
        "move(100000)": Effect(fleet_place, more, ("home",)),
        "unfold": Effect(fleet_rows, other, ("home",)),
        "unfold(True)": Effect(fleet_rows, more, ("home", "left")),
        "unfold(False)": Effect(fleet_rows, less, ("home", "right")),
        "open": Effect(fleet_rows, other, ("home",)),
        }, focus=FleetTable, app=StillCluster),
    OpenNode: Stage({
        "run_command('enter')": Effect(ends, to(True)),
        "run_command('a')": Effect(ends, to(True)),
        "run_command('')": CLOSES,
        "app.help": HELPS}, ("home", "right", "down", "enter"), FleetTable, app=StillCluster),
    ClusterScreen: Stage({
        "sort": Effect(lambda app: app.state.order, other),
        "filter": Effect(title, to("Filter jobs")),
        "cursor": Effect(lambda app: app.state.cursor, other),
        "cursor(1)": Effect(lambda app: app.state.cursor or 0, more),
        "cursor(-1)": Effect(lambda app: app.state.cursor or 0, less, ("shift+left", "shift+left")),
        "app.snapshot": Effect(lambda app: len([*Path().glob("gputop-cluster-*")]), by(3)),
        "problems": Effect(title, to("Problems")),
        "app.help": HELPS}, focus=FleetTable, app=StillCluster),
    ClusterApp: Stage({"quit": Effect(ends, to(True))}, focus=FleetTable, app=StillCluster),
    RunApp: Stage({"output": Effect(screen, to(Output)), "restart": Effect(screen, to(Confirm))}, app=RunApp),
    Output: Stage({"dismiss": CLOSES}, ("l",), app=RunApp),
    Leave: Stage({
        "answer('stay')": Effect(ends, to(True)),
        "answer(None)": CLOSES,
        "answer('end')": Effect(lambda app: ends(app) and app.job._process.wait(PATIENCE_S), to(-signal.SIGTERM)),
    }, ("q",), app=RunApp),
}
