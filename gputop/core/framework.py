"""The framework that a process trains with, by the libraries it has mapped."""

from __future__ import annotations

LABELS = {"tensorflow": "TensorFlow", "jax": "JAX", "pytorch": "PyTorch"}
# libtensorflow_framework.so and _cc.so, what lies in JAX's folder, libtorch_cpu.so and _cuda.so.
_LIBRARIES = {"tensorflow": b"/libtensorflow_", "jax": b"/jaxlib/", "pytorch": b"/libtorch_c"}


def loaded_frameworks(maps: bytes) -> frozenset[str]:
    """Keys of :data:`LABELS` whose libraries stand in this /proc/PID/maps (proc_pid_maps(5))."""
    return frozenset(framework for framework, library in _LIBRARIES.items() if library in maps)


def framework_of(maps: bytes) -> str:
    """The one that trains; empty: none of them, or it cannot be told which.

    A JAX job often maps TensorFlow too, for tf.data; the other way round is rare. Of PyTorch and another one either may
    be there for its data loaders or its summaries alone.
    """
    loaded = loaded_frameworks(maps)
    if loaded == {"tensorflow", "jax"}:
        return "jax"
    return next(iter(loaded)) if len(loaded) == 1 else ""
