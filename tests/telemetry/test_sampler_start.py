"""How the sampler begins: the first sample before anything is connected, and the backfill of the source."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import pytest

from gputop.core.errors import GputopError, NoDataError
from gputop.core.samples import HostSample, NodeSample
from gputop.telemetry.sampler import MIN_INTERVAL_S, Sampler
from tests.telemetry.node_doubles import Node
from tests.waiting import PATIENCE_S


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("simulated", [False, True])
def test_before_a_connection_it_reads_the_gpus_and_waits(simulated: bool) -> None:
    node = Node()
    node.simulated = simulated
    sampler = Sampler(node, MIN_INTERVAL_S)
    sampler.start()
    assert sampler.first_gpus_ready.wait(PATIENCE_S) and sampler.failure is None
    first_gpus = sampler.first_gpus
    assert first_gpus is not None and first_gpus.gpus[0]["power_w"].value == 1.0
    assert first_gpus.host["cpu_ratio"].reason == "not asked yet" and not first_gpus.processes
    out: queue.SimpleQueue[NodeSample | GputopError] = queue.SimpleQueue()
    sampler.connect(out.put, out.put)
    first = out.get(timeout=PATIENCE_S)
    assert isinstance(first, NodeSample) and first.host["cpu_ratio"].value is not None and first.processes
    again = (first.time_s > first_gpus.time_s, first.gpus[0]["power_w"].value == 2.0, first.interval_s is None)
    assert again == (not simulated, not simulated, True), "a rate needs two readings, but of what is simulated"
    sampler.stop(PATIENCE_S)
    assert node.closed.is_set()


def test_a_failure_before_a_connection_is_kept_and_reported_later() -> None:
    node = Node()
    node.fault = NoDataError("no GPU", "buy one")
    sampler = Sampler(node, MIN_INTERVAL_S)
    sampler.start()
    assert sampler.first_gpus_ready.wait(PATIENCE_S) and sampler.failure is node.fault and sampler.first_gpus is None
    delivered: queue.SimpleQueue[object] = queue.SimpleQueue()
    sampler.connect(delivered.put, delivered.put)
    assert delivered.get(timeout=PATIENCE_S) is node.fault


def test_one_that_nobody_connects_can_be_stopped() -> None:
    node = Node()
    sampler = Sampler(node, MIN_INTERVAL_S)
    sampler.start()
    assert sampler.first_gpus_ready.wait(PATIENCE_S)
    sampler.stop(PATIENCE_S)
    assert node.closed.is_set()


def test_the_backfill_comes_once_after_the_first_sample(begin_backfill: Callable[[Node], list[object]]) -> None:
    backfill = [NodeSample(float(i), (), HostSample("node", {})) for i in range(3)]
    got = begin_backfill(Node(backfill=backfill))
    assert isinstance(got[0], NodeSample) and len(got[0].gpus) == 2
    assert got[1] == tuple(backfill)
    assert isinstance(got[2], NodeSample) and got[2].time_s > got[0].time_s


def test_a_source_whose_backfill_fails_is_sampled(
        begin_backfill: Callable[[Node], list[object]], monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    monkeypatch.setattr(node, "backfill", lambda now_s, interval_s: 1 / 0)
    assert begin_backfill(node)[1] == ()


def test_a_slow_backfill_delays_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    node, gate, out = Node(), threading.Event(), queue.SimpleQueue[object]()
    backfill = NodeSample(1.0, (), HostSample("node", {}))
    monkeypatch.setattr(node, "backfill", lambda now_s, interval_s: gate.wait(PATIENCE_S) and [backfill])
    sampler = Sampler(node, MIN_INTERVAL_S, out.put, out.put, on_backfill=lambda samples: out.put(tuple(samples)))
    sampler.start()
    assert all(isinstance(out.get(timeout=PATIENCE_S), NodeSample) for _ in range(3))
    gate.set()
    while isinstance(got := out.get(timeout=PATIENCE_S), NodeSample):
        pass
    assert got == (backfill,)
    sampler.stop(PATIENCE_S)


@pytest.fixture
def begin_backfill() -> Iterator[Callable[[Node], list[object]]]:
    """What a sampler delivers up to its second sample, the backfill as a tuple."""
    started: list[Sampler] = []

    def begin(node: Node) -> list[object]:
        out: queue.SimpleQueue[object] = queue.SimpleQueue()
        sampler = Sampler(node, MIN_INTERVAL_S, out.put, out.put, on_backfill=lambda samples: out.put(tuple(samples)))
        started.append(sampler)
        started[-1].start()
        return [out.get(timeout=PATIENCE_S) for _ in range(3)]

    yield begin
    for sampler in started:
        sampler.stop()
