from __future__ import annotations

import itertools

import pytest

from gputop.core.errors import GputopError
from gputop.core.metrics import GPU_METRICS, HOST_METRICS, TENSOR_FLOP_UTIL
from gputop.core.samples import NodeSample
from gputop.simulation.loop import StepKind
from gputop.simulation.scenarios import SCENARIOS
from gputop.sources.simulated import BACKFILL_S, SimulatedSource

NOW = 1_790_000_000.25


def _open(scenario: str = "gpu0-oversubscribed", *gpus: str) -> SimulatedSource:
    source = SimulatedSource(scenario, gpus=gpus, clock=lambda: NOW)
    source.open()
    return source


@pytest.fixture(scope="module")
def source() -> SimulatedSource:
    return _open()


@pytest.fixture(scope="module")
def backfill(source: SimulatedSource) -> list[NodeSample]:
    return list(source.backfill(NOW, 1.0))


def test_every_reading_is_there_and_says_that_it_is_simulated(source: SimulatedSource) -> None:
    samples = [probe.read(NOW) for probe in source.gpus]
    host = source.host.read(NOW)
    assert len(samples) == 8
    read = {metric: about for metric, about in GPU_METRICS.items() if metric != TENSOR_FLOP_UTIL}
    for readings, metrics in [*((s.readings, read) for s in samples), (host.readings, HOST_METRICS)]:
        assert set(readings) == set(metrics)
        for name, reading in readings.items():
            assert reading.value is not None and reading.source == "simulated"
            assert reading.unit == metrics[name].unit
            assert reading.coarse == (name == "gpu_util")
            if reading.unit == "ratio":
                assert 0 <= reading.value <= 1
    (process,) = source.host.processes(NOW, samples)
    assert sorted(process.gpus) == list(range(8))
    assert process.pid > 1 << 22  # no process of this machine can have it
    assert source.simulated and source.label.startswith("SIMULATED: ")
    assert samples[0].info.name == "NVIDIA H100 80GB HBM3"


def test_coarse_utilization_hides_what_sm_activity_shows(source: SimulatedSource) -> None:
    first, *others = (probe.read(NOW + 1) for probe in source.gpus)
    assert first["gpu_util"].value > 0.95 and first["sm_active"].value > 0.9  # type: ignore[operator]
    for sample in others:
        assert sample["gpu_util"].value > 0.95  # type: ignore[operator]
        assert sample["sm_active"].value < 0.6  # type: ignore[operator]
        assert sample["power_w"].value < first["power_w"].value  # type: ignore[operator]
        assert sample["temperature_c"].value < first["temperature_c"].value  # type: ignore[operator]


def test_the_backfill_is_five_minutes_of_the_same_job(source: SimulatedSource, backfill: list[NodeSample]) -> None:
    assert len(backfill) == BACKFILL_S
    times = [s.time_s for s in backfill]
    assert times == sorted(times) and times[-1] == NOW - 1 and times[0] == NOW - BACKFILL_S
    assert all(s.simulated and s.interval_s == 1.0 and s.source == source.label for s in backfill)
    node = source._opened()[0]
    for sample in (backfill[0], backfill[150], backfill[-1]):  # the figures that a live sample would have shown
        end = source.at(sample.time_s)[1]
        assert sample.gpus[2] == node.gpu(2, end - 10**9, end)


def test_phases_show_in_the_backfill(source: SimulatedSource, backfill: list[NodeSample]) -> None:
    """Checkpoints: GPUs idle, GPU 0 sends to the host, the disk is written. Training: none of it."""
    loop = source._opened()[0].loop
    seen = {StepKind.CHECKPOINT: 0, StepKind.TRAIN: 0}
    for sample in backfill:
        end = source.at(sample.time_s)[1]
        kinds = {s.kind for s in loop.steps(end - 10**9, end)}
        writes = sample.host["disk_write_bytes_per_s"].value
        assert (writes > 0) == (StepKind.CHECKPOINT in kinds)  # type: ignore[operator]
        if kinds == {StepKind.CHECKPOINT}:
            assert sample.gpus[4]["sm_active"].value == 0
            seen[StepKind.CHECKPOINT] += 1
        elif kinds == {StepKind.TRAIN}:
            assert sample.gpus[0]["sm_active"].value > 0.9  # type: ignore[operator]
            seen[StepKind.TRAIN] += 1
    assert seen[StepKind.CHECKPOINT] >= 2 and seen[StepKind.TRAIN] > 200


def test_temperature_follows_power_slowly(backfill: list[NodeSample]) -> None:
    power = [s.gpus[0]["power_w"].value or 0.0 for s in backfill]
    temperature = [s.gpus[0]["temperature_c"].value or 0.0 for s in backfill]
    drop = max(range(1, len(backfill)), key=lambda i: power[i - 1] - power[i])
    assert power[drop - 1] - power[drop] > 100
    assert max(abs(b - a) for a, b in itertools.pairwise(temperature)) <= 3
    assert min(temperature[drop:drop + 12]) < temperature[drop - 1]
    assert max(temperature) - min(temperature) >= 4


def test_input_bound_shows_on_the_host() -> None:
    bound, healthy = (list(_open(name).backfill(NOW, 10.0))[-3] for name in ("input-bound", "healthy"))
    assert bound.processes[0].cpu_cores.value > 2 * healthy.processes[0].cpu_cores.value  # type: ignore[operator]
    assert bound.host["net_rx_bytes_per_s"].value > 1e8  # type: ignore[operator]
    assert healthy.host["disk_read_bytes_per_s"].value > 1e8  # type: ignore[operator]
    assert bound.gpus[1]["sm_active"].value < 0.6 < healthy.gpus[1]["sm_active"].value  # type: ignore[operator]


