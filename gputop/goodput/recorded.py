"""Several recordings of one node as one line of time, and the report over it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from gputop.advice.live.advise import live_advice
from gputop.core.errors import EXIT_USAGE, GputopError
from gputop.core.findings import Finding
from gputop.core.samples import NodeSample
from gputop.core.version import __version__
from gputop.goodput.model import HourFinding, RecordingPart, Report, WorstHour
from gputop.goodput.states import HOUR_S
from gputop.goodput.survey import Survey
from gputop.replay.reader import open_recording
from gputop.telemetry.history import History

MAX_SAMPLES = 200_000  # that are decoded: some two minutes for eight GPUs; of more, one of every few
MAX_MISSED = 3  # intervals without a sample: more is a time that was not recorded
_MIN_GAP_S = 5.0
RULES_EVERY_S = 10.0
_ENOUGH_FOR_RULES_S = 10.0  # the rules look at one to three minutes, and need several samples in them
JOULES_PER_KWH = 3.6e6


class Timeline:
    """Recordings of one node in the order of their times. A context manager; raises GputopError as
    :func:`open_recording` does, and for recordings of several nodes."""

    def __init__(self, paths: Sequence[Path]) -> None:
        with contextlib.ExitStack() as opened:
            self._recordings = [opened.enter_context(open_recording(path)) for path in paths]
            self._recordings.sort(key=lambda recording: recording.times_s[0])
            hosts = sorted({recording.sample(0).host.hostname for recording in self._recordings})
            if len(hosts) > 1:
                raise GputopError(f"these are recordings of several nodes: {', '.join(hosts)}",
                                  "Make a report of each node.", EXIT_USAGE)
            self._opened = opened.pop_all()
        self.host = hosts[0]
        between = np.concatenate([np.diff(np.asarray(own.times_s)) for own in self._recordings])
        forward = between[between > 0]
        self.interval_s = float(np.median(forward)) if len(forward) else 0.0
        self.read_every = 1 + (sum(map(len, self._recordings)) - 1) // MAX_SAMPLES
        self.overlapping = 0  # samples left out since another recording holds their time

    def __enter__(self) -> Timeline:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    @property
    def parts(self) -> list[RecordingPart]:
        return [RecordingPart(path=str(own.path), samples=len(own), begin_s=own.times_s[0], end_s=own.times_s[-1],
                              notes=list(own.notes)) for own in self._recordings]

    def samples(self) -> Iterator[tuple[NodeSample, float]]:
        """Each sample that is judged, with the time before it that it stands for: 0 behind a gap."""
        gap_s = max(_MIN_GAP_S, MAX_MISSED * self.interval_s)
        self.overlapping, newest_s, judged_s = 0, None, None
        for recording in self._recordings:
            for i, time_s in enumerate(recording.times_s):
                if newest_s is not None and time_s <= newest_s:
                    self.overlapping += 1
                    continue
                broken = newest_s is None or time_s - newest_s > gap_s
                newest_s = time_s
                if broken or i % self.read_every == 0:
                    yield recording.sample(i), 0.0 if broken or judged_s is None else time_s - judged_s
                    judged_s = time_s

    def hour(self, begin_s: float) -> Iterator[NodeSample]:
        newest_s = begin_s
        for recording in self._recordings:
            for i in range(recording.index_at(begin_s), len(recording)):
                time_s = recording.times_s[i]
                if time_s >= begin_s + HOUR_S:
                    break
                if time_s > newest_s:
                    newest_s = time_s
                    yield recording.sample(i)


def report(paths: Sequence[Path], price_per_kwh: float | None = None) -> Report:
    """What became of the GPUs' time in these recordings of one node. Raises GputopError, NoDataError."""
    with Timeline(paths) as timeline:
        survey = Survey()
        times: list[float] = []
        for sample, seconds in timeline.samples():
            survey.add(sample, seconds)
            times = [times[0] if times else sample.time_s, sample.time_s]
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
            creep=survey.creep(), notes=list(_notes(timeline, survey)))


def _judge(hour: WorstHour, timeline: Timeline) -> None:
    if timeline.interval_s > _ENOUGH_FOR_RULES_S:
        hour.not_judged = (f"the rules need a sample every {_ENOUGH_FOR_RULES_S:.0f} s or more often; here it is every "
                           f"{timeline.interval_s:.0f} s")
    else:
        hour.findings = hour_findings(timeline.hour(hour.begin_s))


def hour_findings(samples: Iterator[NodeSample]) -> list[HourFinding]:
    """What the live rules say of the samples, as a session asks them but less often; that which held longest first."""
    history, previous = History(), tuple[Finding, ...]()
    found: dict[str, list[Finding]] = {}
    judged, judged_s = 0, float("-inf")
    for sample in samples:
        history.append(sample)
        if sample.time_s - judged_s < RULES_EVERY_S:
            continue
        judged, judged_s = judged + 1, sample.time_s
        previous = live_advice(history, sample, previous).findings
        for finding in previous:
            found.setdefault(finding.id, []).append(finding)
    return [HourFinding(id=id_, title=held[-1].title, gpus=sorted({gpu for own in held for gpu in own.gpus}),
                        held_ratio=len(held) / judged)
            for id_, held in sorted(found.items(), key=lambda pair: -len(pair[1]))]


def _notes(timeline: Timeline, survey: Survey) -> Iterator[str]:
    if timeline.overlapping:
        yield f"{timeline.overlapping} samples are left out: another of the recordings holds the same time"
    if timeline.read_every > 1:
        yield f"one sample of every {timeline.read_every} was judged"
    if survey.processes_unread_s:
        yield ("the processes of a GPU could not be listed for some time: a GPU that waits counts as idle there")


