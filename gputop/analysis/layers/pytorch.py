"""Phase and place in the model of PyTorch's kernels, by the calls around their launches.

Kernels of PyTorch name no op. What stands around the launch on its thread tells: an autograd function the backward
pass, ``Optimizer.step`` the update, ``nn.Module: Linear_0`` (profiler with ``with_stack`` and ``with_modules``) the
module, a ``record_function`` what the user calls it. A module within an autograd function is computed again. A function
of autograd has the sequence number of the op whose gradient it computes, and with it that op's module.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gputop.analysis.layers.scopes import INPUT, LOSS, PHASES, Scope
from gputop.analysis.steps.training_loops import LOADER
from gputop.trace.host_calls import begins_ns
from gputop.trace.intervals import contains
from gputop.trace.lookups import Mask, host_rows, host_stat, name_mask, spans_of, values_at
from gputop.trace.model import I64, Kind, Trace
from gputop.trace.nesting import depths, nest, nesting_order

_MODULE, _AUTOGRAD = "nn.Module: ", "autograd::engine::evaluate_function: "
_OPTIMIZER = re.compile(r"Optimizer\.(?:step|zero_grad)#(.*)")
_CALL = rf"{_MODULE}|[\w.]+::|Optimizer\.(?:step|zero_grad)#|nccl:"
# Until PyTorch 1.8 functions of autograd stand there by their bare names.
_BARE_AUTOGRAD = r"[A-Z]\w*Backward\d*$|torch::autograd::\w+$"
_LAUNCHING = r"aten::|autograd::engine|Optimizer\.step#"  # one of these is in every trace of PyTorch
_NO_SCOPE = re.compile(r"ProfilerStep#|DistributedDataParallel\.forward|nccl:")
_MAX_LEVELS = 24  # calls around one launch; what is deeper adds no name


class CallScopes(Struct, frozen=True):
    """``of_event``: for each device event the index of its scope, -1: none; ``scopes`` has each once."""

    of_event: I64
    scopes: list[Scope]


class _Calls(NamedTuple):
    """The names of calls that the user made and of autograd's functions, whether there is a backward pass, and whether
    the user marked the forward pass."""

    marked: set[str]
    functions: set[str]
    training: bool
    forward: bool = False


def call_scopes(trace: Trace) -> CallScopes | None:
    """None where the trace is not of PyTorch, or its kernels name their ops."""
    device = trace.device
    if trace.hlo_ops or (device.tf_op >= 0).any() or not len(host_rows(trace, _LAUNCHING)):
        return None
    return _with_buckets(trace, _scopes_at(trace, device.launch_line, device.launch_ns))


def op_scopes(trace: Trace) -> tuple[I64, CallScopes] | None:
    """Rows of the host's ops that are in no other, and their scopes: of a job that computes on the CPU. None where the
    trace is not of PyTorch. An op without length is left out: in whole microseconds it can begin where the op around it
    ends."""
    host = trace.host
    if not len(host_rows(trace, r"aten::")):
        return None
    rows = host_rows(trace, r"(?!autograd)[\w.]+::")
    nesting = nest(host.line[rows], host.start_ns[rows], host.end_ns[rows], host.name[rows], trace.names)
    rows = rows[(nesting.parent < 0) & (host.end_ns[rows] > host.start_ns[rows])]
    return rows, _scopes_at(trace, host.line[rows], host.start_ns[rows])


def _scopes_at(trace: Trace, line: npt.NDArray, time_ns: I64) -> CallScopes:
    """Scopes by the calls that were running on these threads at these times."""
    host, many = trace.host, len(line)
    annotations = host_stat(host, "annotation")[0]
    functions = autograd_functions(trace)
    marked = {trace.names[i] for i in np.unique(host.name[annotations]).tolist()}
    calls = _Calls(marked, {trace.names[i] for i in np.flatnonzero(functions[:-1]).tolist()}, bool(functions.any()),
                   any(_range_name(name).lower() == "forward" for name in marked))
    frames, ops = linked_ops(trace, functions)
    code, function, stacks = _stacks(
        trace, annotations, frames, ops, functions, np.concatenate((line, host.line[ops])),
        np.concatenate((time_ns, host.start_ns[ops])))
    # With the calls around the op whose gradient it computes, where that is known; code 0 has none.
    of_op = np.where(function[:many] >= 0, code[many + function[:many]] if len(ops) else 0, 0)
    pairs, which = np.unique(code[:many] * len(stacks) + of_op, return_inverse=True)
    scopes = []
    for stack, op in (divmod(pair, len(stacks)) for pair in pairs.tolist()):
        alone, *around = stacks[stack]
        scope = _scope("backward" if alone else "", [trace.names[i] for i in around], calls)
        if scope is not None and scope.phase == "backward" and op:
            scope = Scope("backward", (*_layers([trace.names[i] for i in stacks[op][1:]], calls), *scope.path))
        scopes.append(scope)
    has_scope = np.array([scope is not None for scope in scopes], bool)
    number = np.where(has_scope, np.cumsum(has_scope) - 1, -1)
    return CallScopes(number[which], _below_their_parents(trace, [scope for scope in scopes if scope is not None]))


def _with_buckets(trace: Trace, calls: CallScopes) -> CallScopes:
    """Collectives that DistributedDataParallel launched are of the gradients that they reduce."""
    buckets = list(gradient_buckets(trace, autograd_functions(trace)))
    if not buckets:
        return calls
    host, of_event = trace.host, calls.of_event.copy()
    rows = np.concatenate([bucket.functions for bucket in buckets])
    of_functions = _scopes_at(trace, host.line[rows], host.start_ns[rows])
    paths = [of_functions.scopes[i].path if i >= 0 else ("",) for i in of_functions.of_event.tolist()]
    named: dict[str, int] = {}
    for bucket in buckets:
        bucket_paths, paths = paths[:len(bucket.functions)], paths[len(bucket.functions):]
        name = bucket_name(bucket.number, bucket_paths)
        of_event[bucket.events] = len(calls.scopes) + named.setdefault(name, len(named))
    return CallScopes(of_event, [*calls.scopes, *(Scope("backward", (name,)) for name in named)])


def _below_their_parents(trace: Trace, scopes: list[Scope]) -> list[Scope]:
    """The scopes of modules that a function of autograd called, as checkpoints do, below the modules that hold them in
    the forward pass."""
    modules = {name.removeprefix(_MODULE) for name in trace.names if name.startswith(_MODULE)}
    above: dict[str, tuple[str, ...]] = {}
    for scope in scopes:
        for i, part in enumerate(scope.path) if scope.phase == "forward" else ():
            if i and part in modules:
                above.setdefault(part, scope.path[:i])
    return [scope if scope.phase == "forward" or not scope.path else
            Scope(scope.phase, (*above.get(scope.path[0], ()), *scope.path)) for scope in scopes]


def autograd_functions(trace: Trace) -> Mask:
    """Mask of ``trace.names`` that are functions of autograd, as :func:`name_mask`."""
    mask = name_mask(trace, _AUTOGRAD)
    return mask if mask.any() else name_mask(trace, _BARE_AUTOGRAD)


def _stacks(
    trace: Trace, annotations: I64, frames: I64, ops: I64, functions: Mask, line: npt.NDArray, time_ns: I64,
) -> tuple[I64, I64, list[tuple[int, ...]]]:
    """The calls that were running on each of these threads at its time: as a code, an index into the list of all. A
    list's first entry is 1 on a thread that runs the backward pass alone, else 0; names follow, from the outermost on.
    Second: the innermost function of autograd, as index into ``frames``, -1: not among them. ``ops`` are those whose
    gradients the ``frames`` compute."""
    host = trace.host
    called = (name_mask(trace, _CALL) | functions)[host.name]
    called[annotations] = True
    rows = np.flatnonzero(called)
    rows = rows[nesting_order(host.line[rows], host.start_ns[rows], host.end_ns[rows], host.name[rows], trace.names)]
    depth = depths(host.line[rows], host.start_ns[rows], host.end_ns[rows])
    code = np.isin(line, _backward_threads(trace, functions, ops)).astype(np.int64)
    stacks: list[tuple[int, ...]] = [(0,), (1,)]
    innermost = np.full(len(line), -1, np.int64)
    for level in range(min(int(depth.max(initial=-1)) + 1, _MAX_LEVELS)):
        around = _around(trace, rows[depth == level], line, time_ns)
        here = np.flatnonzero(around >= 0)
        inside = here[functions[host.name[around[here]]]]
        index = np.searchsorted(frames, around[inside])
        innermost[inside] = np.where(np.append(frames, -1)[index] == around[inside], index, -1)
        pairs, which = np.unique(code[here] * len(trace.names) + host.name[around[here]], return_inverse=True)
        code[here] = len(stacks) + which
        stacks += [(*stacks[before], inner) for before, inner in (
            divmod(pair, len(trace.names)) for pair in pairs.tolist())]
    return code, innermost, stacks


def linked_ops(trace: Trace, functions: Mask) -> tuple[I64, I64]:
    """Rows of autograd's functions, and for each that of the op whose gradient it computes. Both have the sequence
    number that the op's thread was at; of several ops the last one made the function: one that a class of the user's
    own derived from ``torch.autograd.Function`` names (``CompiledFunction``), too. Numbers that several threads have,
    as those of several ranks do, are left out."""
    host = trace.host
    rows, number = host_stat(host, "sequence")
    named = {name.removeprefix(_AUTOGRAD) for name in trace.names if name.startswith(_AUTOGRAD)}
    backward = functions | name_mask(trace, _BARE_AUTOGRAD)
    backward[:-1] |= [name in named for name in trace.names]
    is_function, is_op = functions[host.name[rows]], ~backward[host.name[rows]]
    order = np.flatnonzero(is_op)
    order = order[np.lexsort((host.start_ns[rows[order]], number[order]))]
    first = np.flatnonzero(np.diff(number[order], prepend=-1))
    if not len(first):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    lines = host.line[rows[order]]
    alone = np.maximum.reduceat(lines, first) == np.minimum.reduceat(lines, first)
    last = rows[order[np.append(first[1:], len(order)) - 1]]
    functions_at = np.flatnonzero(is_function)
    index = np.minimum(np.searchsorted(number[order[first]], number[functions_at]), len(first) - 1)
    fits = (number[order[first]][index] == number[functions_at]) & alone[index] & (
        host.start_ns[last[index]] < host.start_ns[rows[functions_at]])
    return rows[functions_at[fits]], last[index[fits]]


def _backward_threads(trace: Trace, functions: Mask, ops: I64) -> list[int]:
    """Lines of autograd's threads: what they launch outside of its functions, as DDP's reducer does, is backward. On
    the CPU the loop's own thread runs the backward pass: there are ``ops`` with a gradient outside of functions."""
    host = trace.host
    marked = host_rows(trace, r"Optimizer\.|ProfilerStep#|enumerate\(DataLoader")
    rows = np.flatnonzero(functions.take(host.name))
    lines = set(host.line[rows].tolist()) - set(host.line[marked].tolist())
    return sorted(thread for thread in lines if contains(
        spans_of(trace, rows[host.line[rows] == thread]), host.start_ns[ops[host.line[ops] == thread]]).all())


