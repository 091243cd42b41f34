"""What every finding keeps to, whatever its rule: it rests on something, and its severity fits what it promises."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import pytest

from gputop.analysis.results import Analysis, RankWallTime
from gputop.core.findings import MEDIUM_SHARE, Finding
from gputop.render.finding_text import gain_text
from gputop.render.step_parts import PART_BY_ID
from gputop.text.units import seconds

_NOTHING = re.compile(r"(?<![\d.,])0(?:\.0+)? (?:%|s|ms|µs|B|[kMG]i?B)(?!\w)")


def several(analysis: Analysis) -> Iterator[Finding]:
    for finding in analysis.findings:
        yield finding
        yield from finding.consequences


def check_account(analysis: Analysis) -> None:
    """Each line of the account sums to its rank's recording, part by part, and in the steps to their mean."""
    account, wall, steps = analysis.account, analysis.wall_time, analysis.steps
    assert account is not None and wall is not None
    ranks = {rank.rank: rank for rank in wall.ranks if isinstance(rank, RankWallTime)}
    for line in account.lines:
        recorded: dict[str, float] = {}
        for part in line.parts:
            assert part.time_s > 0 and (part.id == part.of or part.id in PART_BY_ID)
            recorded[part.of] = recorded.get(part.of, 0.0) + part.time_s
        rank = ranks.get(line.rank, wall)
        for id_ in {part.id for part in rank.parts if part.time_s} - {"unrecorded"}:
            assert recorded.pop(id_) == pytest.approx(
                math.fsum(part.time_s for part in rank.parts if part.id == id_), abs=1e-8)
        assert recorded.keys() <= {"unrecorded"}  # with what others recorded of the steps, and this rank did not
        judged_s = math.fsum(part.time_s for part in line.parts if part.id in PART_BY_ID)
        assert judged_s == pytest.approx(account.steps * account.mean_s, abs=1e-8) or not judged_s
    if steps is not None:
        assert (account.basis, account.steps) == (steps.unit, steps.count)
        assert account.mean_s == pytest.approx(steps.mean_s, abs=1e-9)
        assert analysis.breakdown == account.breakdown


def check_claims(analysis: Analysis) -> None:
    """No finding is about more than there is, none saves more than it is about, and what it saves is one number."""
    account, wall = analysis.account, analysis.wall_time
    assert account is not None and wall is not None
    there = account.seconds
    for finding in several(analysis):
        gain = finding.gain
        assert all(0 < time_s <= there[part] + 1e-9 for part, time_s in finding.claims.items()), finding.id
        if not gain.step_time or gain.claim is None:
            assert not gain_text(finding) or gain.step_time
            continue
        if "unrecorded_ratio" in finding.evidence:  # of the job while nothing records it: no share of the recorded step
            assert gain.before_s is None
            continue
        whole_s = wall.recorded_s if gain.per == "recording" else account.steps * account.mean_s
        if gain.per != "sample":
            assert gain.step_time * whole_s <= math.fsum(finding.claims.values()) + 0.001 * whole_s, finding.id
        assert (gain.before_s is not None) == (gain.per == "step" and analysis.steps is not None)
        if gain.before_s is not None and gain.after_s is not None:
            assert gain.before_s == pytest.approx(account.mean_s) and 0 <= gain.step_time <= 1
            assert gain.after_s == pytest.approx(gain.before_s - gain.step_time * account.mean_s)
            assert not (text := gain_text(finding)) or f" → {seconds(gain.after_s)}" in text


def check_evidence(analysis: Analysis) -> None:
    check_account(analysis)
    check_claims(analysis)
    kernels = max((gpu.kernels for gpu in analysis.gpus), default=0)
    for finding in several(analysis):
        evidence = f"{finding.title}. {finding.why.split('. ')[0]}"
        assert not _NOTHING.search(evidence), evidence
        gain = finding.gain
        if finding.id == "sixteen_bit_unused":
            continue  # of TF32, whose speedup in 16 bits only a test shows: a remark
        if finding.severity == "low" and gain.per == "step" and gain.step_time and kernels >= 20:
            assert gain.step_time < MEDIUM_SHARE, (finding.title, gain.step_time)
