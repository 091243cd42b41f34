"""Length of a recording: chosen from a short probe, so that a capture hurts neither the job nor the node.

Pure functions of figures. A capture's cost grows with the events it gathers, not with its length:
asked for 10 s, a job of tiny ops was held for 39 s, grew by 2.2 GB and lost a third to half of its
steps (TensorFlow 2.21, 4 M events), while a job of large steps notices nothing.
"""

from __future__ import annotations

import math

from msgspec import Struct
from msgspec.structs import replace

from gputop.core.errors import GputopError
from gputop.profiler.recording import RecorderLimits
from gputop.text.units import size

PROBE_S = 0.5
# With those of the probe: enough to say what a job spends its time on; more is granted for whole steps.
TARGET_EVENTS = 500_000
MIN_CAPTURE_S = 1.0
# Steps that are worth so many events: twenty to be sure of a finding, ten to find anything.
_STEPS_WORTH = ((20, 2 * TARGET_EVENTS), (10, 4 * TARGET_EVENTS))
# Once a hundred steps are in it a trace shows what every step does; more of it shows what is seldom. Of ten seconds of
# Keras jobs (TensorFlow 2.21 on two cores, 3 to 70 ms a step) slices of 40 steps and more told the costliest
# finding of the whole 138 times of 138, of 20 steps 48 of 49. Not less than 2 s, as what else a node does goes in
# seconds: it moved the median of 20 as of 320 steps of 3 ms by 6 to 10%. And not less than what costs next to nothing:
# 100 k events took 0.4 s to gather and 70 MB.
_ENOUGH_STEPS, _ENOUGH_S, _CHEAP_EVENTS = 100, 2.0, 100_000
# A recording is ended when the job has grown by this share of the free memory, or so much, on a small node that part
# of it: a probe does not show all growth. JAX 0.10 on the CPU, probed at 60 MB a second, grew by 2.9 GB in ten. It is
# no sooner, as most growth is none of the trace: while 35 k events/s of a Keras job were recorded its resident memory
# grew by 1,269 MiB, and what malloc had in use by 33; glibc keeps the free blocks that the events split (TensorFlow
# 2.21). And no later: were all of it events, which take 90 bytes each, gathering them would take six times as much.
_GROWTH_SHARE, _GROWTH_BYTES, _GROWTH_PART = 0.1, 2**30, 1 / 8
# What nothing can end is planned to grow the job by this share of the free memory for twenty steps, or by so much.
_PLANNED_SHARE, _PLANNED_BYTES = 0.02, 256 * 2**20
SERVER_LIMITS = RecorderLimits()
# An event of the overview costs the job about 7 µs (TensorFlow 2.21: 0.12 s of CPU a second at 17 k events/s), so that
# this many cost a fifth of what the detail of a default capture does (0.64 s of CPU); beginning and ending a second
# recording comes on top, and together they stay below a third. They are granted to each worker for each ten seconds
# asked for. The marks of thread pools are not among them: 97 to 99% of what three Keras jobs of wide layers made (8 to
# 62 k a second), at 0.6 to 2.8 µs each and mostly in the pools' own threads. With them no more than an analysis bears
# of all workers together.
_OVERVIEW_EVENTS, _MAX_OVERVIEW_EVENTS = 18_000, 4 * TARGET_EVENTS
# The overview makes 1 to 10 times fewer events than the detail: so the length of its first part is a guess.
OVERVIEW_SHARE = 1 / 4
MIN_OVERVIEW_S = 0.5
# What the overview's budget does not bear in one piece is recorded in samples: short recordings spread over the time,
# with the operations, as these say what the job does when no step ends in one. An event costs the job 5 to 8 µs
# then, and a sample 0.03 s of CPU besides (TensorFlow 2.21, two busy cores): 16 to 24 samples of 5 ms cost 0.6 s of
# CPU, as much as 0.7 s in one piece.
SAMPLE_EVERY_S, _SAMPLE_EVENTS = 0.4, 50_000
_SAMPLE_S = (0.005, 0.05)
# Of so many events of the host shapes are left out: with them a job of 263 k events/s (PyTorch 2.11, H200, 126 GiB
# free) grew by 1.9 GiB in 1.9 s, and its steps took seven times as long for the 18 s in which that became a trace.
_SHAPES_EVENTS = 250_000
# A capture of so many seconds has no probe where it can end at a number of events. A longer one that is full soon would
# waste the rest of its time.
_AT_ONCE_S = 3.0
_TRACE_EVENT_BYTES = 320  # of kineto's JSON, an event without shapes
# Where events can be counted, a probe ends at so many. A recording ends at so much more than its probe lets expect, as
# not more is known to fit, but not below what is always planned: a job of 169 k events/s in its probe, on a loaded
# machine, made four times as many a moment later, and ended for want of memory (PyTorch 2.13).
PROBE_EVENTS, _LEAST_EVENTS, _MORE_EVENTS = 50_000, 50_000, 1.2
# Collecting a trace slows the job, and takes no more than so many times as long as was asked for. Where a job of JAX
# 0.10 got 0.14 CPUs, eight seconds of 43 k events/s took 100 s.
_COLLECT_TIMES = 3
_RECEIVE_MULTIPLE = 3.0  # the answer as gRPC receives it, as one message, and its XSpace
ANALYSIS_MULTIPLE = 5.0  # benchmarks/trace_engine.py
_ANALYSIS_BASE_BYTES = 100e6  # the interpreter and NumPy
_NO_SHAPES = "input shapes are not recorded, because the job produces so many events"
_USABLE_SHARE = 0.8  # of what is free; the job goes on allocating meanwhile
# A recording is ended when less than this share of what was free is left beside what gathering it will take.
_RESERVED_SHARE = (1 - _USABLE_SHARE) / 2