def _around(trace: Trace, calls: I64, line: npt.NDArray, time_ns: I64) -> I64:
    """Row of the call that was running at each thread and time, -1: none. Calls of a thread are apart."""
    host, out = trace.host, np.full(len(line), -1, np.int64)
    for thread in np.unique(host.line[calls]).tolist():
        of_thread = calls[host.line[calls] == thread]
        mine = np.flatnonzero((line == thread) & (time_ns >= 0))
        last_call = np.searchsorted(begins_ns(trace, of_thread), time_ns[mine], side="right") - 1
        inside = (last_call >= 0) & (time_ns[mine] < host.end_ns[of_thread[np.maximum(last_call, 0)]])
        out[mine[inside]] = of_thread[last_call[inside]]
    return out


def _scope(phase: str, around: list[str], calls: _Calls) -> Scope | None:
    """``phase`` of the thread, where it has one; the calls ``around`` from the outermost on."""
    path: list[str] = []
    op = ""
    for call in around:
        if (update := _OPTIMIZER.match(call)) is not None:
            phase, op, path = "optimizer", "", [update[1]]
        elif re.match(LOADER, call):
            phase, op, path = INPUT, "", []
        elif call in calls.functions:
            phase, op, path = "backward", "", [call.removeprefix(_AUTOGRAD)]
        elif call.startswith(_MODULE):
            if phase == "backward":
                phase, path = "recomputation", []
            path, op = [*path, call.removeprefix(_MODULE)], ""
        elif call in calls.marked:
            path, op = (path if _NO_SCOPE.match(call) else [*path, _range_name(call)]), ""
        else:
            op = op or call
    if not around or not (path or op):
        return None
    if not phase:
        outside = calls.forward and not any(call.startswith(_MODULE) or _range_name(call).lower() == "forward"
                                            for call in around)
        phase = "loss" if calls.training and any(LOSS.search(part) for part in (*path, op)) else (
            "other ops" if outside else "forward")
    path = path if (phase == "backward" and path) or not op else [*path, op]
    named = [part for part in path if part.lower() not in PHASES]  # “## forward ##” is told already
    return Scope(phase, tuple(part for i, part in enumerate(named) if named[i - 1:i] != [part]))


