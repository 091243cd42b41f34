"""A fleet as text, JSON and one HTML page; and the cells of its rows, which the screen shows, too."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from gputop.cluster.model import brief
from gputop.core.findings import ids_by_missing
from gputop.core.version import __version__
from gputop.export.page import header, page
from gputop.render.evidence_words import evidence_label
from gputop.render.palette import BLANK, SEVERITY_MARK
from gputop.text.markup import esc, moment
from gputop.text.units import NA, figure, fit, percent, printable
from gputop.text.wrapping import wrap

if TYPE_CHECKING:
    from gputop.advice.fleet.advise import FleetFinding
    from gputop.advice.fleet.report import Report
    from gputop.cluster.model import Fleet, Gpu, Group, History, Job

_BARS = "▁▂▃▄▅▆▇█"
_HISTORY_MIN, _HISTORY_GOOD = 10, 16  # cells; those that a longer name does not take
_PAGE = 400  # cells of a line in which every column has room
_JOB_MAX = 36  # cells of a name
_FINDING_MIN = 24
_SPANS_S = (600.0, 1_800.0, 3_600.0, 7_200.0, 14_400.0, 28_800.0, 57_600.0)  # that a history is drawn for
_LEAST_HOURS = 0.05  # below it one decimal place shows 0.0


class Column(Struct, frozen=True):
    heading: str
    width: int
    right: bool = True


# In the order of their places; what does not fit goes from the end of _DROPPED first.
COLUMNS: Mapping[str, Column] = {
    "job": Column("job", 12, False), "user": Column("user", 10, False), "size": Column("nodes×GPUs", 10),
    "age": Column("age", 6), "activity": Column("active", 7), "tensor": Column("tensor", 6), "memory": Column("mem", 5),
    "power": Column("power", 7),
}
_DROPPED = ("tensor", "age", "power", "user", "memory")


class Layout(NamedTuple):
    """The columns of a line with their widths, the cells of the history, and those of what was found."""

    names: tuple[str, ...]
    widths: Mapping[str, int]
    history: int
    found: int


def layout(width: int, jobs: Sequence[Job], indent: int = 0) -> Layout:
    """Lay out the columns for a line of this width. Without Slurm no user and no age is known: then they have no
    column.

    ``indent``: before the names of nodes, in the column of jobs. It grows for long names while the history has room.
    """
    unknown = {"user": all(job.user is None for job in jobs), "age": all(job.start_s is None for job in jobs)}
    names = [name for name in COLUMNS if not (jobs and unknown.get(name))]
    for dropped in (*_DROPPED, ""):
        used = sum(COLUMNS[name].width + 1 for name in names)
        if width - used >= _HISTORY_MIN + 1 + _FINDING_MIN or not dropped:
            break
        if dropped in names:
            names.remove(dropped)
    room = max(0, width - used - 1)
    finding_width = min(room, max(_FINDING_MIN, room // 3))
    longest = max((len(name) for job in jobs for name in (f"{job.id}{' ' * (indent // 2)}", *(
        f"{' ' * indent}{brief(node)}" for node in job.node_names))), default=0)
    wider = max(0, min(longest, _JOB_MAX) - COLUMNS["job"].width)
    wider = min(wider, max(0, room - finding_width - _HISTORY_GOOD))
    widths = {name: COLUMNS[name].width + wider * (name == "job") for name in names}
    return Layout(tuple(names), widths, max(0, room - finding_width - wider), finding_width)


def cells(job: Job, now_s: float) -> dict[str, str]:
    """The texts of a job's row by column."""
    nodes = "?" if job.nodes is None else str(job.nodes)
    whole = job.gpus % job.nodes == 0 if job.nodes else False
    size = f"{nodes}×{job.gpus // job.nodes}" if whole and job.nodes else f"{nodes}, {job.gpus}"
    return {"job": job.id, "user": NA if job.user is None else job.user, "size": size,
            "age": age(None if job.start_s is None else now_s - job.start_s), **figures(job),
            **({} if job.mapped != "shared node" else {"activity": f"~{activity(job)}"})}


