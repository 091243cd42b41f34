"""Whose stacks are sampled while a job is captured, and why not."""

from __future__ import annotations

import os
from typing import Any

import pytest

from gputop.core.errors import GputopError
from gputop.profiler.recording import Progress
from gputop.ranks import stack_sampler, stacks
from gputop.session.stack_watch import OWN_STACKS, StackChoice, StackWatch
from tests.analysis.host.stack_samples import sampled

SAMPLES = sampled({"MainThread": [(0.0, "a.py:1 f")]}, 1.0)
OTHER = 4_000_001  # no process has this number


class FakeSampler:
    made: list[FakeSampler]

    def __init__(self, pid: int, seconds: float) -> None:
        if pid == OTHER + 1:
            raise GputopError("py-spy, which reads stacks, is not installed", "Install it.")
        self.pid, self.seconds, self.calls = pid, seconds, ["made"]
        FakeSampler.made.append(self)

    def wait_for_samples(self, timeout_s: float) -> bool:
        assert timeout_s <= 1.0
        return True

    def __getattr__(self, name: str) -> Any:
        def call() -> Any:
            self.calls.append(name)
            return SAMPLES
        return call


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeSampler.made = []
    monkeypatch.setattr(stack_sampler, "StackSampler", FakeSampler)
    monkeypatch.setattr(stacks, "others_of", lambda pids: {pid: 12345 for pid in pids if pid == OTHER})


def watched(pids: dict[str, int | None], wanted: bool | None = None, agreed: tuple[int, ...] = ()) -> Any:
    told: list[str] = []
    with StackWatch(pids, StackChoice(wanted, agreed), 7.0, lambda progress: told.append(progress.phase)) as watch:
        for phase in ("connecting", "probing", "connecting", "recording", "receiving", "saving"):
            watch(Progress(phase, 0.0))
        found = watch.samples()
    assert told == ["connecting", "probing", "connecting", "recording", "receiving", "saving"]
    return found


def test_a_job_of_one_s_own_is_sampled_from_the_first_second_to_the_last() -> None:
    assert watched({"a:1": 77}) == {"a:1": SAMPLES}
    (one,) = FakeSampler.made
    assert one.calls == ["made", "stop", "stop", "stop", "samples"]
    assert one.seconds == 67.0, "of a gputop that is killed py-spy ends by itself"


def test_the_overview_is_sampled_too() -> None:
    with StackWatch({"a:1": 77}, StackChoice(), 7.0, lambda _: None) as watch:
        for phase in ("probing", "recording", "receiving", "saving"):
            watch(Progress(phase, 0.0, more=True))
        assert FakeSampler.made[0].calls == ["made"]
        watch(Progress("overview", 0.0))
        assert FakeSampler.made[0].calls == ["made"] and watch.samples() == {"a:1": SAMPLES}


def test_not_wanted_nothing_is_started_or_said() -> None:
    assert watched({"a:1": 77}, wanted=False) == {} and not FakeSampler.made
    assert watched({"demo:1": os.getpid()}) == {}


def test_other_users_processes_wait_for_a_word() -> None:
    found = watched({"a:1": OTHER, "b:1": 77})
    assert "--stacks" in found["a:1"] and found["b:1"] == SAMPLES
    assert watched({"a:1": OTHER}, agreed=(OTHER,)) == watched({"a:1": OTHER}, wanted=True) == {"a:1": SAMPLES}


def test_what_cannot_be_sampled_says_why() -> None:
    found = watched({"a:1": None, "b:1": OTHER + 1})
    assert "not on this node" in found["a:1"] and "not installed" in found["b:1"]
    many = watched({f"n{i}:1": 100 + i for i in range(10)})
    assert sum(isinstance(own, str) for own in many.values()) == 2


def test_a_capture_that_fails_leaves_no_sampler() -> None:
    with pytest.raises(GputopError), StackWatch({"a:1": 77}, OWN_STACKS, 7.0, lambda progress: None) as watch:
        watch(Progress("recording", 0.0))
        raise GputopError("lost", "")
    assert FakeSampler.made[0].calls[-1] == "discard"


@pytest.mark.parametrize("wanted", [None, True, False])
def test_the_demo_s_stacks_are_those_of_its_job(wanted: bool | None) -> None:
    asked: list[tuple[float, float]] = []

    def simulated(begin_s: float, end_s: float) -> Any:
        asked.append((begin_s, end_s))
        return SAMPLES

    choice = StackChoice(wanted, simulated=simulated)
    with StackWatch({"demo:1": os.getpid(), "a:1": 77}, choice, 7.0, lambda _: None) as watch:
        for phase in ("recording", "receiving"):
            watch(Progress(phase, 0.0))
        found = watch.samples()
    if wanted is False:
        assert found == {} and not asked
    else:
        assert found == {"demo:1": SAMPLES, "a:1": SAMPLES} and asked[0][0] <= asked[0][1]
