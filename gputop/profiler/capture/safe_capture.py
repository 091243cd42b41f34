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
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from gputop.core.errors import GputopError
from gputop.profiler.capture.job_memory import Cost, JobMemory, MemoryGuard, Watch, free_resources, with_more
from gputop.profiler.capture.overview import OverviewMade, record_overview
from gputop.profiler.capture.plan import (
    PROBE_EVENTS,
    PROBE_S,
    Plan,
    Probe,
    count,
    memory_limits,
    most_events,
    needs_probe,
    plan,
)
from gputop.profiler.capture.request import CaptureRequest
from gputop.profiler.capture.requirements import check_limits
from gputop.profiler.recording import (
    CaptureResult,
    EmptyTrace,
    Progress,
    Recorder,
    RecordingOrder,
    TraceLost,
    Unbounded,
)
from gputop.profiler.stale_files import probe_name
from gputop.profiler.storage import RunFolder
from gputop.text.units import size

_PROBES = 3  # at most: a job may pause for longer than one takes


def capture_with_probe(recorder: Recorder, request: CaptureRequest, on_progress: Callable[[Progress], None],
                       on_plan: Callable[[Plan], None], stop: threading.Event) -> tuple[CaptureResult, Plan, Cost]:
    """Capture at most ``request.seconds``, as :meth:`Recorder.record` does. Blocks.

    With ``request.force`` exactly that long, without a probe and without asking whether memory and disk hold it.
    ``on_plan`` is given the length once it is chosen. What the plan leaves of the seconds is recorded as an overview
    beside the trace; the plan that is returned says how much of it there is. Raises GputopError, also where the node
    lacks the memory or disk space for the shortest useful capture.
    """
    seconds, logdir = request.seconds, request.logdir
    check_limits(recorder.pid)
    memory = JobMemory(recorder.pid, on_progress)
    if request.force or not needs_probe(seconds, recorder.limits):
        chosen = full_length(request)
        on_plan(chosen)
        result = recorder.record(RecordingOrder(seconds, logdir), memory, stop)
        return result, chosen, memory.cost(result.took_s, seconds)

    free = partial(free_resources, recorder.address, recorder.pid, Path(logdir).expanduser().absolute())
    if most := most_events(seconds, free(), recorder.limits):
        with contextlib.suppress(Unbounded):
            return _capture_at_once(recorder, request, memory, on_plan, stop, most)
    with probe_logdir(logdir) as folder:
        probed, probe = probe_job(recorder, folder, memory, stop)
        if stop.is_set() and probed is not None:
            chosen = Plan(seconds, probe.seconds, "stopped during the probe; the trace contains only the probe", probe)
            on_plan(chosen)
            return keep_probe(recorder, probed, logdir), chosen, memory.cost(probed.took_s, chosen.chosen_s)

        before = free()
        chosen = plan(seconds, probe, before, recorder.limits)
        on_plan(chosen)
        watch = Watch(memory, memory_limits(probe, before, recorder.limits), free, stop)
        guard = MemoryGuard(watch, threading.Event(), label=with_more if chosen.overview_s else None)
        try:
            order = RecordingOrder(chosen.chosen_s, logdir, shapes=chosen.shapes, most_events=chosen.most_events(probe))
            result = record_counted(recorder, order, guard, guard.halt)
        except TraceLost as error:
            if probed is None:
                raise
            raise GputopError(
                f"{error.message}; only the probe of {probe.seconds:g} s was saved", f"{error.fix} To analyze the "
                f"probe: gputop analyze {keep_probe(recorder, probed, logdir).path}") from None
        if result.asked_s < chosen.chosen_s:
            chosen = chosen.ended_early(float(f"{result.asked_s:.2g}"), "the job emitted more events than in the probe")
        made = OverviewMade(guard.plan_as_recorded(chosen, overview=recorder.limits.overview))
        if made.plan.overview_s:
            made = record_overview(recorder, result.path, made.plan, watch, folder)
    return result, made.plan, memory.cost(result.took_s + made.call_s, made.plan.chosen_s + made.recorded_s)


def _capture_at_once(recorder: Recorder, request: CaptureRequest, memory: JobMemory, on_plan: Callable[[Plan], None],
                     stop: threading.Event, most: int) -> tuple[CaptureResult, Plan, Cost]:
    """Capture without a probe, ``most`` events of the host. Raises GputopError; Unbounded where there is to be one."""
    chosen = Plan(request.seconds, request.seconds, f"full length, at most {count(most)} events")
    on_plan(chosen)
    result = recorder.record(RecordingOrder(request.seconds, request.logdir, most_events=most), memory, stop)
    recorded_s = float(f"{result.asked_s:.2g}")
    if recorded_s < request.seconds:
        chosen = replace(chosen, chosen_s=recorded_s, why=f"the job emits {count(most / recorded_s)} events/s")
        on_plan(chosen)
    return result, chosen, memory.cost(result.took_s, recorded_s)


