"""Telling somebody what is worth interrupting them for: findings that last, faults, the end of captures and jobs.

By the terminal's bell, a command, a webhook. In a thread of its own; a receiver that hangs or fails stops nothing."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import shlex
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from msgspec import Struct

from gputop.core.codec import to_document
from gputop.core.errors import EXIT_USAGE, GputopError
from gputop.core.samples import OK
from gputop.launch.environment import inherited_environ
from gputop.text.units import printable, seconds

if TYPE_CHECKING:
    from gputop.profiler.capture.records import CaptureRecord
    from gputop.session.session import Change, Session

TIMEOUT_S = 10.0  # of a command or a webhook
MAX_WAITING = 100  # notifications, of which the newest are dropped
URL, TOKEN = "GPUTOP_WEBHOOK_URL", "GPUTOP_WEBHOOK_TOKEN"
_COMMAND = "command:"


class Ways(Struct, frozen=True):
    """Ways to notify: by the terminal, by commands, by the webhook of the environment."""

    bell: bool = False
    commands: tuple[tuple[str, ...], ...] = ()
    webhook: str = ""
    token: str = ""

    @property
    def in_the_clear(self) -> str:
        """The machine to which the webhook's address and token go unencrypted; empty: none."""
        host = urlsplit(self.webhook).hostname or ""
        is_clear = self.webhook.startswith("http://") and host not in ("localhost", "127.0.0.1", "::1")
        return host if is_clear else ""


_OF_SHELL = frozenset((">", ">>", "<", "|", "||", "&", "&&"))  # words that only a shell understands


def parse_ways(texts: Sequence[str]) -> Ways:
    """``--notify``: "bell", "webhook", "command:LINE". Raises GputopError (wrong usage)."""
    commands = []
    for text in texts:
        if text.startswith(_COMMAND):
            try:
                words = tuple(shlex.split(text.removeprefix(_COMMAND)))
            except ValueError as error:
                raise GputopError(f"--notify {text}: {error}", "Quote the command as in a shell.",
                                  EXIT_USAGE) from error
            if of_shell := [word for word in words if word.endswith(";") or word in _OF_SHELL]:
                raise GputopError(f"--notify {text}: gputop starts the command without a shell, but {of_shell[0]!r} "
                                  "needs a shell", "Put it in a script, or use --notify \"command:sh -c '…'\".",
                                  EXIT_USAGE)
            if words:
                commands.append(words)
                continue
        if text not in ("bell", "webhook"):
            raise GputopError(f"--notify does not support {text}", "Use bell, webhook, or command:LINE, such as "
                                                                   "'command:notify-send gputop'.", EXIT_USAGE)
    return Ways("bell" in texts, tuple(commands), *(_webhook() if "webhook" in texts else ()))


def _webhook() -> tuple[str, str]:
    url, token = os.environ.get(URL, ""), os.environ.get(TOKEN, "")
    if not url.startswith(("https://", "http://")) or not url.isprintable() or " " in url or not _has_host(url):
        raise GputopError(f"--notify webhook needs an address in {URL}",
                          f"export {URL}=https://… (and {TOKEN}, if the receiver requires a bearer token)", EXIT_USAGE)
    if not token.isprintable():
        raise GputopError(f"{TOKEN} contains a character that an HTTP header cannot contain",
                          "Set it again without a trailing newline.", EXIT_USAGE)
    return url, token


