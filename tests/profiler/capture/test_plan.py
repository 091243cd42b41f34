"""The length of a capture from a probe's figures."""

from __future__ import annotations

import pytest

from gputop.core.errors import GputopError
from gputop.profiler.capture.plan import (
    SERVER_LIMITS,
    FreeResources,
    Probe,
    memory_limits,
    most_events,
    needs_probe,
    overview_events,
    plan,
)
from gputop.profiler.recording import CUPTI_RECORDS, SERVER_MULTIPLE, RecorderLimits
from gputop.text.units import size
from tests.records import replace

MB, GB = 1e6, 1e9


def probe(host: float = 0, device: float = 0, step_s: float | None = None, mb_per_s: float = 1.0,
          sure: bool = False) -> Probe:
    """A probe of half a second, from rates per second."""
    return Probe(0.5, 0.6, round(mb_per_s * MB / 2), round(host / 2), round(device / 2), step_s, sure=sure)


@pytest.mark.parametrize(("asked_s", "probed", "chosen_s", "why"), [
    (10, probe(3_200), 10, "full length, at 3.2 k events/s"),
    (10, probe(45_000), 10, "full length, at 45 k events/s"),
    (10, probe(120_000), 3.6, "the job emits 120 k events/s"),
    (1.5, probe(240_000), 1.5, "full length, at 240 k events/s"),
    (60, probe(20_000), 24.5, "the job emits 20 k events/s"),
    # Twenty steps, where their length is known and they fit in twice the target, ten within four times.
    (10, probe(100_000, step_s=0.01), 4.5, "the job emits 100 k events/s"),
    (10, probe(100_000, step_s=0.3), 6.0, "for 20 steps: the job emits 100 k events/s"),
    (10, probe(100_000, step_s=0.8), 10, "full length, at 100 k events/s"),
    (20, probe(100_000, step_s=0.8), 10, "for 12 steps: the job emits 100 k events/s"),
    (10, probe(500_000, step_s=0.25), 2.5, "for 10 steps: the job emits 500 k events/s"),
    (10, probe(1_000_000, step_s=0.5), 2.0, "for 4 steps: the job emits 1.0 M events/s"),
    (2, probe(1_000_000, step_s=0.25), 2, "full length, at 1.0 M events/s"),
    # Where GPUs work and no steps show, they may be too long for the probe.
    (10, probe(140_000, 100_000), 4.1, "for steps longer than the probe: the job emits 240 k events/s"),
    # A second, whatever it makes.
    (10, probe(2_400_000), 1.0, "the shortest possible: the job emits 2.4 M events/s"),
    (10, probe(0, 0), 10, "full length, because the probe contains no events"),
    # Three times as long as was asked for, where the job has little CPU to collect events with.
    (10, replace(probe(43_000), took_s=6.5), 2.5,
     "the job emits 43 k events/s, and the profiler needs 12 s to collect one second"),
    (10, replace(probe(43_000), took_s=60.5), 1.0,
     "the job emits 43 k events/s, and the profiler needs 120 s to collect one second"),
    (10, replace(probe(3_200), took_s=1.9), 10, "full length, at 3.2 k events/s"),
])
def test_about_half_a_million_events_or_steps(asked_s, probed, chosen_s, why):
    made = plan(asked_s, probed, FreeResources())
    if chosen_s < asked_s:
        assert chosen_s - 0.1001 <= made.chosen_s <= chosen_s + 1e-9, "whole tenths, rounded down"
    else:
        assert made.chosen_s == asked_s
    assert made.why == why
    assert made.shortened == (chosen_s < asked_s)
    assert made.probe is probed


