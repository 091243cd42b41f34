"""gputop: why the GPUs are not at 100%, and what to do about it.

What stands in ``__all__`` is the Python API (docs/reference/python.md). All figures are in base units: seconds, bytes,
watts, ratios 0-1; None is a value that is not known. What a user can mend raises :class:`GputopError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gputop.core.version import __version__ as __version__

if TYPE_CHECKING:
    from gputop.analysis.results import Analysis
    from gputop.comparison.compare import Comparison
    from gputop.core.errors import GputopError, NoDataError
    from gputop.core.findings import Finding
    from gputop.diagnosis.diagnose import analyze
    from gputop.replay.compared_files import compare
    from gputop.replay.reader import Recording, open_recording

__all__ = ["Analysis", "Comparison", "Finding", "GputopError", "NoDataError", "Recording", "__version__", "analyze",
           "compare", "open_recording"]
_MODULES = {
    "Analysis": "gputop.analysis.results", "Comparison": "gputop.comparison.compare",
    "Finding": "gputop.core.findings", "GputopError": "gputop.core.errors", "NoDataError": "gputop.core.errors",
    "Recording": "gputop.replay.reader", "analyze": "gputop.diagnosis.diagnose",
    "compare": "gputop.replay.compared_files", "open_recording": "gputop.replay.reader",
}


def __getattr__(name: str) -> Any:
    # Lazy: the monitor's first frame must not wait for NumPy and the trace engine.
    if name not in _MODULES:
        raise AttributeError(f"module 'gputop' has no attribute {name!r}")
    from importlib import import_module

    if name in ("Analysis", "analyze"):
        # Here, because an analysis stands below the exports and knows of none.
        import_module(_MODULES["Analysis"]).Analysis._repr_html_ = _page_in_frame
    return getattr(import_module(_MODULES[name]), name)


def _page_in_frame(analysis: Analysis) -> str:
    """Page of an analysis for a notebook, in a frame that keeps styles and script to itself."""
    from html import escape

    from gputop.export.analysis_page import analysis_page

    return (f'<iframe sandbox="allow-scripts" srcdoc="{escape(analysis_page(analysis))}" '
            'style="width:100%;height:640px;border:0"></iframe>')