def figures(group: Group) -> dict[str, str]:
    used, total = group.memory_used_bytes, group.memory_total_bytes
    return {"activity": activity(group), "tensor": NA if group.tensor_active is None else percent(group.tensor_active),
            "memory": NA if used is None or not total else percent(used / total),
            "power": NA if group.power_w is None else power(group.power_w)}


def gpu_cells(gpu: Gpu) -> dict[str, str]:
    figures = gpu.figures
    used, free = figures.get("memory_used_bytes"), figures.get("memory_free_bytes")
    total = figures.get("memory_total_bytes", used + free if used is not None and free is not None else None)
    coarse = "*" if gpu.kind in ("gr_active", "util") else ""
    return {"activity": NA if gpu.activity is None else percent(gpu.activity) + coarse,
            "tensor": percent(figures["tensor_active"]) if "tensor_active" in figures else NA,
            "memory": NA if used is None or not total else percent(used / total),
            "power": power(figures["power_w"]) if "power_w" in figures else NA,
            "age": f"{figures['temperature_c']:.0f}°C" if "temperature_c" in figures else "",
            "size": f"{figures['sm_clock_hz'] / 1e6:.0f}MHz" if "sm_clock_hz" in figures else ""}


def hours_lost(hours: float | None) -> str:
    """ "3.2 GPU hours lost"; "" where it is not known, or next to nothing as yet."""
    return f"{hours:,.1f} GPU hours lost" if hours is not None and hours >= _LEAST_HOURS else ""


def activity(group: Group) -> str:
    """Return the activity with a mark where it is coarse: the share of time with any kernel says nothing of how much of
    the GPU it used."""
    if group.activity is None:
        return NA
    return percent(group.activity) + ("*" if group.kind in ("gr_active", "util", "mixed") else "")


def age(seconds: float | None) -> str:
    """2 min, 5.1 h, 3.2 d."""
    if seconds is None or seconds < 0:
        return NA
    if seconds < 5970:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} d"


def power(watts: float) -> str:
    return f"{watts:.0f} W" if watts < 9950 else f"{watts / 1e3:.0f} kW"


def shown_span_s(jobs: Sequence[Job]) -> float | None:
    """Return how much of the past is drawn: from the oldest value of any job on, rounded up, at most the whole
    histories. A Prometheus that is young has nothing before. None without a history."""
    histories = [job.history for job in jobs if job.history is not None and job.history.values]
    if not histories:
        return None
    whole_s = max(len(history.values) * history.step_s for history in histories)
    known_s = max(history.step_s * next((len(history.values) - i for i, value in enumerate(history.values)
                                         if value is not None), 0) for history in histories)
    return min([whole_s, *(span_s for span_s in _SPANS_S if span_s >= known_s > 0)])


def recent(history: History | None, span_s: float | None) -> History | None:
    """The last ``span_s`` of a history."""
    if history is None or not history.values or span_s is None:
        return history
    count = max(1, round(span_s / history.step_s))
    values = history.values[-count:]
    return replace(history, begin_s=history.end_s - (count - 1) * history.step_s,
                   values=(None,) * (count - len(values)) + values)


def span_text(span_s: float | None) -> str:
    """ "last 3 h", "last 10 min"."""
    if span_s is None:
        return ""
    return f"last {span_s / 3600:.3g} h" if span_s >= 3600 else f"last {span_s / 60:.0f} min"