class Probe(Struct, frozen=True):
    """Result of a short recording. ``step_s`` is None where it held no whole steps.

    ``sure``: these are training steps, by the framework's own calls or marks; else they are no
    ground for recording less. ``growth_bytes`` is that of the job's memory meanwhile, None where it is
    out of sight. It tells what the size of the trace does not: events that stay pin the heap between
    tensors that come and go, and a small Keras job on the CPU grew by 300 MB a second for 0.9 MB of trace.
    """

    seconds: float
    took_s: float
    bytes: int
    host_events: int
    device_events: int
    step_s: float | None = None
    growth_bytes: int | None = None
    sure: bool = False

    @property
    def events_per_s(self) -> float:
        return (self.host_events + self.device_events) / self.seconds

    @property
    def host_events_per_s(self) -> float:
        return self.host_events / self.seconds

    @property
    def device_events_per_s(self) -> float:
        return self.device_events / self.seconds


class FreeResources(Struct, frozen=True):
    """Free bytes; None is unlimited or unknown.

    ``shared_bytes`` is the memory of the node, or of the container that job and gputop are both in; ``job_bytes`` and
    ``own_bytes`` are what is left of memory limits of only one of them; ``disk_bytes`` is free in the logdir,
    ``job_disk_bytes`` where the job writes its trace. ``job_here``: the job takes its memory from this node.
    ``unknown`` says in words what could not be looked at.
    """

    shared_bytes: float | None = None
    job_bytes: float | None = None
    own_bytes: float | None = None
    disk_bytes: float | None = None
    job_disk_bytes: float | None = None
    job_here: bool = True
    unknown: tuple[str, ...] = ()


class Plan(Struct, frozen=True):
    """``chosen_s`` to record, and in ``why`` the reason as a person reads it; ``notes`` is what could not be known.

    ``enough``: the job could have borne a longer recording, which would also show rare work. ``overview_s`` is
    recorded after it in little detail, for what is seldom; ``ended`` says in a sentence what ended either early.
    ``shapes``: those of the operations' inputs are recorded.
    """

    asked_s: float
    chosen_s: float
    why: str
    probe: Probe | None = None
    notes: tuple[str, ...] = ()
    enough: bool = False
    overview_s: float = 0.0
    ended: str = ""
    shapes: bool = True

    @property
    def shortened(self) -> bool:
        return self.chosen_s < self.asked_s

    def most_events(self, probe: Probe) -> int:
        """Return the events of the host at which a recording as planned ends, of the job that this ``probe`` showed."""
        return round(max(_LEAST_EVENTS, _MORE_EVENTS * probe.host_events_per_s * self.chosen_s))

    def ended_early(self, seconds: float, cause: str, *, overview: bool = False) -> Plan:
        """The plan as it was carried out: shorter, with the reason, and then all the rest an ``overview`` if there can
        be one."""
        rest = "after that, gputop watched only for rare events" if overview else "less frequent work is missing"
        return replace(
            self, chosen_s=seconds, enough=False, why=f"ended early, because {cause}",
            overview_s=round(self.asked_s - seconds, 3) if overview else 0.0,
            ended=f"gputop ended the recording after {seconds:g} of {self.asked_s:g} s, because {cause}: {rest}.")


