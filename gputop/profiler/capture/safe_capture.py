"""A capture that is safe by default: a short probe, a length chosen from it, the cost measured.

Nothing that was recorded is lost: where the probe is all there is (it was stopped, or the server
went away while it recorded on), the probe is the trace.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from gputop.core.errors import GputopError
from gputop.profiler.addresses import parse_address
from gputop.profiler.capture.footprint import free_resources, job_pid
from gputop.profiler.capture.job_memory import Cost, JobMemory, MemoryGrowthGuard, with_more
from gputop.profiler.capture.overview import Watch, record_overview
from gputop.profiler.capture.plan import PROBE_S, Plan, Probe, growth_limits, needs_probe, plan
from gputop.profiler.recording import CaptureResult, EmptyTrace, Progress, TraceLost
from gputop.profiler.stale_files import probe_name
from gputop.profiler.storage import RunFolder
from gputop.profiler.xprof.client import capture
from gputop.profiler.xprof.outline import map_file
from gputop.text.units import size


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
    """Capture at most ``seconds``, as :func:`gputop.profiler.xprof.client.capture` does. Blocks.

    ``force``: exactly ``seconds``, without a probe and without asking whether memory and disk
    hold it. ``on_plan`` is told the length once it is chosen. What the plan leaves of ``seconds`` is recorded as an
    overview beside the trace; the plan that is returned says how much of it there is. Raises GputopError, also where
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
        return result, chosen, watch.cost(result.took_s, seconds)
    with probe_logdir(logdir) as folder:
        probed, probe = probe_job(address, folder, pid, watch, stop)
        if stop.is_set() and probed is not None:
            chosen = Plan(seconds, probe.seconds, "stopped during the probe; the probe is the trace", probe)
            tell(chosen)
            return keep_probe(probed, logdir), chosen, watch.cost(probed.took_s, chosen.chosen_s)
        free = free_resources(address, pid, Path(logdir).expanduser().absolute())
        chosen = plan(seconds, probe, free)
        tell(chosen)
        limits = growth_limits(probe, free)
        growth_guard = MemoryGrowthGuard(watch, limits, stop, threading.Event(),
                                         label=with_more if chosen.overview_s else None)
        try:
            result = capture(address, seconds=chosen.chosen_s, logdir=logdir, on_progress=growth_guard,
                             stop=growth_guard.halt, pid=pid)
        except TraceLost as error:
            if probed is None:
                raise
            kept = keep_probe(probed, logdir).path
            raise GputopError(f"{error.message}; the only data is the probe of {probe.seconds:g} s",
                              f"{error.fix} To look at the probe: gputop analyze {kept}") from None
        chosen, call_s = growth_guard.plan_as_recorded(chosen), result.took_s
        if chosen.overview_s:
            chosen, overview_call_s = record_overview(result, chosen, Watch(pid, watch, limits, stop), folder)
            call_s += overview_call_s
    return result, chosen, watch.cost(call_s, chosen.chosen_s + chosen.overview_s)


def probe_job(
    address: str, logdir: Path, pid: int | None, watch: JobMemory, stop: threading.Event
) -> tuple[CaptureResult | None, Probe]:
    """The probe's trace, None where it holds no events, and what it says. Raises GputopError."""
    from gputop.profiler.xprof.volume import count_events, step_time

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
        path = folder.take_over(probed.path)
    finally:
        folder.discard()
    return replace(probed, path=path, run_dir=folder.path, session_id=folder.path.name)