def _range_name(call: str) -> str:
    """“forward” of “## forward ##”, as many write their ranges."""
    return call.strip("# ")


def _layers(around: list[str], calls: _Calls) -> tuple[str, ...]:
    """The modules and ranges around an op."""
    scope = _scope("", [call for call in around if call in calls.marked or call.startswith(_MODULE)],
                   calls._replace(training=False))
    return scope.path if scope is not None else ()


# -- gradients ----------------------------------------------------------------------------------------
#
# Gradients that a collective of PyTorch's DistributedDataParallel reduces.
#
# Its reducer puts each gradient into a bucket as soon as autograd has accumulated it, and the gradient that fills a
# bucket launches the bucket's AllReduce, within its own AccumulateGrad (PyTorch, ``torch/csrc/distributed/c10d/
# reducer.cpp``). So a bucket holds gradients that were accumulated on that thread since the bucket before. Where the
# profiler recorded shapes, their sizes must add up to the collective's: of several models beside each other one may
# reduce while another's bucket is not full.

_ACCUMULATE = r"(?:autograd::engine::evaluate_function: )?torch::autograd::AccumulateGrad$"
# Between the function that computes a parameter's gradient and its AccumulateGrad: they only reshape or convert it.
_PASSES_ON = (
    r"(?:.*: )?(?:T|Transpose\w*|Permute|View|Reshape\w*|UnsafeView|ToCopy|Expand|Squeeze|Unsqueeze)Backward\d*$")
