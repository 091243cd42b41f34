"""Any trace that gputop can read, from its path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gputop.core.captured_samples import GpuCounters, joined
from gputop.core.errors import EXIT_USAGE, GputopError, NoDataError
from gputop.core.findings import TraceNote
from gputop.text.commands import command_of
from gputop.text.units import first_few, printable
from gputop.trace import limits
from gputop.trace.complete_part import recorded_for, up_to_end_mark
from gputop.trace.model import Trace
from gputop.trace.quality import leave_out_lost_kernels, note_launches_without_kernels
from gputop.trace.readers.capture_file import CaptureFile, capture_of, tightest
from gputop.trace.readers.content import digest, read_prefix, size_bytes
from gputop.trace.readers.find_files import files_at
from gputop.trace.readers.formats import ACCEPTED, FORMATS, OTHER_FILES, Format
from gputop.trace.readers.overview_file import overviews_of
from gputop.trace.readers.stacks_file import stacks_of


def load(paths: Sequence[Path | str], run: str | None = None) -> Trace:
    """Read one trace from files or a folder; several files are the hosts or ranks of one job. ``run`` names one of the
    runs of a logdir, in place of the newest.

    Raises GputopError with cause and remedy for what is missing, unreadable, too big or in
    another format, NoDataError where there is no trace or no event in it. A damaged file is no
    error as long as anything can be read: the trace then has the quality note "truncated".
    """
    if not paths:
        raise GputopError("No trace was given.", ACCEPTED, EXIT_USAGE)
    files: list[Path] = []
    notes: list[TraceNote] = []
    for path in map(Path, paths):
        files += files_at(path, notes, run)
    formats: dict[Path, Format] = {}
    unread: list[GputopError] = []
    for file in dict.fromkeys(files):
        try:
            formats[file] = _format_of(file)
        except GputopError as error:
            unread.append(error)
    if not formats:
        raise unread[0]
    notes += [TraceNote("unreadable_file", f"{error.message} gputop leaves the file out.") for error in unread]
    _leave_out_copies(formats, notes)
    _count_files_once(formats, notes)
    if len({format_.id for format_ in formats.values()}) > 1:
        raise GputopError(f"gputop cannot combine traces of different formats: {first_few(list(formats), 4)}.",
                          "Analyze traces of one format at a time.", EXIT_USAGE)
    format_ = next(iter(formats.values()))
    trace = format_.read(list(formats))
    trace.quality = notes + trace.quality
    if format_.id == "chrome":
        trace = up_to_end_mark(trace)
        leave_out_lost_kernels(trace)
    note_launches_without_kernels(trace)
    captured = capture_of(trace.paths)
    trace = recorded_for(trace, captured.recorded_s)
    if captured.ended:
        trace.quality.append(TraceNote("ended_early", limits.cut_text(printable(captured.ended))))
    if format_.overviews:
        trace.overviews, about_overviews = overviews_of(trace, format_.read)
        trace.quality += about_overviews
    trace.job_cpus = tightest(captured.files)
    trace.counters = captured.counters or _counters_of_workers(trace, captured)
    trace.live_steps, trace.job = captured.live_steps, command_of(captured.job)
    trace.stacks, trace.no_stacks = stacks_of(trace.paths)
    return trace


def _counters_of_workers(trace: Trace, captured: CaptureFile) -> GpuCounters | None:
    """Counters of a capture of several workers, each with its own numbers of its GPUs."""
    names = [Path(path).name.removesuffix(".gz") for path in trace.paths]
    workers = {rank: (captured.counters_by_file[name], name.removesuffix(".xplane.pb"))
               for rank, name in enumerate(names) if name in captured.counters_by_file}
    unique = len({gpu.ordinal for gpu in trace.gpus}) == len(trace.gpus)
    return joined(workers, {gpu.ordinal if unique else i: (gpu.rank, gpu.ordinal) for i, gpu in enumerate(trace.gpus)})


def _leave_out_copies(formats: dict[Path, Format], notes: list[TraceNote]) -> None:
    """Leave out the files that repeat the capture of a file of another format beside them."""
    folders = {(format_.id, file.parent) for file, format_ in formats.items()}
    copies = [file for file, format_ in formats.items() if format_.copy_beside is not None
              and (format_.copy_beside[0], file.parent) in folders and format_.copy_beside[1].fullmatch(file.name)]
    for file in copies:
        del formats[file]
    if copies:
        notes.append(TraceNote("same_capture", f"{first_few(copies, 4)}: left out, because the XSpace next to it "
                                                 "contains the same capture."))


def _count_files_once(formats: dict[Path, Format], notes: list[TraceNote]) -> None:
    """Leave out files with the bytes of one before: as ranks of their own they would look like a perfect balance."""
    by_size: dict[int, list[Path]] = {}
    for file in formats:
        by_size.setdefault(size_bytes(file), []).append(file)
    for alike in by_size.values():
        first: dict[bytes, Path] = {}
        for file in alike if len(alike) > 1 else ():
            same = first.setdefault(digest(file), file)
            if same is not file:
                del formats[file]
                notes.append(TraceNote("same_file", f"{file}: left out, because it contains the same bytes as {same} "
                                                      "and is not a separate rank."))


def _format_of(path: Path) -> Format:
    begin = read_prefix(path)
    if not begin.strip():
        raise NoDataError(f"{path} is empty.", "The capture or the copy failed. Repeat it. " + ACCEPTED)
    for other in OTHER_FILES:
        if other.recognizes(path, begin):
            raise GputopError(f"{path} is {other.what}.", other.fix.format(path=path, stem=path.stem))
    for format_ in FORMATS:
        if format_.recognizes(path, begin):
            return format_
    raise GputopError(f"{path} has a format that gputop does not know.", ACCEPTED)
