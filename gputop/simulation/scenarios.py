"""The demo's scenarios: the parameters of the simulated training job, and of its epochs.

A scenario only sets causes (how long a batch takes to make, what a launch costs, which GPU
has more to do). Utilization, waits and step time follow in :mod:`gputop.simulation.loop`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from gputop.core.errors import EXIT_USAGE, GputopError
from gputop.simulation.job import ALLOCATOR_MIB, SimulatedJob

GPU_COUNT = 8
CPU_COUNT = SimulatedJob.cpu_budget
GiB = 1 << 30
MB = 1_000_000
EXAMPLE_BYTES = 224 * 224 * 3 * 4  # of one example as copied to the GPU
RECORD_BYTES = 115_000  # of one example as stored
_ALLREDUCE_GB_PER_S = 205.0  # gradient bytes over the time of one all-reduce


def _vit(*, batch_per_gpu: int, allocator_peak_gib: float = 68, gradient_bytes: int = 1_216 * MB, **changes: Any,
         ) -> SimulatedJob:
    """Synchronous data parallelism on eight H100 GPUs, one process: a vision transformer in mixed bfloat16.

    Keras 3 on TensorFlow 2.21 runs it, without XLA.
    """
    job = SimulatedJob(2024, GPU_COUNT, batch_mb=batch_per_gpu * EXAMPLE_BYTES / MB,
                       comm_ms=gradient_bytes / MB / _ALLREDUCE_GB_PER_S, memory=_allocator_share(allocator_peak_gib))
    return replace(job, **changes)


def _allocator_share(gib: float) -> float:
    return gib * 1024 / ALLOCATOR_MIB


class Fix(Struct, frozen=True):
    """Fix that a finding of a capture advises, in words, and its changes of the job and of the scenario's own fields.

    Epochs stay as long in time, so that a capture within a minute holds training alone.
    """

    what: str
    job: Mapping[str, Any] = {}
    epochs: Mapping[str, Any] = {}


class Scenario(Struct, frozen=True):
    """One training job. ``job`` describes its training steps; times are means, which the loop varies.

    ``fixes``: what the first finding of a capture advises, then that of a capture of the job so fixed, and so on.
    """

    id: str
    title: str
    description: str
    job: SimulatedJob
    batch_per_gpu: int
    sm_fill: float = 1.0  # the share of the GPU that a kernel fills, relative to one of a large batch
    dataset_on_network: bool = False
    gradient_bytes: int = 1_216 * MB
    steps_per_epoch: int = 200
    eval_steps: int = 40
    checkpoint_bytes: int = 3_650 * MB  # weights and both Adam moments
    checkpoint_write_bytes_per_s: float = 1.8e9
    hangs: bool = False  # a process for each GPU, of which one does not come to a collective
    fixes: tuple[Fix, ...] = ()

    def __hash__(self) -> int:
        return hash((self.id, self.job))  # fixes hold dicts

    def with_fix(self) -> Scenario:
        """The same job once the first of its fixes is applied."""
        fix, *others = self.fixes
        return replace(self, id=f"{self.id}-fixed", title=f"Fixed: {fix.what}", description=fix.what, hangs=False,
                       job=replace(self.job, **fix.job), fixes=tuple(others), **fix.epochs)


_ALL = (
    Scenario(
        id="gpu0-oversubscribed",
        title="GPU 0 does more work than the others",
        description="the teacher model and metrics for the whole batch run on GPU 0; the others wait for it in NCCL",
        job=_vit(batch_per_gpu=160, compute_ms=150.0, gpu0_extra_ms=186.0, gpu0_extra_kernels=150, gather_mb=96.0,
                 produce_ms=150.0, allocator_peak_gib=41, gpu0_memory=_allocator_share(67)),
        batch_per_gpu=160, steps_per_epoch=215, eval_steps=90,
        fixes=(Fix("the teacher model and metrics run on all GPUs", {
            "gpu0_extra_ms": 0.0, "gpu0_extra_kernels": 0, "gather_mb": 0.0, "gpu0_memory": 0.0,
            "compute_ms": 150.0 + 186.0 / GPU_COUNT}, {"steps_per_epoch": 410}),)),
    Scenario(
        id="input-bound",
        title="The GPUs wait for the input pipeline",
        description="decoding and augmenting on the CPU takes longer than the GPUs' work; the prefetch buffer is empty",
        job=_vit(batch_per_gpu=160, compute_ms=150.0, produce_ms=340.0, input_workers=88, prefetch=2,
                 allocator_peak_gib=62),
        batch_per_gpu=160, dataset_on_network=True, steps_per_epoch=220, eval_steps=30,
        fixes=(Fix("tf.data chooses the number of threads for map",
                   {"produce_ms": 130.0, "input_workers": CPU_COUNT}, {"steps_per_epoch": 480}),)),
    Scenario(
        id="launch-bound",
        title="The host launches kernels too slowly",
        description="a small model with thousands of short kernels, launched by eight replicas that share one process: "
                    "each kernel finishes long before the next one arrives",
        job=_vit(batch_per_gpu=8, kernels=999, compute_ms=24.0, launch_us=200.0, produce_ms=50.0, input_workers=24,
                 allocator_peak_gib=7, gradient_bytes=172 * MB),
        batch_per_gpu=8, sm_fill=0.6, steps_per_epoch=330, eval_steps=50, gradient_bytes=172 * MB,
        checkpoint_bytes=516 * MB,
        fixes=(Fix("XLA compiles the step into a few kernels", {
            "xla": True, "kernels": 170, "compute_ms": 20.0, "launch_us": 22.0, "produce_ms": 20.0, "gap_ms": 0.8},
            {"steps_per_epoch": 3_000}),)),
    Scenario(
        id="slow-callback",
        title="Python between the steps makes the GPUs wait",
        description="after each step, a callback computes a confusion matrix on the CPU; captured stacks show its line",
        job=_vit(batch_per_gpu=160, compute_ms=150.0, gap_ms=110.0, produce_ms=130.0, allocator_peak_gib=62),
        batch_per_gpu=160, steps_per_epoch=250, eval_steps=40,
        fixes=(Fix("the confusion matrix is computed once per epoch", {"gap_ms": 2.5}, {"steps_per_epoch": 425}),)),
    Scenario(
        id="three-causes",
        title="Three causes at once: which fix first?",
        description="GPU 0 does more work, a callback runs after each step, and the gradients are summed at the end of "
                    "the step; mark findings with w to see what their fixes save together",
        job=_vit(batch_per_gpu=160, compute_ms=150.0, gpu0_extra_ms=140.0, gpu0_extra_kernels=150, gather_mb=96.0,
                 gap_ms=60.0, comm_overlap=False, comm_ms=40.0, produce_ms=120.0, allocator_peak_gib=41,
                 gpu0_memory=_allocator_share(62)),
        batch_per_gpu=160, steps_per_epoch=230, eval_steps=40,
        fixes=(
            Fix("the teacher model and metrics run on all GPUs", {
                "gpu0_extra_ms": 0.0, "gpu0_extra_kernels": 0, "gather_mb": 0.0, "gpu0_memory": 0.0,
                "compute_ms": 150.0 + 140.0 / GPU_COUNT}, {"steps_per_epoch": 290}),
            Fix("the confusion matrix is computed once per epoch", {"gap_ms": 2.5}, {"steps_per_epoch": 380}),
            Fix("gradients are summed during the backward pass", {"comm_overlap": True}, {"steps_per_epoch": 430}))),
    Scenario(
        id="slow-checkpoint",
        title="All GPUs wait for a checkpoint every 120 steps",
        description="every 120 steps, the weights are saved to a network disk, and all GPUs are idle for 5 s; visible "
                    "live, without a capture",
        job=_vit(batch_per_gpu=256, compute_ms=285.0, produce_ms=170.0),
        batch_per_gpu=256, steps_per_epoch=120, eval_steps=0, checkpoint_write_bytes_per_s=0.7e9,
        # The copy from the GPU is left.
        fixes=(Fix("checkpoints are written in the background", epochs={"checkpoint_write_bytes_per_s": 9e9}),)),
    Scenario(
        id="hang",
        title="A rank hangs, and the others wait for it",
        description="rank 5 does not reach an AllReduce; press S to see its line of code",
        job=_vit(batch_per_gpu=256, compute_ms=285.0, produce_ms=170.0),
        batch_per_gpu=256, dataset_on_network=True, steps_per_epoch=250, eval_steps=50, hangs=True,
        fixes=(Fix("the dataset is read from the local disk"),)),
    Scenario(
        id="healthy",
        title="All GPUs are busy; no problem",
        description="input and launches run ahead of the GPUs, and collectives overlap with compute",
        job=_vit(batch_per_gpu=256, compute_ms=285.0, produce_ms=170.0),
        batch_per_gpu=256, steps_per_epoch=250, eval_steps=50),
)

SCENARIOS: dict[str, Scenario] = {s.id: s for s in _ALL}

# It shows at a glance what other monitors hide: their utilization reads 100% on all eight
# GPUs while SM activity says that one works and seven wait.
DEFAULT_SCENARIO = "gpu0-oversubscribed"


def find_scenario(name: str) -> Scenario:
    """The scenario of that id; raises GputopError (exit status 2) listing all if there is none."""
    scenario = SCENARIOS.get(name.strip().lower().replace("_", "-"))
    if scenario is None:
        from difflib import get_close_matches

        near = get_close_matches(name.lower(), SCENARIOS, 1)
        meant = f"Did you mean {near[0]}? " if near else ""
        raise GputopError(f"there is no demo scenario {name!r}", f"{meant}Scenarios:\n{describe()}", EXIT_USAGE)
    return scenario


def find_jobs(names: str) -> tuple[Scenario, ...]:
    """The jobs that follow each other on the node: scenarios by their ids, with commas; of one with fixes, the same
    job with the first of them, with the first two, and so on. Raises as :func:`find_scenario`."""
    jobs = [*map(find_scenario, names.split(","))]
    if len(jobs) == 1:
        while jobs[-1].fixes:
            jobs.append(jobs[-1].with_fix())
    return tuple(jobs)


def describe() -> str:
    """All scenarios, a line each."""
    return "\n".join(f"  {s.id:<20} {s.description}" for s in _ALL)
