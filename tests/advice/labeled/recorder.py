"""A labeled job's timeline as the XSpace that TensorFlow's or JAX' profiler would return for it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gputop.simulation import encode
from gputop.simulation.encode import INT, REF, Plane, StatColumn
from gputop.simulation.job import Copy
from gputop.simulation.program import I64
from gputop.simulation.timeline import CopyEvent, JobTimeline
from gputop.simulation.xspace import StreamKernels, StreamLines, XSpaceRecorder, stable_hash
from tests.advice.labeled.host_threads import labeled_host_events
from tests.advice.labeled.jobs import LabeledJob, SyncCopy


def write_xspace(timeline: JobTimeline, begin_ns: int, end_ns: int, *, origin_unix_ns: int, hostname: str) -> bytes:
    """The serialized XSpace of a capture of that time of the timeline, whose zero is at ``origin_unix_ns``."""
    planes = LabeledRecorder(timeline, begin_ns, end_ns, origin_unix_ns).planes()
    errors = [encode.field_bytes(2, text) for text in timeline.job.errors]
    return b"".join([*planes, *errors, encode.field_bytes(4, hostname)])


class LabeledRecorder(XSpaceRecorder):
    job: LabeledJob
    streams = XSpaceRecorder.streams | {"D2D": 13}

    def __init__(self, timeline: JobTimeline, begin_ns: int, end_ns: int, origin_unix_ns: int) -> None:
        super().__init__(timeline, begin_ns, end_ns, origin_unix_ns)
        # Before TF 2.12 lines carry Unix times; since then they count from the session's start.
        self.absolute = self.job.version < (2, 12) and not self.job.jax
        self.timestamp = origin_unix_ns + begin_ns if self.absolute else 0

    def planes(self) -> Iterator[bytes]:
        gpus = self.job.captured_gpus
        yield from [self._device(gpu) for gpu in range(gpus)]
        yield from [self._device_plane(gpu).finish() for gpu in range(gpus, gpus + self.job.idle_gpus)]
        if self.job.host_plane:
            yield self._host_plane()
        yield Plane("/host:metadata").finish()
        if not self.absolute:
            yield self._environment()

    def _thread(self, key: str) -> str:
        job = self.job
        if key.startswith("compute"):
            number = stable_hash(key) % 10**6
            if job.jax:
                return f"py_xla_execute/{number}" if job.gpus > 1 else "python3"
            if job.private_threads:
                return f"gpu_private_{key.removeprefix('compute')}/{number}"
        return "python3" if key == "python" and job.jax else super()._thread(key)

    def _launch_thread(self, gpu: int) -> str:
        if self.job.style == "eager" or (self.job.jax and self.job.gpus == 1):
            return "python"
        return super()._launch_thread(0 if self.job.one_thread else gpu)

    def _op_names(self, gpu: int, ops: list[str]) -> list[str]:
        return ops if self.job.jax or self.job.serial else super()._op_names(gpu, ops)

    def _collective_names(self, gpu: int) -> tuple[str, list[str]]:
        job = self.job
        name, ops = super()._collective_names(gpu)
        if job.jax:
            name = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
            return name, [f"all-reduce-start.{i}" for i in range(job.comm_count)]
        if job.version < (2, 19):
            name = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)"
        return name, ops if job.version >= (2, 13) else [op.replace("CollectiveReduceV2", "NcclAllReduce")
                                                         for op in ops]

    def _compiled_module(self) -> tuple[str, str] | None:
        return ("jit_train_step", "XlaModule:") if self.job.jax else super()._compiled_module()

    def _kernel_events(self, plane: Plane, streams: StreamLines, kernels: StreamKernels, correlation: I64) -> None:
        if self.job.device_events:
            super()._kernel_events(plane, streams, kernels, correlation)

    def _launches(self, gpu: int, kernels: StreamKernels, correlation: I64) -> None:
        job, ran = self.job, kernels.ran
        if not job.launches:
            return
        super()._launches(gpu, kernels, correlation)
        called = (ran.launch >= self.begin) & (ran.launch_end <= self.end)
        if called.any() and kernels.kind == "Kernel" and job.op_events and not (job.xla or job.jax):
            self._op_events(gpu, kernels.op[called], kernels.ops, ran.launch[called], ran.launch_end[called])

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
        if self.job.noise:
            some = begin[::5]
            record(["ThreadpoolListener::Record"], np.zeros(len(some), np.int64), some, np.zeros(len(some), np.int64))

    def _copy_details(self, gpu: int, copy: Copy) -> str:
        asynchronous = int(not isinstance(copy, SyncCopy))
        if self.job.old_details:
            return f"num_bytes:{copy.size}\ndest:{gpu}\nasync:{asynchronous}"
        return super()._copy_details(gpu, copy).replace("async:1", f"async:{asynchronous}")

    def _copy_event(self, plane: Plane, streams: StreamLines, event: CopyEvent, details: str) -> None:
        if self.job.device_events:
            super()._copy_event(plane, streams, event, details)

    def _copy_launch(self, gpu: int, event: CopyEvent, details: str) -> None:
        if self.job.launches:
            super()._copy_launch(gpu, event, details)

    def _host_events(self) -> None:
        named = [event for event in self.t.host if event.name]
        for event in [*named, *labeled_host_events(self.t)]:
            thread = event.thread
            if thread.startswith("compute"):
                thread = self._launch_thread(int(thread.removeprefix("compute")))
            self._add(thread, event.name, event.start, event.end, event.stats)

    def _allocations(self, gpu: int) -> None:
        if self.job.allocator and gpu < self.job.captured_gpus:
            super()._allocations(gpu)
