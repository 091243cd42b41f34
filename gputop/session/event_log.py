"""Log of events since gputop watches: faults, throttling, captures, findings; for a view's time axis."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from gputop.core.findings import Finding
from gputop.core.metrics import FAULTS
from gputop.core.samples import LOST, NOT_RESPONDING, GpuSample, NodeSample
from gputop.profiler.capture.records import CaptureRecord, CaptureStatus

Kind = Literal["xid", "ecc", "lost", "thermal", "power", "capture", "finding"]

MAX_KNOWN_XIDS = 1 << 14  # a sick GPU, or an engine that lies, can report one at each tick
MAX_ENDED_EVENTS = 8192  # marks that are over; the oldest go first
MAX_GAP_S = 5.0  # what comes again within this time, or within three samples, went on
REAPPEARANCE_S = 60.0  # a finding that was away for so long appears anew

# Clock event reasons that hold a GPU's clocks down. The others are wished for: idle, application clocks, sync boost.
SLOWDOWN_REASONS: dict[str, Kind] = {"power cap": "power", "power brake": "power",
                                    "thermal": "thermal", "hw thermal": "thermal", "hw slowdown": "thermal"}


def _kind_of(gpu: GpuSample, reason: str) -> Kind:
    """The kind of a slowdown. One that the hardware makes is of heat only near the temperature for that."""
    if reason == "hw slowdown" and "hw thermal" not in gpu.clock_event_reasons:
        from gputop.advice.registry import limit  # rare: the first picture need not wait for the limits

        now, most = gpu["temperature_c"].value, gpu["temperature_slowdown_c"].value
        if now is not None and most is not None and now < most - limit("thermal_throttled.near_c_enter"):
            return "power"
    return SLOWDOWN_REASONS[reason]


class LoggedEvent(Struct, frozen=True):
    """Something that began at ``begin_s`` and was last seen at ``end_s`` (Unix time).

    ``text`` says what, as it came: it may need :func:`gputop.text.units.printable`. ``uuid`` and ``gpu`` (its label)
    name the GPU it happened on; both are empty for what happened to the job.
    """

    kind: Kind
    begin_s: float
    end_s: float
    text: str
    gpu: str = ""
    uuid: str = ""

    def within(self, begin_s: float, end_s: float) -> bool:
        return self.begin_s < end_s and self.end_s >= begin_s


class EventLog:
    """Fed with samples, findings and the state of captures; may be asked from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: deque[LoggedEvent] = deque(maxlen=MAX_ENDED_EVENTS)
        self._ongoing: dict[tuple[str, str], LoggedEvent] = {}  # by GPU and what
        self._errors: dict[tuple[str, str], float] = {}
        self._xids: dict[tuple[int, float, int], None] = {}  # the newest last
        self._found: dict[str, float] = {}  # findings by id: when last there
        self._capture: LoggedEvent | None = None
        self._last_s = -math.inf

    def between(self, begin_s: float, end_s: float) -> list[LoggedEvent]:
        """Events in that time, in part at least."""
        with self._lock:
            marks = [*self._ended, *self._ongoing.values(), *([self._capture] if self._capture else ())]
        return [m for m in marks if m.within(begin_s, end_s)]

    # -- feeding ------------------------------------------------------------------------------

    def note_sample(self, sample: NodeSample) -> None:
        """Take over what a sample says of faults and throttling. One that goes back in time forgets what came after."""
        with self._lock:
            if sample.time_s < self._last_s:
                self._forget_from(sample.time_s)
            self._last_s = sample.time_s
            gap_s = max(MAX_GAP_S, 3 * (sample.interval_s or 0.0))
            for gpu in sample.gpus:
                for reason in gpu.clock_event_reasons:
                    if reason in SLOWDOWN_REASONS:
                        self._see(gpu, _kind_of(gpu, reason), reason, sample.time_s, gap_s)
                if gpu.state in (LOST, NOT_RESPONDING):  # a DCGM engine that fails says nothing of the GPU
                    self._see(gpu, "lost", gpu.state, sample.time_s, gap_s)
                for event in gpu.xids:
                    # An instance tells the events of its GPU again.
                    if (key := (gpu.info.index, event.time_s, event.xid)) not in self._xids:
                        self._xids[key] = None
                        if len(self._xids) > MAX_KNOWN_XIDS:
                            del self._xids[next(iter(self._xids))]
                        self._add(gpu, "xid", f"Xid {event.xid}", event.time_s)
                self._count_errors(gpu, sample.time_s)

    def note_findings(self, findings: Iterable[Finding], time_s: float) -> None:
        """A finding is marked when it appears; one that comes and goes, the first time."""
        with self._lock:
            for finding in findings:
                last_s = self._found.get(finding.id, -math.inf)
                if time_s - last_s > REAPPEARANCE_S:
                    self._ended.append(LoggedEvent("finding", time_s, time_s, finding.title))
                self._found[finding.id] = time_s

    def note_capture(self, status: CaptureStatus) -> None:
        """A capture lasts from the beginning of its recording until that is over."""
        with self._lock:
            now_s = status.time_s
            if status.phase in ("recording", "overview"):
                begin_s = self._capture.begin_s if self._capture else now_s - status.elapsed_s
                self._capture = LoggedEvent("capture", begin_s, now_s, f"capture of {status.address}")
            elif self._capture is not None:
                self._ended.append(self._capture)
                self._capture = None

    def note_record(self, record: CaptureRecord) -> None:
        """A capture of which only the end is known, and how long it took."""
        with self._lock:
            self._ended.append(LoggedEvent("capture", record.time_s - record.took_s, record.time_s,
                                   f"capture of {record.address}"))

    # -- inside -------------------------------------------------------------------------------

    def _add(self, gpu: GpuSample, kind: Kind, text: str, time_s: float) -> None:
        self._ended.append(LoggedEvent(kind, time_s, time_s, text, gpu.info.label, gpu.info.uuid))

    def _see(self, gpu: GpuSample, kind: Kind, what: str, time_s: float, gap_s: float) -> None:
        key = (gpu.info.uuid, what)
        mark = self._ongoing.get(key)
        if mark is not None and time_s - mark.end_s <= gap_s:
            self._ongoing[key] = replace(mark, end_s=time_s)
            return
        if mark is not None:
            self._ended.append(mark)
        self._ongoing[key] = LoggedEvent(kind, time_s, time_s, what, gpu.info.label, gpu.info.uuid)

    def _count_errors(self, gpu: GpuSample, time_s: float) -> None:
        for metric, fault in FAULTS.items():
            reading = gpu.readings.get(metric)
            if not fault.event or reading is None or reading.value is None:
                continue
            key = (gpu.info.uuid, metric)
            more = reading.value - self._errors.get(key, reading.value)
            self._errors[key] = reading.value
            if more > 0:
                self._add(gpu, "ecc", fault.event if more == 1 else f"{more:.0f} × {fault.event}", time_s)

    def _forget_from(self, time_s: float) -> None:
        self._ended = deque((m for m in self._ended if m.begin_s < time_s), maxlen=MAX_ENDED_EVENTS)
        self._ongoing = {key: replace(m, end_s=min(m.end_s, time_s))
                          for key, m in self._ongoing.items() if m.begin_s < time_s}
        self._xids = {key: None for key in self._xids if key[1] < time_s}
        self._found = {name: s for name, s in self._found.items() if s < time_s}
        self._errors.clear()
