"""Collectives: exposed, too many, too slow, or only waiting for a GPU that is late."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from msgspec import Struct, structs

from gputop.advice import savings
from gputop.advice.fix_code import code
from gputop.advice.registry import limit, source
from gputop.advice.trace.copy_costs import pinned_rate
from gputop.advice.trace.facts import TraceFacts, host_rows_in_steps, on_host
from gputop.advice.trace.job import Job, is_general
from gputop.advice.trace.known_work import ENOUGH_CPUS, SELDOM_WORK, WORK, known_work, named_work
from gputop.advice.verdict import Explanation, Missing, Verdict, known
from gputop.analysis.gpu.collective_waits import CollectiveWaits
from gputop.analysis.gpu.collectives import by_operation, of_gpus, operation
from gputop.analysis.gpu.device_time import gpu_number, launching_to
from gputop.analysis.host.gaps import ranked_work, work_in
from gputop.analysis.host.interruptions import interruptions
from gputop.analysis.layers.culprits import Events
from gputop.analysis.results import CollectiveOp, GapWork
from gputop.analysis.steps.model import Steps
from gputop.analysis.steps.training_loops import training_loops
from gputop.analysis.what_if.cure import Cure
from gputop.core.findings import LARGE_SHARE, Culprit
from gputop.text.units import counted, percent, ranges, rate, seconds
from gputop.trace.host_calls import GRADIENT, launched_in_calls
from gputop.trace.intervals import EMPTY, Spans, coverage, intersect, merge, overlap, subtract, uncovered, union
from gputop.trace.kernel_names import short_kernel
from gputop.trace.lookups import distinct, host_rows, host_stat, optimizer_names, spans_of
from gputop.trace.model import I64, Kind

_GRADIENTS = "AllReduce"
# By the operation that takes most of the exposed time: what hides it, or makes it shorter.
_HIDE = {
    _GRADIENTS: "Reduce gradients in a few buckets while the backward pass is still running, or communicate less often "
                "by accumulating gradients.",
    "AllToAll": "Split the batch in two so that one half is processed while the tokens of the other half are "
                "exchanged. Send tokens in FP8, and place experts so that more tokens stay on their GPU or node.",
    "AllGather": "Gather the parameters of the next layer while the current layer computes, in larger units. With "
                 "enough memory, keep gathered parameters, or shard them over fewer GPUs.",
    # NCCL's kernels of all-to-all have this name, too.
    "SendRecv": "Exchange one batch or micro-batch while another one is being processed: use a pipelined all-to-all, "
                "or more and smaller micro-batches.",
}
_HIDE["ReduceScatter"] = _HIDE[_GRADIENTS]
_HIDE_SERVING = ("Spread the model over fewer GPUs and run more replicas of it, or let the server use a fused or "
                 "one-shot all-reduce for small messages.")
_HIDE_ACTIVATIONS = (
    "Tensor or sequence parallelism exchanges these activations in each layer. Keep such a parallel group within "
    "NVLink and as small as the model allows, and use data parallelism across the other GPUs.")
_KEEP_SHARDED = "Keep the logits sharded by vocabulary, "
_HIDE_LOGITS = {
    True: f"{_KEEP_SHARDED}and compute the loss on the shards (loss parallel): the ranks then exchange only a few "
          "numbers per token.",
    False: f"{_KEEP_SHARDED}take the argmax or top-k of each shard, and gather only those few numbers per token. For a "
           "prompt, only the last token needs logits.",
}
_AT_MOST = "at most"  # how the words of a bound begin
# DTensor, of activations; and of the gradients of those that it was given.
_REDISTRIBUTES = r"(?:Nested)?Redistribute(?:Backward)?$|_FromTorchTensorBackward$"
_PRODUCTS = r"aten::(?:mm|addmm|bmm|baddbmm|_scaled_mm)$"
_NEXT_PASS = r"aten::embedding$|autograd::engine::|Optimizer\."  # what follows a forward pass
# Values that optimizers keep beside each parameter, by their names.
_SLOTS = {("adam", "lamb", "adadelta", "ftrl"): 2, ("momentum", "rmsprop", "rms_prop", "adagrad", "lars"): 1}
_NEVER = np.iinfo(np.int64).max
_BOTH = "First, analyze the traces of all ranks together, to separate waiting from transfer. Then reduce the transfer. "
_WORTH_NAMING = 0.02  # share of the delay
_MAIN_SHARE = 0.5  # share of the delay
_STOPPED = 0.3  # share of the delay: each call is long enough to count only in part of the cases
_SILENT = 0.1  # share of the delay: so much without an event is said
# Of the wait: a replay that saves less does not express what delays the last GPU. Without its host the replay moves no
# more than the begin of collectives, which the late GPU's own work before them outlasts.
_EXPRESSED, _EXPRESSED_TOGETHER = 0.5, 0.05


# -- what is judged -----------------------------------------------------------------------------------

def _missing(facts: TraceFacts) -> Missing | None:
    """Reason why collectives that take time cannot be judged; None where there is nothing to judge."""
    unmatched = facts.waits.unmatched if facts.waits else {}
    reason = next(iter(unmatched.values()), "")
    return Missing(
        f"data on the collectives of all GPUs of the job to separate waiting from transfer; {reason} (gputop can "
        "analyze the files of several ranks together)") if reason else None


def _judged(facts: TraceFacts) -> CollectiveWaits | Missing | None:
    """The waits, where exposed collectives take enough of the step and can be judged."""
    if facts.waits is None or facts.shares["collectives"] < limit("collectives.share"):
        return None
    return facts.waits if facts.waits.count else _missing(facts)


def _operations(facts: TraceFacts) -> Sequence[CollectiveOp]:
    return facts.analysis.collectives.operations if facts.analysis.collectives is not None else ()


def _allreduce(facts: TraceFacts) -> CollectiveOp | None:
    return next((op for op in _operations(facts) if op.operation == "AllReduce"), None)


def _moved(facts: TraceFacts, op: CollectiveOp, gpus: int) -> tuple[float, str] | None:
    """Bytes that a GPU reduces per step (or in the window), and what shows them, for a sentence: the messages, else
    four for each parameter by the user, the gradients' shapes or the allocator of TensorFlow and JAX."""
    steps = facts.steps
    if op.bytes is not None:
        per_call = op.bytes / op.count
        return (per_call * (op.count / gpus if op.count_per_step is None else op.count_per_step),
                "from their message sizes")
    if steps is None:
        return None
    iterations = steps.times.iterations_per_step
    if facts.params is not None:
        return 4.0 * facts.params * iterations, f"{facts.params / 1e6:,.1f} million parameters × 4 bytes"
    if elements := _gradient_elements(facts, steps):
        return 4.0 * elements, f"{_AT_MOST} {elements / 1e6:,.1f} million gradient elements × 4 bytes"
    reduces = tuple(f"GPU_{gpu}_" for gpu in op.exposed_s)
    held = [min(use.timeline_in_use_bytes) for use in facts.analysis.memory if use.allocator.startswith(reduces)]
    if not held:
        return None
    names = {facts.trace.names[i].lower() for i in np.flatnonzero(optimizer_names(facts.trace)[:-1])}
    slots = max((count for words, count in _SLOTS.items() if any(word in name for name in names for word in words)),
                default=0)
    return min(held) / (1 + slots) * iterations, (
        f"{_AT_MOST}: the smallest memory use of a GPU was {min(held) / 1e6:,.1f} MB"
        + (f", of which {slots}/{slots + 1} is optimizer state" if slots else ""))


