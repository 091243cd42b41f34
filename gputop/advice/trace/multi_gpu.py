"""Several GPUs: one does more work than the others, they work by turns, or begin by turns."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from statistics import fmean, median

import numpy as np

from gputop.advice import savings
from gputop.advice.fix_code import code, joined
from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import TraceFacts
from gputop.advice.trace.job import Job
from gputop.advice.verdict import Explanation, Missing, Verdict, known
from gputop.analysis.gpu.device_time import GpuTimeline, gpu_number
from gputop.analysis.layers.culprits import Events, Excess, excess_of
from gputop.analysis.results import LaunchOrder, Replicas, ReplicaWork
from gputop.analysis.what_if.cure import Cure
from gputop.core.findings import Culprit
from gputop.text.units import percent, ranges, seconds
from gputop.trace.intervals import EMPTY, Spans, intersect, merge, subtract, union

_GPU0 = (
    "Keep metrics, evaluation, and variables off GPU 0, and give every replica the same share of the batch (a global "
    "batch size divisible by the number of GPUs)."
)
_SLOWER = (
    "Compare this GPU's clocks, temperature, power, and processes with those of the others while the job runs, in "
    "gputop or nvidia-smi. Heat, a power limit, locked clocks, or another process may slow it down, or it is faulty."
)
_OWN_OPS_SHARE = 0.5  # share of what it takes longer, in ops that the others do not run: these alone are named
_OTHER = ("Give every replica the same share of the work: batches of equal size, with sequences of equal length or "
          "graphs of equal size.")
# -- replica_imbalance, gpu0_oversubscribed ---------------------------------------------------------


class Imbalance(Verdict, frozen=True, kw_only=True):
    heavy: int  # the GPU with most work
    compute_s: float  # its compute per step, or in the window
    others_compute_s: float  # median of the others
    kernels_ratio: float  # how many times as many kernels it runs
    own_work: bool  # more kernels: work that the others do not have, so it cannot be dealt out
    longer_alike: float | None = None  # of its ops, by time, those that take longer as all do; None: not clear
    blocks_ratio: float | None = None  # how many times as many blocks its kernels have
    alike: str = ""  # all its ops take longer: it is "slower", its kernels are "larger", or it is "unknown" which


def judge_replica_imbalance(facts: TraceFacts) -> Imbalance | None:
    """One GPU computes longer per step than the others, who wait for it.

    The finding is ``gpu0_oversubscribed`` where that GPU is 0. Only compute counts: a GPU
    that waits inside a collective is busy without doing work.
    """
    gpus = facts.active
    work = {gpu.gpu: gpu.compute * gpu.window_s if gpu.compute_s_per_step is None else gpu.compute_s_per_step
            for gpu in gpus}
    heavy = max(work, key=lambda gpu: work[gpu])
    if not work[heavy]:
        return None  # collectives and copies only
    work = {gpu: s for gpu, s in work.items() if s >= limit("replica_imbalance.took_part") * work[heavy]}
    if len(work) < 2:
        return None
    others = median(s for gpu, s in work.items() if gpu != heavy)
    ratio = work[heavy] / others
    if ratio < limit("replica_imbalance.ratio"):
        return None
    launches = {gpu.gpu: gpu.kernels for gpu in gpus if gpu.gpu in work}
    more = launches[heavy] / median(n for gpu, n in launches.items() if gpu != heavy)
    # Longer kernels are a larger share of the batch, which can be dealt out; more of them are work of its own.
    has_own_work = more - 1 >= limit("replica_imbalance.own_kernels") * (ratio - 1)
    excess = _excess(facts, heavy, work)
    alike = "" if excess is None or has_own_work else _alike(excess, more)
    slower = alike == "slower"
    alone = has_own_work or slower  # what the others could not take from it
    share = savings.removed(work[heavy] - (others if alone else fmean(work.values())), facts.period_s)
    if share < limit("replica_imbalance.share"):
        return None
    ratios = {gpu: others / s if alone else sum(work.values()) / len(work) / s
              for gpu, s in work.items() if gpu == heavy or not alone}
    worst = next(timeline for timeline in facts.gpu_timelines if gpu_number(facts.trace, timeline.gpu) == heavy)
    waited = intersect(facts.analyzed_spans, subtract(worst.compute, _others_compute(facts, worst)))
    evened = tuple((timeline.computing, ratios[number]) for timeline in facts.gpu_timelines
                   if (number := gpu_number(facts.trace, timeline.gpu)) in ratios)
    rows = np.concatenate([timeline.computing for timeline in facts.gpu_timelines])
    events: Events | None = Events(rows, only_on=(heavy,))
    if alike:
        events = None
    elif excess is not None:
        events = Events(excess.rows, excess.time_ns, more_on=(heavy,)) if excess.by_op else None
    return Imbalance(
        events=events, longer_alike=excess.alike if excess is not None else None,
        blocks_ratio=excess.blocks if excess is not None else None, alike=alike,
        cure=Cure(scaled=evened, assumes=f"Assumes that GPU {heavy} is as fast as the others." if slower else
                  f"Assumes that GPU {heavy} has as little to do as the others." if has_own_work else
                  "Assumes that the same work is spread evenly over the GPUs."),
        id="gpu0_oversubscribed" if heavy == 0 and not slower else "replica_imbalance", gpus=(heavy,), share=share,
        spans={worst.gpu: waited},
        others_wait={timeline.gpu: waited for timeline in facts.gpu_timelines if timeline is not worst},
        heavy=heavy, compute_s=work[heavy], others_compute_s=others, kernels_ratio=more, own_work=has_own_work)


def _others_compute(facts: TraceFacts, timeline: GpuTimeline) -> Spans:
    """Spans in which any other GPU computes within the steps."""
    return intersect(facts.analyzed_spans, merge(EMPTY, *(
        other.compute for other in facts.gpu_timelines if other is not timeline)))


def _excess(facts: TraceFacts, heavy: int, work: Mapping[int, float]) -> Excess | None:
    """Excess of the GPU's compute time over the others that take part; None where that is mostly in ops that the others
    do not run at all."""
    by_number = {gpu_number(facts.trace, timeline.gpu): timeline for timeline in facts.gpu_timelines}
    others = [by_number[gpu] for gpu in work if gpu != heavy]
    excess = excess_of(facts.trace, by_number[heavy], others, facts.analyzed_spans, facts.calls)
    return excess if excess is not None and excess.own_ns < _OWN_OPS_SHARE * excess.total_ns else None


def _alike(excess: Excess, kernels_ratio: float) -> str:
    """Reason why all ops take longer; "" where some do that others do not."""
    if excess.alike < limit("replica_imbalance.alike"):
        return ""
    same = limit("replica_imbalance.same_work")
    if excess.blocks is None or abs(kernels_ratio - 1) > same or excess.blocks < 1 - same:
        return "unknown"
    return "slower" if excess.blocks <= 1 + same else "larger"


def describe_replica_imbalance(v: Imbalance, job: Job) -> Explanation:
    ratio = v.compute_s / v.others_compute_s
    why = (f"GPU {v.heavy} of the job computes for {seconds(v.compute_s)} per {job.basis}, compared with a median of "
           f"{seconds(v.others_compute_s)} on the other GPUs, which wait for GPU {v.heavy} at every synchronization.")
    if v.own_work:
        why += (f" GPU {v.heavy} runs {v.kernels_ratio:.2f}× as many kernels, so it does work that the others do not.")
    evidence = known({
        "compute_s": v.compute_s, "others_compute_s": v.others_compute_s, "ratio": ratio,
        "kernels_count_ratio": v.kernels_ratio, "share_ratio": v.share, f"{job.basis}_s": job.period_s,
        "longer_alike_ratio": v.longer_alike, "blocks_ratio": v.blocks_ratio})
    if v.alike == "slower":
        why += (f" All kernels of GPU {v.heavy}, not only those of one layer, take longer by the same factor, but have "
                "the same number and size as on the others. The GPU itself is slower, or shared with another process.")
        return Explanation(
            title=f"GPU {v.heavy} of the job takes {ratio:.2f}× as long as the others for the same work", why=why,
            evidence=evidence, action=_SLOWER, snippet=code("replica_imbalance", "clocks"),
            gain="assumes that this GPU is as fast as the others, and that a step takes as long as its slowest GPU",
            source=source("replica_imbalance.ratio", "replica_imbalance.share", "replica_imbalance.alike",
                          "replica_imbalance.same_work"))
    if v.alike in ("larger", "unknown"):
        why += (f" All kernels of GPU {v.heavy}, not only those of one layer, take longer by the same factor. "
                + ("These kernels are larger, so this GPU has a larger part of each batch." if v.alike == "larger" else
                   "This GPU has a larger part of each batch or a lower clock; the trace does not show which."))
    return Explanation(
        title=f"GPU {v.heavy} of the job does {ratio:.1f}× as much work as the others", why=why, evidence=evidence,
        action=_GPU0 if v.heavy == 0 else _OTHER,
        snippet=code("replica_imbalance", *(("alone",) if job.framework == "tensorflow" and not job.strategy else ()),
                     *job.keys),
        gain="assumes that this GPU has as little to do as the others, and that a step takes as long as its slowest GPU"
        if v.own_work
        else "assumes that the same work is spread evenly, and that a step takes as long as its slowest GPU",
        source=source("replica_imbalance.ratio", "replica_imbalance.share"))


class SerialGpus(Verdict, frozen=True, kw_only=True):
    one_alone: float  # share of the time with any compute in which only one GPU computes
    one_alone_by_chance: float  # the same, were the GPUs independent
    any_active: float  # share of the step in which any GPU computes
    most_work_s: float


def _taking_part(replicas: Replicas | None) -> list[ReplicaWork]:
    """GPUs with a tenth of the heaviest one's work and more."""
    work = list(replicas.work or ()) if replicas is not None else []
    most = max((w.compute_s for w in work), default=0.0)
    return [w for w in work if most and w.compute_s >= limit("replica_imbalance.took_part") * most]


