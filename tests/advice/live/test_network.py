"""The rules about RDMA and NUMA: a full network, a process that is bound to the far socket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from gputop.core.metrics import ADAPTER_METRICS
from gputop.core.samples import AdapterSample, GpuSample, HostSample, NodeSample, Reading
from tests.advice.live.scene import Job, Level, Scene, abstained, after, at, ids, verdict
from tests.records import replace

LINK = 50e9


def adapter(name: str, **values: float | None) -> AdapterSample:
    values = {"rdma_max_bytes_per_s": LINK, "rdma_retransmits": 0.0, **values}
    return AdapterSample(name, "ACTIVE", "InfiniBand", None, {
        m: Reading.missing(ADAPTER_METRICS[m].unit, "the test says so") if v is None
        else Reading(v, ADAPTER_METRICS[m].unit, "test") for m, v in values.items()})


@dataclass(frozen=True)
class Networked(Scene):
    """``loads``: of each adapter, received, of its link; None: not known."""

    loads: Sequence[Level | None] = (0.9,)
    retransmits_per_s: float = 0.0
    state: str = "ACTIVE"

    def host(self, t: float) -> HostSample:
        adapters = [adapter(f"mlx5_{i}", rdma_tx_bytes_per_s=1e9,
                            rdma_rx_bytes_per_s=None if load is None else LINK * at(load, t),
                            rdma_retransmits=self.retransmits_per_s * t) for i, load in enumerate(self.loads)]
        return replace(super().host(t), adapters=tuple(replace(own, state=self.state) for own in adapters))


WAITING: dict[str, Any] = {"active": dict.fromkeys(range(8), 0.4), "interval_s": 2.0}


def test_a_full_adapter_while_gpus_wait_is_found() -> None:
    found: Any = verdict(Networked(loads=(0.2, 0.9), retransmits_per_s=2.0, **WAITING), 130, "network_bound")
    assert (found.adapter, found.way, found.full_adapters, found.adapters) == ("mlx5_1", "received", 1, 2)
    assert found.gpus == tuple(range(8)) and found.rdma_bytes_per_s == pytest.approx(0.9 * LINK)
    assert found.retransmits == pytest.approx(120, abs=10)  # of both adapters
    advice = after(Networked(**WAITING), 130)
    assert "network_bound" in ids(advice) and "low_sm_active" not in ids(advice)
    advice = after(Networked(loads=(None, 0.1), **WAITING), 130)  # an adapter that cannot be read is told
    assert "mlx5_0: the test says so" in abstained(advice)["network_bound"]


@pytest.mark.parametrize("scene", [
    Networked(loads=(0.5, 0.6), **WAITING),  # has room
    Networked(loads=(0.9,), interval_s=2.0),  # hides the communication: the GPUs are busy
    Networked(loads=(0.9,), state="DOWN", **WAITING),  # counters of before
    Networked(loads=(), **WAITING),
    Networked(loads=(0.9,), active=dict.fromkeys(range(8), 0.0), interval_s=2.0),  # storage for somebody else
    Networked(loads=(lambda t: 0.99 if t % 60 < 10 else 0.0,), **WAITING),  # a checkpoint
])
def test_a_network_that_holds_up_no_gpu_is_not(scene: Networked) -> None:
    advice = after(scene, 130)
    assert "network_bound" not in ids(advice) and "network_bound" not in abstained(advice)


# -- numa_remote ------------------------------------------------------------------------------------

@dataclass(frozen=True)
class TwoSockets(Scene):
    bound: tuple[tuple[int, ...], ...] = ((),)  # of each job

    def sample(self, t: float) -> NodeSample:
        sample = super().sample(t)
        return replace(sample, processes=tuple(
            replace(process, numa_nodes=own) for process, own in zip(sample.processes, self.bound, strict=True)))

    def gpu(self, index: int, t: float, processes: Any) -> GpuSample:
        gpu = super().gpu(index, t, processes)
        return replace(gpu, info=replace(gpu.info, numa_node=index // 4))


RANKS = [Job(100 + i, (4 * i,), f"python train.py --rank {i}") for i in range(2)]


@pytest.mark.parametrize(("jobs", "bound", "gpus"), [
    (RANKS, ((0,), (1,)), ()), (RANKS, ((), ()), ()), (RANKS, ((1,), (0,)), (0, 4)), (RANKS, ((0,), (0,)), (4,)),
    ([Job()], ((0,),), (4, 5, 6, 7)), ([Job()], ((0, 1),), ())])
def test_a_process_on_the_far_socket_is_found(jobs: list[Job], bound: Any, gpus: tuple[int, ...]) -> None:
    found: Any = verdict(TwoSockets(jobs=jobs, bound=bound, interval_s=4.0), 200, "numa_remote")
    assert (found.gpus if found else ()) == gpus


def test_a_young_process_may_yet_bind_itself() -> None:
    assert verdict(TwoSockets(jobs=RANKS, bound=((1,), (0,)), interval_s=4.0), 60, "numa_remote") is None
