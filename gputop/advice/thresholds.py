"""Every threshold of the rules, live and on traces: its value, its unit and where it comes from.

A live rule that shows a finding at ``…enter`` keeps it until the signal is past ``…leave``, so
that a value near the limit does not make the panel flicker.
"""

from __future__ import annotations

from dataclasses import dataclass

_OWN = "gputop: chosen so that "


@dataclass(frozen=True, slots=True)
class Threshold:
    id: str  # rule, dot, what it limits
    value: float
    unit: str
    source: str


_TRACE = (
    Threshold("few.steps", 3, "count", _OWN + "one odd step in a short capture does not make a finding high"),
    Threshold("few.kernels", 200, "count",
              _OWN + "without steps, a finding is high only over what a GPU does in some milliseconds at least"),

    Threshold("input_bound.share", 0.05, "ratio",
              "XProf: input 5 % of the step is moderate (20 % high); PyTorch's TensorBoard plugin: loader > 5 %"),
    Threshold("input_bound.steps", 2, "count", "TraceML: warns from 2 steps on (and is sure from 20)"),
    Threshold("launch_bound.share", 0.03, "ratio", "XProf: kernel launch 3 % of the step is moderate (15 % high)"),
    Threshold("launch_bound.deep_queue_s", 0.01, "s",
              _OWN + "a queue tens of milliseconds deep, as of a V100 that is 98 % busy, is called healthy"),
    Threshold("launch_bound.short_kernel_s", 40e-6, "s",
              "launch latency in TensorFlow is 20-40 µs: shorter kernels leave the GPU waiting"),
    Threshold("replica_imbalance.ratio", 1.10, "ratio", "TraceML: straggler, warning at 10 % (critical at 20 %)"),
    Threshold("replica_imbalance.share", 0.03, "ratio", "XProf: any other part of 3 % of the step is moderate"),
    Threshold("replica_imbalance.took_part", 0.10, "ratio",
              _OWN + "GPUs with under a tenth of the heaviest one's work count as unused, not as light replicas"),
    Threshold("copies_excessive.share", 0.05, "ratio",
              "XProf: input (which holds H2D) and output 5 % of the step are moderate (20 % high)"),
    Threshold("copies_excessive.pageable", 0.5, "ratio",
              _OWN + "pinning is advised only where most of the copy time is known to be pageable"),
    Threshold("batch_size_headroom.compute", 0.5, "ratio",
              "PyTorch's TensorBoard plugin: larger batch where GPU utilization is below 50 %"),
    Threshold("batch_size_headroom.memory", 0.9, "ratio",
              "PyTorch's TensorBoard plugin: memory above 90 % is a risk; TraceML warns at 92 %"),
    Threshold("batch_size_headroom.factor", 2.0, "ratio",
              _OWN + "the batch can at least double even if all memory in use grew with it"),
    Threshold("batch_size_headroom.factor_max", 8.0, "ratio",
              _OWN + "one change does not alter the optimisation problem beyond recognition"),
    Threshold("batch_size_headroom.share", 0.03, "ratio", "as launch_bound.share"),
)

