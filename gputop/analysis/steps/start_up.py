"""Work that a job does once, at its start: it traces and compiles functions, loads libraries and modules, tries
kernels."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from gputop.analysis.steps.compilations import (
    CONVOLUTION,
    CUDNN,
    OVER,
    TRACING,
    builds,
    function_name,
    rebuilt,
    trials,
)
from gputop.analysis.steps.torch_compilations import (
    built_again,
    compiling,
    compiling_kernels,
    script_builds,
    torch_builds,
)
from gputop.text.units import seconds
from gputop.trace.complete_part import part_of
from gputop.trace.graph_captures import GRAPH_LAUNCH, recordings
from gputop.trace.intervals import EMPTY, Spans, contains, coverage, joined, merge, subtract, union
from gputop.trace.kernel_names import short_kernel
from gputop.trace.lookups import COMPILE, LAUNCH_CALLS, Mask, distinct, host_rows, name_mask, numbered, on_gpu, spans_of
from gputop.trace.model import I64, Kind, MemoryKind, Trace, once
from gputop.trace.threads import GRAPH_EXECUTOR, MAIN, lines_of

LOADING, COMPILING, TRACED, AUTOTUNING, GRAPHS = "loading", "compilation", "tracing", "autotuning", "graphs"
TORCH_COMPILING, SCRIPT = "torch_compilation", "torchscript"
KERNELS, UPLOAD, MODULES = "kernel_compilation", "upload", "modules"
# Calls that bring code to the GPU or set its libraries up: CUDA's and HIP's driver, cuDNN and cuBLAS.
_LOADS = (r"(?:cuda|cu|hip)(?:ModuleLoad|LibraryLoad)\w*$|(?:Runtime Triggered Module|Lazy Function) Loading$|"
          r"Driver Compiler$|cu(?:DevicePrimaryCtxRetain|CtxCreate)\w*$|"
          r"(?:cudnn|cublas\w*|cusolver\w*)Create(?:_v\d)?$")
# A launch call loads its kernel's module, as CUDA does at the first launch since 11.7, where it takes this many times
# the median of launch calls, and at least so long. gputop's own figures. A call that waits for a full queue, or whose
# thread has lost its CPU, may be that of any launch: most of the time of all such calls must be in first launches.
_FAR_LONGER, _LOADING_NS, _IN_FIRST = 50.0, 1_000_000, 0.9
_USUAL = 0.25
_PRODUCT = r"aten::(?:addmm|mm|bmm|baddbmm)$"
_IDLE = 0.1  # share of the time in which a GPU works at most
_WORTH_NAMING_NS = 20_000_000  # of all such calls together: a few time slices of a CPU
# Calls of CUDA's and HIP's runtime and driver. The first one creates the context, whichever it is, and others load
# modules or reserve memory. Those that wait for the GPU, or for room in its queue, may take long in any job. cudaFree
# waits, too, but before any work it is the call by which many programs create the context.
_API = r"(?:cuda|hip|cu)(?=[A-Z])\w+$"
_API_WAITS = (r"(?:cuda|hip|cu)\w*(?:Launch|Record|Wait|Memcpy|Memset|Synchronize|Query|Async|Prefetch|"
              r"Free(?!(?:_v\d+)?$)|Unregister|Unmap|Destroy|Unload|Reset|Release|Profiler)")
_AT_ONCE = r"(?:cuda|hip|cu)\w*(?:Memset|Malloc|MemAlloc)\w*Async"  # they wait for room in the queue at most
_BEGINS = r"cu(?:ModuleGetLoadingMode|Init|DevicePrimaryCtxSetFlags\w*)$"  # what CUDA's runtime or OpenMP calls first
_API_KEEPS = r"\w*(?:[Aa]lloc|Register|MemCreate|MemMap|Free)"  # it reserves or frees memory
_SEVERAL = 3  # pauses: of fewer each may be any. gputop's own figure
_PARAMETERS = 20  # copies. gputop's own figure
_FEW_LAUNCHES = 20  # of kernels: of fewer none waits for a full queue, and each may be a first one
_REPEATED = 0.5  # share of the launches that are not the first of their kernel, so that "the first" means something
_QUEUED = 1000  # launches that fit into the queue of a GPU: of fewer none waits for room in it
_STARTS = 0.5  # share of such work in the time from the recording's begin on: the job starts
_WORTH_SAYING = 0.05  # share of the recording
# The profiler's own end, in JAX and in TensorFlow's and PyTorch's Python.
PROFILER_STOP = (r"\$profiler\.py:\d+ stop_trace|ProfilerSession::(?:CollectData|Stop)|stop_trace$|"
                 r"\$profiler_v2\.py:\d+ stop")
_PAST_START_S = 120.0  # a process that has run for so long does not start, as idle_gpu.age_s
_TEARS_DOWN = (r"(?:cuda|hip|cu)(?=[A-Z])\w*(?:Unload|Unregister|Destroy|Free|DeviceReset|CtxReset|CtxRelease)\w*$|"
               r"(?:cudnn|cublas|cusolver|cusparse|cufft|nccl)\w*Destroy")
_FEW_STEPS = 3  # of fewer each may be the first
START_UP_SHARE = 0.5  # share of a step: such work, or compilation alone, that fills it. gputop's own figure
_NAME_CHARS = 48
_TEXTS = {
    "": "time without a CUDA call", LOADING: "loading of libraries and modules", COMPILING: "XLA compilation",
    TRACED: "tracing and first runs", TORCH_COMPILING: "compilation by torch.compile",
    SCRIPT: "compilation by TorchScript", KERNELS: "compilation and autotuning of kernels (NVRTC, Triton)",
    AUTOTUNING: "cuDNN autotuning", GRAPHS: "recording of CUDA graphs", UPLOAD: "copying the model to the GPU",
    MODULES: "work before new kernels are loaded, such as their compilation"}


class StartUpSpan(Struct, frozen=True):
    """One stretch of such work. ``kind`` is "loading" (libraries, modules, a context), "compilation" (by XLA),
    "torch_compilation" (by torch.compile), "torchscript", "kernel_compilation" (by NVRTC or Triton), "tracing" (Python
    builds the function's graph, up to its first run's end), "autotuning", "graphs" (CUDA's), "upload" (of the model) or
    "modules" (what precedes their loading); ``what`` is the function or the call, "" where no name tells."""

    kind: str
    start_ns: int
    end_ns: int
    what: str


@once
def start_up_spans(trace: Trace) -> tuple[StartUpSpan, ...]:
    """The recorded work of a job's start, in order of time; no two of the spans overlap.

    What returns is no start and is left out: tracing and compiling of a function to which that happens in two or more
    calls (:func:`gputop.analysis.steps.compilations.rebuilt`). A span may lie anywhere in the recording, as a function
    that is called late is compiled late: :func:`start_end_ns` tells whether the job starts then. What leaves no event
    (imports, reading of a checkpoint) is not known.
    """
    out: list[StartUpSpan] = []
    taken, (compiled, traced) = EMPTY, _built(trace)
    main = lines_of(trace, MAIN)
    by_torch = compiling(trace, main)
    if len(by_torch.start):  # parts of it are called as XLA's are
        outside = coverage(by_torch, compiled[0], compiled[0] + 1) == 0
        compiled = compiled[0][outside], compiled[1][outside], compiled[2][outside]
    if any(built_again(trace, one) for one in torch_builds(trace, main)):
        by_torch = EMPTY
    scripted = merge(EMPTY, *(union(one.start_ns, one.end_ns) for one in script_builds(trace)
                              if not built_again(trace, one)))  # TorchScript's functions
    of_kind: dict[str, _Found | Spans] = {
        LOADING: _joined(_loading(trace), _set_up(trace)), UPLOAD: _uploads(trace), AUTOTUNING: trials(trace)[CUDNN],
        GRAPHS: _recorded(trace), TORCH_COMPILING: by_torch, SCRIPT: scripted, KERNELS: compiling_kernels(trace),
        COMPILING: compiled, TRACED: traced, MODULES: _before_modules(trace)}
    for kind, calls in of_kind.items():
        new = subtract(union(calls[0], calls[1]), taken)
        taken = merge(taken, new)
        names = _longest_names(new, calls)
        out += [StartUpSpan(kind, start, end, function_name(trace.names[name]) if name >= 0 else "")
                for start, end, name in zip(new.start.tolist(), new.end.tolist(), names.tolist(), strict=True)]
    return tuple(sorted(out, key=lambda span: span.start_ns))


def mostly_start_up(spans: Sequence[StartUpSpan], bounds_ns: I64) -> Mask:
    """Mask of these times, of shape (n, 2), that such work fills by half or more."""
    work = union([span.start_ns for span in spans], [span.end_ns for span in spans])
    covered = coverage(work, bounds_ns[:, 0], bounds_ns[:, 1])
    return np.asarray(covered >= START_UP_SHARE * (bounds_ns[:, 1] - bounds_ns[:, 0]), bool)


_Found = tuple[I64, I64, I64]  # begin, end, and name (index into the trace's names, -1: none)


def _longest_names(spans: Spans, calls: _Found | Spans) -> I64:
    """Name, for each span, of the longest event that begins in it, or before it and reaches into it; -1: none has."""
    names = np.full(len(spans.start), -1, np.int64)
    if len(names) and len(calls) == 3:
        span_index = np.minimum(np.searchsorted(spans.end, calls[0], side="right"), len(names) - 1)
        order = np.argsort(calls[1] - calls[0], kind="stable")
        names[span_index[order]] = calls[2][order]  # of several for one place the last one stays
    return names


def _loading(trace: Trace) -> _Found:
    """Calls that load, and launch calls in which the first launch of a kernel loads its module."""
    host, device = trace.host, trace.device
    rows = np.concatenate((host_rows(trace, _LOADS), _first_calls(trace), _first_ops(trace)))
    loads = host.start_ns[rows], host.end_ns[rows], host.name[rows].astype(np.int64)
    length = device.launch_end_ns - device.launch_ns
    if length[length >= _LOADING_NS].sum() < _WORTH_NAMING_NS:
        return loads
    launched, first = _launched_kernels(trace)
    length = length[launched]
    few = len(launched) < _FEW_LAUNCHES
    if few:  # a call that waits for its kernel has loaded before that begins
        length = np.minimum(length, device.start_ns[launched] - device.launch_ns[launched])
    long = length >= max(0.0 if few else _FAR_LONGER * float(np.median(length)), _LOADING_NS)
    events = launched[long & first]
    # No chance makes each of several ranks wait for a CPU at the same kernels, and no queue is full so soon.
    gpus, ranks = len(distinct(device.gpu)), np.unique(device.name[events], return_counts=True)[1]
    alike = gpus > 1 and len(launched) < _QUEUED and bool((ranks == gpus).all())
    if not (few or alike or (~first).sum() >= _REPEATED * len(launched)) or length[long & first].sum() < max(
            _WORTH_NAMING_NS, _IN_FIRST * length[long].sum()):
        return loads
    launches = device.launch_ns[events], device.launch_end_ns[events], device.name[events].astype(np.int64)
    return _joined(loads, launches)


@once
def _launched_kernels(trace: Trace) -> tuple[I64, Mask]:
    """Rows of the kernels whose launch is known, in the order of the launches; and which are the first of their kernel
    on a GPU."""
    device = trace.device
    rows = np.flatnonzero((device.kind <= Kind.COLLECTIVE) & (device.name >= 0) & (device.launch_ns >= 0) & (
        device.launch_end_ns > device.launch_ns))
    rows = rows[np.argsort(device.launch_ns[rows], kind="stable")]
    return rows, _firsts(device.gpu[rows].astype(np.int64) * len(trace.names) + device.name[rows])


def _firsts(ids: I64) -> Mask:
    """Mask of the rows whose id no earlier one has."""
    first = np.zeros(len(ids), bool)
    first[np.unique(numbered(ids)[1], return_index=True)[1]] = True
    return first


def _before_modules(trace: Trace) -> Spans:
    """Pauses between a thread's calls of CUDA right before it loads a module, where a kernel is then launched for the
    first time: it is compiled, or what it needs is read. Only Nsight Systems records all calls of a program. None where
    they come back in a loop up to the recording's end."""
    host, spans = trace.host, EMPTY
    calls, loads = host_rows(trace, _API), host_rows(trace, _LOADS)
    if trace.format != "nsys" or len(loads) < _SEVERAL:
        return spans
    launched, first = _launched_kernels(trace)
    loads = loads[np.append(first, False)[np.searchsorted(trace.device.launch_ns[launched], host.start_ns[loads])]]
    for line in distinct(host.line[loads]).tolist():
        mine = calls[host.line[calls] == line]
        start, end = host.start_ns[mine], np.append(host.start_ns[mine[:1]], np.maximum.accumulate(host.end_ns[mine]))
        close = np.searchsorted(start, host.start_ns[loads[host.line[loads] == line]] - _LOADING_NS)
        close = close[start[close] - end[close] >= _WORTH_NAMING_NS]  # the first call close to a load, after a pause
        spans = merge(spans, union(end[close], start[close]))
    if len(spans.start) < _SEVERAL:
        return EMPTY
    begin, end = np.searchsorted(trace.device.launch_ns[launched], (spans.end[0], spans.start[-1])).tolist()
    repeated = (~first[begin:end]).sum() >= _REPEATED * max(end - begin, 1)
    returns = trace.window_ns[1] - spans.end[-1] <= OVER * np.diff(spans.start).max()
    return EMPTY if repeated and returns else spans


def _first_calls(trace: Trace) -> I64:
    """PyTorch's convolutions and matrix products on a GPU in which cuDNN or cuBLAS loads its kernels, and tries none:
    far longer than usual, and none in the later half of them, as where shapes change and it chooses anew.
    """
    host, out = trace.host, [np.empty(0, np.int64)]
    for pattern in (CONVOLUTION, _PRODUCT):
        rows = host_rows(trace, pattern) if len(trace.device) else out[0]
        rows = rows[~contains(trials(trace)[CUDNN], trace.host.start_ns[rows])]
        length = host.end_ns[rows] - host.start_ns[rows]
        # In a first pass most are the first of a shape.
        usual = float(np.quantile(length, _USUAL)) if len(rows) else 0.0
        long = np.flatnonzero(length >= max(_WORTH_NAMING_NS, _FAR_LONGER * usual))
        out += [rows[long]] if len(long) and 2 * long[-1] < len(rows) else []
    return np.concatenate(out)


def _first_ops(trace: Trace) -> I64:
    """Ops of a timeline of TensorFlow 1 that take far longer than usual before a GPU that has nothing to do: they load
    libraries and kernels, as does a convolution that tries out none. Those that receive wait for others."""
    host, device = trace.host, trace.device
    rows = np.flatnonzero(np.isin(host.line, [
        number for number, line in enumerate(trace.lines) if line.name.startswith(f"{GRAPH_EXECUTOR} GPU")]))
    if not len(rows):
        return rows
    length = host.end_ns[rows] - host.start_ns[rows]
    rows = rows[length >= max(_WORTH_NAMING_NS, _FAR_LONGER * float(np.median(length)))]
    busy = coverage(union(device.start_ns, device.end_ns), host.start_ns[rows], host.end_ns[rows])
    others = name_mask(trace, r"(?:.*:)?_?(?:Host)?Recv")[host.name[rows]]
    return rows[(busy < _IDLE * (host.end_ns[rows] - host.start_ns[rows])) & ~others]


def _set_up(trace: Trace) -> _Found:
    """Calls that take long before a rank's first event on a GPU, and later the first of a name that reserves and frees
    no memory: they create the context or load modules. Calls that wait by their nature are left out: work that was
    launched before the recording leaves no event. Where CUDA itself begins in it there is none, and they set up until
    the first event. If no call takes long until then, the context was made without an event, before the second call."""
    host, device = trace.host, trace.device
    rows = host_rows(trace, _API)
    if not len(rows) or not len(device):
        return rows[:0], rows[:0], rows[:0]
    begin = name_mask(trace, _BEGINS)[host.name[rows]]  # of the first: then nothing was launched before
    # A library with its own runtime begins CUDA again.
    follows = np.append(False, begin[:-1] & (host.line[rows[:-1]] == host.line[rows[1:]]))
    silent_ns = host.start_ns[rows[1]] if follows[1:2].any() else 0
    waits = name_mask(trace, _API_WAITS)[host.name[rows]]
    kept = ~waits | begin[0] | name_mask(trace, _AT_ONCE)[host.name[rows]]
    rows, follows, waits = rows[kept], follows[kept], waits[kept]
    of_gpu = np.array([gpu.rank for gpu in trace.gpus], np.int64)[device.gpu]
    first_ns = {rank: int(device.start_ns[of_gpu == rank].min()) for rank in distinct(of_gpu).tolist()}
    until_ns = np.array([first_ns.get(line.rank, 0) for line in trace.lines], np.int64)[host.line[rows]]
    if (np.minimum(host.end_ns[rows], until_ns) - host.start_ns[rows] >= _LOADING_NS).any():
        silent_ns = 0
    if begin[0]:  # the first launch loads its module, also after a copy
        launches = name_mask(trace, LAUNCH_CALLS)[host.name[rows]]
        until_ns[launches] = device.start_ns[device.kind <= Kind.COLLECTIVE].min(initial=device.end_ns.max())
    rank = np.array([line.rank for line in trace.lines], np.int64)[host.line[rows]]
    first = _firsts(rank * len(trace.names) + host.name[rows])
    end_ns = np.where(waits, np.minimum(host.end_ns[rows], until_ns), host.end_ns[rows])
    end_ns[:1] = np.maximum(end_ns[:1], silent_ns)
    before, keeps = host.start_ns[rows] < until_ns, name_mask(trace, _API_KEEPS)[host.name[rows]]
    long = end_ns - host.start_ns[rows] >= np.where(before & begin[0], _LOADING_NS, _WORTH_NAMING_NS)
    chosen = long & (before | follows | (first & ~keeps & ~waits))
    name = host.name[rows].astype(np.int64)
    name[:int(silent_ns > 0)] = -1
    return host.start_ns[rows[chosen]], end_ns[chosen], name[chosen]


def _uploads(trace: Trace) -> Spans:
    """Copies from pageable memory before a GPU's first kernel, where many follow one another: parameters."""
    device, spans = trace.device, EMPTY
    for gpu in range(len(trace.gpus)):
        mine = on_gpu(device, gpu)  # in order of time
        before = mine.start + np.arange(np.argmax(np.append(device.kind[mine] <= Kind.COLLECTIVE, True)))
        before = before[(device.kind[before] == Kind.H2D) & (device.src[before] == MemoryKind.PAGEABLE)]
        runs = joined(union(device.start_ns[before], device.end_ns[before]), _WORTH_NAMING_NS)
        many = np.diff(np.searchsorted(device.start_ns[before], runs.start), append=len(before)) >= _PARAMETERS
        spans = merge(spans, Spans(runs.start[many], runs.end[many]))
    return spans


def _recorded(trace: Trace) -> Spans:
    """Recordings of graphs before the first one is launched, as later ones may return. While a GPU works, the job goes
    on beside them."""
    device, launches = trace.device, trace.host.start_ns[host_rows(trace, GRAPH_LAUNCH)]
    spans = subtract(recordings(trace)[0], union(device.start_ns, device.end_ns))
    before = spans.end <= launches[0] if len(launches) else np.ones(len(spans.end), bool)
    return Spans(spans.start[before], spans.end[before])


def _built(trace: Trace) -> tuple[_Found, _Found]:
    """Compilations of XLA, and tracing of Python: inside of calls and outside of any, without what returns."""
    host, calls = trace.host, builds(trace)
    again = {one.name for one in rebuilt(trace)}
    returns = np.array([function_name(trace.names[name]) in again for name in host.name[calls.rows].tolist()], bool)
    start, built = host.start_ns[calls.rows], calls.built_ns
    outer = ~returns & (built > np.concatenate(([-1], np.maximum.accumulate(built)[:-1])))
    names = np.append(host.name[calls.rows[outer]], -1).astype(np.int64)
    found_by = {}
    for kind, pattern in ((COMPILING, COMPILE), (TRACED, TRACING)):
        rows = host_rows(trace, pattern)
        begin = host.start_ns[rows]
        in_call = np.searchsorted(start[outer], begin, side="right") - 1
        in_call[(in_call >= 0) & (begin >= np.append(built[outer], 0)[in_call])] = -1
        # Outside of calls nothing tells the function: where one is built again and again it may be that one.
        keep = in_call >= 0 if again else np.ones(len(rows), bool)
        found_by[kind] = begin[keep], host.end_ns[rows][keep], names[in_call[keep]]
    once = start[~returns], built[~returns], host.name[calls.rows[~returns]].astype(np.int64)
    return found_by[COMPILING], _joined(found_by[TRACED], once)


def _joined(a: _Found, b: _Found) -> _Found:
    begin, end, name = (np.concatenate(columns) for columns in zip(a, b, strict=True))
    return begin, end, name


def past_start(trace: Trace) -> bool:
    """Return whether the job is known to have run for so long that what it does is no start: as gputop's captures
    tell."""
    return trace.job_cpus is not None and (trace.job_cpus.age_s or 0.0) > _PAST_START_S


def start_up_in_all(trace: Trace, bounds_ns: I64) -> str:
    """Work of a job's start that ran in every one of these steps, for a sentence; empty: nothing known, or the job is
    past its start. ``bounds_ns`` has the shape (steps, 2). A function that is compiled in two or more calls is no
    start: it returns."""
    if past_start(trace):
        return ""
    if len(bounds_ns) == 1 and _one_after_the_other(trace, *bounds_ns[0].tolist()):
        return "replicas that start one after another"
    may_be_first = len(bounds_ns) < _FEW_STEPS and not rebuilt(trace)
    for kind, spans in ((COMPILING, spans_of(trace, host_rows(trace, COMPILE))),
                        (LOADING, spans_of(trace, _first_ops(trace))), (KERNELS, compiling_kernels(trace)),
                        (AUTOTUNING, trials(trace)[CUDNN]), (GRAPHS, _recorded(trace))):
        time = coverage(spans, bounds_ns[:, 0], bounds_ns[:, 1])
        # What is recorded into graphs that nothing launches yet are no steps, however often it repeats.
        if (may_be_first or kind == GRAPHS) and (time > START_UP_SHARE * (bounds_ns[:, 1] - bounds_ns[:, 0])).all():
            return f"{_TEXTS[kind]} ({seconds(time.sum() / 1e9)})"
    return ""


def _one_after_the_other(trace: Trace, begin_ns: int, end_ns: int) -> bool:
    """Return whether each GPU begins its first kernel after another one's last, as where each sets up in its turn."""
    device = trace.device
    rows = np.flatnonzero((device.kind == Kind.COMPUTE) & (device.start_ns >= begin_ns) & (device.start_ns < end_ns))
    spans = sorted((int(device.start_ns[kernels].min()), int(device.end_ns[kernels].max())) for kernels in (
        rows[device.gpu[rows] == gpu] for gpu in np.unique(device.gpu[rows])))
    return len(spans) > 1 and all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def start_end_ns(trace: Trace, spans: Sequence[StartUpSpan]) -> int | None:
    """End of the start with which the recording begins; None where it does not begin with one. From the recording's
    begin to there such work takes half of the time or more, or the model comes to the GPUs then."""
    if past_start(trace):
        return None
    begin, end = trace.window_ns
    done, over = 0, None
    for span in spans:
        done += span.end_ns - span.start_ns
        if span.kind == UPLOAD or done >= _STARTS * (span.end_ns - begin):  # no loop runs before the model is there
            over = span.end_ns
    return over if over is not None and over - begin >= _WORTH_SAYING * (end - begin) else None


def tear_down(trace: Trace, lines: Mask, after_ns: int) -> Spans:
    """Calls on these lines that free, unload and destroy after the last work of the GPUs: the program ends."""
    rows = host_rows(trace, _TEARS_DOWN, lines)
    return spans_of(trace, rows[trace.host.start_ns[rows] >= after_ns])


def up_to_profilers_stop(trace: Trace) -> Trace:
    """A trace without work of a GPU up to its profiler's own end, which is no work of the job's."""
    stops = host_rows(trace, PROFILER_STOP)
    if len(trace.device) or not len(stops):
        return trace
    end = int(trace.host.start_ns[stops].max())
    left = part_of(trace, trace.window_ns[0], end)
    return replace(left, host=replace(left.host, end_ns=np.minimum(left.host.end_ns, end))) if len(left.host) else trace


def end_start_ns(trace: Trace) -> int | None:
    """Time (ns) of the last work of the GPUs, where the program's end follows; None where the recording shows no such
    end."""
    (begin, end), last = trace.window_ns, int(trace.device.end_ns.max(initial=-1))
    took = tear_down(trace, np.ones(len(trace.lines), bool), last).total if last >= 0 else 0
    return last if took and took >= max(_STARTS * (end - last), _WORTH_SAYING * (end - begin)) else None


def what_started(spans: Sequence[StartUpSpan], until_ns: int) -> str:
    """Work in the start up to then, for a sentence: of each kind the time and the longest by name, "cudaMalloc and
    others"."""
    of_kind: dict[str, list[StartUpSpan]] = {}
    for span in spans:
        if span.start_ns < until_ns:
            of_kind.setdefault(span.kind if span.what or span.kind != LOADING else "", []).append(span)
    parts = []
    for kind, alike in sorted(of_kind.items(), key=lambda item: -_length(item[1])):
        longest = max(alike, key=lambda span: span.end_ns - span.start_ns)
        name = short_kernel(longest.what).split("<")[0][:_NAME_CHARS]
        others = [span for span in alike if span.what != longest.what]
        if name and _length(others) >= _WORTH_SAYING * _length(alike):
            name += " and others"
        parts.append(f"{_TEXTS[kind]} ({f'{name}, ' if name else ''}{seconds(_length(alike) / 1e9)})")
    return " and ".join(parts)


def _length(spans: Sequence[StartUpSpan]) -> int:
    return sum(span.end_ns - span.start_ns for span in spans)


def after_start(trace: Trace, over_ns: int) -> Trace:
    """The events that begin when the start is over, to be judged by themselves; the trace as it is where none do."""
    left = part_of(trace, over_ns, trace.window_ns[1] + 1)
    return replace(left, profile_window_ns=None) if len(left.device) or (not trace.gpus and len(left.host)) else trace