@pytest.mark.parametrize(("asked_s", "probed", "chosen_s", "why"), [
    # A hundred steps, in no less than 2 s: a job of small layers.
    (10, probe(60_000, step_s=0.0025, sure=True), 2.0, "about 800 steps are enough, at 60 k events/s"),
    (10, probe(40_000, 60_000, step_s=0.04, sure=True), 4.0,
     "about 100 steps are enough, at 100 k events/s"),
    (60, probe(60_000, step_s=0.0001, sure=True), 2.0,
     "about 20000 steps are enough, at 60 k events/s"),
    # Where they are cheap, more are taken: what is seldom is worth them.
    (10, probe(25_000, step_s=0.02, sure=True), 4.0, "about 200 steps are enough, at 25 k events/s"),
    (10, probe(9_000, step_s=0.02, sure=True), 10, "full length, at 9.0 k events/s"),
    # Steps that a hundred of would cost too much, or are longer than asked.
    (10, probe(240_000, step_s=0.05, sure=True), 1.5, "the job emits 240 k events/s"),
    (10, probe(40_000, step_s=0.15, sure=True), 10, "full length, at 40 k events/s"),
    (1.5, probe(60_000, step_s=0.0025, sure=True), 1.5, "full length, at 60 k events/s"),
    # No ground for less: what repeats may be a part of a step, or there is nothing that does.
    (10, probe(60_000, step_s=0.0025), 7.8, "the job emits 60 k events/s"),
    (10, probe(60_000, sure=True), 7.8, "the job emits 60 k events/s"),
])
def test_a_hundred_steps_will_do(asked_s, probed, chosen_s, why):
    made = plan(asked_s, probed, FreeResources())
    assert (made.chosen_s, made.why) == (chosen_s, why)
    assert made.enough == ("are enough" in why)


def test_few_steps_that_memory_does_not_hold_are_not_enough():
    small = probe(60_000, step_s=0.0025, sure=True)
    tight = plan(10, replace(small, growth_bytes=50_000_000), FreeResources(job_bytes=0.15 * GB))
    assert tight.chosen_s < 2 and "limit is free" in tight.why and not tight.enough


def test_never_more_device_events_than_cupti_keeps():
    busy = probe(device=1_100_000, step_s=0.25)  # ten steps would be 2.75 million records
    made = plan(10, busy, FreeResources())
    assert 1.0 < made.chosen_s * 1_100_000 / 1e6 < CUPTI_RECORDS / 1e6
    assert "CUPTI keeps at most 2 M" in made.why and "1.1 M events/s" in made.why


@pytest.mark.parametrize(("free", "chosen_s", "named"), [
    (FreeResources(shared_bytes=100 * GB, job_bytes=100 * GB, own_bytes=100 * GB, disk_bytes=GB), 10,
     "full length"),
    (FreeResources(job_bytes=SERVER_MULTIPLE * 5 * MB * 10), 8.0, "within the job's limit"),
    (FreeResources(own_bytes=312.5 * MB), 6.0, "within gputop's limit"),
    (FreeResources(disk_bytes=25 * MB), 4.0, "of disk space in the logdir"),
    (FreeResources(shared_bytes=750 * MB), 4.0, "of memory is free"),
    (FreeResources(shared_bytes=750 * MB, job_here=False), 10, "full length"),
])
def test_memory_and_disk_shorten_it(free, chosen_s, named):
    made = plan(10, probe(3_000, mb_per_s=5), free)
    assert made.chosen_s == pytest.approx(chosen_s, abs=0.1001)
    assert named in made.why


@pytest.mark.parametrize(("free", "named"), [
    (FreeResources(shared_bytes=200 * MB),
     r"not enough memory for a capture: 191 MiB free, and capturing 1 s needs about 215 MiB"),
    (FreeResources(job_bytes=100 * MB), "not enough memory within the job's limit"),
    (FreeResources(own_bytes=150 * MB), "not enough memory within gputop's limit"),
    (FreeResources(disk_bytes=5 * MB), "not enough disk space in the logdir for a capture: 4.8 MiB free"),
])
def test_refused_where_not_even_a_second_fits(free, named):
    with pytest.raises(GputopError, match=named) as caught:
        plan(10, probe(3_000, mb_per_s=5), free)
    assert "(in a probe of 0.5 s, the job produced a trace of 2.4 MiB)" in caught.value.message
    assert "--seconds 0.3 --force" in caught.value.fix
    assert ("--logdir" in caught.value.fix) == ("disk" in named)


