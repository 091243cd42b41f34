"""Every threshold of the live rules: its value, its unit and where it comes from.

A rule that shows a finding at ``…enter`` keeps it until the signal is past ``…leave``, so
that a value near the limit does not make the panel flicker.
"""

from __future__ import annotations

from dataclasses import dataclass

_OWN = "gputop: chosen so that "


@dataclass(frozen=True, slots=True)
class LiveThreshold:
    id: str  # rule, dot, what it limits
    value: float
    unit: str
    source: str


_TABLE = (
    # For all rules.
    LiveThreshold("window_s", 30.0, "s",
                  _OWN + "dozens of ordinary steps (0.1-1 s) lie in it and one odd step does not decide"),
    LiveThreshold("coverage", 0.8, "ratio", _OWN + "a rule judges only a window it has really seen"),
    LiveThreshold("slice_s", 5.0, "s", _OWN + "a slice holds several steps; a rule can ask for most slices to agree"),
    LiveThreshold("min_readings", 5.0, "count", _OWN + "a mean rests on more than a few ticks at slow intervals"),

    LiveThreshold("idle_gpu.window_s", 60.0, "s",
                  _OWN + "checkpoints and short validation passes, seconds long, are not called idle"),
    LiveThreshold("idle_gpu.all_window_s", 120.0, "s",
                  _OWN + "longer pauses of a whole job (validation on the host, loading a checkpoint) are not called "
                         "idle"),
    LiveThreshold("idle_gpu.age_s", 120.0, "s",
                  _OWN + "start-up, compiling and autotuning, which happen on one GPU first, are over"),
    LiveThreshold("idle_gpu.enter", 0.01, "ratio", _OWN + "only a GPU that did practically nothing counts"),
    LiveThreshold("idle_gpu.leave", 0.03, "ratio", _OWN + "a single stray kernel does not hide the finding"),
    LiveThreshold("idle_gpu.peer_busy", 0.10, "ratio",
                  _OWN + "the other GPUs clearly work, if slowly (XProf and HTA give no limit for this)"),

    LiveThreshold("unused_gpu.window_s", 60.0, "s", _OWN + "the gap between two jobs of a queue is not reported"),
    LiveThreshold("unused_gpu.peer_busy", 0.10, "ratio", "as idle_gpu.peer_busy"),

    LiveThreshold("gpu0_oversubscribed.ratio_enter", 1.5, "ratio",
                  _OWN + "it is far above the 20 % at which HTA and TraceML call a rank a straggler, since SM "
                         "activity is not work alone"),
    LiveThreshold("gpu0_oversubscribed.ratio_leave", 1.2, "ratio", "TraceML: straggler, critical at 20 %"),
    LiveThreshold("gpu0_oversubscribed.gap_enter", 0.15, "ratio",
                  _OWN + "two nearly idle GPUs are not compared by ratio alone"),
    LiveThreshold("gpu0_oversubscribed.gap_leave", 0.07, "ratio", _OWN + "it is about half of the gap to enter"),
    LiveThreshold("gpu0_oversubscribed.peer_active", 0.02, "ratio",
                  _OWN + "phases in which only one GPU works (validation, autotuning) are left out"),
    LiveThreshold("gpu0_oversubscribed.slices_enter", 0.8, "ratio", _OWN + "it is the rule of the run, not a phase"),
    LiveThreshold("gpu0_oversubscribed.slices_leave", 0.5, "ratio", _OWN + "a single even slice does not hide it"),

    LiveThreshold("shared_gpu.together_s", 10.0, "s",
                  _OWN + "a job that ends while the next one starts is not reported"),
    LiveThreshold("shared_gpu.memory_ratio", 0.02, "ratio",
                  _OWN + "a bare CUDA context (some 500 MB) on a data-centre card is not called a second job"),
    LiveThreshold("shared_gpu.sm_high", 0.15, "ratio", "contract of severities: 15 % is high"),
    LiveThreshold("shared_gpu.sm_medium", 0.05, "ratio", "contract of severities: 5 % is medium"),

    LiveThreshold("power_capped.share_enter", 0.5, "ratio", _OWN + "capping is the usual state, not a peak"),
    LiveThreshold("power_capped.share_leave", 0.25, "ratio", _OWN + "it is half of the share to enter"),
    LiveThreshold("power_capped.power_enter", 0.98, "ratio",
                  _OWN + "mean power that close to the limit means the limit decides"),
    LiveThreshold("power_capped.power_leave", 0.95, "ratio", _OWN + "it lies just under the value to enter"),
    LiveThreshold("power_capped.clock_enter", 0.90, "ratio",
                  _OWN + "ordinary boost steps of a few per cent are not reported"),
    LiveThreshold("power_capped.clock_leave", 0.95, "ratio", _OWN + "it lies half-way back to the full clock"),
    LiveThreshold("power_capped.medium", 0.25, "ratio",
                  _OWN + "clocks a quarter down are more than heavy matrix kernels cost on a full limit"),

    LiveThreshold("memory_preallocated.enter", 0.90, "ratio",
                  "TensorFlow maps nearly all device memory at start; 90 % as in the PyTorch plugin's memory limit"),
    LiveThreshold("memory_preallocated.leave", 0.85, "ratio", _OWN + "it lies just under the value to enter"),
    LiveThreshold("memory_preallocated.flat", 0.005, "ratio",
                  _OWN + "what is reserved once does not move; memory that grows and shrinks is another matter"),

    LiveThreshold("no_fine_metrics.window_s", 10.0, "s",
                  "NVML: GPM has no value in its first two ticks; " + _OWN + "slow intervals have passed them too"),
    LiveThreshold("hardware_error.silent_s", 10.0, "s",
                  _OWN + "a driver that is slow while a job starts is not called dead"),
)

LIVE_THRESHOLDS: dict[str, LiveThreshold] = {t.id: t for t in _TABLE}


def limit(threshold_id: str) -> float:
    """The value of a threshold; raises KeyError for an id that is not in the table."""
    return LIVE_THRESHOLDS[threshold_id].value
