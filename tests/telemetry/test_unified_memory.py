"""GPUs that share the host's memory show that one, and say so."""

from __future__ import annotations

import pytest

from gputop.core.samples import LOST, UNIFIED_MEMORY, GpuSample, HostSample, Reading
from gputop.telemetry.sampler import with_unified_memory
from tests.fakes import node_sample
from tests.records import replace

HOST = HostSample("node", {"memory_used_bytes": Reading(40 * 2.0**30, "bytes"),
                           "memory_total_bytes": Reading(120 * 2.0**30, "bytes")})


def gpu_without_memory(name: str) -> GpuSample:
    gpu = node_sample(10).gpus[0]
    none = Reading.missing("bytes", "not supported by this GPU", "NVML")
    memory = {metric: none for metric in gpu.readings if metric.startswith("memory_") and metric.endswith("_bytes")}
    return replace(gpu, info=replace(gpu.info, name=name), readings={**gpu.readings, **memory})


@pytest.mark.parametrize("name", ["NVIDIA GB10", "Orin (nvgpu)", "NVIDIA Thor"])
def test_a_gpu_that_shares_the_hosts_memory_shows_it_and_says_so(name: str) -> None:
    shown = with_unified_memory(gpu_without_memory(name), HOST)
    assert [(shown[m].value, shown[m].source) for m in ("memory_used_bytes", "memory_total_bytes")] == [
        (40 * 2.0**30, UNIFIED_MEMORY), (120 * 2.0**30, UNIFIED_MEMORY)]


def test_no_other_gpu_is_given_the_hosts_memory() -> None:
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA GB100", "NVIDIA GH200 480GB"):
        gpu = gpu_without_memory(name)
        assert with_unified_memory(gpu, HOST) is gpu
    answers = replace(node_sample(10).gpus[0], info=replace(node_sample(10).gpus[0].info, name="NVIDIA GB10"))
    lost = replace(gpu_without_memory("NVIDIA GB10"), state=LOST)
    assert with_unified_memory(answers, HOST) is answers and with_unified_memory(lost, HOST) is lost
    unknown = gpu_without_memory("NVIDIA GB10")
    assert with_unified_memory(unknown, HostSample("node", {})) is unknown