_MAX_PARTS = 3  # of the model, or kinds of functions, that a name lists


class Bucket(Struct, frozen=True):
    """Gradients that ``events``, rows of the device, reduce. ``number`` counts the buckets of a backward pass from 1
    on, 0: not known, as the trace begins within the pass; ``functions`` has for each gradient the host's row of the
    function of autograd that computed it, in order of time."""

    events: I64
    number: int
    functions: list[int]


def gradient_buckets(trace: Trace, functions: Mask) -> Iterator[Bucket]:
    """The buckets of each thread in order of time. ``functions``: which names are functions of autograd, as
    :func:`name_mask`. Collectives whose gradients the trace does not tell are in none."""
    host, device = trace.host, trace.device
    rows = np.flatnonzero(functions.take(host.name))
    accumulate = (name_mask(trace, _ACCUMULATE) & functions)[host.name]
    reduced = np.flatnonzero((device.kind == Kind.COLLECTIVE) & (device.launch_ns >= 0))
    for line in np.unique(device.launch_line[reduced]).tolist():
        functions_of_line = rows[host.line[rows] == line]
        if accumulate[functions_of_line].any():
            yield from _of_thread(trace, functions_of_line, accumulate, reduced[device.launch_line[reduced] == line])


def _of_thread(trace: Trace, functions: I64, accumulate: Mask, reduced: I64) -> Iterator[Bucket]:
    """The buckets of one thread. ``functions``: rows of its functions, ``accumulate``: which of the host's events
    accumulate, ``reduced``: rows of the collectives that it launched."""
    host = trace.host
    numbered, numbers = host_stat(host, "sequence")
    sequence = values_at(numbered, numbers, functions, -1)[1].tolist()
    sized, elements = host_stat(host, "elements")
    here = host.line[sized] == host.line[functions[0]]
    sized, elements = sized[here], elements[here]
    is_gradient = name_mask(trace, _ACCUMULATE)[host.name[sized]]
    launch = trace.device.launch_ns[reduced]
    by_launch = np.argsort(launch, kind="stable")
    times = host.start_ns[functions], host.end_ns[functions]
    # Of each function its begin and end, and from where to where the sizes and the launches within it stand.
    within = np.array([*times, *np.searchsorted(host.start_ns[sized], times),
                       *np.searchsorted(launch[by_launch], times)]).T.tolist()
    pending: list[tuple[int, int]] = []  # since the bucket before: the gradient's function, and its elements or -1
    source, until, current, number, whole = -1, -1, -1, 0, False
    for row, now, accumulates, passes_on, (begin, end, first, last, first_launch, last_launch) in zip(
            functions.tolist(), sequence, accumulate[functions].tolist(),
            name_mask(trace, _PASSES_ON, ("backward",))[host.name[functions]].tolist(), within, strict=True):
        if begin >= until:
            until = end
            if now > current:  # in a backward pass they fall, from op to op back
                pending, number, source = [], 0, -1
                whole = bool((numbers[:np.searchsorted(numbered, row)] == now).any())  # else the trace begins within it
            current = now if now >= 0 else current
        if not accumulates:
            source = source if passes_on else row
            continue
        of_gradient = elements[first:last][is_gradient[first:last]]
        pending.append((source, int(of_gradient[0]) if len(of_gradient) else -1))
        events = reduced[np.sort(by_launch[first_launch:last_launch])]
        if len(events):
            number += 1
            of_message = elements[first:last][~is_gradient[first:last]]
            message = int(of_message.sum()) if len(of_message) else -1
            held = _held([size for _, size in pending], message, len(pending) if whole else 0)
            bucket, pending = pending[len(pending) - held:], pending[:len(pending) - held]
            if held and all(function >= 0 for function, _ in bucket):
                yield Bucket(events, number if whole else 0, [function for function, _ in bucket])


