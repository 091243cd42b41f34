"""A snapshot: what is known about the node now, as a typed JSON document and as text for a ticket."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gputop.advice.registry import EXPLANATIONS
from gputop.core.codec import document_of, to_document
from gputop.core.errors import GputopError
from gputop.core.files import write_new_files
from gputop.core.findings import ids_by_missing
from gputop.core.framework import LABELS
from gputop.core.metrics import LANE_METRICS
from gputop.core.samples import OK, AdapterSample, HostSample, NodeSample, ProcessSample
from gputop.core.version import __version__
from gputop.render.finding_text import plain_lines, verdict_of
from gputop.render.gpu_columns import COARSE_MARK, COLUMNS, clock_limits, fault_texts, numa_gpus, unread_text
from gputop.render.time_slices import slice_for
from gputop.replay import snapshot_document as form
from gputop.text import redaction
from gputop.text.commands import short_command, short_description
from gputop.text.markup import lines
from gputop.text.units import bytes_, devices, fit, limits, printable, ranges, reading, seconds, wrap

if TYPE_CHECKING:
    from gputop.profiler.capture.records import CaptureRecord
    from gputop.session.session import Session
    from gputop.telemetry.history import History
    from gputop.telemetry.step_period import StepPeriodEstimate

HISTORY_S = 300.0
HISTORY_SLICES = 60
SPECTROGRAM_SLICES = 150  # what a page or a wide terminal can show
_FEWEST_SLICES = 30  # of a picture, where there is less history than that
_COLUMNS = 80  # of the text's prose
_NUMBER = r"(?:-?\d[\d.]*(?:e[+-]?\d+)?|null)"
_NUMBERS = re.compile(rf"\[\n\s*{_NUMBER}(?:,\n\s*{_NUMBER})*\n\s*\]")  # no JSON string holds a line break


def document(session: Session) -> dict[str, Any]:
    """The snapshot as JSON-ready values: base units, unknown is null with its reason; no secrets in commands.

    Raises GputopError before the first sample.
    """
    sample, record = _sample(session), session.results.last_capture
    typed = document_of(
        form.Document, sample, gputop=__version__, interval_s=session.feed.interval_s, host=form.Host.of(sample.host),
        gpus=tuple(map(form.Gpu.of, sample.gpus)), processes=tuple(map(form.Process.of, sample.processes)),
        history=_history(session.feed.history, sample),
        spectrogram=_spectrogram(session.feed.history, sample, session.feed.interval_s),
        step_period=_step_period(session.feed.step_period, session.feed.history),
        servers=tuple(document_of(form.Server, s, description=redaction.command(s.description))
                      for s in session.watch.servers),
        capture=None if record is None else form.Capture.of(record),
        findings=session.results.findings, limit=session.results.live.limit, abstained=session.results.live.abstained)
    written: dict[str, Any] = to_document(typed, finite=True)  # a damaged recording may hold NaN
    return written


def _sample(session: Session) -> NodeSample:
    if session.feed.sample is None:
        raise GputopError("nothing has been sampled yet", "Wait a second and try again.")
    return redaction.sample(session.feed.sample)


def _history(history: History | None, sample: NodeSample) -> form.History | None:
    """The last minutes of every lane in slices; a slice without a sample is null."""
    if history is None or history.newest_s is None:
        return None
    slice_s = HISTORY_S / HISTORY_SLICES
    end_s = (history.newest_s // slice_s + 1) * slice_s
    gpus: dict[str, dict[str, Any]] = {}
    for gpu in sample.gpus:
        lanes: dict[str, form.Lane] = {}
        for metric in LANE_METRICS:
            lane = history.lane(gpu.info.uuid, metric, end_s=end_s, slice_s=slice_s, slices=HISTORY_SLICES)
            if any(lane.count):
                slices: list[list[float]] = [[] for _ in range(HISTORY_SLICES)]
                for time_s, value in zip(*history.window(gpu.info.uuid, metric, HISTORY_S, end_s=end_s), strict=True):
                    if not math.isnan(value):
                        slices[int((time_s - end_s) // slice_s)].append(value)
                lanes[metric] = form.Lane(full_scale=lane.full_scale and float(f"{lane.full_scale:.6g}"),
                                          mean=_numbers(lane.mean),
                                          min=_numbers([min(values, default=math.nan) for values in slices]),
                                          max=_numbers([max(values, default=math.nan) for values in slices]))
        gpus[gpu.info.uuid] = lanes
    return form.History(end_s - HISTORY_S, slice_s, HISTORY_SLICES, gpus)


def _spectrogram(history: History | None, sample: NodeSample, interval_s: float) -> form.Spectrogram | None:
    """Every GPU's activity in slices as short as there is history for: means, and shares of the samples by level."""
    if history is None or history.newest_s is None or history.oldest_s is None:
        return None
    span_s = min(HISTORY_S, history.newest_s - history.oldest_s)
    slice_s = max(slice_for(span_s, SPECTROGRAM_SLICES), slice_for(2 * interval_s, 1))  # two samples at least
    slices = max(_FEWEST_SLICES, math.ceil(span_s / slice_s))
    end_s = (history.newest_s // slice_s + 1) * slice_s
    gpus: dict[str, form.LevelLane] = {}
    for gpu in sample.gpus:
        metric, now = gpu.activity()
        if now.value is None:  # for example a lost GPU: the readings from before
            metric = next((m for m in ("sm_active", "gpu_util")
                           if not all(v != v for v in history.window(gpu.info.uuid, m, span_s)[1])), metric)
        lane = history.lane(gpu.info.uuid, metric, end_s=end_s, slice_s=slice_s, slices=slices)
        gpus[gpu.info.uuid] = form.LevelLane(
            metric=metric, full_scale=lane.full_scale, mean=_numbers(lane.mean),
            levels=tuple(tuple(float(f"{v:.3g}") for v in row) if count else None
                         for row, count in zip(lane.levels, lane.count, strict=True)))
    return form.Spectrogram(end_s - slices * slice_s, slice_s, slices, gpus)


def _step_period(step_period: StepPeriodEstimate | None, history: History | None) -> form.StepPeriod | None:
    """The estimated period of the training step, or why there is none; null before the first estimate."""
    if step_period is None or history is None:
        return None
    return document_of(
        form.StepPeriod, step_period, estimate=True, method="autocorrelation", metric=step_period.metric or None,
        confidence=None if step_period.period_s is None else step_period.confidence,
        gpus=tuple(history.uuids[gpu] for gpu in step_period.gpus))


def _numbers(values: Sequence[float]) -> tuple[float | None, ...]:
    return tuple(None if math.isnan(v) else float(f"{v:.6g}") for v in values)


def to_json(doc: Mapping[str, Any]) -> str:
    """Indented JSON with each list of numbers on one line."""
    text = json.dumps(doc, indent=1, allow_nan=False)
    return _NUMBERS.sub(lambda match: " ".join(match[0].split()), text) + "\n"


def to_text(session: Session) -> str:
    """The snapshot as plain text to paste into a ticket: prose and the analysis within 80 columns; names of
    GPUs, commands and paths are not wrapped."""
    sample, record = _sample(session), session.results.last_capture
    out = ["*** SIMULATED: no hardware was measured ***"] if sample.simulated else []
    stamp = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(sample.time_s))
    out += [f"gputop {__version__}  {printable(sample.host.hostname)}  {stamp}  {printable(sample.source)}", "",
            *_finding_lines(session), "", *_gpu_lines(sample),
            *(f"GPU {g.info.label}: {', '.join(faults)}" for g in sample.gpus if (faults := fault_texts(g))), "",
            *_host_lines(session, sample)]
    for p in sample.processes:
        out += _process_lines(p)
    for other in sample.busy_without_gpu:
        out.append(f"  pid {other.pid}  {printable(other.user or '?')}  no GPU, CPU {other.cpu_cores.value:.1f} cores  "
                   f"{printable(short_command(other.command) if other.command is not None else 'N/A')}")
    for server in session.watch.servers:
        what = server.problem or short_description(server.description)
        out.append(f"  profiler server {printable(server.address)}  {printable(what)}")
    if record is not None:
        out += ["", *_capture_lines(record)]
    for what, ids in ids_by_missing(session.results.live.abstained).items():
        out += wrap(f"Not checked: {', '.join(ids)} (needs {what}).", _COLUMNS, rest="  ")
    return "\n".join(out) + "\n"


