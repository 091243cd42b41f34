"""gputop: why the GPUs are not at 100 %, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gputop.comparison.compare import compare as compare
    from gputop.diagnosis.diagnose import analyze

__version__ = "0.1.0"
__all__ = ["__version__", "analyze", "compare"]


def __getattr__(name: str) -> Any:
    # Lazy: the monitor's first frame must not wait for NumPy and the trace engine.
    if name == "analyze":
        from gputop.diagnosis.diagnose import analyze

        return analyze
    if name == "compare":
        from gputop.comparison.compare import compare

        return compare
    raise AttributeError(f"module 'gputop' has no attribute {name!r}")
