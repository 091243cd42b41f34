"""Calls in which torch.compile compiles a function anew.

TorchDynamo numbers what it compiles: "Torch-Compiled Region: 0/6" is the seventh version of function 0, which runs if
no earlier one fits the shapes, types and values of the call. It compiles between its cache lookup ("TorchDynamo Cache
Lookup") and the region, and traces the function with fake tensors meanwhile ("PythonDispatchMode", prims::), which
nothing else does. A region that runs from the cache has none of it.

The parts of a compilation have events of their own since PyTorch 2.5, "compile_fx_inner (dynamo_timed)" for one; so has
that of the backward pass, which is compiled in its first call.

Kernels that are compiled one by one show in nvFuser's ranges around NVRTC, and in the functions of Triton and of its
autotuning where Python was traced.
"""

from __future__ import annotations

import math
import re

import numpy as np
from msgspec import Struct

from gputop.analysis.steps.compilations import AGAIN, OVER, TRITON, trials
from gputop.trace.intervals import Spans, in_order, merge, subtract, union
from gputop.trace.lookups import PYTHON_FUNCTION, Mask, by_line, host_rows, host_stat, name_mask, spans_of
from gputop.trace.model import I64, Trace
from gputop.trace.nesting import nest

_REGION = re.compile(r"Torch-Compiled Region: (\d{1,9})/(\d{1,9})$")
_CACHE_LOOKUP = r"TorchDynamo Cache Lookup$"
_FAKE = r"PythonDispatchMode$|prims::\w"
_TIMED = r".* \(dynamo_timed\)$"
_KERNEL_WORDS = ("nvrtc", "fusionkernelruntime", "fusionexecutor", "kernelexecutor", "compiledkernel", "triton")
_KERNELS = (r"(?:\w+::)*(?:Nvrtc::\w*[Cc]ompile|nvrtcCompileProgram|"
            r"(?:FusionKernelRuntime|FusionExecutor|KernelExecutor|CompiledKernel)::compile)\w*$|"
            r"(?:.*/)?triton/(?:compiler/compiler\.py\(\d+\): compile|runtime/jit\.py\(\d+\): _do_compile)$|"
            r"(?:.*/)?triton_heuristics\.py\(\d+\): _?precompile\w*$")


class TorchBuilds(Struct, frozen=True):
    """Compilations of one function ``by`` torch.compile or TorchScript, in order of time; ``calls`` are all of its
    calls. From ``again`` compilations on they may return."""

    function: str
    start_ns: I64
    end_ns: I64
    calls: int
    by: str = "torch.compile"
    again: float = AGAIN


def compiling(trace: Trace, lines: Mask) -> Spans:
    """Spans in which torch.compile works on one of these threads, by its own marks; empty in older versions."""
    return spans_of(trace, host_rows(trace, _TIMED, lines, ("(dynamo_timed)",)))


def compiling_kernels(trace: Trace) -> Spans:
    """Spans in which kernels are compiled, or tried out by Triton, one by one; calls within others count once."""
    return merge(spans_of(trace, host_rows(trace, _KERNELS, words=_KERNEL_WORDS)), trials(trace)[TRITON])


def built_again(trace: Trace, builds: TorchBuilds) -> bool:
    """Return whether the function is compiled again and again, up to the recording's end: not for two shapes in a
    start."""
    return len(builds.start_ns) >= builds.again and int(trace.window_ns[1] - builds.end_ns[-1]) <= OVER * int(
        builds.end_ns[-1] - builds.start_ns[0])


def torch_builds(trace: Trace, lines: Mask) -> tuple[TorchBuilds, ...]:
    """Builds of each function that compiles on one of these threads, the one that takes most time first."""
    host = trace.host
    regions, cache_lookups, fake = (host_rows(trace, pattern, lines) for pattern in (
        _REGION.pattern, _CACHE_LOOKUP, _FAKE))
    if not len(fake) or not len(cache_lookups):
        return ()
    spans_of: dict[str, list[tuple[int, int]]] = {}
    calls: dict[str, int] = {}
    for line in np.unique(host.line[regions]).tolist():
        of_line = regions[host.line[regions] == line]
        ends = in_order(host.end_ns[cache_lookups[host.line[cache_lookups] == line]])
        traced = in_order(host.start_ns[fake[host.line[fake] == line]])
        start = host.start_ns[of_line]
        begun = np.searchsorted(ends, start, side="right") - 1
        begin = ends[np.maximum(begun, 0)] if len(ends) else start
        compiles = (begun >= 0) & (np.searchsorted(traced, start) > np.searchsorted(traced, begin))
        columns = (of_line, begin, start, compiles)
        for row, low, high, builds in zip(*(column.tolist() for column in columns), strict=True):
            region = _REGION.match(trace.names[host.name[row]])
            assert region is not None
            calls[region[1]] = calls.get(region[1], 0) + 1
            if builds:
                spans_of.setdefault(region[1], []).append((low, high))
    out = []
    for function, spans in spans_of.items():
        begin, end = np.array(sorted(spans), np.int64).T
        out.append(TorchBuilds(function, begin, end, calls[function]))
    return tuple(sorted(out, key=lambda one: (int((one.start_ns - one.end_ns).sum()), one.function)))


