"""tf.functions: calls, retracing, and what XLA compiles."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np

from gputop.analysis.results import Functions, FunctionUse
from gputop.analysis.steps.compilations import first_calls, tracing_within
from gputop.analysis.steps.membership import step_of
from gputop.analysis.steps.model import Steps
from gputop.trace.intervals import Spans, overlap
from gputop.trace.lookups import COMPILE, host_rows, host_stat, name_mask, spans_of
from gputop.trace.model import Trace

XLA_RUN = (r"(?:Cpu|Gpu)Executable::Execute|\S+:XLA GPU module$|PjRt\w*LoadedExecutable::Execute\b|"
            r"PJRT_LoadedExecutable_Execute")
# XLA names a module after the function, a_inference_<function>_<n>__….<k>, or cluster_<n> where TensorFlow clusters.
# Its name is part of kernels' ops and of the event in which the host starts it on a GPU.
# Of bounded lengths: a name in a trace has any.
_MODULE = re.compile(r"((?:a_inference|cluster|jit)_\w{1,250}?)(?:__\w{0,250})?(?:\.\d{1,9})?(?:/|:XLA GPU module$)")
_NUMBERED = re.compile(r"(?:__|a_)inference_(.+?)_\d+$")


def functions(trace: Trace, steps: Steps | None = None) -> Functions | None:
    """Calls of tf.functions in the window; None where none is traced and XLA neither compiles nor runs."""
    compile_, runs = spans_of(trace, host_rows(trace, COMPILE)), spans_of(trace, host_rows(trace, XLA_RUN))
    mask = name_mask(trace, _MODULE.pattern)
    names = np.union1d(trace.device.tf_op[mask.take(trace.device.tf_op)], trace.host.name[mask.take(trace.host.name)])
    modules = {m[1] for i in names.tolist() if (m := _MODULE.match(trace.names[i]))}  # of XLA, which ran on a GPU
    used = _functions(trace, {m[1] for name in modules if (m := _NUMBERED.match(name))}, runs, steps)
    if not used and not len(compile_.start) and not len(runs.start) and not modules:
        return None
    return Functions(
        functions=tuple(sorted(used, key=lambda use: (-use.seconds, use.name))),
        retracings=sum(use.retracings for use in used), tracing_s=sum(use.tracing_s for use in used),
        xla_compilations=len(compile_.start), xla_compile_s=compile_.total / 1e9, xla_runs=len(runs.start),
        xla_modules=tuple(sorted(modules)))


def _functions(trace: Trace, compiled: set[str], runs: Spans, steps: Steps | None) -> list[FunctionUse]:
    host = trace.host
    rows, mode = host_stat(host, "tf_function_call")
    counts = dict(zip(*(column.tolist() for column in host_stat(host, "tracing_count")), strict=True))
    length = host.end_ns - host.start_ns
    building = tracing_within(trace, rows)[0]
    inside = None if steps is None else step_of(host.start_ns[rows], steps) >= 0
    called: dict[str, list[int]] = {}
    for index, name in enumerate(host.name[rows].tolist()):
        called.setdefault(trace.names[name], []).append(index)
    out = []
    for name, places in called.items():
        of_function = np.array(places)
        modes = [trace.names[i] for i in mode[of_function].tolist()]
        traced = np.array([m.startswith("traced") for m in modes], bool)
        tracing_counts = [counts[row] for row in rows[of_function].tolist() if row in counts]
        # A further first tracing is of a new tf.function by the same name: the program makes it anew.
        first = min(int(np.isin(rows[of_function[traced]], first_calls(trace)).sum()), 1)
        calls_s = int(length[rows[of_function[traced]]].sum()) / 1e9
        built = int(building[of_function].sum()) / 1e9
        in_xla = overlap(spans_of(trace, rows[of_function]), runs)
        per_step: dict[str, float] = {}
        if inside is not None and steps is not None:
            calls, whole_ns = inside[of_function], length[rows[of_function]]
            per_step = {"calls_per_step": int(calls.sum()) / steps.count,
                        "s_per_step": int(whole_ns[calls].sum()) / steps.count / 1e9}
        xla = any(m.endswith("-xla") for m in modes) or name in compiled or in_xla > 0
        out.append(FunctionUse(
            name=name, calls=len(of_function), seconds=int(length[rows[of_function]].sum()) / 1e9,
            modes=dict(sorted(Counter(modes).items())),
            tracings=int(traced.sum()), retracings=int(traced.sum()) - first,
            tracing_s=built if built else calls_s, tracing_calls_s=calls_s,
            tracing_count=max(tracing_counts) if tracing_counts else None,
            xla=True if xla else False if any(m.endswith("-nonXla") for m in modes) else None, xla_s=in_xla / 1e9,
            **per_step))
    return out

