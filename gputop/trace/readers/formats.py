"""The trace formats that gputop reads, one row each, in the order in which a folder is searched for them.

A new format is a module or folder beside this one with a function ``read_files(files) -> Trace``, and a row in
:data:`FORMATS`. This module imports no reader and no NumPy, because the help text of the command line lists the
formats, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from gputop.trace.model import Trace

_JSON_BLANKS = b"\xef\xbb\xbf \t\r\n"  # a byte order mark, too
_XPLANE_FIELDS = 6  # the number of the last field of a plane
_REPLACED = b"\xef\xbf\xbd"  # U+FFFD in UTF-8, which stands for bytes that are no text
_XPLANES_FIELD = b"\x0a"  # an XSpace begins with its planes; JSON may begin with the same byte, a newline
# zip, gzip (twice), xz, bzip2, Zstandard
_PACKED = (b"PK\x03\x04", b"\x1f\x8b", b"\xfd7zXZ", b"BZh", b"\x28\xb5\x2f\xfd")
_MARKUP = re.compile(rb"(?:\xef\xbb\xbf)?\s{0,64}<(?:!doctype|html|head|\?xml|error)\b", re.IGNORECASE)
_JSON_LINES = re.compile(rb"\{[^\n]+\}\r?\n\{")
# The first device of TensorFlow 2.0's own trace, with its name in a message, where an XPlane has the name itself.
_TF20_TRACE = re.compile(rb"\x0a.{1,3}\x08.{1,5}\x12.{1,3}\x0a.[ -~]", re.DOTALL)


class Format(Struct, frozen=True):
    """Format of trace files: how they are found, recognized and read."""

    id: str  # of ``Trace.format`` and of the JSON documents
    writer: str  # what writes it, for reports
    accepted: str  # its files, as error messages list them
    accepted_brief: str  # the same for the help of the command line
    pattern: str  # of the names of its files in a folder
    recognizes: Callable[[Path, bytes], bool]  # by path and the first bytes of the content, decompressed
    reader: str  # module with ``read_files``, imported when a file is read
    compressed: bool = False  # files may end in .gz, too
    in_run_folders: bool = False  # profilers write it into a folder for each run, below a logdir
    skipped: Callable[[Path, bytes], bool] | None = None  # files in a folder that fit the pattern and are no trace
    duplicate: re.Pattern[str] | None = None  # names of further files of one capture, read only where alone
    worker_capture: re.Pattern[str] | None = None  # names of files of (worker, time of the capture)
    copy_beside: tuple[str, re.Pattern[str]] | None = None  # beside that format's files such names repeat the capture
    overviews: bool = False  # an overview may lie beside them (gputop.trace.readers.overview_file)

    def read(self, files: Sequence[Path]) -> Trace:
        """One trace from files of this format; several are the hosts or ranks of one job."""
        trace: Trace = import_module(self.reader).read_files(files)
        trace.format = self.id
        return trace


def _is_sqlite(path: Path, begin: bytes) -> bool:
    return begin.startswith(b"SQLite format 3\0")


def _is_perfetto(path: Path, begin: bytes) -> bool:
    """Return whether the first message has fields that an XPlane does not: a number above 6, or numbers for lines."""
    def number(position: int) -> tuple[int, int]:
        value = shift = 0
        while position < len(begin) and shift < 64:
            value |= (begin[position] & 0x7F) << shift
            position, shift = position + 1, shift + 7
            if begin[position - 1] < 0x80:
                return value, position
        raise IndexError

    if begin[:1] != _XPLANES_FIELD or _is_json(path, begin):
        return False
    try:
        length, position = number(1)
        end = min(position + length, len(begin))
        while position < end:
            tag, position = number(position)
            if tag >> 3 > _XPLANE_FIELDS or (tag >> 3 > 1 and tag & 7 != 2):
                return bool(tag & 7 in (0, 1, 2, 5) and tag >> 3)
            size, position = number(position)
            position += size if tag & 7 == 2 else 0
    except IndexError:
        pass
    return False


def _is_json(path: Path, begin: bytes) -> bool:
    return begin.lstrip(_JSON_BLANKS)[:1] in (b"{", b"[")


def _is_xspace(path: Path, begin: bytes) -> bool:
    named, planes = path.name.removesuffix(".gz").endswith(".pb"), begin[:1] == _XPLANES_FIELD
    # The length of the first plane may look like the bracket of a JSON document.
    return (named and planes) or ((named or planes) and not _is_json(path, begin) and not _is_sqlite(path, begin))


RAW_REPORTS = (".nsys-rep", ".qdrep")


class OtherFile(Struct, frozen=True):
    """Files that are no trace gputop reads, though they look like one or stand for one."""

    recognizes: Callable[[Path, bytes], bool]
    what: str
    fix: str  # may have the {path} of the file, and its {stem}


OTHER_FILES = (
    OtherFile(lambda path, begin: begin.startswith(b"version https://git-lfs.github.com/spec/"),
              "a Git LFS pointer instead of the file", "Fetch the file: git lfs pull"),
    OtherFile(lambda path, begin: begin.startswith(b"/annex/objects/"),
              "a git-annex pointer instead of the file", "Fetch the file: git annex get"),
    OtherFile(lambda path, begin: _MARKUP.match(begin) is not None, "an HTML or XML page",
              "If a server answered with it, download the trace again. If it is a snapshot of gputop, give the .json "
              "instead."),
    OtherFile(lambda path, begin: _JSON_LINES.match(begin) is not None and b"traceEvents" not in begin[:1000],
              "a list of JSON objects, one per line, and not one JSON document",
              "Write the events as one JSON list. For a report of Nsight Systems: nsys export --type sqlite"),
    OtherFile(lambda path, begin: begin[:1] == _XPLANES_FIELD and begin[:64].count(_REPLACED) > 1,
              "a binary trace that was corrupted by copying it as text", "Copy the file again in binary mode."),
    OtherFile(lambda path, begin: _TF20_TRACE.match(begin) is not None and not _is_json(path, begin),
              "a trace of TensorFlow 2.0 or 2.1, which gputop does not read",
              "Record with TensorFlow 2.2 or newer, which writes an .xplane.pb."),
    OtherFile(lambda path, begin: begin.startswith(_PACKED) or begin[257:262] == b"ustar",
              "a compressed file or an archive", "Unpack it, and give the trace in it."),
    OtherFile(lambda path, begin: path.name.endswith(RAW_REPORTS),
              "an Nsight Systems report, which only Nsight Systems can open",
              "Export the report with the version that recorded it or a newer one, because older versions cannot open "
              "reports from 2024 and later: nsys export --type sqlite -o {stem}.sqlite {path}"),
    OtherFile(_is_perfetto, "a Perfetto trace", "Export it as Chrome JSON: traceconv json trace.pftrace trace.json"),
)
FORMATS = (
    Format(
        id="xspace", writer="TensorFlow/JAX profiler",
        accepted="<host>.xplane.pb (also .gz), a profile run folder or a TensorBoard logdir",
        accepted_brief=".xplane.pb, run folder, TensorBoard logdir",
        pattern="*.xplane.pb", compressed=True, in_run_folders=True, recognizes=_is_xspace,
        reader="gputop.trace.readers.xspace.reader", overviews=True),
    Format(
        id="chrome", writer="Chrome/kineto trace",
        accepted="Chrome or kineto traces (.json, .json.gz)", accepted_brief="Chrome/kineto .json[.gz]",
        pattern="*.json", compressed=True, in_run_folders=True, recognizes=_is_json,
        # A configuration, say; an empty file counts as a trace.
        skipped=lambda _, begin: bool(begin) and not (
            b"traceEvents" in begin or begin.lstrip().startswith(b"[") or b"schemaVersion" in begin),
        reader="gputop.trace.readers.chrome.reader",
        # JAX writes perfetto_trace.json.gz beside its own file, of the same capture.
        duplicate=re.compile(r"perfetto_trace\.json(\.gz)?"),
        # PyTorch's TensorBoard handler: <worker>.<time in ms or ns>.pt.trace.json[.gz].
        worker_capture=re.compile(r"(.+)\.(\d{10,20})\.pt\.trace\.json(?:\.gz)?"),
        # TensorBoard and JAX export an XSpace to a file beside it.
        copy_beside=("xspace", re.compile(r".*\.trace\.json(\.gz)?|perfetto_trace\.json(\.gz)?"))),
    Format(
        id="nsys", writer="Nsight Systems report",
        accepted="Nsight Systems reports exported to .sqlite", accepted_brief="Nsight .sqlite",
        pattern="*.sqlite", recognizes=_is_sqlite, reader="gputop.trace.readers.nsys"),
)

ACCEPTED = f"gputop reads {', '.join(f.accepted for f in FORMATS[:-1])}, and {FORMATS[-1].accepted}."
ACCEPTED_BRIEF = ", ".join(f.accepted_brief for f in FORMATS)
WRITERS = {f.id: f.writer for f in FORMATS}
