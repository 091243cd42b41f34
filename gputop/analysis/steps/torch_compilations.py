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

import re

import numpy as np
from msgspec import Struct

from gputop.analysis.steps.autotuning import TRITON, trials
from gputop.analysis.steps.compilations import AGAIN, OVER
from gputop.trace.intervals import Spans, in_order, merge
from gputop.trace.lookups import Mask, host_rows, name_mask, spans_of
from gputop.trace.model import I64, Trace

_REGION = re.compile(r"Torch-Compiled Region: (\d{1,9})/(\d{1,9})$")
_CACHE_LOOKUP = r"TorchDynamo Cache Lookup$"
_FAKE = r"PythonDispatchMode$|prims::\w"
_TIMED = r".* \(dynamo_timed\)$"
_KERNEL_WORDS = ("nvrtc", "fusionkernelruntime", "kernelexecutor", "compiledkernel", "triton")
_KERNELS = (r"(?:\w+::)*Nvrtc::\w*[Cc]ompile\w*$|(?:FusionKernelRuntime|KernelExecutor|CompiledKernel)::compile\w*$|"
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
    return spans_of(trace, host_rows(trace, _TIMED, lines))


def compiling_kernels(trace: Trace) -> Spans:
    """Spans in which kernels are compiled, or tried out by Triton, one by one; calls within others count once."""
    compiled = np.flatnonzero(name_mask(trace, _KERNELS, _KERNEL_WORDS).take(trace.host.name))
    return merge(spans_of(trace, compiled), trials(trace)[TRITON])


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
