"""Rules about PyTorch: work that its training loops do more often than they need (gradients reduced or zeroed, and ops
that train nothing), and settings that make a step longer (anomaly detection, 64 bits, convolutions without oneDNN)."""

from __future__ import annotations

import numpy as np

from gputop.advice.fix_code import code
from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import NO_GPU, TraceFacts, host_rows_in_steps, share_of_steps, without_recorder
from gputop.advice.trace.job import Job
from gputop.advice.verdict import Explanation, Verdict
from gputop.analysis.layers.ops_without_gradient import ops_without_gradient
from gputop.core.findings import MEDIUM_SHARE, Culprit, Severity
from gputop.text.units import percent, seconds
from gputop.trace.host_calls import BACKWARD_NODE, GRADIENT, OPTIMIZER_CALL, process_of, within_calls
from gputop.trace.intervals import Spans, contains, coverage, intersect, merge, union
from gputop.trace.lookups import computes_on_cpu, host_rows, host_stat, name_mask, outermost_rows, spans_of
from gputop.trace.model import I64
from gputop.trace.nesting import begun_within
from gputop.trace.threads import MAIN, lines_of

_DDP = r"DistributedDataParallel\.forward$"
_ZERO_GRAD = r"Optimizer\.zero_grad#"
_ZEROES = r"aten::(?:zero_|_foreach_zero_|fill_)$"
_FILLS_LISTS = r"aten::_foreach_zero_$"
_ADD = r"aten::(?:add_|add|_foreach_add_?)$"
# Each AllReduce once: PyTorch's own op, and gloo's or NCCL's range around its work.
_REDUCE, _REDUCES = r"c10d::allreduce_$", r"(?:gloo|nccl):all_?reduce$"
_NAMED_OPS = 3
_LOSS = (r"aten::(?:nll_loss|cross_entropy|mse_loss|l1_loss|smooth_l1_loss|huber_loss|binary_cross_entropy|kl_div|"
         r"ctc_loss)")


class AccumulationSync(Verdict, frozen=True, kw_only=True):
    passes: int  # forward passes from one call of the optimizer to the next
    reductions: float  # AllReduces after each of them
    communication: float  # share of the step in which gradients are reduced, exposed on GPUs


def judge_accumulation_sync(facts: TraceFacts) -> AccumulationSync | None:
    """DistributedDataParallel reduces the gradients after each of several backward passes that one update sums up."""
    trace, host = facts.trace, facts.trace.host
    marks = [host_rows(trace, pattern) for pattern in (_DDP, OPTIMIZER_CALL, _REDUCE)]
    processes = [process_of(trace, rows) for rows in marks]
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
    spans = {gpu: parts["collectives"] for gpu, parts in facts.parts.items()}
    if facts.active:
        communication = facts.shares.get("collectives", 0.0)
    else:
        work = host_rows(trace, _REDUCES)
        numbers = process_of(trace, work)
        communication = float(np.mean([share_of_steps(facts, spans_of(facts.trace, work[numbers == process]))
                                       for process in np.unique(processes[0]).tolist()]))
    share = communication * (most - 1) / most
    if share < limit("accumulation_sync.share"):
        return None
    return AccumulationSync(gpus=facts.active_numbers, share=share, claim=facts.on_cpus("about"), spans=spans,
                            passes=most, reductions=float(np.mean(reductions)), communication=communication)


def describe_accumulation_sync(v: AccumulationSync, job: Job) -> Explanation:
    return Explanation(
        title=f"Gradients are reduced {v.passes} times per update",
        why=(f"The optimizer runs once every {v.passes} backward passes, but DistributedDataParallel reduces the "
             f"gradients after each pass ({v.reductions:.0f} AllReduces each time). The reductions take "
             f"{percent(v.communication)} of the {job.basis}, although only the last reduction is needed."),
        evidence={"accumulated_passes_count": float(v.passes), "reducing_ratio": v.communication},
        action="Reduce gradients only after the last backward pass: run the other passes within no_sync().",
        snippet=code("accumulation_sync", "pytorch"),
        gain="assumes that only the last reduction of each update remains",
        source=source("accumulation_sync.share", "accumulation_sync.updates", "accumulation_sync.reduced"))


