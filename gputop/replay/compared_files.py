"""Comparing what two paths hold: traces, saved analyses or snapshots."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from gputop.analysis.results import SCHEMA as ANALYSIS
from gputop.analysis.results import Analysis
from gputop.comparison.caveats import Note
from gputop.comparison.compare import Comparison, compare_sides
from gputop.comparison.sides import LiveFigures, Side, side_of_trace
from gputop.core.codec import parse
from gputop.core.errors import EXIT_USAGE, GputopError, NoDataError
from gputop.diagnosis.diagnose import analyze_to_facts, compared_trace
from gputop.replay.snapshot_document import SCHEMA as SNAPSHOT
from gputop.replay.snapshot_document import Snapshot, from_document
from gputop.trace.readers.content import read_all, read_prefix
from gputop.trace.readers.load import load

_SAVED_BYTES = 64 << 20  # a saved document is smaller; a larger .json is a Chrome trace
_OWN_SCHEMA = re.compile(rb'"schema"\s*:\s*"gputop\.')
_FIX = "Give a trace, the output of `gputop analyze --json` or `capture --json`, or a JSON snapshot."
_Path = str | os.PathLike[str]


def compare(a: _Path, b: _Path, *, again_a: Sequence[_Path] = (), again_b: Sequence[_Path] = (),
            progress: Callable[[_Path], object] = lambda path: None) -> Comparison:
    """Compare two files or folders: traces, documents of ``analyze --json`` or ``capture --json``, JSON snapshots.

    ``again_a`` and ``again_b`` are further runs of the same jobs: with them the step times are means over all runs, and
    smaller changes are sure. ``progress`` is called with each path before it is read. Raises GputopError for what
    cannot be read or is given twice, and NoDataError where A and B have nothing in common.
    """
    def read(path: _Path) -> Side:
        progress(path)
        return read_side(path)

    given = {Path(path).resolve() for path in (a, b)}
    same = len(given) == 1
    for path in (*again_a, *again_b):
        if (resolved := Path(path).resolve()) in given:
            raise GputopError(f"{os.fspath(path)} is given twice, but two runs need two captures",
                              "Name another capture of the job, or leave out the second one.", EXIT_USAGE)
        given.add(resolved)
    only = read(a)
    first = replace(only, repeats=tuple(map(read, again_a)))
    second = only if same else read(b)
    result = compare_sides(first, replace(second, repeats=tuple(map(read, again_b))))
    if same:
        return result.with_note(Note("same_file", "A and B are the same file."))
    return result


def read_side(path: str | os.PathLike[str]) -> Side:
    """Read what ``path`` holds. Raises GputopError with cause and remedy; NoDataError for a trace without events."""
    text = os.fspath(path)
    saved = _saved(Path(text))
    if saved is None:
        facts = analyze_to_facts(load([text]))
        return side_of_trace(text, facts.analysis, compared_trace(facts))
    schema = saved["schema"]
    if schema == ANALYSIS:
        return Side(text, "analysis", Analysis.from_json(saved, text))
    if schema != SNAPSHOT:
        raise GputopError(f"gputop cannot compare {text}, a document of type {schema[:60]}.", _FIX)
    snapshot = from_document(saved, text)
    analysis = snapshot.capture.analysis if snapshot.capture is not None else None
    if analysis is None and not snapshot.sample.gpus:
        raise NoDataError(f"The snapshot {text} contains neither a GPU nor a capture.", _FIX)
    names = tuple(gpu.info.name for gpu in snapshot.sample.gpus if gpu.info.name)
    return Side(text, "snapshot", analysis, _live(snapshot), gpu_names=names)


def _live(snapshot: Snapshot) -> LiveFigures:
    gpus, history = snapshot.sample.gpus, snapshot.history
    means: dict[tuple[int, str], tuple[float, ...]] = {}
    for gpu in gpus:
        for track in history.gpus.get(gpu.info.uuid, ()) if history is not None else ():
            if measured := tuple(value for value in track.mean if value is not None):
                means.setdefault((gpu.info.index, track.metric), measured)
    return LiveFigures(snapshot.sample.simulated, len(gpus), means, snapshot.findings, snapshot.live.abstained)


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
        document = parse(bytes(read_all(path, damaged, 4 * _SAVED_BYTES)))
    except ValueError as error:
        if ours:
            raise GputopError(f"{path} is damaged: it is not a complete JSON document ({error}).",
                              "Save or copy it again.") from error
        return None
    schema = document.get("schema")
    return document if isinstance(schema, str) and schema.startswith("gputop.") else None
