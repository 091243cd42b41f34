"""The report over recordings as one page: no request leaves it, and it opens from a file."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from gputop.core.codec import to_document
from gputop.export.page import BANNER, embedded, header, page
from gputop.goodput import model, text
from gputop.goodput.survey import HOUR_S
from gputop.render.step_parts import PART_BY_ID
from gputop.render.table import to_html as table_html
from gputop.text.markup import esc, moment
from gputop.text.units import clock_time

DATA_ID = "gputop-report"
# A state has the color of the part of a step that it is most like.
_PARTS = {model.TRAINING: "compute", model.WAITING: "input", model.CHECKPOINT: "h2d", model.STARTING: "host",
          model.RESTART: "launch", model.IDLE: "idle"}
_COLORS = {state: PART_BY_ID[part].dark for state, part in _PARTS.items()} | {model.UNKNOWN: "#c8ccd4"}
_HEIGHT = 100


def to_html(report: model.Report) -> str:
    title = f"gputop report: {report.host}"
    parts = [_header(report), BANNER if report.simulated else "", _total(report), _days(report), _worst(report),
             _list("Growing host memory", map(text.creep_sentence, report.creep)),
             _list("Rules of yours", map(text.own_rule_sentence, report.own_rules)),
             *(f"<section><h2>{one.name}</h2>{table_html(one, opened=True)}</section>" for one in text.tables(report)),
             _list("Not in this report", text.closing_sentences(report))]
    return page(title, parts, (
        f"<footer>Written by gputop {esc(report.gputop)}. Secrets in commands are hidden. The page contains the JSON "
        "document.</footer>",
        f'<script type="application/json" id="{DATA_ID}">{embedded(to_document(report))}</script>'))


def _header(report: model.Report) -> str:
    total, gap_s = report.total, report.not_recorded_s
    activity = text.activity_text(total)
    at_activity = f", at {esc(activity)}" if activity else ""
    facts = [f"goodput <b>{esc(text.goodput(total))}</b>{at_activity}",
             f"<b>{esc(text.duration(report.recorded_s))}</b> recorded", f"a sample every {report.interval_s:.3g} s"]
    if gap_s:
        facts.append(f"not recorded {esc(text.duration(gap_s))}")
    facts.append(esc(text.energy_sentence(report)))
    return header("gputop report", report.host, facts, f"{moment(report.begin_s)} – {moment(report.end_s)}")


def _total(report: model.Report) -> str:
    states = report.total.states_s
    all_s = sum(states.values())
    if not all_s:
        return "<section><h2>GPU time</h2><p>N/A: no GPU time was recorded.</p></section>"
    hours = text.decimals(seconds / HOUR_S for seconds in states.values())
    bar = "".join(f'<span style="flex:{seconds / all_s:.5f};background:{_COLORS[state]}" '
                  f'title="{esc(_share(state, states))}"></span>' for state, seconds in _in_order(states))
    rows = "".join(f'<li title="{esc(text.MEANING[state])}"><i style="background:{_COLORS[state]}"></i>{esc(state)}'
                   f"<b>{text.figure(seconds / HOUR_S, hours)} h</b><em>{esc(text.share(seconds, all_s))}</em></li>"
                   for state, seconds in _in_order(states))
    return (f'<section><h2>GPU time<small>all GPUs together</small></h2><div class="step" role="img" '
            f'aria-label="GPU time by state">{bar}</div><ul class="legend">{rows}</ul></section>')


def _days(report: model.Report) -> str:
    """A row for each day of local time, a column for each hour; its width is the share that was recorded."""
    if not report.hours:
        return ""
    gpus = max(sum(hour.states_s.values()) for hour in report.hours) / HOUR_S
    days: dict[str, list[tuple[float, model.Hour]]] = {}
    for hour in report.hours:
        local = time.localtime(hour.begin_s)
        days.setdefault(time.strftime("%a %d %b", local), []).append((local.tm_hour + local.tm_min / 60, hour))
    rows = "".join(_day(day, hours, gpus) for day, hours in days.items())
    axis = "".join(f"<span>{hour:02d}:00</span>" for hour in (0, 6, 12, 18, 24))
    return ('<section class="days"><h2>Day by day<small>local time; dark means not recorded</small></h2><div '
            f'class="plate">{rows}<div class="axis"><span></span><div>{axis}</div><span '
            'class="right">training</span></div></div></section>')


def _day(day: str, hours: Sequence[tuple[float, model.Hour]], gpus: float) -> str:
    shapes = []
    total: dict[str, float] = {}
    places = [hour_of_day for hour_of_day, _ in hours]
    for i, (hour_of_day, hour) in enumerate(hours):
        y, all_s = 0.0, sum(hour.states_s.values())
        same = places.count(hour_of_day)  # 2 where the clock was set back: half of the width for each
        left = hour_of_day + places[:i].count(hour_of_day) / same
        width = min(1.0, all_s / (gpus * HOUR_S)) * 0.94 / same
        boxes = []
        for state, seconds in _in_order(hour.states_s):
            total[state] = total.get(state, 0.0) + seconds
            height = _HEIGHT * seconds / all_s
            boxes.append(f'<path fill="{_COLORS[state]}" d="M{left:g} {_HEIGHT - y - height:.2f}h{width:.3f}'
                         f'v{height:.2f}h-{width:.3f}z"/>')
            y += height
        when = clock_time(hour.begin_s, "%H:%M")
        shares = ", ".join(_share(state, hour.states_s) for state, _ in _in_order(hour.states_s))
        shapes.append(f"<g><title>{esc(f'{day} {when}: {shares}')}</title>{''.join(boxes)}</g>")
    training = text.share(total.get(model.TRAINING, 0.0), sum(total.values()))
    return (f'<div class="lane"><span>{esc(day)}</span><svg viewBox="0 0 24 {_HEIGHT}" preserveAspectRatio="none" '
            f'role="img" aria-label="{esc(day)}: training {esc(training)}">{"".join(shapes)}</svg>'
            f'<span class="now">{esc(training)}</span></div>')


def _worst(report: model.Report) -> str:
    if not report.worst_hours:
        return ""
    return ('<section><h2>Worst hours<small>when jobs lost the most GPU '
            f'time</small></h2>{"".join(map(_worst_hour, report.worst_hours))}</section>')


def _worst_hour(hour: model.WorstHour) -> str:
    shares = ", ".join(_share(state, hour.states_s) for state, _ in _in_order(hour.states_s))
    findings = "".join(f"<li>{esc(text.hour_finding(finding))}</li>" for finding in hour.findings)
    note = (f"Findings: N/A, {hour.not_judged}." if hour.not_judged else
            "" if findings else "The live rules found no cause.")
    return (f'<article class="finding medium"><header><h3>{esc(moment(hour.begin_s))}</h3><span class="tag">'
            f"{esc(text.lost_hours(hour))}</span></header><p>{esc(shares)}</p>"
            + (f"<ul>{findings}</ul>" if findings else "") + (f'<p class="fine">{esc(note)}</p>' if note else "")
            + "</article>")


def _list(heading: str, sentences: Iterator[str]) -> str:
    rows = "".join(f"<li>{esc(sentence)}</li>" for sentence in sentences)
    return f"<section><h2>{esc(heading)}</h2><ul>{rows}</ul></section>" if rows else ""


def _in_order(states: Mapping[str, float]) -> list[tuple[str, float]]:
    return [(state, states[state]) for state in model.STATES if states.get(state)]


def _share(state: str, states: Mapping[str, float]) -> str:
    return f"{state} {text.share(states[state], sum(states.values()))}"
