"""A simulated job's timeline as the XSpace that TensorFlow's profiler would return for it.

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
from gputop.simulation.job import Copy
from gputop.simulation.program import I64
from gputop.simulation.timeline import CopyEvent, JobTimeline, StreamOps

if TYPE_CHECKING:
    from gputop.simulation.loop import SimulatedLoop

SIMULATED_PLANE = "/gputop:simulated"
_STREAMS = {"Kernel": 13, "H2D": 14, "D2H": 15, "P2P": 16, "Collective": 24}
_COLLECTIVE_DETAILS = "regs:96 static_shared:0 dynamic_shared:87296 grid:24,1,1 block:544,1,1 occ_pct:26.5625"
_MODULE = "a_inference_train_step_2501__XlaMustCompile_true_config_proto_3175580994766145631_.17"
StreamLines = dict[int, tuple[set[str], list[bytes]]]  # kinds of operations and events, by stream number


def build_xspace(loop: SimulatedLoop, start_ns: int, end_ns: int, origin_unix_ns: int, hostname: str) -> bytes:
    """The serialized XSpace of the demo's job from ``start_ns`` to ``end_ns``, marked for good as simulated.

    ``origin_unix_ns`` is the Unix time of the loop's start.
    """
    mark = Plane(SIMULATED_PLANE)
    mark.add_stat("scenario", loop.scenario.id)
    mark.add_stat("title", loop.scenario.title)
    mark.add_stat("note", "Nothing here was measured; gputop's simulated training loop generated this trace.")
    planes = XSpaceRecorder(loop.timeline(start_ns, end_ns), start_ns, end_ns, origin_unix_ns).planes()
    return b"".join([*planes, mark.finish(), encode.field_bytes(4, hostname)])


class StreamKernels(Struct, frozen=True):
    """Kernels of one stream: ``name`` indexes ``names`` and ``details``, ``op`` indexes ``ops``."""

    kind: str  # a key of XSpaceRecorder.streams
    ran: StreamOps
    name: I64
    names: list[str]
    details: list[str]
    op: I64
    ops: list[str]


class XSpaceRecorder:
    """Writes what a profiler sees of a timeline from ``begin_ns`` to ``end_ns``."""

    streams = _STREAMS
    timestamp = 0  # of each line: it counts from the session's start

    def __init__(self, timeline: JobTimeline, begin_ns: int, end_ns: int, origin_unix_ns: int) -> None:
        self.t, self.job = timeline, timeline.job
        self.begin, self.end = begin_ns, end_ns
        self.origin = origin_unix_ns
        self.lines: dict[str, list[bytes]] = {}
        self.host = Plane("/host:CPU", 9)
        self.correlation = 1_000 + int(self.job.rng("record").integers(1, 10**6))

    def planes(self) -> Iterator[bytes]:
        yield from [self._device(gpu) for gpu in range(self.job.gpus)]
        yield self._host_plane()
        yield Plane("/host:metadata").finish()
        yield self._environment()

    def _host_plane(self) -> bytes:
        self._host_events()
        for gpu in range(self.job.gpus):
            self._allocations(gpu)
        for i, (name, data) in enumerate(sorted(self.lines.items())):
            self.host.add_line(7_000 + i, self._thread(name), self.timestamp, data)
        return self.host.finish()

    def _environment(self) -> bytes:
        environment = Plane("Task Environment")
        environment.add_stat("profile_start_time", self.origin + self.begin)
        environment.add_stat("profile_stop_time", self.origin + self.end)
        return environment.finish()

    def _thread(self, key: str) -> str:
        if key == "python":
            return key
        pool = {"get_next": "tf_data_iterator_get_next", "resource": "tf_data_iterator_resource",
                "read": "tf_data_parallel_interleave"}.get(key, "tf_data_private_threadpool")
        return f"{'tf_Compute' if key.startswith('compute') else pool}/{stable_hash(key) % 10**6}"

    def _launch_thread(self, gpu: int) -> str:
        return f"compute{gpu}"

    # GPUs

    def _device_plane(self, gpu: int) -> Plane:
        model, plane = self.job.model, Plane(f"/device:GPU:{gpu}", gpu)
        for name, value in (("device_vendor", "Nvidia"), ("clock_rate", model.clock_khz), ("core_count", model.sms),
                            ("memory_bandwidth", model.memory_gb_per_s * 10**9),
                            ("memory_size", model.memory_mib << 20), ("compute_cap_major", model.capability[0]),
                            ("compute_cap_minor", model.capability[1])):
            plane.add_stat(name, value)
        return plane

    def _device(self, gpu: int) -> bytes:
        plane = self._device_plane(gpu)
        program, compute = self.t.programs[gpu], self.t.compute[gpu]
        streams: StreamLines = {}
        ops = self._op_names(gpu, program.ops)
        self._kernels(plane, gpu, streams, StreamKernels("Kernel", compute, program.name[compute.row], program.names,
                                                         program.details, program.op[compute.row], ops))
        collectives = self.t.collectives[gpu]
        if len(collectives.row):
            name, reduce_ops = self._collective_names(gpu)
            self._kernels(plane, gpu, streams, StreamKernels(
                "Collective", collectives, collectives.row * 0, [name], [_COLLECTIVE_DETAILS], collectives.row,
                reduce_ops))
        self._copies(plane, gpu, streams)
        for number, (kinds, data) in sorted(streams.items()):
            order = sorted(kinds, key=lambda k: stable_hash(k + str(self.job.seed)))
            plane.add_line(number, f"Stream #{number}({','.join(order)})", self.timestamp, data)
        return plane.finish()

    def _op_names(self, gpu: int, ops: list[str]) -> list[str]:
        return [f"replica_{gpu}/{op}" for op in ops] if gpu else ops

    def _collective_names(self, gpu: int) -> tuple[str, list[str]]:
        """Name of the kernel, and the op of each collective of a step."""
        ops = [f"CollectiveReduceV2_{i}:CollectiveReduceV2" for i in range(self.job.comm_count)]
        return ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", self._op_names(gpu, ops))

    def _kernels(self, plane: Plane, gpu: int, streams: StreamLines, kernels: StreamKernels) -> None:
        """Add kernels of one stream to ``streams``, and their launches to the host's lines."""
        correlation = self.correlation + np.arange(len(kernels.name))
        self.correlation += len(kernels.name)
        self._kernel_events(plane, streams, kernels, correlation)
        self._launches(gpu, kernels, correlation)

    def _kernel_events(self, plane: Plane, streams: StreamLines, kernels: StreamKernels, correlation: I64) -> None:
        ran = kernels.ran
        seen = (ran.start >= self.begin) & (ran.end <= self.end)
        if not seen.any():
            return
        name, op = kernels.name[seen], kernels.op[seen]
        stats = [StatColumn(plane.stat_id("correlation_id"), UINT, correlation[seen]),
                 StatColumn(plane.stat_id("kernel_details"), REF, plane.ref_ids(kernels.details)[name])]
        constants = [encode.stat(plane.stat_id("context_id"), "$$1")]
        shown = kernels.ops
        if (compiled := self._compiled_module()) is not None:
            module, run = compiled
            hlo = [o.rsplit("/", 1)[-1].split(":")[0].lower().replace("_", "-") for o in kernels.ops]
            stats.append(StatColumn(plane.stat_id("hlo_op"), REF, plane.ref_ids(hlo)[op]))
            constants.append(encode.stat_ref(plane.stat_id("hlo_module"), plane.stat_id(module)))
            shown = [run] * len(kernels.ops)
        stats.append(StatColumn(plane.stat_id("tf_op"), REF, plane.ref_ids(shown)[op]))
        ids = np.array([plane.event_id(x) for x in kernels.names], np.int64)
        kinds, lines = streams.setdefault(self.streams[kernels.kind], (set(), []))
        kinds.add("Kernel")
        lines.append(encode.events(ids[name], (ran.start[seen] - self.begin) * 1000,
                                   (ran.end - ran.start)[seen] * 1000, stats, constants))

    def _compiled_module(self) -> tuple[str, str] | None:
        """Names of the module that XLA compiled and of the op that runs it; None without XLA."""
        return (_MODULE, "cluster_0/xla_run:_XlaRun") if self.job.xla else None

    def _launches(self, gpu: int, kernels: StreamKernels, correlation: I64) -> None:
        """Add the launches to the lines of the thread that launches."""
        ran, host = kernels.ran, self.host
        called = (ran.launch >= self.begin) & (ran.launch_end <= self.end)
        if not called.any():
            return
        symbols = np.array([host.event_id(_symbol(x)) for x in kernels.names], np.int64)
        self.lines.setdefault(self._launch_thread(gpu), []).append(encode.events(
            symbols[kernels.name[called]], (ran.launch[called] - self.begin) * 1000,
            (ran.launch_end - ran.launch)[called] * 1000,
            [StatColumn(host.stat_id("correlation_id"), UINT, correlation[called])],
            [encode.stat(host.stat_id("device_id"), gpu), encode.stat(host.stat_id("context_id"), "$$1")]))

    def _copies(self, plane: Plane, gpu: int, streams: StreamLines) -> None:
        for event in self.t.copies[gpu]:
            self.correlation += 1
            details = self._copy_details(gpu, event.copy)
            self._copy_event(plane, streams, event, details)
            self._copy_launch(gpu, event, details)

    def _copy_details(self, gpu: int, copy: Copy) -> str:
        return (f"kind_src:{copy.src} kind_dst:{copy.dst} size:{copy.size} "
                f"dest:{0 if copy.way in ('D2H', 'P2P') else gpu} async:1")

    def _copy_event(self, plane: Plane, streams: StreamLines, event: CopyEvent, details: str) -> None:
        name = f"Memcpy{event.copy.way}"
        if event.start >= self.begin and event.end <= self.end:
            values: dict[str, StatValue] = {"correlation_id": self.correlation, "memcpy_details": details}
            if event.op:
                values["tf_op"] = event.op
            kinds, lines = streams.setdefault(self.streams[event.copy.way], (set(), []))
            kinds.add(name)
            lines.append(plane.event(name, event.start - self.begin, event.end - event.start, values))

    def _copy_launch(self, gpu: int, event: CopyEvent, details: str) -> None:
        self._add(self._launch_thread(gpu), f"Memcpy{event.copy.way}", event.launch, event.launch_end, {
            "correlation_id": self.correlation, "device_id": gpu, "memcpy_details": details})

    # Host

    def _add(self, thread: str, name: str, start: int, end: int, stats: Stats | None = None) -> None:
        """A TraceMe is recorded only if both its ends lie within the session."""
        if start >= self.begin and end <= self.end and end >= start:
            self.lines.setdefault(thread, []).append(self.host.event(name, start - self.begin, end - start, stats))

    def _host_events(self) -> None:
        for event in (*self.t.host, *host_events(self.t)):
            self._add(event.thread, event.name, event.start, event.end, event.stats)

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
                     encode.stat(host.stat_id("fragmentation"), float(job.fragmentation)),
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


def _symbol(name: str) -> str:
    """The mangled name, which the launch carries."""
    if "(" not in name and "<" not in name:
        return name
    head = name.removeprefix("void ").replace("(anonymous namespace)", "").split("<")[0].split("(")[0].replace("::", "")
    return f"_Z{len(head)}{head}I{stable_hash(name) % 10**8}EEvPKT_PS1_i"


def stable_hash(text: str) -> int:
    """Stable between processes, unlike hash()."""
    value = 2166136261
    for byte in text.encode():
        value = (value ^ byte) * 16777619 & 0x7FFFFFFF
    return value