def needs_probe(asked_s: float, limits: RecorderLimits = SERVER_LIMITS) -> bool:
    """Return whether a probe could shorten it at all."""
    return asked_s > min(MIN_CAPTURE_S, limits.least_s)


def most_events(asked_s: float, free: FreeResources, limits: RecorderLimits) -> int:
    """Return the events of the host that a recording without a probe may have: as many, with shapes, as it is planned
    to grow the job by. 0 where it needs a probe, as what it makes at worst might not fit."""
    if limits.most_device_events_per_s == math.inf or asked_s > _AT_ONCE_S:
        return 0
    growth = max(_PLANNED_SHARE * (_left(free) or 0.0), _PLANNED_BYTES)
    host, devices = min(_CHEAP_EVENTS, growth / limits.job_bytes_per_event), limits.most_device_events_per_s * asked_s
    worst = Probe(asked_s, asked_s, round(_TRACE_EVENT_BYTES * (host + devices)), round(host), round(devices))
    try:
        fits = _limit_to_resources(Plan(asked_s, asked_s, ""), worst, free, limits)[0] == asked_s
    except GputopError:
        return 0
    grows = limits.job_bytes_per_event * host + limits.bare_bytes_per_event * devices
    return round(host) if fits and grows <= _most_growth(free) else 0


def plan(asked_s: float, probe: Probe, free: FreeResources, limits: RecorderLimits = SERVER_LIMITS) -> Plan:
    """The length of a capture after a probe; raises GputopError where not even the shortest fits.

    A hundred steps, but not less than 2 s or 100 k events, where the probe surely shows what a step is. Else: about
    half a million events with those of the probe, and at least a second; up to a million for twenty steps, or for those
    of a GPU that are too long for the probe to show, and up to two million for ten. All within the recorder's
    ``limits`` and what memory and disk hold, and at most ``asked_s``. A recording that nothing can end is planned to
    grow the job by no more than the guard of the others allows, and may be shorter than a second.
    """
    rate = probe.events_per_s
    if rate <= 0:
        return Plan(asked_s, asked_s, "full length, because the probe contains no events", probe, free.unknown)
    makes = f"the job emits {count(rate)} events/s"
    chosen_s, reason = asked_s, f"full length, at {count(rate)} events/s"
    enough_s = TARGET_EVENTS / rate - probe.seconds
    if enough_s < asked_s:
        chosen_s, reason = enough_s, makes
        least_s, what = max((min(MIN_CAPTURE_S, limits.least_s), "the shortest possible"), _for_steps(probe))
        if chosen_s < least_s:
            chosen_s, reason = ((least_s, f"{what}: {makes}") if least_s < asked_s
                                else (asked_s, f"full length, at {count(rate)} events/s"))
    device_rate = probe.device_events_per_s
    if device_rate * chosen_s > limits.device_events:
        chosen_s = limits.device_events / device_rate
        reason = f"its GPUs produce {count(device_rate)} events/s, and {limits.device_limit}"
    if rate * chosen_s > limits.events:
        chosen_s, reason = limits.events / rate, f"{makes}, and {limits.events_limit}"
    collect_s = max(probe.took_s - probe.seconds, 0.0) / probe.seconds
    if collect_s * chosen_s > _COLLECT_TIMES * asked_s:
        chosen_s = max(_COLLECT_TIMES * asked_s / collect_s, min(MIN_CAPTURE_S, limits.least_s, asked_s))
        reason = f"{makes}, and the profiler needs {collect_s:.0f} s to collect one second"
    enough_s = _enough(probe)
    growth_s = math.inf if limits.stoppable else _before_growth(probe, free, limits)
    shapes = probe.host_events_per_s * min(chosen_s, enough_s, growth_s) <= _SHAPES_EVENTS and (
        growth_s >= min(chosen_s, enough_s, max(MIN_CAPTURE_S, _STEPS_WORTH[0][0] * (probe.step_s or 0.0))))
    if limits.bare_bytes_per_event and not shapes:
        limits = replace(limits, job_bytes_per_event=limits.bare_bytes_per_event)
        growth_s = _before_growth(probe, free, limits)
    shapes = shapes or not limits.bare_bytes_per_event
    if growth_s < chosen_s:
        chosen_s = max(growth_s, min(MIN_CAPTURE_S, limits.least_s, asked_s))
        reason = f"{makes}, and the job's memory grows by {size(_job_bytes_per_s(probe, limits))} a second"
    enough = enough_s < chosen_s
    if enough:
        assert probe.step_s is not None
        steps = float(f"{enough_s / probe.step_s:.2g}")
        chosen_s, reason = enough_s, f"about {steps:.0f} steps are enough, at {count(rate)} events/s"
    least_s, least_why = _limit_to_resources(Plan(asked_s, chosen_s, reason, probe), probe, free, limits)
    if least_s < asked_s:
        parts = 100 if least_s < MIN_CAPTURE_S > limits.least_s else 10
        least_s = max(1 / parts, int(least_s * parts) / parts)
    fits, rest_s = least_why == reason, round(asked_s - least_s, 3)
    overview_s = rest_s if fits and limits.overview and rest_s >= MIN_CAPTURE_S else 0.0
    notes = free.unknown if shapes else (*free.unknown, _NO_SHAPES)
    return Plan(asked_s, least_s, least_why, probe, notes, enough and fits, overview_s, shapes=shapes)


