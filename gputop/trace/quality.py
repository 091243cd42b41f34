"""Quality notes: what in a capture limits the conclusions that can be drawn from it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from gputop.core.findings import TraceNote
from gputop.text.units import counted
from gputop.trace.builder import TraceBuilder
from gputop.trace.graph_captures import in_captures
from gputop.trace.lookups import host_rows
from gputop.trace.model import I32, I64, DeviceEvents, HostEvents, Kind, Trace

CUT_OFF = "truncated"  # the note of readers whose file ends early, or holds what cannot be read
# Cause and remedy, for captures without the right to use the GPUs' counters (tensorflow 35860, xprof 63).
INSUFFICIENT_RIGHTS = (
    "the driver allows only root to trace GPUs (CUPTI_ERROR_INSUFFICIENT_PRIVILEGES)",
    "Set NVreg_RestrictProfilingToAdminUsers=0: put `options nvidia NVreg_RestrictProfilingToAdminUsers=0` into "
    "/etc/modprobe.d/nvidia-profiling.conf and reload the driver or reboot. A container also needs CAP_SYS_ADMIN.")
_RIGHTS = re.compile(r"INSUFFICIENT_PRIVILEGES|RestrictProfiling|insufficient privilege", re.IGNORECASE)
_NO_CUPTI = re.compile(r"libcupti|CUPTI could not be loaded")
_DROPPED = re.compile(r"\bdropp|not all (?!NVTX).{1,40} events might have been collected", re.IGNORECASE)
_LAUNCH = re.compile(r"^(cu|cuda|hip(Ext)?)(Module)?(Graph)?(Launch|Mem(cpy|set))")

# CUPTI keeps 2 Mi activity and 2 Mi callback records for all GPUs of a process together
# (docs/contributing/trace-notes.md, "CUPTI limits"). Where nine tenths of that are used, an early end of the device
# events is due to the limit.
_CUPTI_RECORDS = 2 << 20
_FULL_SHARE = 0.9
_MISSING_TAIL_SHARE = 0.02  # share of the capture
_KERNEL_LAUNCH = r"(?:cuda|cu|hip)(?:Module|Ext)?LaunchKernel"
_MIN_LAUNCHES, _LOST_OF_THREAD, _LOST_SHARE = 20, 0.95, 0.05  # of a thread, and of all kernels. gputop's own figures
_MIN_STREAM_KERNELS = 50  # so that no overlap with other streams' kernels is no coincidence


def note_messages(builder: TraceBuilder, errors: Sequence[str], warnings: Sequence[str]) -> None:
    """Notes of the errors and warnings that the profiler itself reported."""
    for text, id_ in (*((e, "capture_error") for e in errors), *((w, "capture_warning") for w in warnings)):
        if _RIGHTS.search(text):
            builder.note("capture_error", f"{text.strip()}. {INSUFFICIENT_RIGHTS[1]}")
        elif _DROPPED.search(text):
            builder.note("dropped_events", f"The profiler dropped events: {text.strip().rstrip('.')}. Counts and sums "
                                         "are too low, so capture for a shorter time.")
        else:
            message = text.strip()
            builder.note(id_, f"The profiler reported: {message}{'' if message.endswith(('.', '!', '?')) else '.'}")


def note_empty_planes(builder: TraceBuilder, host: str, events: Sequence[int], messages: Sequence[str],
                      call_names: I32 | I64) -> None:
    """A note where the trace has GPUs and no event of any: the reason, as far as the host's side shows it.

    ``events`` counts those of each GPU, ``call_names`` are the names of host calls with a correlation id.
    """
    if any(events):
        return
    where = f"{host or 'This host'}: no events of its {counted(len(events), 'GPU')} were recorded"
    if any(_RIGHTS.search(m) for m in messages):
        builder.note("empty_device_plane", f"{where}: {INSUFFICIENT_RIGHTS[0]}. {INSUFFICIENT_RIGHTS[1]}")
        return
    if any(_NO_CUPTI.search(m) for m in messages):
        builder.note("empty_device_plane", f"{where}: the job could not use CUPTI, which traces GPUs. Put CUDA's "
                                           "extras/CUPTI/lib64 into its LD_LIBRARY_PATH (Windows: PATH).")
        return
    names, counts = (column.tolist() for column in np.unique(call_names, return_counts=True))
    launched = sum(count for i, count in zip(names, counts, strict=True) if _LAUNCH.match(builder.names.list[i]))
    if launched:
        builder.note("empty_device_plane", f"{where}, but the host made {launched} launches and copies. Most likely "
                                         f"{INSUFFICIENT_RIGHTS[0]}. {INSUFFICIENT_RIGHTS[1]}")
    else:
        builder.note("no_device_events", f"{where}, and the host launched nothing: the job did not use its GPUs during "
                                       "the capture, or GPU tracing failed (see the job's log for CUPTI errors).")


def note_clipping(builder: TraceBuilder, host: str, device_events: Sequence[DeviceEvents],
                  host_events: Sequence[HostEvents], window_ns: tuple[int, int] | None) -> tuple[int, int] | None:
    """Cut one host's events at its last device event where CUPTI's buffers ran full; returns the window left."""
    records = sum(len(d) for d in device_events)
    calls = sum(int((d.launch_line >= 0).sum()) for d in device_events)
    if max(records, calls) < _FULL_SHARE * _CUPTI_RECORDS or not host_events:
        return window_ns
    begin = min(int(d.start_ns.min()) for d in device_events)
    last = max(int(d.end_ns.max()) for d in device_events)
    host_end = max((int(h.end_ns.max()) for h in host_events if len(h)), default=last)
    if host_end - last <= _MISSING_TAIL_SHARE * (host_end - begin):
        return window_ns
    for events in host_events:
        keep = events.start_ns <= last
        events.stats = events.stats_of(keep)
        for column in ("line", "name", "start_ns", "end_ns"):
            setattr(events, column, getattr(events, column)[keep])
    missing_s = (host_end - last) / 1e9
    builder.note("clipped", f"{host or 'This host'}: GPU events stop {missing_s:.1f} s before the capture ends, "
                 f"because {records} GPU events filled CUPTI's buffers for {_CUPTI_RECORDS} records. "
                 "gputop leaves out the time after the last GPU event. Capture for a shorter time.")
    return window_ns and (window_ns[0], min(window_ns[1], last))


def note_serialized(trace: Trace) -> None:
    """A note where no two kernels of a GPU overlap although several streams ran many.

    Profilers of older TensorFlow versions run one kernel at a time unless
    TF_GPU_CUPTI_FORCE_CONCURRENT_KERNEL is set; the trace does not contain the version.
    """
    device = trace.device
    of_kernels = device.kind <= Kind.COLLECTIVE
    busy = np.flatnonzero(np.bincount(device.line[of_kernels]) >= _MIN_STREAM_KERNELS)
    streams = Counter(trace.lines[line].gpu for line in busy.tolist())
    gpus = [gpu for gpu, several in streams.items() if several > 1]
    for gpu in gpus:
        rows = np.flatnonzero((device.gpu == gpu) & of_kernels)
        if (device.start_ns[rows[1:]] < np.maximum.accumulate(device.end_ns[rows])[:-1]).any():
            return
    if gpus:
        trace.quality.append(TraceNote("serialised_kernels", (
            "No two kernels of a GPU overlap, although they ran on several streams. Either the job orders them this "
            "way, or the profiler serialized them, as TensorFlow's older profilers do. Whether collectives could "
            "overlap with compute is unknown. Capture again with TF_GPU_CUPTI_FORCE_CONCURRENT_KERNEL=1.")))


def note_launches_without_kernels(trace: Trace) -> None:
    """Note that no launch ran a kernel, although the GPU copied later, by when the launches had their turn."""
    if (trace.device.kind <= Kind.COLLECTIVE).any():
        return
    rows = host_rows(trace, _KERNEL_LAUNCH)
    rows = rows[~in_captures(trace, rows)]
    if launches := int((trace.host.end_ns[rows] < trace.device.start_ns.max(initial=-1)).sum()):
        trace.quality.append(TraceNote("lost_kernels", (
            f"None of {counted(launches, 'kernel launch', 'es')} ran a kernel in this trace, so either they failed or "
            "the profiler did not record their kernels. Check for an error after each launch (cudaGetLastError).")))


def leave_out_lost_kernels(trace: Trace) -> None:
    """Leave out the GPU events where those of a whole thread were lost, with a note: idle time and sums would be wrong.

    Seen once in 17 captures of running PyTorch jobs (2.11, CUDA 13, H200): none of the 6,776 kernels that the thread of
    the backward pass launched, while GPM showed the GPU busy. In the others no launch is without its kernel between
    those of the first and the last kernel recorded; what is launched later has not run by the end.
    """
    host, device = trace.host, trace.device
    rows = host_rows(trace, _KERNEL_LAUNCH)
    rows = rows[~in_captures(trace, rows)]
    kernels = np.flatnonzero((device.launch_ns >= 0) & (device.kind <= Kind.COLLECTIVE))
    if not len(rows) or not len(kernels):
        return
    launch_ns, lines = device.launch_ns[kernels], len(trace.lines)
    rows = rows[(host.start_ns[rows] >= launch_ns.min()) & (host.start_ns[rows] <= launch_ns.max())]
    first_ns = int(launch_ns.min())
    has_kernel = np.isin((host.start_ns[rows] - first_ns) * lines + host.line[rows],
                         (launch_ns - first_ns) * lines + device.launch_line[kernels])
    launches = np.bincount(host.line[rows], minlength=lines)
    lost = np.bincount(host.line[rows], ~has_kernel, minlength=lines)
    threads = np.flatnonzero((launches >= _MIN_LAUNCHES) & (lost >= _LOST_OF_THREAD * launches))
    missing = int(lost[threads].sum())
    if missing < _LOST_SHARE * (missing + len(kernels)):  # a graph's kernels have one launch
        return
    trace.device = DeviceEvents.empty()
    trace.quality.append(TraceNote("lost_kernels", (
        f"The profiler lost the kernels of {missing:,} of {len(rows):,} launches, namely all launches of "
        f"{'one thread' if len(threads) == 1 else f'{len(threads)} threads'} of the job. gputop leaves out all GPU "
        "events and does not evaluate idle time. Capture again.")))


def is_cut_off(trace: Trace) -> bool:
    """Return whether events are missing from the file somewhere, as readers note it. Idle time, sums and counts would
    be wrong: writers order events by kind and thread, not by time. (kineto: an A100's kernels are out of order by the
    whole recording.)"""
    return any(note.id == CUT_OFF for note in trace.quality)


def note_unrecorded(trace: Trace) -> None:
    """A note on the time between recordings that were joined into one file (gputop.trace.readers.xspace.recordings)."""
    missing_s = sum(end - begin for begin, end in trace.unrecorded_ns) / 1e9
    trace.quality.append(TraceNote("unrecorded", (
        f"This continuous recording has several parts. The {missing_s:.2f} s between the parts, in which the profiler "
        "wrote its data, are missing. Steps that extend into this time are not counted.")))