def _held(sizes: Sequence[int], message: int, otherwise: int) -> int:
    """Number of the last gradients that a message of so many elements holds; ``otherwise`` where a size is not told
    (-1), 0 where they do not add up."""
    if message < 0 or min(sizes) < 0:
        return otherwise
    sums = np.cumsum(sizes[::-1])
    matches = np.flatnonzero(sums == message)
    return int(matches[0]) + 1 if len(matches) else 0


def bucket_name(number: int, paths: Sequence[tuple[str, ...]]) -> str:
    """``paths``: of each gradient's function, in order of time: the modules around its op and its name."""
    layers = list(dict.fromkeys(path[:-1] for path in reversed(paths)))
    if all(layers):
        shared = 0
        while all(len(path) > shared and path[shared] == layers[0][shared] for path in layers):
            shared += 1
        parts = list(dict.fromkeys(path[shared] for path in layers if len(path) > shared))
        about = "in " + (_listed(parts) if parts else "/".join(layers[0][-2:]))
    else:
        functions = Counter(path[-1] for path in paths)
        about = "of " + _listed([f"{count} {name}" for name, count in functions.most_common()])
    return (f"bucket {number}: " if number else "") + f"gradients {about}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= _MAX_PARTS else f"{names[0]} … {names[-1]} ({len(names)} parts)"
