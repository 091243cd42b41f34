"""A capture that is safe by default: a short probe, a length chosen from it, the cost measured.

Nothing that was recorded is lost: where the probe is all there is (it was stopped, or the server
went away while it recorded on), the probe is the trace.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gputop.core.errors import GputopError
from gputop.core.files import open_regular
from gputop.profiler.capture.footprint import free_resources, job_pid, resident_bytes
from gputop.profiler.capture.plan import PROBE_S, Plan, Probe, growth_limits, needs_probe, plan
from gputop.profiler.client import CaptureResult, EmptyTrace, Progress, TraceLost, capture, parse_address
from gputop.profiler.outline import map_file
from gputop.profiler.stale_files import probe_name
from gputop.profiler.storage import RunFolder
from gputop.text.units import size


@dataclass(frozen=True, slots=True)
class Cost:
    """What a capture took of the job. ``call_s`` is from request to answer, ``recorded_s`` of it recorded.

    The rest of the call the server gathers and packs what it recorded, in the job's process.
    Memory is the resident set of that process: before the probe, at its highest since then (looked
    at eight times a second), and after; None where it is out of sight.
    """

    call_s: float
    recorded_s: float
    memory_before_bytes: int | None = None
    memory_peak_bytes: int | None = None
    memory_after_bytes: int | None = None

    @property
    def growth_bytes(self) -> int | None:
        """Growth of the job at its highest."""
        if self.memory_before_bytes is None or self.memory_peak_bytes is None:
            return None
        return max(0, self.memory_peak_bytes - self.memory_before_bytes)

    def text(self) -> str:
        """For people: "the call took 8.0 s for 4.1 s of trace …; the job grew by 1.2 GiB meanwhile"."""
        gathering_s = self.call_s - self.recorded_s
        text = f"the call took {self.call_s:.1f} s for {self.recorded_s:.1f} s of trace"
        if gathering_s > max(1.0, 0.2 * self.recorded_s):
            text += f": the server spent {gathering_s:.1f} s collecting it, and the job was slower meanwhile"
        if self.growth_bytes is not None:
            text += (f"; the job's memory grew by {size(self.growth_bytes)} at most" if self.growth_bytes else
                     "; the job's memory did not grow")
        return text

    def to_json(self) -> dict[str, Any]:
        return {"call_s": self.call_s, "recorded_s": self.recorded_s,
                "memory_before_bytes": self.memory_before_bytes, "memory_peak_bytes": self.memory_peak_bytes,
                "memory_after_bytes": self.memory_after_bytes}


class JobMemory:
    """The job's memory, sampled whenever progress is reported."""

    def __init__(self, pid: int | None, report: Callable[[Progress], None]) -> None:
        self._pid = pid if pid != os.getpid() else None  # the demo's server is in gputop itself
        self._report = report
        self.before = self.peak = resident_bytes(self._pid)

    @property
    def growth(self) -> int | None:
        self.sample_rss()
        return None if self.before is None or self.peak is None else self.peak - self.before

    def sample_rss(self) -> int | None:
        now = resident_bytes(self._pid)
        if now is not None and self.peak is not None:
            self.peak = max(self.peak, now)
        return now

    def __call__(self, progress: Progress) -> None:
        self.sample_rss()
        self._report(progress)

    def cost(self, result: CaptureResult, recorded_s: float) -> Cost:
        after = self.sample_rss()
        return Cost(result.took_s, min(recorded_s, result.took_s), self.before, self.peak, after)


class MemoryGrowthGuard:
    """Receives a recording's progress and sets ``halt`` when ``stop`` is set or the job's memory grows too much."""

    def __init__(self, memory: JobMemory, after_s: float, most_bytes: float, stop: threading.Event,
                 halt: threading.Event) -> None:
        """``after_s``: before so much is recorded it may grow by more than ``most_bytes``."""
        self._memory, self._after_s, self._most_bytes = memory, after_s, most_bytes
        self._stop, self.halt = stop, halt
        self._ended: tuple[float, int] | None = None  # after so many seconds, and by how much it had grown

    def __call__(self, progress: Progress) -> None:
        self._memory(progress)
        grown = self._memory.growth or 0
        recorded = progress.phase == "recording" and progress.elapsed_s > self._after_s
        if self._stop.is_set():
            self.halt.set()
        elif recorded and grown > self._most_bytes and not self.halt.is_set():
            self._ended = progress.elapsed_s, grown
            self.halt.set()

    def plan_as_recorded(self, chosen: Plan) -> Plan:
        """The plan as it was carried out: shorter, with the reason, if this guard ended the recording."""
        if self._ended is None:
            return chosen
        seconds, grown = self._ended
        return replace(chosen, chosen_s=round(seconds, 1), enough=False,
                       why=f"ended early, because the job's memory had grown by {size(grown)}")


