"""The sampler in calculated time: nothing waits, every delay is exact."""

from __future__ import annotations

import heapq
import itertools
import math
import queue
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gputop.core.samples import GpuSample, HostSample, NodeSample, ProcessSample, Reading
from gputop.telemetry import deadline_calls
from gputop.telemetry import sampler as sampler_module
from gputop.telemetry.deadline_calls import Batch, Call
from gputop.telemetry.sampler import Sampler
from tests.telemetry.node_doubles import Host, Node, Probe


class Calculated:
    """Clock and results of a sampler whose calls take ``duration_s(worker, function)`` seconds of this clock."""

    def __init__(self, duration_s: Callable[[str, str, float], float]) -> None:
        self.now_s = 0.0
        self.duration_s = duration_s
        self._messages: list[tuple[float, int, Any]] = []
        self._count = itertools.count()

    def put(self, message: Any, at_s: float | None = None) -> None:
        """``message``, or what is called then and may return one."""
        heapq.heappush(self._messages, (self.now_s if at_s is None else at_s, next(self._count), message))

    def get(self, timeout: float | None = None) -> Any:
        until_s = math.inf if timeout is None else self.now_s + timeout
        while self._messages and self._messages[0][0] <= until_s:
            at_s, _, message = heapq.heappop(self._messages)
            self.now_s = max(self.now_s, at_s)
            message = message() if callable(message) else message
            if message is not None:
                return message
        assert timeout is not None, "it would wait for ever"
        self.now_s = until_s + 1e-9
        raise queue.Empty

    def samples(self, node: Node, count: int, interval_s: float, monkeypatch: pytest.MonkeyPatch) -> list[
            tuple[float, NodeSample]]:
        """The first samples of this node, each with the time it came."""
        time = self

        class Worker:
            def __init__(self, *_: object) -> None:
                self.idle, self.asked_s = True, time.now_s
                self._batches: list[Batch] = []

            def submit(self, batch: Batch) -> None:
                self.idle, self.asked_s = False, time.now_s
                self._batches.append(batch)
                if len(self._batches) == 1:
                    time.put(self._begin_call)

            def _begin_call(self) -> object:
                if not self._batches[0].waiting:
                    ended = self._batches.pop(0)
                    if self._batches:
                        time.put(self._begin_call)
                    return self, ended
                call = self._batches[0].waiting.popleft()
                probe = getattr(call.function, "__self__", None)
                name = f"gpu{probe.info.index}" if isinstance(probe, Probe) else "host"
                duration_s = time.duration_s(name, call.function.__name__, time.now_s)
                time.put(lambda: self._end_call(call), time.now_s + duration_s)
                return None

            def _end_call(self, call: Call) -> object:
                self._batches[0].done.append((call, call.function(*call.args), time.now_s))
                return self._begin_call()

            def stop(self) -> None:
                pass

        out: list[tuple[float, NodeSample]] = []

        def take(sample: NodeSample) -> None:
            out.append((self.now_s, sample))
            if len(out) == count:
                sampler.stop()

        monkeypatch.setattr(deadline_calls, "Worker", Worker)
        clock = lambda: self.now_s  # noqa: E731
        sampler = Sampler(node, interval_s, take, pytest.fail, clocks=sampler_module.Clocks(clock, clock))
        monkeypatch.setattr(sampler._workers, "_results", self)
        sampler._schedule()
        return out


class DatedHost(Host):
    """Says when each reading was asked for."""

    def read(self, now_s: float) -> HostSample:
        return HostSample("node", {"cpu_ratio": Reading(now_s, "ratio")}, 4)

    def processes(self, now_s: float, gpus: Sequence[GpuSample]) -> tuple[ProcessSample, ...]:
        return (ProcessSample(7, "ana", "train.py", Reading(now_s, "count"), Reading(1.0, "bytes")),)


def of_host(samples: list[tuple[float, NodeSample]]) -> tuple[list[float | None], list[float | None]]:
    """How old the host's readings and the processes were in each sample, in seconds; None: missing."""
    reads = [(s.time_s, s.host["cpu_ratio"].value) for _, s in samples]
    processes = [(s.time_s, s.processes[0].cpu_cores.value) for _, s in samples]
    return tuple([None if v is None else t - v for t, v in each] for each in (reads, processes))  # type: ignore


def test_a_host_that_is_always_slow_is_shown_late(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    node.host = DatedHost()
    time = Calculated(lambda worker, *_: 0.6 if worker == "host" else 0.001)
    reads, processes = of_host(time.samples(node, 12, 1.0, monkeypatch))
    # Both together take 1.2 s of every second: now and then one must be missing, none for long.
    for ages in (reads, processes):
        assert sum(age is None for age in ages) <= 2, ages
        assert all(age is not None or before is not None for before, age in itertools.pairwise(ages)), ages
        assert all(age <= 3.0 for age in ages if age is not None), ages
        assert all(age > 0.5 for age in ages[2:] if age is not None), ages


def test_slow_processes_are_shown_a_tick_late_and_delay_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    node.host = DatedHost()
    time = Calculated(lambda worker, function, _: 0.6 if function == "_read_processes" else 0.001)
    samples = time.samples(node, 8, 1.0, monkeypatch)
    reads, processes = of_host(samples)
    assert reads == [0.0] * 8
    assert processes[0] == 0.0 and processes[1:] == pytest.approx([1.0] * 7, abs=0.001)
    assert all(came_s - sample.time_s < 0.01 for came_s, sample in samples[1:])


def test_a_host_that_hangs_once_is_missing_and_nothing_old_is_shown_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    node.host = DatedHost()
    hang_s = {3.0: 4.5}  # the reading of this tick takes so long
    time = Calculated(lambda worker, function, begin_s: (
        hang_s.get(round(begin_s), 0.001) if (worker, function) == ("host", "_read_host") else 0.0))
    reads, processes = of_host(time.samples(node, 12, 1.0, monkeypatch))
    assert [age is None for age in reads] == [False] * 3 + [True] * 5 + [False] * 4
    assert [age for age in reads if age is not None] == pytest.approx([0.0] * 7)
    # The processes are not waited for behind the hanging call: their last sample stands in for one tick.
    assert processes == pytest.approx([0.0] * 3 + [1.0] + [None] * 4 + [0.0] * 4)


@pytest.mark.parametrize(("interval_s", "tick_timeout_s"), [(0.1, 0.08), (0.5, 0.4), (2.0, 0.5)])
def test_a_gpu_that_begins_to_hang_delays_one_sample_by_the_documented_time(
        interval_s: float, tick_timeout_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sampler_module.tick_timeout_s(interval_s) == pytest.approx(tick_timeout_s)
    hangs_from_s = 2.5 * interval_s
    time = Calculated(lambda worker, _, begin_s: 1e9 if worker == "gpu1" and begin_s > hangs_from_s else 0.0)
    samples = time.samples(Node(), 6, interval_s, monkeypatch)
    delays = [came_s - sample.time_s for came_s, sample in samples]
    stagger_s = deadline_calls.STAGGER_S
    assert delays == pytest.approx([0, 0, 0, stagger_s + tick_timeout_s, 0, 0], abs=1e-6)


def test_gpus_that_are_slow_to_answer_are_read_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Calculated(lambda worker, *_: 0.04 if worker.startswith("gpu") else 0.0)
    samples = time.samples(Node(16), 3, 1.0, monkeypatch)
    delays = [came_s - sample.time_s for came_s, sample in samples]
    assert delays == pytest.approx([0.04 + 15 * deadline_calls.STAGGER_S] * 3, abs=1e-6)


# -- over the fake driver --------------------------------------------------------------------------
