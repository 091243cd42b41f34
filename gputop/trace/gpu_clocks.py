"""The clock of a GPU against its host's: how far it is ahead, by what must be so.

No event begins before the call that launched it, and a call that waited for the GPU returns right after the last event
that its thread had launched. The one bounds a GPU's clock from above, the other from below. Without such calls the
launches after which an idle GPU began must agree: an empty queue takes tens of microseconds. A deep queue is no offset:
what it delays differs, and calls that wait return behind it all the same (docs/contributing/trace-notes.md, "Clocks").
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from gputop.core.findings import TraceNote
from gputop.text.units import seconds
from gputop.trace.lookups import distinct, on_gpu
from gputop.trace.model import I64, DeviceEvents, HostEvents, Kind, Trace, TraceGpu

# CUPTI converts a GPU's times to the host's clock with an error of tens of microseconds; that is also by how much what
# must be alike may differ, and a call this long has waited. gputop's own figures.
JITTER_NS = 100_000
OFF_NS = 1_000_000  # a GPU whose times are off by more than this is named; delays of launches are shorter
MIN_EVENTS = 10
UNRELIABLE = "Launch delays, causes of idle time and the order among GPUs are not reliable for this GPU."
_EARLY_SHARE = 0.01  # of a GPU's launched events, which begin before their launches
_ALIKE = 0.25  # of the time by which events begin too early: by which it differs
_NEVER_SO_LONG_NS = 100_000_000  # a queue with all its work stands still. gputop's own figure
_OUTLIERS = 4  # launches that may be joined wrongly
_IDLE_NS = 50_000  # a pause of the GPU
_LAUNCH_NS = 5_000  # from a launching call to the event, at least
_MIN_WAITS = 3  # that agree
_WAITS = re.compile(r"(?:cuda|hip)(?:Device|Thread|(Stream))Synchronize|cuCtxSynchronize|cu(Stream)Synchronize|"
                    r"((?:cuda|hip)Memcpy|cuMemcpyDtoH)(?:_v\d+)?$")


def set_right(device: DeviceEvents, host: HostEvents, names: Sequence[str], gpus: Sequence[TraceGpu]) -> Iterator[str]:
    """Move the events of each GPU whose clock differs from the host's by a constant; yields a note of each.

    The events may be in any order. Where the evidence does not decide nothing is moved, and the note says so.
    """
    launched = device.launch_line >= 0
    for gpu, about in enumerate(gpus):
        rows = np.flatnonzero(launched & (device.gpu == gpu))
        if len(rows) < MIN_EVENTS:
            continue
        delay = device.start_ns[rows] - device.launch_ns[rows]
        few, early = min(_OUTLIERS, len(delay) // 20), int((delay < -JITTER_NS).sum())
        if early <= few < np.count_nonzero(delay <= JITTER_NS):
            continue
        highest = int(np.partition(delay, few)[few])
        offset, evidence = _offset(device, rows, highest, _wait_offsets(device, host, names, gpu))
        of_gpu = np.flatnonzero(device.gpu == gpu)
        if offset is None and early >= max(MIN_EVENTS, _EARLY_SHARE * len(delay)):
            # All are early by about as much: that much at least must be so.
            offset = highest if np.median(delay) - highest <= _ALIKE * -highest else 0
            yield (f"{early:,} of {len(delay):,} events of GPU {about.ordinal} begin before the call that launched "
                   f"them, by up to {seconds(-int(delay.min()) / 1e9)}, so the clocks of GPU and host differ. "
                   f"{evidence}, so gputop corrects "
                   + (f"only the {seconds(-offset / 1e9)} by which they differ at least" if offset else "nothing")
                   + f". {UNRELIABLE}")
        elif offset is not None and abs(offset) > JITTER_NS:
            yield (f"GPU {about.ordinal}'s clock is {seconds(abs(offset) / 1e9)} "
                   f"{'ahead of' if offset > 0 else 'behind'} the host clock; gputop corrected for this offset. After "
                   f"the correction, {evidence}.")
        else:
            continue
        device.start_ns[of_gpu] -= offset
        device.end_ns[of_gpu] -= offset


def _offset(device: DeviceEvents, rows: I64, highest: int, waits: I64) -> tuple[int | None, str]:
    """Offset by which the GPU's clock is ahead (ns) and its evidence; None where that does not decide."""
    if len(waits):
        lowest = int(waits.max())
        after = "calls that wait for the GPU return right after its last event"
        if highest >= lowest - JITTER_NS and (waits > lowest - JITTER_NS).sum() >= _MIN_WAITS:
            return lowest, after
        if -JITTER_NS <= highest - lowest <= OFF_NS:
            return min(max(lowest, 0), highest), f"events begin right after their launches, and {after}"
        return None, "Launches and calls that wait for the GPU disagree on the offset"
    order = rows[np.argsort(device.start_ns[rows], kind="stable")]
    idle_ns = np.append(0, device.start_ns[order[1:]] - np.maximum.accumulate(device.end_ns[order])[:-1])
    first = order[idle_ns >= _IDLE_NS]  # after a pause
    delays = device.start_ns[first] - device.launch_ns[first]
    alike = np.abs(delays - highest) <= JITTER_NS
    # Ahead: the GPU would have paused though the next work was in its queue.
    likely = alike if highest < 0 else alike & (delays > idle_ns[idle_ns >= _IDLE_NS])
    halves = np.array_split(likely, 2)
    if len(first) >= MIN_EVENTS and all(half.mean() >= 0.5 for half in halves):
        return highest - _LAUNCH_NS, "an idle GPU begins right after each launch"
    launches, begin = np.sort(device.launch_ns[rows]), device.start_ns[device.gpu == device.gpu[rows[0]]].min()
    longest_ns = max(launches[-1] - launches[0], device.end_ns[rows].max() - begin, _NEVER_SO_LONG_NS)
    if begin == device.start_ns[order[0]] and begin - launches[-1] > longest_ns:
        return highest - _LAUNCH_NS, "the GPU begins its first work right after the launch"
    return None, "No call waits for the GPU, and launch delays differ"


