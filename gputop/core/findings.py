"""Results of the rules: a finding with its evidence, or an abstention with what is missing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import force_setattr

Severity = Literal["high", "medium", "low"]

# Share of the step a cure would save, from the contract in docs/concepts/how-it-decides.md.
HIGH_SHARE = 0.15
MEDIUM_SHARE = 0.05
Claim = Literal["measured", "at most", "at least", "about"]

# Share of it by which a fix brings more or less than "about" so much: 22 of 22 measured (benchmarks/about.md).
ABOUT = 1 / 3
_NEARLY = 0.75
MIN_SHARE = 0.01  # what a replay shows to save less is not raised
LARGE_SHARE = 0.1  # share of the step: what a rule judged so large does not vanish because a replay saves less of it


class Gain(Struct, frozen=True):
    """The one saving of a finding, as a share of today's time (0.31: 31% less), and how it was computed. Whatever names
    a saving reads this.

    ``step_time`` is the share of the mean time per step or, with ``per`` "sample", of the time per training sample: a
    larger batch makes the step longer and the epoch shorter. With "recording" it is the share of the recorded time, of
    a trace without steps or of all that lies around them. It is None where no figure can be given; ``how`` then says
    why. ``before_s`` is the mean step of today, ``after_s`` that with the fix; None where the share is not of a step.

    ``claim`` says how the share relates to what the fix brings: "measured" by a replay of the recorded steps, "at
    most" or "at least" that, or "about" (give or take :data:`ABOUT` of it) where it is no bound either way, as where it
    rests on a usual factor; None without a share. ``by`` says how it was had: "replay", or "bound" where a formula gave
    it. ``assumption`` is a sentence that it rests on. ``together`` is the share that a replay saves with this fix and
    those of all findings before it in the list; None: not replayed. ``at_most`` (of a replay), ``at_least`` and
    ``estimate`` say in older documents what ``claim`` does, and are filled from it.
    """

    step_time: float | None
    how: str
    per: Literal["step", "sample", "recording"] = "step"
    by: Literal["replay", "bound"] | None = None
    assumption: str = ""
    together: float | None = None
    at_most: bool = False
    at_least: bool = False
    estimate: bool = False
    claim: Claim | None = None
    before_s: float | None = None

    def __post_init__(self) -> None:
        claim = self.claim
        if claim is None and self.step_time is not None:  # of a document before the claims
            claim = "at least" if self.at_least else "about" if self.estimate else (
                "at most" if self.at_most or self.by != "replay" else "measured")
        for name, value in (("claim", claim), ("at_most", claim == "at most" and self.by == "replay"),
                            ("at_least", claim == "at least"), ("estimate", claim == "about")):
            force_setattr(self, name, value)

    @property
    def after_s(self) -> float | None:
        return None if self.before_s is None or self.step_time is None else self.before_s * (1 - self.step_time)


class CombinedGain(Struct, frozen=True):
    """Saving of the fixes of several findings (ids) at once by a replay, as a share of today's step."""

    findings: tuple[str, ...]
    step_time: float


class Culprit(Struct, frozen=True):
    """Event or op that a finding is about, by the name that the trace gives it.

    ``kind`` is "layer" (several ops whose names begin alike: "teacher/*"), "op", "host" (an event on the host), "stage"
    (of tf.data), "thread" (that launches), or "line" (of Python: "metrics.py:112 confusion_matrix").
    ``time_s`` is per step and GPU, or as ``per`` says; None: not known. ``names`` is how many different ops it sums;
    the last of a list sums what is left and has the name "". ``only_on``: the GPUs that alone run it, where others of
    the job do not; ``more_on``: those on which it takes longer than on the others, by ``time_s``. ``source`` is its
    most expensive line ("train.py:31"). ``gpu`` and ``at_s`` (since the trace's origin) are where its longest event
    begins; without ``gpu`` that is on the host. GPUs have the job's own numbers. ``traced``: a line that the trace's
    own tracer recorded, and not samples of stacks.
    """

    name: str
    kind: str
    time_s: float | None = None
    per: str = "step"
    names: int = 1
    only_on: tuple[int, ...] = ()
    source: str = ""
    gpu: int | None = None
    at_s: float | None = None
    traced: bool = False
    more_on: tuple[int, ...] = ()