def test_a_window_is_the_time_since_the_last_sample(source: SimulatedSource) -> None:
    node = source._opened()[0]
    fresh = _open()
    probe = fresh.gpus[3]
    probe.read(NOW + 2)
    assert probe.read(NOW + 2.5) == node.gpu(3, source.at(NOW + 2)[1], source.at(NOW + 2.5)[1])
    again = probe.read(NOW + 2.5)  # twice at the same moment
    assert again == probe.read(NOW + 2.5)
    assert probe.read(NOW - 60)["sm_active"].value is not None  # the clock was set back
    assert probe.read(NOW - 5_000)["sm_active"].value is not None  # before the job's first moment
    assert probe.read(NOW + 10_000)["temperature_c"].value is not None  # the machine slept


def test_gpus_can_be_chosen() -> None:
    source = _open("healthy", "1,4-5")
    assert [probe.info.index for probe in source.gpus] == [1, 4, 5]
    sample = next(iter(source.backfill(NOW, 5.0)))
    assert [s.info.index for s in sample.gpus] == [1, 4, 5]
    by_uuid = _open("healthy", source.gpus[1].info.uuid)
    assert [probe.info.index for probe in by_uuid.gpus] == [4]
    with pytest.raises(GputopError) as caught:
        _open("healthy", "9")
    assert caught.value.exit_code == 2


def test_an_unknown_scenario_is_wrong_usage() -> None:
    with pytest.raises(GputopError) as caught:
        SimulatedSource("slow")
    assert caught.value.exit_code == 2
    assert all(name in caught.value.fix for name in SCENARIOS)


def test_the_profiler_server_comes_with_the_job_and_goes_with_it() -> None:
    source = SimulatedSource("healthy")
    assert source.profiler_endpoints() == {}
    source.open()
    (address,), (description,) = source.profiler_endpoints(), source.profiler_endpoints().values()
    assert address.startswith("127.0.0.1:") and "SIMULATED" in description
    source.close()
    assert source.profiler_endpoints() == {}
    source.close()


def test_the_gpus_left_out_are_known() -> None:
    some = _open("gpu0-oversubscribed", "6-7")
    assert some.gpus_present == 8 and next(iter(some.backfill(NOW, 1.0))).gpus_unwatched == 6


def test_cores_and_io_are_those_of_the_host(source: SimulatedSource) -> None:
    host = source.host.read(NOW + 2)
    assert host.cpu_count == len(host.core_ratios)
    assert sum(host.core_ratios) / host.cpu_count == pytest.approx(host["cpu_ratio"].value, abs=0.005)
    (process,) = source.host.processes(NOW + 2, [probe.read(NOW + 2) for probe in source.gpus])
    assert process.io_read_bytes_per_s == host["disk_read_bytes_per_s"]
    assert process.io_write_bytes_per_s.source == "simulated"
    assert process.container and process.cuda_visible_devices == "0,1,2,3,4,5,6,7"
    assert [probe.info.numa_node for probe in source.gpus] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_the_next_job_is_the_same_one_with_its_fix_and_then_without_again() -> None:
    source = _open("input-bound")
    faulty, _ = (source.gpus[0].read(NOW + n)["sm_active"].value for n in (1, 2))
    before = source.label
    assert source.next_job() == "Fixed: tf.data chooses the number of threads for map"
    assert source.label.startswith("SIMULATED: Fixed") and source.gpus_present == 8
    fixed, _ = (source.gpus[0].read(NOW + n)["sm_active"].value for n in (3, 4))
    assert faulty is not None and fixed is not None and fixed > 1.5 * faulty
    source.next_job()
    assert source.label == before


def test_scenarios_with_commas_follow_each_other_and_a_job_without_a_fix_stays() -> None:
    source = _open("input-bound,healthy")
    assert source.next_job() == SCENARIOS["healthy"].title
    assert _open("healthy").next_job() is None
    with pytest.raises(GputopError, match="no demo scenario 'helthy'"):
        SimulatedSource("input-bound,helthy")


def test_a_job_that_hangs_waits_for_one_rank_until_it_is_run_anew() -> None:
    source = _open("hang")
    now_s = NOW + 5
    gpus = [gpu.read(now_s) for gpu in source.gpus]
    for index, gpu in enumerate(gpus):
        assert gpu["gpu_util"].value == pytest.approx(float(index != 5)), index
        assert (gpu["sm_active"].value or 0.0) < 0.25 and gpu["nvlink_rx_bytes_per_s"].value == 0.0
    processes = source.host.processes(now_s, gpus)
    assert [list(process.gpus) for process in processes] == [[gpu] for gpu in range(8)]
    assert processes[5].command.endswith("--rank 5") and source.hanging is not None
    before = [sample.gpus[0]["sm_active"].value for sample in source.backfill(NOW, 1.0)]
    assert max(before[:60]) > 0.8 and max(before[-70:]) < 0.25
    assert source.capture(int((NOW - 20) * 1e9), int((NOW - 18) * 1e9))  # of a time in which nothing ends
    assert source.next_job() == "Fixed: the dataset is read from the local disk" and source.hanging is None
    assert source.gpus[5].read(now_s + 2)["sm_active"].value > 0.5