def overview_events(asked_s: float, workers: int = 1) -> tuple[float, float]:
    """The events, and the marks of thread pools, that each of so many workers' overviews may have."""
    most = _MAX_OVERVIEW_EVENTS / workers
    events = min(_OVERVIEW_EVENTS * max(1.0, asked_s / 10), most)
    return events, most - events


def sample_s(asked_s: float, samples: int, rate: float, workers: int = 1) -> float:
    """Return the seconds of each of so many samples, of a job of ``rate`` events/s, in a capture of ``asked_s``."""
    events = min(_SAMPLE_EVENTS * max(1.0, asked_s / 10), _MAX_OVERVIEW_EVENTS / workers)
    least, most = _SAMPLE_S
    return min(max(events / max(samples * rate, 1.0), least), most)


def _enough(probe: Probe) -> float:
    """The seconds that show what every step does; infinite where the probe does not tell how long one is."""
    if probe.step_s is None or not probe.sure:
        return math.inf
    return max(_ENOUGH_STEPS * probe.step_s, _ENOUGH_S, _CHEAP_EVENTS / probe.events_per_s)


def _for_steps(probe: Probe) -> tuple[float, str]:
    """The seconds that whole steps are worth, and what for; 0 where there is no sign of steps."""
    rate, step_s = probe.events_per_s, probe.step_s
    if step_s is not None:
        steps_s = max(min(steps * step_s, events / rate) for steps, events in _STEPS_WORTH)
        return steps_s, f"for {steps_s / step_s:.0f} steps"
    return (_STEPS_WORTH[0][1] / rate, "for steps longer than the probe") if probe.device_events else (0.0, "")


class MemoryLimits(Struct, frozen=True):
    """Limits of a job's memory while it is recorded: it grows by no more than ``growth_bytes``, and of what is free of
    the node and within the job's own limit there stay so many bytes, and as many more for each second recorded."""

    growth_bytes: float = math.inf
    shared_bytes: float = 0.0
    shared_bytes_per_s: float = 0.0
    job_bytes: float = 0.0
    job_bytes_per_s: float = 0.0

    def excess(self, seconds: float, grown: int, free: FreeResources) -> str:
        """Complaint about a job that grew by so many bytes in so many seconds, as the rest of a sentence, or ""."""
        for left, least, per_s, where in (
                (free.shared_bytes, self.shared_bytes, self.shared_bytes_per_s, "is free"),
                (free.job_bytes, self.job_bytes, self.job_bytes_per_s, "is left within the job's limit")):
            if left is not None and left < least + seconds * per_s:
                return f"only {size(left)} of memory {where}"
        return f"the job's memory had grown by {size(grown)}" if grown > self.growth_bytes else ""


def memory_limits(probe: Probe, free: FreeResources, recorder: RecorderLimits) -> MemoryLimits:
    """Return the limits for a job that ``probe`` showed and that had so much ``free``: none that nothing can end."""
    if not recorder.stoppable:
        return MemoryLimits()
    job_per_s = _job_bytes_per_s(probe, recorder) if free.job_here else 0.0
    received_per_s = _RECEIVE_MULTIPLE * probe.bytes / probe.seconds
    # Where a probe shows no events, all growth may be that of the trace.
    growth = _most_growth(free) if probe.events_per_s else _PLANNED_BYTES
    return MemoryLimits(
        growth, _RESERVED_SHARE * (free.shared_bytes or 0.0), job_per_s + received_per_s,
        _RESERVED_SHARE * (free.job_bytes or 0.0), job_per_s)


