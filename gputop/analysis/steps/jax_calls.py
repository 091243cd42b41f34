"""Calls of jitted functions from Python in JAX: those of the user's own, and JAX's own ops, run one by one.

Outside of ``jax.jit`` each op is a jitted function too: ``params + update`` calls ``add``. The loop then calls hundreds
of them a step, and one ``add`` is no step. Which is:

1. the user's function that takes most time marks the steps, of those that compute gradients where the trace shows it,
   or are called once in a period of the sequence of names: a layer, a helper or a learner's policy may take more;
2. without one, or where each is called several times in a step, as for each layer, the period of the sequence of names:
   the loop's, not that of an op; it begins with the function that takes most time of those called once in a period.
   Where nothing repeats there is no step, nor where a shorter sequence repeats within a longer one: an optimizer does
   the same for each parameter.

On a CPU, calls queue programs, of which a thread of JAX's own executes one after the other, up to 32 later. Where that
thread hardly pauses, the calls show no step time, and a read of a result waits for all that are queued: the steps are
the executions (:func:`by_executions`).
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import permutations

import numpy as np
import numpy.typing as npt

from gputop.analysis.steps.anchors import BY_THEIR, Anchors
from gputop.analysis.steps.compilations import PJIT, function_name
from gputop.analysis.steps.loop_selection import pauses_for_other_calls
from gputop.analysis.steps.phases import UNKNOWN
from gputop.analysis.steps.sequence_period import FEWEST, sequence_period
from gputop.trace.lookups import Mask, host_rows, host_stat, name_mask, outermost_rows
from gputop.trace.model import I64, Trace
from gputop.trace.threads import MAIN, lines_of

# jax.numpy's functions, jax.nn's and jax.random's, and lax's primitives: the names that JAX gives their programs.
_OWN = re.compile(
    r"_?(?:abs(?:olute)?|a?(?:cos|sin|tan)h?|arc(?:cos|sin|tan)h?|(?:arc|a)tan2|add(?:_any)?|all|any|allclose|angle|append|"
    r"arange|arg(?:max|min|sort|partition)|around|astype|atleast_[123]d|average|bitwise_\w+|broadcast(?:_in_dim|_to)?|cbrt|"
    r"ceil|celu|cholesky|clamp|clip|concatenate|conj(?:ugate)?|conv_general_dilated|convert_element_type|convolve|copy|"
    r"copysign|count_nonzero|cross|cum(?:sum|prod|max|min)|deg2rad|diag(?:onal)?|diff|digitize|div(?:ide|mod)?|dot|"
    r"dot_general|dynamic_(?:update_)?(?:slice|index_in_dim)|e(?:igh|insum|lu|q|qual|rfc?|rf_inv|xp2?|xpm1|xpand_dims|ye)|"
    r"flip|float_power|floor(?:_divide)?|fm(?:ax|in|od)|fold_in|full(?:_like)?|gather|ge|gelu|glu|greater(?:_equal)?|gt|"
    r"hard_\w+|hypot|identity|inner|integer_pow|inv(?:ert)?|iota|is_?(?:close|finite|inf|nan)|kron|lax_slice|le|"
    r"leaky_relu|left_shift|less(?:_equal)?|lgamma|linspace|log(?:1p|2|10|istic|addexp|sumexp)?|log_(?:sigmoid|softmax)|"
    r"logical_\w+|lt|matmul|max(?:imum)?|mean|median|min(?:imum)?|mish|mod|moveaxis|mul(?:tiply)?|multi_slice|"
    r"nan(?:_to_num|max|mean|min|std|sum|var)|ne(?:g(?:ative)?)?|norm(?:al(?:_real)?)?|not_equal|one_hot|ones(?:_like)?|"
    r"outer|pad|percentile|positive|pow(?:er)?|prod|quantile|randint|random_(?:bits|fold_in|seed|split|wrap|unwrap)|ravel|"
    r"real|reciprocal|reduce_\w+|rem(?:ainder)?|relu6?|repeat|reshape|resize|rev|right_shift|rint|roll|round|rsqrt|"
    r"scatter(?:[_-]\w+)?|searchsorted|select(?:_n|_and_\w+)?|selu|sigmoid|sign(?:bit)?|silu|sin[ch]?|slice|soft(?:max|plus)|"
    r"soft_sign|solve|sort|split|sqrt|square|squeeze|stack|std|sub(?:tract)?|sum|swapaxes|take(?:_along_axis)?|tanh?|"
    r"tensordot|threefry\w*|tile|top_k|trace|transpose|trapezoid|tri[lu]|true_divide|trunc|uniform|unstack|var|vdot|"
    r"where|xor|zeros(?:_like)?|"
    r"corrcoef|correlate|cov|det|eigvalsh?|fabs|fft|frexp|gcd|heaviside|imag|lcm|ldexp|lexsort|log(?:pdf|pmf|sf|cdf)|lu|"
    r"matrix_(?:power|rank)|matvec|nancum(?:sum|prod)|nan(?:median|percentile|prod|quantile)|nextafter|partition|polyval|"
    r"put_along_axis|qr|rad2deg|rot90|slogdet|sparse_(?:plus|sigmoid)|squareplus|svd|unwrap|vander|vecmat)$|"
    r"_(?:bernoulli|beta|binomial|broadcast_arrays|categorical|cho_solve|conv|cumsum_with_promotion|dirichlet|"
    r"exponential|gamma|gumbel|laplace|lu_solve|multivariate_normal|nanarg(?:max|min)|orthogonal|philox\w+|pinv|"
    r"poisson\w*|ptp|rademacher|roll_(?:static|dynamic)|searchsorted_\w+|shuffle|solve_triangular|truncated_normal|"
    r"unique_sorted_mask)$")


_QUEUE, _EXECUTION = ("tf_XLAPjRtCpuClient", "tf_XLATfrtCpuClient"), "ThunkExecutor::Execute"  # before 2025: TFRT
# Calls between two executions; and share of an execution, of which the usual pause before it is less. gputop's own
# figures.
_SEVERAL, _HARDLY = 3, 0.1
# Calls of one step have so small a share of the usual step's calls between them, and are as many in so large a share of
# the steps. gputop's own figures.
_AT_ONCE, _AS_MANY = 0.1, 0.8
_MOST_PARTS = 16  # of a step, that call one function
_BACKWARD, _OF_PASS = "transpose(jvp(", "jvp("  # in the names of ops that jax.grad makes
_UPDATE = 0.1  # share of a program's ops, of which those of an update are more. gputop's own figure


def own_ops(trace: Trace) -> Mask:
    """Mask of ``trace.names`` that are calls of JAX's own ops, as :func:`gputop.trace.lookups.name_mask`."""
    return name_mask(trace, _calls_own_op)