def _gradient_elements(facts: TraceFacts, steps: Steps) -> float:
    """Elements per step and process of the gradients that PyTorch accumulates, where it recorded their shapes."""
    rows, elements = host_stat(facts.trace.host, "elements")
    chosen = np.isin(rows, host_rows_in_steps(facts, GRADIENT))
    ranks = len({facts.trace.lines[line].rank for line in facts.trace.host.line[rows[chosen]].tolist()})
    return float(elements[chosen].sum()) / steps.count / max(ranks, 1)


class CommunicationExposed(Verdict, frozen=True, kw_only=True):
    """``share`` is what overlap can save: no more than there is compute to hide it behind."""

    exposed_s: float  # per step: transfers that all GPUs have joined, with nothing computed meanwhile
    waiting_s: float | None  # per step and GPU: exposed waiting for the last GPU; None: one rank, in ``exposed_s``
    free_compute_s: float  # per step: compute without communication beside it
    per_step: float | None  # collectives
    operation: str  # that takes most of the exposed time
    activations: bool = False  # tensor parallelism exchanges them
    logits: bool = False  # most of it gathers the output of the last layer


def judge_communication_exposed(facts: TraceFacts) -> CommunicationExposed | Missing | None:
    """Transfers that all GPUs have joined, with nothing computed meanwhile; of one rank alone its collectives."""
    waits = _judged(facts)
    if isinstance(waits, CollectiveWaits):
        exposed_s, waiting_s = waits.bare_s, sum(waits.waiting_s.values()) / len(waits.waiting_s)
    elif waits is not None and facts.waits is not None and facts.waits.alone_s is not None:
        exposed_s, waiting_s = facts.waits.alone_s, None
    else:
        return waits
    if exposed_s < limit("collectives.share") * facts.period_s:
        return None
    # In which a GPU computes and does not communicate.
    free = sum((gpu.compute - (gpu.collectives - gpu.collectives_exposed)) * gpu.window_s for gpu in facts.active)
    free_s = max(free, 0.0) / sum(gpu.window_s for gpu in facts.active) * facts.period_s
    collectives, alone = facts.analysis.collectives, waiting_s is None
    rows = np.flatnonzero(facts.trace.device.kind == Kind.COLLECTIVE)
    logits, logits_s = _logits(facts, rows)
    of_logits = logits_s >= _MAIN_SHARE * exposed_s and not is_general(facts)
    if of_logits:
        rows, exposed_s = logits, min(logits_s, exposed_s)
    share = savings.removed(exposed_s if of_logits else min(exposed_s, free_s), facts.period_s)
    most = max(_operations(facts), key=lambda op: sum(op.exposed_s.values()), default=None)
    return CommunicationExposed(
        gpus=tuple(gpu.gpu for gpu in facts.active if gpu.collectives) if alone else facts.active_numbers,
        # Of one rank all of it may be waiting, of which overlap saves nothing.
        severest="medium" if alone else "high", claim="at most" if alone and of_logits else "measured",
        share=share, saving=share, exposed_s=exposed_s, waiting_s=waiting_s, free_compute_s=free_s,
        per_step=None if collectives is None else collectives.count_per_step,
        operation=_GRADIENTS if most is None else most.operation,
        activations=_of_activations(facts, rows), logits=of_logits,
        events=Events(rows, timed=False),  # part of their time is waiting
        cure=Cure(scaled=((rows, 0.0),), assumes=(
            "Assumes that the logits stay sharded." if of_logits else
            "Assumes that the transfers overlap with compute, if there is enough compute.")))


