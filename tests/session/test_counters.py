"""The samples that lie beside a trace: of the right GPUs and time, bounded, and why there are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from gputop.core.captured_samples import CounterLane, GpuCounters
from gputop.core.codec import convert, encode, parse
from gputop.core.errors import NoDataError
from gputop.core.samples import NodeSample
from gputop.profiler.capture.outcomes import Outcome
from gputop.profiler.capture.records import CaptureRecord, Server
from gputop.session.gpu_samples import CounterWatch, counters_of, remarks_of_activity
from gputop.sources.simulated import SimulatedSource
from tests.analyses import make_analysis
from tests.fakes import START_S, StillSession, StillSource, gpu_sample
from tests.records import replace
from tests.waiting import until

SERVER = Server("127.0.0.1:6009", pid=41231)


def captured(*gpus: int, end_s: float = START_S + 299, took_s: float = 9.0) -> CaptureRecord:
    return CaptureRecord(SERVER.address, Path("x"), end_s, 1.0, took_s,
                         analysis=make_analysis(gpus=[{"gpu": gpu} for gpu in gpus]))


def visible(session: StillSession, text: str) -> NodeSample:
    (process,) = session.feed.sample.processes
    held = {int(n): process.gpus[int(n)] for n in text.split(",")}
    return replace(session.feed.sample, processes=(replace(process, cuda_visible_devices=text, gpus=held),))


def test_the_samples_of_the_captured_seconds_by_the_jobs_numbers_of_its_gpus() -> None:
    session = StillSession()
    found = counters_of(captured(0, 1), (SERVER,), visible(session, "5,2"), session.feed.history, 1.0)
    assert found.times_s == tuple(START_S + tick for tick in range(272, 300)) and not found.reason
    for job, node in ((0, 5), (1, 2)):
        lanes = found.gpus[job]
        assert lanes["power_w"].values == tuple(
            pytest.approx(gpu_sample(node, tick)["power_w"].value, rel=1e-3) for tick in range(272, 300))
        assert lanes["power_w"].full_scale == 700 and lanes["nvlink_rx_bytes_per_s"].full_scale is None
        assert lanes["tensor_flop_util"].values[0] == pytest.approx(
            gpu_sample(node, 272)["tensor_flop_util"].value, rel=1e-3)
        assert "gpu_util" not in lanes  # there is a better one
    assert convert(parse(encode(found)), GpuCounters) == found


def test_of_many_samples_each_nth_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gputop.session.gpu_samples.MAX_VALUES", 1_000)
    session = StillSession()
    found = counters_of(captured(*range(8), took_s=1e4), (SERVER,), session.feed.sample, session.feed.history, 1.0)
    lanes = [lane for of_gpu in found.gpus.values() for lane in of_gpu.values()]
    assert found.interval_s == 25.0 and found.times_s == tuple(START_S + 25 * i for i in range(12))
    assert len(lanes) == 80 and {len(lane.values) for lane in lanes} == {12}


def test_why_there_are_none() -> None:
    session = StillSession()
    for reason, args in {
        "no GPU was sampled": (captured(0), (SERVER,), session.feed.sample, None),
        "cannot read any GPU": (captured(0), (SERVER,), replace(session.feed.sample, gpus=()), session.feed.history),
        "several workers": (captured(0), (SERVER, SERVER), session.feed.sample, session.feed.history),
        "not among the processes": (captured(0), (Server("node:1", pid=7),), session.feed.sample, session.feed.history),
        "no GPU was sampled during the capture": (captured(0, end_s=START_S - 1e6), (SERVER,), visible(session, "0"),
                                         session.feed.history),
    }.items():
        found = counters_of(*args, 1.0)
        assert reason in found.reason and not found.gpus


def test_a_capture_without_a_monitor_samples_for_itself() -> None:
    source = SimulatedSource()
    source.open()
    node, _ = source.at(0.0)
    watch = CounterWatch(source, 0.1)

    def counters() -> GpuCounters | None:
        if watch.sample is None or not watch.sample.processes:  # a loaded machine may be late with those
            return None
        (process,) = watch.sample.processes
        counters = watch.counters(captured(0, end_s=watch.sample.time_s), (Server("127.0.0.1:1", pid=process.pid),))
        return counters if len(counters.times_s) >= 2 else None

    with watch.running():
        assert until(counters).gpus[0]["sm_active"].values
    assert source.at(0.0)[0] is node  # the job goes on as it was


def test_a_capture_waits_for_some_seconds_of_samples_before_it_chooses() -> None:
    source = SimulatedSource()
    source.open()
    watch = CounterWatch(source, 0.1)
    with watch.running():
        watch.wait(0.5)
    assert watch.sample is not None and watch.history.oldest_s is not None
    assert watch.sample.time_s - watch.history.oldest_s >= 0.5


def test_a_source_that_cannot_be_opened_is_a_reason() -> None:
    class Closed(StillSource):
        def open(self) -> None:
            raise NoDataError("no NVIDIA driver", "gputop --demo")

    watch = CounterWatch(Closed(), 1.0)
    with watch.running():
        watch.wait(600.0)  # which it does not
    assert watch.counters(captured(0), (SERVER,)).reason == "gputop could not sample any GPU: no NVIDIA driver"


def _sampled(*activity: float | None) -> GpuCounters:
    """One GPU's SM activity, second by second."""
    return GpuCounters(tuple(START_S + second for second in range(len(activity))),
                       gpus={0: {"sm_active": CounterLane(activity)}})


