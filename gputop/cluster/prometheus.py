"""A client of Prometheus's HTTP API: instant and range queries, with an end to what it waits for and takes.

VictoriaMetrics, Thanos and Mimir speak the same. https://prometheus.io/docs/prometheus/latest/querying/api
"""

from __future__ import annotations

import contextlib
import http.client
import math
import os
import re
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlencode

from msgspec import Struct

from gputop.cluster.promql import FIGURE, VALUE, queries_by_figure
from gputop.core.bounded_http import Connection, SecureConnection, TooManyBytes
from gputop.core.errors import GputopError
from gputop.core.version import __version__
from gputop.text.units import printable

if TYPE_CHECKING:
    from gputop.cluster.endpoint import Credentials, Endpoint, Tunnel

TIMEOUT_S = 20.0  # of a query, from the connection to the last byte
MAX_BYTES = 4 << 20  # of an answer as it comes, compressed
MAX_PLAIN_BYTES, MAX_RATIO = 32 << 20, 200  # unpacked, and how many times its size: JSON has some ten
MAX_VALUES = 2_000_000  # names, texts and numbers
MAX_SERIES = 50_000
_MIN_PLAIN_BYTES = 1 << 20  # that any answer may have
_FRAME_BYTES = 1 << 20  # for headers and the sizes of chunks
_NAMES_S = 4 * 3600.0  # a metric that has had no sample for longer is not there
_LAST_TIME_S = 4e9  # the year 2096
_CHUNK = 1 << 16
_LABEL_CHARS = 200
_SMALLER = "Use a Prometheus server that has only this cluster."
_MESSAGE_CHARS = 300
_REFUSAL_CHARS = 400  # the end of a refusal, in which VictoriaMetrics gives its reason
_TOO_LONG = re.compile(r"too long query; got [0-9]+ bytes(?:[^=]{0,80}maxQueryLen=(?P<limit>[0-9]{1,9})\b)?")
LARGEST = 1e14  # what DCGM prints in place of a missing value is 1.4e14 and above; no figure here is


class Series(NamedTuple):
    """Labels, and (Unix time, value) of each point; an instant query has one."""

    labels: dict[str, str]
    points: list[tuple[float, float]]

    @property
    def value(self) -> float:
        return self.points[-1][1]


def figure_of(series: Series) -> str:
    """The figure that a series of an answer is; of what was counted with the value that was: "idle:1"."""
    value = series.labels.get(VALUE)
    return series.labels.get(FIGURE, "") + (f":{value}" if value else "")


class QueryCost(Struct):
    queries: int = 0
    bytes: int = 0  # of the answers as they came
    plain_bytes: int = 0  # unpacked
    seconds: float = 0.0


class QueryRefused(GputopError):
    """The server answered that it cannot do this query; another may do."""


class QueryTooSlow(GputopError):
    """The server did not answer in time; a smaller query may be answered."""


class QueryTooLong(QueryRefused):
    """The server takes shorter queries: of ``max_bytes`` at most, where it names a limit."""

    def __init__(self, message: str, max_bytes: int | None) -> None:
        super().__init__(message, "Start VictoriaMetrics with a larger -search.maxQueryLen.")
        self.max_bytes = max_bytes