def _logits(facts: TraceFacts, rows: I64) -> tuple[I64, float]:
    """The collectives of these that gather logits, and their exposed seconds per step and GPU.

    DTensor launches them on the thread of the forward pass, behind its last matrix product: whatever follows, the
    backward pass, the next forward pass or nothing, comes before another product.
    """
    device, host = facts.trace.device, facts.trace.host
    gathers = [i for i, name in enumerate(facts.trace.names) if operation(name) == "AllGather"]
    rows = rows[np.isin(device.name[rows], gathers)]
    rows = rows[launched_in_calls(facts.trace, rows, r"(?:Nested)?Redistribute$")]
    products, others = host_rows(facts.trace, _PRODUCTS), host_rows(facts.trace, _NEXT_PASS)
    rank = np.array([line.rank for line in facts.trace.lines], np.int64)
    ends_pass = np.zeros(len(rows), bool)
    for line in distinct(device.launch_line[rows]).tolist():
        mine = np.flatnonzero(device.launch_line[rows] == line)
        launch = device.launch_ns[rows[mine]]
        before, after = _around(host.start_ns[products[host.line[products] == line]], launch)
        other_before, other_after = _around(host.start_ns[others[rank[host.line[others]] == rank[line]]], launch)
        ends_pass[mine] = (before > other_before) & ((after == _NEVER) | (other_after < after))
    rows = rows[ends_pass]
    exposed_ns = 0
    for timeline in facts.gpu_timelines:
        on_gpu = rows[device.gpu[rows] == timeline.gpu]
        spans = intersect(union(device.start_ns[on_gpu], device.end_ns[on_gpu]), facts.analyzed_spans)
        exposed_ns += uncovered(spans, timeline.compute)
    return rows, exposed_ns / 1e9 / facts.steps_or_window / max(len(facts.active), 1)


def _around(times: I64, instants: I64) -> tuple[I64, I64]:
    """The last of these times (ns) before each instant, and the first after it."""
    times = np.concatenate(([-1], times, [_NEVER]))
    after = np.searchsorted(times, instants, side="right")
    return times[after - 1], times[after]


def _of_activations(facts: TraceFacts, rows: I64) -> bool:
    """Return whether tensor parallelism launches most of these collectives, by time."""
    device = facts.trace.device
    spans = spans_of(facts.trace, host_rows(facts.trace, _REDISTRIBUTES))
    by_it = coverage(spans, device.launch_ns[rows], device.launch_ns[rows] + 1) > 0
    length = device.end_ns[rows] - device.start_ns[rows]
    return bool(by_it.any() and length[by_it].sum() >= _MAIN_SHARE * length.sum())


