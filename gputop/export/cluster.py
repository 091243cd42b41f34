"""A fleet as text, JSON and one HTML page; and the cells of its rows, which the screen shows, too."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gputop.core.codec import document_of
from gputop.core.codec import to_document as plain
from gputop.core.findings import ids_by_missing
from gputop.core.version import __version__
from gputop.export.page import color, header, page
from gputop.render.evidence_words import evidence_label
from gputop.render.palette import SEVERITY_MARK, step_of
from gputop.render.table import Column, Lane, Table, Value, html_grid, table_lines
from gputop.text.markup import esc, moment
from gputop.text.units import NA, figure, percent, wrap

if TYPE_CHECKING:
    from gputop.advice.fleet.advise import FleetFinding, FleetReport
    from gputop.cluster.model import Fleet, Gpu, Group, History, Job

_SPANS_S = (600.0, 1_800.0, 3_600.0, 7_200.0, 14_400.0, 28_800.0, 57_600.0)  # that a history is drawn for
_LEAST_HOURS = 0.05  # below it one decimal place shows 0.0
_UNKNOWN, _NO_FIGURE = "neither a label nor Slurm provides this value", "no exporter provides it for the job's GPUs"


def fleet_columns(jobs: Sequence[Job]) -> dict[str, Column]:
    """The columns of a fleet. Without Slurm no user and no age is known: then they have none."""
    unknown = {"user": all(job.user is None for job in jobs), "age": all(job.start_s is None for job in jobs)}
    columns = {
        "job": Column("job", least=12, most=36), "user": Column("user", least=10, most=10, spare=2, missing=_UNKNOWN),
        "size": Column("nodes×GPUs", str, least=10), "age": Column("age", age, least=6, spare=4, missing=_UNKNOWN),
        "activity": Column("active", str, least=7),
        "tensor": Column("tensor", _share, least=6, spare=5, missing=_NO_FIGURE),
        "memory": Column("mem", _share, least=5, spare=1, missing=_NO_FIGURE),
        "power": Column("power", power, least=7, spare=3, missing=_NO_FIGURE),
        "history": Column(span_text(shown_span_s(jobs)), lane=True), "finding": Column("finding", wide=True)}
    return {name: column for name, column in columns.items() if not (jobs and unknown.get(name))}


def fleet_table(columns: Mapping[str, Column], rows: Iterable[Mapping[str, Value]],
                lanes: Iterable[Lane] = ()) -> Table:
    """``rows`` have their values by the names of the columns."""
    values = tuple(tuple(row.get(name, "") for name in columns) for row in rows)
    return Table("Jobs", tuple(columns.values()), values, "", gap=1, lanes=tuple(lanes))


def _jobs_table(report: FleetReport) -> Table:
    jobs, now_s, span_s = report.fleet.jobs, report.fleet.time_s, shown_span_s(report.fleet.jobs)
    rows = ({**cells(job, now_s), "finding": label(report.of_job(job.id)) or remark(job)} for job in jobs)
    return fleet_table(fleet_columns(jobs), rows, (lane(job.history, span_s) for job in jobs))


def cells(job: Job, now_s: float) -> dict[str, Value]:
    """The values of a job's row by column."""
    nodes = "?" if job.nodes is None else str(job.nodes)
    whole = job.gpus % job.nodes == 0 if job.nodes else False
    size = f"{nodes}×{job.gpus // job.nodes}" if whole and job.nodes else f"{nodes}, {job.gpus}"
    return {"job": job.id, "user": job.user, "size": size,
            "age": None if job.start_s is None or job.start_s > now_s else now_s - job.start_s, **figures(job),
            **({} if job.mapped != "shared node" else {"activity": f"~{activity(job)}"})}


def figures(group: Group) -> dict[str, Value]:
    used, total = group.memory_used_bytes, group.memory_total_bytes
    return {"activity": activity(group), "tensor": group.tensor_active,
            "memory": None if used is None or not total else used / total, "power": group.power_w}


def gpu_cells(gpu: Gpu) -> dict[str, Value]:
    figures = gpu.figures
    used, free = figures.get("memory_used_bytes"), figures.get("memory_free_bytes")
    total = figures.get("memory_total_bytes", used + free if used is not None and free is not None else None)
    coarse = "*" if gpu.kind in ("gr_active", "util") else ""
    return {"activity": NA if gpu.activity is None else percent(gpu.activity) + coarse,
            "tensor": figures.get("tensor_active"), "memory": None if used is None or not total else used / total,
            "power": figures.get("power_w"),
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


def age(seconds: float) -> str:
    """2 min, 5.1 h, 3.2 d."""
    if seconds < 5970:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} d"


def _share(ratio: float) -> str:
    return percent(ratio)  # without the bar that a page draws of percentages


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


def lane(history: History | None, span_s: float | None) -> Lane:
    if history is None or not history.values or span_s is None:
        return () if history is None else history.values
    count = max(1, round(span_s / history.step_s))
    values = history.values[-count:]
    return (None,) * (count - len(values)) + values


