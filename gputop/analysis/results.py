"""What the analyses of a trace yield, typed; ``to_json`` is the contract ``gputop.analysis/1``.

Times are seconds, shares ratios 0-1, unknown is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gputop.analysis.results_device import CollectiveOp, CopyTable, Kernels, KernelSizes, Replicas, to_json
from gputop.analysis.results_host import Functions, HostOps, LaunchThreads, MemoryDetail, Pipeline, StepGaps
from gputop.core.findings import Abstained, Finding
from gputop.trace.model import QualityNote

SCHEMA = "gputop.analysis/1"


@dataclass(frozen=True, slots=True)
class Steps:
    """The training steps found. ``bounds_ns`` are (start, end) pairs relative to the trace's origin.

    ``anchor`` says what marked them, ``confidence`` how sure that is ("high", "medium", "low");
    ``iterations_per_step`` is above 1 where one anchor packs several optimizer steps.
    ``dropped`` counts incomplete and warm-up steps left out. ``phase`` is "training", "evaluation"
    or "prediction" where the trace shows it, else "unknown"; ``left_out_s`` the seconds in the
    window spent in other step functions, by their phase. ``call_ends_ns`` are the ends of the
    calls or markers at which the steps begin; empty where steps rest on kernels.
    """

    anchor: str
    confidence: str
    bounds_ns: tuple[tuple[int, int], ...]
    median_s: float
    mean_s: float
    p95_s: float
    dropped: int = 0
    iterations_per_step: float = 1.0
    phase: str = "unknown"
    left_out_s: Mapping[str, float] = field(default_factory=dict)
    call_ends_ns: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return len(self.bounds_ns)

    def to_json(self) -> dict[str, Any]:
        return {
            "anchor": self.anchor, "confidence": self.confidence, "count": self.count,
            "median_s": self.median_s, "mean_s": self.mean_s, "p95_s": self.p95_s,
            "durations_s": [(end - start) / 1e9 for start, end in self.bounds_ns],
            "dropped": self.dropped, "iterations_per_step": self.iterations_per_step,
            "phase": self.phase, "left_out_s": dict(self.left_out_s),
        }


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Mean step, exclusive: the eight parts sum to the mean step time. Seconds.

    ``input`` is waiting for the input pipeline with no GPU busy, ``launch`` GPU idle while
    the host issues work too slowly, ``host`` GPU idle while the host does something else,
    ``idle`` the rest. Device parts are averaged over the GPUs that took part. Without a GPU
    in the trace all that is not ``input`` is ``host``: the CPU's computing too.
    """

    input: float
    h2d: float
    compute: float
    collectives: float
    d2h: float
    launch: float
    host: float
    idle: float

    def to_json(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @property
    def total(self) -> float:
        return sum(self.to_json().values())


@dataclass(frozen=True, slots=True)
class GpuUse:
    """One GPU from its first to its last device event; shares are of that ``window_s``.

    The step's :class:`Breakdown` and ``compute_s_per_step`` go by steps instead. A GPU on
    which nothing ran has shares of 0 over the window of the others.
    """

    gpu: int
    window_s: float
    busy: float
    compute: float
    collectives: float
    collectives_exposed: float
    copies: float
    idle_host_fault: float | None  # share of the idle time whose next launch began after the idle did
    launch_delay_median_s: float | None
    kernels: int
    kernels_per_s: float
    kernel_median_s: float | None
    compute_s_per_step: float | None  # union of compute kernels
    copies_s: Mapping[str, float] = field(default_factory=dict)  # summed by h2d, d2h, d2d, p2p
    copies_bytes: Mapping[str, int | None] = field(default_factory=dict)
    copies_count: Mapping[str, int] = field(default_factory=dict)
    copies_pageable_s: float | None = None  # part of h2d+d2h with a pageable host end; None: kind unknown
    tensor_core_time: float | None = None
    kernel_time_by_type: Mapping[str, float] | None = None
    copies_exposed: float | None = None  # copies of any direction with neither compute nor collectives beside them

    def to_json(self) -> dict[str, Any]:
        out = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name in ("copies_s", "copies_bytes", "copies_count", "kernel_time_by_type"):
            if out[name] is not None:
                out[name] = dict(out[name])
        return out


@dataclass(frozen=True, slots=True)
class Collectives:
    """Collectives matched across GPUs by order. ``waiting`` = 1 - transfer / their summed time, over those
    that all GPUs have in the window."""

    count_per_step: float | None
    summed_s: float
    transfer_s: float | None
    waiting: float | None
    last_to_arrive: Mapping[int, int] | None  # GPU -> how many collectives it was last at
    reason: str | None = None  # why they could not be matched
    operations: tuple[CollectiveOp, ...] = ()

    def to_json(self) -> dict[str, Any]:
        last = self.last_to_arrive
        return {
            "count_per_step": self.count_per_step, "summed_s": self.summed_s,
            "transfer_s": self.transfer_s, "waiting": self.waiting,
            "last_to_arrive": None if last is None else {str(k): v for k, v in last.items()},
            "reason": self.reason, "operations": to_json(self.operations),
        }


@dataclass(frozen=True, slots=True)
class AllocatorUse:
    allocator: str
    peak_bytes: int  # highest ever in use since the allocator was made
    capacity_bytes: int
    peak_in_window_bytes: int | None = None  # highest in use while the trace ran
    detail: MemoryDetail | None = None

    def to_json(self) -> dict[str, Any]:
        return {"allocator": self.allocator, "peak_bytes": self.peak_bytes, "capacity_bytes": self.capacity_bytes,
                "peak_in_window_bytes": self.peak_in_window_bytes, **(to_json(self.detail) or {})}


@dataclass(frozen=True, slots=True)
class InputPipeline:
    """Waiting for input. ``wait_s_per_step`` is the mean time a step sat in IteratorGetNext."""

    wait_s_per_step: float
    wait_ratio: float  # of the step
    stages: Mapping[str, float]  # tf.data stage -> self time, seconds in the window
    how: str  # which events it rests on
    pipelines: tuple[Pipeline, ...] = ()  # tf.data's, longest waited for first


@dataclass(frozen=True, slots=True)
class TypicalStep:
    """The step whose length is nearest to the median.

    It is cut into ``slots`` of equal length; ``gpus`` pairs each GPU's number with its runs of
    slots (part, first, end), end exclusive. A slot shows the part of the breakdown that took most of it.
    """

    step: int  # counted from 0 in the trace
    duration_s: float
    slots: int
    gpus: tuple[tuple[int, tuple[tuple[str, int, int], ...]], ...]

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step, "duration_s": self.duration_s, "slots": self.slots,
                "gpus": [{"gpu": gpu, "runs": [list(run) for run in runs]} for gpu, runs in self.gpus]}


