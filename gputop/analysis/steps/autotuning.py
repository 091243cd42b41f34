"""Trials of kernels: cuDNN, Triton and torch.compile run each candidate some times and keep the fastest.

A convolution of PyTorch records CUDA events only for trials (``cudnn.benchmark``); TensorFlow and XLA check the buffers
around each candidate ("redzone"). Triton empties the GPU's cache before each run, and records two events around it.
"""

from __future__ import annotations

import numpy as np

from gputop.trace.intervals import EMPTY, Spans, coverage, joined, merge, union
from gputop.trace.lookups import by_line, host_rows, name_mask, spans_of
from gputop.trace.model import I64, Kind, Trace, once
from gputop.trace.nesting import begun_within
from gputop.trace.threads import GRAPH_EXECUTOR

CUDNN, TRITON, COMPILER = "cuDNN", "Triton", "torch.compile"
CONVOLUTION = r"aten::(?:(?:cudnn|miopen)_convolution\w*|convolution_backward)$"
_EVENTS = r"(?:cuda|hip)EventRecord(?:WithFlags)?(?:_v\d+)?$"
_FINDS = r"(?:cudnn|miopen)Find\w*Algorithm\w*$"
_BY_COMPILER = (r"\w+_template_autotuning(?: \(dynamo_timed\))?$|CachingAutotuner\.(?:benchmark_all_configs|"
                r"coordinate_descent_tuning|combo_sequential_autotune)(?: \(dynamo_timed\))?$")
_BY_TRITON = (r"(?:.*/)?(?:triton/runtime/autotuner\.py\(\d+\): _bench|triton/testing\.py\(\d+\): do_bench|"
              r"triton_heuristics\.py\(\d+\): benchmark_all_configs)$")
_EMPTIES_CACHE = r".*FillFunctor<int>"
_TWO_EVENTS, _RUNS = 4, 10  # records in a convolution: two candidates; runs of one candidate (Triton: 100 ms of them)
_LONG_NS = 20_000_000  # a convolution's op of TensorFlow 1: far longer than a launch
_STARTS = 3  # steps that may all be a start: batches of training, the last of them, and of an evaluation
_APART_NS = 10_000_000  # kernels that are tried one after the other, with work of the host between


@once
def trials(trace: Trace) -> dict[str, Spans]:
    """The time in which kernels are tried out, by who tries them."""
    device, checks = trace.device, name_mask(trace, r"(?i).*redzone", ("redzone",))
    checked = np.flatnonzero(checks.take(device.name)) if checks.any() else np.empty(0, np.int64)
    host, calls, events = trace.host, host_rows(trace, CONVOLUTION), host_rows(trace, _EVENTS)
    by_events = calls[begun_within(host, calls, host.line[events], host.start_ns[events]) >= _TWO_EVENTS]
    return {CUDNN: merge(joined(union(device.start_ns[checked], device.end_ns[checked]), _APART_NS), _chosen(trace),
                         spans_of(trace, np.concatenate((host_rows(trace, _FINDS), by_events)))),
            TRITON: merge(spans_of(trace, host_rows(trace, _BY_TRITON)), _by_triton(trace)),
            COMPILER: spans_of(trace, host_rows(trace, _BY_COMPILER))}


def _by_triton(trace: Trace) -> Spans:
    """Runs of a kernel, of which each comes behind one that empties the cache, and with two events of its own."""
    device, recorded = trace.device, np.sort(trace.host.start_ns[host_rows(trace, _EVENTS)])
    empties = name_mask(trace, _EMPTIES_CACHE, ("fillfunctor",))
    spans, kernels = EMPTY, np.flatnonzero(device.kind <= Kind.COLLECTIVE)
    for places in by_line(device.gpu[kernels]).values() if empties.any() and len(recorded) else ():
        rows = kernels[places]
        empty = empties.take(device.name[rows])
        ends = np.flatnonzero(np.append(empty[1:] == empty[:-1], True)) + 1  # of stretches that alternate
        begins = np.concatenate(([0], ends[:-1]))
        begins += ~empty[begins]  # what ran before is none of them
        long = ends - begins >= 2 * _RUNS
        for begin, end in zip(begins[long].tolist(), ends[long].tolist(), strict=True):
            first, last = device.launch_ns[rows[[begin, end - 1]]].tolist()
            events = np.searchsorted(recorded, last) - np.searchsorted(recorded, first)
            if min(first, last) >= 0 and events >= end - begin - _TWO_EVENTS:
                spans = merge(spans, union([first], [device.end_ns[rows[begin:end]].max()]))
    return joined(spans, _APART_NS)


def _chosen(trace: Trace) -> Spans:
    """Convolutions' ops on the host of a timeline of TensorFlow 1 that take far longer than a launch: cuDNN tries out
    algorithms, whose kernels are not recorded."""
    host = trace.host
    rows = host_rows(trace, r".*:\w*Conv[23]D\w*$")
    rows = rows[[trace.lines[line].name.startswith(f"{GRAPH_EXECUTOR} GPU") for line in host.line[rows].tolist()]]
    return spans_of(trace, rows[host.end_ns[rows] - host.start_ns[rows] >= _LONG_NS])


def tried_again(trace: Trace, by: str, steps_ns: I64) -> I64:
    """Steps (of shape (steps, 2)) in which kernels are tried, where that comes back in the loop; else none: those with
    which a recording begins are the job's start."""
    tried = coverage(trials(trace)[by], steps_ns[:, 0], steps_ns[:, 1]) > 0
    start = int(tried.argmin()) if not tried.all() else 0 if len(tried) > _STARTS else len(tried)
    again = start + np.flatnonzero(tried[start:])
    return again if len(again) > 1 else again[:0]