def test_growth_seen_in_the_probe_counts_where_it_is_more_than_the_trace_explains():
    grew = replace(probe(3_000, mb_per_s=1), growth_bytes=150_000_000)
    made = plan(10, grew, FreeResources(job_bytes=1.5 * GB))
    assert made.chosen_s == 4.0 and "a capture needs 286 MiB a second" in made.why
    assert plan(10, replace(grew, growth_bytes=10), FreeResources(job_bytes=1.5 * GB)).chosen_s == 10
    with pytest.raises(GputopError, match=r"a trace of 2\.4 MiB and grew by 143 MiB"):
        plan(10, replace(grew, bytes=2_500_000), FreeResources(job_bytes=300 * MB))


@pytest.mark.parametrize(("free", "grows"), [
    (20 * GB, 2 * GB), (9 * 2**30, 2**30), (2 * 2**30, 256 * 2**20),  # a tenth; 1 GiB; and an eighth
])
def test_how_much_a_job_may_grow(free, grows):
    room = FreeResources(shared_bytes=free * 10, job_bytes=free)
    limits = memory_limits(probe(3_000, 500, 0.1), room, RecorderLimits())
    assert limits.growth_bytes == grows
    assert not limits.excess(9.0, int(grows), room)
    assert limits.excess(9.0, int(grows) + 1, room) == f"the job's memory had grown by {size(grows)}"


def test_how_much_a_job_may_grow_where_its_memory_is_unknown_or_it_paused_during_the_probe():
    limits = memory_limits(probe(3_000, step_s=0.1), FreeResources(), RecorderLimits())
    assert limits.growth_bytes == 2**30 and not limits.excess(99.0, 2**30, FreeResources())
    assert memory_limits(probe(0, 0), FreeResources(200 * GB, 200 * GB), RecorderLimits()).growth_bytes == 256 * 2**20


@pytest.mark.parametrize(("now", "said"), [
    # A tenth of what was free, and what gathering five seconds will take: 20 and 3 times 1 MB for each.
    (FreeResources(shared_bytes=1120 * MB), ""),
    (FreeResources(shared_bytes=1110 * MB), f"only {size(1110 * MB)} of memory is free"),
    (FreeResources(job_bytes=205 * MB), ""),
    (FreeResources(job_bytes=195 * MB), f"only {size(195 * MB)} of memory is left within the job's limit"),
])
def test_memory_that_runs_short_ends_a_recording_however_little_the_job_grew(now, said):
    limits = memory_limits(probe(3_000, mb_per_s=1), FreeResources(10 * GB, GB), RecorderLimits())
    assert limits.excess(5.0, 0, now) == said


def test_what_nothing_can_end_is_not_ended():
    limits = memory_limits(probe(3_000), FreeResources(10 * GB, GB), UNSTOPPABLE)
    assert not limits.excess(5.0, 100 * GB, FreeResources(0.0, 0.0))


def test_what_the_detail_leaves_of_the_time_asked_for_is_the_overview():
    made = plan(10, probe(120_000), FreeResources())
    assert (made.chosen_s, made.overview_s) == (3.6, 6.4)
    assert plan(10, probe(45_000), FreeResources()).overview_s == 0, "all of it is in detail"
    assert plan(4, probe(120_000), FreeResources()).overview_s == 0, "not even a second is left"
    tight = plan(10, probe(120_000), FreeResources(job_bytes=60 * MB))
    assert tight.shortened and tight.overview_s == 0, "what memory does not hold in detail is not tried"
    most = [overview_events(s) for s in (2, 10, 20, 60, 3600)]
    assert [events for events, _ in most] == [18_000, 18_000, 36_000, 108_000, 2e6]
    assert {events + marks for events, marks in most} == {2e6}


def test_what_is_unknown_is_said_and_short_captures_need_no_probe():
    made = plan(10, probe(3_000), FreeResources(unknown=("no idea",)))
    assert made.notes == ("no idea",)
    assert [needs_probe(s) for s in (0.3, 1.0, 1.1)] == [False, False, True]
    assert needs_probe(0.2, UNSTOPPABLE) and not needs_probe(0.05, UNSTOPPABLE)


# Of a recording that nothing can end.
UNSTOPPABLE = RecorderLimits(job_bytes_per_byte=0.0, job_bytes_per_event=5000.0, bare_bytes_per_event=2000.0,
                             overview=False, stoppable=False, probe_s=0.2, least_s=0.05,
                             instead="Add these lines.")