def _calls_own_op(name: str) -> bool:
    return name.startswith("PjitFunction(") and is_own_op(function_name(name))


def is_own_op(function: str) -> bool:
    """Return whether a jitted function of this name is one of JAX's own ops."""
    return _OWN.match(function) is not None


def outer_calls(trace: Trace) -> I64:
    """Calls of jitted functions on Python's threads that lie in no other one, in order of time."""
    return outermost_rows(trace, host_rows(trace, PJIT, lines_of(trace, MAIN)))


def marking_calls(trace: Trace) -> I64:
    """The calls among which are those that begin the steps, by the rules above; all of them where no op of JAX's own is
    called from Python."""
    host, is_own = trace.host, own_ops(trace)
    all_rows = host_rows(trace, PJIT)
    if not is_own[host.name[all_rows]].any():
        return all_rows
    rows = outer_calls(trace)
    lines, counts = np.unique(host.line[rows], return_counts=True)
    rows = rows[host.line[rows] == lines[counts.argmax()]] if len(lines) else rows
    name, length = host.name[rows], host.end_ns[rows] - host.start_ns[rows]
    users, period = ~is_own[name], sequence_period(name)
    functions, counts = np.unique(name[users], return_counts=True)
    if period is None and (around := _once_around_parts(name, length, functions)) is not None:
        return rows[name == around]
    once = np.ones(len(counts), bool) if period is None else _once(counts, period, len(name))
    gradients, updates = (gradient_functions(trace, share)[functions] for share in (0.0, _UPDATE))
    begins = once | gradients  # what is called several times and computes no gradient is a layer, or a helper
    if (once | updates).any() and counts[begins].max(initial=0) >= FEWEST:
        # Of several updates between two evaluations each is a step.
        calls = [nth if update else nth[first_calls(nth)] for nth, update in zip(
            (np.flatnonzero(name == kind) for kind in functions[begins]), updates[begins], strict=True)]
        return rows[np.sort(np.concatenate(calls))]
    if period is None:
        return rows[:0]
    # Of the functions called once in a period the one that takes most time; of several the first in the alphabet.
    kinds, which, counts = np.unique(name, return_inverse=True, return_counts=True)
    times, once = np.bincount(which, length, len(kinds)), np.flatnonzero(_once(counts, period, len(name)))
    chosen = kinds[once] if len(once) else kinds[[counts.argmin()]]
    return rows[name == min(chosen.tolist(), key=lambda kind: (-times[kinds == kind][0], trace.names[kind]))]


def gradient_functions(trace: Trace, update: float = 0.0) -> Mask:
    """Mask of ``trace.names`` that are calls of functions whose program, jit_NAME, has ops of a backward pass, and of
    no pass this share of all, as an ``update`` of parameters has; none where the trace names no program's ops."""
    (rows, ops), (_, module) = host_stat(trace.host, "hlo"), host_stat(trace.host, "hlo_module")
    backward, of_pass = (np.array([*(part in op.op_name for op in trace.hlo_ops), False], bool)[ops]
                         for part in (_BACKWARD, _OF_PASS))  # -1: the op is not known
    programs = np.unique(module[backward]) if len(rows) and len(rows) == len(module) else ()
    functions = {trace.names[program].removeprefix("jit_") for program in programs
                 if not of_pass[module == program].mean() > 1 - update}
    return np.array([*(name.startswith("PjitFunction(") and function_name(name) in functions for name in trace.names),
                     False])


