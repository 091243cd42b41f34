"""Series that a comparison needs of a trace besides its analysis, small enough to be kept: no trace is read for it
twice.

Without NumPy, which the monitor does not load before it compares.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from gputop.core.findings import Finding


class PackedSeries(Struct, frozen=True):
    """A :class:`~gputop.analysis.gpu.step_series.StepArrays` whose arrays are the bytes of 64-bit floats: they hold
    NaN, which JSON has not."""

    step_s: bytes
    parts: Mapping[str, bytes]
    gpus: Mapping[int, Mapping[str, bytes]]
    waiting: bytes | None


class ComparedTrace(Struct, frozen=True):
    """``series`` None: the trace has no steps. ``findings_at_capture`` are as they were shown when gputop captured it,
    None where that is not known."""

    series: PackedSeries | None = None
    gpu_names: tuple[str, ...] = ()
    findings_at_capture: tuple[Finding, ...] | None = None
