"""A simulated job's timeline as the XSpace that TensorFlow's or JAX' profiler would return for it.

Planes, lines, names and stats are those of real captures on CUDA GPUs. As there, events that began
before the capture or end after it are missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from gputop.simulation import encode
from gputop.simulation.encode import INT, REF, UINT, Plane, StatColumn, Stats, StatValue
from gputop.simulation.host_events import host_events
from gputop.simulation.job import GPUS, SimulatedJob
from gputop.simulation.program import I64
from gputop.simulation.timeline import HostEvent, JobTimeline, StreamOps
from gputop.trace.lookups import Mask

if TYPE_CHECKING:
    from gputop.simulation.loop import SimulatedLoop

SIMULATED_PLANE = "/gputop:simulated"
_STREAMS = {"Kernel": 13, "H2D": 14, "D2H": 15, "D2D": 13, "P2P": 16, "Collective": 24}
_COLLECTIVE_DETAILS = "regs:96 static_shared:0 dynamic_shared:87296 grid:24,1,1 block:544,1,1 occ_pct:26.5625"
_STREAM_LINES = dict[int, tuple[set[str], list[bytes]]]  # kinds of operations and events, by stream number


def write_xspace(
    timeline: JobTimeline, begin_ns: int, end_ns: int, *, origin_unix_ns: int, hostname: str, mark: Stats | None = None,
) -> bytes:
    """The serialized XSpace of a capture of that time of the timeline.

    ``origin_unix_ns`` is the Unix time of the timeline's zero. ``mark`` are stats of the plane that says for
    good that the trace is simulated; without them there is none.
    """
    planes = [*_Recorder(timeline, begin_ns, end_ns, origin_unix_ns).planes()]
    if mark is not None:
        plane = Plane(SIMULATED_PLANE)
        for name, value in mark.items():
            plane.add_stat(name, value)
        planes.append(plane.finish())
    errors = [encode.field_bytes(2, text) for text in timeline.job.recorded.errors]
    return b"".join([*planes, *errors, encode.field_bytes(4, hostname)])


def build_xspace(loop: SimulatedLoop, start_ns: int, end_ns: int, origin_unix_ns: int, hostname: str) -> bytes:
    """The serialized XSpace of the demo's job from ``start_ns`` to ``end_ns``, marked as simulated.

    ``origin_unix_ns`` is the Unix time of the loop's start.
    """
    mark = {"scenario": loop.scenario.id, "title": loop.scenario.title,
            "note": "Nothing here was measured; gputop's simulated training loop generated this trace."}
    return write_xspace(loop.timeline(start_ns, end_ns), start_ns, end_ns, origin_unix_ns=origin_unix_ns,
                        hostname=hostname, mark=mark)


class _Kernels(Struct, frozen=True):
    """Kernels of one stream: ``name`` indexes ``names`` and ``details``, ``op`` indexes ``ops``."""

    kind: str  # a key of _STREAMS
    ran: StreamOps
    name: I64
    names: list[str]
    details: list[str]
    op: I64
    ops: list[str]


class _Recorder:
    def __init__(self, timeline: JobTimeline, begin_ns: int, end_ns: int, origin_unix_ns: int) -> None:
        self.t, self.job = timeline, timeline.job
        self.begin, self.end = begin_ns, end_ns
        self.origin = origin_unix_ns
        self.lines: dict[str, list[bytes]] = {}
        self.host = Plane("/host:CPU", 9)
        self.correlation = 1_000 + int(self.job.rng("record").integers(1, 10**6))
        # Before TF 2.12 lines carry Unix times; since then they count from the session's start.
        self.absolute = self.job.version < (2, 12) and not self.job.jax

    def planes(self) -> Iterator[bytes]:
        job = self.job
        gpus = job.captured_gpus
        yield from [self._device(gpu) for gpu in range(gpus)]
        yield from [self._device_plane(gpu).finish() for gpu in range(gpus, gpus + job.idle_gpus)]
        if job.recorded.host_plane:
            self._host_lines()
            for i, (name, data) in enumerate(sorted(self.lines.items())):
                self.host.add_line(7_000 + i, self._thread(name), self._timestamp(), data)
            yield self.host.finish()
        yield Plane("/host:metadata").finish()
        if not self.absolute:
            environment = Plane("Task Environment")
            environment.add_stat("profile_start_time", self.origin + self.begin)
            environment.add_stat("profile_stop_time", self.origin + self.end)
            yield environment.finish()

    def _timestamp(self) -> int:
        return self.origin + self.begin if self.absolute else 0

    def _thread(self, key: str) -> str:
        job, number = self.job, _hash(key) % 10**6
        if key.startswith("compute"):
            if job.jax:
                return f"py_xla_execute/{number}" if job.gpus > 1 else "python3"
            gpu = key.removeprefix("compute")
            return f"gpu_private_{gpu}/{number}" if job.host.private_threads else f"tf_Compute/{number}"
        if key == "python":
            return "python3" if job.jax else "python"
        pool = {"get_next": "tf_data_iterator_get_next", "resource": "tf_data_iterator_resource",
                "read": "tf_data_parallel_interleave"}.get(key, "tf_data_private_threadpool")
        return f"{pool}/{number}"

    def _launch_thread(self, gpu: int) -> str:
        if self.job.style == "eager" or (self.job.jax and self.job.gpus == 1):
            return "python"
        return "compute0" if self.job.across.one_thread else f"compute{gpu}"

    # GPUs

    def _device_plane(self, gpu: int) -> Plane:
        capability, memory, bandwidth, cores, clock, _ = GPUS[self.job.gpu]
        plane = Plane(f"/device:GPU:{gpu}", gpu)
        for name, value in (("device_vendor", "Nvidia"), ("clock_rate", clock), ("core_count", cores),
                            ("memory_bandwidth", bandwidth * 10**9), ("memory_size", memory << 20),
                            ("compute_cap_major", capability[0]), ("compute_cap_minor", capability[1])):
            plane.add_stat(name, value)
        return plane

    def _device(self, gpu: int) -> bytes:
        plane = self._device_plane(gpu)
        job, program, compute = self.job, self.t.programs[gpu], self.t.compute[gpu]
        streams: _STREAM_LINES = {}
        ops = self._op_names(gpu, program.ops)
        self._kernels(plane, gpu, streams, _Kernels("Kernel", compute, program.name[compute.row], program.names,
                                                    program.details, program.op[compute.row], ops))
        collectives = self.t.collectives[gpu]
        if len(collectives.row):
            reduce = "CollectiveReduceV2" if job.version >= (2, 13) else "NcclAllReduce"
            reduce_ops = [f"all-reduce-start.{i}" for i in range(job.across.comm_count)] if job.jax else (
                self._op_names(gpu, [f"{reduce}_{i}:{reduce}" for i in range(job.across.comm_count)]))
            self._kernels(plane, gpu, streams, _Kernels(
                "Collective", collectives, collectives.row * 0, [_collective_name(job)], [_COLLECTIVE_DETAILS],
                collectives.row, reduce_ops))
        self._copies(plane, gpu, streams)
        for number, (kinds, data) in sorted(streams.items()):
            order = sorted(kinds, key=lambda k: _hash(k + str(self.job.seed)))
            plane.add_line(number, f"Stream #{number}({','.join(order)})", self._timestamp(), data)
        return plane.finish()

    def _op_names(self, gpu: int, ops: list[str]) -> list[str]:
        return [f"replica_{gpu}/{op}" for op in ops] if gpu and not self.job.jax and not self.job.across.serial else ops

    def _kernels(self, plane: Plane, gpu: int, streams: _STREAM_LINES, kernels: _Kernels) -> None:
        """Add kernels of one stream to ``streams``, and their launches to the host's lines."""
        ran, job, correlation = kernels.ran, self.job, self.correlation + np.arange(len(kernels.name))
        self.correlation += len(kernels.name)
        seen = (ran.start >= self.begin) & (ran.end <= self.end) & job.recorded.device_events
        if seen.any():
            kinds, lines = streams.setdefault(_STREAMS[kernels.kind], (set(), []))
            kinds.add("Kernel")
            lines.append(self._kernel_events(plane, kernels, seen, correlation[seen]))
        called = (ran.launch >= self.begin) & (ran.launch_end <= self.end) & job.recorded.launches
        if called.any():
            self._launches(gpu, kernels, called, correlation[called])

    def _kernel_events(self, plane: Plane, kernels: _Kernels, seen: Mask, correlation: I64) -> bytes:
        """The events of the kernels ``seen`` on their GPU."""
        ran, name, op, job = kernels.ran, kernels.name[seen], kernels.op[seen], self.job
        stats = [StatColumn(plane.stat_id("correlation_id"), UINT, correlation),
                 StatColumn(plane.stat_id("kernel_details"), REF, plane.ref_ids(kernels.details)[name])]
        constants = [encode.stat(plane.stat_id("context_id"), "$$1")]
        shown = kernels.ops
        if job.jax or job.work.xla:
            hlo = [o.rsplit("/", 1)[-1].split(":")[0].lower().replace("_", "-") for o in kernels.ops]
            stats.append(StatColumn(plane.stat_id("hlo_op"), REF, plane.ref_ids(hlo)[op]))
            constants.append(encode.stat_ref(plane.stat_id("hlo_module"), plane.stat_id(
                "jit_train_step" if job.jax else
                "a_inference_train_step_2501__XlaMustCompile_true_config_proto_3175580994766145631_.17")))
            shown = ["XlaModule:" if job.jax else "cluster_0/xla_run:_XlaRun"] * len(kernels.ops)
        stats.append(StatColumn(plane.stat_id("tf_op"), REF, plane.ref_ids(shown)[op]))
        ids = np.array([plane.event_id(x) for x in kernels.names], np.int64)
        return encode.events(ids[name], (ran.start[seen] - self.begin) * 1000, (ran.end - ran.start)[seen] * 1000,
                             stats, constants)

    def _launches(self, gpu: int, kernels: _Kernels, called: Mask, correlation: I64) -> None:
        """Add the launches ``called`` to the lines of the thread that launches, and the ops around them."""
        launch, launch_end, host, job = kernels.ran.launch[called], kernels.ran.launch_end[called], self.host, self.job
        symbols = np.array([host.event_id(_symbol(x)) for x in kernels.names], np.int64)
        data = encode.events(
            symbols[kernels.name[called]], (launch - self.begin) * 1000, (launch_end - launch) * 1000,
            [StatColumn(host.stat_id("correlation_id"), UINT, correlation)],
            [encode.stat(host.stat_id("device_id"), gpu), encode.stat(host.stat_id("context_id"), "$$1")])
        self.lines.setdefault(self._launch_thread(gpu), []).append(data)
        if kernels.kind == "Kernel" and job.recorded.op_events and not (job.work.xla or job.jax):
            self._op_events(gpu, kernels.op[called], kernels.ops, launch, launch_end)

    def _op_events(self, gpu: int, op: I64, ops: list[str], launch: I64, launch_end: I64) -> None:
        """The executor's event of each op, around its launch."""
        host = self.host
        before = np.minimum(np.diff(launch, prepend=launch[0] - 4_000) * 0.35, 12_000).astype(np.int64)
        begin = np.maximum(launch - np.maximum(before, 300), self.begin)
        length = np.maximum(launch_end + 200 - begin, 200)
        lines = self.lines.setdefault(self._launch_thread(gpu), [])

        def record(names: list[str], which: I64, begins: I64, duration: I64,
                   stats: list[StatColumn] | None = None) -> None:
            ids = np.array([host.event_id(x) for x in names], np.int64)
            lines.append(encode.events(ids[which], (begins - self.begin) * 1000, duration * 1000, stats or []))

        record(ops, op, begin, length)
        if self.job.style == "eager":
            kinds = [x.rsplit(":", 1)[-1] for x in ops]
            outer = begin - np.minimum(np.maximum(before, 600) * 2, 25_000)
            outer = np.maximum(outer, np.concatenate(([self.begin], begin[:-1] + length[:-1] + 100)))
            size = begin + length + 150 - outer
            outer, size, which = outer[size > 0], size[size > 0], op[size > 0]
            record(["EagerExecute"], which * 0, outer, size, [
                StatColumn(host.stat_id("eager_op"), REF, host.ref_ids(kinds)[which]),
                StatColumn(host.stat_id("is_func"), INT, which * 0)])
            record([f"EagerLocalExecute: {x}" for x in kinds], which, outer + 120, (size - 160).clip(0))
        if self.job.recorded.noise:
            some = begin[::5]
            record(["ThreadpoolListener::Record"], np.zeros(len(some), np.int64), some, np.zeros(len(some), np.int64))

    def _copies(self, plane: Plane, gpu: int, streams: _STREAM_LINES) -> None:
        job = self.job
        for event in self.t.copies[gpu]:
            self.correlation += 1
            copy = event.copy
            name = f"Memcpy{copy.way}"
            if job.recorded.old_details:
                details = f"num_bytes:{copy.size}\ndest:{gpu}\nasync:{int(copy.is_async)}"
            else:
                details = (f"kind_src:{copy.src} kind_dst:{copy.dst} size:{copy.size} "
                           f"dest:{0 if copy.way in ('D2H', 'P2P') else gpu} async:{int(copy.is_async)}")
            if event.start >= self.begin and event.end <= self.end and job.recorded.device_events:
                values: dict[str, StatValue] = {"correlation_id": self.correlation, "memcpy_details": details}
                if event.op:
                    values["tf_op"] = event.op
                kinds, lines = streams.setdefault(_STREAMS[copy.way], (set(), []))
                kinds.add(name)
                lines.append(plane.event(name, event.start - self.begin, event.end - event.start, values))
            if job.recorded.launches:
                self._add(self._launch_thread(gpu), name, event.launch, event.launch_end, {
                    "correlation_id": self.correlation, "device_id": gpu, "memcpy_details": details})

    # Host

    def _add(self, thread: str, name: str, start: int, end: int, stats: Stats | None = None) -> None:
        """A TraceMe is recorded only if both its ends lie within the session."""
        if start >= self.begin and end <= self.end and end >= start:
            self.lines.setdefault(thread, []).append(self.host.event(name, start - self.begin, end - start, stats))

    def _host_lines(self) -> None:
        named: list[HostEvent] = [e for e in self.t.host if e.name]
        for event in [*named, *host_events(self.t)]:
            thread = event.thread
            if thread.startswith("compute"):
                thread = self._launch_thread(int(thread.removeprefix("compute")))
            self._add(thread, event.name, event.start, event.end, event.stats)
        if self.job.recorded.allocator:
            for gpu in range(self.job.captured_gpus):
                self._allocations(gpu)

    def _allocations(self, gpu: int) -> None:
        """The allocator's events: activations come in the forward pass and go in the backward pass."""
        job, host = self.job, self.host
        capacity, peak = job.allocator_capacity_bytes, job.allocator_peak_bytes(gpu)
        each = 10
        size = (peak - int(peak * 0.42) // 256 * 256) // each // 256 * 256
        number = np.arange(2 * each)
        times = []
        for step in self.t.steps:
            length = max(step.issued - step.ready, 2 * each * 1000)
            times.append(step.ready + length * (number + 1) // (2 * each + 1))
        time = np.concatenate(times) if times else number[:0]
        # A deallocation is recorded with what is left after it.
        in_use = np.tile(peak - size * (each - np.minimum(number + 1, 2 * each - 1 - number)), len(times))
        is_free = np.tile(number >= each, len(times))
        constants = [encode.stat_ref(host.stat_id("allocator_name"), host.stat_id(f"GPU_{gpu}_bfc")),
                     encode.stat(host.stat_id("fragmentation"), float(job.allocation.fragmentation)),
                     encode.stat_ref(host.stat_id("region_type"), host.stat_id("dynamic"))]
        ops = self.t.programs[gpu].ops
        which = host.ref_ids([ops[i % len(ops)] for i in range(each)])
        for name, wanted in (("MemoryAllocation", ~is_free), ("MemoryDeallocation", is_free)):
            rows = np.flatnonzero(wanted & (time >= self.begin) & (time < self.end))
            n = len(rows)
            if not n:
                continue
            self.lines.setdefault(self._launch_thread(gpu), []).append(encode.events(
                np.full(n, host.event_id(name), np.int64), (time[rows] - self.begin) * 1000, np.zeros(n, np.int64),
                [StatColumn(host.stat_id("bytes_allocated"), INT, in_use[rows]),
                 StatColumn(host.stat_id("bytes_available"), INT, capacity - in_use[rows]),
                 StatColumn(host.stat_id("peak_bytes_in_use"), INT, np.full(n, peak, np.int64)),
                 StatColumn(host.stat_id("requested_bytes"), INT, np.full(n, size - 100, np.int64)),
                 StatColumn(host.stat_id("allocation_bytes"), INT, np.full(n, size, np.int64)),
                 StatColumn(host.stat_id("tf_op"), REF, which[np.arange(n) % each])], constants))


def _collective_name(job: SimulatedJob) -> str:
    if job.jax:
        return "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    if job.version >= (2, 19):
        return "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    return "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)"


def _symbol(name: str) -> str:
    """The mangled name, which the launch carries."""
    if "(" not in name and "<" not in name:
        return name
    head = name.removeprefix("void ").replace("(anonymous namespace)", "").split("<")[0].split("(")[0].replace("::", "")
    return f"_Z{len(head)}{head}I{_hash(name) % 10**8}EEvPKT_PS1_i"


def _hash(text: str) -> int:
    """Stable between processes, unlike hash()."""
    value = 2166136261
    for byte in text.encode():
        value = (value ^ byte) * 16777619 & 0x7FFFFFFF
    return value


