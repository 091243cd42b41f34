"""Short texts about findings, the same on the screen and in every export."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from gputop.core.findings import CombinedGain, Culprit, Finding, with_cures
from gputop.text.units import percent, printable, ranges, seconds

NOTHING_FOUND = "Nothing found that costs time."
_SHOWN_CULPRITS, _MIN_NAME = 3, 16


def gain_texts(finding: Finding, step_s: float | None = None) -> tuple[str, ...]:
    """The estimated saving, longest text first: "saves 47 % (344 → 184 ms)", "47 %: 344 → 184 ms", "saves 47 %", an
    upper bound with "up to"; none where there is no estimate. ``step_s``: the step time of today, where it is known."""
    gain = finding.gain.step_time
    if not gain or gain < 0.005:
        return ()
    share = f"{'' if finding.gain.by == 'replay' else 'up to '}{100 * gain:.0f} %"
    if finding.gain.per == "sample":
        return f"saves {share} per training sample", f"{share} per sample"
    if step_s is None:
        return f"saves {share} of the step", f"saves {share}"
    times = _times(step_s, gain)
    return f"saves {share} ({times})", f"{share}: {times}", f"saves {share}"


def _times(step_s: float, gain: float) -> str:
    """The step time of today and with the gain: "344 → 184 ms"."""
    before, after = seconds(step_s), seconds(step_s * (1 - gain))
    if before.split()[-1:] == after.split()[-1:]:
        before = before.split()[0]
    return f"{before} → {after}"


def what_if_text(findings: Iterable[Finding], chosen: Collection[str], what_if: Iterable[CombinedGain],
                 step_s: float | None) -> str:
    """What is left of the step with the cures of the chosen findings, and which other finding saves most then."""
    head = f"With the {len(chosen)} chosen:" if len(chosen) > 1 else "With the one chosen:"
    share, others = with_cures(findings, chosen, what_if)
    if share is None:
        return f"{head} not computed"
    less = f"{percent(share)} less"
    text = f"{head} {less} of the step" if step_s is None else f"{head} {_times(step_s, share)} ({less})"
    if others is None:
        return text
    if not others:
        return f"{text}; by replay no other adds 1 %"
    following, more = others[0]
    return f"{text}; next: {following.title} ({percent(more)} more)"


def gain_text(finding: Finding, step_s: float | None = None) -> str:
    """The longest of :func:`gain_texts`; empty where there is no estimate."""
    return next(iter(gain_texts(finding, step_s)), "")


# Endings of names that the figure's unit says again, see gputop.text.units.figure.
_UNITS = ("_bytes_per_s", "_per_s", "_bytes", "_ratio", "_count", "_ns", "_s", "_w", "_c", "_hz")
_SPELLED = {"gpu": "GPU", "gpus": "GPUs", "gpu0": "GPU 0", "sm": "SM", "dram": "DRAM", "pcie": "PCIe", "rx": "received",
            "tx": "sent", "cpu": "CPU", "cpus": "CPUs", "fp32": "FP32", "h2d": "to the GPU", "d2h": "to the host",
            "xid": "Xid", "ecc": "ECC", "p95": "95th percentile", "us": "µs", "20us": "20 µs"}
# Names that say too little by themselves.
_LABELS = {
    "share_ratio": "share of the time", "window_s": "measured over", "more_s": "longer by",
    "usual_step_s": "other steps take", "wanted_s": "at the rate of the slowest link", "late_s": "late by",
    "late_gpu_part_ratio": "part of the latest GPU in it", "late_by_host_ratio": "late because of the host",
    "last_to_arrive_count": "times it came last", "free_compute_s": "compute with no communication beside it",
    "one_alone_ratio": "only one GPU computes", "one_alone_by_chance_ratio": "by chance it would be",
    "any_active_ratio": "any GPU computes", "slow_share_ratio": "slower, of the readings at work",
    "below_20us_ratio": "kernels below 20 µs", "held_up_ratio": "of the launch wait, held up",
}


def evidence_label(name: str) -> str:
    """A name of a finding's evidence in words: "launch_wait_s" is "launch wait"; its unit stands with the figure."""
    if name in _LABELS:
        return _LABELS[name]
    for unit in _UNITS:
        if name.endswith(unit) and len(name) > len(unit):
            name = name.removesuffix(unit)
            break
    return " ".join(_SPELLED.get(word, word) for word in name.split("_"))


def gain_basis(finding: Finding) -> str:
    """Which way the estimated saving was had, and what it assumes, in sentences."""
    gain = finding.gain
    if gain.by is None:
        return gain.how
    text = f"{'By a replay of the recorded steps' if gain.by == 'replay' else 'An upper bound'}. {gain.assumption}"
    if gain.together is not None and gain.step_time is not None and gain.together > gain.step_time:
        text += f" Together with the findings above: {percent(gain.together)}."
    return text


def culprits_text(finding: Finding, width: int | None = None) -> str:
    """What the finding is about, by name: "Only on GPU 0: teacher/* 159 ms, compute_metrics/* 27 ms per step, and 14
    more ops"; empty where no name is known. ``width``: fewer names, and of the last one its end, so that it fits."""
    named = [culprit for culprit in finding.culprits if culprit.name]
    if not named:
        return ""
    most = min(_SHOWN_CULPRITS, len(named))
    text = _culprits(finding.culprits, named[:most])
    if width is None or len(text) <= width:
        return text
    for shown in range(most, 0, -1):
        brief = [replace(own, name=name) for own, name in zip(named, _endings(named[:shown]), strict=False)]
        text = _culprits(finding.culprits, brief)
        if len(text) <= width:
            return text
    name = brief[0].name
    room = max(len(name) - (len(text) - width), _MIN_NAME)
    return _culprits(finding.culprits, [replace(brief[0], name="…" + name[1 - room:])])[:width]


def _endings(several: Sequence[Culprit]) -> list[str]:
    """The ends of their names, which tell most, as long as it takes to tell them apart."""
    names = [printable(culprit.name) for culprit in several]
    parts = [name.split("/") for name in names]
    for depth in range(1, max(map(len, parts))):
        ends = ["/".join(own[-depth - (own[-1] == "*"):]) for own in parts]
        if len(set(ends)) == len(set(names)):
            return [name if len(name) <= len(end) + 2 else f"…/{end}" for name, end in zip(names, ends, strict=True)]
    return names


def _culprits(found: Sequence[Culprit], shown: Sequence[Culprit]) -> str:
    first = shown[0]
    kinds = " and ".join(f"{kind}s" for kind in dict.fromkeys(culprit.kind for culprit in shown))
    where = (f"Only on GPU {ranges(first.only_on)}" if first.only_on else
             "On the host" if first.kind == "host" else kinds.capitalize())
    parts = []
    for culprit in shown:
        time = "" if culprit.time_s is None else f" {seconds(culprit.time_s)}"
        parts.append(printable(culprit.name) + time + (f" ({printable(culprit.source)})" if culprit.source else ""))
    per = "" if first.time_s is None else " in the window" if first.per == "window" else f" per {printable(first.per)}"
    more = sum(culprit.names for culprit in found[len(shown):])
    rest = f", and {more} more" + (f" op{'' if more == 1 else 's'}" if first.kind != "host" else "") if more else ""
    return f"{where}: {', '.join(parts)}{per}{rest}"
