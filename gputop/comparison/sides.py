"""The two sides of a comparison: reading a trace, a saved analysis or a snapshot, whichever a path holds.

What reads a trace is imported where it is used: the monitor compares what its worker processes have read.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

from gputop.analysis.results import SCHEMA as ANALYSIS
from gputop.analysis.results import Analysis, StepTimes
from gputop.core.codec import parse
from gputop.core.errors import GputopError, NoDataError
from gputop.core.findings import Finding

if TYPE_CHECKING:
    from gputop.analysis.gpu.packed_series import ComparedTrace
    from gputop.analysis.gpu.step_series import StepSeries
    from gputop.replay.snapshot import Snapshot

_SAVED_BYTES = 64 << 20  # a saved document is smaller; a larger .json is a Chrome trace
_OWN_SCHEMA = re.compile(rb'"schema"\s*:\s*"gputop\.')
_FIX = "Give a trace, the output of `gputop analyze --json` or `capture --json`, or a JSON snapshot."

Kind = Literal["trace", "analysis", "snapshot"]


class Side(Struct, frozen=True):
    """One of the two: ``analysis`` of its trace, if there is one, and the snapshot's ``live`` figures.

    ``series`` is there where the trace itself was read and has steps. ``findings_at_capture`` are as they
    were shown when gputop captured it, None where that is not known. ``repeats`` are further captures of the same job.
    """

    path: str
    kind: Kind
    analysis: Analysis | None
    live: Snapshot | None = None
    series: StepSeries | None = None
    gpu_names: tuple[str, ...] = ()
    findings_at_capture: tuple[Finding, ...] | None = None
    repeats: tuple[Side, ...] = ()

    @property
    def simulated(self) -> bool:
        return ((self.analysis is not None and self.analysis.simulated)
                or (self.live is not None and self.live.sample.simulated))

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
    def iterations(self) -> float:
        """Optimizer steps in one step of the trace; 1 where nothing tells."""
        return max(1.0, self.steps.iterations_per_step) if self.steps is not None else 1.0


def read_side(path: str | os.PathLike[str]) -> Side:
    """Read what ``path`` holds. Raises GputopError with cause and remedy; NoDataError for a trace without events."""
    from gputop.replay.snapshot import from_document
    from gputop.replay.snapshot_document import SCHEMA as SNAPSHOT

    text = os.fspath(path)
    saved = _saved(Path(text))
    if saved is None:
        return _from_trace(text)
    schema = saved["schema"]
    if schema == ANALYSIS:
        return Side(text, "analysis", Analysis.from_json(saved, text))
    if schema != SNAPSHOT:
        raise GputopError(f"{text} is a document of {schema[:60]}, which cannot be compared.", _FIX)
    snapshot = from_document(saved, text)
    analysis = snapshot.capture.analysis if snapshot.capture is not None else None
    if analysis is None and not snapshot.sample.gpus:
        raise NoDataError(f"The snapshot {text} has neither a GPU nor a capture.", _FIX)
    names = tuple(gpu.info.name for gpu in snapshot.sample.gpus if gpu.info.name)
    return Side(text, "snapshot", analysis, snapshot, gpu_names=names)


def _from_trace(path: str) -> Side:
    from gputop.diagnosis.diagnose import analyze_to_facts, compared_trace
    from gputop.trace.readers.load import load

    facts = analyze_to_facts(load([path]))
    return side_of_trace(path, facts.analysis, compared_trace(facts))


def side_of_trace(path: str, analysis: Analysis, compared: ComparedTrace) -> Side:
    """The side that a trace makes, of what is kept of it; reads nothing. Raises GputopError for damaged figures."""
    from gputop.analysis.gpu.step_series import StepSeries

    try:
        series = None if compared.series is None else StepSeries.unpacked(compared.series)
    except ValueError as error:
        raise GputopError(f"The values of the steps of {path} are damaged: {error}.",
                          "Please report this with the trace.") from error
    return Side(path, "trace", analysis, series=series, gpu_names=compared.gpu_names,
                findings_at_capture=compared.findings_at_capture)


def _saved(path: Path) -> dict[str, Any] | None:
    """The document of gputop's own in a file; None where it is none, but maybe a trace."""
    from gputop.trace.readers.content import read_all, read_prefix

    try:
        small = path.is_file() and path.stat().st_size <= _SAVED_BYTES
    except OSError:
        return None  # the trace's reader says what is wrong with the path
    if not small:
        return None
    begin = read_prefix(path)
    ours = _OWN_SCHEMA.search(begin) is not None
    if begin.lstrip()[:1] != b"{" or (b'"traceEvents"' in begin and not ours):
        return None
    damaged: set[str] = set()
    try:
        document = parse(bytes(read_all(path, damaged, 4 * _SAVED_BYTES)))
    except ValueError as error:
        if ours:
            raise GputopError(f"{path} is damaged: it is not a complete JSON document ({error}).",
                              "Save or copy it again.") from error
        return None
    schema = document.get("schema")
    return document if isinstance(schema, str) and schema.startswith("gputop.") else None
