"""The file ``gputop.capture.json`` of a run folder: what gputop knew and said when it captured.

It lies beside the traces; other tools ignore it. For each trace file: the CPUs that its job could use, which no trace
tells. The findings as they were shown then, whose estimated savings a later comparison quotes. What was sampled of the
GPUs meanwhile, for the timeline. And what a list of captures shows without reading a trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, field, structs

from gputop.core.captured_samples import GpuCounters, JobCpus, LiveSteps
from gputop.core.codec import convert, encode, parse
from gputop.core.files import read_regular, replacing
from gputop.core.findings import Finding
from gputop.text.units import printable

FILE = "gputop.capture.json"
OVERVIEW = ".overview.pb"  # ending of the overview beside a trace (gputop.trace.readers.overview_file)
_MAX_BYTES = 16 << 20
_MAX_CPUS = 1 << 16
_MAX_THREADS = 1 << 20
_MAX_USERS = 64
MAX_NAME = 120
_MAX_TIME_S = 4e9  # the year 2096
_TimeS = Annotated[float, Meta(ge=0, lt=_MAX_TIME_S)]


class CaptureFile(Struct, frozen=True, tag_field="schema", tag="gputop.capture/1"):
    """``files`` are the names of the traces that were captured together; ``findings`` None: they were not analyzed.

    ``job`` is the command line of the job, its secrets hidden; ``time_s`` the Unix time at which the capture ended,
    ``step_s`` the mean step time, ``counters_by_file`` the samples of the GPUs where several workers were captured,
    ``pid`` and ``started_s`` are the first job process and the Unix time of its start,
    ``live_steps`` the step period in the minutes before, by the live signal, ``ended`` in a sentence what ended the
    recording early. ``name`` is what the user calls it ("before prefetch"), at most :data:`MAX_NAME` characters.
    ``recorded_s`` is for how long the profiler was asked to record in detail: it may take seconds more to stop.
    """

    files: Mapping[str, JobCpus | None] = field(default_factory=dict)
    findings: tuple[Finding, ...] | None = None
    address: str = ""
    job: str = ""
    time_s: _TimeS | None = None
    step_s: _TimeS | None = None
    counters: GpuCounters | None = None
    counters_by_file: Mapping[str, GpuCounters] = field(default_factory=dict)
    live_steps: LiveSteps | None = None
    ended: str = ""
    name: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    pid: int | None = None
    started_s: _TimeS | None = None
    recorded_s: _TimeS | None = None


def write_capture(folder: Path, about: CaptureFile) -> None:
    """Write it; raises OSError."""
    with replacing(folder / FILE) as file:
        file.write(encode(about) + b"\n")


def read_capture(folder: Path, max_bytes: int = _MAX_BYTES) -> CaptureFile:
    """Read what is known of the traces in a folder: nothing where there is no such file, or not a valid one."""
    with contextlib.suppress(OSError, ValueError):
        capture = convert(parse(read_regular(folder / FILE, max_bytes)), CaptureFile)
        if all(map(_plausible, capture.files.values())):
            return capture
    return CaptureFile()


def name_capture(folder: Path, name: str) -> None:
    """Keep what the user calls the capture in a folder. Raises OSError, also if what is known of it cannot be read."""
    capture = read_capture(folder)
    if capture == CaptureFile() and (folder / FILE).exists():
        raise OSError(f"{FILE} is not readable")
    write_capture(folder, structs.replace(capture, name=printable(name).strip()[:MAX_NAME]))


def capture_of(paths: Sequence[str]) -> CaptureFile:
    """Capture of these trace files, where they are all of one."""
    folders, names = {Path(path).parent for path in paths}, {Path(path).name.removesuffix(".gz") for path in paths}
    capture = read_capture(folders.pop()) if len(folders) == 1 else CaptureFile()
    return capture if names and names == capture.files.keys() else CaptureFile()


def tightest(files: Mapping[str, JobCpus | None]) -> JobCpus | None:
    """CPUs of the worker with the fewest for itself: the others wait for it."""
    return min((cpus for cpus in files.values() if cpus is not None), key=lambda cpus: cpus.free, default=None)


def _plausible(cpus: JobCpus | None) -> bool:
    if cpus is None:
        return True
    at_most = {
        1: (cpus.held_up, cpus.main, cpus.asleep, cpus.children_waited), _MAX_THREADS: (cpus.waited, cpus.threads),
        _MAX_CPUS: (cpus.allowed, cpus.quota, cpus.cores, cpus.used, cpus.others, cpus.children, cpus.ranks,
                    cpus.gputop, *(user.cpus for user in cpus.busiest))}
    return (cpus.allowed > 0 and all(0 <= (value or 0) <= most for most, values in at_most.items() for value in values)
            and 0 <= (cpus.age_s or 0) < _MAX_TIME_S and len(cpus.busiest) <= _MAX_USERS)
