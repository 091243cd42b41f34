"""The sampler's clock and threads, with probes that do what the test says."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from gputop.core.errors import GputopError, NoDataError
from gputop.core.samples import FAILED, NOT_RESPONDING, OK, NodeSample
from gputop.sources.base import Source
from gputop.telemetry import deadline_calls
from gputop.telemetry.sampler import MIN_INTERVAL_S, OwnCpu, Sampler, next_tick
from tests.telemetry.node_doubles import Node
from tests.waiting import PATIENCE_S


class Run:
    """A sampler at work and what it hands out."""

    def __init__(self, source: Source, interval_s: float = MIN_INTERVAL_S, open_deadline_s: float = PATIENCE_S) -> None:
        self.out: queue.SimpleQueue[NodeSample | GputopError] = queue.SimpleQueue()
        self.sampler = Sampler(source, interval_s, self.out.put, self.out.put, open_deadline_s=open_deadline_s)
        self.sampler.start()

    def sample(self) -> NodeSample:
        answer = self.out.get(timeout=PATIENCE_S)
        assert isinstance(answer, NodeSample), answer
        return answer

    def error(self) -> GputopError:
        answer = self.out.get(timeout=PATIENCE_S)
        assert isinstance(answer, GputopError), answer
        return answer

    def until(self, wanted: Callable[[NodeSample], bool]) -> NodeSample:
        for _ in range(200):
            sample = self.sample()
            if wanted(sample):
                return sample
        raise AssertionError("it never came")


@pytest.fixture
def run() -> Iterator[Callable[..., Run]]:
    started: list[Run] = []

    def begin(*args: object, **options: float) -> Run:
        started.append(Run(*args, **options))  # type: ignore[arg-type]
        return started[-1]

    yield begin
    for each in started:
        each.sampler.stop()


def complete(sample: NodeSample, without: int | None = None) -> bool:
    """On a loaded machine even a probe that answers at once can miss a tick."""
    return all(gpu["power_w"].value is not None for gpu in sample.gpus if gpu.info.index != without)


def states(sample: NodeSample) -> list[str]:
    return [gpu.state for gpu in sample.gpus]


# -- the usual course ----------------------------------------------------------------------------


@pytest.mark.usefixtures("unhurried")
def test_a_sample_holds_everything_of_its_tick(run: Callable[..., Run]) -> None:
    node = Node()
    going = run(node)
    first = going.sample()
    second = going.until(complete)
    assert first.interval_s is None
    assert first.own_cpu_ratio is None
    assert second.interval_s is not None and second.interval_s > 0
    assert second.own_cpu_ratio is not None and second.own_cpu_ratio >= 0
    assert second.time_s > first.time_s
    assert first.source == "test"
    assert [gpu["power_w"].value for gpu in first.gpus] == [1.0, 1.0]
    assert all(gpu["power_w"].value > 1.0 for gpu in second.gpus)  # type: ignore[operator]
    assert first.host["cpu_ratio"].value == 0.5
    (process,) = first.processes
    assert sorted(process.gpus) == [0, 1]


def test_what_gputop_itself_uses_is_a_mean_of_ten_seconds() -> None:
    own = OwnCpu()
    shown = [own.ratio(float(tick), cpu_s) for tick, cpu_s in enumerate([3.0, 3.2, *[3.3] * 8, 3.5, *[3.6] * 9, 3.7])]
    assert shown[:3] == [None, pytest.approx(0.2), pytest.approx(0.15)], "until then since the first tick"
    assert shown[10:] == [pytest.approx(0.05)] * 10 + [pytest.approx(0.02)]


def test_stop_ends_the_callbacks_and_closes_the_source() -> None:
    node = Node()
    going = Run(node)
    going.sample()
    going.sampler.stop(PATIENCE_S)
    assert node.closed.is_set()
    while not going.out.empty():
        going.out.get()
    with pytest.raises(queue.Empty):
        going.out.get(timeout=3 * MIN_INTERVAL_S)


def test_the_interval_can_change_and_has_a_lower_bound(run: Callable[..., Run]) -> None:
    going = run(Node(), 3600.0)
    going.sample()
    going.sampler.set_interval(0.0)  # and it does not wait for the hour to pass
    assert going.sampler.interval_s == MIN_INTERVAL_S
    interval_s = [going.sample().interval_s for _ in range(3)][-1]
    assert interval_s is not None and interval_s < 3600


def test_ticks_keep_to_their_raster() -> None:
    assert next_tick(10.0, 11.03, 1.0) == 11.0  # the wait was 30 ms late: the next does not inherit it
    assert next_tick(10.0, 11.0, 1.0) == 11.0
    assert next_tick(10.0, 14.5, 1.0) == 14.0  # a slow consumer: 11, 12 and 13 are left out
    assert next_tick(10.0, 10.9999999, 1.0) == 11.0


# -- faults --------------------------------------------------------------------------------------


def test_a_hanging_gpu_holds_up_nobody_and_comes_back(run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline_calls, "HANG_TIMEOUT_S", 0.8)
    monkeypatch.setattr(deadline_calls, "MOST_LATE", 1.0)  # however loaded the machine of the test is
    node = Node(3)
    going = run(node)
    going.sample()
    node.gpus[1].gate.clear()
    sample = going.until(lambda sample: sample.gpus[1].state == NOT_RESPONDING)
    assert states(sample) == [OK, NOT_RESPONDING, OK]
    assert sample.gpus[1]["power_w"].reason == sample.gpus[1].message
    others = [going.until(lambda sample: complete(sample, without=1)).gpus[0]["power_w"].value for _ in range(3)]
    assert len(set(others)) == 3, "the others stand still"
    assert node.gpus[1].reads <= node.gpus[0].reads - 3, "a second call was sent into the hanging driver"
    node.gpus[1].gate.set()
    assert going.until(lambda sample: states(sample) == [OK] * 3 and not sample.gpus[1].message)


def test_stop_returns_while_a_gpu_hangs_and_leaves_the_driver_alone() -> None:
    node = Node()
    going = Run(node)
    going.sample()
    node.gpus[0].gate.clear()
    going.until(lambda sample: sample.gpus[0].message != "")
    going.sampler.stop(PATIENCE_S)
    assert not node.closed.is_set(), "closed under a call that is still in the driver"
    node.gpus[0].gate.set()


def test_a_source_that_cannot_be_opened(run: Callable[..., Run]) -> None:
    node, broken = Node(), Node()
    node.fault, broken.fault = NoDataError("no driver", "gputop --demo"), RuntimeError("oops")
    assert run(node).error() is node.fault and "oops" in run(broken).error().message


def test_a_driver_that_hangs_at_the_start_is_reported_and_may_still_come(
        run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline_calls, "MOST_LATE", 1.0)  # however loaded the machine of the test is
    node = Node()
    node.gate.clear()
    going = run(node, open_deadline_s=0.05)
    assert "does not respond" in going.error().message
    node.gate.set()
    assert len(going.sample().gpus) == 2


# -- faults of whoever takes the samples ---------------------------------------------------------


@pytest.mark.parametrize("which", ["sample", "backfill"])
@pytest.mark.parametrize(
    ("fault", "expected", "fix"),
    [(KeyError("odd"), "KeyError('odd')", "report"), (GputopError("no room", "Make some."), "no room", "Make some.")],
)
def test_a_sample_that_cannot_be_used_ends_it_and_is_no_fault_of_the_source(
        which: str, fault: Exception, expected: str, fix: str) -> None:
    node, errors, taken = Node(), queue.SimpleQueue[GputopError](), []

    def take(sample: NodeSample | Sequence[NodeSample]) -> None:
        taken.append(sample)
        if which == "sample" or not isinstance(sample, NodeSample):
            raise fault

    sampler = Sampler(node, MIN_INTERVAL_S, take, errors.put, on_backfill=take)
    sampler.start()
    error = errors.get(timeout=PATIENCE_S)
    assert "could not process the last sample" in error.message and expected in error.message
    assert fix in error.fix
    assert node.closed.wait(PATIENCE_S)
    assert len(taken) == (1 if which == "sample" else 2)


def test_a_stop_before_the_start_or_at_the_first_sample_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    Sampler(Node(), 1.0, pytest.fail, pytest.fail).stop()
    node, ended = Node(), threading.Event()
    monkeypatch.setattr(Sampler, "_fail", lambda self, error: pytest.fail(str(error)))
    faults: list[object] = []
    monkeypatch.setattr(threading, "excepthook", faults.append)
    sampler = Sampler(node, MIN_INTERVAL_S, lambda sample: sampler.stop(), pytest.fail)
    monkeypatch.setattr(node, "close", ended.set)
    sampler.start()
    assert ended.wait(PATIENCE_S)
    sampler._thread.join(PATIENCE_S)
    assert faults == []


@pytest.mark.usefixtures("unhurried")
def test_a_broken_probe_is_shown_and_the_others_go_on(run: Callable[..., Run]) -> None:
    node = Node()
    node.gpus[0].fault = ZeroDivisionError("oops")
    going = run(node)
    sample = going.sample()
    assert states(sample) == [FAILED, OK]
    assert "ZeroDivisionError" in sample.gpus[0].message
    assert going.until(lambda sample: states(sample) == [FAILED, OK])
