"""Settings of PyTorch that make a step longer: anomaly detection, 64 bits, convolutions without oneDNN."""

from __future__ import annotations

import numpy as np

from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import TraceFacts, host_spans_of, share_of_steps
from gputop.advice.trace.job import Job
from gputop.advice.verdict import Explanation, Missing, Verdict
from gputop.analysis.host.small_ops import outermost_ops
from gputop.analysis.steps.compilations import holds
from gputop.analysis.steps.membership import in_steps
from gputop.analysis.steps.pytorch_ops import BACKWARD_NODE
from gputop.core.findings import MEDIUM_SHARE, Culprit, Severity
from gputop.text.units import percent, seconds
from gputop.trace.intervals import Spans, coverage, merge, union
from gputop.trace.lookups import computes_on_cpu, host_rows, host_stat, name_mask
from gputop.trace.model import I64
from gputop.trace.threads import MAIN, lines_of

_CHECK = r"aten::isnan$"
_CHECKS = r"aten::(?:isnan|_is_any_true|any|item|is_nonzero|_local_scalar_dense)$"
_PRODUCT = (r"aten::(?:addmm|mm|bmm|baddbmm|addmv|mv|dot|linear|matmul|_?convolution\w*|thnn_conv2d|_slow_conv2d\w*|"
            r"mkldnn_\w+|einsum|lstm|gru|_?scaled_dot_product\w*)$")
_NO_SHAPES = Missing("the types of the ops' inputs, which torch.profiler records with record_shapes=True, as gputop's "
                     "captures do")


def _on_main(facts: TraceFacts, rows: I64) -> I64:
    return rows[lines_of(facts.trace, MAIN)[facts.trace.host.line[rows]]]


# -- anomaly_mode ---------------------------------------------------------------------------------------

class AnomalyMode(Verdict, frozen=True, kw_only=True):
    nodes: float  # of the backward pass, per step
    checked: float  # share of them whose results are looked at for NaN
    checks_s: float  # per step


def judge_anomaly_mode(facts: TraceFacts) -> AnomalyMode | None:
    """Autograd's anomaly detection is on: each node of the backward pass looks for NaN in what it computes."""
    host, trace = facts.trace.host, facts.trace
    nodes, checks = host_rows(trace, BACKWARD_NODE), host_rows(trace, _CHECK)
    if not len(checks) or not len(nodes):
        return None
    checked = np.zeros(len(nodes), bool)
    in_nodes: list[I64] = []
    for line in np.unique(host.line[nodes]).tolist():
        of_line = np.flatnonzero(host.line[nodes] == line)
        of_thread = nodes[of_line]
        checked[of_line] = holds(trace, of_thread, host.start_ns[checks[host.line[checks] == line]])
        work = host_rows(trace, _CHECKS)
        work = work[host.line[work] == line]
        backward = host_spans_of(facts, of_thread)
        in_nodes.append(work[coverage(backward, host.start_ns[work], host.start_ns[work] + 1) > 0])
    if checked.mean() < limit("anomaly_mode.checked"):
        return None
    rows = np.concatenate(in_nodes)
    after = rows[name_mask(trace, _CHECK)[host.name[rows]]]
    time = merge(*(_after_checks(facts, rows, line) for line in np.unique(host.line[after]).tolist()))
    share = share_of_steps(facts, time)
    per = facts.steps_or_window
    within = int(in_steps(host.start_ns[nodes], facts.steps).sum()) if facts.steps is not None else len(nodes)
    # The stacks that the forward pass keeps cost more than the checks: in a job of small layers on the CPU these were
    # 12% of the step, and without anomaly detection it was 75% shorter.
    severity: Severity = "high" if share >= MEDIUM_SHARE else "medium"
    return AnomalyMode(gpus=facts.active_numbers, share=share, severity=severity, frees_cpus=True, nodes=within / per,
                       checked=float(checked.mean()), checks_s=share * facts.period_s,
                       culprits=(Culprit("aten::isnan", "host", share * facts.period_s, facts.basis,
                                         at_s=int(host.start_ns[after[0]]) / 1e9),))


def _after_checks(facts: TraceFacts, rows: I64, line: int) -> Spans:
    """Spans from each check's begin to the end of the last op in a row that belongs to it."""
    host, trace = facts.trace.host, facts.trace
    outermost = outermost_ops(trace, rows[host.line[rows] == line])
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
        title="Autograd's anomaly detection is on",
        why=(f"{percent(v.checked)} of the {v.nodes:,.0f} nodes of the backward pass look for NaN in their results. "
             f"That takes {seconds(v.checks_s)} of each {job.basis} ({percent(v.share)}). Anomaly detection also keeps "
             "a Python stack for each op of the forward pass, which the trace cannot separate from the op."),
        evidence={"nodes_per_step": v.nodes, "checked_ratio": v.checked, "checks_s": v.checks_s,
                  "share_ratio": v.share},
        action="Switch anomaly detection off: it is for finding a NaN, not for training.",
        snippet=("torch.autograd.set_detect_anomaly(False)\n"
                 "# Lightning: Trainer(detect_anomaly=False)"),
        gain="the time of these checks; the forward pass also becomes faster",
        source=source("anomaly_mode.checked"),
    )


