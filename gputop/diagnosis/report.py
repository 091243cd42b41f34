"""An analysis as text, for a terminal or a ticket."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from gputop.analysis.layers.tree import ITSELF, NO_OP_RUNS
from gputop.analysis.results import Analysis, GpuUse
from gputop.core.findings import HIGH_SHARE, Finding, ids_by_missing
from gputop.diagnosis import report_figures
from gputop.diagnosis.tables import tables
from gputop.diagnosis.wall_text import doubt, no_verdict, wall_sentence, worth_saying
from gputop.render.evidence_words import evidence
from gputop.render.finding_text import DO, VerdictLines, VerdictRow, gain_sentence, kernel_rows, plain_lines, verdict_of
from gputop.render.step_bar import plain_step_lines
from gputop.render.step_parts import HOST_KINDS, PART_BY_ID, WALL_PARTS, WORK_FIRST
from gputop.render.table import to_text
from gputop.text.units import counted, percent, printable, ranges, seconds, wrap
from gputop.trace.readers.formats import WRITERS

_WORTH_A_NAME = 0.1  # share of what is unexplained
_BAR = 24
# Notes on GPUs of which the profiler has no kernel, and what they say.
_LOST = "the GPU work was not recorded"
_NOT_RECORDED = {"lost_kernels": _LOST, "empty_device_plane": _LOST, "no_device_events": "no GPU work was recorded"}
_ENDED = "ended_early"  # the note on what ended the recording


def text_report(analysis: Analysis, width: int = 80, *, findings: bool = True, verbose: bool = False) -> str:
    """Everything an analysis says, in lines of at most ``width`` columns, 60 at least (snippets and paths excepted).
    The findings come first, then the figures. ``findings``: not without them, for where they stand already.
    ``verbose``: with each rule that could not be judged, and why. Plain text: control characters out of the trace
    (escape codes, newlines in names) are taken out."""
    made = {table.name: table for table in tables(analysis)}
    # Tables that say why they have no row, where the analysis has the result.
    explained = {"Path": analysis.critical_path, "Limit": analysis.limits, "Input": analysis.input,
                 "Kernels": analysis.kernels}
    width, lines = max(width, 60), list[str]()
    for section in (_head, _quality, _steps, *((_advice,) if findings else ()),
                    _not_judged if verbose else _how_many_not_judged, "Time", _breakdown, "Path", "Limit", "Layers",
                    report_figures.source_lines, "GPUs", "Ranks", report_figures.across_gpus, "Collectives",
                    "Kernels", report_figures.kernel_details, "By op", "Copies", "Input",
                    report_figures.gaps, report_figures.stacks, "Python", "Host ops", "Functions",
                    report_figures.launch_threads, "Memory"):
        if not isinstance(section, str):
            drawn = section(analysis, width)
        elif (table := made.get(section)) is not None and table.rows:
            drawn = to_text(table, width)
        else:
            drawn = wrap(f"{table.note} {table.empty}".strip(), width, f"{section:<9}") if (
                table is not None and explained.get(section) is not None) else ()
        part = "\n".join(line.rstrip() for line in drawn).rstrip("\n").splitlines()
        if part:
            lines += ["", *part] if lines else part
    return "\n".join(lines) + "\n"


def short_report(analysis: Analysis, width: int = 80) -> str:
    """The verdict in about 25 lines of at most ``width`` columns, 60 at least: the first finding in full or that there
    is none, the next ones by a line each, and where the step's time goes. What it leaves out is in
    :func:`text_report`."""
    a, width = analysis, max(width, 60)
    findings = list(a.findings)
    verdict = limit_lines(a) if _has_verdict(a) else verdict_of(findings.pop(0))
    lines = wrap(_SIMULATED, width) if a.simulated else []
    verdict = replace(verdict, rows=(*verdict.rows, VerdictRow("From", _provenance(a))))
    lines += plain_lines(verdict, width, loud=True, most=_WHY_LINES)
    notes = list(_quality(a, width))
    parts = a.breakdown.known if a.breakdown is not None else {}
    below = ["", *(plain_step_lines(parts, width, a.steps.median_s) if a.steps is not None else ()),
             *notes[:_NOTE_LINES], *["         …"] * (len(notes) > _NOTE_LINES)]
    if a.wall_time is not None and worth_saying(a.wall_time):
        below += wrap(wall_sentence(a.wall_time), width)
    below += wrap(unexplained_text(a), width)
    more = not_judged(a).removesuffix(".")
    below += wrap(f"{more + ' (details: --verbose). ' if more else ''}For all values and the code of each fix, use "
                  "--full.", width)
    below += _files(a)
    room = _SHORT_LINES - len(lines) - len(below) - len(findings) - 1
    lines += [""] if findings else []
    for number, finding in enumerate(findings, 1 if _has_verdict(a) else 2):
        folded = verdict_of(finding)
        do = replace(folded, rows=tuple(replace(row, code="") for row in folded.rows[:1]))
        head, unfolded = (list(plain_lines(one, width, f"{number}. ")) for one in (replace(folded, rows=()), do))
        room -= len(unfolded) - len(head)
        lines += unfolded if room >= 0 else head
    return "\n".join(line.rstrip() for line in (*lines, *below)) + "\n"


_MOST = 0.9  # share of the recorded time
_NOTE_LINES, _WHY_LINES, _SHORT_LINES = 3, 2, 24  # of the short report
_SIMULATED = "SIMULATED: gputop generated this trace; it was not recorded on real GPUs."


def _provenance(a: Analysis) -> str:
    """Basis of the verdict: "17 steps in 1.95 s, confidence low; no GPU work in the trace"."""
    recorded = seconds(a.wall_time.recorded_s if a.wall_time is not None else a.trace.window_s)
    ended = _ended(a)
    what = "a damaged file" if a.trace.is_damaged else f"{recorded} without steps"
    if a.steps is not None:
        unsure = "" if a.steps.confidence == "high" else (f" (from {a.steps.anchor}, confidence {a.steps.confidence})")
        if a.wall_time is not None and a.trace.window_s < _MOST * a.wall_time.recorded_s:  # the rest is an overview
            recorded = f"{seconds(a.trace.window_s)} of the {recorded} recorded"
        what = f"{counted(a.steps.count, a.steps.unit)} in {recorded}{unsure}"
        if a.wall_time is not None and (more_s := a.wall_time.recording_s(a.steps.median_s)):
            ended = (f"Recording in detail makes a step longer: {seconds(a.steps.median_s)}, and "
                     f"{seconds(a.steps.median_s - more_s)} while only rare events are recorded. {ended}").rstrip()
    gpus = "" if a.trace.is_damaged else f"; {counted(len(a.gpus), 'GPU') if a.gpus else 'no GPU work'} in the trace"
    return what + gpus + (f". {ended}" if ended else "")


def _ended(a: Analysis) -> str:
    """The note on what ended the recording, in a sentence; "" where nothing did."""
    return next((note.message for note in a.trace.quality if note.id == _ENDED), "")


def _files(a: Analysis) -> Iterator[str]:
    paths = [printable(p) for p in a.trace.paths]
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    yield f"Trace    {paths[0] if paths else '(in memory)'}{more}"


def _head(a: Analysis, width: int) -> Iterator[str]:
    if a.simulated:
        yield from wrap(_SIMULATED, width)
    yield from _files(a)
    trace = a.trace
    # Of a damaged file, which may hold events of more GPUs, their number is not told.
    gpus = "" if trace.is_damaged else f", {counted(len(a.gpus), 'GPU')}"
    yield from wrap(f"{WRITERS.get(trace.format, trace.format)}, {trace.events:,} events over "
                    f"{seconds(trace.window_s)}{gpus}" + (f", host {', '.join(trace.hosts)}" if trace.hosts else ""),
                    width, "         ")


def _quality(a: Analysis, width: int) -> Iterator[str]:
    for note in a.trace.quality:
        if note.id != _ENDED:  # the verdict says it
            yield from wrap(note.message, width, "Note     ")


def _steps(a: Analysis, width: int) -> Iterator[str]:
    s = a.steps
    if s is None:
        yield f"Step     {'not evaluated' if a.trace.is_damaged else 'not found'}"
        return
    yield from wrap(f"{seconds(s.mean_s)} mean, {seconds(s.median_s)} median, {seconds(s.p95_s)} 95th percentile",
                    width, f"{s.unit.capitalize():<9}")
    text = f"{counted(s.count, s.unit)} based on {s.anchor}, confidence {s.confidence}"
    if s.dropped:
        text += f"; {counted(s.dropped, 'incomplete or warm-up step')} left out"
    if s.iterations_per_step > 1:
        text += (f"; each with {s.iterations_per_step:.4g} iterations, {seconds(s.median_s / s.iterations_per_step)} "
                 "per iteration")
    yield from wrap(text, width, "         ")


def _breakdown(a: Analysis, width: int) -> Iterator[str]:
    if a.breakdown is None:
        return
    parts, total = a.breakdown.known, a.breakdown.total
    unit = a.steps.unit if a.steps is not None else "step"
    which = "only" if a.steps is not None and a.steps.count == 1 else "mean"
    yield f"Where the {which} {unit} of {seconds(total)} goes" + (", mean over the GPUs" if len(a.gpus) > 1 else "")
    for part in WORK_FIRST:
        share = parts.get(part.id, 0.0) / total if total else 0.0
        if share >= 0.0005:
            yield f"  {part.name:<21}{seconds(parts[part.id]):>10} {share:>6.1%}  {'█' * round(share * _BAR)}"


def _advice(a: Analysis, width: int) -> Iterator[str]:
    ended = _ended(a)
    if _has_verdict(a):
        yield from plain_lines(_limit_and_end(a), width, loud=True)
        if a.findings:
            yield ""
    elif ended:
        yield from wrap(ended, width, "From     ")
        yield ""
    for i, finding in enumerate(a.findings, 1):
        yield from _finding(i, finding, width)
        yield ""
    yield from wrap(unexplained_text(a), width)


def _how_many_not_judged(a: Analysis, width: int) -> Iterator[str]:
    if a.abstained:
        yield from wrap(f"{not_judged(a)} To see which ones and why, run gputop analyze --verbose.", width)


def _not_judged(a: Analysis, width: int) -> Iterator[str]:
    for what, ids in ids_by_missing(a.abstained).items():
        yield from wrap(f"{', '.join(ids)}: needs {what}.", width, "Not checked ")


def not_judged(a: Analysis) -> str:
    """Number of causes that this trace cannot show, in a sentence; empty where it can show all."""
    n = len(a.abstained)
    return f"{counted(n, 'cause')} could not be checked in this trace." if n else ""


def unexplained_text(a: Analysis) -> str:
    """The time that no finding names, with what ran in it, in a sentence or two; "" where it is little."""
    u = a.wall_time.unexplained if a.wall_time is not None else None
    if u is None:
        return ""
    named = {id_: name for id_, (name, _) in WALL_PARTS.items()} | {id_: part.name for id_, part in PART_BY_ID.items()}
    if not a.gpus:
        named["host"] = "no op of the model is running"
    parts = sorted((part for part in u.parts.items() if part[1] >= _WORTH_A_NAME * u.time_s), key=lambda part: -part[1])
    text = f"{seconds(u.time_s)} of the {seconds(u.of_s)} {u.per} ({percent(u.time_s / u.of_s)}) is unexplained: "
    text += named[parts[0][0]] if len(parts) == 1 else ", ".join(f"{named[id_]} {seconds(s)}" for id_, s in parts)
    ran = [(work.time_s, printable(work.name)) for work in u.work]
    if u.silent_s is not None and u.silent_s >= _WORTH_A_NAME * u.time_s:
        kinds = {part.kind for part in a.wall_time.parts} if a.wall_time is not None else set()
        ran.append((u.silent_s, HOST_KINDS["managed"] if "managed" in kinds else "no events" if (
            "silent" in kinds or (a.trace.format == "nsys" and "python" not in kinds)) else HOST_KINDS["python"]))
    listed = ", ".join(f"{name} ({seconds(time_s)})" for time_s, name in sorted(ran, reverse=True))
    tells = 0 < sum(time_s for time_s, _ in ran) < 1.01 * u.time_s  # more is of several threads, or claimed
    return f"{text}. Host activity during this time: {listed}." if tells else f"{text}."


def _finding(number: int, f: Finding, width: int) -> Iterator[str]:
    more = [VerdictRow("From", "; ".join(f"{label} {value}" for label, value in evidence(f))),
            VerdictRow("Fix", gain_sentence(f)),
            VerdictRow("Also", "; ".join(f"{c.title} [{c.id}]" for c in f.consequences)), *kernel_rows(f)]
    verdict = verdict_of(f, *more)
    gpus = f" · GPU {ranges(f.gpus)}" if f.gpus else ""
    yield from plain_lines(replace(verdict, head=f"{f.severity.upper()} {verdict.head}{gpus}"), width, f"{number}. ")


_WORTH_NAMING = 0.01  # of the step, of a phase


def limit_of(a: Analysis) -> str:
    """The verdict on a job without large findings, a line for its head and each row."""
    return _limit_and_end(a).text


def _limit_and_end(a: Analysis) -> VerdictLines:
    limit, ended = limit_lines(a), _ended(a)
    return replace(limit, rows=(*limit.rows, *[VerdictRow("From", ended)] * bool(ended)))


def limit_lines(a: Analysis) -> VerdictLines:
    """The verdict on a job without large findings: what limits it, or why the trace is not enough for that."""
    if a.trace.is_damaged:
        return no_verdict("the file is damaged", "copy or capture it again",
                          "values from the remaining part would be wrong")
    active = [gpu for gpu in a.gpus if gpu.kernels]
    unrecorded = next((note for note in a.trace.quality if note.id in _NOT_RECORDED and not active), None)
    if unrecorded is not None:
        return no_verdict(_NOT_RECORDED[unrecorded.id], "record again with GPU events", unrecorded.message)
    clean, about, do = _limit_of_gpus(a, active) if active else _limit_of_host(a)
    if (doubted := doubt(a, clean, about)) is not None:
        return doubted
    large = "LARGE " if a.findings else ""
    head = f"NO {large}PROBLEM FOUND" if clean else "NO CAUSE FOUND"
    return VerdictLines(head, about, rows=(VerdictRow(DO, do),) if do else ())


def _has_verdict(a: Analysis) -> bool:
    """Return whether the report has :func:`limit_of`: no finding of weight says it."""
    return not any(f.severity in ("high", "medium") for f in a.findings)


def _limit_of_host(a: Analysis) -> tuple[bool, str, str]:
    """Verdict for a trace without work on a GPU: whether nothing is wrong, the limit of the job, and what to do."""
    if a.input is not None and any(abstained.id == "input_bound" for abstained in a.abstained):
        return False, (f"calls for a batch take {percent(a.input.wait_ratio)} of the "
                       f"{'step' if a.steps else 'window'}; whether the job waits for its input is unknown, "
                       "because the trace shows no GPU work"), ""
    work = "kernel" if any(gpu.busy for gpu in a.gpus) else "GPU work"
    waits_known = a.input is not None and a.steps is not None and a.steps.unit != "period"
    shows = f"the trace shows no {work}{', and the loop hardly waits for its input' if waits_known else ''}"
    table = a.cpu_layers
    if table is None or table.total_s <= 0:
        return True, shows, ""
    phases = {row.name: (row.device_s + row.wait_s) / table.total_s for row in table.rows if row.parent is None}
    idle, waits = phases.pop(NO_OP_RUNS, 0.0), phases.get("collectives", 0.0)
    if max(idle, waits) >= HIGH_SHARE:
        what = "the CPU runs no op of the model" if idle >= waits else "collectives, and no op of the model, run"
        return False, f"{what} for {percent(max(idle, waits))} of the {table.basis}", ""
    if sum(share >= _WORTH_NAMING for share in phases.values()) == 1:
        # Without a backward pass or a loss, all that runs is called forward, so its ops say more.
        phases = {printable(row.name): row.share for row, parent in zip(table.rows, table.parents, strict=True)
                  if parent is not None and table.rows[parent].parent is None
                  and row.name != ITSELF and not row.name.endswith(" more")}
        if a.ops is not None and a.ops.host_s > 0:  # of TensorFlow, whose ops have names of their own
            phases = {printable(op.type): (1 - idle) * op.host_s / a.ops.host_s for op in a.ops.types}
    most = [f"{name} {percent(share)}" for name, share in sorted(phases.items(), key=lambda item: -item[1])[:3]
            if share >= _WORTH_NAMING]
    return True, f"{shows}; shares of the {table.basis}: {', '.join(most)}" if most else shows, ""


def _limit_of_gpus(a: Analysis, active: Sequence[GpuUse]) -> tuple[bool, str, str]:
    """The same of a trace with GPUs that worked."""
    shares, basis = _shares(a, active)
    busy = 1 - shares["idle"]
    lost = max(("idle", "collectives", "copies"), key=lambda name: shares[name])
    if busy >= 0.9 and shares["compute"] >= 0.8 * busy:
        return True, f"the GPUs are busy for {percent(busy)} of the {basis} and bound by compute", (
            "only the compute itself can be improved: number types, kernels, the model")
    if shares[lost] < HIGH_SHARE:
        return True, (f"the GPUs are busy for {percent(busy)} of the {basis} and compute for "
                      f"{percent(shares['compute'])}"), ""
    if lost == "idle" and _launched_work_waits(a, active, shares[lost]):
        most = [] if a.layers is None else [
            f", mostly before kernels of {printable(row.name)}" for row in a.layers.rows
            if row.parent is not None and row.name != ITSELF
            and row.wait_s >= _MOST * shares[lost] * a.layers.total_s]
        return False, (f"for {percent(shares[lost])} of the {basis}, the GPU shows no work, although some is launched"
                       f"{most[-1] if most else ''}"), (
            "record more steps, and all processes that use this GPU: what is launched waits, maybe for work that is "
            "not recorded")
    what = {"idle": "the GPUs are idle for", "collectives": "exposed communication takes",
            "copies": "copies without overlapping compute take"}[lost]
    where = ("run gputop analyze --idle-gaps 10, or press b in the timeline, to see where the GPUs wait"
             if lost == "idle" else "")
    return False, f"{what} {percent(shares[lost])} of the {basis}", where


def _launched_work_waits(a: Analysis, active: Sequence[GpuUse], idle: float) -> bool:
    """Return whether the next work of the only GPU is launched already in most of the idle share of the step, or of
    the window."""
    judged = a.breakdown or (a.account.breakdown if a.account is not None else None)
    if judged is None or len(active) > 1 or active[0].idle_host_fault is None:
        return False
    in_all = a.steps is None or active[0].window_s >= _MOST * a.trace.window_s
    return in_all and judged.known.get("idle", 0.0) >= _MOST * idle * judged.total


def _shares(a: Analysis, active: Sequence[GpuUse]) -> tuple[dict[str, float], str]:
    """Ratios of the GPUs' time by use, and what they are ratios of. Of the mean step; where there are no steps, of the
    window that the findings judge. Older documents have no account: of the time from each GPU's first event to its
    last."""
    judged = a.account.breakdown if a.account is not None else a.breakdown
    if judged is not None and judged.total > 0:
        parts = {name: part_s / judged.total for name, part_s in judged.known.items()}
        work = {"compute": parts["compute"], "collectives": parts["collectives"], "copies": parts["h2d"] + parts["d2h"]}
        return {**work, "idle": max(1 - sum(work.values()), 0.0)}, a.steps.unit if a.steps is not None else "window"

    def mean(ratios: Iterable[float]) -> float:
        return sum(ratios) / len(active)

    return {"compute": mean(gpu.compute for gpu in active), "idle": 1 - mean(gpu.busy for gpu in active),
            "collectives": mean(gpu.collectives_exposed for gpu in active),
            "copies": mean(gpu.copies_exposed or 0.0 for gpu in active)}, "time"
