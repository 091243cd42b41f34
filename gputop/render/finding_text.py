"""Short texts about findings, the same on the screen and in every export."""

from __future__ import annotations

from gputop.core.findings import Finding
from gputop.text.units import seconds

NOTHING_FOUND = "Nothing found that costs time."


def gain_texts(finding: Finding, step_s: float | None = None) -> tuple[str, ...]:
    """The estimated saving, longest text first: "saves up to 47 % (344 → 184 ms)", "up to 47 %: 344 → 184 ms",
    "saves up to 47 %"; none where there is no estimate. ``step_s``: the step time of today, where it is known."""
    gain = finding.gain.step_time
    if not gain or gain < 0.005:
        return ()
    share = f"up to {100 * gain:.0f} %"
    if finding.gain.per == "sample":
        return f"saves {share} per training sample", f"{share} per sample"
    if step_s is None:
        return f"saves {share} of the step", f"saves {share}"
    before, after = seconds(step_s), seconds(step_s * (1 - gain))
    if before.split()[-1:] == after.split()[-1:]:
        before = before.split()[0]
    return f"saves {share} ({before} → {after})", f"{share}: {before} → {after}", f"saves {share}"


def gain_text(finding: Finding, step_s: float | None = None) -> str:
    """The longest of :func:`gain_texts`; empty where there is no estimate."""
    return next(iter(gain_texts(finding, step_s)), "")
