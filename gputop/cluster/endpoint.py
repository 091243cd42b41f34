"""Address of a Prometheus, the credentials that it wants of who asks, and a way there by ssh.

A URL is ``http://HOST[:PORT][/PREFIX]``, ``https://…``, or ``ssh://[USER@]LOGIN[:PORT]/http://…``: the second part as
seen from the login node, reached by the system's own ssh with the user's configuration. Credentials come from the
environment or from files that the settings name, never from the command line, which every user of a node can read.
"""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from msgspec import Struct

from gputop.core.errors import EXIT_USAGE, GputopError
from gputop.core.files import read_regular, temporary_place
from gputop.text.programs import ErrorTail
from gputop.text.units import printable

TUNNEL_S = 20.0  # for a connection to the login node; with a terminal, on which ssh may ask for a password, …
TUNNEL_ASKING_S = 120.0
_POLL_S = 0.05
_MAX_SECRET_BYTES = 64 * 1024  # tokens of service accounts have some kB
_LOGIN = re.compile(r"(?:[A-Za-z0-9._][A-Za-z0-9._-]*@)?[A-Za-z0-9._][A-Za-z0-9._-]*")
_HOW = "Write http://HOST:9090, https://HOST/PREFIX or ssh://LOGIN/http://HOST:9090."