def describe_communication_exposed(v: CommunicationExposed, job: Job) -> Explanation:
    exposed, alone, (action, snippet) = v.exposed_s / job.period_s, v.waiting_s is None, _fix(v, job)
    gpus = f"GPU {ranges(v.gpus)}" if alone else "all GPUs"
    what = "Gathering the full logits" if v.logits else "Exposed communication"
    why = (f"For {percent(exposed)} of the {job.basis}, {gpus} {'is' if alone else 'are'} in collectives and "
           f"compute{'s' if alone else ''} nothing{'' if alone else '. The wait for late GPUs is not counted'}. ")
    gain = "assumes that compute hides as much of the exposed transfer as possible"
    if v.logits:
        why += ("Each rank computes the logits for part of the vocabulary, and an AllGather after the last matmul "
                "assembles the full logits on all ranks.")
        gain = ("assumes that the logits stay sharded, which saves the gather" +
                " but not the wait for other ranks" * alone)
    else:
        why += (f"{seconds(v.free_compute_s)} of compute per {job.basis} runs without communication and could overlap "
                "with these transfers.")
        gain = ("assumes that compute hides as much of this rank's exposed collectives as possible; overlap does not "
                "reduce the time spent waiting for other ranks") if alone else gain
    if alone:
        why += (" The trace covers only one rank, so it does not show how much of this time moves data and how much is "
                "waiting for other ranks.")
    return Explanation(
        title=f"{what} takes {percent(exposed)} of the {job.basis}{f' on {gpus}' if alone else ''}", why=why,
        evidence=known({
            "exposed_collectives_s" if alone else "exposed_transfer_s": v.exposed_s, "share_ratio": exposed,
            "exposed_waiting_s": v.waiting_s, "free_compute_s": v.free_compute_s, "collectives_per_step": v.per_step}),
        action=f"{_BOTH if alone else ''}{action}", snippet=snippet, gain=gain,
        source=source("collectives.share") + "; nsys-ai: reports overlap below 30%")


def _fix(v: CommunicationExposed, job: Job) -> tuple[str, str | None]:
    """Words and code of what hides these collectives in this job, or makes them shorter."""
    serves, hide = job.trains is False, _HIDE.get(v.operation, _HIDE[_GRADIENTS])
    if v.logits:
        words, key = _HIDE_LOGITS[not serves], f"logits-{job.framework}"
    elif v.activations:
        words, key = _HIDE_ACTIVATIONS, f"activations-{job.framework}"
    else:
        words = _HIDE_SERVING if serves and hide == _HIDE[_GRADIENTS] else hide
        key = (job.strategy or job.framework) if _HIDE.get(v.operation) == _HIDE[_GRADIENTS] else (
            "fsdp-gather" if v.operation == "AllGather" and job.strategy == "fsdp" else "")
    return words, None if serves else code("communication_exposed", key)


class HeldUp(Struct, frozen=True):
    """The hosts that delay their GPUs, and with these the others."""

    held_up_s: float  # per step, by which collectives begin later
    processes: tuple[str, ...]  # that these GPUs belong to, "rank 1"; none: the trace is of one process
    work: Sequence[GapWork]  # of those hosts in the delay, longest first
    silent_s: float  # per step, of the delay without an event of the host
    gaps_s: float  # per step, that these GPUs had no work
    input: bool  # mostly a wait for a batch
    stopped_s: float  # per step, of those gaps in calls that the threads stopped in the middle of


class CollectiveWaiting(Verdict, frozen=True, kw_only=True):
    late_s: float  # per step, by which the last GPUs were late
    waiting_s: float  # per step and GPU that waits: exposed waiting inside collectives
    latest: int  # the GPU that causes most of the wait
    latest_part: float  # its share of it
    alone: bool  # it causes so much of it that it is named alone
    late_by_host: float  # share of the lateness in which the late GPU had no launch
    last_to_arrive: int  # collectives to which it came last
    collectives: int
    waiting_gpus: int
    of_collectives: float | None  # share of all time in collectives that is waiting
    held_up: HeldUp | None = None  # the host is why the last GPU is late
    meanwhile: tuple[str, float] | None = None  # the exchange or copy of the latest GPU that is why: name, s per step


def judge_collective_waiting(facts: TraceFacts) -> CollectiveWaiting | Missing | None:
    """Inside their collectives the GPUs wait for one that arrives late."""
    waits = _judged(facts)
    if not isinstance(waits, CollectiveWaits):
        return waits
    late = sum(waits.late_s.values())
    share = savings.removed(late, facts.period_s)
    if share < limit("collectives.share"):
        return None
    by_lateness = sorted(waits.late_s, key=lambda gpu: -waits.late_s[gpu])
    latest = by_lateness[0]
    alone = waits.late_s[latest] >= limit("collective_waiting.one") * late
    gpus = (latest,) if alone else tuple(sorted(gpu for gpu in by_lateness if waits.late_s[gpu] >= 0.1 * late))
    collectives = facts.analysis.collectives
    waiting = [waiting_s for gpu, waiting_s in waits.waiting_s.items() if not alone or gpu != latest]
    numbers = tuple(gpu for gpu in gpus if gpu in waits.held_up_s) or tuple(sorted(waits.held_up_s))
    held_up, culprits = _held_up(facts, waits, late, numbers)
    fix = Cure(together=True, assumes=(
        "Assumes that the slowest GPU reaches each collective at the median time of the other GPUs."))
    by_number = {gpu_number(facts.trace, timeline.gpu): timeline.gpu for timeline in facts.gpu_timelines}
    others_wait = merge(EMPTY, *waits.waiting.values())
    spans = {by_number[gpu]: subtract(others_wait, waits.waiting.get(gpu, EMPTY)) for gpu in gpus}
    if held_up is not None:
        gpus = tuple(gpu for gpu in gpus if gpu in waits.held_up_s) or gpus
        spans = {by_number[gpu]: spans for gpu, spans in waits.held_up.items()}
        fix = Cure(host=spans, assumes="Assumes that the late host launches as early as the other hosts.")
        # Each of the others has a step's work of its own: no step is shorter than that of the one that waits least.
        others = [waiting_s for gpu, waiting_s in waits.waiting_s.items() if gpu not in gpus]
        share = min(share, savings.removed(min(others, default=late), facts.period_s))
    return CollectiveWaiting(
        gpus=gpus, share=share, spans=spans, late_s=late,
        others_wait={by_number[gpu]: waiting for gpu, waiting in waits.waiting.items()},
        waiting_s=sum(waiting) / len(waiting),
        latest=latest, latest_part=waits.late_s[latest] / late, alone=alone,
        late_by_host=waits.late_by_host_s / late, last_to_arrive=waits.late_times.get(latest, 0),
        collectives=waits.count, waiting_gpus=len(waits.waiting_s),
        of_collectives=None if collectives is None else collectives.waiting,
        events=None if culprits else Events(np.flatnonzero(facts.trace.device.kind == Kind.COLLECTIVE), timed=False),
        culprits=culprits, held_up=held_up,
        meanwhile=_meanwhile(facts, *next(iter(spans.items()))) if alone and held_up is None else None,
        # A replay that saves less of the share cannot have moved what delays the last GPU.
        cure=fix if facts.replay is None or share < LARGE_SHARE or max(facts.replay.saved(fix), 0.0) >= share * (
            _EXPRESSED_TOGETHER if held_up is None else _EXPRESSED) else None)