class Finding(Struct, frozen=True, kw_only=True):
    """One cause, with the numbers it rests on and what to do. ``origin`` is "trace", "live" or "fleet".

    The fields stand in the order in which documents have them.

    The severity of a trace finding follows from the share of the step it costs (:func:`severity_of`). Telemetry shows
    no steps: the severity of a live finding is the judgment of its rule, from the figures in ``evidence``, and its gain
    has no number. ``consequences`` are findings that this one explains: with it they would go, so they are no rivals.
    ``gpus`` are NVML indices in a live finding; in one from a trace they are the numbers that the job itself gives its
    GPUs (CUDA_VISIBLE_DEVICES renumbers them), until :func:`gputop.session.gpu_numbers.on_node` has made them NVML's.
    """

    id: str
    severity: Severity
    title: str
    why: str
    evidence: Mapping[str, int | float]  # base units, the unit in the name: wait_s, share_ratio, …
    action: str
    snippet: str | None = None
    gain: Gain
    gpus: tuple[int, ...] = ()
    source: str  # where the rule and its limits come from
    origin: Literal["trace", "live", "fleet"] = "trace"
    consequences: tuple[Finding, ...] = ()
    # Of a trace: the seconds of the recording that it is about, by part of the account
    # (gputop.analysis.results.Account), no more than the account has of each.
    claims: Mapping[str, float] = field(default_factory=dict)
    ncu: str = ""  # of kernels: the command that has Nsight Compute profile the one that takes most time
    culprits: tuple[Culprit, ...] = ()  # those of most time first; empty where no name is known
    yours: str = ""  # of a rule of the user's own: the file and line, or the package, that it stands in
    brief: str = ""  # of a live finding: ``why`` as one short sentence, for a line on a screen
    unknown: str = ""  # of a live finding: what a capture or the stacks of the ranks would show, "which copies?"

    @property
    def ids(self) -> frozenset[str]:
        """Ids of this finding and of all that it explains."""
        return frozenset({self.id}).union(*(f.ids for f in self.consequences))


class Problem(Struct, frozen=True):
    """Error and its fix, as documents have them."""

    message: str
    fix: str = ""


class Abstained(Struct, frozen=True):
    """A rule that abstained: what it would have needed, and how to get that."""

    id: str
    missing: str


def ids_by_missing(abstained: Iterable[Abstained]) -> dict[str, list[str]]:
    """The rules that abstained, by what is missing for them."""
    ids: dict[str, list[str]] = {}
    for rule in abstained:
        ids.setdefault(rule.missing, []).append(rule.id)
    return ids


class TraceNote(Struct, frozen=True):
    """Property of a trace that limits what can be concluded from it."""

    id: str  # dropped_events, empty_device_plane, truncated, capture_error, no_steps, …
    message: str


class Advice(Struct, frozen=True):
    """All a set of rules had to say: findings in order of what they save, and abstentions.

    ``limit`` says what bounds the job where nothing is wrong; empty where that is not known. ``what_if`` has sets of
    two findings and more.
    """

    findings: tuple[Finding, ...] = ()
    abstained: tuple[Abstained, ...] = field(default=())
    limit: str = ""
    what_if: tuple[CombinedGain, ...] = ()


def with_cures(findings: Iterable[Finding], chosen: Collection[str], what_if: Iterable[CombinedGain],
               ) -> tuple[float | None, list[tuple[Finding, float]] | None]:
    """The share of the step that the cures of the chosen findings save at once, None where that was not replayed;
    and the other findings with the share that each adds to it, 1% at least, most first.

    The second is None where one of the others was not replayed with those chosen.
    """
    several = [f for f in findings if f.gain.by == "replay"]
    saved = {frozenset({f.id}): f.gain.step_time for f in several}
    saved |= {frozenset(gain.findings): gain.step_time for gain in what_if}
    share = saved.get(frozenset(chosen))
    others = [(f, saved.get(frozenset({f.id, *chosen}))) for f in several if f.id not in chosen]
    if share is None or any(both is None for _, both in others):
        return share, None
    more = [(f, both - share) for f, both in others if both is not None and both - share >= MIN_SHARE]
    return share, sorted(more, key=lambda pair: -pair[1])


def severity_of(share: float) -> Severity:
    """Severity of a cause that costs this share of the step."""
    if share >= HIGH_SHARE:
        return "high"
    return "medium" if share >= MEDIUM_SHARE else "low"


_ORDER = {"high": 0, "medium": 1, "low": 2}


def at_most(severity: Severity, most: Severity) -> Severity:
    """The lower of the two."""
    return max(severity, most, key=_ORDER.__getitem__)


_LEAST = {"high": HIGH_SHARE, "medium": MEDIUM_SHARE, "low": 0.0}  # what a finding without a figure counts for


def ranked(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings in the order of the time they save, remarks (of low severity) last. One without a figure stands behind
    all that save as much as its severity says, and an upper bound behind what saves nearly as much of the same parts of
    the account and is none."""
    several = tuple(findings)

    def order(finding: Finding) -> tuple[bool, float, bool, int, str]:
        share, behind = finding.gain.step_time, finding.gain.step_time is None
        if share is not None and finding.gain.claim == "at most":
            least, claimed_s = _NEARLY * share, _NEARLY * sum(finding.claims.values())
            surer = [f.gain.step_time for f in several if f.severity != "low" and f.gain.claim not in (None, "at most")
                     and least <= (f.gain.step_time or 0.0) <= share
                     and 0 < claimed_s <= sum(min(s, f.claims.get(part, 0.0)) for part, s in finding.claims.items())]
            share, behind = min([share, *filter(None, surer)]), bool(surer)
        return (finding.severity == "low", -(_LEAST[finding.severity] if share is None else share), behind,
                _ORDER[finding.severity], finding.id)

    return tuple(sorted(several, key=order))


def collect(outcomes: Iterable[Finding | Abstained | None]) -> Advice:
    """Sort the outcomes of rules (None: judged, nothing wrong) into an :class:`Advice`."""
    judged = list(outcomes)
    return Advice(ranked(outcome for outcome in judged if isinstance(outcome, Finding)),
                  tuple(outcome for outcome in judged if isinstance(outcome, Abstained)))