def _has_host(url: str) -> bool:
    """Return whether the address names a host, and a port that there can be."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


class Teller:
    """Tells by commands and the webhook, each in a thread of its own."""

    def __init__(self, ways: Ways) -> None:
        self._receivers = [_Receiver(shlex.join(words), partial(run_command, words)) for words in ways.commands]
        if ways.webhook:
            self._receivers.append(_Receiver("the webhook", partial(post, ways.webhook, ways.token)))

    @property
    def problem(self) -> str:
        """The ways that failed last, and why; empty: none."""
        return "; ".join(receiver.problem for receiver in self._receivers if receiver.problem)

    def tell(self, notification: Notification | None) -> None:
        """Tell this, after what is being told; returns at once."""
        for receiver in self._receivers:
            receiver.put(notification)

    def close(self, wait_s: float = TIMEOUT_S + 1) -> None:
        """Tell no more; what is being told, and what waits to be, has so long to be told."""
        self.tell(None)
        end_s = time.monotonic() + wait_s
        for receiver in self._receivers:
            receiver.join(max(0.0, end_s - time.monotonic()))


class Notifier(Teller):
    """Listens to a session and tells its news."""

    def __init__(self, session: Session, ways: Ways) -> None:
        super().__init__(ways)
        self._session, self._bell = session, ways.bell
        self._news = News(session)
        self._lock = threading.Lock()
        session.listen(self._changed)

    def _changed(self, change: Change) -> None:
        with self._lock:
            news = self._news.of(change)
        for notification in news:
            if self._bell and self._session.ring is not None:
                self._session.ring(notification.line)
            self.tell(notification)


class _Receiver:
    """One that is told: what comes while it is slow waits, and what is too much is dropped."""

    def __init__(self, name: str, tell: Callable[[Notification], None]) -> None:
        self.problem = ""
        self._name, self._tell = name, tell
        self._waiting: queue.Queue[Notification | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="gputop-notify", daemon=True)
        self._thread.start()

    def put(self, notification: Notification | None) -> None:
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(notification)

    def join(self, wait_s: float) -> None:
        self._thread.join(wait_s)

    def _run(self) -> None:
        while (notification := self._waiting.get()) is not None:
            try:
                self._tell(notification)
                self.problem = ""
            except Exception as error:  # noqa: BLE001  whatever it does, it is told of the next one
                self.problem = f"--notify: {self._name} failed: {error}"


def run_command(command: Sequence[str], notification: Notification, timeout_s: float = TIMEOUT_S) -> None:
    """Run a command with the notification as JSON on its standard input and its line as the last argument. Raises
    OSError or RuntimeError where it cannot be started, fails, or takes too long, which ends it and its children."""
    with subprocess.Popen([*command, notification.line], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL, start_new_session=True, env=inherited_environ()) as process:
        try:
            process.communicate(json.dumps(to_document(notification)).encode(), timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise RuntimeError(f"the command took more than {timeout_s:g} s") from None
    if process.returncode:
        raise RuntimeError(f"the command exited with status {process.returncode}")


def post(url: str, token: str, notification: Notification, timeout_s: float = TIMEOUT_S) -> None:
    """POST the notification as JSON. Raises RuntimeError, in whose text neither address nor token stands, after at
    most ``timeout_s``."""
    from http.client import HTTPException, HTTPResponse
    from urllib.error import HTTPError
    from urllib.request import HTTPHandler, HTTPRedirectHandler, HTTPSHandler, Request, build_opener

    from gputop.core.bounded_http import Connection, SecureConnection

    class Plain(HTTPHandler):
        def http_open(self, req: Request) -> HTTPResponse:
            return self.do_open(Connection, req)

    class Secure(HTTPSHandler):
        def https_open(self, req: Request) -> HTTPResponse:
            return self.do_open(SecureConnection, req)

    class NoRedirect(HTTPRedirectHandler):
        def redirect_request(self, *_: object) -> None:
            """The token is for this address alone."""

    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
    document = {**to_document(notification), "allowed_mentions": {"parse": []}}  # Discord's: of nobody
    request = Request(url, json.dumps(document).encode(), headers)
    try:
        with build_opener(NoRedirect, Plain, Secure).open(request, timeout=timeout_s):
            pass
    except HTTPError as error:
        raise RuntimeError(f"it answered {error.code}") from None
    except (OSError, HTTPException, ValueError) as error:
        raise RuntimeError(type(getattr(error, "reason", error)).__name__) from None


# -- what is worth it ----------------------------------------------------------------------------

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
