"""Savings of the findings' fixes by a replay of the recorded steps: each alone, and with those before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import combinations

from msgspec.structs import replace

from gputop.advice.trace.facts import TraceFacts
from gputop.advice.verdict import Verdict, bound
from gputop.analysis.what_if.cure import Cure, combined
from gputop.analysis.what_if.replay import TOLERANCE
from gputop.core.findings import LARGE_SHARE, MIN_SHARE, CombinedGain, Finding
from gputop.text.units import percent

_MAX_COMBINED = 5  # findings of which every set is replayed: 31
_MAX_COST = 4_000_000  # about 0.3 s


class Cures:
    """The cures of one trace's findings."""

    def __init__(self, facts: TraceFacts) -> None:
        self._facts = facts
        self._replay = facts.replay
        self.by_finding: dict[str, Cure] = {}
        self._alone: dict[int, tuple[Cure, float]] = {}  # by identity, what was replayed of single ones

    def saved(self, verdict: Verdict) -> tuple[float | None, str]:
        """The share of the step that the verdict's cure saves; None with the reason, a sentence, where a replay cannot
        tell or says clearly more than the upper bound."""
        most = bound(verdict)
        if verdict.cure is None or most is None or self._replay is None:
            return None, ""
        if self._replay.error > TOLERANCE:
            return None, (f"The saving is not from a replay: a replay of the unchanged {self._facts.basis} misses its "
                          f"time by {percent(self._replay.error)}, so the trace does not show everything that the GPUs "
                          "wait for.")
        raw = self._replay.saved(verdict.cure)
        self._alone[id(verdict.cure)] = verdict.cure, raw
        saved = max(raw, 0.0)
        if_waiting = saved
        if self._replay.ambiguous_wait_ratio:
            if_waiting = max(self._replay.saved_if_waiting(verdict.cure), 0.0)
        if abs(min(saved, most) - min(if_waiting, most)) >= MIN_SHARE:
            return None, (f"The trace does not show whether the host waits for the GPUs in its pauses: a replay saves "
                          f"{percent(if_waiting)} if it does and {percent(saved)} if it is busy.")
        if saved - most >= MIN_SHARE:
            return None, (f"A replay of the recorded {self._facts.basis} saves more ({percent(saved)}), but part of "
                          "that time does not belong to this finding.")
        if most >= LARGE_SHARE and saved < verdict.expressed * most:
            return None, (f"A replay of the recorded {self._facts.basis} saves only {percent(saved)}: it cannot "
                          "express the whole fix.")
        return saved, ""

    def rest(self, effect: str, cause: str) -> float | None:
        """Remaining saving of one finding's fix once another's is done, as a share of today's step; None: not
        replayed."""
        if effect not in self.by_finding or cause not in self.by_finding:
            return None
        return self._saved_together((effect, cause)) - self._saved_together((cause,))

    def together(self, findings: Iterable[Finding]) -> tuple[tuple[Finding, ...], tuple[CombinedGain, ...]]:
        """The findings, each with what it saves together with those before it; and what sets of them save."""
        several = tuple(findings)
        alone = {f.id: f.gain.step_time or 0.0 for f in several if f.gain.by == "replay" and f.id in self.by_finding}
        if self._replay is None:
            return several, ()
        cost = self._replay.cost * (2 if self._replay.ambiguous_wait_ratio else 1)
        saved = combinations_saved(alone, self._saved_together, _MAX_COST // max(cost, 1))
        ids = list(alone)
        together = {finding_id: saved[tuple(ids[:i + 1])] for i, finding_id in enumerate(ids)}
        return (tuple(replace(f, gain=replace(f.gain, together=together[f.id])) if f.id in together else f
                      for f in several),
                tuple(CombinedGain(chosen, share) for chosen, share in saved.items() if len(chosen) > 1))

    def _saved_together(self, ids: Iterable[str]) -> float:
        """Saving of several fixes; the smaller of both estimates where the trace does not show what the host does in
        its pauses."""
        if self._replay is None:
            return 0.0
        cures = [self.by_finding[id_] for id_ in ids]
        cure = cures[0] if len(cures) == 1 else combined(cures)
        _, saved = self._alone.get(id(cure)) or (cure, self._replay.saved(cure))
        return min(saved, self._replay.saved_if_waiting(cure)) if self._replay.ambiguous_wait_ratio else saved


def combinations_saved(
    alone: Mapping[str, float], saved: Callable[[tuple[str, ...]], float], most: int,
) -> dict[tuple[str, ...], float]:
    """Savings of sets of findings, the ids in the order of ``alone``: each alone, the first two, three and so on, and
    the other sets of the first five, as far as ``most`` replays go. A set saves no less than one that it contains."""
    ids = tuple(alone)
    out: dict[tuple[str, ...], float] = {(finding_id,): share for finding_id, share in alone.items()}
    for size in range(2, len(ids) + 1):
        for chosen in combinations(ids[:_MAX_COMBINED], size) if size <= _MAX_COMBINED else [ids[:size]]:
            if chosen != ids[:size]:
                most -= 1
                if most < 0:
                    continue
            out[chosen] = max(saved(chosen), *(share for other, share in out.items() if set(other) < set(chosen)))
    return out
