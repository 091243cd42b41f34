"""Eight GPUs, one of them sick: every NVML call that gputop makes, with every fault that it can have.

The calls are those that the fake has seen gputop make, so that a new one is walked, too.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import pynvml
import pytest

from gputop.core.errors import GputopError
from gputop.core.samples import FAILED, LOST, NOT_RESPONDING, OK, GpuInfo, GpuSample, NodeSample
from gputop.sources.base import GpuProbe
from gputop.sources.nvml import status
from gputop.sources.nvml.gpu import NvmlGpu
from gputop.sources.nvml.source import NvmlSource
from gputop.sources.nvml.status import implausible_reason
from gputop.telemetry import deadline_calls
from gputop.telemetry.sampler import Clocks, Sampler
from gputop.text.units import printable
from tests.commands.run_gputop import gputop
from tests.nvml_fake import FakeNvml, environment
from tests.sources.conftest import Clock
from tests.waiting import PATIENCE_S

SICK, GPUS = 3, 8
# Of nvmlReturn_t those that gputop tells apart, which have names there, and three of those that it does not.
CODES = (*(code for name, code in vars(status).items() if name.isupper() and type(code) is int and 0 < code < 30),
         20, 30, 999)

_FIXED = (
    "set util 73", "set memory_used_mib 1024", "set power_w 431", "set temperature 61", "set memory_temperature 71",
    "set sm_active 62.5", "set pcie_tx_mib 100", "set pcie_rx_mib 2000", "set nvlink_tx_mib 3000",
    "set nvlink_rx_mib 4000", "set encoder 11", "set decoder 22", "set ecc_corrected 5", "process 3 10 1000 C 40",
    "process 0 20 1000 C 40")
# Three kinds of node, so that every rung of every ladder is stood on.
NODES = {
    "Hopper": _FIXED,
    "without GPM": (*_FIXED, "gpm 0"),
    "old driver": (
        *_FIXED,
        *(f"refuse {name} 13" for name in (
            "nvmlGpmQueryDeviceSupport", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlDeviceGetTemperature", "nvmlDeviceGetComputeRunningProcesses_v3",
            "nvmlDeviceGetGraphicsRunningProcesses_v3", "field:186", "field:197", "field:198", "field:138"))),
}
SICK_S, HEALED_S = (0.0, 12.0, 31.0), (31.0, 1.0)  # time before each sample
# Counters, which a driver that answers NOT_FOUND does not have.
COUNTERS = {"field:138", "field:139", "field:197", "field:198"}
# Without these a GPU is no device; what they tell is asked for once.
OPENING = ("nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID")
# Averages over time of what goes up and down.
WAVES = ("gr_active", "sm_occupancy", "tensor_active", "dram_active", "fp64_active", "fp32_active", "fp16_active")


class Node:
    """Eight GPUs, the settings of one of ``NODES`` and more; read at times the test chooses.

    ``opened`` ones are there from the beginning, without what :class:`NvmlSource` does to
    find and open them in threads; the fake has been configured for that kind before. They are
    those up to the sick one: the rest would be more of the same.
    """

    def __init__(self, fake: FakeNvml, kind: str, *more: str, opened: bool = False) -> None:
        self.fake, self.kind, self.more = fake, kind, more
        if not opened:
            fake.configure(*NODES[kind], *more)
        self.clock = Clock(fake)
        self.source = None if opened else NvmlSource(clock=self.clock, wall_clock=self.clock)
        self.gpus: Sequence[GpuProbe] = ()

    def __enter__(self) -> Node:
        if self.source is not None:
            self.source.open()
            self.gpus = self.source.gpus
            return self
        pynvml.nvmlInit()
        for setting in self.more:
            self.fake.change(setting)
        self.gpus = [NvmlGpu(pynvml, pynvml.nvmlDeviceGetHandleByIndex(i), GpuInfo(i, f"GPU-{i}", "H100", "", 5, 16),
                             self.clock, self.clock) for i in range(SICK + 1)]
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.source is not None:
            self.source.close()
            return
        for gpu in self.gpus:
            gpu.close()  # type: ignore[attr-defined]
        pynvml.nvmlShutdown()

    def sample(self, after_s: float) -> list[GpuSample]:
        self.clock.advance(after_s)
        return [probe.read(self.clock()) for probe in self.gpus]

    def heal(self) -> None:
        self.fake.allow_everything()
        for setting in NODES[self.kind]:
            if setting.startswith("refuse"):
                self.fake.change(setting)


@dataclass
class Healthy:
    """What a node of this kind is asked for, and what it says when nothing is wrong."""

    functions: list[str]
    of_readings: set[str]  # those of them that are asked for anew at each sample, not when the GPU is opened
    values: dict[str, tuple[float, str]]  # with their source; the same for each GPU


def _healthy(fake: FakeNvml, kind: str) -> Healthy:
    fake.configure(*NODES[kind])
    with Node(fake, kind, opened=True) as node:
        for after_s in (*SICK_S, *HEALED_S):
            node.sample(after_s)
        of_readings = set(fake.functions()) - set(OPENING)
    with Node(fake, kind) as node:
        for after_s in (*SICK_S, *HEALED_S):
            samples = node.sample(after_s)
        values = [{m: (r.value, r.source) for m, r in s.readings.items() if r.value is not None} for s in samples]
        assert all(v.keys() == values[0].keys() for v in values)
        return Healthy(sorted(fake.functions()), of_readings, values[0])


@pytest.fixture(scope="module")
def healthy(nvml_library: Path) -> Iterator[dict[str, Healthy]]:
    with FakeNvml(nvml_library) as fake:
        yield {kind: _healthy(fake, kind) for kind in NODES}


def valued(sample: GpuSample) -> Set[str]:
    return {metric for metric, reading in sample.readings.items() if reading.value is not None}


def right(sample: GpuSample, expected: dict[str, tuple[float, str]]) -> None:
    """Nothing in the sample is made up: each value is the true one, each missing one has a reason."""
    for metric, reading in sample.readings.items():
        if reading.value is None:
            assert reading.reason, metric
            continue
        assert implausible_reason(metric, reading.value) is None
        if metric in WAVES:
            assert reading.value > 0, metric
        elif metric in expected:
            true, source = expected[metric]
            # Another source may count a little more (memory with the driver's reserve).
            assert math.isclose(reading.value, true, rel_tol=1e-6 if reading.source == source else 0.6), metric


def untouched(samples: list[GpuSample], expected: dict[str, tuple[float, str]]) -> None:
    """The others say all that they say on a healthy node."""
    for sample in samples:
        if sample.info.index != SICK:
            assert sample.state == OK
            assert valued(sample) == expected.keys()
            right(sample, expected)


def codes(fake: FakeNvml, kind: str, function: str, healthy: Healthy) -> None:
    """Each NVML code: refused for good is not asked for again, refused for now is, and a lost GPU is left alone."""
    if function == "process" or (function.startswith("gpm:") and function not in ("gpm:2", "gpm:20", "gpm:60")):
        return  # no calls: an entry of a list, and metrics that are treated like gpm:2
    opened = function in healthy.of_readings
    fake.configure(*NODES[kind])
    for code in CODES:
        with Node(fake, kind, f"fault {function} {SICK} 1 1 code {code}", opened=opened) as node:
            for after_s in SICK_S:
                if after_s == SICK_S[-1]:
                    asked = fake.calls(function, SICK)
                samples = node.sample(after_s)
                right(samples[SICK], healthy.values)
            untouched(samples, healthy.values)
            sick = samples[SICK]
            for_good = (code in status.REFUSED or (code == status.INVALID_ARGUMENT and function.startswith("field:"))
                        or (code == status.NOT_FOUND and function in COUNTERS))
            if code in status.DEVICE_GONE and asked:
                assert sick.state == LOST and "Xid" in sick.message and sick["power_w"].reason == sick.message, code
            elif function in OPENING:
                assert sick.state == FAILED and sick.message, code
            elif for_good:
                assert fake.calls(function, SICK) == asked, f"asked for again after code {code}"
            else:
                node.heal()
                for after_s in HEALED_S:
                    samples = node.sample(after_s)
                right(samples[SICK], healthy.values)
                # The older call, which has stood in since, does not tell the reserve.
                lacks = healthy.values.keys() - valued(samples[SICK]) - {"memory_reserved_bytes"}
                assert not lacks, f"{lacks} did not come back after code {code}"
        # Events are waited for in a thread of their own: when it finds out, the GPU's own has yet to.
        assert fake.calls_after_lost(SICK) <= ("Event" in function), f"the handle was used after code {code}"


def garbage(fake: FakeNvml, kind: str, function: str, healthy: Healthy) -> None:
    """Success, and nonsense for an answer."""
    for pattern in ("ff", "a5", "random"):
        with Node(fake, kind, f"fault {function} {SICK} 1 1 garbage {pattern}") as node:
            for after_s in SICK_S:
                samples = node.sample(after_s)
                sick = samples[SICK]
                right(sick, healthy.values)
                assert printable(sick.info.name) == sick.info.name
                assert sick.info.pcie_gen_max in (5, None) and sick.info.pcie_width_max in (16, None), pattern
            untouched(samples, healthy.values)


@pytest.mark.parametrize("kind", NODES)
@pytest.mark.parametrize("walk", [codes, garbage])
def test_each_call_of_one_gpu_with_each_fault(
    fake: FakeNvml, healthy: dict[str, Healthy], kind: str, walk: Callable[[FakeNvml, str, str, Healthy], None]
) -> None:
    before = list(NODES)[: list(NODES).index(kind)]
    walked = {function for other in before for function in healthy[other].functions}
    functions = [function for function in healthy[kind].functions if function not in walked]
    assert functions
    for function in functions:
        try:
            walk(fake, kind, function, healthy[kind])
        except AssertionError as error:
            raise AssertionError(f"{function} on a node {kind}: {error}") from error


@pytest.mark.parametrize("code", [1, 4, 999])
def test_a_gpu_that_answers_nothing_says_so_and_is_asked_again(
        fake: FakeNvml, healthy: dict[str, Healthy], code: int) -> None:
    with Node(fake, "Hopper") as node:
        node.sample(0.0)
        fake.change(f"fault * {SICK} 1 1 code {code}")
        for _ in range(3):
            samples = node.sample(1.0)
        untouched(samples, healthy["Hopper"].values)
        assert samples[SICK].state == FAILED
        assert status.reason(code, "").rstrip("() ") in samples[SICK].message
        fake.allow_everything()
        assert node.sample(31.0)[SICK].state == (FAILED if code in status.REFUSED else OK)


def test_garbage_is_named_with_its_value(fake: FakeNvml) -> None:
    with Node(
        fake, "Hopper", f"fault nvmlDeviceGetUtilizationRates {SICK} 1 1 garbage ff",
        f"fault field:186 {SICK} 1 1 garbage ff", f"fault gpm:2 {SICK} 1 1 garbage ff",
        f"fault nvmlDeviceGetCurrentClocksEventReasons {SICK} 1 1 garbage ff") as node:
        node.sample(0.0)
        sick = node.sample(1.0)[SICK]
    assert sick["gpu_util"].reason == "the driver reported an impossible value, 4294967295%"
    assert sick["power_w"].reason == "the driver reported an impossible value, 4294967.295 W"
    assert sick["sm_active"].reason == "the driver reported an impossible value, nan%"
    assert sick.clock_event_reasons == () and "0xffffffffffffffff" in (sick.clock_events_reason or "")


@pytest.mark.parametrize(
    "function",
    ["nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigMode", "nvmlDeviceGetMigDeviceHandleByIndex",
     "nvmlDeviceGetMemoryInfo_v2"])
def test_garbage_of_a_gpu_in_mig_mode(fake: FakeNvml, healthy: dict[str, Healthy], function: str) -> None:
    settings = (f"set mig 1 {SICK}", f"mig {SICK} 0 9 1g.10gb 9728", f"fault {function} {SICK} 1 1 garbage ff")
    with Node(fake, "Hopper", *settings) as node:
        for after_s in SICK_S:
            samples = node.sample(after_s)
            for sample in samples:
                if sample.info.index == SICK and sample.info.mig is None:
                    right(sample, healthy["Hopper"].values)
        untouched(samples, healthy["Hopper"].values)


class Skewed:
    """The machine's clock, and a hand to turn it on with."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.mark.parametrize(("kind", "function"), [
    ("Hopper", "nvmlDeviceGetUtilizationRates"),
    ("Hopper", "nvmlDeviceGetFieldValues"),
    ("Hopper", "nvmlGpmSampleGet"),
    ("Hopper", "nvmlDeviceGetTotalEccErrors"),
    ("Hopper", "nvmlDeviceGetComputeRunningProcesses_v3"),
    ("old driver", "nvmlDeviceGetPcieThroughput"),
])
def test_a_call_that_hangs(fake: FakeNvml, healthy: dict[str, Healthy], kind: str, function: str,
                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline_calls, "MOST_LATE", 1.0)  # the clock that is turned on is no starved host
    fake.configure(*NODES[kind], f"fault {function} {SICK} 1 1 hang 0")
    clock = Skewed()
    samples: queue.SimpleQueue[NodeSample] = queue.SimpleQueue()
    failed: list[GputopError] = []
    sampler = Sampler(NvmlSource(clock=clock), 0.1, samples.put, failed.append, clocks=Clocks(clock))
    sampler.start()

    def await_state(state: str, values: int) -> NodeSample:
        """A sample in which the sick GPU is in that state and the others are well."""
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            sample = samples.get(timeout=PATIENCE_S)
            gpu = sample.gpus[SICK]
            well = [g for g in sample.gpus if g.state == OK and g["power_w"].value == 431]
            if gpu.state == state and len(valued(gpu)) >= values and len(well) >= GPUS - 1:
                return sample
        raise AssertionError(f"GPU {SICK} was not seen {state} with the others well")

    try:
        assert fake.await_hanging(SICK)
        clock.ahead_s += 3.0
        sample = await_state(NOT_RESPONDING, 0)
        sick = sample.gpus[SICK]
        assert "a driver call has hung" in sick.message and "dmesg" in sick.message
        assert sick["power_w"].reason == sick.message
        fake.release(SICK)
        await_state(OK, 20)
    finally:
        fake.release(SICK)
        sampler.stop(5.0)
    assert not failed


def test_what_the_screen_says_of_one_sick_gpu(nvml_library: Path) -> None:
    done = gputop("snapshot", "--source", "nvml", "--format", "text", "--seconds", "1", env=environment(
        nvml_library, *_FIXED, f"fault nvmlDeviceGetMemoryInfo_v2 {SICK} 1 1 code 15"))
    rows = [line for line in done.stdout.splitlines() if line[:1].isdigit()]
    assert [int(row.split()[0]) for row in rows[:GPUS]] == list(range(GPUS)), done.stdout + done.stderr
    for index, row in enumerate(rows[:GPUS]):
        assert ("is lost: it no longer" in row) == (index == SICK)
        assert ("431" in row) == (index != SICK)