def resampled(history: History | None, columns: int) -> list[float | None]:
    """A mean for each of so many equal parts of the history, None where nothing was measured."""
    if history is None or not history.values or columns <= 0:
        return [None] * max(0, columns)
    n = len(history.values)
    out: list[float | None] = []
    for i in range(columns):
        part = [v for v in history.values[i * n // columns:max(i * n // columns + 1, (i + 1) * n // columns)]
                if v is not None]
        out.append(sum(part) / len(part) if part else None)
    return out


def bars(history: History | None, columns: int) -> str:
    """The history as a line of text; a dot where nothing was measured."""
    return "".join(BLANK if v is None else _BARS[min(7, max(0, round(8 * v) - 1))]
                   for v in resampled(history, columns))


def label(findings: Sequence[FleetFinding]) -> str:
    """Return what was found of a job, for a cell: the first, and how many more."""
    if not findings:
        return ""
    more = f" +{len(findings) - 1}" if len(findings) > 1 else ""
    return f"{SEVERITY_MARK[findings[0].severity]} {findings[0].label}{more}"


def remark(job: Job) -> str:
    """Return what a reader must know of how the job's figures were had; "" where they are its own."""
    return {"shared node": "values of whole nodes, which it shares",
            "process": "by user and program: perhaps several jobs"}.get(job.mapped, "")


# -- JSON -------------------------------------------------------------------------------------------


def to_document(report: Report) -> dict[str, Any]:
    """docs/reference/cluster.md tells its keys."""
    from gputop.advice.fleet.report import ClusterDocument
    from gputop.core.codec import document_of
    from gputop.core.codec import to_document as plain

    document = document_of(ClusterDocument, report.fleet, version=__version__, findings=report.findings,
                           abstained=report.abstained)
    return {"schema": "", "version": "", **plain(document, finite=True)}  # these come first


# -- text -------------------------------------------------------------------------------------------


def summary(fleet: Fleet) -> str:
    from gputop.cluster.schemas import ACTIVITY_TITLES

    parts = [f"{count} {what}{'' if count == 1 else 's'}" for count, what in ((len(fleet.jobs), "job"),
                                                                              (fleet.gpus, "GPU"))]
    if fleet.free is not None:
        parts.append(f"{fleet.free.gpus} of them held by no job ({activity(fleet.free)} active)")
    kinds = ", ".join(ACTIVITY_TITLES.get(kind, kind) for kind in fleet.kinds)
    return " · ".join([*(["SIMULATED"] if fleet.simulated else []), *parts, *([f"active: {kinds}"] if kinds else [])])


def to_text(report: Report, width: int) -> str:
    fleet = report.fleet
    lines = [*wrap(f"{fleet.source} · {moment(fleet.time_s)}", width), *wrap(summary(fleet), width), ""]
    for problem in fleet.problems:
        lines += wrap(problem.message, width, "! ")
        lines += wrap(problem.fix, width, "  ") if problem.fix else []
    if fleet.problems:
        lines.append("")
    names, widths, history, finding_width = layout(width, fleet.jobs)
    span_s = shown_span_s(fleet.jobs)
    if fleet.jobs:
        heads = " ".join(fit(COLUMNS[n].heading, widths[n], right=COLUMNS[n].right) for n in names)
        lines.append(f"{heads} {fit(span_text(span_s), history)} finding".rstrip())
    for job in fleet.jobs:
        row_cells = cells(job, fleet.time_s)
        row = " ".join(fit(printable(row_cells[n]), widths[n], right=COLUMNS[n].right) for n in names)
        reason = label(report.of_job(job.id)) or remark(job)
        lines.append(f"{row} {bars(recent(job.history, span_s), history)} {fit(reason, finding_width)}".rstrip())
    for finding in report.findings:
        lines += ["", *wrap(f"{SEVERITY_MARK[finding.severity]} {finding.title}", width)]
        lines += wrap(finding.why, width, "  ")
        if hours := hours_lost(finding.gpu_hours_lost):
            since = "" if finding.since_s is None else (
                f" since {'' if finding.since_exact else 'before '}{moment(finding.since_s)}")
            lines += wrap(f"{hours}{since}.", width, "  ")
        lines += wrap(finding.action, width, "  → ", "    ")
    if not report.findings and fleet.jobs:
        judged = not report.abstained and not fleet.problems
        lines += ["", f"No findings{': gputop sees no job that wastes its GPUs' if judged else ' so far'}."]
    for sentence in not_judged(report):
        lines += wrap(sentence, width, "· ")
    lines += ["", f"{fleet.queries} queries, {fleet.bytes:,} bytes, {fleet.seconds:.2f} s"]
    return "\n".join(lines) + "\n"


def not_judged(report: Report) -> list[str]:
    """Return what could not be judged, a sentence for each cause."""
    return [f"{', '.join(ids)} cannot be judged without {missing}"
            for missing, ids in ids_by_missing(report.abstained).items()]


# -- HTML -------------------------------------------------------------------------------------------

_STYLE = """\
table.fleet { border-collapse: collapse; width: 100%; } .fleet td, .fleet th { padding: 2px 8px; text-align: right; }
.fleet td:first-child, .fleet th:first-child, .fleet td:last-child, .fleet th:last-child { text-align: left; }
.fleet svg { width: 100%; min-width: 160px; height: 18px; display: block; }
"""


def to_html(report: Report) -> str:
    """One page that loads nothing and runs nothing."""
    fleet = report.fleet
    head = header("gputop cluster", summary(fleet), [esc(fleet.source)], moment(fleet.time_s))
    problems = "".join(f'<p class="bad">{esc(p.message)}</p><p>{esc(p.fix)}</p>' for p in fleet.problems)
    parts = [head, problems, _html_jobs(report), _html_findings(report)]
    return page(f"gputop cluster, {moment(fleet.time_s)}", parts,
                [f"<footer>Written by gputop {esc(__version__)}.</footer>"], script="", style=_STYLE)


def _html_jobs(report: Report) -> str:
    jobs = report.fleet.jobs
    names, span_s = layout(_PAGE, jobs).names, shown_span_s(jobs)
    heads = "".join(f"<th>{esc(COLUMNS[name].heading)}</th>" for name in names)
    rows = "".join(_html_row(job, report, names, span_s) for job in jobs)
    return (f"<section><h2>Jobs<small>{esc(span_text(span_s))}</small></h2>"
            f'<table class="fleet"><tr>{heads}<th>history</th><th>finding</th></tr>{rows}</table></section>')


def _html_findings(report: Report) -> str:
    findings = "".join(map(_html_finding, report.findings))
    missing = "".join(f"<p>{esc(sentence)}.</p>" for sentence in not_judged(report))
    return f"<section><h2>Findings</h2>{findings or '<p>None.</p>'}{missing}</section>"


def _html_row(job: Job, report: Report, names: Sequence[str], span_s: float | None) -> str:
    row_cells = cells(job, report.fleet.time_s)
    reason = label(report.of_job(job.id)) or remark(job)
    tds = "".join(f"<td>{esc(row_cells[name])}</td>" for name in names)
    return f"<tr>{tds}<td>{_picture(recent(job.history, span_s))}</td><td>{esc(reason)}</td></tr>"


def _picture(history: History | None) -> str:
    from gputop.export.pictures import color
    from gputop.render.palette import step_of

    if history is None:
        return ""
    boxes = "".join(f'<path fill="{color(step_of(v))}" d="M{i} {1 - max(v, 0.04):.3f}h1V1h-1z"/>'
                    for i, v in enumerate(history.values) if v is not None)
    return (f'<svg viewBox="0 0 {len(history.values)} 1" preserveAspectRatio="none" shape-rendering="crispEdges" '
            f'role="img" aria-label="activity of the past">{boxes}</svg>')


def _html_finding(finding: FleetFinding) -> str:
    rows = "".join(f"<li>{esc(evidence_label(name))}<b>{esc(figure(name, value))}</b></li>"
                   for name, value in finding.evidence.items())
    return (f"<h3>{SEVERITY_MARK[finding.severity]} {esc(finding.title)}</h3><p>{esc(finding.why)}</p>"
            f'<p>{esc(finding.action)}</p><ul class="legend">{rows}</ul>')


def render(report: Report, form: str, width: int = 100) -> str:
    """Render as "text", "json" or "html"."""
    if form == "json":
        return json.dumps(to_document(report), indent=1, allow_nan=False) + "\n"
    return to_html(report) if form == "html" else to_text(report, width)
