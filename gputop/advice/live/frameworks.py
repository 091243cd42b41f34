"""Words of the live findings that differ between TensorFlow, JAX and PyTorch jobs (:mod:`gputop.core.framework`)."""

from __future__ import annotations

from collections.abc import Mapping

MIXED_PRECISION = {
    "tensorflow": 'tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")',
    "jax": "params, batch = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (params, batch))",
    "pytorch": 'with torch.autocast("cuda", dtype=torch.bfloat16):\n    loss = loss_fn(model(x), y)',
}


def a_trace(framework: str) -> str:
    """Source that shows more than live figures, as a sentence calls it."""
    return "a trace of torch.profiler (gputop analyze)" if framework == "pytorch" else "a capture"


def take_a_trace(framework: str) -> str:
    """The same as an instruction."""
    return ("Record a trace with torch.profiler and run gputop analyze on it" if framework == "pytorch" else
            "Capture a trace")


def no_figure(framework: str) -> str:
    """Reason why there is no figure for the gain."""
    return f"live samples show no steps: {a_trace(framework)} gives the value"


def code_for(framework: str, snippets: Mapping[str, str]) -> str:
    """The code for a job of this framework; where that is not known TensorFlow's, called so."""
    return snippets.get(framework) or f"# in TensorFlow:\n{snippets['tensorflow']}"