def judge_serial_gpus(facts: TraceFacts) -> SerialGpus | Missing | None:
    """The GPUs work by turns: hardly ever two of them at once, far less than by chance."""
    replicas = facts.analysis.replicas
    work = _taking_part(replicas)
    if replicas is None or len(work) < 2:
        return None
    compute = replicas.compute
    if compute is None:
        return Missing(f"data on the work of all GPUs on one clock; {replicas.missing.get('compute', 'unknown')}")
    if compute.serial is None or compute.serial_by_chance is None or compute.serial_by_chance >= 1:
        return None
    overlap = (1 - compute.serial) / (1 - compute.serial_by_chance)
    period = facts.period_s
    share = savings.removed((1 - compute.exactly[0]) * period - max(w.compute_s for w in work), period)
    if overlap > limit("serial_gpus.overlap") or share < limit("serial_gpus.share"):
        return None
    numbers = [w.gpu for w in work]
    rows = np.concatenate([timeline.computing for timeline in facts.gpu_timelines])
    return SerialGpus(
        events=[Events(rows, only_on=(gpu,)) for gpu in numbers],
        spans={timeline.gpu: subtract(_others_compute(facts, timeline), timeline.compute)
               for timeline in facts.gpu_timelines}, gpus=tuple(numbers), share=share, one_alone=compute.serial,
        one_alone_by_chance=compute.serial_by_chance, any_active=1 - compute.exactly[0],
        most_work_s=max(w.compute_s for w in work))