def capture_with_probe(
    address: str,
    *,
    seconds: float,
    logdir: str | Path,
    pid: int | None = None,
    force: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
    on_plan: Callable[[Plan], None] | None = None,
    stop: threading.Event | None = None,
) -> tuple[CaptureResult, Plan, Cost]:
    """Capture at most ``seconds``, as :func:`gputop.profiler.client.capture` does. Blocks.

    ``force``: exactly ``seconds``, without a probe and without asking whether memory and disk
    hold it. ``on_plan`` is told the length once it is chosen. Raises GputopError, also where
    the node lacks the memory or disk space for the shortest useful capture.
    """
    address = parse_address(address)
    stop = stop or threading.Event()
    pid = job_pid(address, pid)
    watch = JobMemory(pid, on_progress or (lambda _progress: None))
    tell = on_plan or (lambda _plan: None)
    chosen = Plan(seconds, seconds, "full length, no probe" if force else "full length, too short for a probe")
    if force or not needs_probe(seconds):
        tell(chosen)
        result = capture(address, seconds=seconds, logdir=logdir, on_progress=watch, stop=stop, pid=pid)
        return result, chosen, watch.cost(result, seconds)
    with probe_logdir(logdir) as folder:
        probed, probe = probe_job(address, folder, pid, watch, stop)
        if stop.is_set() and probed is not None:
            chosen = Plan(seconds, probe.seconds, "stopped during the probe; the probe is the trace", probe)
            tell(chosen)
            return keep_probe(probed, logdir), chosen, watch.cost(probed, chosen.chosen_s)
        free = free_resources(address, pid, Path(logdir).expanduser().absolute())
        chosen = plan(seconds, probe, free)
        tell(chosen)
        growth_guard = MemoryGrowthGuard(watch, *growth_limits(probe, free), stop, threading.Event())
        try:
            result = capture(address, seconds=chosen.chosen_s, logdir=logdir, on_progress=growth_guard,
                             stop=growth_guard.halt, pid=pid)
        except TraceLost as error:
            if probed is None:
                raise
            kept = keep_probe(probed, logdir).path
            raise GputopError(f"{error.message}; the only data is the probe of {probe.seconds:g} s",
                              f"{error.fix} To look at the probe: gputop analyze {kept}") from None
        chosen = growth_guard.plan_as_recorded(chosen)
    return result, chosen, watch.cost(result, chosen.chosen_s)


def probe_job(
    address: str, logdir: Path, pid: int | None, watch: JobMemory, stop: threading.Event
) -> tuple[CaptureResult | None, Probe]:
    """The probe's trace, None where it holds no events, and what it says. Raises GputopError."""
    from gputop.profiler.capture.volume import count_events, step_time

    def report(progress: Progress) -> None:
        watch(replace(progress, phase="probing"))

    try:
        result = capture(address, seconds=PROBE_S, logdir=logdir, on_progress=report, stop=stop, pid=pid)
    except EmptyTrace as empty:
        return None, Probe(PROBE_S, empty.took_s, 0, 0, 0)
    if not result.path.is_relative_to(logdir):
        shutil.rmtree(result.path.parents[3], ignore_errors=True)
        raise GputopError(f"the disk of the logdir is full: it does not hold even the probe, "
                          f"{size(result.bytes)}", "Free some space, or choose another folder with --logdir DIR.")
    try:
        host, devices = count_events(map_file(result.path))
    except OSError as error:
        raise GputopError(f"the probe's trace cannot be read: {error.strerror or error} ({result.path})",
                          "Check that file system; or capture without a probe: --force.") from None
    step_s, sure = step_time(result.path, host + devices) or (None, False)
    seconds = min(PROBE_S, result.took_s) if result.stopped_early else PROBE_S
    return result, Probe(seconds, result.took_s, result.bytes, host, devices, step_s, watch.growth, sure)


@contextmanager
def probe_logdir(logdir: str | Path) -> Iterator[Path]:
    """A folder below the logdir for the probe's trace, gone afterwards; raises GputopError where none can be.

    There and not in /tmp: a server on another machine may reach the logdir and nothing else.
    """
    RunFolder.create(logdir, "probe").discard()  # says what is wrong with the logdir before the job is disturbed
    place = Path(logdir).expanduser().absolute()
    missing = [folder for folder in (place, *place.parents) if not folder.exists()]
    folder = place / probe_name()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for made in missing:
            with contextlib.suppress(OSError):  # there is a trace in it
                made.rmdir()


def keep_probe(probed: CaptureResult, logdir: str | Path, host: str | None = None,
               run: str | None = None) -> CaptureResult:
    """The probe as a trace like any other, in a run folder of its own or in one that exists; raises GputopError."""
    folder = RunFolder.create(logdir, host or probed.path.name.removesuffix(".xplane.pb"), run)
    try:
        with open_regular(probed.path, follow_links=False) as file:
            path = folder.adopt(file, probed.path)
    except OSError as error:
        raise GputopError(f"the probe's trace cannot be read: {error.strerror or error} ({probed.path})",
                          "Check that file system.") from None
    finally:
        folder.discard()
    return replace(probed, path=path, run_dir=folder.path, session_id=folder.path.name)
