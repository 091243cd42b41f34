"""The shuffle buffer of tf.data, filled again at the start of each epoch while the training waits."""

from __future__ import annotations

from gputop.advice.fix_code import code
from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import NO_GPU, TraceFacts
from gputop.advice.trace.job import KERAS, Job
from gputop.advice.verdict import ONCE, Explanation, Missing, Verdict, known
from gputop.analysis.host.shuffle_fills import OverviewSamples, samples_of, shuffle_fills, waits_for_fills
from gputop.analysis.host.tf_data import iterator_paths
from gputop.analysis.steps.phases import EVALUATION, PREDICTION
from gputop.core.findings import Culprit
from gputop.text.units import counted, percent, seconds
from gputop.trace.intervals import EMPTY, merge

_EACH_EPOCH = "Each epoch makes a new iterator, which fills its buffer."
_IF_EACH_EPOCH = "If each epoch makes a new iterator, each fills its buffer."


class ShuffleRefill(Verdict, frozen=True, kw_only=True):
    times: int  # fills that were seen, in the detail or by samples
    fill_s: float | None  # that the longest of the detail takes; None: the samples alone show it
    whole: bool  # its begin and end were recorded
    elements: int | None  # drawn meanwhile
    stage: str  # below the shuffle
    recorded_s: float  # of the detail
    samples: int
    filling: int  # samples in which the buffer fills
    sampled_s: float  # over which they are spread


def judge_shuffle_refill(facts: TraceFacts) -> ShuffleRefill | Missing | None:
    """The training waits while a shuffle draws all elements of its buffer, before it gives the first one."""
    trace, fills = facts.trace, shuffle_fills(facts.trace)
    samples = [seen for seen in map(samples_of, trace.overviews.values()) if seen.filling]
    if not fills and not any(any(seen.filling) for seen in samples):
        return None if len(iterator_paths(trace)[0]) else Missing("calls of tf.data's iterators")
    if facts.steps is not None and facts.steps.times.phase in (EVALUATION, PREDICTION):
        return Missing("training steps: all steps of this window are " + facts.steps.times.phase)
    waits = waits_for_fills(trace, merge(EMPTY, *(timeline.busy for timeline in facts.gpu_timelines)))
    recorded_s, ranks = (trace.window_ns[1] - trace.window_ns[0]) / 1e9, max(len(trace.hosts), 1)
    seen = max(samples, key=lambda one: sum(one.filling), default=None)
    sampled_s = _sampled_s(seen) if seen is not None else 0.0
    ratio = sum(seen.filling) / len(seen.filling) if seen is not None else 0.0
    share = (waits.total / 1e9 + ratio * sampled_s) / (recorded_s + sampled_s)
    if share < limit("shuffle_refill.share"):
        return None
    if not fills and seen is not None and sum(seen.filling) < limit("shuffle_refill.samples"):
        return Missing("a second sample in which the shuffle buffer fills, because one can be chance: capture longer")
    times = max(len(fills) + (seen.rounds if seen is not None else 0), 1)
    longest = max(fills, key=lambda fill: fill.end_ns - fill.start_ns, default=None)
    return ShuffleRefill(
        gpus=facts.active_numbers, share=share, claim="at most" if times > 1 else None,
        severest="high" if times > 1 else "medium", spans=dict.fromkeys(facts.parts or (NO_GPU,), waits),
        times=-(-times // ranks),
        fill_s=(longest.end_ns - longest.start_ns) / 1e9 if longest is not None else None,
        whole=longest is not None and longest.whole, elements=longest.elements if longest is not None else None,
        stage=longest.stage if longest is not None else "", recorded_s=recorded_s,
        samples=len(seen.filling) if seen is not None else 0, filling=sum(seen.filling) if seen is not None else 0,
        sampled_s=sampled_s, culprits=(Culprit("Shuffle", "stage", waits.total / 1e9 or None, "window", at_s=(
            longest.start_ns / 1e9 if longest is not None else None)),))


def _sampled_s(samples: OverviewSamples) -> float:
    """The time that samples stand for: from the first to the last one, and the distance of two."""
    begin = samples.spans.start
    return float(begin[-1] - begin[0]) / 1e9 * len(begin) / max(len(begin) - 1, 1)


def describe_shuffle_refill(v: ShuffleRefill, job: Job) -> Explanation:
    why = "Before a shuffle gives its first element, tf.data fills its buffer, and the training waits for that."
    if v.fill_s is not None:
        why += (f" In the {seconds(v.recorded_s)} of detail a fill takes {'' if v.whole else 'at least '}"
                f"{seconds(v.fill_s)}: {v.elements:,} elements of the stage {v.stage}"
                f"{'' if v.whole else ', its begin or its end was not recorded'}. Recording them makes it longer.")
    if v.samples:
        why += (f" In {v.filling} of {v.samples} samples over {seconds(v.sampled_s)} after the detail the buffer was "
                f"filling: about {seconds(v.sampled_s * v.filling / v.samples)}.")
    if v.times > 1:
        why += f" In all that was seen {counted(v.times, 'time')}."
    return Explanation(
        title=(f"Once in this recording the training waits {seconds(v.fill_s or 0.0)} for a shuffle buffer to fill"
               if v.claim is None and v.fill_s else
               f"Filling the shuffle buffer takes {percent(v.share)} of the time"), why=why,
        evidence=known({
            "fill_s": v.fill_s, "share_ratio": v.share, "recorded_s": v.recorded_s, "fills_count": float(v.times),
            "elements_count": float(v.elements) if v.elements is not None else None,
            "samples_count": float(v.samples) if v.samples else None,
            "filling_samples_count": float(v.filling) if v.samples else None}),
        action=f"{_EACH_EPOCH if v.times > 1 else _IF_EACH_EPOCH} Make one for all epochs: call repeat right after "
               "shuffle, and set the steps of an epoch. Or make a fill cheaper: a smaller buffer; shuffle file names "
               "or indices before they are read; cache before shuffle, or store what the stages before it make.",
        snippet=code("shuffle_refill", "keras" if job.loop in KERAS else "tensorflow"),
        gain=ONCE if v.claim is None else "all waits for fills, if the pipeline is otherwise faster than the steps",
        per="recording", source=source("shuffle_refill.share"))