def _meanwhile(facts: TraceFacts, gpu: int, waited_for: Spans) -> tuple[str, float] | None:
    """The exchange or copy that this GPU alone runs for most of the time in which the others wait for it."""
    device = facts.trace.device
    rows = np.flatnonzero((device.gpu == gpu) & (device.kind >= Kind.COLLECTIVE))
    time = coverage(waited_for, device.start_ns[rows], device.end_ns[rows])
    name, time_ns = max(((name, int(time[device.name[rows] == name].sum())) for name in distinct(
        device.name[rows]).tolist()), key=lambda of_name: of_name[1], default=(0, 0))
    if time_ns < max(_MAIN_SHARE * waited_for.total, 1):
        return None
    return short_kernel(facts.trace.names[name]), time_ns / 1e9 / facts.steps_or_window


def _held_up(facts: TraceFacts, waits: CollectiveWaits, late_s: float, numbers: Sequence[int],
             ) -> tuple[HeldUp | None, tuple[Culprit, ...]]:
    """Work of the hosts of these late GPUs (the job's numbers) while the GPUs had no work, where that is most of why
    collectives begin late."""
    held_up_s = sum(waits.held_up_s.get(gpu, 0.0) for gpu in numbers)
    if held_up_s < limit("causes.late_by_host") * late_s:
        return None, ()
    trace, totals, loops = facts.trace, dict[str, tuple[int, int]](), training_loops(facts.trace)
    silent_ns = gaps_ns = input_ns = stopped_ns = 0
    for timeline in facts.gpu_timelines:
        number = gpu_number(trace, timeline.gpu)
        gaps = waits.held_up.get(number, EMPTY)
        if number not in numbers or not len(gaps.start):
            continue
        lines, host = launching_to(trace, timeline), trace.gpus[timeline.gpu].host
        work, silent = work_in(trace, gaps, lines)
        for name, (time, events) in work.items():
            before = totals.get(name, (0, 0))
            totals[name] = before[0] + time, before[1] + events
        silent_ns += silent
        gaps_ns += gaps.total
        stopped_ns += intersect(gaps, interruptions(trace, timeline)).total
        fed_by = [loop.waits for loop in loops if (lines[loop.line] if loop.line >= 0 else loop.host == host)]
        input_ns += overlap(gaps, merge(EMPTY, *fed_by))
    per = facts.steps_or_window
    ranked = [work for work in ranked_work(totals, per) if work.s_per_step * per * 1e9 >= _WORTH_NAMING * gaps_ns]
    return (HeldUp(held_up_s, _processes(facts, numbers), ranked, silent_ns / per / 1e9,
                   gaps_ns / per / 1e9, input_ns >= _MAIN_SHARE * gaps_ns, stopped_ns / per / 1e9),
            on_host(facts, ranked, merge(EMPTY, *(waits.held_up[gpu] for gpu in numbers if gpu in waits.held_up))))


def _processes(facts: TraceFacts, numbers: Sequence[int]) -> tuple[str, ...]:
    """The processes of these GPUs (the job's numbers) by rank, and by host where there are several hosts."""
    gpus = facts.trace.gpus
    if len({(gpu.host, gpu.rank) for gpu in gpus}) < 2:
        return ()
    several_hosts = len({gpu.host for gpu in gpus}) > 1
    chosen = [gpus[timeline.gpu] for timeline in facts.gpu_timelines
              if gpu_number(facts.trace, timeline.gpu) in numbers]
    return tuple(dict.fromkeys(f"rank {gpu.rank}{f' on {gpu.host}' if several_hosts else ''}" for gpu in chosen))


