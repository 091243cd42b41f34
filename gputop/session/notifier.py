"""Telling somebody: the terminal's bell, a command, a webhook. In a thread of its own; a receiver that hangs or fails
stops nothing."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from msgspec import Struct

from gputop.core.codec import to_document
from gputop.core.errors import EXIT_USAGE, GputopError
from gputop.launch.environment import inherited_environ
from gputop.session.notifications import News, Notification

if TYPE_CHECKING:
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
    """Run a command with the notification as JSON on its standard input and its line as the last argument.

    Raises OSError or RuntimeError where it cannot be started, fails, or takes too long, which ends it and its children.
    """
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
