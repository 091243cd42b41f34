"""A stretch of the simulated job as the XSpace that TensorFlow 2.21's profiler would return for it.

Planes, lines, names and stats are those of a real capture on CUDA GPUs. As there, events
that began before the capture or end after it are missing, line times count from the
session's start, and that stands in the plane "Task Environment". One plane more,
``/gputop:simulated``, marks the trace for good.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gputop.simulation import kernels
from gputop.simulation.encode import INT, REF, UINT, Column, Plane, Stats, events, field_bytes, stat, stat_ref
from gputop.simulation.loop import OpSlice, TrainingLoop
from gputop.simulation.program import Phase, Program, StepKind, Stream
from gputop.simulation.scenarios import GPU_COUNT
from gputop.simulation.step import I64
from gputop.simulation.xspace_host import InputLines, python_line

SIMULATED_PLANE = "/gputop:simulated"
# What the simulated TensorFlow has reserved of each GPU for its own allocator.
ALLOCATOR_CAPACITY_BYTES = 77_200 << 20
_CUPTI_START_NS = 850_000  # the GPU tracer comes up after the session has begun
_STREAM_NUMBERS = {Stream.COMPUTE: 13, Stream.H2D: 14, Stream.D2H: 15, Stream.P2P: 16, Stream.COLLECTIVE: 24}
_COPIES = {Stream.H2D: "MemcpyH2D", Stream.D2H: "MemcpyD2H", Stream.P2P: "MemcpyP2P"}
_ALLOCATIONS = 12  # recorded allocations and deallocations of activations per step and GPU
_H100: Stats = {
    "device_vendor": "Nvidia", "clock_rate": 1_980_000, "core_count": 132, "memory_bandwidth": 3_352_320_000_000,
    "memory_size": 85_024_112_640, "compute_cap_major": 9, "compute_cap_minor": 0,
}


def build_xspace(loop: TrainingLoop, start_ns: int, end_ns: int, origin_unix_ns: int, hostname: str) -> bytes:
    """The serialized XSpace of the loop's time from ``start_ns`` to ``end_ns``.

    ``origin_unix_ns`` is the Unix time of the loop's start.
    """
    capture = _Capture(loop, start_ns, end_ns)
    host = Plane("/host:CPU", 2)
    planes = []
    for gpu in range(GPU_COUNT):
        planes.append(capture.device_plane(gpu))
        capture.launch_line(host, gpu)
    steps = loop.steps(start_ns, end_ns)
    host.add_line(1_001, "python", 0, [python_line(host, loop, steps, start_ns, end_ns)])
    InputLines(host, loop, start_ns, end_ns).add(steps)
    planes.append(host.finish())

    environment = Plane("Task Environment")
    environment.add_stat("profile_start_time", origin_unix_ns + start_ns)
    environment.add_stat("profile_stop_time", origin_unix_ns + end_ns)
    mark = Plane(SIMULATED_PLANE)
    mark.add_stat("scenario", loop.scenario.id)
    mark.add_stat("title", loop.scenario.title)
    mark.add_stat("note", "Nothing here was measured: made by gputop's simulated training loop.")
    planes += [Plane("/host:metadata").finish(), environment.finish(), mark.finish()]
    return b"".join(planes) + field_bytes(4, hostname)


@dataclass(frozen=True, slots=True)
class _Ops:
    """Operations of one stream, of all the capture's steps together. Ids are row numbers of step programs."""

    stream: Stream
    name: I64  # KERNEL_KEYS index, or -1
    op: list[str]
    op_index: I64  # into ``op``
    bytes: I64
    start_ns: I64
    end_ns: I64
    launch_ns: I64
    launch_end_ns: I64
    correlation: I64

    def where(self, mask: np.ndarray) -> _Ops:
        return _Ops(self.stream, self.name[mask], self.op, self.op_index[mask], self.bytes[mask], self.start_ns[mask],
                    self.end_ns[mask], self.launch_ns[mask], self.launch_end_ns[mask], self.correlation[mask])