def describe_collective_waiting(v: CollectiveWaiting, job: Job) -> Explanation:
    words = _waiting_words(v, job)
    return words if v.held_up is None else _held_up_words(v, v.held_up, words, job)


def _held_up_words(v: CollectiveWaiting, held_up: HeldUp, words: Explanation, job: Job) -> Explanation:
    """The same where the hosts of the last GPUs are why these are late."""
    others = "the other GPU waits" if v.waiting_gpus == 2 else "the other GPUs wait"
    gpus = f"GPU {v.latest}" if v.alone else f"GPUs {ranges(v.gpus)}"
    who = _ranks(held_up.processes[:1] if v.alone else held_up.processes)
    host = f"The host{'' if v.alone else 's'}{f' of {who}' if who else ''}"
    title = f"{host} {'delays' if v.alone else 'delay'} {gpus}{'' if v.alone else ' in turn'}, and {others}"
    why = (f"{host} {'leaves' if v.alone else 'together leave'} {gpus} without work for {seconds(held_up.gaps_s)} per "
           f"{job.basis}.")
    most = _MAIN_SHARE * held_up.gaps_s
    if held_up.work:
        why += f" Host activity during this time: {named_work(held_up.work)}."
    if held_up.silent_s >= _SILENT * held_up.gaps_s:
        why += (f" The trace shows no host events for {seconds(held_up.silent_s)} of this time, so Python is running "
                "or waiting.")
    why += f" {words.why}"
    action, snippet, host_work = words.action, words.snippet, known_work((*WORK, *SELDOM_WORK), held_up.work, most)
    late = who or "this process"
    if held_up.input:
        action = (f"Make the input pipeline of {late} as fast as those of the other ranks: use more workers, and give "
                  "each rank an equal share of the data.")
        snippet = code("input_bound", "torch") if job.framework == "pytorch" else None
    elif host_work is not None:
        action, snippet = host_work[0].action, host_work[0].code(job)
    elif held_up.stopped_s >= _STOPPED * held_up.gaps_s:
        why += (f" For {seconds(held_up.stopped_s)}, launching threads stood still in the middle of calls that take "
                "far less time otherwise, most likely without a CPU.")
        action, snippet = ENOUGH_CPUS, code("thread_contention", job.framework)
    elif held_up.work and held_up.work[0].s_per_step >= most:
        action = (f'Look at "{held_up.work[0].name}" on {late}: do this work less often, in the background, or on all '
                  "ranks at the same time.")
        snippet = code("collective_waiting", "stack")
    elif held_up.silent_s >= most:
        action = ("Find out what Python does during this time, and move that work out of the step or into another "
                  "thread. Work that only one rank does (logging, saving, evaluation) delays all ranks.")
        snippet = code("collective_waiting", "stack")
    return structs.replace(
        words, title=f"{title} for {percent(v.share)} of the {job.basis}", why=why, action=action, snippet=snippet,
        evidence={**words.evidence, "held_up_s": held_up.held_up_s, "no_event_s": held_up.silent_s},
        gain="assumes that the hosts of these GPUs launch as early as the others")


def _ranks(processes: Sequence[str]) -> str:
    """Words for ranks: "rank 1", "ranks 0-3"; of several hosts each rank by itself."""
    numbers = [process.removeprefix("rank ") for process in processes]
    if len(numbers) > 1 and all(number.isdecimal() for number in numbers):
        return f"ranks {ranges(int(number) for number in numbers)}"
    return ", ".join(processes)


