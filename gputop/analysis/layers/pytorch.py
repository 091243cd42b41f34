"""Phase and place in the model of PyTorch's kernels, by the calls around their launches.

Kernels of PyTorch name no op. What stands around the launch on its thread tells: an autograd function the backward
pass, ``Optimizer.step`` the update, ``nn.Module: Linear_0`` (profiler with ``with_stack`` and ``with_modules``) the
module, a ``record_function`` what the user calls it. A module within an autograd function is computed again.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from gputop.analysis.layers.scopes import LOSS, PHASES, Scope
from gputop.trace.lookups import host_rows, host_stat
from gputop.trace.model import I64, Trace
from gputop.trace.nesting import depths, nesting_order

_MODULE, _AUTOGRAD = "nn.Module: ", "autograd::engine::evaluate_function: "
_OPTIMIZER = re.compile(r"Optimizer\.(?:step|zero_grad)#(.*)")
_CALL = rf"{_MODULE}|[\w.]+::|Optimizer\.(?:step|zero_grad)#|nccl:"
_LAUNCHING = r"aten::|autograd::engine|Optimizer\.step#"  # one of these is in every trace of PyTorch
_NO_SCOPE = re.compile(r"ProfilerStep#|enumerate\(DataLoader\)#|DistributedDataParallel\.forward|nccl:")
_MAX_LEVELS = 24  # calls around one launch; what is deeper adds no name


class CallScopes(NamedTuple):
    """``of_event``: for each device event the index of its scope, -1: none; ``scopes`` has each once."""

    of_event: I64
    scopes: list[Scope]


def call_scopes(trace: Trace) -> CallScopes | None:
    """None where the trace is not of PyTorch, or its kernels name their ops."""
    device, host = trace.device, trace.host
    if trace.hlo_ops or (device.tf_op >= 0).any() or not len(host_rows(trace, _LAUNCHING)):
        return None
    annotations = host_stat(host, "annotation")[0]
    rows = np.union1d(host_rows(trace, _CALL), annotations)
    rows = rows[nesting_order(host.line[rows], host.start_ns[rows], host.end_ns[rows], host.name[rows], trace.names)]
    depth = depths(host.line[rows], host.start_ns[rows], host.end_ns[rows])
    # Of the calls around the launch, from the outermost on; at first whether its thread runs the backward pass alone.
    code = np.isin(device.launch_line, _backward_threads(trace)).astype(np.int64)
    stacks: list[tuple[int, ...]] = [(0,), (1,)]
    for level in range(min(int(depth.max(initial=-1)) + 1, _MAX_LEVELS)):
        name = _around(trace, rows[depth == level])
        here = np.flatnonzero(name >= 0)
        pairs, which = np.unique(code[here] * len(trace.names) + name[here], return_inverse=True)
        code[here] = len(stacks) + which
        stacks += [(*stacks[before], inner) for before, inner in (
            divmod(pair, len(trace.names)) for pair in pairs.tolist())]
    marked = {trace.names[i] for i in np.unique(host.name[annotations]).tolist()}
    training = bool(len(host_rows(trace, _AUTOGRAD)))
    scopes = [_scope("backward" if alone else "", [trace.names[i] for i in stack], marked, training)
              for alone, *stack in stacks]
    known = np.array([scope is not None for scope in scopes])
    number = np.cumsum(known) - 1
    return CallScopes(np.where(known, number, -1)[code], [scope for scope in scopes if scope is not None])


def _backward_threads(trace: Trace) -> list[int]:
    """Lines of autograd's threads: what they launch outside of its functions, as DDP's reducer does, is backward."""
    line = trace.host.line
    marked = host_rows(trace, r"Optimizer\.|ProfilerStep#|enumerate\(DataLoader")
    return sorted(set(line[host_rows(trace, _AUTOGRAD)].tolist()) - set(line[marked].tolist()))


def _around(trace: Trace, calls: I64) -> I64:
    """For each device event the name of the call that its launch is in, -1: none. Calls of a thread are apart."""
    device, host = trace.device, trace.host
    out = np.full(len(device), -1, np.int64)
    for line in np.unique(host.line[calls]).tolist():
        own = calls[host.line[calls] == line]
        mine = np.flatnonzero((device.launch_line == line) & (device.launch_ns >= 0))
        at = np.searchsorted(host.start_ns[own], device.launch_ns[mine], side="right") - 1
        inside = (at >= 0) & (device.launch_ns[mine] < host.end_ns[own[np.maximum(at, 0)]])
        out[mine[inside]] = host.name[own[at[inside]]]
    return out


def _scope(phase: str, calls: list[str], marked: set[str], training: bool) -> Scope | None:
    """``phase`` of the thread, where it has one; ``calls`` from the outermost on; ``marked`` are names that the user
    gave."""
    path: list[str] = []
    op = ""
    for call in calls:
        if (update := _OPTIMIZER.match(call)) is not None:
            phase, op, path = "optimizer", "", [update[1]]
        elif call.startswith(_AUTOGRAD):
            phase, op, path = "backward", "", [call.removeprefix(_AUTOGRAD)]
        elif call.startswith(_MODULE):
            if phase == "backward":
                phase, path = "recomputation", []
            path, op = [*path, call.removeprefix(_MODULE)], ""
        elif call in marked:
            path, op = (path if _NO_SCOPE.match(call) else [*path, call.strip("# ")]), ""
        else:
            op = op or call
    if not calls or not (path or op):
        return None
    if not phase:
        phase = "loss" if training and any(LOSS.search(part) for part in (*path, op)) else "forward"
    path = path if (phase == "backward" and path) or not op else [*path, op]
    named = [part for part in path if part.lower() not in PHASES]  # “## forward ##” is told already
    return Scope(phase, tuple(part for i, part in enumerate(named) if named[i - 1:i] != [part]))
