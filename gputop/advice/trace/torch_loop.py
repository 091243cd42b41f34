"""Rules about work that PyTorch training loops do more often than they need: gradients reduced or zeroed, and ops that
train nothing."""

from __future__ import annotations

import numpy as np

from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import TraceFacts, host_spans_of, share_of_steps
from gputop.advice.trace.job import Job
from gputop.advice.verdict import Explanation, Verdict
from gputop.analysis.host.stack_lines import gap_lines, process_lines, python_of
from gputop.analysis.layers.ops_without_gradient import ops_without_gradient
from gputop.core.findings import Culprit
from gputop.text.units import percent, seconds
from gputop.trace.intervals import Spans, coverage, intersect
from gputop.trace.lookups import computes_on_cpu, host_rows, name_mask
from gputop.trace.model import I64

_DDP = r"DistributedDataParallel\.forward$"
_OPTIMIZER = r"Optimizer\.step#"
_ZERO_GRAD = r"Optimizer\.zero_grad#"
_ZEROES = r"aten::(?:zero_|_foreach_zero_|fill_)$"
_FILLS_LISTS = r"aten::_foreach_zero_$"
_ADDS_GRADIENT = r"torch::autograd::AccumulateGrad$"
_ADD = r"aten::(?:add_|add|_foreach_add_?)$"
# Each AllReduce once: PyTorch's own op, and gloo's or NCCL's range around its work.
_REDUCE, _REDUCES = r"c10d::allreduce_$", r"(?:gloo|nccl):all_?reduce$"
_NAMED_LINES = 3


def _process_of(facts: TraceFacts, rows: I64) -> I64:
    """A number for the process of each of these events."""
    processes: dict[tuple[str, int | None], int] = {}
    of_line = np.array([processes.setdefault((line.host, line.rank), len(processes)) for line in facts.trace.lines],
                       np.int64)
    return of_line[facts.trace.host.line[rows]]


# -- accumulation_sync ----------------------------------------------------------------------------------

class AccumulationSync(Verdict, frozen=True, kw_only=True):
    passes: int  # forward passes from one call of the optimizer to the next
    reductions: float  # AllReduces after each of them
    communication: float  # share of the step in which gradients are reduced, exposed on GPUs


def judge_accumulation_sync(facts: TraceFacts) -> AccumulationSync | None:
    """DistributedDataParallel reduces the gradients after each of several backward passes that one update sums up."""
    trace, host = facts.trace, facts.trace.host
    marks = [host_rows(trace, pattern) for pattern in (_DDP, _OPTIMIZER, _REDUCE)]
    processes = [_process_of(facts, rows) for rows in marks]
    passes, reductions = [], []
    for process in np.unique(processes[0]).tolist():
        forward, updates, reduce = (np.sort(host.start_ns[rows[numbers == process]])
                                    for rows, numbers in zip(marks, processes, strict=True))
        per_update = np.diff(np.searchsorted(forward, updates))
        per_update = per_update[per_update > 0]  # two optimizers, one after the other
        after_each = np.diff(np.searchsorted(reduce, forward))
        if len(per_update) < limit("accumulation_sync.updates") or not len(after_each):
            return None
        passes.append(float(np.median(per_update)))
        if (after_each > 0).mean() < limit("accumulation_sync.reduced"):
            return None
        reductions.append(float(np.median(after_each)))
    most = round(min(passes, default=0))
    if most < 2:
        return None
    if facts.active:
        communication = (facts.shares or {}).get("collectives", 0.0)
    else:
        work = host_rows(trace, _REDUCES)
        numbers = _process_of(facts, work)
        communication = float(np.mean([share_of_steps(facts, host_spans_of(facts, work[numbers == process]))
                                       for process in np.unique(processes[0]).tolist()]))
    share = communication * (most - 1) / most
    if share < limit("accumulation_sync.share"):
        return None
    return AccumulationSync(gpus=facts.active_numbers, share=share, frees_cpus=not facts.active, best_case=True,
                            passes=most, reductions=float(np.mean(reductions)), communication=communication)