def describe_serial_gpus(v: SerialGpus, job: Job) -> Explanation:
    return Explanation(
        title=f"GPUs {ranges(v.gpus)} work one after another",
        why=f"Only one GPU computes for {percent(v.one_alone)} of the time in which any GPU computes; for independent "
            f"GPUs, the share would be {percent(v.one_alone_by_chance)}. Each GPU waits for the previous one.",
        evidence={"one_alone_ratio": v.one_alone, "one_alone_by_chance_ratio": v.one_alone_by_chance,
                  "any_active_ratio": v.any_active, "share_ratio": v.share, "most_work_s": v.most_work_s},
        action="Give every GPU the whole model and a part of each batch. If one GPU cannot hold the model, pipeline "
               "micro-batches through its parts.",
        snippet=None if job.strategy else code("serial_gpus", job.framework),
        gain="assumes that the same work runs in parallel, and that a step takes as long as the GPU with the most work",
        source=source("serial_gpus.overlap", "serial_gpus.share"))


class StaggeredLaunch(Verdict, frozen=True, kw_only=True):
    first: int
    last: int
    last_launched_s: float  # after the first GPU's launch, median
    late_s: float  # how late the last GPU begins
    per_gpu_s: float
    in_turns: bool  # one thread launches a GPU's step before it turns to the next GPU
    launches: LaunchOrder


