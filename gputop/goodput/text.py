"""The report over recordings in words and tables."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from gputop.goodput import model
from gputop.goodput.recorded import JOULES_PER_KWH
from gputop.render.table import Column, Table, table_lines
from gputop.render.table import to_text as table_text
from gputop.text import units
from gputop.text.commands import short_command
from gputop.text.units import NA, clock_time, comes_twice, percent, portion, printable, ranges, size, utc_offset, wrap

MEANING = {
    model.TRAINING: "a job is computing on the GPU: training, evaluation, warm-up",
    model.WAITING: "a job holds the GPU but is not computing",
    model.CHECKPOINT: "waiting while the job writes to storage, as for a checkpoint",
    model.STARTING: "a new process holds the GPU but has not computed yet",
    model.RESTART: "the same command starts again, and the time since it ended",
    model.IDLE: "no process holds the GPU",
    model.UNKNOWN: "the driver did not report activity",
}
_MINUTE = "%Y-%m-%d %H:%M"
_DAY_S = 86400.0
_HOURS_A_DAY = 24


def to_text(report: model.Report, width: int = 100) -> str:
    sections = (_header(report), _states(report, width), *(table_text(table, width) for table in tables(report)),
                _grid(report.hours), _worst(report.worst_hours),
                _titled("Custom rules: how long each condition held", map(own_rule_sentence, report.own_rules)),
                _titled("Growing host memory", map(creep_sentence, report.creep)), closing_sentences(report))
    return "\n\n".join("\n".join(_wrapped(lines, width)) for section in sections if (lines := list(section)))


def _wrapped(lines: Sequence[str], width: int) -> Iterator[str]:
    """Sentences are wrapped; rows of tables, told by the columns in them, stay as they are."""
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()))
        yield from [line] if len(line) <= width or "   " in line.strip() else wrap(line.strip(), width, indent)


def _header(report: model.Report) -> Iterator[str]:
    mark = "SIMULATED  " if report.simulated else ""
    span_s = report.end_s - report.begin_s
    begin, end = clock_time(report.begin_s), clock_time(report.end_s)
    offsets = utc_offset(report.begin_s), utc_offset(report.end_s)
    if offsets[0] != offsets[1]:  # without them the times do not fit how long it was
        begin, end = (text if "UTC" in text else f"{text} ({offset})"
                      for text, offset in zip((begin, end), offsets, strict=True))
    yield (f"{mark}{printable(report.host)}, {begin} to {end}: "
           f"{duration(span_s)}, a sample every {units.seconds(report.interval_s)}")
    if report.not_recorded_s:
        yield f"Not recorded: {duration(report.not_recorded_s)} ({share(report.not_recorded_s, span_s)} of the time)."
    if not report.total.states_s:
        yield "Goodput: N/A, because no GPU time was recorded."
        return
    activity = activity_text(report.total)
    yield (f"Goodput: {goodput(report.total)} of the GPU time is training{f', at {activity}' if activity else ''}.")
    yield energy_sentence(report)


def activity_text(spent: model.Spent) -> str:
    """Activity of the GPUs while a job trained on them: "44% SM activity on average"; "" without training."""
    if spent.training_activity_ratio is None:
        return ""
    what = "utilization (coarse)" if spent.training_activity_coarse else "SM activity"
    return f"{percent(spent.training_activity_ratio)} {what} on average"


def energy_sentence(report: model.Report) -> str:
    total = report.total
    if total.energy_j is None:
        return "Energy: N/A, because there are no power readings."
    decimals = ",.2f" if report.cost == 0 or (report.cost or 1) >= 0.1 else ".2g"  # two digits of what would be 0.00
    cost = "" if report.cost is None else f", {report.cost:{decimals}} at {report.price_per_kwh:g} per kWh"
    all_s = sum(total.states_s.values())
    missing = ("" if not total.energy_unknown_s else
               f" {share(total.energy_unknown_s, all_s)} of the GPU time has no power reading and is not included.")
    kwh = figure(total.energy_j / JOULES_PER_KWH)
    return f"Energy of the GPUs, excluding host and cooling: {kwh} kWh{cost}.{missing}"


def _states(report: model.Report, width: int) -> Iterator[str]:
    states, all_s = report.total.states_s, sum(report.total.states_s.values())
    if not states:
        return
    digits = decimals(seconds / 3600 for seconds in states.values())
    columns = (Column("GPU time", least=12), Column("hours", str, least=7), Column("share", str), Column("", wide=True))
    yield from table_lines(Table("GPU time", columns, tuple(
        (f"  {state}", figure(seconds / 3600, digits), share(seconds, all_s), MEANING[state])
        for state in model.STATES if (seconds := states.get(state, 0.0))), ""), width)


def tables(report: model.Report) -> Iterator[Table]:
    """Yield the GPU time of each GPU and of each job, where there is one."""
    if report.gpus:
        yield _table("GPUs", report.gpus, "GPU", [f"{gpu.gpu} {gpu.name}" for gpu in report.gpus])
    if report.jobs:
        yield _table("Jobs", report.jobs, "job", list(map(_job_text, report.jobs)))


def _table(name: str, rows: Sequence[model.Spent], whose: str, names: Sequence[str]) -> Table:
    states = [state for state in model.STATES if any(row.states_s.get(state) for row in rows)]
    all_s = [sum(row.states_s.values()) for row in rows]
    kwh = [None if row.energy_j is None else row.energy_j / JOULES_PER_KWH for row in rows]
    hours_text, kwh_text = (partial(figure, digits=decimals(value for value in column if value is not None))
                            for column in ([time_s / 3600 for time_s in all_s], kwh))
    columns = (Column("hours", hours_text), Column("goodput", percent), *(Column(state, portion) for state in states),
               Column("kWh", kwh_text, missing="no power readings"), Column(whose, wide=True, prose=True))
    return Table(name, columns, tuple(
        (time_s / 3600, row.goodput_ratio,
         *(row.states_s.get(state, 0.0) / time_s if time_s else None for state in states), energy, text)
        for row, time_s, energy, text in zip(rows, all_s, kwh, names, strict=True)), "",
        "GPU hours and their shares by state.")


def _job_text(job: model.JobReport) -> str:
    again = "" if not job.restarts else ", restarted once" if job.restarts == 1 else f", restarted {job.restarts} times"
    return f"{short_command(job.job)} ({job.user or 'user unknown'}, GPU {','.join(job.gpus)}){again}"


def _grid(hours: Sequence[model.Hour]) -> Iterator[str]:
    """A line for each day, a digit for each hour of local time."""
    if not hours:
        return
    yield "Training by hour: 0 is under 10% of the GPU time, 9 is 90% or more, and a dot means not recorded"
    yield "             0     6     12    18     local time"
    days: dict[str, list[str]] = {}
    spent: dict[tuple[str, int], tuple[float, float]] = {}  # of both hours where the clock was set back
    set_back = []
    for hour in hours:
        clock = time.localtime(hour.begin_s)
        day = time.strftime("%Y-%m-%d", clock)
        before = spent.get((day, clock.tm_hour), (0.0, 0.0))
        training_s = before[0] + hour.states_s.get(model.TRAINING, 0.0)
        all_s = before[1] + sum(hour.states_s.values())
        spent[day, clock.tm_hour] = training_s, all_s
        days.setdefault(day, ["."] * _HOURS_A_DAY)[clock.tm_hour] = str(min(9, int(10 * training_s / all_s)))
        if before[1] and comes_twice(hour.begin_s):
            set_back.append(f"  {day}: the clock was set back, so {clock.tm_hour:02d} covers two hours")
    yield from (f"  {day} {''.join(cells)}" for day, cells in days.items())
    yield from set_back


def _worst(hours: Sequence[model.WorstHour]) -> Iterator[str]:
    if not hours:
        return
    yield "Worst hours: when jobs lost the most GPU time"
    for hour in hours:
        all_s = sum(hour.states_s.values())
        states = ", ".join(f"{state} {share(seconds, all_s)}" for state, seconds in hour.states_s.items())
        yield f"  {clock_time(hour.begin_s, _MINUTE)}  {lost_hours(hour)}: {states}"
        for finding in hour.findings:
            yield f"    {hour_finding(finding)}"
        if not hour.findings and hour.not_judged is None:
            yield "    The live rules found no cause."
    reasons = {hour.not_judged for hour in hours if hour.not_judged}
    yield from (f"  Findings: N/A, {reason}." for reason in sorted(reasons))


def hour_finding(finding: model.HourFinding) -> str:
    """Format what a live rule found in an hour, as it read when it last did, and in how many of its checks."""
    gpus = f" (GPU {ranges(finding.gpus)})" if finding.gpus and "GPU" not in finding.title else ""
    return f"{percent(finding.held_ratio)} of checks: {printable(finding.title)}{gpus}"


def _titled(title: str, sentences: Iterable[str]) -> list[str]:
    lines = [f"  {sentence}" for sentence in sentences]
    return [title, *lines] if lines else []


def own_rule_sentence(rule: model.OwnRuleReport) -> str:
    title = printable(rule.title)
    if rule.missing is not None:
        return f"{title}: N/A, because gputop lacks {printable(rule.missing)}."
    if rule.last_s is None:
        return f"{title}: never in the {duration(rule.judged_s)} evaluated."
    gpus = f" on GPU {ranges(rule.gpus)}" if rule.gpus else ""
    often = "once" if rule.times == 1 else f"{rule.times} times, at most {duration(rule.longest_s)}"
    return (f"{title}: {duration(rule.held_s)}{gpus}, {share(rule.held_s, rule.judged_s)} of the time; {often}, last "
            f"at {clock_time(rule.last_s, _MINUTE)}.")


def creep_sentence(creep: model.Creep) -> str:
    """Sentence on what grows, how fast, and when that meets the limit."""
    who = {"process": f"{printable(creep.name)} (PID {creep.pid})", "cgroup": f"Control group {printable(creep.name)}",
           "node": "The node"}[creep.what]
    text = (f"{who}: from {size(creep.first_bytes)} to {size(creep.last_bytes)} in "
            f"{duration(creep.end_s - creep.begin_s)}, {size(creep.bytes_per_s * 3600)} per hour.")
    if creep.full_in_s is None or creep.full_in_low_s is None or creep.full_in_high_s is None:
        reason = "the limit is unknown" if creep.limit is None else "it has ended"
        return f"{text} Time until out of memory: N/A, {reason}."
    limit = f"{size(creep.limit_bytes or 0.0)} of the {'control group' if creep.limit == 'cgroup' else 'node'}"
    low, high = duration(creep.full_in_low_s), duration(creep.full_in_high_s)
    between = f" ({low} to {high}, based on the faster and the slower half of the trend)" if low != high else ""
    return (f"{text} At this rate, the {limit} will be full {duration(creep.full_in_s)} after the last "
            f"sample{between}.")


def closing_sentences(report: model.Report) -> Iterator[str]:
    """Yield what could not be read, and what could not be judged."""
    yield from (f"{printable(part.path)}: {printable(note)}" for part in report.recordings for note in part.notes)
    yield from (f"{printable(note[0].upper() + note[1:])}." for note in report.notes)
    yield ("Without code in the job, gputop cannot distinguish training from evaluation, from work lost in a crash, or "
           f"from stalls shorter than {units.seconds(report.interval_s * report.read_every)}.")


def duration(seconds: float) -> str:
    """Hours and days: 12.0 s, 45 min, 7.5 h, 13.2 days."""
    if seconds < 120:
        return units.seconds(seconds)
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 2 * _DAY_S else f"{seconds / _DAY_S:.1f} days"


def share(seconds: float, of_s: float) -> str:
    return portion(seconds / of_s if of_s else 0.0)


def goodput(spent: model.Spent) -> str:
    """Share of the GPU time in which a job trains."""
    return NA if spent.goodput_ratio is None else percent(spent.goodput_ratio)


def lost_hours(hour: model.WorstHour) -> str:
    lost_h, all_s = hour.lost_s / 3600, sum(hour.states_s.values()) / 3600
    digits = decimals([all_s])
    return f"lost {figure(lost_h, digits)} of {figure(all_s, digits)} GPU hours"


def decimals(column: Iterable[float]) -> int:
    """Number of decimals of all figures in a column: one, or as many as give the largest two digits."""
    largest = max(column, default=0.0)
    return 1 if largest >= 1 or largest <= 0 else min(6, 1 - math.floor(math.log10(largest)))


def figure(value: float, digits: int | None = None) -> str:
    """Format with so many decimals; None: as if it stood alone. What would be rounded to 0 is not 0."""
    digits = decimals([value]) if digits is None else digits
    least = 10.0**-digits
    return f"<{least:.{digits}f}" if 0 < value < least / 2 else f"{value:,.{digits}f}"