def describe_accumulation_sync(v: AccumulationSync, job: Job) -> Explanation:
    return Explanation(
        title=f"Gradients are reduced {v.passes} times for one update",
        why=(f"The optimizer runs once in {v.passes} backward passes, and DistributedDataParallel reduces the "
             f"gradients after each of them ({v.reductions:.0f} AllReduces each time). The reductions take "
             f"{percent(v.communication)} of the {job.basis}. Only the last one is needed."),
        evidence={"accumulated_passes_count": float(v.passes), "reducing_ratio": v.communication},
        action="Reduce gradients after the last backward pass alone: run the others within no_sync().",
        snippet=("for i, batch in enumerate(micro_batches):\n"
                 "    last = i == len(micro_batches) - 1\n"
                 "    with contextlib.nullcontext() if last else model.no_sync():\n"
                 "        loss_of(model(batch)).backward()  # the forward pass too"),
        gain="at most: the reductions but the last one of each update",
        source=source("accumulation_sync.share", "accumulation_sync.updates", "accumulation_sync.reduced"),
    )


# -- gradients_zeroed -----------------------------------------------------------------------------------

class GradientsZeroed(Verdict, frozen=True, kw_only=True):
    zeroing_s: float  # per step
    adding_s: float  # per step: the backward pass adds to what is zero


def judge_gradients_zeroed(facts: TraceFacts) -> GradientsZeroed | None:
    """zero_grad() fills gradients with zeros, to which the backward pass then adds, instead of dropping them."""
    trace, host = facts.trace, facts.trace.host
    within, fills = host_spans_of(facts, host_rows(trace, _ZERO_GRAD)), host_rows(trace, _ZEROES)
    fills = fills[coverage(within, host.start_ns[fills], host.start_ns[fills] + 1) > 0]
    if not len(fills):
        return None
    nodes, adds = host_spans_of(facts, host_rows(trace, _ADDS_GRADIENT)), host_rows(trace, _ADD)
    adds = adds[coverage(nodes, host.start_ns[adds], host.start_ns[adds] + 1) > 0]
    # Of several backward passes for one update only the first one adds to zeros. How many there are is known where each
    # gradient is filled by itself.
    by_itself = not name_mask(trace, _FILLS_LISTS)[host.name[fills]].any()
    passes = max(1.0, len(adds) / len(fills))
    zeroing, adding = _work(facts, fills), _work(facts, adds) / passes if by_itself else 0.0
    share = zeroing + adding
    if share < limit("gradients_zeroed.share"):
        return None
    return GradientsZeroed(gpus=facts.active_numbers, share=share, frees_cpus=not facts.active, best_case=True,
                           zeroing_s=zeroing * facts.period_s, adding_s=adding * facts.period_s)


def _work(facts: TraceFacts, rows: I64) -> float:
    """The share of the steps that these ops take: their kernels on GPUs, else themselves."""
    if not facts.active:
        return share_of_steps(facts, host_spans_of(facts, rows))
    device, spans = facts.trace.device, host_spans_of(facts, rows)
    of_ops = np.flatnonzero(coverage(spans, device.launch_ns, device.launch_ns + 1) > 0)
    time = int(coverage(facts.analyzed_spans, device.start_ns[of_ops], device.end_ns[of_ops]).sum())
    return time / (facts.analyzed_spans.total * len(facts.active)) if facts.analyzed_spans.total else 0.0


def describe_gradients_zeroed(v: GradientsZeroed, job: Job) -> Explanation:
    return Explanation(
        title=f"Gradients are filled with zeros at each update: {percent(v.share)} of the {job.basis}",
        why=(f"zero_grad() writes zeros into all gradients, which takes {seconds(v.zeroing_s)} of each {job.basis}. "
             f"The backward pass then adds to them{f', which takes {seconds(v.adding_s)}' if v.adding_s else ''}. With "
             "set_to_none it writes its results without either."),
        evidence={"zeroing_s": v.zeroing_s, "adding_zeros_s": v.adding_s, "share_ratio": v.share},
        action="Drop the gradients instead, as PyTorch 2 does by default. That also frees their memory meanwhile.",
        snippet="optimizer.zero_grad(set_to_none=True)",
        gain="at most: the time of both" if v.adding_s else "at most: the time of the zeros",
        source=source("gradients_zeroed.share"),
    )


