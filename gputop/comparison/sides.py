"""The two sides of a comparison: reading a trace, a saved analysis or a snapshot, whichever a path holds."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gputop.comparison.series import StepSeries, step_series
from gputop.core.errors import GputopError, NoDataError
from gputop.diagnosis.diagnose import analyze_trace
from gputop.trace.readers.content import read_all, read_prefix
from gputop.trace.readers.load import load

ANALYSIS = "gputop.analysis/1"
SNAPSHOT = "gputop.snapshot/1"
_SAVED_BYTES = 64 << 20  # a saved document is smaller; a larger .json is a Chrome trace
_OWN_SCHEMA = re.compile(rb'"schema"\s*:\s*"gputop\.')
_FIX = "Give a trace, what `gputop analyze --json` or `capture --json` printed, or a JSON snapshot."


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two. ``analysis`` is a document of gputop.analysis/1, ``live`` one of gputop.snapshot/1.

    ``series`` is there where the trace itself was read and has steps.
    """

    path: str
    kind: Literal["trace", "analysis", "snapshot"]
    analysis: Mapping[str, Any] | None
    live: Mapping[str, Any] | None = None
    series: StepSeries | None = None
    gpu_names: tuple[str, ...] = ()

    @property
    def simulated(self) -> bool:
        return any(doc is not None and doc.get("simulated") is True for doc in (self.analysis, self.live))


def read_side(path: str | os.PathLike[str]) -> Side:
    """What ``path`` holds. Raises GputopError with cause and remedy; NoDataError for a trace without events."""
    text = os.fspath(path)
    saved = _saved(Path(text))
    if saved is None:
        return _from_trace(text)
    schema = saved["schema"]
    if schema == ANALYSIS:
        return Side(text, "analysis", saved)
    if schema != SNAPSHOT:
        raise GputopError(f"{text} is a document of {_shown(schema)}, which cannot be compared.", _FIX)
    capture = mapping(saved.get("capture"))
    analysis = mapping(capture.get("analysis")) or None
    names = tuple(str(gpu.get("name")) for gpu in items(saved.get("gpus")) if gpu.get("name"))
    if analysis is None and not items(saved.get("gpus")):
        raise NoDataError(f"The snapshot {text} holds neither a GPU nor a capture.", _FIX)
    return Side(text, "snapshot", analysis, saved, gpu_names=names)


def _from_trace(path: str) -> Side:
    trace = load([path])
    analysis = analyze_trace(trace)
    series = step_series(trace, analysis.steps) if analysis.steps is not None else None
    return Side(path, "trace", analysis.to_json(), series=series,
                gpu_names=tuple(gpu.name for gpu in trace.gpus if gpu.name))


def _saved(path: Path) -> dict[str, Any] | None:
    """The document of gputop's own in a file; None where it is none, but maybe a trace."""
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
        document = json.loads(read_all(path, damaged, 4 * _SAVED_BYTES))
    except (ValueError, RecursionError) as error:
        if ours:
            raise GputopError(f"{path} is damaged: no whole JSON document ({error}).",
                              "Save or copy it again.") from error
        return None
    schema = document.get("schema")
    return document if isinstance(schema, str) and schema.startswith("gputop.") else None


def _shown(schema: str) -> str:
    return schema[:60]


def mapping(value: Any) -> Mapping[str, Any]:
    """``value`` if it is an object, else an empty one: a saved document can be of another version, or edited."""
    return value if isinstance(value, Mapping) else {}


def items(value: Any) -> list[Mapping[str, Any]]:
    """The objects in a list."""
    return [v for v in value if isinstance(v, Mapping)] if isinstance(value, (list, tuple)) else []


def number(value: Any) -> float | None:
    """A finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < 1e300 else None
