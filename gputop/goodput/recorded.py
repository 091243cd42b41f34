"""Several recordings of one node as one line of time, and the report over it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from msgspec import Struct

from gputop.advice.live.advise import live_advice
from gputop.advice.live.node_view import NodeView
from gputop.advice.live.user_rules import HeldConditions, user_live_outcomes
from gputop.advice.user_registry import user_rules
from gputop.core.errors import EXIT_USAGE, GputopError, NoDataError
from gputop.core.findings import Abstained, Finding
from gputop.core.samples import NodeSample
from gputop.core.version import __version__
from gputop.goodput.model import HourFinding, OwnRuleReport, RecordingPart, Report, WorstHour
from gputop.goodput.survey import HOUR_S, Survey
from gputop.replay.parts import recordings_in
from gputop.replay.reader import open_recording
from gputop.telemetry.history import History

MAX_SAMPLES = 200_000  # that are decoded: some two minutes for eight GPUs; of more, one of every few
MAX_MISSED = 3  # intervals without a sample: more is a time that was not recorded
_MIN_GAP_S = 5.0
RULES_EVERY_S = 10.0
_ENOUGH_FOR_RULES_S = 10.0  # the rules look at one to three minutes, and need several samples in them
JOULES_PER_KWH = 3.6e6


class _Part(Struct, frozen=True):
    """One recording; its samples are read when their turn comes, so that a thousand files need not be open at once."""

    path: Path
    times_s: array[float]
    interval_s: float  # 0.0: of one sample
    host: str
    notes: tuple[str, ...]
    in_folder: bool  # whether the user named its folder, not itself


def _part(path: Path, *, in_folder: bool) -> _Part:
    with open_recording(path) as recording:
        return _Part(path, recording.times_s, _interval_s([recording.times_s]), recording.sample(0).host.hostname,
                     recording.notes, in_folder)


def _interval_s(times: Iterable[array[float]]) -> float:
    """The median time between samples."""
    between = np.concatenate([np.diff(np.asarray(of_part)) for of_part in times])
    forward = between[between > 0]
    return float(np.median(forward)) if len(forward) else 0.0


class RecordedTime:
    """Recordings of one node, and those in folders, in the order of their times. Raises GputopError as
    :func:`open_recording` does, and for recordings of several nodes. In a folder, which a recorder may be writing to,
    what cannot be read is a note in ``unread``."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.unread: list[str] = []
        self._parts = sorted(self._found(paths), key=lambda part: part.times_s[0])
        if not self._parts:
            raise NoDataError(f"there is no recording with samples in {', '.join(map(str, paths))}",
                              "Give files or a folder written by gputop record.")
        hosts = sorted({part.host for part in self._parts if part.host})  # none: a file before the host was read
        if len(hosts) > 1:
            raise GputopError(f"these recordings are from several nodes: {', '.join(hosts)}",
                              "Make a separate report for each node.", EXIT_USAGE)
        self.host = hosts[0] if hosts else ""
        self.interval_s = _interval_s(part.times_s for part in self._parts)
        self.read_every = 1 + (sum(len(part.times_s) for part in self._parts) - 1) // MAX_SAMPLES
        self.overlapping = 0  # samples left out since another recording holds their time

    def _found(self, paths: Sequence[Path]) -> Iterator[_Part]:
        for path in paths:
            if not path.is_dir():
                yield _part(path, in_folder=False)
                continue
            for recording in recordings_in(path):
                try:
                    yield _part(recording, in_folder=True)
                except NoDataError:  # just begun, or killed at once
                    continue
                except GputopError as error:
                    self.unread.append(error.message)

    @property
    def parts(self) -> list[RecordingPart]:
        return [RecordingPart(path=str(part.path), samples=len(part.times_s), begin_s=part.times_s[0],
                              end_s=part.times_s[-1], notes=list(part.notes)) for part in self._parts]

    def samples(self) -> Iterator[tuple[NodeSample, float]]:
        """Each sample that is judged, with the time before it that it stands for: 0 behind a gap."""
        self.overlapping, newest_s, judged_s = 0, None, None
        for part in self._parts:
            gap_s = max(_MIN_GAP_S, MAX_MISSED * (part.interval_s or self.interval_s))
            chosen = []  # index, and the time that the sample stands for
            for i, time_s in enumerate(part.times_s):
                if newest_s is not None and time_s <= newest_s:
                    self.overlapping += 1
                    continue
                broken = newest_s is None or time_s - newest_s > gap_s
                newest_s = time_s
                if broken or i % self.read_every == 0:
                    chosen.append((i, 0.0 if broken or judged_s is None else time_s - judged_s))
                    judged_s = time_s
            yield from self._read(part, chosen)

    def hour(self, begin_s: float) -> Iterator[NodeSample]:
        newest_s = begin_s
        for part in self._parts:
            if part.times_s[0] >= begin_s + HOUR_S or max(part.times_s) < begin_s:
                continue
            chosen = []
            for i, time_s in enumerate(part.times_s):
                if newest_s < time_s < begin_s + HOUR_S:
                    newest_s = time_s
                    chosen.append((i, 0.0))
            yield from (sample for sample, _ in self._read(part, chosen))

    def _read(self, part: _Part, chosen: Sequence[tuple[int, float]]) -> Iterator[tuple[NodeSample, float]]:
        if not chosen:
            return
        try:
            with open_recording(part.path) as recording:
                for index, seconds in chosen:
                    yield recording.sample(index), seconds
        except GputopError as error:
            if not part.in_folder:
                raise
            self.unread.append(error.message)