def record_counted(recorder: Recorder, order: RecordingOrder, on_progress: Callable[[Progress], None],
                   stop: threading.Event) -> CaptureResult:
    """Record as ordered, with any number of events where the job cannot count them. Raises GputopError."""
    try:
        return recorder.record(order, on_progress, stop)
    except Unbounded:
        return recorder.record(replace(order, most_events=0), on_progress, stop)


def full_length(request: CaptureRequest) -> Plan:
    reason = "full length, no probe" if request.force else "full length, too short for a probe"
    return Plan(request.seconds, request.seconds, reason)


def probe_job(recorder: Recorder, logdir: Path, memory: JobMemory,
              stop: threading.Event) -> tuple[CaptureResult | None, Probe]:
    """The probe's trace, None where it holds no events, and what it says. One without events is made again: the job may
    pause, as at the start of an epoch. Raises GputopError."""
    threading.Thread(target=_steps_of, name="gputop-imports", daemon=True).start()  # the job is waited for meanwhile
    for probe_s in (min(PROBE_S, recorder.limits.probe_s), *(PROBE_S,) * (_PROBES - 1)):
        probed, probe = _probe_once(recorder, logdir, memory, stop, probe_s)
        if probed is not None or stop.is_set():
            break
    return probed, probe


def _probe_once(recorder: Recorder, logdir: Path, memory: JobMemory, stop: threading.Event,
                probe_s: float) -> tuple[CaptureResult | None, Probe]:
    """Raises GputopError."""
    def report(progress: Progress) -> None:
        memory(replace(progress, phase="probing"))

    try:
        order = RecordingOrder(probe_s, logdir, shapes=False, most_events=PROBE_EVENTS)
        result = record_counted(recorder, order, report, stop)
    except EmptyTrace as empty:
        return None, Probe(probe_s, empty.took_s, 0, 0, 0)
    if not result.path.is_relative_to(logdir):
        shutil.rmtree(result.path.parents[3], ignore_errors=True)
        raise GputopError(f"the disk of the logdir is full: even the probe of {size(result.bytes)} does not "
                          "fit", "Free some space, or choose another folder with --logdir DIR.")
    try:
        host, devices = recorder.count_events(result.path)
    except OSError as error:
        raise GputopError(f"cannot read the probe's trace: {error.strerror or error} ({result.path})",
                          "Check the file system, or capture without a probe: --force.") from None
    step_s, sure = step_time(result.path, host + devices) or (None, False)
    seconds = min(result.asked_s, result.took_s) if result.stopped_early else result.asked_s
    return result, Probe(seconds, result.took_s, result.bytes, host, devices, step_s, memory.growth, sure)


@contextmanager
def probe_logdir(logdir: str | Path) -> Iterator[Path]:
    """A folder below the logdir for the probe's trace, gone afterwards; raises GputopError where none can be. There and
    not in /tmp: a server on another machine may reach the logdir and nothing else."""
    RunFolder.create(logdir, "probe").discard()  # says what is wrong with the logdir before the job is disturbed
    base = Path(logdir).expanduser().absolute()
    missing = [folder for folder in (base, *base.parents) if not folder.exists()]
    folder = base / probe_name()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for made in missing:
            with contextlib.suppress(OSError):  # there is a trace in it
                made.rmdir()


def keep_probe(recorder: Recorder, probed: CaptureResult, logdir: str | Path, host: str | None = None,
               run: str | None = None) -> CaptureResult:
    """The probe as a trace like any other, in a run folder of its own or in one that exists; raises GputopError."""
    ending = recorder.limits.ending
    with RunFolder.create(logdir, host or probed.path.name.removesuffix(ending), run, ending) as folder:
        path = folder.take_over(probed.path)
    return replace(probed, path=path)


# A trace with more events is not read for its step time: it would hold the monitor up, and 150 MB.
_MAX_EVENTS = 600_000
_MAX_BYTES = 512 << 20  # an event of kineto's takes 300 to 800 bytes; what else a hostile file holds is not counted


def step_time(path: Path, events: int) -> tuple[float, bool] | None:
    """Median step time in a small trace (s), None where it holds no whole steps or is not small.

    And whether these are surely steps of training: what merely repeats, in kernels or ops, may be
    a part of a step that is longer than the trace, and those of an evaluation end with it.
    """
    try:
        if events > _MAX_EVENTS or path.stat().st_size > _MAX_BYTES:
            return None
        return _steps_of(path)
    except (GputopError, OSError):
        return None


def _steps_of(path: Path | None = None) -> tuple[float, bool] | None:
    """Read it as :func:`step_time`; without a trace only import what that needs. Raises GputopError, OSError."""
    from gputop.analysis.steps.phases import TRAINING, UNKNOWN
    from gputop.analysis.steps.steps import find_steps
    from gputop.trace.readers.load import load

    steps = find_steps(load([path])) if path is not None else None
    if steps is None:
        return None
    times = steps.times
    return times.median_s, times.confidence != "low" and times.phase in (TRAINING, UNKNOWN)
