"""Events of a session that are worth interrupting somebody for: findings that last, faults, the end of captures and
jobs."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from gputop.core.samples import OK
from gputop.text.units import printable, seconds

if TYPE_CHECKING:
    from gputop.profiler.capture.records import CaptureRecord
    from gputop.session.session import Change, Session

Kind = Literal["finding", "fault", "capture", "job"]

HOLD_S = 15.0  # a live finding is told once it has lasted so long, and is over when it was away for so long
REPEAT_S = 600.0  # the same is not told again sooner
MOST_AN_HOUR = 30
# In the names of a trace: @everyone, @channel and @here; <@1>, <@&1>, <#1> and <!here>; [text](URL). A space of no
# width behind these makes words of them.
_MENTION = re.compile(r"@|<|\](?=\()")
_FAULTS = frozenset(("xid", "ecc", "lost"))
_SEVERITIES = frozenset(("high", "medium"))


class Notification(Struct, frozen=True, tag_field="schema", tag="gputop.notification/1"):
    """The document that a command or a webhook of --notify gets. ``time_s`` is Unix time. ``left_out`` counts those
    that were not sent since the one before, being too many.

    ``text`` and ``content`` are its line, as Slack, Mattermost and Discord show it of a webhook. A name out of a trace
    mentions nobody there, and is no link that looks like another.
    """

    kind: Kind
    time_s: float
    host: str
    title: str
    details: str
    simulated: bool
    left_out: int
    text: str
    content: str

    @classmethod
    def of(cls, kind: Kind, time_s: float, host: str, title: str, details: str, simulated: bool,
           left_out: int = 0) -> Notification:
        title = printable(title)
        shown = _MENTION.sub("\\g<0>\u200b", _line(host, title, simulated, left_out))
        for_slack = shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")  # <!channel>, <@U1>, <URL|X>
        return cls(kind, time_s, host, title, printable(details.strip()), simulated, left_out, for_slack, shown)

    @property
    def line(self) -> str:
        return _line(self.host, self.title, self.simulated, self.left_out)


def _line(host: str, title: str, simulated: bool, left_out: int) -> str:
    more = f" ({left_out} other messages not sent)" if left_out else ""
    return printable(f"{'SIMULATED ' if simulated else ''}{host}: {title}{more}")


def captured(record: CaptureRecord) -> str:
    """The title of what is told of a capture."""
    first = record.findings[0].title if record.findings else record.limit.partition("\n")[0]
    return f"captured {record.address} for {seconds(record.took_s)}" + (f": {first}" if first else "")


class _Held(Struct):
    since_s: float
    seen_s: float
    reported: bool = False


class News:
    """Says what is new in a session, each time that it has changed. Not for several threads at once."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._held: dict[str, _Held] = {}  # live findings by id
        self._last_s: dict[tuple[Kind, str], float] = {}
        self._recent: deque[float] = deque(maxlen=MOST_AN_HOUR)
        self._left_out = 0
        self._gone: set[str] = set()  # UUIDs of GPUs that were told to be lost
        self._events_s = session.feed.clock()
        self._capture_s = 0.0
        self._ended: object = None

    def of(self, change: Change) -> list[Notification]:
        now_s = self._session.feed.clock()
        news = [*self._findings(now_s), *self._faults(now_s), *self._job()]
        if change in ("capture", "failed"):
            news += self._capture()
        return [new for kind, title, text in news if (new := self._limited(kind, title, text, now_s)) is not None]

    def _findings(self, now_s: float) -> Iterator[tuple[Kind, str, str]]:
        for finding in self._session.results.live.findings:
            held = self._held.get(finding.id)
            if held is None or now_s - held.seen_s > HOLD_S:
                held = self._held[finding.id] = _Held(now_s, now_s)
            held.seen_s = now_s
            if not held.reported and now_s - held.since_s >= HOLD_S and finding.severity in _SEVERITIES:
                held.reported = True
                yield "finding", finding.title, f"{finding.why} {finding.action}"

    def _faults(self, now_s: float) -> Iterator[tuple[Kind, str, str]]:
        for event in self._session.results.events.between(self._events_s, now_s + 1):
            if event.kind in _FAULTS and event.begin_s > self._events_s:
                yield "fault", f"GPU {event.gpu}: {event.text}", f"{event.uuid}"
                if event.kind == "lost":
                    self._gone.add(event.uuid)
        self._events_s = now_s
        sample = self._session.feed.sample
        for gpu in sample.gpus if sample is not None and self._gone else ():
            if gpu.info.uuid in self._gone and gpu.state == OK:
                self._gone.discard(gpu.info.uuid)
                yield "fault", f"GPU {gpu.info.label} is back", gpu.info.uuid

    def _job(self) -> Iterator[tuple[Kind, str, str]]:
        ended = self._session.watch.ended_server
        if ended is not None and ended != self._ended:
            yield "job", f"the job with process {ended.pid} has ended", f"{ended.address} {ended.description}"
        self._ended = ended

    def _capture(self) -> Iterator[tuple[Kind, str, str]]:
        status, record = self._session.control.status, self._session.results.last_capture
        if status is None or status.running or status.time_s <= self._capture_s:
            return
        self._capture_s = status.time_s
        if status.phase == "failed":
            yield "capture", f"the capture of {status.address} failed", f"{status.message} {status.fix}"
        elif record is not None:
            yield "capture", captured(record), str(record.path)

    def _limited(self, kind: Kind, title: str, text: str, now_s: float) -> Notification | None:
        """The notification, or None where the same or too many others were told lately."""
        last_s = self._last_s.get((kind, title))
        if last_s is not None and 0 <= now_s - last_s < REPEAT_S:
            return None
        if len(self._recent) == MOST_AN_HOUR and 0 <= now_s - self._recent[0] < 3600:
            self._left_out += 1
            return None
        recent_s = {key: sent_s for key, sent_s in self._last_s.items() if now_s - sent_s < REPEAT_S}
        self._last_s = recent_s | {(kind, title): now_s}
        self._recent.append(now_s)
        left_out, self._left_out = self._left_out, 0
        sample = self._session.feed.sample
        host = sample.host.hostname if sample is not None else ""
        return Notification.of(kind, now_s, host, title, text, self._session.feed.source.simulated, left_out)
