"""A finding in few words, the same on the screen and in every export."""

from __future__ import annotations

from gputop.core.findings import Finding


def gain_text(finding: Finding) -> str:
    """What a cure would bring: "−38 % step", or nothing where no figure can be given."""
    gain = finding.gain.step_time
    if not gain or gain < 0.005:
        return ""
    return f"−{100 * gain:.0f} % " + ("step" if finding.gain.per == "step" else "per sample")