def _finding_lines(session: Session) -> list[str]:
    """Return what to do; where nothing was found, what bounds the job, or that nothing was judged."""
    record = session.results.last_capture
    unread = unread_text(session.feed.sample)
    out = ["What to do", *wrap(unread, _COLUMNS)]
    if not unread and all(f.id in EXPLANATIONS for f in session.results.findings):
        limit = record.limit if record is not None else session.results.live.limit
        out += [part for line in limit.splitlines() for part in wrap(line, _COLUMNS, rest="  ")]
    for f in session.results.findings:
        out += ["", *plain_lines(verdict_of(f), _COLUMNS, f"[{f.severity}] ")]
    return out


def _host_lines(session: Session, sample: NodeSample) -> Iterator[str]:
    h = sample.host
    yield (f"Host  CPU {reading(h['cpu_ratio'])}{_cores(h)}  RAM {reading(h['memory_used_bytes'])}/"
           f"{reading(h['memory_total_bytes'])}  disk read {reading(h['disk_read_bytes_per_s'])}"
           f"  net in {reading(h['net_rx_bytes_per_s'])}")
    if session.feed.step_period is not None and session.feed.step_period.period_s is not None:
        yield (f"Step period, estimated from the load: {seconds(session.feed.step_period.period_s)}, confidence "
               f"{session.feed.step_period.confidence:.1f}")
    yield from map(_adapter_line, h.adapters)
    if nodes := numa_gpus(sample):
        yield "  " + "  ".join(f"NUMA node {n}: GPU {ranges(gpus)}" for n, gpus in nodes.items())


