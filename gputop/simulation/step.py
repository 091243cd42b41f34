"""One step, simulated: launches in order on one host thread per GPU, streams that run what was
launched in order, collectives that end together on all GPUs.

Times are nanoseconds from the moment the step has its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gputop.simulation.program import Phase, Program, StepKind, Stream
from gputop.simulation.scenarios import Scenario

I64 = npt.NDArray[np.int64]

LAUNCH_LATENCY_NS = 2_000  # from the end of the launch call to the earliest start on an idle stream
STREAM_GAP_NS = 900  # between two operations back to back on one stream
THREAD_STAGGER_NS = 40_000  # the replicas' threads start one after the other
CALL_SHARE = 0.6  # of a launch's host time inside the driver's call; the rest is the executor's
SYNC_NS = 45_000  # from the last result on the host to Python going on
_KERNEL_VARIATION = 0.012
_GPU_VARIATION = 0.004


@dataclass(frozen=True, slots=True)
class StepOps:
    """The operations of one GPU in one step, rows as in its :class:`Program`."""

    program: Program
    start_ns: I64
    end_ns: I64
    launch_ns: I64
    launch_end_ns: I64
    transfer_ns: I64  # of a collective: its last part, in which data moves (0 elsewhere)

    def rows(self, stream: Stream) -> npt.NDArray[np.intp]:
        return np.flatnonzero(self.program.stream == stream)


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """``body_ns``: until Python goes on; ``issued_ns``: until the host threads have launched everything."""

    kind: StepKind
    gpus: tuple[StepOps, ...]
    body_ns: int
    issued_ns: int


def run_in_order(ready_ns: I64, duration_ns: I64, floor_ns: int) -> tuple[I64, I64]:
    """Start and end of operations on one stream, which runs them in order.

    Each starts when it is ready and the one before has ended (plus the gap of the stream);
    the first not before ``floor_ns``.
    """
    if not len(ready_ns):
        return ready_ns, ready_ns
    spacing = duration_ns + STREAM_GAP_NS
    before = np.cumsum(spacing) - spacing
    slack = ready_ns - before
    slack[0] = max(slack[0], floor_ns)
    start = before + np.maximum.accumulate(slack)
    return start, start + duration_ns


class _Gpu:
    """One GPU while its step is simulated."""

    def __init__(self, gpu: int, program: Program, scenario: Scenario, rng: np.random.Generator) -> None:
        n = len(program)
        self.program = program
        self.start = np.zeros(n, np.int64)
        self.end = np.zeros(n, np.int64)
        self.transfer = np.zeros(n, np.int64)
        factor = 1.0 + _GPU_VARIATION * rng.standard_normal()
        wobble = 1.0 + _KERNEL_VARIATION * np.clip(rng.standard_normal(n), -3, 3)
        self.duration = np.maximum(program.duration_ns * factor * wobble, 1_000).astype(np.int64)
        cost = (scenario.launch_s * 1e9 * np.clip(1.0 + 0.15 * rng.standard_normal(n), 0.5, 2.0)).astype(np.int64)
        begin = int(scenario.function_start_s * 1e9) + gpu * THREAD_STAGGER_NS
        self.launch = begin + np.cumsum(cost) - cost
        self.launch_end = self.launch + (cost * CALL_SHARE).astype(np.int64)
        self.issued = int((self.launch + cost).max()) if n else 0

    def rows(self, phase: Phase, stream: Stream) -> npt.NDArray[np.intp]:
        return np.flatnonzero((self.program.phase == phase) & (self.program.stream == stream))

    def run(self, phase: Phase, stream: Stream, floor_ns: int) -> int:
        """Run that part on its stream; returns when its last operation ends (or the floor if there is none)."""
        rows = self.rows(phase, stream)
        ready = self.launch_end[rows] + LAUNCH_LATENCY_NS
        self.start[rows], self.end[rows] = run_in_order(ready, self.duration[rows], floor_ns)
        return int(self.end[rows[-1]]) if len(rows) else floor_ns


def simulate_step(
    kind: StepKind, programs: Sequence[Program], scenario: Scenario, rng: np.random.Generator
) -> SimulatedStep:
    """Run one step on all GPUs."""
    gpus = [_Gpu(i, program, scenario, rng) for i, program in enumerate(programs)]
    forward = [g.run(Phase.FORWARD, Stream.COMPUTE, g.run(Phase.INPUT, Stream.H2D, 0)) for g in gpus]
    gathered = [g.run(Phase.GATHER, Stream.P2P, end) for g, end in zip(gpus, forward, strict=True)]
    extra = []
    for g, end in zip(gpus, forward, strict=True):
        waits = len(g.rows(Phase.EXTRA, Stream.COMPUTE)) > 0
        extra.append(g.run(Phase.EXTRA, Stream.COMPUTE, max(gathered) if waits else end))
    backward = [g.run(Phase.BACKWARD, Stream.COMPUTE, end + STREAM_GAP_NS) for g, end in zip(gpus, extra, strict=True)]
    reduced = _all_reduce(gpus)
    body, issued = 0, 0
    for g, end in zip(gpus, backward, strict=True):
        applied = g.run(Phase.APPLY, Stream.COMPUTE, max(reduced, end) + STREAM_GAP_NS)
        body = max(body, g.run(Phase.OUTPUT, Stream.D2H, applied))
        issued = max(issued, g.issued)
    ops = tuple(StepOps(g.program, g.start, g.end, g.launch, g.launch_end, g.transfer) for g in gpus)
    return SimulatedStep(kind, ops, max(body, issued) + SYNC_NS, issued)


def _all_reduce(gpus: Sequence[_Gpu]) -> int:
    """Every collective starts on a GPU when its gradients are there, moves data once it runs on
    all GPUs, and ends on all at once. Returns when the last one ends."""
    rows = [g.rows(Phase.BACKWARD, Stream.COLLECTIVE) for g in gpus]
    end = 0
    for i in range(len(rows[0])):
        starts = []
        for g, own in zip(gpus, rows, strict=True):
            row = own[i]
            gradients = int(g.end[row - 1])  # the kernel launched before it
            starts.append(max(int(g.launch_end[row]) + LAUNCH_LATENCY_NS, gradients, end + STREAM_GAP_NS))
        transfer = int(gpus[0].duration[rows[0][i]])
        end = max(starts) + transfer
        for g, own, start in zip(gpus, rows, starts, strict=True):
            g.start[own[i]], g.end[own[i]], g.transfer[own[i]] = start, end, transfer
    return end
