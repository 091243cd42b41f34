"""What the findings' cures save by a replay of the recorded steps: each alone, and with those before it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from gputop.advice.trace.facts import TraceFacts
from gputop.advice.verdict import Verdict, bound
from gputop.analysis.what_if.cure import Cure, combined
from gputop.analysis.what_if.replay import TOLERANCE, Replay
from gputop.core.findings import MIN_SHARE, Finding
from gputop.text.units import percent


class Cures:
    """The cures of one trace's findings. The trace is replayed only where a finding has a cure."""

    def __init__(self, facts: TraceFacts) -> None:
        self._facts = facts
        self._replay: Replay | None = None
        self.by_finding: dict[str, Cure] = {}

    def saved(self, verdict: Verdict) -> tuple[float | None, str]:
        """The share of the step that the verdict's cure saves; None with the reason, a sentence, where a replay cannot
        tell or says clearly more than the upper bound."""
        most = bound(verdict)
        if verdict.cure is None or most is None or not self._facts.gpu_timelines:
            return None, ""
        if self._replay is None:
            self._replay = Replay(self._facts.trace, self._facts.gpu_timelines, self._facts.steps)
        if self._replay.error > TOLERANCE:
            return None, (f"It is not replayed: a replay of the unchanged {self._facts.basis} misses its time by "
                          f"{percent(self._replay.error)}, so the trace does not show all that the GPUs wait for.")
        saved = max(self._replay.saved(verdict.cure), 0.0)
        if_waiting = max(self._replay.saved_if_waiting(verdict.cure), 0.0)
        if abs(min(saved, most) - min(if_waiting, most)) >= MIN_SHARE:
            return None, (f"The trace does not show whether the host waits for the GPUs in its pauses: a replay saves "
                          f"{percent(if_waiting)} if it does and {percent(saved)} if it is busy.")
        if saved - most >= MIN_SHARE:
            return None, (f"A replay of the recorded {self._facts.basis} saves more, {percent(saved)}, but part of "
                          "that is time which this finding does not count.")
        return saved, ""

    def together(self, findings: Iterable[Finding]) -> tuple[Finding, ...]:
        """The findings, each with what it saves together with those before it."""
        out: list[Finding] = []
        before: list[Cure] = []
        for finding in findings:
            cure = self.by_finding.get(finding.id)
            if cure is not None and self._replay is not None and finding.gain.by == "replay":
                before.append(cure)
                both = max(self._replay.saved(combined(before)) if len(before) > 1 else 0.0,
                           finding.gain.step_time or 0.0, *(f.gain.together or 0.0 for f in out))
                finding = replace(finding, gain=replace(finding.gain, together=both))
            out.append(finding)
        return tuple(out)