class GradientsZeroed(Verdict, frozen=True, kw_only=True):
    zeroing_s: float  # per step
    adding_s: float  # per step: the backward pass adds to what is zero


def judge_gradients_zeroed(facts: TraceFacts) -> GradientsZeroed | None:
    """zero_grad() fills gradients with zeros, to which the backward pass then adds, instead of dropping them."""
    trace, host = facts.trace, facts.trace.host
    within, fills = spans_of(facts.trace, host_rows(trace, _ZERO_GRAD)), host_rows(trace, _ZEROES)
    fills = fills[coverage(within, host.start_ns[fills], host.start_ns[fills] + 1) > 0]
    if not len(fills):
        return None
    nodes, adds = spans_of(facts.trace, host_rows(trace, GRADIENT)), host_rows(trace, _ADD)
    adds = adds[coverage(nodes, host.start_ns[adds], host.start_ns[adds] + 1) > 0]
    # Of several backward passes for one update only the first one adds to zeros. How many there are is known where each
    # gradient is filled by itself.
    by_itself = not name_mask(trace, _FILLS_LISTS)[host.name[fills]].any()
    passes = max(1.0, len(adds) / len(fills))
    zeroing, adding = _work(facts, fills), _work(facts, adds) / passes if by_itself else 0.0
    share = zeroing + adding
    if share < limit("gradients_zeroed.share"):
        return None
    return GradientsZeroed(gpus=facts.active_numbers, share=share, claim=facts.on_cpus("about"),
                           zeroing_s=zeroing * facts.period_s, adding_s=adding * facts.period_s)


def _work(facts: TraceFacts, rows: I64) -> float:
    """The share of the steps that these ops take: their kernels on GPUs, else themselves."""
    if not facts.active:
        return share_of_steps(facts, spans_of(facts.trace, rows))
    device, spans = facts.trace.device, spans_of(facts.trace, rows)
    of_ops = np.flatnonzero(coverage(spans, device.launch_ns, device.launch_ns + 1) > 0)
    time = int(coverage(facts.analyzed_spans, device.start_ns[of_ops], device.end_ns[of_ops]).sum())
    return time / (facts.analyzed_spans.total * len(facts.active)) if facts.analyzed_spans.total else 0.0


def describe_gradients_zeroed(v: GradientsZeroed, job: Job) -> Explanation:
    return Explanation(
        title=f"Gradients are filled with zeros at each update: {percent(v.share)} of the {job.basis}",
        why=(f"zero_grad() fills all gradients with zeros, which takes {seconds(v.zeroing_s)} of {job.each}, and "
             f"the backward pass adds to them{f', which takes {seconds(v.adding_s)}' if v.adding_s else ''}. With "
             "set_to_none, the backward pass writes its results directly."),
        evidence={"zeroing_s": v.zeroing_s, "adding_zeros_s": v.adding_s, "share_ratio": v.share},
        action="Drop the gradients instead, as PyTorch 2 does by default. This also frees memory between steps.",
        snippet=code("gradients_zeroed", "pytorch"),
        gain="assumes that writing zeros" + (" and adding to them take no time" if v.adding_s else " takes no time"),
        source=source("gradients_zeroed.share"))


class OpsOutsideModel(Verdict, frozen=True, kw_only=True):
    ops_s: float  # per step
    names: str
    evaluates: bool  # most of it runs the model, and computes a loss of which nothing learns


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
    runs_model = result.product_ns > limit("ops_without_gradient.products") * total
    evaluates = runs_model and int(name_mask(trace, _LOSS)[host.name[ops]].sum()) >= steps.count
    if not total or runs_model > evaluates:
        return None  # a second model runs without training, as a teacher does
    spans = intersect(result.spans, facts.analyzed_spans)
    share, _ = without_recorder(facts, spans.total / steps.count / 1e9, spans)
    if share < limit("ops_without_gradient.share"):
        return None
    kinds, which = np.unique(host.name[ops], return_inverse=True)
    times = np.bincount(which, within)
    longest = [i for i in np.argsort(-times).tolist() if times[i] >= limit("ops_without_gradient.named") * total]
    return OpsOutsideModel(
        gpus=(), share=share, claim="about", ops_s=share * facts.period_s, spans={NO_GPU: spans}, evaluates=evaluates,
        names=", ".join(trace.names[kinds[i]] for i in longest[:_NAMED_OPS]) or "many kinds",
        culprits=tuple(Culprit(trace.names[kinds[i]], "host", float(times[i]) / steps.count / 1e9, facts.basis,
                               at_s=int(host.start_ns[ops[which == i]][within[which == i].argmax()]) / 1e9)
                       for i in longest[:_NAMED_OPS]))


