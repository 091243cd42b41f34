"""Two faults in one job: both must be found, the larger first."""

from __future__ import annotations

from collections.abc import Iterator

from gputop.simulation.job import Copy
from tests.advice.labeled.case import HIGH, LOW, Case, Window, call_ms
from tests.advice.labeled.jobs import LabeledJob, MidStepWork, random_job
from tests.records import replace

_CONSEQUENCES = {
    "collective_waiting": ("launch_bound", "staggered_launch"),
    "gpu0_oversubscribed": ("collective_waiting", "replica_imbalance"),
    "replica_imbalance": ("collective_waiting",),
    "copies_pageable": ("copies_excessive", "sync_copies"),
    "host_placement": ("sync_copies", "copies_excessive", "launch_bound"),
    "tensor_cores_unused": ("xla_off",),
    "retracing": ("step_gap_host", "launch_bound"),
    "xla_off": ("small_kernels",),
}
_BALANCE = ("replica_imbalance", "gpu0_oversubscribed")


def _pair(name: str, job: LabeledJob, faults: dict[str, dict[str, object]],
          windows: dict[str, Window] | None = None) -> Case:
    """``faults`` maps each id to the parameters that make it; without them the fault is fixed."""
    both = job.replace(**{key: value for own in faults.values() for key, value in own.items()})
    fixed = {id_: both.replace(**{key: getattr(job, key) for key in own}) for id_, own in faults.items()}
    step = call_ms(both)
    shares = {id_: 1 - call_ms(other) / step for id_, other in fixed.items() if id_ not in (windows or {})}
    largest = max(shares.values(), default=0.0)
    first = tuple(id_ for id_, share in shares.items() if share >= 0.8 * largest)
    return Case(
        name=f"pair-{name}", kind="pair", job=both, fixed=fixed, windows=windows or {}, main=first,
        consequences=frozenset(c for id_ in faults for c in _CONSEQUENCES.get(id_, ())),
        must_not=frozenset(id_ for id_ in (*_BALANCE, "input_bound",
        "memory_pressure") if id_ not in faults and id_ not in {c for f in faults for c in _CONSEQUENCES.get(f, ())}))