def _wait_offsets(device: DeviceEvents, host: HostEvents, names: Sequence[str], gpu: int) -> I64:
    """Time (ns) from the end of each call that waited for all that its thread had launched on this GPU to the end of
    the last of that. Threads that launch on several GPUs are left out."""
    kind = {i: match for i in distinct(host.name).tolist() if (match := _WAITS.match(names[i])) is not None}
    calls = np.flatnonzero(np.isin(host.name, list(kind)) & (host.end_ns - host.start_ns >= JITTER_NS))
    out = [np.empty(0, np.int64)]
    for line in distinct(device.launch_line[device.gpu == gpu]).tolist() if len(calls) else ():
        mine = np.flatnonzero(device.launch_line == line)
        if line < 0 or (device.gpu[mine] != gpu).any():
            continue
        mine = mine[np.argsort(device.launch_ns[mine], kind="stable")]
        reach, one_stream = np.maximum.accumulate(device.end_ns[mine]), len(distinct(device.line[mine])) == 1
        for call in calls[host.line[calls] == line].tolist():
            of_all, by_copy = not any(kind[host.name[call]].groups()), kind[host.name[call]][3] is not None
            last = int(np.searchsorted(device.launch_ns[mine], host.start_ns[call], side="right")) - 1
            if last < 0 or not (of_all or one_stream):
                continue
            if by_copy and (device.kind[mine[last]] != Kind.D2H or device.launch_ns[mine[last]] != host.start_ns[call]):
                continue
            out.append(reach[last:last + 1] - host.end_ns[call])
    return np.concatenate(out)


# -- clock checks -------------------------------------------------------------------------------------
#
# Times that cannot be right: of a GPU against the other GPUs, and jumps of the clock.
#
# Nothing is corrected here. The notes say which figures rest on such times.