def describe_ops_without_gradient(v: OpsOutsideModel, job: Job) -> Explanation:
    causes = ("They include a loss, so the model is evaluated." if v.evaluates else
              "Typical causes are metrics, histograms, and other logging, or masks and tables that are recomputed each "
              "time.")
    return Explanation(
        title=(f"An evaluation in each {job.basis} takes {percent(v.share)} of it" if v.evaluates else
               f"Ops outside the model take {percent(v.share)} of the {job.basis}: {v.names}"),
        why=("No gradient passes through these ops, and they do not belong to the optimizer. Together with the Python "
             f"code between them, these ops take {seconds(v.ops_s)} of {job.each}. {causes}"),
        evidence={"ops_without_gradient_s": v.ops_s, "share_ratio": v.share},
        action=("Evaluate every tenth step or less often, under torch.inference_mode()." if v.evaluates else
                "Compute metrics and logging every hundred steps. Compute constant data once, before the loop. Prepare "
                "the batch in DataLoader workers."),
        snippet=code("ops_without_gradient", "pytorch-evaluates" if v.evaluates else "pytorch"),
        gain="assumes that these ops take no time",
        source=source("ops_without_gradient.share", "ops_without_gradient.products"))


_CHECK = r"aten::isnan$"
_CHECKS = r"aten::(?:isnan|_is_any_true|any|item|is_nonzero|_local_scalar_dense)$"
_PRODUCT = (r"aten::(?:addmm|mm|bmm|baddbmm|addmv|mv|dot|linear|matmul|_?convolution\w*|thnn_conv2d|_slow_conv2d\w*|"
            r"mkldnn_\w+|einsum|lstm|gru|_?scaled_dot_product\w*)$")


class AnomalyMode(Verdict, frozen=True, kw_only=True):
    nodes: float  # of the backward pass, per step
    checked: float  # share of them whose results are looked at for NaN
    checks_s: float  # per step
    stacks_s: float = 0.0  # per step, of the forward pass; not known where GPUs compute


# The ops whose length is that of a stack (percentile), and how many times as long it takes for others.
_CHEAPEST, _STACK_AT_MOST = 10, 1.5


def judge_anomaly_mode(facts: TraceFacts) -> AnomalyMode | None:
    """Autograd's anomaly detection is on: each node of the backward pass looks for NaN in what it computes."""
    host, trace = facts.trace.host, facts.trace
    nodes, checks = host_rows(trace, BACKWARD_NODE), host_rows(trace, _CHECK)
    if not len(checks) or not len(nodes):
        return None
    checked = begun_within(host, nodes, host.line[checks], host.start_ns[checks]) > 0
    if checked.mean() < limit("anomaly_mode.checked"):
        return None
    rows = host_rows(trace, _CHECKS)
    rows = rows[within_calls(trace, nodes, host.line[rows], host.start_ns[rows])]
    after = rows[name_mask(trace, _CHECK)[host.name[rows]]]
    time = merge(*(_after_checks(facts, rows, line) for line in np.unique(host.line[after]).tolist()))
    checks_s = share_of_steps(facts, time) * facts.period_s
    stacks_s = 0.0 if facts.active else _stacks_s(facts, nodes)
    share, _ = (checks_s / facts.period_s, 0) if facts.active else without_recorder(facts, checks_s + stacks_s, time)
    per = facts.steps_or_window
    within = len(host_rows_in_steps(facts, BACKWARD_NODE))
    severity: Severity = "high" if share >= MEDIUM_SHARE else "medium"
    return AnomalyMode(gpus=facts.active_numbers, share=share, severity=severity, claim=facts.on_cpus("at least"),
                       nodes=within / per, checked=float(checked.mean()), checks_s=checks_s, stacks_s=stacks_s,
                       culprits=(Culprit("aten::isnan", "host", checks_s, facts.basis,
                                         at_s=int(host.start_ns[after[0]]) / 1e9),))


