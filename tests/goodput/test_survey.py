"""The time of GPUs and jobs over days, against what was planted."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from gputop.core.samples import NodeSample
from gputop.goodput.survey import Survey
from tests.goodput.days import HANG_DAY, HANG_MINUTES, PLANTED, POWER_W, START_S, fortnight, node, without_power
from tests.records import replace


def survey(samples: Iterable[NodeSample], gap_s: float = 200.0) -> Survey:
    own, before = Survey(), None
    for sample in samples:
        own.add(sample, 0.0 if before is None or sample.time_s - before > gap_s else sample.time_s - before)
        before = sample.time_s
    own.finish()
    return own


def stretch(what: str, minutes: float, pid: int = 100, begin_min: float = 0.0, **more: object) -> list[NodeSample]:
    return [node(START_S + 60 * (begin_min + i + 1), what, pid, **more)  # type: ignore[arg-type]
            for i in range(int(minutes))]


def timeline(*parts: tuple[str, float, int]) -> list[NodeSample]:
    """A minute of training to begin with, for a first sample stands for no time; then each part in turn."""
    out, at = stretch("train", 1), 1.0
    for what, minutes, pid in parts:
        out += stretch(what, minutes, pid, at)
        at += minutes
    return out


def minutes_of(own: Survey) -> dict[str, float]:
    return {state: round(seconds / 60) / 2 for state, seconds in own.total.states_s.items()}  # two GPUs


def test_a_fortnight_is_found_within_two_per_cent() -> None:
    own = survey(node(time_s, what, pid) for time_s, what, pid in fortnight())
    planted = {state: 14 * minutes for state, minutes in PLANTED.items()}
    planted["waiting"] += HANG_MINUTES
    planted["training"] -= HANG_MINUTES
    found = minutes_of(own)
    assert set(found) == set(planted)
    assert all(found[state] == pytest.approx(minutes, rel=0.02) for state, minutes in planted.items()), found
    assert own.total.goodput_ratio == pytest.approx(planted["training"] / (14 * 1440), rel=0.02)
    job, = own.jobs()
    assert (job.restarts, job.gpus) == (14, ["0", "1"]) and job.states_s["restart"] == own.total.states_s["restart"]
    watts = sum(POWER_W[what] for _, what, _ in fortnight())
    assert own.total.energy_j == pytest.approx(2 * 60 * watts, rel=0.001) and not own.total.energy_unknown_s
    hours = [divmod((hour.begin_s - START_S) / 3600, 24) for hour in own.worst_hours()]
    assert len(hours) == 5 and all(hour == 7 or (day == HANG_DAY and 12 <= hour < 20) for day, hour in hours)


def test_a_process_that_ends_is_still_that_of_its_job() -> None:
    """Its command is gone while the driver still lists it, as seen of a real job."""
    samples = timeline(("wait", 1, 100), ("free", 10, 0), ("load", 5, 101), ("train", 5, 101))
    ending = replace(samples[1], processes=tuple(replace(own, command=None, user=None) for own in samples[1].processes))
    own = survey([samples[0], ending, *samples[2:]])
    assert minutes_of(own) == {"training": 5, "waiting": 1, "restart": 15}
    (job,) = own.jobs()
    assert (job.job, job.restarts) == ("python train.py", 1)


def test_the_same_command_soon_after_is_a_restart_and_another_one_is_not() -> None:
    again = survey(timeline(("free", 10, 0), ("load", 5, 101), ("train", 5, 101)))
    assert minutes_of(again) == {"training": 5, "restart": 15}
    late = survey(timeline(("free", 40, 0), ("load", 5, 101), ("train", 5, 101)))
    assert minutes_of(late) == {"training": 5, "idle": 40, "starting": 5}
    samples = timeline(("free", 10, 0))
    other = survey(samples + stretch("load", 5, 101, 11, command="python other.py"))
    assert minutes_of(other) == {"idle": 10, "starting": 5}
    assert [job.restarts for job in other.jobs()] == [0, 0]
    retried = survey(samples + stretch("train", 5, 101, 11, command="python train.py --resume last"))
    assert minutes_of(retried) == {"restart": 10, "training": 5}


def test_a_short_wait_in_kernels_is_training_and_a_long_one_is_not() -> None:
    assert minutes_of(survey(timeline(("hang", 1, 100), ("train", 9, 100)))) == {"training": 10}
    assert minutes_of(survey(timeline(("hang", 30, 100), ("train", 9, 100)))) == {"training": 9, "waiting": 30}


def test_what_holds_a_gpu_for_long_without_work_waits() -> None:
    """A notebook; and a job that was there before the recording has begun long ago."""
    assert minutes_of(survey(timeline(("free", 40, 0), ("load", 60, 101)))) == {"idle": 40, "waiting": 60}
    assert minutes_of(survey(stretch("wait", 11))) == {"waiting": 10}


def test_a_gap_is_not_recorded_and_never_idle() -> None:
    own = survey([*stretch("train", 11), *stretch("train", 11, 100, 1000)])
    assert own.recorded_s == 1200 and minutes_of(own) == {"training": 20}
    crashed = survey([*stretch("free", 11), *stretch("train", 11, 101, 12)], gap_s=100.0)
    assert minutes_of(crashed) == {"idle": 10, "training": 10}


def test_what_was_not_read_is_unknown() -> None:
    own = survey([*stretch("train", 11), *map(without_power, stretch("train", 10, 100, 11))])
    assert own.total.energy_j == 2 * 600 * 600.0 and own.total.energy_unknown_s == 2 * 600
    none = survey(map(without_power, stretch("train", 11)))
    assert none.total.energy_j is None
    assert survey([]).total.goodput_ratio is None


@pytest.mark.parametrize("what", ["lost", "no reading"])
def test_a_gpu_without_activity_is_neither_idle_nor_training(what: str) -> None:
    blind = [replace(sample, gpus=tuple(
        replace(own, state=what, readings={}) if what == "lost" else replace(own, readings={}) for own in sample.gpus))
        for sample in stretch("train", 11)]
    own = survey(blind)
    assert minutes_of(own) == {"unknown": 10} and own.total.goodput_ratio is None