# -- double_precision -----------------------------------------------------------------------------------

class DoublePrecision(Verdict, frozen=True, kw_only=True):
    ratio: float  # share of the step in products of 64 bits
    of_products: float  # share of all products' time


def judge_double_precision(facts: TraceFacts) -> DoublePrecision | Missing | None:
    """Most matrix products and convolutions on the CPU compute in 64 bits: by accident, as of NumPy's arrays."""
    trace, host = facts.trace, facts.trace.host
    if not computes_on_cpu(trace):
        return None
    products = _on_main(facts, host_rows(trace, _PRODUCT))
    double, _ = host_stat(host, "float64")
    wide = products[np.isin(products, double)]
    if not len(wide):
        return None
    ratio, every = (share_of_steps(facts, host_spans_of(facts, rows)) for rows in (wide, products))
    share = ratio * limit("double_precision.saved")
    if ratio < limit("double_precision.products") * every or share < limit("double_precision.share"):
        return None
    longest = wide[(host.end_ns[wide] - host.start_ns[wide]).argmax()]
    return DoublePrecision(
        gpus=(), share=share, ratio=ratio, of_products=ratio / every, frees_cpus=True, best_case=True,
        culprits=(Culprit(trace.names[host.name[longest]], "host", ratio * facts.period_s, facts.basis,
                          at_s=int(host.start_ns[longest]) / 1e9),))


def describe_double_precision(v: DoublePrecision, job: Job) -> Explanation:
    return Explanation(
        title=f"Products in 64 bits take {percent(v.ratio)} of the {job.basis}",
        why=(f"{percent(v.of_products)} of the time of matrix products and convolutions has inputs of 64 bits "
             "(torch.float64). 32 bits take half of the time and of the memory. NumPy makes arrays of 64 bits by "
             "default."),
        evidence={"float64_ratio": v.ratio, "float64_products_ratio": v.of_products},
        action="Make model and batches torch.float32, unless the computation needs 64 bits.",
        snippet="x = torch.from_numpy(array).float()\nmodel = model.float()",
        gain="half of these products' time; other ops also move half of the bytes",
        source=source("double_precision.saved", "double_precision.share"),
    )


# -- onednn_off -----------------------------------------------------------------------------------------

class OnednnOff(Verdict, frozen=True, kw_only=True):
    ratio: float  # share of the step in such convolutions
    op: str


def judge_onednn_off(facts: TraceFacts) -> OnednnOff | None:
    """Convolutions in 32 bits of 16 samples and more run PyTorch's own code, which it uses for them without oneDNN."""
    trace, host = facts.trace, facts.trace.host
    if not computes_on_cpu(trace):
        return None
    rows, batch = host_stat(host, "batch")
    rows = rows[batch >= limit("onednn_off.batch")]
    rows = _on_main(facts, rows[~np.isin(rows, host_stat(host, "float64")[0])])
    # The backward pass of the same convolutions has one op.
    backward = _on_main(facts, host_rows(trace, r"aten::convolution_backward$"))
    if not len(rows) or len(host_rows(trace, r"aten::mkldnn_convolution")):
        return None
    ratio = share_of_steps(facts, host_spans_of(facts, np.sort(np.concatenate((rows, backward)))))
    if ratio < limit("onednn_off.share"):
        return None
    return OnednnOff(gpus=(), share=ratio, ratio=ratio, op=trace.names[host.name[rows[0]]],
                     culprits=(Culprit(trace.names[host.name[rows[0]]], "host", ratio * facts.period_s, facts.basis,
                                       at_s=int(host.start_ns[rows[0]]) / 1e9),))


def describe_onednn_off(v: OnednnOff, job: Job) -> Explanation:
    return Explanation(
        title=f"Convolutions without oneDNN take {percent(v.ratio)} of the {job.basis}",
        why=(f"Convolutions of 16 samples and more run as {v.op}, forward and backward. PyTorch runs these by oneDNN, "
             "which is faster, unless it is switched off or not built in."),
        evidence={"slow_convolutions_ratio": v.ratio},
        action="Switch oneDNN on, or install a build of PyTorch that has it.",
        snippet="torch.backends.mkldnn.enabled = True\nassert torch.backends.mkldnn.is_available()",
        gain="at most: the time of these convolutions",
        source=source("onednn_off.batch", "onednn_off.share"),
    )