def span_text(span_s: float | None) -> str:
    """ "last 3 h", "last 10 min"."""
    if span_s is None:
        return ""
    return f"last {span_s / 3600:.3g} h" if span_s >= 3600 else f"last {span_s / 60:.0f} min"


def label(findings: Sequence[FleetFinding]) -> str:
    """Return what was found of a job, for a cell: the first, and how many more."""
    if not findings:
        return ""
    more = f" +{len(findings) - 1}" if len(findings) > 1 else ""
    return f"{SEVERITY_MARK[findings[0].severity]} {findings[0].label}{more}"


def remark(job: Job) -> str:
    """Return what a reader must know of how the job's figures were had; "" where they are its own."""
    return {"shared node": "values of whole nodes, which the job shares",
            "process": "by user and program; this may include several jobs"}.get(job.mapped, "")


# -- JSON -------------------------------------------------------------------------------------------


def to_document(report: FleetReport) -> dict[str, Any]:
    """docs/reference/cluster.md tells its keys."""
    from gputop.advice.fleet.advise import ClusterDocument

    document = document_of(ClusterDocument, report.fleet, version=__version__, findings=report.findings,
                           abstained=report.abstained)
    return {"schema": "", "version": "", **plain(document, finite=True)}  # these come first


# -- text -------------------------------------------------------------------------------------------


def summary(fleet: Fleet) -> str:
    from gputop.sources.exporters import ACTIVITY_TITLES

    parts = [f"{count} {what}{'' if count == 1 else 's'}" for count, what in ((len(fleet.jobs), "job"),
                                                                              (fleet.gpus, "GPU"))]
    if fleet.free is not None:
        parts.append(f"{fleet.free.gpus} of them not held by any job ({activity(fleet.free)} active)")
    kinds = ", ".join(ACTIVITY_TITLES.get(kind, kind) for kind in fleet.kinds)
    return " · ".join([*(["SIMULATED"] if fleet.simulated else []), *parts, *([f"active: {kinds}"] if kinds else [])])


def to_text(report: FleetReport, width: int) -> str:
    fleet = report.fleet
    lines = [*wrap(f"{fleet.source} · {moment(fleet.time_s)}", width), *wrap(summary(fleet), width), ""]
    for problem in fleet.problems:
        lines += wrap(problem.message, width, "! ")
        lines += wrap(problem.fix, width, "  ") if problem.fix else []
    if fleet.problems:
        lines.append("")
    if fleet.jobs:
        lines += table_lines(_jobs_table(report), width)
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


def not_judged(report: FleetReport) -> list[str]:
    """Return what could not be judged, a sentence for each cause."""
    return [f"{', '.join(ids)} cannot be evaluated without {missing}"
            for missing, ids in ids_by_missing(report.abstained).items()]


# -- HTML -------------------------------------------------------------------------------------------

_STYLE = """\
.fleet td.past { width: 40%; } .fleet svg { width: 100%; min-width: 160px; height: 18px; display: block; }
"""


def to_html(report: FleetReport) -> str:
    """One page that loads nothing and runs nothing."""
    fleet = report.fleet
    head = header("gputop cluster", summary(fleet), [esc(fleet.source)], moment(fleet.time_s))
    problems = "".join(f'<p class="bad">{esc(p.message)}</p><p>{esc(p.fix)}</p>' for p in fleet.problems)
    table = _jobs_table(report)
    jobs = (f'<section class="fleet"><h2>Jobs<small>{esc(span_text(shown_span_s(fleet.jobs)))}</small></h2>'
            f"{html_grid(table, table.rows, _picture)}</section>")
    findings = "".join(map(_html_finding, report.findings)) or "<p>None.</p>"
    missing = "".join(f"<p>{esc(sentence)}.</p>" for sentence in not_judged(report))
    parts = [head, problems, jobs, f"<section><h2>Findings</h2>{findings}{missing}</section>"]
    return page(f"gputop cluster, {moment(fleet.time_s)}", parts,
                [f"<footer>Written by gputop {esc(__version__)}.</footer>"], script="", style=_STYLE)


def _picture(values: Lane) -> str:
    boxes = "".join(f'<path fill="{color(step_of(v))}" d="M{i} {1 - max(v, 0.04):.3f}h1V1h-1z"/>'
                    for i, v in enumerate(values) if v is not None)
    return (f'<svg viewBox="0 0 {len(values)} 1" preserveAspectRatio="none" shape-rendering="crispEdges" role="img" '
            f'aria-label="past activity">{boxes}</svg>')


def _html_finding(finding: FleetFinding) -> str:
    rows = "".join(f"<li>{esc(evidence_label(name))}<b>{esc(figure(name, value))}</b></li>"
                   for name, value in finding.evidence.items())
    return (f"<h3>{SEVERITY_MARK[finding.severity]} {esc(finding.title)}</h3><p>{esc(finding.why)}</p>"
            f'<p>{esc(finding.action)}</p><ul class="legend">{rows}</ul>')


def render(report: FleetReport, form: str, width: int = 100) -> str:
    """Render as "text", "json" or "html"."""
    if form == "json":
        return json.dumps(to_document(report), indent=1, allow_nan=False) + "\n"
    return to_html(report) if form == "html" else to_text(report, width)
