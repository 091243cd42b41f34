"""Ops of a PyTorch training loop that no gradient passes through: metrics, histograms, masks made anew.

1. The backward pass shows by its sequence numbers which op made each of its functions
   (:func:`gputop.analysis.layers.pytorch.linked_ops`). An op on the loop's thread that is such a one, or holds one, is
   a part of the model or its loss.
2. Ops in a function of autograd, in the optimizer and in the ``DataLoader`` are of these.
3. Of the rest those count whose results are new, and those that Python reads at once (``item``): for a log. Other ops
   in place (``add_``), on lists (``_foreach_norm``) and norms update weights, averages of them and gradients; copies
   and what makes tensors prepare the batch; what draws a sample (``multinomial``) chooses the actions that the training
   needs.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from gputop.analysis.host.host_ops import PAUSE_NS
from gputop.analysis.layers.pytorch import autograd_functions, linked_ops
from gputop.analysis.steps.pytorch_ops import thread_of_ops
from gputop.analysis.steps.training_loops import LOADER
from gputop.trace.intervals import Spans, contains, coverage, merge, union
from gputop.trace.lookups import host_rows, name_mask, outermost_rows, spans_of
from gputop.trace.model import I64, Trace

_OP = r"(?!autograd::|c10d::|record_param_comms)[\w.]+::\S|\w+Backward\d*$|CompiledFunction|Torch-Compiled Region"
# Of TorchScript, what its executor computes a gradient for is linked as a whole, if at all.
_OTHER_PARTS = rf"<forward op>$|prim::|autograd::engine::evaluate_function|Optimizer\.(?:step|zero_grad)#|{LOADER}"
_NEW_RESULTS = (r"aten::(?!_foreach|_amp|(?:linalg_)?(?:vector_|matrix_)?norm$|\w+_$|_?to(?:_copy)?$|copy|contiguous$|"
                r"clone$|detach$|empty|zeros|ones|full|stack$|cat$|item$|is_nonzero$|_local_scalar_dense$|multinomial$|"
                r"bernoulli$|normal$|rand)")
_READ = r"aten::(?:item|_local_scalar_dense)$"
_PRODUCT = (r"aten::(?:addmm|mm|bmm|baddbmm|linear|matmul|_?convolution\w*|mkldnn_\w+|einsum|lstm|gru|"
            r"_?scaled_dot_product\w*)$")


class OpsWithoutGradient(Struct, frozen=True):
    """``rows`` of the host's events, in order of time; ``spans`` are when they run, and Python's short way from one to
    the next; ``product_ns``: of their time goes into matrix products and convolutions, as of a second model."""

    rows: I64
    spans: Spans
    product_ns: int


def ops_without_gradient(trace: Trace) -> OpsWithoutGradient | None:
    """Ops without a gradient of the loop's thread; None where it is not known, or no backward pass names its ops."""
    line, linked = thread_of_ops(trace), linked_ops(trace, autograd_functions(trace))[1]
    if line is None or not len(linked):
        return None
    host = trace.host
    rows, parts = host_rows(trace, _OP), host_rows(trace, _OTHER_PARTS)
    parts = parts[host.line[parts] == line]
    ops = outermost_rows(trace, rows[host.line[rows] == line])
    linked_ns = np.sort(host.start_ns[linked[host.line[linked] == line]])
    of_model = np.searchsorted(linked_ns, host.end_ns[ops]) > np.searchsorted(linked_ns, host.start_ns[ops])
    outside = ~contains(spans_of(trace, parts), host.start_ns[ops]) & ~of_model
    read = name_mask(trace, _READ)[host.name[ops]]
    counts = outside & (name_mask(trace, _NEW_RESULTS)[host.name[ops]] | read | np.append(read[1:], False))
    counts &= ~read | np.append(False, counts[:-1])  # a loss that is read is the model's
    start, end = host.start_ns[ops], host.end_ns[ops]
    passes_on = counts[1:] & counts[:-1] & (start[1:] - end[:-1] <= PAUSE_NS)
    ops, spans = ops[counts], merge(union(start[counts], end[counts]), union(end[:-1][passes_on], start[1:][passes_on]))
    products = host_rows(trace, _PRODUCT)
    products = products[host.line[products] == line]
    computing = spans_of(trace, products)
    return OpsWithoutGradient(ops, spans, int(coverage(computing, host.start_ns[ops], host.end_ns[ops]).sum()))
