"""The two sides of a comparison: what is kept of a trace, of a saved analysis or of a snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from gputop.analysis.results import Analysis, StepTimes
from gputop.core.captured_samples import LiveSteps
from gputop.core.errors import GputopError
from gputop.core.findings import Abstained, Finding

if TYPE_CHECKING:
    from gputop.analysis.gpu.packed_series import ComparedTrace
    from gputop.analysis.gpu.step_series import StepArrays

Kind = Literal["trace", "analysis", "snapshot"]


class LiveFigures(Struct, frozen=True):
    """Figures of the minutes before a snapshot. ``means``: of each slice that was measured, by GPU and metric, in base
    units."""

    simulated: bool
    gpus: int
    means: Mapping[tuple[int, str], tuple[float, ...]]
    findings: tuple[Finding, ...]
    abstained: tuple[Abstained, ...]


class Side(Struct, frozen=True):
    """One of the two: ``analysis`` of its trace, if there is one, and the ``live`` figures of a snapshot.

    ``series`` is there where the trace itself was read and has steps. ``findings_at_capture`` are as they
    were shown when gputop captured it, None where that is not known. ``repeats`` are further captures of the same job.
    """

    path: str
    kind: Kind
    analysis: Analysis | None
    live: LiveFigures | None = None
    series: StepArrays | None = None
    gpu_names: tuple[str, ...] = ()
    findings_at_capture: tuple[Finding, ...] | None = None
    repeats: tuple[Side, ...] = ()

    @property
    def simulated(self) -> bool:
        return ((self.analysis is not None and self.analysis.simulated)
                or (self.live is not None and self.live.simulated))

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Return what was found; a snapshot lists the findings of its capture and the live ones in one."""
        if self.live is not None:
            return self.live.findings
        return self.analysis.findings if self.analysis is not None else ()

    @property
    def steps(self) -> StepTimes | None:
        return self.analysis.steps if self.analysis is not None else None

    @property
    def live_steps(self) -> LiveSteps | None:
        return self.analysis.trace.live_steps if self.analysis is not None else None

    @property
    def iterations(self) -> float:
        """Optimizer steps in one step of the trace; 1 where nothing tells."""
        return max(1.0, self.steps.iterations_per_step) if self.steps is not None else 1.0


def side_of_trace(path: str, analysis: Analysis, compared: ComparedTrace) -> Side:
    """The side that a trace makes, of what is kept of it; reads nothing. Raises GputopError for damaged figures."""
    from gputop.analysis.gpu.step_series import StepArrays

    try:
        series = None if compared.series is None else StepArrays.unpacked(compared.series)
    except ValueError as error:
        raise GputopError(f"The values of the steps of {path} are damaged: {error}.",
                          "Please report this with the trace.") from error
    return Side(path, "trace", analysis, series=series, gpu_names=compared.gpu_names,
                findings_at_capture=compared.findings_at_capture)