_JUMP_NS = 60 * 10**9  # a pause longer than this, and than all else in the trace, is no pause of a training job
_OFFSET_TOLERANCE = 0.2  # by which the offsets of single collectives may differ


def clock_notes(trace: Trace) -> list[TraceNote]:
    return [TraceNote("clock", message) for message in (*_launches(trace), *_collectives(trace), *_jumps(trace))]


def _launches(trace: Trace) -> Iterator[str]:
    """GPUs whose kernels begin long after the calls that launched them, although nothing held them up."""
    device = trace.device
    shortest: dict[int, int] = {}
    for gpu in range(len(trace.gpus)):
        mine = on_gpu(device, gpu)
        rows = mine.start + np.flatnonzero((device.launch_ns[mine] >= 0) & (device.kind[mine] <= Kind.COLLECTIVE))
        # Launched by a call before which everything earlier on that GPU had ended; events are in the order of starts.
        free = np.append(True, device.launch_ns[rows[1:]] > np.maximum.accumulate(device.end_ns[rows])[:-1])
        if len(rows) and free.sum() >= MIN_EVENTS:
            chosen = rows[free]
            shortest[gpu] = int(np.percentile(device.start_ns[chosen] - device.launch_ns[chosen], 5))
    usual = min(shortest.values(), default=0)
    for gpu, least in shortest.items():
        if len(shortest) > 1 and least > usual + OFF_NS:
            yield (f"Kernels of GPU {trace.gpus[gpu].ordinal} begin at least {seconds(least / 1e9)} after their "
                   f"launches even if the GPU is idle, but only {seconds(usual / 1e9)} on another GPU, so its clock is "
                   f"probably {seconds((least - usual) / 1e9)} ahead. {UNRELIABLE}")


def _collectives(trace: Trace) -> Iterator[str]:
    """The GPU of a host whose collectives all end by the same time before or after those of the others."""
    device = trace.device
    for host in trace.hosts or [""]:
        ends = []
        for gpu, about in enumerate(trace.gpus):
            mine = on_gpu(device, gpu)
            end = np.sort(device.end_ns[mine][device.kind[mine] == Kind.COLLECTIVE])
            if about.host == host and len(end):
                ends.append((gpu, end))
        if len(ends) < 3 or len({len(end) for _, end in ends}) > 1 or len(ends[0][1]) < MIN_EVENTS:
            continue
        table = np.stack([end for _, end in ends])
        apart = table - np.median(table, axis=0)
        for (gpu, _), offsets in zip(ends, apart, strict=True):
            off = float(np.median(offsets))
            if abs(off) > OFF_NS and np.percentile(np.abs(offsets - off), 90) < _OFFSET_TOLERANCE * abs(off):
                yield (f"The collectives of GPU {trace.gpus[gpu].ordinal} all end {seconds(abs(off) / 1e9)} "
                       f"{'after' if off > 0 else 'before'} those of the other GPUs. A collective ends on all GPUs "
                       "together, so the clock of this GPU is off by that time. Waiting in collectives and the order "
                       "of the GPUs are not reliable.")


def _jumps(trace: Trace) -> Iterator[str]:
    """A time without any event that is longer than all the rest of the trace."""
    begin, end = trace.window_ns
    if end - begin < _JUMP_NS:
        return
    starts = np.concatenate((trace.device.start_ns, trace.host.start_ns))
    ends = np.concatenate((trace.device.end_ns, trace.host.end_ns))
    order = np.argsort(starts, kind="stable")
    pause = starts[order][1:] - np.maximum.accumulate(ends[order])[:-1]
    longest = int(pause.max(initial=0))
    if longest > _JUMP_NS and longest > (end - begin) / 2:
        after = int(np.argmax(pause)) + 1
        yield (f"The trace has no GPU or host events for {seconds(longest / 1e9)}, and all its events are in the other "
               f"{seconds((end - begin - longest) / 1e9)} ({after:,} before and {len(order) - after:,} after the "
               "pause). The clock jumped, so shares of the recording are not reliable.")