# -- ops_without_gradient -------------------------------------------------------------------------------

class OpsOutsideModel(Verdict, frozen=True, kw_only=True):
    ops_s: float  # per step
    names: str
    calls: float  # per step, of the first


def judge_ops_without_gradient(facts: TraceFacts) -> OpsOutsideModel | None:
    """Ops on the CPU through which no gradient passes take a good part of a step that trains: metrics, histograms."""
    trace, host, steps = facts.trace, facts.trace.host, facts.steps
    if not computes_on_cpu(trace) or steps is None or steps.count < limit("ops_without_gradient.steps"):
        return None
    result = ops_without_gradient(trace)
    if result is None:
        return None
    ops = result.rows
    within = coverage(facts.analyzed_spans, host.start_ns[ops], host.end_ns[ops])
    total = int(within.sum())
    if not total or result.product_ns > limit("ops_without_gradient.products") * total:
        return None  # a second model runs without training, as a teacher does
    share = total / facts.analyzed_spans.total
    if share < limit("ops_without_gradient.share"):
        return None
    kinds, which, counts = np.unique(host.name[ops], return_inverse=True, return_counts=True)
    times = np.bincount(which, within)
    longest = [i for i in np.argsort(-times).tolist() if times[i] >= limit("ops_without_gradient.named") * total]
    spans = host_spans_of(facts, ops)
    return OpsOutsideModel(
        gpus=(), share=share, frees_cpus=True, best_case=True, ops_s=share * facts.period_s,
        names=", ".join(trace.names[kinds[i]] for i in longest[:_NAMED_LINES]) or "many kinds",
        calls=float(counts[longest[0]]) / steps.count if longest else 0.0,
        culprits=(*_lines(facts, intersect(spans, facts.analyzed_spans)), *(
            Culprit(trace.names[kinds[i]], "host", float(times[i]) / steps.count / 1e9, facts.basis,
                    at_s=int(host.start_ns[ops[which == i]][within[which == i].argmax()]) / 1e9)
            for i in longest[:_NAMED_LINES])))


def _lines(facts: TraceFacts, spans: Spans) -> tuple[Culprit, ...]:
    """The lines of Python that run these ops, if stacks were sampled, with times that are right to less than half of
    the usual op."""
    python = python_of(facts.trace)
    error_s = max((samples.error_s for samples in facts.trace.stacks), default=0.0)
    if not python or 2e9 * error_s > float(np.median(spans.end - spans.start)):
        return ()
    processes = process_lines(python, facts.analyzed_spans, spans)
    lines = gap_lines("gap", spans, spans.total / facts.steps_or_window / 1e9, processes).lines
    return tuple(Culprit(line.line, "line", line.s_per_step, facts.basis, traced=line.traced)
                 for line in lines[:_NAMED_LINES])


def describe_ops_without_gradient(v: OpsOutsideModel, job: Job) -> Explanation:
    return Explanation(
        title=f"Ops outside the model take {percent(v.share)} of the {job.basis}: {v.names}",
        why=(f"No gradient passes through these ops, and they are not the optimizer's. They take {seconds(v.ops_s)} of "
             f"each {job.basis}. Usual causes are metrics, histograms and other logging, or masks and tables that are "
             "computed anew each time."),
        evidence={"ops_without_gradient_s": v.ops_s, "share_ratio": v.share},
        action=("Compute metrics and logging every hundred steps. Compute what does not change once, before the loop. "
                "Prepare the batch in the DataLoader's workers."),
        snippet="if step % 100 == 0:\n    log_histograms(model)",
        gain="at most: the time of these ops",
        source=source("ops_without_gradient.share", "ops_without_gradient.products"),
    )
