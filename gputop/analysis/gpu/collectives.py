"""Collectives across GPUs: how much of their time moves data and how much waits for the last GPU.

The i-th collective of one operation is taken to be the same one on every GPU. That holds only if all GPUs ran equally
many and the ends of each lie together; otherwise the match is not made, with the reason.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from gputop.analysis.gpu.device_time import GpuTimeline, gpu_number
from gputop.analysis.results import CollectiveOp, Collectives
from gputop.analysis.steps.membership import WorkOfSteps
from gputop.trace.intervals import uncovered, union
from gputop.trace.kernel_names import UNKNOWN
from gputop.trace.lookups import alphabetical, distinct
from gputop.trace.model import I64, Kind, Trace

# A collective ends on all GPUs together, 7 µs apart as measured; ends further apart mean a wrong match
# (docs/contributing/trace-notes.md, "Definitions of the figures").
_END_TOLERANCE_NS = 1_000_000
# At the window's edges, where dense collectives lie closer than that: real ones end within 10 µs of each other.
_EDGE_SLACKS_NS = (_END_TOLERANCE_NS, 200_000, 50_000)
# NCCL's functions, longest names first; a kernel of several (ncclDevKernel_Generic) tells none of them. vLLM's
# cross_device_reduce is an AllReduce; DeepEP's dispatch and combine are exchanges of all with all.
_OPERATION = re.compile(r"(cross_device_reduce|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|send_?recv|"
                        r"broadcast|barrier|dispatch|combine|cached_notify|reduce|gather|scatter|send|recv)",
                        re.IGNORECASE)
_OPERATIONS = {"allreduce": "AllReduce", "allgather": "AllGather", "reducescatter": "ReduceScatter",
               "alltoall": "AllToAll", "sendrecv": "SendRecv", "broadcast": "Broadcast", "reduce": "Reduce",
               "gather": "Gather", "scatter": "Scatter", "send": "Send", "recv": "Recv", "barrier": "Barrier",
               "crossdevicereduce": "AllReduce", "dispatch": "AllToAll", "combine": "AllToAll",
               "cachednotify": "Barrier"}


def of_gpus(gpu_timelines: Sequence[GpuTimeline]) -> tuple[list[GpuTimeline], list[I64]]:
    """The GPUs that ran collectives, and for each the rows of the device events that are some."""
    by_gpu = [(timeline, timeline.rows[np.flatnonzero(timeline.kind == Kind.COLLECTIVE)]) for timeline in gpu_timelines]
    return [timeline for timeline, rows in by_gpu if len(rows)], [rows for _, rows in by_gpu if len(rows)]


def collectives(trace: Trace, gpu_timelines: list[GpuTimeline], of_steps: WorkOfSteps | None) -> Collectives | None:
    """Collectives of the whole trace, or None where no GPU ran any."""
    gpu_timelines, rows = of_gpus(gpu_timelines)
    if not rows:
        return None
    device, operations, last = trace.device, list[CollectiveOp](), Counter[int]()
    transfer_ns = matched_ns = 0
    for name, rows_by_gpu in by_operation(trace, rows).items():
        ran = [timeline for timeline, r in zip(gpu_timelines, rows_by_gpu, strict=True) if len(r)]
        rows_by_gpu = [r for r in rows_by_gpu if len(r)]
        all_, same = np.concatenate(rows_by_gpu), matched(trace, rows_by_gpu)
        transfer_s = waiting = None
        if not isinstance(same, str):
            start, end = device.start_ns[same], device.end_ns[same]
            waited = start.max(axis=1) > start.min(axis=1)  # else nobody was last
            times_last = np.bincount(np.argmax(start, axis=1)[waited], minlength=len(ran)).tolist()
            last.update({timeline.gpu: n for timeline, n in zip(ran, times_last, strict=True)})
            moving_ns, length_ns = int((end - start).min(axis=1).sum()) * len(ran), int((end - start).sum())
            transfer_ns, matched_ns = transfer_ns + moving_ns, matched_ns + length_ns
            transfer_s, waiting = moving_ns / 1e9, 1 - moving_ns / length_ns if length_ns else None
        operations.append(CollectiveOp(
            name, len(all_), _per_step(rows_by_gpu, of_steps),
            int((device.end_ns[all_] - device.start_ns[all_]).sum()) / 1e9, _bytes(trace, name, all_),
            {gpu_number(trace, timeline.gpu): uncovered(union(device.start_ns[r], device.end_ns[r]),
                                                        timeline.compute) / 1e9
             for timeline, r in zip(ran, rows_by_gpu, strict=True)},
            transfer_s, waiting, same if isinstance(same, str) else None))
    reason = next((op.reason for op in operations if op.reason is not None), None)
    operations.sort(key=lambda op: (-op.time_s, op.operation))
    summed_s = sum(int((device.end_ns[r] - device.start_ns[r]).sum()) for r in rows) / 1e9
    per_step = _per_step(rows, of_steps)
    if reason is not None:
        return Collectives(per_step, summed_s, None, None, None, reason, tuple(operations))
    return Collectives(
        per_step, summed_s, transfer_ns / 1e9, 1 - transfer_ns / matched_ns if matched_ns else None,
        {gpu_number(trace, gpu): n for gpu, n in sorted(last.items()) if n}, None, tuple(operations))


def no_collectives(trace: Trace) -> str | None:
    """Note for a trace in which several GPUs compute and nothing that they ran exchanges data between them."""
    device = trace.device
    computing = len(distinct(device.gpu[device.kind == Kind.COMPUTE]))
    if computing < 2 or ((device.kind == Kind.COLLECTIVE) | (device.kind == Kind.P2P)).any():
        return None
    return (f"{computing} GPUs compute, but none of them ran a collective or a copy to another GPU. Either each GPU "
            "works independently, or the GPUs exchange data through the host or through kernels that gputop does not "
            "recognize as collectives.")


def by_operation(trace: Trace, rows: Sequence[I64]) -> dict[str, list[I64]]:
    """The collectives of each GPU by operation, operations in order of their names."""
    name = trace.device.name
    used = distinct(np.concatenate([name[r] for r in rows])).tolist() if rows else []
    operation_of = {i: operation(trace.names[i]) if i >= 0 else UNKNOWN for i in used}
    out = {}
    for op in sorted(set(operation_of.values())):
        codes = [i for i, operation_name in operation_of.items() if operation_name == op]
        out[op] = [r[np.isin(name[r], codes)] for r in rows]
    return out


def operation(kernel: str) -> str:
    """Operation of a collective's kernel: ``ncclDevKernel_AllReduce_Sum_f32_RING_LL`` → AllReduce."""
    match = _OPERATION.search(kernel.replace("(anonymous namespace)", "").split("(", 1)[0])
    return _OPERATIONS[match[1].lower().replace("_", "")] if match else UNKNOWN


