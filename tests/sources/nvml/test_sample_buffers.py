"""The samples that the driver keeps, as backfill: over the fake driver library, and the raster on its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gputop.core.samples import GpuInfo, NodeSample
from gputop.sources.nvml import sample_buffers
from gputop.sources.nvml.sample_buffers import BEFORE_START, Samples, backfill_samples
from gputop.sources.nvml.source import NvmlSource
from tests.nvml_fake import FakeNvml
from tests.sources.conftest import Clock


def opened(fake: FakeNvml, clock: Clock, *settings: str) -> NvmlSource:
    fake.configure(*settings)
    clock.advance(0)
    source = NvmlSource(clock=clock, wall_clock=clock)
    source.open()
    return source


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A busy test machine is no reason to miss an answer."""
    monkeypatch.setattr(sample_buffers, "DEADLINE_S", 10.0)
    yield


@pytest.mark.usefixtures("patient")
def test_fourteen_seconds_on_the_raster_of_the_sampler(fake: FakeNvml, clock: Clock) -> None:
    source = opened(fake, clock, "gpus 2", "set util 40", "set power_w 300 1")
    backfill = list(source.backfill(clock.now_s, 1.0))
    assert [sample.time_s for sample in backfill] == [clock.now_s - i for i in range(len(backfill), 0, -1)]
    assert 12 <= len(backfill) <= 14
    assert backfill[0].interval_s is None and backfill[-1].interval_s == 1.0
    newest = backfill[-1]
    assert [gpu.info.uuid for gpu in newest.gpus] == [probe.info.uuid for probe in source.gpus]
    util, power = newest.gpus[1]["gpu_util"], newest.gpus[1]["power_w"]
    assert (util.value, util.coarse, util.source) == (pytest.approx(0.4), True, "NVML samples")
    assert (power.value, power.coarse) == (pytest.approx(300), False)
    assert newest.gpus_present == 2 and not newest.simulated and newest.source == source.label


@pytest.mark.usefixtures("patient")
def test_what_the_driver_does_not_keep_is_missing_with_the_reason(fake: FakeNvml, clock: Clock) -> None:
    source = opened(fake, clock, "gpus 1")
    oldest = next(iter(source.backfill(clock.now_s, 1.0))).gpus[0]
    assert oldest["gpu_util"].value is not None
    assert "no sample of this time" in (oldest["power_w"].reason or "")
    assert oldest["memory_used_bytes"].reason == BEFORE_START
    assert {oldest.processes_reason, oldest.clock_events_reason, oldest.xids_reason} == {BEFORE_START}


@pytest.mark.usefixtures("patient")
def test_intervals_shorter_than_the_samples_have_gaps_and_longer_ones_nothing(fake: FakeNvml, clock: Clock) -> None:
    source = opened(fake, clock, "gpus 1", "refuse nvmlDeviceGetSamples 3 1")
    fine = list(source.backfill(clock.now_s, 0.1))
    utils = [sample.gpus[0]["gpu_util"].value for sample in fine[20:-30]]
    assert 0 < sum(value is None for value in utils) < len(utils)
    assert list(source.backfill(clock.now_s, 30.0)) == []


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("setting", [
    "refuse nvmlDeviceGetSamples 3", "refuse nvmlDeviceGetSamples 15", "fault nvmlDeviceGetSamples -1 1 1 garbage ff",
    "fault nvmlDeviceGetSamples -1 1 1 garbage random",
])
def test_a_driver_without_sample_buffers_gives_no_backfill(fake: FakeNvml, clock: Clock, setting: str) -> None:
    assert list(opened(fake, clock, "gpus 2", setting).backfill(clock.now_s, 1.0)) == []


@pytest.mark.usefixtures("patient")
def test_stamps_of_another_clock_are_not_believed(fake: FakeNvml, clock: Clock) -> None:
    source = opened(fake, clock, "gpus 1")
    assert list(source.backfill(clock.now_s + 3600, 1.0)) == []
    assert list(source.backfill(clock.now_s - 3600, 1.0)) == []


def test_a_gpu_that_hangs_does_not_hold_up_the_others(
    fake: FakeNvml, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = opened(fake, clock, "gpus 3", "fault nvmlDeviceGetSamples 1 1 1 hang 0")
    monkeypatch.setattr(sample_buffers, "DEADLINE_S", 1.0)
    backfill = list(source.backfill(clock.now_s, 1.0))
    assert [gpu.info.index for gpu in backfill[-1].gpus] == [0, 2]
    assert fake.await_hanging(1)
    source.close()
    fake.release(1)


@pytest.mark.usefixtures("patient")
def test_lost_gpus_and_mig_instances_are_left_alone(fake: FakeNvml, clock: Clock) -> None:
    source = opened(fake, clock, "gpus 2", "mig 1 0 9 1g.10gb 9728", "refuse nvmlDeviceGetSamples 3 1")
    fake.lose(0)
    source.gpus[0].read(0.0)
    before = fake.calls_after_lost(0)
    assert list(source.backfill(clock.now_s, 1.0)) == []
    assert fake.calls_after_lost(0) == before
    assert fake.calls("nvmlDeviceGetSamples", 16) == 0


# -- the raster --------------------------------------------------------------------------------------

def samples_from(samples: Samples, interval_s: float = 1.0) -> list[NodeSample]:
    gpu = GpuInfo(0, "GPU-0", "H100")
    return backfill_samples({gpu.uuid: {"gpu_util": samples}}, [gpu], 100.0, interval_s, "node", "NVML", 1)


def test_a_value_is_the_mean_of_the_interval_before_it() -> None:
    backfill = samples_from([(97.5, 0.0), (98.0, 1.0), (98.5, 0.2), (99.0, 0.4), (99.5, 0.9), (100.0, 0.9)])
    assert [(sample.time_s, sample.gpus[0]["gpu_util"].value) for sample in backfill] == [
        (98.0, 0.5), (99.0, pytest.approx(0.3)),
    ]


def test_an_interval_that_is_not_covered_from_its_beginning_is_left_out() -> None:
    assert samples_from([(98.6, 0.5), (98.8, 0.5), (99.0, 0.5)]) == []


def test_a_single_sample_is_no_mean() -> None:
    assert samples_from([(98.6, 0.5)]) == []
