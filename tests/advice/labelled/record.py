"""A job's timeline as the XSpace the profiler would have written of it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gputop.simulation.encode import INT, REF, UINT, Column, Plane, events, field_bytes, stat, stat_ref
from tests.advice.labelled.host import host_events
from tests.advice.labelled.job import GPUS, Job
from tests.advice.labelled.timeline import MS, HostEvent, Timeline, lead

I64 = npt.NDArray[np.int64]
_UNIX_NS = 1_790_000_000_000_000_000
_STREAMS = {"Kernel": 13, "H2D": 14, "D2H": 15, "D2D": 13, "P2P": 16, "Collective": 24}


def window(timeline: Timeline) -> tuple[int, int]:
    """The capture's begin and end: anywhere within the first and the last step, as a user's keypress would be."""
    job, steps = timeline.job, timeline.steps
    if not job.clip:
        return 0, timeline.end + 2 * MS
    rng = job.rng("window")
    first = [s.start for s in steps if s.first]
    at = lead(job)
    lo, hi = first[at], first[-1]
    begin = lo + int(float(rng.uniform(0.1, 0.9)) * (first[at + 1] - lo))
    end = hi + int(float(rng.uniform(0.1, 0.9)) * (timeline.end - hi))
    return begin, end


def record(timeline: Timeline) -> bytes:
    """The serialized XSpace."""
    return _Recorder(timeline).space()


class _Recorder:
    def __init__(self, timeline: Timeline) -> None:
        self.t, self.job = timeline, timeline.job
        self.begin, self.end = window(timeline)
        self.rng = self.job.rng("record")
        self.lines: dict[str, list[bytes]] = {}
        self.host = Plane("/host:CPU", 9)
        self.correlation = 1_000 + int(self.rng.integers(1, 10**6))
        # Before TF 2.12 lines carry Unix times; since then they count from the session's start.
        self.absolute = self.job.version < (2, 12) and not self.job.jax
        self.collective = collective_name(self.job)

    def space(self) -> bytes:
        job = self.job
        planes = []
        gpus = 0 if job.cpu_only else job.seen_gpus or job.gpus
        for gpu in range(gpus):
            planes.append(self._device(gpu))
        planes += [self._device_plane(gpu).finish() for gpu in range(gpus, gpus + job.idle_gpus)]
        if job.host_plane:
            self._host_lines()
            for i, (name, data) in enumerate(sorted(self.lines.items())):
                self.host.add_line(7_000 + i, self._thread(name), self._base(0), data)
            planes.append(self.host.finish())
        planes.append(Plane("/host:metadata").finish())
        if not self.absolute:
            environment = Plane("Task Environment")
            environment.add_stat("profile_start_time", _UNIX_NS + self.begin)
            environment.add_stat("profile_stop_time", _UNIX_NS + self.end)
            planes.append(environment.finish())
        tail = [field_bytes(2, text) for text in job.errors] + [field_bytes(4, "trainer-0")]
        return b"".join([*planes, *tail])

    def _base(self, offset: int) -> int:
        return offset + (_UNIX_NS + self.begin if self.absolute else 0)

    def _thread(self, key: str) -> str:
        job, number = self.job, abs(hash_of(key)) % 10**6
        if key.startswith("compute"):
            gpu = int(key.removeprefix("compute"))
            if job.jax:
                return f"py_xla_execute/{number}" if job.gpus > 1 else "python3"
            return f"gpu_private_{gpu}/{number}" if job.private_threads else f"tf_Compute/{number}"
        return {"python": "python3" if job.jax else "python", "get_next": f"tf_data_iterator_get_next/{number}",
                "resource": f"tf_data_iterator_resource/{number}"}.get(key) or f"tf_data_private_threadpool/{number}"

    def thread_of(self, gpu: int) -> str:
        """The thread that launches a GPU's work."""
        if self.job.style == "eager" or (self.job.jax and self.job.gpus == 1):
            return "python"
        return "compute0" if self.job.one_thread else f"compute{gpu}"

    # GPUs

    def _device_plane(self, gpu: int) -> Plane:
        _, capability, memory, bandwidth, cores, clock, _ = GPUS[self.job.gpu]
        plane = Plane(f"/device:GPU:{gpu}", gpu)
        for name, value in (("device_vendor", "Nvidia"), ("clock_rate", clock), ("core_count", cores),
                            ("memory_bandwidth", bandwidth * 10**9), ("memory_size", memory << 20),
                            ("compute_cap_major", capability[0]), ("compute_cap_minor", capability[1])):
            plane.add_stat(name, value)
        return plane

    def _device(self, gpu: int) -> bytes:
        plane = self._device_plane(gpu)
        program = self.t.programs[gpu]
        streams: dict[int, tuple[set[str], list[bytes]]] = {}
        kernels = self.t.compute[gpu].columns()
        self._group(plane, gpu, streams, "Kernel", kernels, program.names, program.details, self._ops(gpu, program.ops))
        if len(self.t.collectives[gpu].start):
            columns = self.t.collectives[gpu].columns()
            count = self.job.comm_count
            ops = [f"CollectiveReduceV2_{i}:CollectiveReduceV2" if self.job.version >= (2, 13) else
                   f"NcclAllReduce_{i}:NcclAllReduce" for i in range(count)]
            details = "regs:96 static_shared:0 dynamic_shared:87296 grid:24,1,1 block:544,1,1 occ_pct:26.5625"
            self._group(plane, gpu, streams, "Collective", columns, [self.collective], [details],
                        [f"all-reduce-start.{i}" for i in range(count)] if self.job.jax else self._ops(gpu, ops))
        self._copies(plane, gpu, streams)
        for number, (kinds, data) in sorted(streams.items()):
            order = sorted(kinds, key=lambda k: hash_of(k + str(self.job.seed)))
            plane.add_line(number, f"Stream #{number}({','.join(order)})", self._base(0), data)
        return plane.finish()

    def _ops(self, gpu: int, ops: list[str]) -> list[str]:
        return [f"replica_{gpu}/{op}" for op in ops] if gpu and not self.job.jax and not self.job.serial else ops

    def _stream(self, kind: str, gpu: int) -> int:
        return _STREAMS[kind] + 7 * gpu

    def _group(
        self, plane: Plane, gpu: int, streams: dict[int, tuple[set[str], list[bytes]]], kind: str, columns: list[I64],
        names: list[str], details: list[str], ops: list[str],
    ) -> None:
        """Kernels of one stream and their launches."""
        name, op, start, end, launch, launch_end = columns
        n = len(name)
        correlation = self.correlation + np.arange(n)
        self.correlation += n
        seen = (start >= self.begin) & (end <= self.end) & self.job.device_events
        if seen.any():
            stats = [Column(plane.stat_id("correlation_id"), UINT, correlation[seen]),
                     Column(plane.stat_id("kernel_details"), REF, plane.ref_ids(details)[name[seen]])]
            compiled = self.job.jax or self.job.xla
            if compiled:
                hlo = [o.rsplit("/", 1)[-1].split(":")[0].lower().replace("_", "-") for o in ops]
                stats.append(Column(plane.stat_id("hlo_op"), REF, plane.ref_ids(hlo)[op[seen]]))
            if self.job.tf_ops:
                shown = [f"{'XlaModule' if self.job.jax else 'cluster_0/xla_run'}:{'' if self.job.jax else '_XlaRun'}"
                         ] * len(ops) if compiled else ops
                stats.append(Column(plane.stat_id("tf_op"), REF, plane.ref_ids(shown)[op[seen]]))
            constants = [stat(plane.stat_id("context_id"), "$$1")]
            if compiled:
                constants.append(stat_ref(plane.stat_id("hlo_module"), plane.stat_id(module_name(self.job))))
            ids = np.array([plane.event_id(x) for x in names], np.int64)
            data = events(ids[name[seen]], (start[seen] - self.begin) * 1000, (end - start)[seen] * 1000, stats,
                          constants)
            kinds, lines = streams.setdefault(self._stream(kind, gpu), (set(), []))
            kinds.add("Kernel")
            lines.append(data)
        called = (launch >= self.begin) & (launch_end <= self.end) & self.job.launches
        if called.any():
            host = self.host
            symbols = np.array([host.event_id(symbol(x)) for x in names], np.int64)
            data = events(
                symbols[name[called]], (launch[called] - self.begin) * 1000, (launch_end - launch)[called] * 1000,
                [Column(host.stat_id("correlation_id"), UINT, correlation[called])],
                [stat(host.stat_id("device_id"), gpu), stat(host.stat_id("context_id"), "$$1")])
            self.lines.setdefault(self.thread_of(gpu), []).append(data)
        if kind == "Kernel" and self.job.op_events and not (self.job.xla or self.job.jax) and called.any():
            self._op_events(gpu, op[called], ops, launch[called], launch_end[called])

    def _op_events(self, gpu: int, op: I64, ops: list[str], launch: I64, launch_end: I64) -> None:
        """The executor's event of each op, around its launch."""
        host, job = self.host, self.job
        before = np.minimum(np.diff(launch, prepend=launch[0] - 4_000) * 0.35, 12_000).astype(np.int64)
        begin = np.maximum(launch - np.maximum(before, 300), self.begin)
        length = np.maximum(launch_end + 200 - begin, 200)
        ids = np.array([host.event_id(x) for x in ops], np.int64)
        thread = self.thread_of(gpu)
        self.lines.setdefault(thread, []).append(
            events(ids[op], (begin - self.begin) * 1000, length * 1000))
        if job.style == "eager":
            kinds = [x.rsplit(":", 1)[-1] for x in ops]
            outer = begin - np.minimum(np.maximum(before, 600) * 2, 25_000)
            outer = np.maximum(outer, np.concatenate(([self.begin], begin[:-1] + length[:-1] + 100)))
            size = begin + length + 150 - outer
            good = size > 0
            self.lines[thread].append(events(
                np.full(int(good.sum()), host.event_id("EagerExecute"), np.int64), (outer[good] - self.begin) * 1000,
                size[good] * 1000, [Column(host.stat_id("eager_op"), REF, host.ref_ids(kinds)[op[good]]),
                                    Column(host.stat_id("is_func"), INT, np.zeros(int(good.sum()), np.int64))]))
            local = np.array([host.event_id(f"EagerLocalExecute: {x}") for x in kinds], np.int64)
            self.lines[thread].append(events(local[op[good]], (outer[good] - self.begin + 120) * 1000,
                                             (size[good] - 160).clip(0) * 1000))
        if job.noise:
            some = slice(0, None, 5)
            self.lines[thread].append(events(
                np.full(len(begin[some]), host.event_id("ThreadpoolListener::Record"), np.int64),
                (begin[some] - self.begin) * 1000, np.full(len(begin[some]), 0, np.int64)))

    def _copies(self, plane: Plane, gpu: int, streams: dict[int, tuple[set[str], list[bytes]]]) -> None:
        job = self.job
        for event in self.t.copies[gpu]:
            self.correlation += 1
            copy = event.copy
            name = f"Memcpy{copy.way}"
            if job.old_details:
                details = f"num_bytes:{copy.size}\ndest:{gpu}\nasync:{int(copy.is_async)}"
            else:
                details = (f"kind_src:{copy.src} kind_dst:{copy.dst} size:{copy.size} "
                           f"dest:{0 if copy.way == 'D2H' else gpu} async:{int(copy.is_async)}")
            if event.start >= self.begin and event.end <= self.end and job.device_events:
                values: dict[str, int | float | str] = {"correlation_id": self.correlation, "memcpy_details": details}
                if event.op and job.tf_ops:
                    values["tf_op"] = event.op
                kinds, lines = streams.setdefault(self._stream(copy.way, gpu), (set(), []))
                kinds.add(name)
                lines.append(plane.event(name, event.start - self.begin, event.end - event.start, values))
            if event.launch >= self.begin and event.launch_end <= self.end and job.launches:
                self._add(self.thread_of(gpu), name, event.launch, event.launch_end, {
                    "correlation_id": self.correlation, "device_id": gpu, "memcpy_details": details})

    # Host

    def _add(self, thread: str, name: str, start: int, end: int, stats: dict[str,
                                                                             int | float | str] | None = None) -> None:
        """A TraceMe is recorded only if both its ends lie within the session."""
        if start >= self.begin and end <= self.end and end >= start:
            self.lines.setdefault(thread, []).append(self.host.event(name, start - self.begin, end - start, stats))

    def _host_lines(self) -> None:
        own: list[HostEvent] = [e for e in self.t.host if e.name]
        for event in [*own, *host_events(self.t)]:
            thread = self.thread_of(int(event.thread[7:])) if event.thread.startswith("compute") else event.thread
            self._add(thread, event.name, event.start, event.end, event.stats)
        if self.job.allocator:
            for gpu in range(0 if self.job.cpu_only else self.job.seen_gpus or self.job.gpus):
                self._allocations(gpu)

    def _allocations(self, gpu: int) -> None:
        """The allocator's view: activations come in the forward pass and go in the backward pass."""
        job, host = self.job, self.host
        capacity = int((GPUS[job.gpu][2] << 20) * 0.925) // 256 * 256
        high = int(capacity * job.memory) // 256 * 256
        peak = max(high, int(capacity * (job.memory_lifetime or job.memory))) // 256 * 256
        low = int(high * 0.42) // 256 * 256
        each = 10
        size = (high - low) // each // 256 * 256
        ops = self.t.programs[gpu].ops
        at: list[int] = []
        used: list[int] = []
        free: list[bool] = []
        for step in self.t.steps:
            begin, end = step.ready, max(step.issued, step.ready + 2 * each * 1000)
            for i in range(2 * each):
                at.append(begin + (end - begin) * (i + 1) // (2 * each + 1))
                held = min(i + 1, 2 * each - 1 - i)
                used.append(high - size * (each - held))
                free.append(i >= each)
        time, in_use, is_free = np.array(at, np.int64), np.array(used, np.int64), np.array(free)
        constants = [stat_ref(host.stat_id("allocator_name"), host.stat_id(f"GPU_{gpu}_bfc")),
                     stat(host.stat_id("fragmentation"), float(job.fragmentation)),
                     stat_ref(host.stat_id("region_type"), host.stat_id("dynamic"))]
        which = host.ref_ids([ops[i % len(ops)] for i in range(each)])
        for name, wanted in (("MemoryAllocation", ~is_free), ("MemoryDeallocation", is_free)):
            rows = np.flatnonzero(wanted & (time >= self.begin) & (time < self.end))
            if not len(rows):
                continue
            n = len(rows)
            self.lines.setdefault(self.thread_of(gpu), []).append(events(
                np.full(n, host.event_id(name), np.int64), (time[rows] - self.begin) * 1000, np.zeros(n, np.int64),
                [Column(host.stat_id("bytes_allocated"), INT, in_use[rows]),
                 Column(host.stat_id("bytes_available"), INT, capacity - in_use[rows]),
                 Column(host.stat_id("peak_bytes_in_use"), INT, np.full(n, peak, np.int64)),
                 Column(host.stat_id("requested_bytes"), INT, np.full(n, size - 100, np.int64)),
                 Column(host.stat_id("allocation_bytes"), INT, np.full(n, size, np.int64)),
                 Column(host.stat_id("tf_op"), REF, which[np.arange(n) % each])], constants))


def collective_name(job: Job) -> str:
    if job.jax:
        return "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    if job.version >= (2, 19):
        return "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    return "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)"


def module_name(job: Job) -> str:
    if job.jax:
        return "jit_train_step"
    return "a_inference_train_step_2501__XlaMustCompile_true_config_proto_3175580994766145631_.17"


def symbol(name: str) -> str:
    """As the launch carries it: mangled, not the demangled name."""
    if "(" not in name and "<" not in name:
        return name
    head = name.removeprefix("void ").split("<")[0].split("(")[0].replace("::", "")
    return f"_Z{len(head)}{head}I{abs(hash_of(name)) % 10**8}EEvPKT_PS1_i"


def hash_of(text: str) -> int:
    """Stable between processes, unlike hash()."""
    value = 2166136261
    for byte in text.encode():
        value = (value ^ byte) * 16777619 & 0x7FFFFFFF
    return value