def _capture_lines(record: CaptureRecord) -> Iterator[str]:
    yield f"Captured from {printable(record.address)}, {seconds(record.took_s)}: {printable(str(record.path))}"
    for n in (*record.remarks, *record.notes):
        yield from wrap(n, _COLUMNS, "  ")
    if record.analysis is not None:
        from gputop.diagnosis.report import text_report

        yield ""
        yield text_report(record.analysis, _COLUMNS, findings=False).rstrip("\n")
    elif record.report:
        yield ""
        yield lines(record.report)


def _gpu_lines(sample: NodeSample) -> Iterator[str]:
    columns = [column for column in COLUMNS if column.text]

    def line(cells: Iterable[str]) -> str:
        return "".join(fit(cell, column.text, right=column.draw != "label")
                       for column, cell in zip(columns, cells, strict=True))

    yield line(column.heading_in("text") for column in columns) + "  name"
    for g in sample.gpus:
        if g.state != OK:
            yield f"{g.info.label:<4}{printable(g.trouble)}"
            continue
        held = "".join(f" [{printable(reason)}]" for reason in clock_limits(g))
        cells = (g.info.label if column.draw == "label" else column.figure_of(g, "text")[0] for column in columns)
        yield line(cells) + "  " + printable(g.info.name) + held
    if any(g.activity()[0] == "gpu_util" for g in sample.gpus if g.state == OK):
        yield (f"{COARSE_MARK} coarse utilization: share of time in which any kernel ran; SM activity is unavailable")


def _cores(h: HostSample) -> str:
    if h.cpu_count is None:
        return ""
    full = f", {h.full_cores} full" if h.full_cores else ""
    granted = "" if h.cpu_limit_cores is None else f" (granted here: {h.cpu_limit_cores:g})"
    return f" of {h.cpu_count} cores{full}{granted}"


def _adapter_line(a: AdapterSample) -> str:
    where = "" if a.numa_node is None else f", NUMA node {a.numa_node}"
    return (f"  RDMA {printable(a.name)}  {printable(a.state or '?')}{where}  in {reading(a['rdma_rx_bytes_per_s'])}"
            f"  out {reading(a['rdma_tx_bytes_per_s'])}  of {reading(a['rdma_max_bytes_per_s'])}"
            f"  retransmits {reading(a['rdma_retransmits'])}")


def _process_lines(p: ProcessSample) -> list[str]:
    used = [x.memory_bytes.value for x in p.gpus.values() if x.memory_bytes.value is not None]
    memory = bytes_(sum(used)) if used else "N/A"
    local = "" if p.local_pid is None else f" ({p.local_pid} here)"
    out = [f"  pid {p.pid}{local}  {printable(p.user or '?')}  GPU {devices(p)}  {memory}"
           f"  {printable(short_command(p.command) if p.command is not None else 'N/A: ' + (p.reason or 'unknown'))}"]
    facts = [] if p.cpu_cores.value is None else [f"CPU {p.cpu_cores.value:.1f} cores"]
    read, written = p.io_read_bytes_per_s, p.io_write_bytes_per_s
    if read.value is not None or written.value is not None:
        facts.append(f"storage read {reading(read)}, written {reading(written)}")
    if p.container is not None:
        facts.append(printable(p.container) + ("" if p.container_pid is None else f" (pid {p.container_pid} inside)"))
    if p.kubernetes is not None:
        facts.append(printable(p.kubernetes.label))
    if p.framework:
        facts.append(LABELS.get(p.framework, printable(p.framework)))
    if p.numa_nodes:
        facts.append(f"bound to NUMA node {', '.join(map(str, p.numa_nodes))}")
    if p.cuda_visible_devices is not None:
        facts.append(f"CUDA_VISIBLE_DEVICES={printable(p.cuda_visible_devices)}")
    if p.cgroup is not None and (limited := limits(p.cgroup)):
        facts.append(f"control group: {limited}")
    if facts:
        out.append("      " + "  ".join(facts))
    if p.note is not None:
        out.append(f"      {printable(p.note)}")
    return out


FORMATS = ("json", "text", "html")


def render(session: Session, kind: str) -> str:
    """The snapshot in one of :data:`FORMATS`; raises GputopError before the first sample."""
    if kind == "text":
        return to_text(session)
    if kind == "html":
        from gputop.export.html import to_html

        return to_html(document(session))
    return to_json(document(session))


def format_of(path: Path) -> str:
    """The format by the suffix of a file's name; text for other names."""
    return {".json": "json", ".html": "html", ".htm": "html"}.get(path.suffix.lower(), "text")


def write_snapshot(session: Session, folder: Path) -> list[Path]:
    """Write the snapshot as json, text and html; returns the paths.

    Raises GputopError where the folder cannot be written, or where another user could exchange what root writes there.
    """
    from gputop.export.html import to_html

    doc = document(session)
    host = re.sub(r"[^A-Za-z0-9.-]+", "_", doc["host"]["hostname"]) or "host"
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(doc["time_s"]))
    mark = "-SIMULATED" if doc["simulated"] else ""
    stem = f"gputop-{host}{mark}-{stamp}"
    contents = {".json": to_json(doc), ".txt": to_text(session), ".html": to_html(doc)}
    return write_new_files(folder, stem, {suffix: content.encode() for suffix, content in contents.items()})