def judge_staggered_launch(facts: TraceFacts) -> StaggeredLaunch | Missing | None:
    """The host launches to the GPUs one after the other, so the last one begins its step late."""
    replicas = facts.analysis.replicas
    work = _taking_part(replicas)
    if replicas is None or len(work) < 2:
        return None
    launches = replicas.launches
    if launches is None or launches.delay_median_s is None or launches.span_median_s is None:
        reason = (replicas.missing.get("launches") or replicas.missing.get("first_kernel")
                  or "the launches in each step are unknown")
        return Missing(f"data on the launch times of each GPU's work in each step; {reason}")
    delay = {w.gpu: launches.delay_median_s[w.gpu] for w in work if w.gpu in launches.delay_median_s}
    ordered = sorted(delay, key=lambda gpu: delay[gpu])
    if len(ordered) < 2:
        return None
    last = ordered[-1]
    first_kernel = replicas.first_kernel.behind_median_s.get(last, 0.0) if replicas.first_kernel else 0.0
    worst = min(delay[last], first_kernel)
    # In the end the last GPU may catch up: what it stands still for bounds what an earlier begin would save.
    busy = {gpu.gpu: gpu.busy for gpu in facts.active}
    share = savings.removed(min(worst, (1 - busy[last]) * facts.period_s), facts.period_s)
    # One thread serves several GPUs, with most of a step's launches to one before it turns to another.
    least = limit("staggered_launch.turn") * sorted(w.kernels for w in work)[len(work) // 2]
    in_turns = launches.shared_launches >= 0.5 and (launches.launches_per_turn or -1) >= least
    if share < limit("staggered_launch.share") or not (in_turns or _even(delay, launches)):
        return None
    return StaggeredLaunch(
        culprits=_launching_thread(facts) if in_turns else (),
        gpus=tuple(ordered[1:]), share=share, first=ordered[0], last=last, last_launched_s=delay[last], late_s=worst,
        spans={timeline.gpu: _before_first_kernel(facts, timeline) for timeline in facts.gpu_timelines
               if gpu_number(facts.trace, timeline.gpu) in ordered[1:]},
        per_gpu_s=worst / (len(ordered) - 1), in_turns=in_turns, launches=launches)


def _before_first_kernel(facts: TraceFacts, timeline: GpuTimeline) -> Spans:
    """Spans from the begin of each step to the GPU's first kernel in it."""
    begin, end = facts.analyzed_spans if facts.steps is None else facts.steps.edges_ns.T
    starts = np.append(facts.trace.device.start_ns[timeline.computing], np.iinfo(np.int64).max)
    return union(begin, np.minimum(starts[np.searchsorted(starts, begin)], end))


def _launching_thread(facts: TraceFacts) -> tuple[Culprit, ...]:
    """The thread that launches most, which serves the GPUs one by one; of equals the first in the alphabet."""
    lines = facts.trace.device.launch_line
    counts = np.bincount(lines[lines >= 0])
    return (Culprit(min(facts.trace.lines[i].name for i in np.flatnonzero(counts == counts.max()).tolist()), "thread"),)


def _even(delay: dict[int, float], launches: LaunchOrder) -> bool:
    """Three GPUs and more begin at equal distances, always in the same order: their threads wait for each other."""
    if len(delay) < 3 or launches.order_share is None or launches.order_share < 0.8:
        return False
    values = sorted(delay.values())
    return max(b - a for a, b in pairwise(values)) <= limit("staggered_launch.jump") * values[-1]


def describe_staggered_launch(v: StaggeredLaunch, job: Job) -> Explanation:
    why = (f"On GPU {v.last}, the first kernel of a step is launched {seconds(v.last_launched_s)} later than on GPU "
           f"{v.first} (median), and on each GPU about {seconds(v.per_gpu_s)} later than on the previous GPU.")
    if v.in_turns:
        why += " One thread launches the step of one GPU before it turns to the next GPU."
    turn = v.launches.launches_per_turn
    evidence = known({
        "last_begins_late_s": v.late_s, "share_ratio": v.share, "per_gpu_s": v.per_gpu_s,
        "shared_launches_ratio": v.launches.shared_launches, "steps": float(v.launches.steps),
        "launches_per_turn": None if turn is None else float(turn)})
    return Explanation(
        title=f"GPU {v.last} begins its step {seconds(v.late_s)} after GPU {v.first}", why=why, evidence=evidence,
        action="Launch on all GPUs at the same time, with one thread or process per GPU instead of a loop over the "
               "GPUs.",
        snippet=joined(None if job.strategy else code("serial_gpus", "strategy"),
                       code("staggered_launch", "tensorflow"))
        if job.framework == "tensorflow" and not job.keras else None,
        gain="assumes that the last GPU, which is idle now, begins at the same time as the first GPU",
        source=source("staggered_launch.share", "staggered_launch.turn", "staggered_launch.jump"))
