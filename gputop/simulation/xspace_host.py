"""The host threads of a simulated capture: Python's calls and the input pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from gputop.simulation.encode import Plane, Stats, StatValue
from gputop.simulation.loop import StepRecord, TrainingLoop
from gputop.simulation.node import CPU_COUNT
from gputop.simulation.program import StepKind
from gputop.simulation.scenarios import GPU_COUNT

_FUNCTIONS = {
    StepKind.TRAIN: "__inference_one_step_on_iterator_21876", StepKind.EVAL: "__inference_one_step_on_iterator_24415",
}
_PREFETCH = "Iterator::Root::Prefetch"
_BATCH = f"{_PREFETCH}::BatchV2"
_MAP = f"{_BATCH}::ParallelMapV2"
_READ = f"{_MAP}::ParallelInterleaveV4"
_MAP_WAITS = 4  # recorded waits of the batching stage for mapped elements, per batch
_MAP_SHARE = 0.94  # of making a batch is waiting for them; the rest is copying them together
_READ_SHARE = 0.06  # of making a batch is reading records
_READERS = 8


def python_line(plane: Plane, loop: TrainingLoop, steps: Sequence[StepRecord], start_ns: int, end_ns: int) -> bytes:
    """The main thread: Keras 3's call of its step function, without any step marker."""
    out = []
    for step in steps:
        function = _FUNCTIONS.get(step.kind)
        if function is None:
            continue
        execute = step.wait_ns - 40_000
        done = step.begin_ns + loop.templates[step.template].step.issued_ns + 20_000
        calls: tuple[tuple[str, int, int, Stats], ...] = (
            ("one_step_on_iterator", step.start_ns + 60_000, done + 50_000,
             {"tf_function_call": "notTraced-nonXla", "tracing_count": 1}),
            ("EagerExecute", execute, done, {"eager_op": function, "is_func": 1}),
        )
        for name, begin, end, values in calls:
            if begin >= start_ns and end <= end_ns:
                out.append(plane.event(name, begin - start_ns, end - begin, values))
    return b"".join(out)


class InputLines:
    """The threads of tf.data: who waits for a batch, who makes it."""

    def __init__(self, plane: Plane, loop: TrainingLoop, start_ns: int, end_ns: int) -> None:
        self._plane = plane
        self._loop = loop
        self._start = start_ns
        self._end = end_ns

    def _event(self, name: str, begin: int, end: int, values: Stats | None = None) -> list[bytes]:
        if begin < self._start or end > self._end:
            return []  # a TraceMe is recorded only if both its ends lie within the session
        return [self._plane.event(name, begin - self._start, end - begin, values)]

    def add(self, steps: Sequence[StepRecord]) -> None:
        """Add all lines for those steps and the batches made meanwhile."""
        made = self._loop.batches(self._start, self._end)
        self._add_waits(steps, made)
        batch, read = [], []
        workers = {"parallelism": self._loop.scenario.input_workers}
        readers = {"parallelism": _READERS}
        for step in made:
            length = step.made_ns - step.made_from_ns
            batch += self._event(_BATCH, step.made_from_ns, step.made_ns, {"batch_size": self._batch_size()})
            part = length // _MAP_WAITS
            for i in range(_MAP_WAITS):
                begin = step.made_from_ns + i * part
                batch += self._event(_MAP, begin, begin + int(part * _MAP_SHARE), workers)
            read += self._event(_READ, step.made_from_ns, step.made_from_ns + int(length * _READ_SHARE), readers)
        self._plane.add_line(3_300, "tf_data_prefetch/3300", 0, batch)
        self._plane.add_line(3_301, "tf_data_parallel_map/3301", 0, read)
        for worker in range(self._loop.scenario.input_workers):
            thread = 3_400 + worker
            runs = []
            for step in made:
                # Workers end one after the other: elements differ in size.
                length = step.made_ns - step.made_from_ns
                idle = length * ((worker * 37 + step.batch * 11) % 64) // 1024
                begin, end = step.made_from_ns + idle // 2, step.made_ns - idle
                runs += self._event("InstantiatedCapturedFunction::Run", begin, end)
            self._plane.add_line(thread, f"tf_data_private_threadpool/{thread}", 0, runs)

    def _batch_size(self) -> int:
        return self._loop.scenario.batch_per_gpu * GPU_COUNT

    def _add_waits(self, steps: Sequence[StepRecord], made: Sequence[StepRecord]) -> None:
        limit = self._loop.scenario.prefetch_batches
        out = []
        for step in steps:
            if step.kind is StepKind.CHECKPOINT:
                continue
            # TensorFlow tells its CPU budget at the root of the pipeline, which is not simulated.
            values: dict[str, StatValue] = {"buffer_limit": limit, "cpu_budget": CPU_COUNT}
            if step.made_ns <= step.wait_ns:
                later = [s for s in made if s.kind is step.kind and s.batch > step.batch and s.made_ns <= step.wait_ns]
                values["buffered_elements"] = min(limit, 1 + len(later))
            out += self._event("IteratorGetNextOp::DoCompute", step.wait_ns, step.begin_ns, {"iter_num": step.batch})
            out += self._event(_PREFETCH, step.wait_ns + 8_000, step.begin_ns - 12_000, values)
        self._plane.add_line(3_200, "tf_data_iterator_get_next/3200", 0, out)
