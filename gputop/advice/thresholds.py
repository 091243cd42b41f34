"""Every threshold of the rules on traces: its value, its unit and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass

_OWN = "gputop: chosen so that "


@dataclass(frozen=True, slots=True)
class TraceThreshold:
    id: str  # rule, dot, what it limits
    value: float
    unit: str
    source: str


_TABLE = (
    TraceThreshold("input_bound.share", 0.05, "ratio",
                   "XProf: input 5 % of the step is moderate (20 % high); PyTorch's TensorBoard plugin: loader > 5 %"),
    TraceThreshold("input_bound.steps", 2, "count", "TraceML: warns from 2 steps on (and is sure from 20)"),
    TraceThreshold("launch_bound.share", 0.03, "ratio", "XProf: kernel launch 3 % of the step is moderate (15 % high)"),
    TraceThreshold("launch_bound.deep_queue_s", 0.01, "s",
                   _OWN + "a queue tens of milliseconds deep, as of a V100 that is 98 % busy, is called healthy"),
    TraceThreshold("launch_bound.short_kernel_s", 40e-6, "s",
                   "launch latency in TensorFlow is 20-40 µs: shorter kernels leave the GPU waiting"),
    TraceThreshold("replica_imbalance.ratio", 1.10, "ratio", "TraceML: straggler, warning at 10 % (critical at 20 %)"),
    TraceThreshold("replica_imbalance.share", 0.03, "ratio", "XProf: any other part of 3 % of the step is moderate"),
    TraceThreshold("replica_imbalance.took_part", 0.10, "ratio",
                   _OWN + "GPUs with under a tenth of the heaviest one's work count as unused, not as light replicas"),
    TraceThreshold("copies_excessive.share", 0.05, "ratio",
                   "XProf: input (which holds H2D) and output 5 % of the step are moderate (20 % high)"),
    TraceThreshold("copies_excessive.pageable", 0.5, "ratio",
                   _OWN + "pinning is advised only where most of the copy time is known to be pageable"),
    TraceThreshold("batch_size_headroom.compute", 0.5, "ratio",
                   "PyTorch's TensorBoard plugin: larger batch where GPU utilization is below 50 %"),
    TraceThreshold("batch_size_headroom.memory", 0.9, "ratio",
                   "PyTorch's TensorBoard plugin: memory above 90 % is a risk; TraceML warns at 92 %"),
    TraceThreshold("batch_size_headroom.factor", 2.0, "ratio",
                   _OWN + "the batch can at least double even if all memory in use grew with it"),
    TraceThreshold("batch_size_headroom.factor_max", 8.0, "ratio",
                   _OWN + "one change does not alter the optimisation problem beyond recognition"),
    TraceThreshold("batch_size_headroom.share", 0.03, "ratio", "as launch_bound.share"),
)

THRESHOLDS: dict[str, TraceThreshold] = {t.id: t for t in _TABLE}


def limit(threshold_id: str) -> float:
    """The value of a threshold; KeyError for one that the table does not have."""
    return THRESHOLDS[threshold_id].value


def source(*threshold_ids: str) -> str:
    """Where these thresholds come from, in one line."""
    return "; ".join(dict.fromkeys(THRESHOLDS[t].source for t in threshold_ids))