class Client:
    """Asks one Prometheus, over one connection. From one thread."""

    def __init__(self, endpoint: Endpoint, credentials: Credentials, tunnel: Tunnel | None = None,
                 timeout_s: float = TIMEOUT_S) -> None:
        self.endpoint = endpoint
        self.cost = QueryCost()
        self.warnings: list[str] = []  # of the last answer
        self._credentials = credentials
        self._tunnel = tunnel
        self._timeout_s = timeout_s
        self._connection: Connection | None = None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def instant(self, query: str) -> list[Series]:
        """The value of an expression now. Raises GputopError."""
        return self._ask("/api/v1/query", {"query": query}, "vector")

    def range(self, query: str, begin_s: float, end_s: float, step_s: float) -> list[Series]:
        """Return the values of an expression at ``begin_s``, ``begin_s + step_s``, … up to ``end_s``, and no others.
        Raises GputopError."""
        answer = self._ask("/api/v1/query_range", {"query": query, "start": f"{begin_s:.3f}", "end": f"{end_s:.3f}",
                                                   "step": f"{step_s:g}"}, "matrix")
        return [Series(labels, in_range) for labels, points in answer
                if (in_range := [point for point in points if begin_s - step_s < point[0] < end_s + step_s])]

    def metric_names(self) -> frozenset[str]:
        """Return the names of all metrics of late. Raises GputopError."""
        names = self._answer("/api/v1/label/__name__/values", {"start": f"{time.time() - _NAMES_S:.0f}"}, "GET")
        if not isinstance(names, list):
            raise GputopError(f"the answer from {self.endpoint.url} is not in Prometheus format", "Check the address.")
        return frozenset(printable(name)[:_LABEL_CHARS] for name in names if isinstance(name, str))

    def _ask(self, path: str, form: dict[str, str], kind: str) -> list[Series]:
        return _series_in(self._answer(path, form), kind, self.endpoint.url)

    def _answer(self, path: str, form: dict[str, str], method: str = "POST") -> Any:
        """The data of an answer. Raises GputopError."""
        began_s = time.monotonic()
        try:
            status, body = self._send(method, path, urlencode({**form, "timeout": f"{math.ceil(self._timeout_s)}s"}))
        finally:
            self.cost.queries += method == "POST"  # a list of names is none
            self.cost.seconds += time.monotonic() - began_s
        self.cost.plain_bytes += len(body)
        return _decoded(status, body, self)

    def _send(self, method: str, path: str, form: str) -> tuple[int, bytearray]:
        """Status and unpacked body. A kept connection that the server has closed meanwhile is opened again."""
        deadline_s = time.monotonic() + self._timeout_s
        kept = self._connection is not None
        try:
            try:
                return self._exchange(method, path, form, deadline_s)
            except (http.client.BadStatusLine, ConnectionError):
                self.close()
                if not kept:
                    raise
                return self._exchange(method, path, form, deadline_s)
        except BaseException as error:
            self.close()
            if isinstance(error, (OSError, http.client.HTTPException)):
                raise self._unreachable(error) from error
            raise

    def _exchange(self, method: str, path: str, form: str, deadline_s: float) -> tuple[int, bytearray]:
        if self._connection is None:
            self._connection = self._connect(deadline_s)
        connection = self._connection
        connection.bound(deadline_s, MAX_BYTES + _FRAME_BYTES)
        where, body_sent = (f"{path}?{form}", None) if method == "GET" else (path, form.encode())
        connection.request(method, self.endpoint.prefix + where, body_sent, {
            "Content-Type": "application/x-www-form-urlencoded", "Accept": "application/json",
            "Accept-Encoding": "gzip", "User-Agent": f"gputop/{__version__}", **self._credentials.headers()})
        answer = connection.getresponse()
        if 300 <= answer.status < 400:
            target = printable(answer.getheader("Location") or "nowhere")[:_MESSAGE_CHARS]
            raise GputopError(f"{self.endpoint.url} redirects to {target}. gputop does not follow redirects, so that "
                              "no token goes to another server", "Use the address at which Prometheus itself answers.")
        body = self._read(answer)
        answer.close()  # the answer: the connection stays, where the server keeps it
        if answer.will_close:
            self.close()
        return answer.status, body

    def _read(self, answer: http.client.HTTPResponse) -> bytearray:
        packed = (answer.getheader("Content-Encoding") or "").strip().lower() == "gzip"
        unpack = zlib.decompressobj(16 + zlib.MAX_WBITS) if packed else None
        out, came = bytearray(), 0
        while data := answer.read1(_CHUNK):
            came += len(data)
            self.cost.bytes += len(data)
            most = min(MAX_PLAIN_BYTES, max(_MIN_PLAIN_BYTES, MAX_RATIO * came))
            try:
                out += unpack.decompress(data, most + 1 - len(out)) if unpack is not None else data
            except zlib.error as error:
                raise GputopError(f"the answer from {self.endpoint.url} is damaged: {error}",
                                  "Check whether there is a proxy in between.") from error
            if came > MAX_BYTES:
                raise TooManyBytes
            if len(out) > most:
                raise GputopError(f"the decompressed answer from {self.endpoint.url} is larger than "
                                  f"{most / (1 << 20):.3g} MB", _SMALLER)
        if unpack is not None and not unpack.eof and came:
            raise http.client.IncompleteRead(b"")
        if answer.length:  # fewer bytes than were announced
            raise http.client.IncompleteRead(b"", answer.length)
        return out

    def _connect(self, deadline_s: float) -> Connection:
        to, context = self.endpoint, None
        path = self._tunnel.path() if self._tunnel is not None else None
        connection = Connection(to.host, to.port, timeout=self._timeout_s)
        if to.scheme == "https":
            import ssl

            try:
                context = ssl.create_default_context(cafile=self._credentials.ca or None)
            except OSError as error:  # SSLError is one
                raise GputopError(f"cannot use the certificates in {self._credentials.ca}: {error.strerror or error}",
                                  "Check GPUTOP_PROMETHEUS_CA or prometheus_ca.") from error
            connection = SecureConnection(to.host, to.port, timeout=self._timeout_s, context=context)
        connection.bound(deadline_s, MAX_BYTES)
        if path is not None:
            connection.sock = _unix_socket(path, connection.limits.left_s())
            if context is not None:
                connection.sock = context.wrap_socket(connection.sock, server_hostname=to.host)
        return connection

    def _too_slow(self) -> QueryTooSlow:
        return QueryTooSlow(f"{self.endpoint.url} did not answer within {self._timeout_s:.0f} s",
                            "The server is overloaded, or packets are lost. To wait longer: gputop cluster --timeout S")

    def _unreachable(self, error: Exception) -> GputopError:
        url = self.endpoint.url
        if isinstance(error, TimeoutError):
            return self._too_slow()
        if isinstance(error, TooManyBytes):
            return GputopError(f"the answer from {url} is larger than {MAX_BYTES >> 20} MB", _SMALLER)
        if isinstance(error, http.client.IncompleteRead):
            return GputopError(f"the answer from {url} ended too early", "gputop asks again.")
        reason = getattr(error, "strerror", None) or printable(str(error))[:_MESSAGE_CHARS] or type(error).__name__
        fix = ("Set your site's CA certificates: GPUTOP_PROMETHEUS_CA, or prometheus_ca in the settings."
               if "CERTIFICATE" in str(error) else
               "Check whether the server is running and reachable from this machine. If only a login node can reach "
               "it, use ssh://LOGIN/http://…")
        return GputopError(f"cannot reach {url}: {reason}", fix)


