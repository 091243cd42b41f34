"""Words of the live findings that differ between TensorFlow, JAX and PyTorch jobs (:mod:`gputop.core.framework`)."""

from __future__ import annotations

from collections.abc import Mapping

MIXED_PRECISION = {
    "tensorflow": 'tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")',
    "jax": "params, batch = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (params, batch))",
    "pytorch": 'with torch.autocast("cuda", dtype=torch.bfloat16):\n    loss = loss_fn(model(x), y)',
}
NO_FIGURE = "live samples show no steps: a capture gives the value"  # for the gain


def code_for(framework: str, snippets: Mapping[str, str]) -> str:
    """The code for a job of this framework; where that is not known TensorFlow's, called so."""
    return snippets.get(framework) or f"# in TensorFlow:\n{snippets['tensorflow']}"
