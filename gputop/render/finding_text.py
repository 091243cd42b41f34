"""Short texts about findings, the same on the screen and in every export."""

from __future__ import annotations

from gputop.core.findings import Finding

NOTHING_FOUND = "Nothing found that costs time."


def gain_text(finding: Finding) -> str:
    """The estimated saving: "−38 % step"; empty where there is no estimate."""
    gain = finding.gain.step_time
    if not gain or gain < 0.005:
        return ""
    return f"−{100 * gain:.0f} % " + ("step" if finding.gain.per == "step" else "per sample")
