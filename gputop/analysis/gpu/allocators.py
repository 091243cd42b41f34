"""Use of the frameworks' own allocators over time, and the holders of the peak. TensorFlow and JAX reserve nearly all
of a GPU's memory, so that only this tells what is really in use."""

from __future__ import annotations

import re

import numpy as np

from gputop.analysis.results import AllocatorUse, Holder
from gputop.trace.model import I64, Trace

POINTS = 500  # of a timeline, at most
TOP = 10  # holders kept
# TensorFlow on Windows writes a zero byte in place of the first letter of GPU_0_bfc and gpu_host_bfc.
_CUT_NAME, _CUT_HOST_NAME = re.compile(r"^[\0\ufffd](?=PU_)"), re.compile(r"^[\0\ufffd](?=pu_)")


def memory(trace: Trace) -> tuple[AllocatorUse, ...]:
    """Peak, capacity and the course in between by allocator, by name. Those whose records tell no sizes are left out.
    The peak is of the allocator's lifetime where recorded; capacity is in use plus available."""
    events = trace.allocator
    out = []
    with_state = np.flatnonzero((events.allocator >= 0) & (events.in_use_bytes >= 0))
    with_state = with_state[np.argsort(events.allocator[with_state], kind="stable")]
    parts = np.split(with_state, np.flatnonzero(np.diff(events.allocator[with_state])) + 1) if len(with_state) else ()
    for rows in parts:
        sized = rows[events.available_bytes[rows] >= 0]
        if not len(sized):
            continue
        capacity = int((events.in_use_bytes[sized] + events.available_bytes[sized]).max())
        allocator = trace.names[events.allocator[rows[0]]]
        whole_name = _CUT_NAME.sub("G", _CUT_HOST_NAME.sub("g", allocator))
        out.append(_allocator(trace, whole_name, rows, capacity))
    return tuple(sorted(out, key=lambda use: use.allocator))


def _allocator(trace: Trace, name: str, rows: I64, capacity: int) -> AllocatorUse:
    events = trace.allocator
    # Records of one instant have no order of their own: by what is in use, so that the order of reading tells nothing.
    rows = rows[np.lexsort((events.in_use_bytes[rows], events.time_ns[rows]))]
    in_use = events.in_use_bytes[rows]
    peak = int(np.argmax(in_use))
    kept = downsample(in_use, POINTS)
    start = trace.window_ns[0] if len(trace.device) or len(trace.host) else int(events.time_ns.min())
    times = (events.time_ns[rows] - start) / 1e9
    fragmentation = events.fragmentation[rows]  # 1 - largest free block / free bytes (bfc_allocator.cc)
    finite = np.isfinite(fragmentation)
    holders, unattributed, before = _holders(trace, rows, int(events.time_ns[rows[peak]]), int(in_use[peak]))
    is_free = events.is_free[rows]
    return AllocatorUse(
        name, peak_bytes=max(int(in_use[peak]), int(events.peak_bytes[rows].max())), capacity_bytes=capacity,
        peak_in_window_bytes=int(in_use[peak]),
        timeline_s=tuple(times[kept].tolist()), timeline_in_use_bytes=tuple(in_use[kept].tolist()),
        peak_s=float(times[peak]), headroom_bytes=capacity - int(in_use[peak]),
        fragmentation_at_peak=float(fragmentation[peak]) if finite[peak] else None,
        fragmentation_max=float(fragmentation[finite].max()) if finite.any() else None,
        allocations=int((~is_free).sum()), frees=int(is_free.sum()),
        holders=holders, unattributed_bytes=unattributed, allocated_before_bytes=before)


def downsample(values: I64, points: int) -> I64:
    """Places of at most ``points`` values, in order, that keep the lowest and the highest of each stretch."""
    if len(values) <= points:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), points // 2 + 1).astype(np.int64)
    places = [edges[i] + extreme(values[edges[i]:edges[i + 1]]) for i in range(len(edges) - 1)
              for extreme in (np.argmin, np.argmax)]
    return np.unique(np.array(places, np.int64))


def _holders(
    trace: Trace, rows: I64, peak_ns: int, peak_bytes: int,
) -> tuple[tuple[Holder, ...], int | None, int | None]:
    """Holders of the peak: by TF op the bytes allocated in the window and not yet freed at its instant, the bytes of
    the peak that no op is known for, and those of them allocated before the window. None without addresses."""
    events = trace.allocator
    if not (events.address[rows] >= 0).any():
        return (), None, None
    upto = rows[(events.time_ns[rows] <= peak_ns) & (events.address[rows] >= 0)]
    address, time = events.address[upto], events.time_ns[upto]
    # The last record of each address up to the peak says whether it is held; at one instant an allocation comes last
    # where the peak counts it.
    order = np.lexsort((~events.is_free[upto], time, address))
    last = np.append(address[order][1:] != address[order][:-1], True) if len(order) else np.zeros(0, bool)
    held = upto[order[last]]
    held = held[~events.is_free[held]]
    size = events.allocation_bytes[held]
    held, size = held[size >= 0], size[size >= 0]
    op = events.tf_op[held]
    named = op >= 0
    names, which = np.unique(op[named], return_inverse=True)
    sums, counts = np.bincount(which, weights=size[named]), np.bincount(which)
    holders = [Holder(trace.names[name], int(total), int(n))
             for name, total, n in zip(names.tolist(), sums.tolist(), counts.tolist(), strict=True)]
    holders.sort(key=lambda holder: (-holder.bytes, holder.op))
    # Sizes are those rounded up, as the allocator's own figure counts them.
    return (tuple(holders[:TOP]), max(peak_bytes - int(size[named].sum()), 0), max(peak_bytes - int(size.sum()), 0))
