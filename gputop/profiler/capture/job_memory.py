"""The memory of a job while it is recorded: what it grows by, and the guard that ends a recording."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from gputop.core.job_limits import LimitFacts, read_limits
from gputop.core.own_memory import control_groups, left_in, resident_bytes
from gputop.profiler.addresses import is_local, listening_pid, process_of
from gputop.profiler.capture.plan import FreeResources, MemoryLimits, Plan
from gputop.profiler.discovery import is_training
from gputop.profiler.recording import Progress
from gputop.text.units import size


class Cost(Struct, frozen=True):
    """Cost of a capture to the job. ``call_s`` is from request to answer, ``recorded_s`` of it recorded.

    The rest of the call the profiler gathers and packs what it recorded, in the job's process.
    Memory is the resident set of that process: before the probe, at its highest since then (looked
    at eight times a second), and after; None where it is out of sight.
    """

    call_s: float
    recorded_s: float
    memory_before_bytes: int | None = None
    memory_peak_bytes: int | None = None
    memory_after_bytes: int | None = None
    # Median of the first and of the last steps of the trace, in documents on the capture as a whole; None: too few.
    first_steps_s: float | UnsetType | None = UNSET
    last_steps_s: float | UnsetType | None = UNSET

    @property
    def growth_bytes(self) -> int | None:
        """Growth of the job at its highest."""
        if self.memory_before_bytes is None or self.memory_peak_bytes is None:
            return None
        return max(0, self.memory_peak_bytes - self.memory_before_bytes)

    def text(self) -> str:
        """Return a text for people: "the call took 8.0 s for 4.1 s of trace …; the job grew by 1.2 GiB meanwhile"."""
        gathering_s = self.call_s - self.recorded_s
        text = f"the capture call took {self.call_s:.1f} s to record {self.recorded_s:.1f} s"
        if gathering_s > max(1.0, 0.2 * self.recorded_s):
            text += f": the profiler spent {gathering_s:.1f} s collecting the trace, which slowed the job"
        if self.growth_bytes is not None:
            text += (f"; the job's memory grew by at most {size(self.growth_bytes)}" if self.growth_bytes else
                     "; the job's memory did not grow")
        return text


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

    def cost(self, call_s: float, recorded_s: float) -> Cost:
        after = self.sample_rss()
        return Cost(call_s, min(recorded_s, call_s), self.before, self.peak, after)


class Watch(Struct, frozen=True):
    """Watch over a job while it is recorded, and what ends that. ``free`` returns what is free now."""

    memory: JobMemory
    limits: MemoryLimits
    free: Callable[[], FreeResources]
    stop: threading.Event


class MemoryGuard:
    """Receives a recording's progress and sets ``halt`` when ``stop`` is set or the memory is running short."""

    def __init__(self, watch: Watch, halt: threading.Event, *,
                 label: Callable[[Progress], Progress] | None = None) -> None:
        """``label``: how its progress is reported."""
        self._watch, self.halt, self._label = watch, halt, label
        self._before = watch.memory.growth or 0  # what it grew by in the probe is not free any more
        self.ended: tuple[float, str] | None = None  # after so many seconds, and because of what

    def __call__(self, progress: Progress) -> None:
        watch = self._watch
        watch.memory(self._label(progress) if self._label is not None else progress)
        if watch.stop.is_set():
            self.halt.set()
        elif progress.phase == "recording" and not self.halt.is_set():
            grown = max(0, (watch.memory.growth or 0) - self._before)
            if cause := watch.limits.excess(progress.elapsed_s, grown, watch.free()):
                self.ended = progress.elapsed_s, cause
                self.halt.set()

    def plan_as_recorded(self, chosen: Plan, *, overview: bool) -> Plan:
        """The plan as it was carried out: see :meth:`Plan.ended_early` if this guard ended the recording; without an
        overview if the user ended it."""
        if self._watch.stop.is_set():
            return replace(chosen, overview_s=0.0)
        return chosen if self.ended is None else chosen.ended_early(round(self.ended[0], 1), self.ended[1],
                                                                    overview=overview)


def with_more(progress: Progress) -> Progress:
    """The progress of a recording that an overview follows."""
    return replace(progress, more=True)


# -- footprint ----------------------------------------------------------------------------------------
#
# Memory and disk that a capture may take, and what it took of the job's memory.

def job_pid(address: str, pid: int | None) -> int | None:
    """The server's process on this machine, as far as it can be known: not one that only leads to it (ssh -L)."""
    if pid is None and is_local(address):
        pid = listening_pid(address)
        if pid is not None and pid != os.getpid() and is_training(pid) is False:
            return None
    return pid


def free_resources(address: str, pid: int | None, logdir: Path) -> FreeResources:
    """Return what is free for a capture from ``address``, whose process is ``pid`` where it is known."""
    import psutil

    unknown: list[str] = []
    here = pid is not None or is_local(address)
    if not here:
        unknown.append(f"{address} is on another machine, so gputop cannot check whether its memory is sufficient")
    elif pid is None:
        unknown.append(f"gputop cannot see the process that serves {address}, so the process's memory limit is unknown")
    own_dirs = control_groups(os.getpid())
    job_dirs = control_groups(pid) if pid is not None else own_dirs
    node: float = psutil.virtual_memory().available
    shared, job_only, own_only = (
        min((left for d in dirs if (left := left_in(d)) is not None), default=None)
        for dirs in (own_dirs & job_dirs, job_dirs - own_dirs, own_dirs - job_dirs))
    limits = read_limits(pid, Path("/tmp") if process_of(address) is not None else None) if pid else LimitFacts()
    of_job = [float(part) for part in (job_only, limits.memory_left_bytes) if part is not None]
    return FreeResources(min(node, shared) if shared is not None else node, min(of_job, default=None), own_only,
                         free_disk_bytes(logdir), limits.disk_bytes, here, tuple(unknown))


def free_disk_bytes(folder: Path) -> float | None:
    """Free where ``folder`` is or would be."""
    for ancestor in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(ancestor).free
    return None