def _stacks_s(facts: TraceFacts, nodes: I64) -> float:
    """Least seconds per step in which the forward pass keeps a Python stack for each of these nodes: it is part of the
    op that makes the node, so what the cheapest ops take is nearly all of it. The same stack takes others up to half
    as long again."""
    host = facts.trace.host
    rows, number = host_stat(host, "sequence")
    in_nodes = np.isin(rows, nodes)
    forward = ~in_nodes & np.isin(number, number[in_nodes]) & contains(facts.analyzed_spans, host.start_ns[rows])
    rows, number = rows[forward], number[forward]
    in_order = np.lexsort((host.start_ns[rows], host.line[rows]))
    rows, number = rows[in_order], number[in_order]
    if not len(rows):
        return 0.0
    start, end, line = host.start_ns[rows], host.end_ns[rows], host.line[rows]
    innermost = np.append((start[1:] >= end[:-1]) | (line[1:] != line[:-1]), True)
    # Several ops have one number until one of them makes a node.
    of_node = np.unique(np.stack((line, number))[:, innermost], axis=1, return_inverse=True)[1].reshape(-1)
    longest = np.zeros(of_node.max() + 1, np.int64)
    np.maximum.at(longest, of_node, (end - start)[innermost])
    least_ns = np.minimum(longest, _STACK_AT_MOST * np.percentile(longest, _CHEAPEST))
    return float(least_ns.sum()) / 1e9 / (facts.steps_or_window * facts.processes)


def _after_checks(facts: TraceFacts, rows: I64, line: int) -> Spans:
    """Spans from each check's begin to the end of the last op in a row that belongs to it."""
    host, trace = facts.trace.host, facts.trace
    outermost = outermost_rows(trace, rows[host.line[rows] == line])
    begins = name_mask(trace, _CHECK)[host.name[outermost]]
    group = np.cumsum(begins)
    kept = group > 0
    outermost, group = outermost[kept], group[kept]
    first = np.flatnonzero(np.append(True, group[1:] != group[:-1]))
    last = np.append(first[1:], len(outermost)) - 1
    # An op far behind its check is the backward pass's own.
    nodes = host_rows(trace, BACKWARD_NODE)
    nodes = nodes[host.line[nodes] == line]
    node_end = np.sort(host.end_ns[nodes])
    ends = node_end[np.minimum(np.searchsorted(node_end, host.start_ns[outermost[first]]), len(node_end) - 1)]
    done = np.maximum(host.end_ns[outermost[last]], host.end_ns[outermost[first]])
    return union(host.start_ns[outermost[first]], np.minimum(done, ends))


def describe_anomaly_mode(v: AnomalyMode, job: Job) -> Explanation:
    return Explanation(
        title="Autograd anomaly detection is enabled",
        why=(f"{percent(v.checked)} of the {v.nodes:,.0f} backward nodes check their results for NaN, which takes "
             f"{seconds(v.checks_s)} of {job.each}. Anomaly detection also keeps a Python stack for each op of "
             "the forward pass, " + (f"which takes at least {seconds(v.stacks_s)}." if v.stacks_s else
                                     "which the trace cannot separate from the op itself.")),
        evidence={"nodes_per_step": v.nodes, "checked_ratio": v.checked, "checks_s": v.checks_s,
                  "share_ratio": v.share, **({"stacks_s": v.stacks_s} if v.stacks_s else {})},
        action="Disable anomaly detection, which is meant for finding NaNs, not for training.",
        snippet=code("anomaly_mode", "pytorch"),
        gain="assumes that these checks" + (" and stacks take no time" if v.stacks_s else
                                            " take no time; the forward pass also becomes faster"),
        source=source("anomaly_mode.checked"))