def report(paths: Sequence[Path], price_per_kwh: float | None = None) -> Report:
    """Report on the GPUs' time in these recordings of one node. Raises GputopError, NoDataError."""
    timeline = RecordedTime(paths)
    survey, own_rules = Survey(), OwnRules()
    times: list[float] = []
    for sample, seconds in timeline.samples():
        survey.add(sample, seconds)
        own_rules.add(sample, seconds)
        times = [times[0] if times else sample.time_s, sample.time_s]
    if not times:
        raise NoDataError("the recordings were removed while gputop was reading them", "Run the report again.")
    if not survey.recorded_s:
        raise NoDataError("a single sample does not show how the GPUs' time was used", "Record for longer.")
    survey.finish()
    total, worst = survey.total, survey.worst_hours()
    for hour in worst:
        _judge(hour, timeline)
    kwh = None if total.energy_j is None else total.energy_j / JOULES_PER_KWH
    return Report(
        gputop=__version__, host=timeline.host, simulated=survey.simulated, recordings=timeline.parts,
        begin_s=times[0], end_s=times[1], recorded_s=survey.recorded_s,
        not_recorded_s=max(0.0, times[1] - times[0] - survey.recorded_s), interval_s=timeline.interval_s,
        read_every=timeline.read_every, total=total, price_per_kwh=price_per_kwh,
        cost=None if kwh is None or price_per_kwh is None else kwh * price_per_kwh,
        gpus=list(survey.gpus()), jobs=list(survey.jobs()), hours=survey.hours(), worst_hours=worst,
        creep=survey.creep(), own_rules=own_rules.reports(), notes=list(_notes(timeline, survey)))


def _judge(hour: WorstHour, timeline: RecordedTime) -> None:
    if timeline.interval_s > 1.05 * _ENOUGH_FOR_RULES_S:  # samples are never quite on time
        hour.not_judged = (f"the rules need a sample at least every {_ENOUGH_FOR_RULES_S:.0f} s; this recording has "
                           f"one every {timeline.interval_s:.0f} s")
    else:
        hour.findings = hour_findings(timeline.hour(hour.begin_s))


def hour_findings(samples: Iterator[NodeSample]) -> list[HourFinding]:
    """Findings of the live rules on the samples, asked as a session does but less often; that which held longest
    first."""
    history, previous, held = History(), tuple[Finding, ...](), HeldConditions()
    by_id: dict[str, list[Finding]] = {}
    judged, judged_s = 0, float("-inf")
    for sample in samples:
        history.append(sample)
        if sample.time_s - judged_s < RULES_EVERY_S:
            continue
        judged, judged_s = judged + 1, sample.time_s
        previous = live_advice(history, sample, previous, held=held).findings
        for finding in previous:
            by_id.setdefault(finding.id, []).append(finding)
    return [HourFinding(id=id_, title=findings[-1].title, gpus=sorted({gpu for one in findings for gpu in one.gpus}),
                        held_ratio=len(findings) / judged)
            for id_, findings in sorted(by_id.items(), key=lambda pair: -len(pair[1]))]


def _notes(timeline: RecordedTime, survey: Survey) -> Iterator[str]:
    yield from dict.fromkeys(timeline.unread)
    if timeline.overlapping:
        yield f"{timeline.overlapping} samples are left out because another recording covers the same time"
    if timeline.read_every > 1:
        yield f"gputop evaluated one of every {timeline.read_every} samples"
    if survey.processes_unread_s:
        yield ("for some time, gputop could not list a GPU's processes; during that time, a waiting GPU counts as idle")


class OwnRules:
    """The user's own live rules over the samples of days, as the monitor judges them, every :data:`RULES_EVERY_S`.

    Takes samples in the order of time. Without rules it does nothing. A rule of which a figure is missing is not judged
    in that time.
    """

    def __init__(self) -> None:
        self._reports = {rule.id: OwnRuleReport(
            id=rule.id, title=rule.title, severity=rule.severity, gpus=[], judged_s=0.0, held_s=0.0, times=0,
            longest_s=0.0, last_s=None, missing=None,
        ) for rule in user_rules().rules if rule.condition.source == "live"}
        self._forget()

    def _forget(self) -> None:
        self._history, self._held = History(), HeldConditions()
        self._since_s: float | None = None  # what has not been judged yet begins here
        self._holds_s = dict.fromkeys(self._reports, 0.0)  # for how long each holds by now

    def add(self, sample: NodeSample, seconds: float) -> None:
        """``seconds``: the time that the sample stands for; 0 behind a gap, where nothing of before counts."""
        if not self._reports:
            return
        if not seconds:
            self._forget()
        self._history.append(sample)
        if self._since_s is None:
            self._since_s = sample.time_s
        elif sample.time_s - self._since_s >= RULES_EVERY_S:
            self._judge(sample, sample.time_s - self._since_s)
            self._since_s = sample.time_s

    def _judge(self, sample: NodeSample, seconds: float) -> None:
        outcomes = {outcome.id: outcome
                    for outcome in user_live_outcomes(NodeView(self._history, sample, ()), self._held)}
        for id_, report in self._reports.items():
            outcome = outcomes.get(id_)
            if isinstance(outcome, Abstained):
                report.missing, self._holds_s[id_] = outcome.missing, 0.0
                continue
            report.judged_s += seconds
            if not isinstance(outcome, Finding):
                self._holds_s[id_] = 0.0
                continue
            report.times += not self._holds_s[id_]
            self._holds_s[id_] += seconds
            report.held_s += seconds
            report.longest_s = max(report.longest_s, self._holds_s[id_])
            report.last_s = sample.time_s
            report.gpus = sorted({*report.gpus, *outcome.gpus})

    def reports(self) -> list[OwnRuleReport]:
        """Reports of the rules, those that held longest first."""
        for report in self._reports.values():
            report.missing = None if report.judged_s else report.missing or "enough samples"
        return sorted(self._reports.values(), key=lambda report: -report.held_s)