class _Capture:
    def __init__(self, loop: TrainingLoop, start_ns: int, end_ns: int) -> None:
        self._loop = loop
        self._start = start_ns
        self._end = end_ns
        longest = max(len(ops.program) for t in loop.templates for ops in t.step.gpus)
        self._stride = longest + 1
        self._first = next((s.number for s in loop.steps(start_ns, end_ns)), 0)
        self._streams: dict[tuple[int, Stream], _Ops | None] = {}

    def _ops(self, gpu: int, stream: Stream) -> _Ops | None:
        key = (gpu, stream)
        if key not in self._streams:
            slices = list(self._loop.operations(gpu, stream, self._start, self._end))
            self._streams[key] = self._merge(gpu, stream, slices) if slices else None
        return self._streams[key]

    def _merge(self, gpu: int, stream: Stream, slices: list[OpSlice]) -> _Ops:
        names: dict[str, int] = {}
        maps: dict[int, I64] = {}
        name, op, size, correlation = [], [], [], []
        for part in slices:
            program: Program = self._loop.templates[part.template].step.gpus[gpu].program
            if id(program) not in maps:
                prefix = f"replica_{gpu}/" if gpu else ""
                ids = [names.setdefault(prefix + n, len(names)) for n in program.op_names]
                maps[id(program)] = np.array(ids, np.int64)
            name.append(program.kernel[part.rows])
            op.append(maps[id(program)][program.op[part.rows]])
            size.append(program.bytes[part.rows])
            run = (part.number - self._first) * GPU_COUNT + gpu
            correlation.append(1_000 + run * self._stride + part.rows)
        return _Ops(
            stream, np.concatenate(name).astype(np.int64), list(names), np.concatenate(op), np.concatenate(size),
            np.concatenate([p.start_ns for p in slices]), np.concatenate([p.end_ns for p in slices]),
            np.concatenate([p.launch_ns for p in slices]), np.concatenate([p.launch_end_ns for p in slices]),
            np.concatenate(correlation),
        )

    def device_plane(self, gpu: int) -> bytes:
        plane = Plane(f"/device:GPU:{gpu}", gpu)
        for name, value in _H100.items():
            plane.add_stat(name, value)
        base = self._start + _CUPTI_START_NS
        for stream, number in _STREAM_NUMBERS.items():
            ops = self._ops(gpu, stream)
            if ops is None:
                continue
            ops = ops.where((ops.start_ns >= base) & (ops.end_ns <= self._end))
            if not len(ops.start_ns):
                continue
            details_name, details = self._details(plane, gpu, ops)
            data = events(
                self._event_ids(plane, ops, launches=False), (ops.start_ns - base) * 1000,
                (ops.end_ns - ops.start_ns) * 1000,
                [Column(plane.stat_id("correlation_id"), UINT, ops.correlation),
                 Column(plane.stat_id(details_name), REF, details),
                 Column(plane.stat_id("tf_op"), REF, plane.ref_ids(ops.op)[ops.op_index])],
                [stat(plane.stat_id("context_id"), "$$1")],
            )
            kinds = _COPIES.get(stream, "Kernel")
            plane.add_line(number, f"Stream #{number}({kinds})", _CUPTI_START_NS, [data])
        return plane.finish()

    def launch_line(self, plane: Plane, gpu: int) -> None:
        """The thread that issues one GPU's work: its driver calls and its memory allocations."""
        thread = 2_100 + gpu
        pieces = []
        for stream in _STREAM_NUMBERS:
            ops = self._ops(gpu, stream)
            if ops is None:
                continue
            ops = ops.where((ops.launch_ns >= self._start + _CUPTI_START_NS) & (ops.launch_end_ns <= self._end))
            columns = [Column(plane.stat_id("correlation_id"), UINT, ops.correlation),
                       Column(plane.stat_id("tf_op"), REF, plane.ref_ids(ops.op)[ops.op_index])]
            if stream in _COPIES:
                details_name, details = self._details(plane, gpu, ops)
                columns.append(Column(plane.stat_id(details_name), REF, details))
            pieces.append(events(
                self._event_ids(plane, ops, launches=True), (ops.launch_ns - self._start) * 1000,
                (ops.launch_end_ns - ops.launch_ns) * 1000, columns,
                [stat(plane.stat_id("device_id"), gpu), stat(plane.stat_id("context_id"), "$$1")],
            ))
        pieces += self._allocations(plane, gpu)
        plane.add_line(thread, f"tf_Compute/{thread}", 0, pieces)

    def _event_ids(self, plane: Plane, ops: _Ops, launches: bool) -> I64:
        if ops.stream in _COPIES:
            return np.full(len(ops.name), plane.event_id(_COPIES[ops.stream]), np.int64)
        if ops.stream is Stream.COLLECTIVE:
            name = kernels.NCCL_SYMBOL if launches else kernels.NCCL_NAME
            return np.full(len(ops.name), plane.event_id(name), np.int64)
        types = kernels.KERNELS.values()
        ids = np.array([plane.event_id((k.symbol or k.name) if launches else k.name) for k in types], np.int64)
        return ids[ops.name]

    def _details(self, plane: Plane, gpu: int, ops: _Ops) -> tuple[str, I64]:
        """The stat that says how a kernel was launched or what a copy moved, and its values."""
        if ops.stream is Stream.COLLECTIVE:
            return "kernel_details", np.full(len(ops.name), plane.stat_id(kernels.NCCL_DETAILS), np.int64)
        if ops.stream is Stream.COMPUTE:
            return "kernel_details", plane.ref_ids([k.details for k in kernels.KERNELS.values()])[ops.name]
        host = "pinned" if self._loop.scenario.copy_pinned else "pageable"
        source, target, to = {
            Stream.H2D: (host, "device", gpu),
            Stream.D2H: ("device", "pageable", 0),
            Stream.P2P: ("device", "device", 0),
        }[ops.stream]
        sizes, row = np.unique(ops.bytes, return_inverse=True)
        texts = [f"kind_src:{source} kind_dst:{target} size:{size} dest:{to} async:1" for size in sizes.tolist()]
        return "memcpy_details", plane.ref_ids(texts)[row]

    def _allocations(self, plane: Plane, gpu: int) -> list[bytes]:
        """Activations come with the forward launches and go with the backward ones."""
        scenario = self._loop.scenario
        peak = scenario.allocator_peak_bytes
        if gpu == 0 and scenario.gpu0_allocator_peak_bytes is not None:
            peak = scenario.gpu0_allocator_peak_bytes
        base = min(scenario.checkpoint_bytes + scenario.gradient_bytes, peak // 2)
        level = np.arange(1, _ALLOCATIONS + 1)
        rising = base + (peak - base) * level // _ALLOCATIONS
        # A deallocation is recorded with what is left after it.
        falling = base + (peak - base) * (_ALLOCATIONS - level) // _ALLOCATIONS
        size = (peak - base) // _ALLOCATIONS
        out = []
        for name, phase, in_use in (
            ("MemoryAllocation", Phase.FORWARD, rising), ("MemoryDeallocation", Phase.BACKWARD, falling),
        ):
            at, used, ops = [], [], []
            for step in self._loop.steps(self._start, self._end):
                if step.kind is StepKind.TRAIN:
                    own = self._loop.templates[step.template].step.gpus[gpu]
                    rows = np.flatnonzero((own.program.phase == phase) & (own.program.stream == Stream.COMPUTE))
                    rows = rows[np.linspace(0, len(rows) - 1, _ALLOCATIONS).astype(int)]
                    at.append(step.begin_ns + own.launch_ns[rows] - 4_000)
                    used.append(in_use)
                    ops.append(plane.ref_ids([own.program.op_names[i] for i in own.program.op[rows]]))
            if not at:
                continue
            time, held, op = np.concatenate(at), np.concatenate(used), np.concatenate(ops)
            mask = (time >= self._start) & (time < self._end)
            time, held, op = time[mask], held[mask], op[mask]
            n = len(time)
            constants = [
                stat_ref(plane.stat_id("allocator_name"), plane.stat_id(f"GPU_{gpu}_bfc")),
                stat(plane.stat_id("fragmentation"), 0.031),
                stat_ref(plane.stat_id("region_type"), plane.stat_id("dynamic")),
                stat_ref(plane.stat_id("shape"), plane.stat_id("[]")),
            ]
            out.append(events(
                np.full(n, plane.event_id(name), np.int64), (time - self._start) * 1000, np.full(n, 400_000, np.int64),
                [Column(plane.stat_id("bytes_reserved"), INT, np.zeros(n, np.int64)),
                 Column(plane.stat_id("bytes_allocated"), INT, held),
                 Column(plane.stat_id("bytes_available"), INT, ALLOCATOR_CAPACITY_BYTES - held),
                 Column(plane.stat_id("peak_bytes_in_use"), INT, np.full(n, peak, np.int64)),
                 Column(plane.stat_id("requested_bytes"), INT, np.full(n, size - 256, np.int64)),
                 Column(plane.stat_id("allocation_bytes"), INT, np.full(n, size, np.int64)),
                 Column(plane.stat_id("tf_op"), REF, op)],
                constants,
            ))
        return out