# -- torchscript --------------------------------------------------------------------------------------
#
# Calls in which TorchScript compiles a function: it runs a new one once or twice to see its types, and then compiles
# it for these.
#
# Nothing marks that work. A function shows by what it runs: fused groups, what runs in their place
# ("fallback_function"), and the parts of its forward and backward pass. While it is compiled the job runs no op,
# before the call or in it. A pause before the call may be Python's, too: it counts where those before other calls of
# the function are far shorter.

_MARKS = (r"(?:autograd::engine::evaluate_function: )?(?:fallback_function|<(?:forward|backward) op>|"
          r"(?:prim::)?(?:TensorExpr|CudaFusion)\w*Group\w*)$")
_BACKWARD = r"(?:autograd::engine::evaluate_function: .*|<backward op>)$"
# gputop's own figures. Of a function that is called once no other pause tells what is usual.
_SILENT_NS, _SILENT_ONCE_NS, _FAR_LONGER = 10_000_000, 50_000_000, 3.0
_AGAIN = 4  # compilations: it takes three calls to settle


def script_builds(trace: Trace) -> tuple[TorchBuilds, ...]:
    """Compilations of each scripted function, the one that takes most time first."""
    host = trace.host
    if not len(host_rows(trace, _MARKS)):
        return ()
    keep = ~name_mask(trace, PYTHON_FUNCTION)[host.name]
    keep[host_stat(host, "annotation")[0]] = False
    rows = np.flatnonzero(keep)
    nesting = nest(host.line[rows], host.start_ns[rows], host.end_ns[rows], host.name[rows], trace.names)
    scripted = name_mask(trace, _MARKS)[host.name[rows]]  # and what holds such an event
    level = np.flatnonzero(scripted)
    while len(level):
        level = nesting.parent[level]
        scripted[level := np.unique(level[level >= 0])] = True
    outer = nesting.parent < 0
    # The first call of a function runs no part of it yet.
    scripted |= outer & np.isin(host.name[rows], host.name[rows[scripted & outer]])
    calls, work = rows[scripted & outer], spans_of(trace, rows[~scripted])
    done = np.sort(np.concatenate((work.end, host.end_ns[calls])))
    builds = []
    for name, places in by_line(host.name[calls]).items():
        backward = re.match(_BACKWARD, trace.names[name]) is not None  # of any function: they have one name
        spans = _silent(work, done, host.start_ns[calls[places]], host.end_ns[calls[places]])
        if len(spans):
            builds.append(TorchBuilds("the backward pass" if backward else trace.names[name], spans[:, 0], spans[:, 1],
                                      len(places), "TorchScript", math.inf if backward else _AGAIN))
    return tuple(sorted(builds, key=lambda one: (int((one.start_ns - one.end_ns).sum()), one.function)))


def _silent(work: Spans, done: I64, start: I64, end: I64) -> I64:
    """The time from the first to the last long pause in these calls, or before them, where that is TorchScript's; shape
    (pauses, 2)."""
    before = np.searchsorted(done, start, side="right") - 1
    pause = np.where(before >= 0, start - done[np.maximum(before, 0)], 0)
    usual = float(np.median(pause)) if len(pause) > 3 else float(pause.min())
    least = _SILENT_ONCE_NS if len(pause) == 1 else max(_SILENT_NS, int(_FAR_LONGER * usual))
    spans = []
    for call in zip((start - np.where(pause >= least, pause, 0)).tolist(), end.tolist(), strict=True):
        pauses = subtract(union([call[0]], [call[1]]), work)
        long = pauses.end - pauses.start >= _SILENT_NS
        if long.any():
            spans.append((pauses.start[long][0], pauses.end[long][-1]))
    return np.array(spans, np.int64)
