"""Content of the screen of a cluster: its rows in order, and each as styled text. No widget."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from gputop.advice.fleet.advise import FleetReport
from gputop.cluster.model import NO_JOB, FleetView, Gpu, History, Job, Node, brief, fields_of
from gputop.export import cluster
from gputop.render.palette import ACCENT, BAD, BOLD, DIM, PLAIN, SEVERITY_STYLE, WARN
from gputop.render.styled_text import StyledText, wrap
from gputop.render.table import Column, Value, lane_means, widths
from gputop.text.units import fit, percent, printable
from gputop.tui.monitor.lanes import blank_column, column, merged, with_cursor

Layout = dict[str, tuple[Column, int]]  # the columns that are shown, with their cells
Key = tuple[str, str, str]  # job, node, UUID; "" from where the row is above it
Commands = Callable[[str], dict[str, list[str]]]  # what opens a node, by the key
_HOST = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]*@)?[A-Za-z0-9_][A-Za-z0-9._-]*")


class FleetRow(Struct, frozen=True):
    """A job; or, below it, one of its nodes; or, below that, a GPU."""

    job: Job
    node: Node | None = None
    gpu: Gpu | None = None

    @property
    def key(self) -> Key:
        return (self.job.id, self.node.name if self.node is not None else "",
                self.gpu.uuid if self.gpu is not None else "")


def _by_finding(job: Job, report: FleetReport) -> Any:
    """Jobs with the worst findings first."""
    order = {"high": 0, "medium": 1, "low": 2}
    findings = report.of_job(job.id)
    if not findings:
        return 3, 0.0, job.id
    return order[findings[0].severity], -(findings[0].gpu_hours_lost or 0.0), job.id


def _natural(name: str) -> Any:
    """Key to sort by the numbers in names: 9999 before 10001."""
    return [(not part.isdecimal(), int(part[:18]) if part.isdecimal() else 0, part)
            for part in re.split(r"(\d+)", name) if part]


ORDERS: Mapping[str, Callable[[Job, FleetReport], Any]] = {
    "finding": _by_finding,
    "job": lambda job, _: _natural(job.id),
    "user": lambda job, _: (job.user is None, job.user or "", job.id),
    "GPUs": lambda job, _: (-job.gpus, job.id),
    "activity": lambda job, _: (job.activity is None, job.activity or 0.0, job.id),
    "power": lambda job, _: (-(job.power_w or 0.0), job.id),
}


class State(Struct):
    """Choices of the user; they outlive the screen, which ends while another program has the terminal."""

    view: FleetView
    report: FleetReport
    order: str = "finding"
    pattern: str = ""
    at: Key = ("", "", "")
    open_jobs: set[str] = field(default_factory=set)
    open_nodes: set[tuple[str, str]] = field(default_factory=set)
    cursor: int | None = None  # a column of the history, counted from the newest
    held: tuple[str, ...] = ()  # jobs in the order in which they stay; none: sorted anew with each answer
    span_of: tuple[FleetReport | None, float] = (None, 0.0)  # that of the lanes, and of which report
    layout_of: tuple[FleetReport | None, int, Layout] = (None, 0, {})  # and of which width of the screen
    late_s: float = 0.0  # for how long the next answer has been due

    def rows(self) -> list[FleetRow]:
        """Rows that match, in order, with what is unfolded."""
        out: list[FleetRow] = []
        pattern, fleet = self.pattern.lower(), self.report.fleet
        jobs = self._sorted_jobs()
        if self.held:
            places = {id_: i for i, id_ in enumerate(self.held)}
            jobs.sort(key=lambda job: places.get(job.id, len(places)))  # new ones last, sorted among themselves
        if fleet.free is not None and fleet.free_nodes:
            jobs.append(Job(**fields_of(fleet.free), id=NO_JOB, nodes=len(fleet.free_nodes), each=fleet.free_nodes,
                            node_names=tuple(node.name for node in fleet.free_nodes)))
        for job in jobs:
            shown_label = cluster.label(self.report.of_job(job.id))
            texts = (job.id, job.number, job.name, job.user or "", *job.node_names, shown_label)
            if not any(pattern in text.lower() for text in texts):
                continue
            out.append(FleetRow(job))
            for node in job.each if job.id in self.open_jobs else ():
                out.append(FleetRow(job, node))
                out += [FleetRow(job, node, gpu) for gpu in node.each if (job.id, node.name) in self.open_nodes]
        return out

    def _sorted_jobs(self) -> list[Job]:
        return sorted(self.report.fleet.jobs, key=lambda job: ORDERS[self.order](job, self.report))

    def hold(self) -> None:
        """Keep the jobs in the order that they have now: somebody has begun to move among them."""
        if not self.held:
            self.held = tuple(job.id for job in self._sorted_jobs())

    @property
    def is_sorted(self) -> bool:
        """Return whether the jobs stand as sorting them now would put them."""
        order = {id_: i for i, id_ in enumerate(self.held)}
        places = [order.get(job.id, len(order)) for job in self._sorted_jobs()] if self.held else []
        return places == sorted(places)

    def sort(self) -> None:
        """Sort by the next column; if the order was held and is no longer right, by the same one first."""
        if self.is_sorted:
            names = [*ORDERS]
            self.order = names[(names.index(self.order) + 1) % len(names)]
        self.held = ()

    @property
    def span_s(self) -> float:
        """Seconds of the past that the lanes show."""
        if self.span_of[0] is not self.report:  # each row asks
            self.span_of = self.report, cluster.shown_span_s(self.report.fleet.jobs) or self.view.span_s
        return self.span_of[1]

    def place(self, rows: Sequence[FleetRow]) -> int:
        """Index of the cursor: on its row, else on the row above it, else at the top."""
        for key in (self.at, (*self.at[:2], ""), (self.at[0], "", "")):
            for i, row in enumerate(rows):
                if row.key == key:
                    return i
        return 0

    def unfold(self, row: FleetRow, wanted: bool | None = None) -> None:
        """Show or hide what is below a row; None: the other way round."""
        if row.gpu is not None:
            return
        opened: set[Any] = self.open_jobs if row.node is None else self.open_nodes
        key: Any = row.job.id if row.node is None else (row.job.id, row.node.name)
        if wanted is None:
            wanted = key not in opened
        (opened.add if wanted else opened.discard)(key)

    def asked(self, shown: Sequence[FleetRow]) -> FleetView:
        """View to be asked for, so that these rows have their figures."""
        view = self.view
        return FleetView(view.span_s, view.step_s, tuple(dict.fromkeys(row.job.id for row in shown)),
                         tuple(sorted(self.open_jobs)), tuple(sorted(self.open_nodes)))


# -- lines ------------------------------------------------------------------------------------------


def header(state: State, width: int) -> list[list[StyledText]]:
    """Summary of the fleet, and what is wrong with what is known of it."""
    fleet = state.report.fleet
    age_s = 0.0 if fleet.figures_s is None else fleet.time_s - fleet.figures_s + state.late_s
    late = f"data {age_s:.0f} s old · " if age_s > 0 else ""
    clock = time.strftime("%H:%M:%S", time.localtime(fleet.time_s))
    right = f"{clock} "
    left = fit(f" {late}{cluster.summary(fleet)}", max(0, width - len(right)))
    out: list[list[StyledText]] = [[(left, WARN if late else BOLD), (right, DIM)]]
    if fleet.problems:
        more = f" (+{len(fleet.problems) - 1}: p)" if len(fleet.problems) > 1 else ""
        out.append([(fit(f" ! {printable(fleet.problems[0].message)}", max(0, width - len(more))), WARN), (more, WARN)])
    return out


def heading(state: State, width: int) -> list[StyledText]:
    shown = _layout(state, width)
    texts = {name: of_name.title for name, (of_name, _) in shown.items()} | {"finding": _order_title(state)}
    if state.cursor is not None:
        then_s = state.report.fleet.time_s - state.cursor * state.span_s / max(1, shown["history"][1])
        texts["history"] = f"┃ {time.strftime('%H:%M', time.localtime(then_s))}: active then"
    return [(" " + of_name.fit(texts[name], size), BOLD if name == "history" and state.cursor is not None else DIM)
            for name, (of_name, size) in shown.items()]


def _order_title(state: State) -> str:
    """Title of the last column: the filter, or the order of the jobs where it is not that of the findings."""
    if state.pattern:
        return f"“{printable(state.pattern)}”"
    order = "" if state.order == "finding" else f", by {state.order}"
    return f"finding{order}{' ▾' if state.is_sorted else ' (o: sort)'}"


def _layout(state: State, width: int) -> Layout:
    """The columns for a screen of this width, the names of all nodes among what they have to hold."""
    report, of_width, _ = state.layout_of
    if report is not state.report or of_width != width:  # each row asks
        jobs = state.report.fleet.jobs
        columns = cluster.fleet_columns(jobs)
        rows: list[dict[str, Value]] = [_values(state, FleetRow(job))[0] for job in jobs]
        rows += [{"job": f"  ▸ {brief(node)}"} for job in jobs for node in job.node_names]
        table = cluster.fleet_table(columns, rows)
        names, sizes = [*columns], widths(table, table.rows, max(0, width - 1))
        state.layout_of = state.report, width, {names[i]: (table.columns[i], size) for i, size in sizes.items()}
    return state.layout_of[2]


def history_columns(state: State, width: int) -> int:
    return _layout(state, width)["history"][1]


def line(state: State, row: FleetRow, width: int, selected: bool) -> list[StyledText]:
    """A row, exactly ``width`` cells."""
    shown = _layout(state, width)
    history = shown["history"][1]
    values, past = _values(state, row)
    cursor_column = None if state.cursor is None else history - 1 - state.cursor
    means = lane_means(cluster.lane(past, state.span_s), history)
    if cursor_column is not None and 0 <= cursor_column < history:
        then = means[cursor_column]
        values = {"job": values["job"], "activity": "" if then is None else percent(then)}
    style = BOLD if selected else PLAIN
    runs: list[StyledText] = [("›" if selected else " ", ACCENT)]
    for name, (of_name, size) in shown.items():
        if of_name.lane:
            runs += _lane(means, cursor_column)
        elif of_name.wide:
            text, tone = _found_cell(state, row)
            runs.append((" " + of_name.fit(text, size), tone))
        else:
            runs.append((of_name.fit(of_name.text(values.get(name, "")), size) + " ",
                         style if name in ("job", "activity") else PLAIN if row.node is None else DIM))
    return runs


def _values(state: State, row: FleetRow) -> tuple[dict[str, Value], History | None]:
    now_s = state.report.fleet.time_s
    if row.gpu is not None:
        return {"job": f"    {row.gpu.gpu}", **cluster.gpu_cells(row.gpu)}, row.gpu.history
    if row.node is not None:
        mark = "▾" if (row.job.id, row.node.name) in state.open_nodes else "▸"
        node = row.node
        return {"job": f"  {mark} {brief(node.name)}", "size": f"{node.gpus}", **cluster.figures(node)}, node.history
    mark = "▾" if row.job.id in state.open_jobs else "▸"
    return {**cluster.cells(row.job, now_s), "job": f"{mark} {row.job.id}"}, row.job.history


def _lane(values: Sequence[float | None], cursor_column: int | None) -> list[StyledText]:
    """The history as the monitor draws it, cells of one style together."""
    drawn = []
    for i, value in enumerate(values):
        (cell,) = blank_column(1) if value is None else column(1, min(1.0, max(0.0, value)), (1.0,))
        drawn.append(with_cursor(cell) if i == cursor_column else cell)
    return merged(drawn)


def _found_cell(state: State, row: FleetRow) -> StyledText:
    findings = state.report.of_job(row.job.id)
    if row.node is not None:
        name = row.gpu.name if row.gpu is not None else row.node.name
        of_gpus = () if row.gpu is not None else f"{name}:"
        here = [f for f in findings if name in f.places or any(location.startswith(of_gpus) for location in f.places)]
        return (cluster.label(here), SEVERITY_STYLE[here[0].severity]) if here else ("", DIM)
    if not findings:
        return cluster.remark(row.job), DIM
    return cluster.label(findings), SEVERITY_STYLE[findings[0].severity]


def details(state: State, row: FleetRow | None, width: int, lines: int) -> list[list[StyledText]]:
    """Below the table: what was found of the selected job, and what to do."""
    if row is None:
        nothing = "No job matches the filter. Press / to change it." if state.pattern else "gputop cannot see any jobs."
        return [[(f" {nothing}", DIM)]]
    job = row.job
    other = f" ({job.number})" if job.number not in ("", job.id) else ""
    title = "GPUs without a job" if job.id == NO_JOB else f"Job {job.id}{other}"
    texts = (title, job.name, job.user or "", ", ".join(job.node_names[:6]))
    who = " · ".join(text for text in texts if text)
    out: list[list[StyledText]] = [[(" " + fit(printable(who), width - 2), BOLD)]]
    for finding in state.report.of_job(job.id):
        since = ""
        if finding.since_s is not None:
            since = f" since {'' if finding.since_exact else 'before '}" + time.strftime(
                "%H:%M", time.localtime(finding.since_s))
        hours = cluster.hours_lost(finding.gpu_hours_lost)
        lost = f" {hours}{since}." if hours else ""
        out += [[(" " + text, SEVERITY_STYLE[finding.severity])] for text in wrap(finding.title, width - 2, 2)]
        out += [[("   " + text, PLAIN)] for text in wrap(finding.why + lost, width - 4, 4)]
        out += [[("   " + text, ACCENT)] for text in wrap("→ " + finding.action, width - 4, 4)]
    if len(out) == 1:
        text = cluster.remark(job) or (
            "No job holds these GPUs, or gputop cannot see which job does." if job.id == NO_JOB else
            "No finding yet: the job's activity in the past hours is unknown." if job.history is None else
            "No finding for this job.")
        out.append([(f"   {text}", DIM)])
    return out[:lines]


def problems(report: FleetReport) -> list[StyledText]:
    """All of them, with their cures, for a box."""
    out: list[StyledText] = []
    for problem in report.fleet.problems:
        out += [(printable(problem.message) + "\n", BAD), (printable(problem.fix) + "\n" * 2, PLAIN)]
    out += [(sentence + "\n", DIM) for sentence in cluster.not_judged(report)]
    return out or [("Nothing is missing: all queries were answered.", PLAIN)]


def commands_for(node: str, login: str = "", remote: str = "gputop") -> dict[str, list[str]]:
    """Commands that open a node, by the key: the monitor there, or its profiler servers here; none for a name that is
    no host's. ``remote`` starts gputop there, as a shell reads it."""
    node = node.rpartition("/")[2]  # without the cluster
    if not _HOST.fullmatch(node):
        return {}
    jump = ["-J", login] if login else []
    return {"enter": ["ssh", *jump, "-t", node, remote],
            "a": ["gputop", "--attach", node.rpartition("@")[2], "--profiler-port", "6009"]}
