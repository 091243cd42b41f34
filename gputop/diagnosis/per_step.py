"""What sums over the window of a trace and its GPUs are per step."""

from __future__ import annotations

from typing import NamedTuple

from gputop.analysis.results import Analysis

_FILLED = 0.8  # of the window's work by whole steps; less may be evaluation
_CUT_STEPS = 2.5  # parts of which are in the window: one at each end, either of them longer than the mean


class PerStep(NamedTuple):
    """What to divide by: a sum over the window by ``steps``, one over all GPUs, too, by ``both``.

    ``unit`` is "step" or "period"; "window" where steps do not fill it, and then ``steps`` is 1.
    """

    steps: float
    gpus: int
    unit: str

    @property
    def both(self) -> float:
        return self.steps * self.gpus

    def text(self, by_gpu: bool = True) -> str:
        """What the quotients are: "per step and GPU"."""
        gpu = by_gpu and self.gpus > 1
        if self.unit == "window":
            return "per GPU in the window" if gpu else "in the window"
        return f"per {self.unit}{' and GPU' if gpu else ''}"

    @property
    def basis(self) -> str:
        """The same with how it was had: "per step and GPU (mean of the window)"."""
        return self.text() + (" (mean of the window)" if self.unit != "window" else "")


def per_step(a: Analysis) -> PerStep:
    """The steps that the window is worth, and the GPUs at work."""
    gpus = max(1, sum(gpu.kernels > 0 for gpu in a.gpus))
    s, steps = a.steps, _steps_worth(a)
    if s is None or steps is None:
        return PerStep(1.0, gpus, "window")
    # The window cuts a step at each end, and what is left out of the steps was seen: more is other work.
    most = max(s.count + (0 if s.left_out_s else max(_CUT_STEPS, s.dropped)), s.count / _FILLED)
    return PerStep(steps, gpus, s.unit) if steps <= most else PerStep(1.0, gpus, "window")


def _steps_worth(a: Analysis) -> float | None:
    """By the work of the compute kernels in it, of which that of a step is known; else by its length."""
    if a.steps is None or not a.steps.mean_s:
        return None
    in_steps = [sum(sizes.time_s_per_step or ()) for sizes in a.kernel_sizes]
    if in_steps and all(in_steps):
        return sum(sum(sizes.time_s) for sizes in a.kernel_sizes) / sum(in_steps)
    return a.trace.window_s / a.steps.mean_s