class DoublePrecision(Verdict, frozen=True, kw_only=True):
    ratio: float  # share of the step in products of 64 bits
    of_products: float  # share of all products' time


def judge_double_precision(facts: TraceFacts) -> DoublePrecision | None:
    """Most matrix products and convolutions on the CPU compute in 64 bits: by accident, as of NumPy's arrays."""
    trace, host = facts.trace, facts.trace.host
    if not computes_on_cpu(trace):
        return None
    products = host_rows(trace, _PRODUCT, lines_of(trace, MAIN))
    double, _ = host_stat(host, "float64")
    wide = products[np.isin(products, double)]
    if not len(wide):
        return None
    ratio, every = (share_of_steps(facts, spans_of(facts.trace, rows)) for rows in (wide, products))
    share = ratio * limit("double_precision.saved")
    if ratio < limit("double_precision.products") * every or share < limit("double_precision.share"):
        return None
    longest = wide[(host.end_ns[wide] - host.start_ns[wide]).argmax()]
    return DoublePrecision(
        gpus=(), share=share, ratio=ratio, of_products=ratio / every, claim="about",
        culprits=(Culprit(trace.names[host.name[longest]], "host", ratio * facts.period_s, facts.basis,
                          at_s=int(host.start_ns[longest]) / 1e9),))


def describe_double_precision(v: DoublePrecision, job: Job) -> Explanation:
    return Explanation(
        title=f"64-bit matmuls and convolutions take {percent(v.ratio)} of the {job.basis}",
        why=(f"64-bit inputs (torch.float64) account for {percent(v.of_products)} of the time of matmuls and "
             "convolutions. 32-bit inputs need half the time and memory. NumPy creates 64-bit arrays by default."),
        evidence={"float64_ratio": v.ratio, "float64_products_ratio": v.of_products},
        action="Use torch.float32 for the model and batches, unless the computation needs 64-bit precision.",
        snippet=code("double_precision", "pytorch"),
        gain="assumes that these ops take half the time; other ops also move half the bytes",
        source=source("double_precision.saved", "double_precision.share"))


class OnednnOff(Verdict, frozen=True, kw_only=True):
    op: str


def judge_onednn_off(facts: TraceFacts) -> OnednnOff | None:
    """Convolutions in 32 bits of 16 samples and more run PyTorch's own code, which it uses for them without oneDNN."""
    trace, host = facts.trace, facts.trace.host
    if not computes_on_cpu(trace):
        return None
    rows, batch = host_stat(host, "batch")
    rows = rows[batch >= limit("onednn_off.batch")]
    rows = rows[lines_of(trace, MAIN)[host.line[rows]] & ~np.isin(rows, host_stat(host, "float64")[0])]
    # The backward pass of the same convolutions has one op.
    backward = host_rows(trace, r"aten::convolution_backward$", lines_of(trace, MAIN))
    if not len(rows) or len(host_rows(trace, r"aten::mkldnn_convolution")):
        return None
    ratio = share_of_steps(facts, spans_of(facts.trace, np.sort(np.concatenate((rows, backward)))))
    if ratio < limit("onednn_off.share"):
        return None
    return OnednnOff(gpus=(), share=ratio, op=trace.names[host.name[rows[0]]],
                     culprits=(Culprit(trace.names[host.name[rows[0]]], "host", ratio * facts.period_s, facts.basis,
                                       at_s=int(host.start_ns[rows[0]]) / 1e9),))


def describe_onednn_off(v: OnednnOff, job: Job) -> Explanation:
    return Explanation(
        title=f"Convolutions without oneDNN take {percent(v.share)} of the {job.basis}",
        why=(f"Convolutions of at least 16 samples run as {v.op} in the forward and backward passes. Unless oneDNN is "
             "disabled or not built in, PyTorch runs such convolutions with oneDNN, which is faster."),
        evidence={"slow_convolutions_ratio": v.share},
        action="Enable oneDNN, or install a PyTorch build that includes it.",
        snippet=code("onednn_off", "pytorch"), gain="assumes that these convolutions take no time",
        source=source("onednn_off.batch", "onednn_off.share"))