def _recorded(begin: float, seconds: float) -> CaptureRecord:
    return replace(captured(0), analysis=make_analysis(trace={"start_s": START_S + begin, "window_s": seconds},
                                                       steps={"median_s": 0.026, "mean_s": 0.026}))


def test_a_recording_that_slows_the_launches_is_told_by_the_gpus_activity() -> None:
    # As on an H200 of a job that reads 256 values a step: 11.2 ms a step alone, 26 ms by the trace.
    lanes = (None, 0.045, 0.046, 0.045, 0.045, 0.040, 0.026, 0.026, 0.029)
    (said,) = remarks_of_activity(_sampled(*lanes), _recorded(5.2, 1.9), START_S + 4)
    assert said == ("the recording slowed the job: in the seconds before it, the GPUs were 1.7 times as active. At "
                    "that time, a step took at most about 14.9 ms")
    for sampled, record in (
        (_sampled(*lanes), _recorded(5.2, 0.4)),  # no sample that it half fills
        (_sampled(*(None,) * 5, *lanes[5:]), _recorded(5.2, 1.9)),  # none before it
        (_sampled(None, *(0.97,) * 8), _recorded(5.2, 1.9)),  # bound by the GPU
        (_sampled(None, *(0.001,) * 4, *(0.0,) * 4), _recorded(5.2, 1.9)),  # noise
        (GpuCounters(reason="no driver"), _recorded(5.2, 1.9)),
    ):
        assert remarks_of_activity(sampled, record, START_S + 4) == ()


def test_work_that_the_trace_lacks_is_told_by_the_gpus_activity() -> None:
    """As of a capture on an H200 that lost the kernels of the backward pass."""
    def recorded(busy: float, seconds: float = 4.0) -> CaptureRecord:
        return replace(captured(0), analysis=make_analysis(
            trace={"start_s": START_S + 4.5, "window_s": seconds}, gpus=[{"gpu": 0, "busy": busy}]))

    sampled = _sampled(None, *(0.92,) * 8)
    (said,) = remarks_of_activity(sampled, recorded(0.37), START_S + 4)
    assert said.startswith("GPU 0 was active 92% of the time according to the driver but only 37% according to the tr")
    assert remarks_of_activity(sampled, recorded(0.9), START_S + 4) == ()
    assert remarks_of_activity(sampled, recorded(0.37, seconds=1.6), START_S + 4) == ()  # one sample within it
    assert remarks_of_activity(GpuCounters(reason="no driver"), recorded(0.37), START_S + 4) == ()


def test_of_several_workers_each_has_those_of_its_own_gpus() -> None:
    session = StillSession()
    (process,) = session.feed.sample.processes
    both = tuple(replace(process, pid=pid, local_pid=None, cuda_visible_devices=str(gpu), gpus={gpu: process.gpus[gpu]})
                 for pid, gpu in ((7, 5), (8, 2)))
    sample = replace(session.feed.sample, processes=both)
    record = replace(captured(0, 1), workers=(Outcome("127.0.0.1:1", "a"), Outcome("127.0.0.1:2", "b")))
    for pid, node in ((7, 5), (8, 2)):
        found = counters_of(record, (Server("127.0.0.1:1", pid=pid),), sample, session.feed.history, 1.0)
        assert list(found.gpus) == [0] and found.gpus[0]["power_w"].values[0] == pytest.approx(
            gpu_sample(node, 272)["power_w"].value, rel=1e-3)
    away = counters_of(record, (Server("node2:1"),), sample, session.feed.history, 1.0)
    assert not away.gpus and "node2:1 is on another machine" in away.reason
