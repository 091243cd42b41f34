"""gputop: why the GPUs are not at 100 %, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gputop.trace.analysis import analyze as analyze

__version__ = "0.1.0"
__all__ = ["__version__", "analyze"]


def __getattr__(name: str) -> Any:
    # Lazy: the monitor's first frame must not wait for NumPy and the trace engine.
    if name == "analyze":
        from gputop.trace.analysis import analyze

        return analyze
    raise AttributeError(f"module 'gputop' has no attribute {name!r}")