@contextlib.contextmanager
def connected(url: str, settings: Mapping[str, str], warn: Callable[[str], None], *,
              may_ask: bool = False, timeout_s: float = TIMEOUT_S) -> Iterator[Client]:
    """A client of the Prometheus at ``url``, through ssh where the address says so. ``settings`` name its credentials;
    ``may_ask``: ssh may ask for a password on the terminal; ``timeout_s``: for each answer. Raises GputopError."""
    from gputop.cluster.endpoint import Tunnel, credentials, parse_endpoint

    endpoint = parse_endpoint(url)
    access = credentials(os.environ, settings)
    if (access.token or access.user) and not endpoint.is_private:
        way = f"from {endpoint.login} to {endpoint.host}" if endpoint.login else f"to {endpoint.host}"
        warn(f"credentials sent {way} are unencrypted: use https:// or "
             f"ssh://{endpoint.host}/http://localhost:{endpoint.port}")
    with contextlib.ExitStack() as parts:
        tunnel = parts.enter_context(contextlib.closing(Tunnel(endpoint))) if endpoint.login else None
        if tunnel is not None:
            tunnel.path(may_ask=may_ask)
        yield parts.enter_context(contextlib.closing(Client(endpoint, access, tunnel, timeout_s)))


def _unix_socket(path: str, timeout_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(timeout_s)
    try:
        connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


def _decoded(status: int, body: bytes | bytearray, client: Client) -> Any:
    from gputop.core import codec

    url = client.endpoint.url
    if status in (401, 403):
        raise GputopError(f"{url} rejected the credentials (HTTP {status})",
                          "Set GPUTOP_PROMETHEUS_TOKEN, or GPUTOP_PROMETHEUS_USER and GPUTOP_PROMETHEUS_PASSWORD, or "
                          "the settings prometheus_token_file, prometheus_user and prometheus_password_file.")
    document: Any = None
    try:
        document = codec.parse(body, MAX_VALUES)
    except codec.TooManyValues as error:
        raise GputopError(f"the answer from {url} is too large: {error}", _SMALLER) from None
    except ValueError:
        pass
    if not isinstance(document, dict):
        raise GputopError(f"{url} answered with HTTP {status} without JSON: it is not Prometheus, or it is behind a "
                          "proxy", "Open the address in a browser: it must show the Prometheus page.")
    if document.get("status") != "success":
        reason = printable(str(document.get("error") or f"HTTP {status}"))[:_MESSAGE_CHARS]
        if status in (400, 422):
            # VictoriaMetrics repeats the query of a range before what it says of it.
            if (refusal := list(_TOO_LONG.finditer(str(document.get("error"))[-_REFUSAL_CHARS:]))):
                limit = refusal[-1]["limit"]
                raise QueryTooLong(f"{url} rejected a query because it is too long", int(limit) if limit else None)
            raise QueryRefused(f"{url} rejected a query: {reason}", "The server may be older than Prometheus 2.20.")
        if document.get("errorType") == "timeout":
            raise client._too_slow()
        raise GputopError(f"{url} cannot currently answer: {reason}", "gputop asks again.")
    warnings = document.get("warnings")
    client.warnings = [printable(str(w))[:_MESSAGE_CHARS] for w in warnings[:5]] if isinstance(warnings, list) else []
    return document.get("data")


def _series_in(data: Any, kind: str, url: str) -> list[Series]:
    if not isinstance(data, dict) or data.get("resultType") != kind or not isinstance(data.get("result"), list):
        raise GputopError(f"the answer from {url} is not in Prometheus format", "Check the address.")
    if len(data["result"]) > MAX_SERIES:
        raise GputopError(f"{url} answered with {len(data['result']):,} series", "Ask for one job: --job ID.")
    return [series for item in data["result"] if (series := _series(item)) is not None]


def _series(item: Any) -> Series | None:
    """A series of the answer; None where it is damaged or has no value that is a measurement."""
    if not isinstance(item, dict) or not isinstance(item.get("metric"), dict):
        return None
    labels = {str(name): printable(str(text))[:_LABEL_CHARS] for name, text in item["metric"].items()}
    points = []
    pairs = item.get("values") or [item.get("value")]
    for pair in pairs if isinstance(pairs, list) else ():
        try:
            at_s, value = float(pair[0]), float(pair[1])
        except (TypeError, ValueError, IndexError, KeyError, OverflowError):
            continue
        if 0 <= at_s < _LAST_TIME_S and abs(value) < LARGEST:  # neither is true of NaN
            points.append((at_s, value))
    return Series(labels, points) if points else None


_ATTEMPTS = 5  # of a question: each halves the length of a server that does not name its limit, or not the truth

Figures = Mapping[str, str]


class FigureClient:
    """Asks one server for figures by name: by one query, or by several where it limits the length of a query. From one
    thread.

    Prometheus takes queries of any length; VictoriaMetrics takes 16,384 bytes (``-search.maxQueryLen``), which the
    figures of gputop's own exporter exceed.

    1. Ask for all figures by one query.
    2. If the server refuses it as too long, note the limit that the refusal names, or half of the length that it
       refused, and ask again by as few queries as have room for all figures. The limit holds for all further questions.
    3. A figure that has no room alone is left out of the present figures and noted. A question about the past raises
       instead: it can be asked for fewer subjects (:mod:`gputop.cluster.series_store`).
    4. If the answer about the present does not come in time, ask for each figure alone, the most wanted first, until
       one of them does not come in time either: what has come is shown, and the rest is noted. For some minutes all
       questions are asked so.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self.max_bytes: int | None = None  # of a query; None: none was too long
        self.left_out: set[str] = set()  # figures without room; whoever reports them clears it
        self.too_slow: set[str] = set()  # figures that did not come in time; likewise
        self.alone = False  # ask for each present figure alone

    def instant(self, figures: Figures) -> list[Series]:
        """The present figures, as far as they have room and come in time. Raises GputopError."""
        if not self.alone:
            try:
                return self._ask(figures, self._client.instant, leave_out=True)
            except QueryTooSlow:
                self.alone = True
        series: list[Series] = []
        wanted = [name for name, value in figures.items() if value]
        for i, name in enumerate(wanted):
            try:
                series += self._ask({name: figures[name]}, self._client.instant, leave_out=True)
            except QueryTooSlow:
                if not series:
                    raise
                self.too_slow.update(wanted[i:])
                break
        return series

    def range(self, figures: Figures, begin_s: float, end_s: float, step_s: float) -> list[Series]:
        """Answer as :meth:`Client.range` does. Raises GputopError, of which QueryTooLong if a figure has no room."""
        return self._ask(figures, lambda query: self._client.range(query, begin_s, end_s, step_s), leave_out=False)

    def _ask(self, figures: Figures, send: Callable[[str], list[Series]], *, leave_out: bool) -> list[Series]:
        for attempt in range(_ATTEMPTS):
            queries, too_long = queries_by_figure(figures, self.max_bytes)
            if too_long and not leave_out:
                raise QueryTooLong(f"the server accepts queries of at most {self.max_bytes:,} bytes, but "
                                   f"{', '.join(too_long)} would exceed this", self.max_bytes)
            try:
                series = [one for query in queries for one in self._sent(query, send)]
            except QueryTooLong:
                if attempt == _ATTEMPTS - 1:
                    raise
            else:
                self.left_out.update(too_long)
                return series
        raise AssertionError("the last attempt returns or raises")

    def _sent(self, query: str, send: Callable[[str], list[Series]]) -> list[Series]:
        try:
            return send(query)
        except QueryTooLong as refusal:
            sent = len(query.encode())
            named = refusal.max_bytes or 0
            self.max_bytes = named if 0 < named < sent else sent // 2
            raise