def _waiting_words(v: CollectiveWaiting, job: Job) -> Explanation:
    who = f"GPU {v.latest} arrives last" if v.alone else f"GPUs {ranges(v.gpus)} take turns arriving last"
    others, one = ("other GPU waits", "the other GPU") if v.waiting_gpus == 2 else ("other GPUs wait", "each other GPU")
    why = (f"{who}{f' at {v.last_to_arrive} of {v.collectives} collectives' if v.alone else ''}. In {job.each}, {one} "
           f"waits {seconds(v.waiting_s)} in collectives while none of its compute overlaps.")
    if v.of_collectives is not None:
        why += f" Waiting takes {percent(v.of_collectives)} of all time in collectives."
    action = (f"Find out what delays GPU {v.latest} before its collectives: look at its launches, its share of the "
              "input, and the CPU cores and NUMA node of its process.")
    if v.meanwhile is not None:
        name, time_s = v.meanwhile
        why += f" Meanwhile, GPU {v.latest} runs {name} for {seconds(time_s)}."
        action = (f"Start {name} on GPU {v.latest} earlier, on another stream so that it overlaps with compute, or "
                  "make it shorter: it delays the collectives.")
    return Explanation(
        title=(f"The {others} for GPU {v.latest}" if v.alone else "GPUs wait for each other")
        + f" in collectives for {percent(v.share)} of the {job.basis}",
        why=why,
        evidence=known({
            "late_s": v.late_s, "share_ratio": v.share, "exposed_waiting_s": v.waiting_s, "late_gpu": float(v.latest),
            "late_gpu_part_ratio": v.latest_part, "late_by_host_ratio": v.late_by_host,
            "last_to_arrive_count": float(v.last_to_arrive), "collectives": float(v.collectives),
            "waiting_of_collectives_ratio": v.of_collectives}),
        action=action if v.alone else
               "Make the GPUs arrive together: give them equal shapes and batches, have the input ready on all of "
               "them, and avoid work that only one process does.",
        snippet=code("collective_waiting", "numa") if v.alone and v.meanwhile is None else None,
        gain="" if v.cure is not None else (
            "assumes that the slowest GPU reaches each collective at the same time as the others"),
        source=source("collectives.share") + "; HTA: finds stragglers by their late start, and takes the shortest "
                                             "duration across the GPUs as the transfer time")


class AllReduceCount(Verdict, frozen=True, kw_only=True):
    count: float  # per step
    needed: int
    median_s: float
    shortest_s: float | None  # 10th percentile: next to nothing but latency; None: not known
    exposed: float  # share of their time
    message_bytes: float | None  # mean; None: not known


def judge_allreduce_count(facts: TraceFacts) -> AllReduceCount | Missing | None:
    """Many small AllReduces per step where a few would do: each costs its latency.

    1. More than ``allreduce_count.many`` run per step, and their messages are small: by their size or, where that is
       not known, as they are short.
    2. What merging them would save is the latency of each one less, as far as it is exposed.
    """
    waits, op, steps = _judged(facts), _allreduce(facts), facts.steps
    unmatched = waits if isinstance(waits, Missing) else None
    if unmatched is not None and facts.waits is not None and facts.waits.alone_s is not None:
        unmatched = None  # each rank runs as many as the others
    if waits is None or facts.waits is None or op is None or _of_activations(facts, _allreduces(facts)):
        return unmatched
    if steps is None or op.count_per_step is None:
        return unmatched or Missing("training steps to count AllReduces per step")
    count = op.count_per_step / steps.times.iterations_per_step
    if count <= limit("allreduce_count.many"):
        return unmatched
    durations = facts.waits.durations_s
    typical = float(np.percentile(durations, 50)) if durations else op.time_s / op.count
    least = float(np.percentile(durations, 10)) if durations else None
    moved = _moved(facts, op, len(op.exposed_s))
    per = None if moved is None else moved[0] / op.count_per_step
    if moved is not None and per is not None and per >= limit("allreduce_count.message_bytes"):
        if not moved[1].startswith(_AT_MOST):
            return None
        moved = per = None  # a bound shows no size
    if per is None and typical > limit("allreduce_count.latency_s"):
        return Missing("the number of model parameters (--params N) to decide whether "
                       f"{count:.0f} AllReduces per step of {seconds(typical)} are too small")
    needed = 1 if moved is None else max(
        1, math.ceil(moved[0] / steps.times.iterations_per_step / limit("allreduce_count.bucket_bytes")))
    avoided_s = max(count - needed, 0.0) * (least or 0.0) * facts.waits.allreduce_exposed
    share = savings.removed(avoided_s, facts.period_s / steps.times.iterations_per_step)
    left = 0.0 if least is None else max(1 - least * (1 - needed / count) / typical, 0.0)
    cure = Cure(scaled=((_allreduces(facts), left),),
                assumes="Assumes that each avoided AllReduce saves the time of one of the shortest AllReduces.")
    if share < limit("collectives.share"):
        return None
    return AllReduceCount(gpus=facts.active_numbers, share=share, count=count, needed=needed, median_s=typical,
                          shortest_s=least, exposed=facts.waits.allreduce_exposed, message_bytes=per,
                          events=Events(_allreduces(facts), timed=False), cure=cure)


def _allreduces(facts: TraceFacts) -> I64:
    _, rows = of_gpus(facts.gpu_timelines)
    return np.concatenate(by_operation(facts.trace, rows)["AllReduce"])


def describe_allreduce_count(v: AllReduceCount, job: Job) -> Explanation:
    size = "" if v.message_bytes is None else f" of {v.message_bytes / 1e6:,.1f} MB on average"
    return Explanation(
        title=f"{v.count:.0f} AllReduces per step, although {v.needed} would be enough",
        why=f"Each step runs {v.count:.0f} AllReduces{size}, which take {seconds(v.median_s)} each (median), mostly "
            f"latency. With {counted(v.needed, 'AllReduce')} for the same gradients, each step would pay the latency "
            f"{'once' if v.needed == 1 else f'{v.needed} times'}.",
        evidence=known({
            "allreduces_per_step": v.count, "needed_per_step": float(v.needed), "median_transfer_s": v.median_s,
            "exposed_ratio": v.exposed, "share_ratio": v.share, "latency_s": v.shortest_s,
            "mean_message_bytes": v.message_bytes}),
        action="Bucket the gradients so that each AllReduce carries tens of megabytes.",
        snippet=code("allreduce_count", job.strategy or job.framework),
        source=source("allreduce_count.many", "allreduce_count.bucket_bytes", "allreduce_count.latency_s"))


