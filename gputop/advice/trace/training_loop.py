"""The style of the training loop, for advice that must be true for it: a trace names no versions."""

from __future__ import annotations

from gputop.advice.trace.facts import TraceFacts
from gputop.analysis.host.host_causes import runs_eagerly

KERAS2, KERAS3, CUSTOM, EAGER, JAX, PYTORCH, UNKNOWN = (
    "Keras 2", "Keras 3", "custom", "eager", "JAX", "PyTorch", "unknown")


def training_loop(facts: TraceFacts) -> str:
    """Keras 2 and 3 by the names of their step functions; a loop of one's own runs other functions, or none."""
    if facts.framework in ("jax", "pytorch"):
        return JAX if facts.framework == "jax" else PYTORCH
    functions = facts.analysis.functions
    names = [use.name for use in functions.functions] if functions is not None else []
    anchor = facts.steps.times.anchor if facts.steps is not None else ""
    if any(name.startswith(("one_step_on_", "multi_step_on_")) for name in names):
        return KERAS3
    if any(name.startswith(("train_function", "test_function", "predict_function")) for name in names) or (
            anchor.startswith(("train markers", "test markers")) and facts.framework == "tensorflow"):
        return KERAS2
    if "Keras' step function" in anchor:
        return KERAS3
    if runs_eagerly(facts.analysis.ops):
        return EAGER
    return CUSTOM if names or facts.framework == "tensorflow" else UNKNOWN
