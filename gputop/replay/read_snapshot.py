"""The document ``gputop.snapshot/1`` as values: for the pictures made of it, and for ``gputop replay``.

A file may come from anywhere: everything in it is checked before anything is built from it
(:mod:`gputop.replay.snapshot_document`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct

from gputop.core.codec import parse
from gputop.core.errors import GputopError
from gputop.core.files import open_regular
from gputop.core.findings import Advice, Finding
from gputop.core.samples import NodeSample
from gputop.profiler.capture.records import CaptureRecord, Server
from gputop.replay.snapshot_document import SCHEMA, Document, Grid

DATA_ID = "gputop-snapshot"  # the element of an HTML page that holds the document
_MAX_FILE_BYTES = 64 << 20
_MAX_NODE_VALUES = 500_000  # of one that a node answers with: of 16 GPUs it has 67,000
_PAGE_BEGIN, _PAGE_END = f'<script type="application/json" id="{DATA_ID}">', "</script>"


class Snapshot(Struct, frozen=True):
    """All that a document holds. ``spectrogram`` has one track a GPU: its activity, with levels."""

    sample: NodeSample
    interval_s: float
    version: str
    history: Grid | None
    spectrogram: Grid | None
    servers: tuple[Server, ...]
    capture: CaptureRecord | None
    remarks: tuple[str, ...]  # on the capture: how long it took and why, what it cost
    findings: tuple[Finding, ...]
    live: Advice  # what is left of it: abstentions and what bounds the job


def is_snapshot(path: Path) -> bool:
    """Return whether a file begins as JSON or a page does, which no recording does; False where it cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read(256).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"<", b"[")
    except OSError:
        return False


def read(path: Path) -> Snapshot:
    """The snapshot in a JSON file, or in a page that ``--format html`` made.

    Raises GputopError for a file that is none, is damaged or of another version.
    """
    fix = "Give a file from `gputop snapshot --format json` or html."
    try:
        with open_regular(path) as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise GputopError(f"cannot read {path}: {error.strerror or error}", fix) from error
    if len(data) > _MAX_FILE_BYTES:
        raise GputopError(f"{path} is not a snapshot: it is larger than {_MAX_FILE_BYTES >> 20} MB", fix)
    text = data.decode("utf-8", "replace")
    if text.lstrip()[:1] == "<":
        page, closed, _ = text.partition(_PAGE_BEGIN)[2].partition(_PAGE_END)
        text = page if closed else text
    try:
        document = parse(text)
    except ValueError as error:
        raise GputopError(f"{path} is not a snapshot, or is damaged: {error}", fix) from error
    return from_document(document, str(path))


def from_json(data: bytes) -> Snapshot:
    """Return what the JSON of a snapshot says that a node answered with; raises GputopError where it is none."""
    try:
        return from_document(parse(data, _MAX_NODE_VALUES))
    except ValueError as error:
        raise GputopError(f"it is not JSON: {error}") from None


def from_document(document: Any, name: str = "the snapshot") -> Snapshot:
    """Return what the JSON document says; raises GputopError where it is not one of this version."""
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        kind = f"a document of type {str(schema)[:60]}" if isinstance(schema, str) else "not a gputop document"
        fix = f"This gputop reads {SCHEMA}; " + (
            "the gputop that wrote the file, or a newer one, can open it." if isinstance(schema, str)
            and schema.startswith("gputop.snapshot/") else "to create a snapshot: gputop snapshot --format json")
        raise GputopError(f"{name} is {kind}", fix)
    try:
        return _snapshot(Document.read(document))
    except ValueError as error:
        raise GputopError(f"{name} is damaged: {error}", "Copy it again, or take a new snapshot.") from error


def _snapshot(document: Document) -> Snapshot:
    d, capture = document, document.capture
    return Snapshot(
        sample=d.sample(), interval_s=d.interval_s, version=d.gputop,
        history=d.history.grid() if d.history is not None else None,
        spectrogram=d.spectrogram.grid() if d.spectrogram is not None else None,
        servers=tuple(Server(s.address, s.description, s.pid, s.problem, s.asked) for s in d.servers),
        capture=capture.record() if capture is not None else None,
        remarks=capture.remarks if capture is not None else (), findings=d.findings,
        live=Advice(abstained=d.abstained, limit=d.limit))