def by_executions(trace: Trace, anchors: Anchors) -> Anchors:
    """The steps as the executions of the function whose calls these are, where several calls come between two of these,
    or several of these between two calls, and the thread that executes hardly pauses between two programs, nor runs two
    at once as for several devices; else as they are."""
    host, (op_rows, module) = trace.host, host_stat(trace.host, "hlo_module")
    if len(trace.device) or not len(op_rows):
        return anchors
    queue = np.array([*(line.name.startswith(_QUEUE) for line in trace.lines), False], bool)
    rows, begun = (host_rows(trace, pattern, queue) for pattern in (_EXECUTION, rf"{_EXECUTION}$"))
    start = host.start_ns[outermost_rows(trace, begun, by_name=True)]
    if len(start) < FEWEST:
        return anchors
    until = np.maximum.accumulate(host.end_ns[rows])[np.searchsorted(host.start_ns[rows], start[1:]) - 1]
    pause = start[1:] - until
    if np.percentile(pause, 10) < 0 or np.median(pause) > _HARDLY * np.median(np.diff(start)):
        return anchors
    ops = np.argsort(host.start_ns[op_rows], kind="stable")  # the first op after its begin tells an execution's program
    first = np.searchsorted(host.start_ns[op_rows[ops]], start)
    names = np.array([trace.names[name] for name in np.append(module[ops], 0)[first]])
    is_step = names == anchors.name.removeprefix("calls of ").replace("PjitFunction(", "jit_").removesuffix(")")
    steps, others = start[is_step], np.flatnonzero(~is_step[:-1])
    queued = (np.diff(np.searchsorted(a, b)) for a, b in ((np.sort(anchors.start_ns), steps),
                                                          (steps, np.sort(anchors.start_ns))))
    if len(steps) < FEWEST or not any((count >= _SEVERAL).any() for count in queued):
        return anchors
    pauses = pauses_for_other_calls(steps, start[others], until[others])
    return anchors._replace(
        name=f"{anchors.name}{BY_THEIR}executions: Python runs ahead", start_ns=steps, end_ns=steps,
        edges_ns=np.concatenate((steps, pauses.start)),
        other_loops={phase: pauses for phase in list(anchors.other_loops)[:1] or [UNKNOWN] if len(pauses.start)})


def first_calls(nth: I64) -> I64:
    """Index of the first call of each step, of calls of one function by their places among all calls: each of them,
    unless most steps make the same number of them with hardly another call between. The usual way to the next step is
    that in which half of all calls lie, however many short ones there are."""
    apart = np.sort(np.diff(nth))
    usual = apart[np.searchsorted(np.cumsum(apart), apart.sum() / 2)] if len(apart) else 0
    first = np.flatnonzero(np.concatenate(([True], np.diff(nth) >= _AT_ONCE * usual)))
    together = np.diff(first)  # of the last step, calls may be missing
    alike = len(together) >= FEWEST and float((together == int(np.median(together))).mean()) >= _AS_MANY
    return first if alike else np.arange(len(nth))


def _once_around_parts(name: npt.NDArray, length: I64, functions: npt.NDArray) -> int | None:
    """The function of these that is called once for several calls of that which takes most time, if these are parts of
    a step, as ``jax.grad`` outside of ``jax.jit`` calls its function forward and backward: what follows each is another
    sequence of calls, and none holds all that follows another, as that of a step that logs would. None: there is none;
    of several the one that takes most time."""
    functions = functions[np.argsort([-length[name == function].sum() for function in functions], kind="stable")]
    parts = np.append(np.flatnonzero(np.isin(name, functions[:1])), len(name))
    for function in functions[1:].tolist():
        calls = np.searchsorted(parts, np.flatnonzero(name == function))
        number = np.diff(calls)
        several = int(np.median(number)) if len(number) >= FEWEST else 0
        if not 2 <= several <= _MOST_PARTS or (number == several).mean() < _AS_MANY:
            continue
        first = calls[:-1][number == several]
        usual = [Counter(Counter(tuple(name[parts[i] + 1:parts[i + 1]].tolist()) for i in (first + part).tolist())
                         .most_common(1)[0][0]) for part in range(several)]
        if not any(a <= b for a, b in permutations(usual, 2)):
            return int(function)
    return None


def _once(counts: I64, period: int, calls: int) -> npt.NDArray[np.bool_]:
    """Mask of what is called so often as once in each period of so many ``calls``."""
    return np.abs(counts * period - calls) <= period