_LIVE = (
    Threshold("window_s", 30.0, "s",
              _OWN + "dozens of ordinary steps (0.1-1 s) lie in it and one odd step does not decide"),
    Threshold("coverage", 0.8, "ratio", _OWN + "a rule judges only a window it has really seen"),
    Threshold("slice_s", 5.0, "s", _OWN + "a slice holds several steps; a rule can ask for most slices to agree"),
    Threshold("min_readings", 5.0, "count", _OWN + "a mean rests on more than a few ticks at slow intervals"),

    Threshold("idle_gpu.window_s", 60.0, "s",
              _OWN + "checkpoints and short validation passes, seconds long, are not called idle"),
    Threshold("idle_gpu.all_window_s", 120.0, "s",
              _OWN + "longer pauses of a whole job (validation on the host, loading a checkpoint) are not called "
                     "idle"),
    Threshold("idle_gpu.age_s", 120.0, "s",
              _OWN + "start-up, compiling and autotuning, which happen on one GPU first, are over"),
    Threshold("idle_gpu.enter", 0.01, "ratio", _OWN + "only a GPU that did practically nothing counts"),
    Threshold("idle_gpu.leave", 0.03, "ratio", _OWN + "a single stray kernel does not hide the finding"),
    Threshold("idle_gpu.peer_busy", 0.10, "ratio",
              _OWN + "the other GPUs clearly work, if slowly (XProf and HTA give no limit for this)"),

    Threshold("unused_gpu.window_s", 60.0, "s", _OWN + "the gap between two jobs of a queue is not reported"),
    Threshold("unused_gpu.enter", 0.01, "ratio", "as idle_gpu.enter"),
    Threshold("unused_gpu.leave", 0.03, "ratio", "as idle_gpu.leave"),
    Threshold("unused_gpu.peer_busy", 0.10, "ratio", "as idle_gpu.peer_busy"),

    Threshold("gpu0_oversubscribed.ratio_enter", 1.5, "ratio",
              _OWN + "it is far above the 20 % at which HTA and TraceML call a rank a straggler, since SM "
                     "activity is not work alone"),
    Threshold("gpu0_oversubscribed.ratio_leave", 1.2, "ratio", "TraceML: straggler, critical at 20 %"),
    Threshold("gpu0_oversubscribed.gap_enter", 0.15, "ratio",
              _OWN + "two nearly idle GPUs are not compared by ratio alone"),
    Threshold("gpu0_oversubscribed.gap_leave", 0.07, "ratio", _OWN + "it is about half of the gap to enter"),
    Threshold("gpu0_oversubscribed.peer_active", 0.02, "ratio",
              _OWN + "phases in which only one GPU works (validation, autotuning) are left out"),
    Threshold("gpu0_oversubscribed.slices_enter", 0.8, "ratio", _OWN + "it is the rule of the run, not a phase"),
    Threshold("gpu0_oversubscribed.slices_leave", 0.5, "ratio", _OWN + "a single even slice does not hide it"),

    Threshold("shared_gpu.together_s", 10.0, "s",
              _OWN + "a job that ends while the next one starts is not reported"),
    Threshold("shared_gpu.memory_ratio", 0.02, "ratio",
              _OWN + "a bare CUDA context (some 500 MB) on a data-centre card is not called a second job"),
    Threshold("shared_gpu.sm_high", 0.15, "ratio", "contract of severities: 15 % is high"),
    Threshold("shared_gpu.sm_medium", 0.05, "ratio", "contract of severities: 5 % is medium"),

    Threshold("power_capped.share_enter", 0.5, "ratio", _OWN + "capping is the usual state, not a peak"),
    Threshold("power_capped.share_leave", 0.25, "ratio", _OWN + "it is half of the share to enter"),
    Threshold("power_capped.power_enter", 0.98, "ratio",
              _OWN + "mean power that close to the limit means the limit decides"),
    Threshold("power_capped.power_leave", 0.95, "ratio", _OWN + "it lies just under the value to enter"),
    Threshold("power_capped.clock_enter", 0.90, "ratio",
              _OWN + "ordinary boost steps of a few per cent are not reported"),
    Threshold("power_capped.clock_leave", 0.95, "ratio", _OWN + "it lies half-way back to the full clock"),
    Threshold("power_capped.medium", 0.25, "ratio",
              _OWN + "clocks a quarter down are more than heavy matrix kernels cost on a full limit"),

    Threshold("memory_preallocated.enter", 0.90, "ratio",
              "TensorFlow maps nearly all device memory at start; 90 % as in the PyTorch plugin's memory limit"),
    Threshold("memory_preallocated.leave", 0.85, "ratio", _OWN + "it lies just under the value to enter"),
    Threshold("memory_preallocated.flat", 0.005, "ratio",
              _OWN + "what is reserved once does not move; memory that grows and shrinks is another matter"),

    Threshold("no_fine_metrics.window_s", 10.0, "s",
              "NVML: GPM has no value in its first two ticks; " + _OWN + "slow intervals have passed them too"),
    Threshold("hardware_error.silent_s", 10.0, "s",
              _OWN + "a driver that is slow while a job starts is not called dead"),
    Threshold("hardware_error.xid_window_s", 600.0, "s",
              _OWN + "somebody who looks a few minutes after the fault still sees it, and not all day"),
    Threshold("hardware_error.ecc", 1, "count", "NVIDIA, GPU memory error management: each uncorrectable error is data "
                                               "that was lost"),
)

THRESHOLDS: dict[str, Threshold] = {t.id: t for t in (*_TRACE, *_LIVE)}


def limit(threshold_id: str) -> float:
    """The value of a threshold; raises KeyError for an id that is not in the tables."""
    return THRESHOLDS[threshold_id].value


def source(*threshold_ids: str) -> str:
    """Where these thresholds come from, in one line."""
    return "; ".join(dict.fromkeys(THRESHOLDS[t].source for t in threshold_ids))
