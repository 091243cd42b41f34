"""The demo's scenarios: what the simulated training job does, as numbers.

A scenario only sets causes (how long a batch takes to read, what a launch costs, which GPU
has more to do). Utilization, waits and step time follow in :mod:`gputop.simulation.loop`.
"""

from __future__ import annotations

from dataclasses import dataclass

from gputop.core.errors import EXIT_USAGE, GputopError

GPU_COUNT = 8
GiB = 1 << 30
MB = 1_000_000


@dataclass(frozen=True, slots=True)
class Scenario:
    """One training job on eight GPUs, one process, synchronous data parallelism.

    Times are seconds and means; the loop varies them by its seeded generator.
    """

    id: str
    title: str
    description: str

    batch_per_gpu: int
    layers: int  # kernels per step and GPU: about 37 a layer
    compute_s: float  # kernel time per step and GPU, apart from collectives
    sm_fill: float = 1.0  # how much of the GPU a kernel fills, against one of a large batch

    launch_s: float = 22e-6  # host time per kernel launch, on the thread of its GPU
    function_start_s: float = 0.8e-3  # from the batch in hand to the first launch
    host_gap_s: float = 2.5e-3  # Python between steps: callbacks, logs
    gpu0_extra_s: float = 0.0  # kernel time that GPU 0 has on top of its share
    gpu0_extra_kernels: int = 0
    gather_bytes: int = 0  # what each other GPU sends GPU 0 for that

    input_s: float = 0.15  # the pipeline's time for one global batch
    input_variation: float = 0.12  # standard deviation of its logarithm
    input_workers: int = 64  # busy tf.data threads while it works
    prefetch_batches: int = 4
    record_bytes: int = 115_000  # of one example as stored
    dataset_on_network: bool = False
    example_bytes: int = 224 * 224 * 3 * 4  # of one example as copied to the GPU
    copy_bytes_per_s: float = 50e9  # one GPU's host-to-device copies
    copy_pinned: bool = True

    gradient_bytes: int = 1_216 * MB
    allreduce_buckets: int = 6
    allreduce_bytes_per_s: float = 205e9  # gradient bytes over the time of one all-reduce

    steps_per_epoch: int = 200
    eval_steps: int = 40
    checkpoint_bytes: int = 3_650 * MB  # weights and both Adam moments
    checkpoint_write_bytes_per_s: float = 1.8e9

    allocator_peak_bytes: int = 68 * GiB
    gpu0_allocator_peak_bytes: int | None = None  # None: as on the others


_ALL = (
    Scenario(
        id="gpu0-oversubscribed",
        title="GPU 0 does more work than the others",
        description="teacher model and metrics of the whole batch run on GPU 0; the other seven wait for it in NCCL",
        batch_per_gpu=160, layers=12, compute_s=0.150,
        gpu0_extra_s=0.186, gpu0_extra_kernels=150, gather_bytes=96 * MB,
        input_s=0.21, steps_per_epoch=215, eval_steps=90,
        allocator_peak_bytes=41 * GiB, gpu0_allocator_peak_bytes=67 * GiB,
    ),
    Scenario(
        id="input-bound",
        title="The GPUs wait for the input pipeline",
        description="decoding and augmenting on the CPU takes longer than the GPUs' work; the prefetch buffer is empty",
        batch_per_gpu=160, layers=12, compute_s=0.150,
        input_s=0.34, input_workers=88, prefetch_batches=2, dataset_on_network=True,
        steps_per_epoch=220, eval_steps=30, allocator_peak_bytes=62 * GiB,
    ),
    Scenario(
        id="launch-bound",
        title="The host launches kernels too slowly",
        description="a small model in thousands of short kernels, launched by eight replicas that share one process: "
                    "each is done long before the next one arrives",
        batch_per_gpu=8, layers=27, compute_s=24e-3, sm_fill=0.6,
        launch_s=200e-6, input_s=0.05, input_workers=24,
        steps_per_epoch=330, eval_steps=50, gradient_bytes=172 * MB, checkpoint_bytes=516 * MB,
        allocator_peak_bytes=7 * GiB,
    ),
    Scenario(
        id="healthy",
        title="All GPUs busy, nothing to mend",
        description="input and launches run ahead of the GPUs, collectives hide behind compute",
        batch_per_gpu=256, layers=12, compute_s=0.285, input_s=0.17, steps_per_epoch=250, eval_steps=50,
    ),
)

SCENARIOS: dict[str, Scenario] = {s.id: s for s in _ALL}

# It shows at a glance what other monitors hide: their utilization reads 100 % on all eight
# GPUs while SM activity says that one works and seven wait.
DEFAULT_SCENARIO = "gpu0-oversubscribed"


def find_scenario(name: str) -> Scenario:
    """The scenario of that id; raises GputopError (exit status 2) listing all if there is none."""
    scenario = SCENARIOS.get(name.strip().lower().replace("_", "-"))
    if scenario is None:
        raise GputopError(f"there is no demo scenario {name!r}", f"Scenarios:\n{describe()}", EXIT_USAGE)
    return scenario


def describe() -> str:
    """All scenarios, a line each."""
    return "\n".join(f"  {s.id:<20} {s.description}" for s in _ALL)
