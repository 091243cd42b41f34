"""What the host thread of one GPU issues in one step, in order: the input of the simulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from gputop.simulation import kernels
from gputop.simulation.scenarios import GPU_COUNT, MB, Scenario


class Stream(IntEnum):
    COMPUTE = 0
    COLLECTIVE = 1
    H2D = 2
    D2H = 3
    P2P = 4


class Phase(IntEnum):
    """Parts of a step that wait for each other, in this order."""

    INPUT = 0
    FORWARD = 1
    GATHER = 2
    EXTRA = 3
    BACKWARD = 4  # with the all-reduces of its gradients
    APPLY = 5
    OUTPUT = 6


class StepKind(IntEnum):
    TRAIN = 0
    EVAL = 1
    CHECKPOINT = 2


# Time on the device of a copy of a few bytes, and device-to-host rates of weights: cudaMemcpy
# from pageable memory moves through a staging buffer, so a checkpoint does not reach link rate.
SMALL_COPY_NS = 1_600
CHECKPOINT_COPY_BYTES_PER_S = 11e9
NVLINK_BYTES_PER_S = 220e9
_LOSS_BYTES = 8
_CHECKPOINT_CHUNK_BYTES = 64 * MB


@dataclass(frozen=True, slots=True)
class Program:
    """One row per device operation, in launch order.

    ``kernel`` indexes ``kernels.KERNEL_KEYS`` (-1: a copy or a collective), ``op`` indexes
    ``op_names`` (-1: none), ``duration_ns`` is the mean on the device (of a collective: the
    transfer alone), ``bytes`` what a copy or collective moves.
    """

    stream: npt.NDArray[np.int8]
    phase: npt.NDArray[np.int8]
    kernel: npt.NDArray[np.int16]
    op: npt.NDArray[np.int32]
    duration_ns: npt.NDArray[np.float64]
    bytes: npt.NDArray[np.int64]
    op_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.stream)


class _Builder:
    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, int, float, int]] = []
        self.ops: dict[str, int] = {}

    def add(
        self, stream: Stream, phase: Phase, duration_ns: float, kernel: int = -1, op: str = "", size: int = 0
    ) -> None:
        op_index = self.ops.setdefault(op, len(self.ops)) if op else -1
        self.rows.append((stream, phase, kernel, op_index, duration_ns, size))

    def build(self) -> Program:
        columns = list(zip(*self.rows, strict=True)) if self.rows else [()] * 6
        stream, phase, kernel, op, duration, size = columns
        return Program(
            np.array(stream, np.int8), np.array(phase, np.int8), np.array(kernel, np.int16), np.array(op, np.int32),
            np.array(duration, np.float64), np.array(size, np.int64), tuple(self.ops),
        )


def programs(scenario: Scenario, kind: StepKind) -> tuple[Program, ...]:
    """The program of each GPU for one kind of step."""
    if kind is StepKind.CHECKPOINT:
        return (_checkpoint(scenario),) + (_Builder().build(),) * (GPU_COUNT - 1)
    others = _step(scenario, kind, gpu0=False)
    gpu0 = _step(scenario, kind, gpu0=True) if scenario.gpu0_extra_s else others
    return (gpu0,) + (others,) * (GPU_COUNT - 1)


def _step(scenario: Scenario, kind: StepKind, gpu0: bool) -> Program:
    out = _Builder()
    images = scenario.batch_per_gpu * scenario.example_bytes
    labels = scenario.batch_per_gpu * 4
    for size, nanoseconds in ((images, images / scenario.copy_bytes_per_s * 1e9), (labels, SMALL_COPY_NS)):
        out.add(Stream.H2D, Phase.INPUT, nanoseconds, size=size, op="IteratorGetNext:IteratorGetNext")

    layers = scenario.layers
    forward = [(k, f"vit/encoder_{i}/{op}") for i in range(layers) for k, op in kernels.FORWARD]
    backward = [
        (k, f"gradient_tape/vit/encoder_{i}/{op}") for i in reversed(range(layers)) for k, op in kernels.BACKWARD
    ]
    apply = [(k, f"adam/encoder_{i}/{op}") for i in range(layers) for k, op in kernels.APPLY]
    scale = scenario.compute_s * 1e9 / sum(kernels.KERNELS[k].weight for k, _ in forward + backward + apply)

    def issue(items: list[tuple[str, str]], phase: Phase, scale: float) -> None:
        for key, op in items:
            out.add(Stream.COMPUTE, phase, kernels.KERNELS[key].weight * scale, kernels.KERNEL_KEYS.index(key), op)

    issue(forward, Phase.FORWARD, scale)
    if kind is StepKind.TRAIN:
        if scenario.gpu0_extra_s and gpu0:
            many = scenario.gpu0_extra_kernels
            extra = [kernels.EXTRA[i % len(kernels.EXTRA)] for i in range(many)]
            issue(extra, Phase.EXTRA, scenario.gpu0_extra_s * 1e9 / sum(kernels.KERNELS[k].weight for k, _ in extra))
        elif scenario.gpu0_extra_s:
            nanoseconds = scenario.gather_bytes / NVLINK_BYTES_PER_S * 1e9
            op = "concat_predictions/ConcatV2:ConcatV2"
            out.add(Stream.P2P, Phase.GATHER, nanoseconds, size=scenario.gather_bytes, op=op)
        _backward(out, scenario, backward, issue, scale)
        issue(apply, Phase.APPLY, scale)
    out.add(Stream.D2H, Phase.OUTPUT, SMALL_COPY_NS, size=_LOSS_BYTES, op="Identity:Identity")
    return out.build()


def _backward(
    out: _Builder, scenario: Scenario, items: list[tuple[str, str]],
    issue: Callable[[list[tuple[str, str]], Phase, float], None], scale: float,
) -> None:
    """Gradients, and after every n-th part of them the all-reduce of that part."""
    buckets = scenario.allreduce_buckets
    size = scenario.gradient_bytes // buckets
    bounds = [round(i * len(items) / buckets) for i in range(buckets + 1)]
    for bucket, (first, last) in enumerate(pairwise(bounds)):
        issue(items[first:last], Phase.BACKWARD, scale)
        duration = size / scenario.allreduce_bytes_per_s * 1e9
        op = f"CollectiveReduceV2_{bucket}:CollectiveReduceV2"
        out.add(Stream.COLLECTIVE, Phase.BACKWARD, duration, size=size, op=op)


def _checkpoint(scenario: Scenario) -> Program:
    out = _Builder()
    left = scenario.checkpoint_bytes
    while left > 0:
        size = min(left, _CHECKPOINT_CHUNK_BYTES)
        nanoseconds = size / CHECKPOINT_COPY_BYTES_PER_S * 1e9
        out.add(Stream.D2H, Phase.OUTPUT, nanoseconds, size=size, op="checkpoint/SaveV2:SaveV2")
        left -= size
    return out.build()