@dataclass(slots=True)
class Analysis:
    """Everything found in one trace."""

    paths: list[str]
    format: str
    hosts: list[str]
    window_s: float
    events: int
    simulated: bool
    quality: list[QualityNote]
    steps: Steps | None
    breakdown: Breakdown | None
    gpus: list[GpuUse]
    collectives: Collectives | None
    memory: list[AllocatorUse]
    input: InputPipeline | None
    gaps: StepGaps | None = None
    ops: HostOps | None = None
    functions: Functions | None = None
    launch_threads: LaunchThreads | None = None
    findings: tuple[Finding, ...] = ()
    abstained: tuple[Abstained, ...] = ()
    kernels: Kernels | None = None
    kernel_sizes: tuple[KernelSizes, ...] = ()
    copies: CopyTable | None = None
    replicas: Replicas | None = None
    typical_step: TypicalStep | None = None

    def _breakdown_json(self) -> dict[str, float | None] | None:
        """Without a GPU in the trace the parts that happen on one are unknown, not nothing."""
        if self.breakdown is None:
            return None
        parts = self.breakdown.to_json()
        return {name: value if self.gpus or name in ("input", "host") else None for name, value in parts.items()}

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "simulated": self.simulated,
            "trace": {
                "paths": self.paths, "format": self.format, "hosts": self.hosts, "window_s": self.window_s,
                "events": self.events,
                "quality": [{"id": q.id, "message": q.message} for q in self.quality],
            },
            "steps": self.steps.to_json() if self.steps else None,
            "breakdown": self._breakdown_json(),
            "input": None if self.input is None else {
                "wait_s_per_step": self.input.wait_s_per_step, "wait_ratio": self.input.wait_ratio,
                "stages": dict(self.input.stages), "how": self.input.how,
                "pipelines": to_json(self.input.pipelines),
            },
            "gaps": to_json(self.gaps), "ops": to_json(self.ops), "functions": to_json(self.functions),
            "launch_threads": to_json(self.launch_threads),
            "gpus": [g.to_json() for g in self.gpus],
            "collectives": self.collectives.to_json() if self.collectives else None,
            "memory": [m.to_json() for m in self.memory],
            "kernels": to_json(self.kernels),
            "kernel_sizes": to_json(self.kernel_sizes),
            "copies": to_json(self.copies),
            "replicas": to_json(self.replicas),
            "typical_step": self.typical_step.to_json() if self.typical_step else None,
            "findings": [f.to_json() for f in self.findings],
            "abstained": [a.to_json() for a in self.abstained],
        }