def _most_growth(free: FreeResources) -> float:
    if (left := _left(free)) is None:
        return _GROWTH_BYTES
    return max(_GROWTH_SHARE * left, min(_GROWTH_BYTES, _GROWTH_PART * left))


def _left(free: FreeResources) -> float | None:
    """Bytes that the job can take; None where that is unknown."""
    return min((left for left in (free.shared_bytes, free.job_bytes) if left is not None), default=None)


def _job_bytes_per_s(probe: Probe, limits: RecorderLimits) -> float:
    """Growth of a job in a second of recording. A short probe shows less of it than is known of an event."""
    if limits.job_bytes_per_event:
        return limits.job_bytes_per_byte * probe.bytes / probe.seconds + (
            limits.job_bytes_per_event * probe.events_per_s)
    return max(limits.job_bytes_per_byte * probe.bytes, probe.growth_bytes or 0) / probe.seconds


def _before_growth(probe: Probe, free: FreeResources, limits: RecorderLimits) -> float:
    """The seconds after which a guard would end a recording, of which the job's growth is known beforehand: for ten
    steps as much as the guard allows, for twenty a fifth of that, else little."""
    per_s, most = _job_bytes_per_s(probe, limits), _most_growth(free)
    if not per_s:
        return math.inf
    planned = max(_PLANNED_SHARE * (_left(free) or 0.0), _PLANNED_BYTES)
    if probe.step_s is None:
        return (planned if probe.device_events else _PLANNED_BYTES) / per_s
    (twenty, _), (ten, _) = _STEPS_WORTH
    return max(_PLANNED_BYTES / per_s, min(twenty * probe.step_s, planned / per_s),
               min(ten * probe.step_s, most / per_s))


def _limit_to_resources(wanted: Plan, probe: Probe, free: FreeResources, recorder: RecorderLimits) -> tuple[float, str]:
    """Length and reason: shorter, where memory or disk would not hold it; raises GputopError."""
    asked_s, chosen_s, reason = wanted.asked_s, wanted.chosen_s, wanted.why
    trace_per_s = probe.bytes / probe.seconds
    job_per_s = _job_bytes_per_s(probe, recorder)
    if recorder.bare_bytes_per_event:  # the probe is without shapes
        trace_per_s *= recorder.job_bytes_per_event / recorder.bare_bytes_per_event
    own_per_s = max(_RECEIVE_MULTIPLE, ANALYSIS_MULTIPLE) * trace_per_s
    least_s = min(MIN_CAPTURE_S, recorder.least_s, asked_s)
    limits = (  # free, needed per second, needed besides, what it is
        # The job gives little of its part back before the analysis begins.
        (free.shared_bytes, own_per_s + (job_per_s if free.job_here else 0), _ANALYSIS_BASE_BYTES, "memory"),
        (free.job_bytes, job_per_s, 0.0, "memory within the job's limit"),
        (free.own_bytes, own_per_s, _ANALYSIS_BASE_BYTES, "memory within gputop's limit"),
        (free.disk_bytes, trace_per_s, 0.0, "disk space in the logdir"),
        (free.job_disk_bytes, trace_per_s, 0.0, "disk space in the job's /tmp"),
    )
    for free_bytes, per_s, base, what in limits:
        if free_bytes is None:
            continue
        usable = _USABLE_SHARE * free_bytes - base
        if usable < least_s * per_s:
            grew = "" if probe.growth_bytes is None else f" and grew by {size(probe.growth_bytes)}"
            raise GputopError(
                f"not enough {what} for a capture: {size(free_bytes)} free, and capturing {least_s:g} s needs about "
                f"{size(least_s * per_s + base)} (in a probe of {probe.seconds:g} s, the job produced a trace of "
                f"{size(probe.bytes)}{grew})",
                f"Free some{', or choose another --logdir' if 'logdir' in what else ''}; or force a short capture "
                "without a probe or checks: gputop capture --seconds 0.3 "
                f"--force.{recorder.instead and ' Or: '}{recorder.instead}")
        if usable < chosen_s * per_s:
            chosen_s = usable / per_s
            reason = f"{size(free_bytes)} of {what} is free, and a capture needs {size(per_s)} a second"
    return chosen_s, reason


def count(number: float) -> str:
    """Two or three digits, as one says it: 240 k, 1.2 M."""
    for unit, one in ((" M", 1e6), (" k", 1e3)):
        if number >= 0.9995 * one:
            return f"{number / one:.1f}{unit}" if number < 9.95 * one else f"{number / one:.0f}{unit}"
    return f"{number:.0f}"