class AllReduceSlow(Verdict, frozen=True, kw_only=True):
    transfer_s: float  # per step, waiting left out
    wanted_s: float  # what a ring over the node's slowest link would take
    moved_bytes: float  # per step
    basis: str  # of these bytes
    calls: float  # per step
    link_bytes_per_s: float
    exposed: float  # share of the transfer


def judge_allreduce_slow(facts: TraceFacts) -> AllReduceSlow | Missing | None:
    """The transfer itself, waiting left out, takes far longer than its bytes need even over the node's slowest link."""
    waits, op = _judged(facts), _allreduce(facts)
    if not isinstance(waits, CollectiveWaits):
        return waits
    if op is None or op.transfer_s is None:
        return None if op is None else _missing(facts)
    if op.bytes is None and _of_activations(facts, _allreduces(facts)):
        return Missing("data on the sizes of the activations that are reduced")
    gpus, steps = len(op.exposed_s), facts.steps.count if facts.steps else 1
    transfer_s = sum(waits.durations_s) / steps
    if transfer_s * waits.allreduce_exposed < limit("collectives.share") * facts.period_s:
        return None
    moved = _moved(facts, op, gpus)
    if moved is None:
        return Missing("the number of model parameters (--params N) to know how long an AllReduce should take")
    if len({gpu.host for gpu in facts.trace.gpus}) > 1:
        return Missing("data on the bandwidth between the hosts of this job")
    rate = pinned_rate(facts)
    if rate is None:
        return Missing("data on the bandwidth of the links; the trace has no large pinned copy that shows the PCIe "
                       "rate")
    count = len(waits.durations_s) / steps
    wanted_s = 2 * (gpus - 1) / gpus * moved[0] / rate + count * limit("allreduce_slow.latency_s")
    if transfer_s < limit("allreduce_slow.factor") * wanted_s:
        return None
    share = savings.removed((transfer_s - wanted_s) * waits.allreduce_exposed, facts.period_s)
    if share < limit("collectives.share"):
        return None
    return AllReduceSlow(gpus=facts.active_numbers, share=share, transfer_s=transfer_s, wanted_s=wanted_s,
                         moved_bytes=moved[0], basis=moved[1], calls=count, link_bytes_per_s=rate,
                         exposed=waits.allreduce_exposed, events=Events(_allreduces(facts), timed=False),
                         cure=Cure(scaled=((_allreduces(facts), wanted_s / transfer_s),), assumes=(
                             "Assumes that AllReduces run at the rate of the PCIe link; NVLink is even faster.")))


def describe_allreduce_slow(v: AllReduceSlow, job: Job) -> Explanation:
    return Explanation(
        title=f"AllReduces take {v.transfer_s / v.wanted_s:.1f}× as long as their size requires",
        why=f"AllReduces of {v.moved_bytes / 1e6:,.1f} MB per {job.basis} ({v.basis}) take {seconds(v.transfer_s)} "
            f"without waiting ({rate(v.moved_bytes / v.transfer_s)}). Even over PCIe, at the "
            f"{v.link_bytes_per_s / 1e9:.1f} GB/s measured for pinned copies in this trace, ring AllReduces would take "
            f"{seconds(v.wanted_s)}: 2 × {len(v.gpus) - 1}/{len(v.gpus)} of the bytes at that rate, plus a latency of "
            f"{seconds(limit('allreduce_slow.latency_s'))} for each of {v.calls:,.0f} AllReduces.",
        evidence={"transfer_s": v.transfer_s, "wanted_s": v.wanted_s, f"bytes_per_{job.basis}": v.moved_bytes,
                  "bytes_per_s": v.moved_bytes / v.transfer_s, "link_bytes_per_s": v.link_bytes_per_s,
                  "exposed_ratio": v.exposed, "share_ratio": v.share},
        action="Check which transport NCCL uses: it should be direct between GPUs (NVLink, PCIe P2P), not sockets or "
               "copies through host memory. Check NCCL_P2P_DISABLE, the ACS and IOMMU settings, and /dev/shm of the "
               "container.",
        snippet=code("allreduce_slow", "log"),
        gain="assumes that exposed AllReduces run at the rate of the PCIe link; NVLink is even faster",
        source=source("allreduce_slow.factor", "allreduce_slow.latency_s")
        + "; a ring moves 2(n-1)/n of the bytes over each link")