def _bytes(trace: Trace, name: str, rows: I64) -> int | None:
    """Sum of the messages of these collectives of one operation, of those that tell; None where none does."""
    sizes = trace.device.bytes[rows]
    if name == "AllReduce":  # XLA's program has the operand and the result
        of_program = [trace.hlo_ops[i].bytes if i >= 0 else None for i in trace.device.hlo[rows].tolist()]
        sizes = np.where(sizes < 0, [-1 if size is None else size // 2 for size in of_program], sizes)
    return int(sizes[sizes >= 0].sum()) if (sizes >= 0).any() else None


def _per_step(rows: Sequence[I64], of_steps: WorkOfSteps | None) -> float | None:
    """Number of these events (given by GPU) per step and GPU; None without steps."""
    if of_steps is None:
        return None
    return sum(int(of_steps.inside[events].sum()) for events in rows) / len(rows) / of_steps.count


def matched(trace: Trace, rows: Sequence[I64]) -> I64 | str:
    """Rows of the device events by collective and GPU, shape (collectives, GPUs), in order; or why they cannot be.
    ``rows`` are those of one operation for each GPU that ran any."""
    device = trace.device
    if len(rows) < 2:
        return "only one GPU of the job is in the trace" if len(trace.gpus) < 2 else "only one GPU ran collectives"
    if any(note.id == "no_common_clock" for note in trace.quality):
        return "the files do not share one clock"
    for slack_ns in _EDGE_SLACKS_NS:
        seen = _seen_by_all(trace, rows, slack_ns)
        if len({len(r) for r in seen}) == 1:
            rows = seen
            break
    if len(counts := sorted({len(r) for r in rows})) > 1:
        return f"the GPUs ran different numbers of collectives ({counts[0]} to {counts[-1]})"
    # By start: every GPU issues them in the same order. Of several that start together the file's order says nothing.
    by_start = np.stack([r[np.lexsort((device.bytes[r], alphabetical(trace.names, device.name[r]), device.end_ns[r],
                                       device.start_ns[r]))] for r in rows], axis=1)
    end = device.end_ns[by_start]
    apart = int((end.max(axis=1) - end.min(axis=1)).max())
    if apart > _END_TOLERANCE_NS:
        return f"the ends of collectives matched by order are up to {apart / 1e6:.1f} ms apart, so they may not match"
    return by_start


def _seen_by_all(trace: Trace, rows: Sequence[I64], slack_ns: int) -> Sequence[I64]:
    """Leave out what only some GPUs have at the window's edges: a collective ends on all of them together, within
    ``slack_ns``. Where that leaves a GPU none, all stay: then no match will be made."""
    end = trace.device.end_ns
    lo = max(int(end[r].min()) for r in rows) - slack_ns
    hi = min(int(end[r].max()) for r in rows) + slack_ns
    kept = [r[(end[r] >= lo) & (end[r] <= hi)] for r in rows]
    return kept if all(len(r) for r in kept) else rows
