"""Reading GPUs of which some answer, some fail and some hang."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator

import pytest

from gputop.core.samples import FAILED, NOT_RESPONDING, OK, GpuSample, XidEvent
from gputop.telemetry import deadline_calls
from gputop.telemetry.deadline_calls import GpuReader, Workers
from tests.telemetry.node_doubles import Probe
from tests.waiting import PATIENCE_S


class Gpus:
    """Four probes and their reader, on a clock that the test turns."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.probes = [Probe(i) for i in range(4)]
        self.workers = Workers(lambda: self.now_s)
        self.reader = GpuReader(self.probes, self.workers)

    def read(self, timeout_s: float = PATIENCE_S) -> tuple[GpuSample, ...]:
        return self.reader.read(1.0, timeout_s)


@pytest.fixture
def gpus() -> Iterator[Gpus]:
    gpus = Gpus()
    yield gpus
    for probe in gpus.probes:
        probe.gate.set()
    assert gpus.workers.end(PATIENCE_S)


def test_one_thread_reads_all_that_answer_at_once(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline_calls, "STAGGER_S", PATIENCE_S)
    for reads in (1.0, 2.0):
        assert [sample["power_w"].value for sample in gpus.read()] == [reads] * 4
    assert len(gpus.reader.threads) == 1


def test_the_gpus_behind_one_that_hangs_are_read_by_another_thread(gpus: Gpus) -> None:
    gpus.probes[1].gate.clear()
    samples = gpus.read(timeout_s=0.0)
    while samples[3]["power_w"].value is None:
        samples = gpus.read(timeout_s=0.01)
    assert samples[1].state == OK and "the driver has taken" in samples[1].message
    assert gpus.probes[1].reads == 1, "no second call goes into the driver"
    gpus.now_s = deadline_calls.HANG_TIMEOUT_S + 1
    gpus.probes[1].faults = (XidEvent(1.0, 119),)
    hanging = gpus.read(timeout_s=0.0)[1]
    assert hanging.state == NOT_RESPONDING and "has hung for 3 s. Look for Xid errors in `dmesg`" in hanging.message
    assert hanging.xids == gpus.probes[1].faults and hanging.processes_reason == hanging.message


def test_a_thread_that_a_slow_gpu_took_ends_when_it_is_of_no_use_any_more(
        gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    for probe in gpus.probes[:3]:  # one after the other: each takes a thread of its own
        probe.gate.clear()
        gpus.read(timeout_s=0.0)
    assert len(gpus.reader.threads) == 4
    monkeypatch.setattr(deadline_calls, "STAGGER_S", PATIENCE_S)
    for probe in gpus.probes:
        probe.gate.set()
    gpus.workers.wait_for([call for _, call in gpus.reader._calls], PATIENCE_S)
    taken = [thread._thread for thread in gpus.reader.threads]
    for _ in range(10):
        gpus.now_s += deadline_calls._SPARE_S / 5
        assert all(sample["power_w"].value for sample in gpus.read())
    assert len(gpus.reader.threads) == 1
    for thread in taken[1:]:
        if thread.ident is not None:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def test_where_gputop_itself_gets_no_cpu_no_thread_is_added(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    receive, woken = gpus.workers.receive, []

    def late(until_s: float | None) -> bool:
        woken.append(until_s)
        gpus.now_s += 5 * deadline_calls.STAGGER_S
        if len(woken) == 10:
            gpus.probes[0].gate.set()
        return receive(None if until_s is None else until_s + 5 * deadline_calls.STAGGER_S)

    monkeypatch.setattr(gpus.workers, "receive", late)
    gpus.probes[0].gate.clear()
    assert all(sample["power_w"].value for sample in gpus.read()) and len(woken) >= 10
    assert len(gpus.reader.threads) == 1


def test_the_driver_is_not_accused_where_gputop_itself_got_no_cpu(gpus: Gpus) -> None:
    class Late:
        """The results, for which the thread that waits a moment is woken seconds too late."""

        def get(self, timeout: float) -> object:
            gpus.now_s += 3.0
            raise queue.Empty

    results, workers = gpus.workers._results, gpus.workers
    gpus.probes[1].gate.clear()
    gpus.read(timeout_s=0.0)
    workers._results = Late()  # type: ignore[assignment]
    assert not workers.receive(gpus.now_s + 0.1)
    workers._results = results
    sample = gpus.read(timeout_s=0.0)[1]
    assert sample.state == OK and "the host is overloaded" in sample.message
    gpus.now_s += 40.0
    assert gpus.read(timeout_s=0.0)[1].state == NOT_RESPONDING


def test_a_probe_that_raises_is_a_failed_gpu(gpus: Gpus) -> None:
    gpus.probes[2].fault = ValueError("odd")
    samples = gpus.read()
    assert [sample.state for sample in samples] == [OK, OK, FAILED, OK]
    assert "GPU 2 could not be read: ValueError('odd')" in samples[2].message


def test_no_gpu_is_no_thread() -> None:
    workers = Workers(time.monotonic)
    reader = GpuReader((), workers)
    assert reader.read(1.0, 1.0) == () and not reader.threads