class Endpoint(Struct, frozen=True):
    """A Prometheus. ``login``: the node to which ssh goes first, with its port, None without."""

    scheme: str
    host: str
    port: int
    prefix: str = ""
    login: str = ""
    login_port: int | None = None

    @property
    def url(self) -> str:
        """Return the URL as it was given."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        address = f"{self.scheme}://{host}:{self.port}{self.prefix}"
        port = "" if self.login_port is None else f":{self.login_port}"
        return f"ssh://{self.login}{port}/{address}" if self.login else address

    @property
    def is_private(self) -> bool:
        """Return whether nobody on the network between can read what is sent: TLS, or the machine itself that asks, or
        to which ssh goes. Beyond that login node ssh encrypts nothing."""
        return self.scheme == "https" or self.host in ("localhost", "127.0.0.1", "::1",
                                                       self.login.rpartition("@")[2] or "localhost")


def parse_endpoint(text: str) -> Endpoint:
    """Raises GputopError (wrong usage)."""
    login, login_port, url = "", None, text
    if text.startswith("ssh://"):
        login_part, _, url = text.removeprefix("ssh://").partition("/")
        login, _, number = login_part.partition(":")
        if not _LOGIN.fullmatch(login):
            raise _usage(text, "ssh:// must be followed by a login node")
        if number:
            if not (number.isascii() and number.isdecimal() and len(number) <= 5 and 1 <= int(number) <= 65535):
                raise _usage(text, f"{number} is not a port")
            login_port = int(number)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise _usage(text, "it is not a URL") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not re.fullmatch(r"[\w.:%-]+", parts.hostname):
        raise _usage(text, "it is not an http:// or https:// URL with a host")
    if parts.username is not None or parts.password is not None:
        raise GputopError("a password on the command line can be read by every user of this node",
                          "Set GPUTOP_PROMETHEUS_USER and GPUTOP_PROMETHEUS_PASSWORD, or the settings prometheus_user "
                          "and prometheus_password_file.", EXIT_USAGE)
    if parts.query or parts.fragment or not re.fullmatch(r"[\w./~%+-]*", parts.path):
        raise _usage(text, "only a path may follow the host")
    if port is None:
        port = 443 if parts.scheme == "https" else 80
    return Endpoint(parts.scheme, parts.hostname, port, parts.path.rstrip("/"), login, login_port)


def _usage(text: str, reason: str) -> GputopError:
    return GputopError(f"{printable(text)[:200]!r} is not a valid Prometheus address: {reason}", _HOW, EXIT_USAGE)


# -- credentials ----------------------------------------------------------------------------------


class Credentials(Struct, frozen=True):
    """Credentials that are sent with each request; "" where there is none. ``ca`` is a file with certificates."""

    token: str = ""
    user: str = ""
    password: str = ""
    ca: str = ""

    def __repr__(self) -> str:
        return "Credentials(…)"  # no secret in a traceback

    def headers(self) -> dict[str, str]:
        if self.token:
            return {"Authorization": f"Bearer {self.token}"}
        if self.user:
            import base64

            both = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
            return {"Authorization": f"Basic {both}"}
        return {}


def credentials(environ: Mapping[str, str], settings: Mapping[str, str]) -> Credentials:
    """Return those of the environment (GPUTOP_PROMETHEUS_TOKEN, …_USER, …_PASSWORD, …_CA), else those that the settings
    name.

    ``settings`` has the keys prometheus_token_file, prometheus_user, prometheus_password_file and prometheus_ca.
    Raises GputopError for a file that cannot be read, and for a secret that no header can hold.
    """
    def one(name: str, file: str) -> str:
        value = environ.get(f"GPUTOP_PROMETHEUS_{name}", "")
        if not value and settings.get(file):
            value = _secret(Path(settings[file]).expanduser())
        if not value.isprintable():
            raise GputopError(f"the {name.lower()} for Prometheus contains a newline or a control character",
                              "Check whether it has a second line.", EXIT_USAGE)
        return value

    user = environ.get("GPUTOP_PROMETHEUS_USER", "") or settings.get("prometheus_user", "")
    ca = environ.get("GPUTOP_PROMETHEUS_CA", "") or settings.get("prometheus_ca", "")
    return Credentials(one("TOKEN", "prometheus_token_file"), user,
                       one("PASSWORD", "prometheus_password_file") if user else "",
                       str(Path(ca).expanduser()) if ca else "")


def _secret(path: Path) -> str:
    try:
        return read_regular(path, _MAX_SECRET_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise GputopError(f"cannot read the secret in {path}: {getattr(error, 'strerror', None) or 'it is not UTF-8'}",
                          "Check prometheus_token_file and prometheus_password_file in the settings "
                          "(gputop config).", EXIT_USAGE) from None


# -- a way there by ssh ---------------------------------------------------------------------------


class Tunnel:
    """A connection by the system's ssh that carries a Unix socket here to the Prometheus there."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: ErrorTail | None = None  # what ssh says

    def path(self, *, may_ask: bool = False) -> str:
        """The socket, with a connection behind it: a new one where the last has ended.

        ``may_ask``: ssh may ask for a password on the terminal. Raises GputopError with what ssh says.
        """
        if self._folder is not None and self._process is not None and self._process.poll() is None:
            return f"{self._folder.name}/socket"
        self.close()
        self._folder = tempfile.TemporaryDirectory(prefix="gputop-ssh-", dir=temporary_place())  # 0700
        path = f"{self._folder.name}/socket"
        try:
            self._process = subprocess.Popen(self._command(path, may_ask), stdin=subprocess.DEVNULL,
                                             stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        except OSError as error:
            self.close()
            raise self._failed(f"it cannot be started: {error.strerror or error}") from error
        assert self._process.stderr is not None
        self._errors = ErrorTail(self._process.stderr, self._process.kill)
        deadline_s = time.monotonic() + (TUNNEL_ASKING_S if may_ask else TUNNEL_S)
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                raise self._failed(self._errors.text() or "it exited immediately")
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as attempt:
                attempt.connect(path)
                return path
            time.sleep(_POLL_S)
        self.close()
        raise self._failed("it did not connect in time")

    def _command(self, path: str, may_ask: bool) -> list[str]:
        to, host = self._endpoint, self._endpoint.host
        port = [] if to.login_port is None else ["-p", str(to.login_port)]
        quiet = [] if may_ask else ["-o", "BatchMode=yes"]
        target = f"[{host}]:{to.port}" if ":" in host else f"{host}:{to.port}"
        return ["ssh", "-N", "-T", *quiet, "-o", "ExitOnForwardFailure=yes", "-o", "ServerAliveInterval=15",
                "-o", "ConnectTimeout=10", "-o", "ForwardAgent=no", *port, "-L", f"{path}:{target}", "--", to.login]

    def _failed(self, reason: str) -> GputopError:
        return GputopError(f"ssh to {self._endpoint.login} failed: {reason}",
                           f"Try: ssh {self._endpoint.login} true. A connection that asks for a password works only as "
                           "a shared connection (ControlMaster in ~/.ssh/config).")

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(2.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._errors is not None:
            self._errors.close()
            self._errors = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
