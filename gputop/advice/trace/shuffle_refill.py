"""The shuffle buffer of tf.data, filled again at the start of each epoch while the training waits."""

from __future__ import annotations

from gputop.advice.fix_code import code
from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import NO_GPU, TraceFacts
from gputop.advice.trace.job import KERAS, Job
from gputop.advice.verdict import ONCE, Explanation, Missing, Verdict, known
from gputop.analysis.gpu.device_time import any_busy
from gputop.analysis.host.shuffle_fills import (
    OverviewSamples,
    ShuffleFill,
    samples_of,
    shuffle_fills,
    waits_for_fills,
)
from gputop.analysis.host.tf_data import iterator_paths
from gputop.core.findings import Culprit
from gputop.text.units import counted, percent, seconds


class ShuffleRefill(Verdict, frozen=True, kw_only=True):
    times: int  # fills that were seen, in the detail or by samples
    longest: ShuffleFill | None  # of the detail; None: the samples alone show that it fills
    recorded_s: float  # of the detail
    seen: OverviewSamples


def judge_shuffle_refill(facts: TraceFacts) -> ShuffleRefill | Missing | None:
    """The loop waits while a shuffle draws all elements of its buffer, before it gives the first one."""
    trace, fills = facts.trace, shuffle_fills(facts.trace)
    seen = max(map(samples_of, trace.overviews.values()), key=lambda one: (one.filling, one.samples),
               default=OverviewSamples())
    if not fills and not seen.filling:
        return None if len(iterator_paths(trace)[0]) else Missing("calls to tf.data iterators")
    waits = waits_for_fills(trace, any_busy(trace, facts.gpu_timelines))
    recorded_s, ranks = (trace.window_ns[1] - trace.window_ns[0]) / 1e9, max(len(trace.hosts), 1)
    share = (waits.total / 1e9 + seen.filled_s) / (recorded_s + seen.seconds)
    if share < limit("shuffle_refill.share"):
        return None
    if not fills and seen.filling < limit("shuffle_refill.samples"):
        return Missing("a second sample in which the shuffle buffer is filling, because the first may be coincidence; "
                       "capture a longer trace")
    times = max(len(fills) + seen.rounds, 1)
    longest = max(fills, key=lambda fill: fill.seconds, default=None)
    return ShuffleRefill(
        gpus=facts.active_numbers, share=share, claim="at most" if times > 1 else None,
        severest="high" if times > 1 else "medium", spans=dict.fromkeys(facts.parts or (NO_GPU,), waits),
        times=-(-times // ranks), longest=longest, recorded_s=recorded_s, seen=seen,
        culprits=(Culprit("Shuffle", "stage", waits.total / 1e9 or None, "window",
                          at_s=longest.start_ns / 1e9 if longest is not None else None),))


def describe_shuffle_refill(v: ShuffleRefill, job: Job) -> Explanation:
    fill, seen = v.longest, v.seen
    why = "A shuffle returns its first element only after tf.data has filled its buffer, and the loop waits until then."
    if fill is not None:
        why += (f" In the {seconds(v.recorded_s)} recorded in detail, a fill takes {'' if fill.whole else 'at least '}"
                f"{seconds(fill.seconds)} for {fill.elements:,} elements of the {fill.stage} stage"
                f"{'' if fill.whole else ' (the start or end of the fill was not recorded)'}. Recording the elements "
                "slows the fill down.")
    if seen.samples:
        why += (f" In the {seconds(seen.seconds)} after the detailed recording, the buffer was filling in "
                f"{seen.filling} of {counted(seen.samples, 'sample')} (about {seconds(seen.filled_s)}).")
    if v.times > 1:
        why += f" The recording shows {v.times} fills."
    return Explanation(
        title=(f"The loop waits {seconds(fill.seconds)} for a shuffle buffer to fill (once in this recording)"
               if v.claim is None and fill is not None else
               f"Filling the shuffle buffer takes {percent(v.share)} of the time"), why=why,
        evidence=known({
            "fill_s": fill.seconds if fill is not None else None, "share_ratio": v.share, "recorded_s": v.recorded_s,
            "fills_count": float(v.times), "elements_count": float(fill.elements) if fill is not None else None,
            "samples_count": float(seen.samples) if seen.samples else None,
            "filling_samples_count": float(seen.filling) if seen.samples else None}),
        action=("Each epoch creates a new iterator, which fills the buffer again. " if v.times > 1 else
                "If each epoch creates a new iterator, it fills the buffer again. ") + (
            "Create one iterator for all epochs: call repeat right after shuffle, and set the number of steps per "
            "epoch. Or make filling cheaper: use a smaller buffer, shuffle file names or indices before reading the "
            "data, or cache or store the results of the stages before shuffle."),
        snippet=code("shuffle_refill", "keras" if job.loop in KERAS else "tensorflow"),
        gain=ONCE if v.claim is None else (
            "assumes that no wait for a fill remains and that the pipeline is otherwise faster than the steps"),
        per="recording", source=source("shuffle_refill.share"))