def short(host: float, device: float = 0, step_s: float | None = None, sure: bool = False) -> Probe:
    """A first probe, from rates per second."""
    return Probe(0.1, 0.2, round(20 * (host + device)), round(host / 10), round(device / 10), step_s, sure=sure)


@pytest.mark.parametrize(("probed", "free_bytes", "chosen_s", "shapes"), [
    # 256 MiB of the job, whatever its rate: tiny operations get less than a second, without shapes.
    (short(420_000), 16 * GB, 0.31, False),
    (short(420_000), 1000 * GB, 0.31, False),
    (short(2_000_000), 16 * GB, 0.06, False),
    (short(20_000_000), 64 * GB, 0.05, False),  # the shortest
    (short(20_000), 16 * GB, 2.6, True),  # shapes first, where a second is left
    (short(3_000), 16 * GB, 10, True),
    # For twenty whole steps, as much as the guard of other recordings allows: a fiftieth of the free memory.
    (short(20_000, step_s=0.4), 64 * GB, 8.0, True),
    (short(100_000, step_s=0.4), 32 * GB, 4.0, False),  # for ten a tenth of it
    (short(400_000, step_s=0.001), 16 * GB, 0.33, False),
    (short(50_000, step_s=0.01, sure=True), 16 * GB, 1.0, True),
    (short(2_000, 40_000), 128 * GB, 10, True),  # of a GPU, steps too long for the probe
    (short(2_000, 400_000), 64 * GB, 1.5, False),
])
def test_what_nothing_can_end_is_planned_to_grow_the_job_by_little(probed, free_bytes, chosen_s, shapes):
    made = plan(10, probed, FreeResources(free_bytes), UNSTOPPABLE)
    assert made.chosen_s == pytest.approx(chosen_s, abs=0.101 if chosen_s > 1 else 0.011)
    assert made.shapes == shapes and any("shapes" in note for note in made.notes) != shapes
    grows_bytes = made.chosen_s * probed.events_per_s * (5000 if shapes else 2000)
    assert probed.step_s or made.chosen_s == 0.05 or grows_bytes <= max(256 * 2**20, 0.02 * free_bytes)


def test_where_not_even_the_shortest_fits_it_is_said_how_else():
    with pytest.raises(GputopError, match="not enough memory") as raised:
        plan(10, short(4_000_000), FreeResources(0.5 * GB), UNSTOPPABLE)
    assert raised.value.fix.endswith("--force. Or: Add these lines.")


KINETO = RecorderLimits(job_bytes_per_byte=0.0, job_bytes_per_event=5000.0, bare_bytes_per_event=2000.0,
                        most_device_events_per_s=0.0)


def test_a_short_capture_without_a_probe_has_as_many_events_as_are_planned_to_grow_the_job() -> None:
    small, large = FreeResources(shared_bytes=10e9), FreeResources(shared_bytes=500e9)
    assert most_events(2.0, small, KINETO) == round(256 * 2**20 / 5000)
    assert most_events(2.0, FreeResources(shared_bytes=20e9), KINETO) == 80_000  # 2% of them
    assert most_events(2.0, large, KINETO) == 100_000
    assert most_events(3.1, large, KINETO) == 0  # it might wait for long
    assert most_events(2.0, large, SERVER_LIMITS) == 0


@pytest.mark.parametrize("free", [
    FreeResources(shared_bytes=1e9), FreeResources(shared_bytes=20e9, job_bytes=1e9),
    FreeResources(shared_bytes=20e9, own_bytes=2e8), FreeResources(shared_bytes=20e9, disk_bytes=5e7),
    FreeResources(shared_bytes=20e9, job_disk_bytes=5e7)])
def test_where_the_worst_might_not_fit_there_is_a_probe(free: FreeResources) -> None:
    assert most_events(2.0, free, KINETO) == 0


def test_kernels_which_nobody_counts_are_assumed_to_be_many() -> None:
    gpu = replace(KINETO, most_device_events_per_s=500_000)
    assert most_events(2.0, FreeResources(shared_bytes=20e9), gpu) == 0
    assert most_events(2.0, FreeResources(shared_bytes=126 * 2**30), gpu) == 100_000
    assert most_events(3.0, FreeResources(shared_bytes=20e9, job_bytes=30e9), gpu) == 0