def pairs() -> Iterator[Case]:
    one = random_job(
        401, gpus=1, compute_ms=80.0, kernels=500, style="keras3", version=(2, 19), warm_up=0.0, run_ahead=0,
        gpu="A100", dtype="bf16", old_details=False)
    step = call_ms(one)
    slow: dict[str, object] = {"prefetch": 0, "map_parallel": False, "produce_ms": step * 0.6}
    yield _pair("input-gap", one, {"input_bound": slow, "step_gap_host": {"gap_ms": step * 0.2}})
    yield _pair(
        "gap-input", one.replace(style="keras2", version=(2, 13)),
        {"input_bound": {**slow, "produce_ms": step * 0.2}, "step_gap_host": {"gap_ms": step * 0.6}})
    yield _pair(
        "input-tensor-cores", one.replace(style="custom", xla=False),
        {"input_bound": {**slow, "produce_ms": step * 0.9},
        "tensor_cores_unused": {"dtype": "fp32", "matmul_factor": 1.9}})
    yield _pair(
        "tensor-cores-input", one.replace(style="custom", xla=False),
        {"input_bound": {**slow, "produce_ms": step * 0.3},
        "tensor_cores_unused": {"dtype": "fp32", "matmul_factor": 3.0}})
    yield _pair(
        "gap-retracing", one.replace(style="custom"),
        {"step_gap_host": {"gap_ms": step * 0.7}, "retracing": {"retrace_every": 2, "retrace_ms": step * 0.5}})
    host = (
        MidStepWork(0.3, (Copy("D2H", 1 << 20, 11.0, "device", "pinned"),
        Copy("H2D", 1 << 19, 11.0, "pinned", "device")), blocks=True, host_ms=step * 0.5,
        op="StatefulPartitionedCall/py:EagerPyFunc"),)
    yield _pair(
        "host-op-input", one.replace(xla=False), {"host_placement": {"mid_step": host},
        "input_bound": {**slow, "produce_ms": step * 0.2}})
    yield _pair(
        "pageable-gap", one.replace(batch_mb=10.0), {"copies_pageable": {"pinned": False, "h2d_gb_per_s": 4.0,
        "batch_mb": step * 0.5 * 4.0}, "step_gap_host": {"gap_ms": step * 0.2}})
    yield _pair(
        "memory-input", one, {"memory_pressure": {"memory": 0.99, "fragmentation": 0.4}, "input_bound": slow},
        {"memory_pressure": ("medium", HIGH)})
    yield _pair(
        "headroom-xla", one.replace(xla=False, style="keras2", version=(2, 13)),
        {"batch_size_headroom": {"memory": 0.3}, "xla_off": {"chained_elementwise": 8, "elementwise": 0.6}},
        {"batch_size_headroom": (None, HIGH), "xla_off": (LOW, HIGH)})
    # Nearly all of the step is pinned copies at the link's rate, the few matmuls in FP32: pinning would save nothing.
    full = random_job(
        403, gpus=2, gpu="H100", dtype="fp32", style="custom", version=(2, 16), xla=False, warm_up=0.0, compute_ms=8.0,
        kernels=90, comm_ms=0.0, batch_mb=0.0, produce_ms=2.0, run_ahead=1, steps=10, idle_gpus=0)
    loads = tuple(
        MidStepWork(0.02 + i / 26, (Copy("H2D", 400_000_000, 50.0, "pinned", "device"),),
        op=f"weights_{i}:Identity") for i in range(25))
    case = _pair(
        "copies-all-but", full,
        {"copies_excessive": {"mid_step": loads}, "tensor_cores_unused": {"matmul_factor": 3.0}},
        {"tensor_cores_unused": (LOW, HIGH)})
    yield replace(case, must_not=case.must_not | {"copies_pageable", "sync_copies"})
    several = random_job(
        402, gpus=4, compute_ms=60.0, kernels=300, style="keras2", version=(2, 15), warm_up=0.0, run_ahead=0,
        gpu="V100", dtype="fp16", comm_ms=6.0, comm_count=12, comm_overlap=True, steps=14)
    step = call_ms(several)
    yield _pair(
        "comm-gap", several, {"communication_exposed": {"comm_overlap": False, "comm_ms": step * 0.5},
        "step_gap_host": {"gap_ms": step * 0.2}})
    yield _pair(
        "gpu0-comm", several.replace(comm_ms=12.0), {"gpu0_oversubscribed": {"gpu0_extra_ms": step * 0.6,
        "gpu0_extra_kernels": 60}, "communication_exposed": {"comm_overlap": False}})
    yield _pair(
        "imbalance-input", several, {"replica_imbalance": {"gpu_factor": (1.0, 1.0, 1.7, 1.0)},
        "input_bound": {**slow, "produce_ms": step * 0.25}})
    yield _pair(
        "late-gap", several, {"collective_waiting": {"late_ms": step * 0.5, "late_gpu": 2},
        "step_gap_host": {"gap_ms": step * 0.2}})
    yield _pair(
        "gap-late", several.replace(gpus=8, kernels=160), {"collective_waiting": {"late_ms": step * 0.18,
        "late_gpu": 6}, "step_gap_host": {"gap_ms": step * 0.7}})
    yield _pair(
        "gpu0-input", several.replace(gpus=2), {"gpu0_oversubscribed": {"gpu0_extra_ms": step * 0.2,
        "gpu0_extra_kernels": 30}, "input_bound": {**slow, "produce_ms": step * 0.7}})
    yield _pair(
        "comm-tensor-cores", several.replace(xla=False), {"communication_exposed": {"comm_overlap": False,
        "comm_ms": step * 0.3}, "tensor_cores_unused": {"dtype": "fp32", "matmul_factor": 2.6}})
