"""What every finding keeps to, whatever its rule: it rests on something, and its severity fits what it promises."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gputop.analysis.results import Analysis
from gputop.core.findings import MEDIUM_SHARE, Finding

_NOTHING = re.compile(r"(?<![\d.,])0(?:\.0+)? (?:%|s|ms|µs|B|[kMG]i?B)(?!\w)")


def several(analysis: Analysis) -> Iterator[Finding]:
    for finding in analysis.findings:
        yield finding
        yield from finding.consequences


def check_evidence(analysis: Analysis) -> None:
    kernels = max((gpu.kernels for gpu in analysis.gpus), default=0)
    for finding in several(analysis):
        evidence = f"{finding.title}. {finding.why.split('. ')[0]}"
        assert not _NOTHING.search(evidence), evidence
        gain = finding.gain
        if finding.id == "sixteen_bit_unused":
            continue  # of TF32, whose speedup in 16 bits only a test shows: a remark
        if finding.severity == "low" and gain.per == "step" and gain.step_time and kernels >= 20:
            assert gain.step_time < MEDIUM_SHARE, (finding.title, gain.step_time)
