"""The client against a server that stalls, lies, floods and sends its visitors elsewhere."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import json
import re
import threading
from collections.abc import Callable, Iterator
from urllib.parse import parse_qs

import pytest

from gputop.cluster import prometheus
from gputop.cluster.collect import QUERIES, Collector, complete_fleet
from gputop.cluster.endpoint import Credentials, parse_endpoint
from gputop.cluster.model import FleetView
from gputop.cluster.prometheus import Client, FigureClient, QueryRefused, QueryTooLong, QueryTooSlow, Series
from gputop.core.errors import GputopError
from tests.cluster.fleets import LIMITS, NOW, CannedClient
from tests.cluster.stragglers import DCGM, JOB, LOW, NODE_1, NODE_2, by_label
from tests.dripping import DRIPS, dripping

Reply = Callable[[http.server.BaseHTTPRequestHandler], None]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    reply: Reply
    asked: list[tuple[str, dict[str, list[str]], str]]

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.asked.append((self.path, form, self.headers.get("Authorization", "")))
        type(self).reply(self)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def served(reply: Reply, credentials: Credentials | None = None, timeout_s: float = 20.0,
           ) -> Iterator[tuple[Client, list[tuple[str, dict[str, list[str]], str]]]]:
    handler = type("Handler", (_Handler,), {"reply": staticmethod(reply), "asked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        endpoint = parse_endpoint(f"http://127.0.0.1:{server.server_address[1]}/prefix")
        with contextlib.closing(Client(endpoint, credentials or Credentials(), timeout_s=timeout_s)) as client:
            yield client, handler.asked
        server.shutdown()


def body(result: object, kind: str = "vector", **more: object) -> bytes:
    return json.dumps({"status": "success", "data": {"resultType": kind, "result": result}, **more}).encode()


def answer(data: bytes, status: int = 200, packed: bool = False, **headers: str) -> Reply:
    def reply(handler: http.server.BaseHTTPRequestHandler) -> None:
        sent = gzip.compress(data) if packed else data
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(sent)), **headers}.items():
            handler.send_header(name, value)
        if packed:
            handler.send_header("Content-Encoding", "gzip")
        handler.end_headers()
        handler.wfile.write(sent)
    return reply


ONE = [{"metric": {"gpu": "0"}, "value": [100.0, "0.5"]}]


def test_queries_are_posted_with_credentials_and_answers_counted() -> None:
    with served(answer(body(ONE), packed=True), Credentials(token="abc")) as (client, asked):
        (series,) = client.instant('up{a="b"}')
        client.instant("up")
        assert (series.labels, series.value) == ({"gpu": "0"}, 0.5)
        assert [path for path, _, _ in asked] == ["/prefix/api/v1/query"] * 2
        assert asked[0][1]["query"] == ['up{a="b"}']
        assert {authorization for _, _, authorization in asked} == {"Bearer abc"}
        assert client.cost.queries == 2 and client.cost.plain_bytes == 2 * len(body(ONE))
        assert client.cost.bytes == 2 * len(gzip.compress(body(ONE)))


def test_a_range_has_all_its_points() -> None:
    series = [{"metric": {}, "values": [[0, "1"], [30, "NaN"], [60, "3"], [90, "+Inf"], [120, "x"], 7]}]
    with served(answer(body(series, "matrix"))) as (client, asked):
        assert client.range("up", 0, 120, 30)[0].points == [(0.0, 1.0), (60.0, 3.0)]
        assert asked[0][1]["step"] == ["30"]


def test_values_that_are_no_measurement_and_damaged_series_are_left_out() -> None:
    result = [{"metric": {"n": text}, "value": [1, text]} for text in ("9223372036854775794", "1.4e14", "NaN", "")]
    result += [{"metric": 3, "value": [1, "1"]}, {"metric": {}}, 7, {"metric": {"ok": "a\x1b[2J" + "x" * 999},
                                                                   "value": [1, "2"]}]
    with served(answer(body(result))) as (client, _):
        (series,) = client.instant("up")
    assert series.labels["ok"].isprintable() and len(series.labels["ok"]) == 200


@pytest.mark.parametrize(("reply", "message"), [
    (answer(b"who are you", 401), "rejected the credentials"),
    (answer(b"", 302, Location="http://evil.example/\x1b[2J"), "gputop does not follow"),
    (answer(b"<html>", 200), "not Prometheus, or it is behind a proxy"),
    (answer(b"bad gateway", 502), "HTTP 502 without JSON"),
    (answer(json.dumps({"status": "error", "error": "query timed out\x1b"}).encode(), 503), "query timed out"),
    (answer(b"[" * 100_000, 200), "not Prometheus"),
    (answer(b'{"status":"success","data":{"resultType":"scalar","result":[1,"2"]}}'), "not in Prometheus format"),
    (answer(body(ONE), 200, **{"Content-Length": "5000", "Connection": "close"}), "ended too early"),
    (answer(b"\x00" * 100, 200, **{"Content-Encoding": "gzip"}), "is damaged"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_what_goes_wrong_is_said_with_its_cause(reply: Reply, message: str) -> None:
    def closing(handler: http.server.BaseHTTPRequestHandler) -> None:
        reply(handler)
        handler.close_connection = True

    with (served(closing, Credentials(token="s3cret")) as (client, _),
          pytest.raises(GputopError, match=message) as caught):
        client.instant("up")
    assert "s3cret" not in str(caught.value) and caught.value.message.isprintable() and caught.value.fix


def test_a_query_that_is_refused_is_told_apart() -> None:
    wrong = json.dumps({"status": "error", "errorType": "bad_data", "error": "parse error"}).encode()
    for status in (400, 422):
        with served(answer(wrong, status)) as (client, _), pytest.raises(QueryRefused, match="parse error"):
            client.instant("(")


@pytest.mark.parametrize("way", DRIPS)
def test_a_server_that_answers_a_byte_at_a_time_is_left_in_time(way: str) -> None:
    """The deadline is of the whole, whatever part of the answer it is that never ends."""
    with (dripping(way) as address,
          contextlib.closing(Client(parse_endpoint(f"http://{address}"), Credentials(), timeout_s=0.2)) as client,
          pytest.raises(GputopError, match="did not answer within")):
        client.instant("up")


def test_what_is_not_content_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "_FRAME_BYTES", 1000)
    monkeypatch.setattr(prometheus, "MAX_BYTES", 1000)
    for way in ("continue", "trailers", "chunks"):
        with (dripping(way, pause_s=0.0, pieces=1 << 20) as address,
              contextlib.closing(Client(parse_endpoint(f"http://{address}"), Credentials())) as client,
              pytest.raises(GputopError, match="is larger than")):
            client.instant("up")


def test_a_kept_connection_has_a_deadline_of_its_own_for_each_query() -> None:
    with served(answer(body(ONE)), timeout_s=5.0) as (client, _):
        client.instant("up")
        first_s = client._connection.limits.end_s
        client.instant("up")
        assert client._connection.limits.end_s > first_s


def test_little_gzip_does_not_become_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 kB became 1.4 GB: lists without end in an answer of 32 MB."""
    lists = b'{"status":"success","data":{"resultType":"vector","result":[' + b"[]," * (11 << 20) + b"[]]}}"
    assert len(gzip.compress(lists)) < 50_000
    with served(answer(lists, packed=True)) as (client, _):
        with pytest.raises(GputopError, match=r"decompressed answer .* is larger than \S+ MB"):
            client.instant("up")
        assert client.cost.plain_bytes == 0
    monkeypatch.setattr(prometheus, "MAX_VALUES", 1000)
    with (served(answer(body([[]] * 1000))) as (client, _),
          pytest.raises(GputopError, match="is too large: it has more than 1,000 values")):
        client.instant("up")


@pytest.mark.parametrize("series", [
    {"value": [1, 10 ** 400]}, {"value": [10 ** 400, "1"]}, {"value": [1, "1" + "0" * 400]}, {"values": 5},
    {"values": {"a": 1}}, {"values": "12"}, {"value": 5}, {"value": []}, {"value": [1e300, "1"]}, {"value": [-1, "1"]},
    {"value": [1, "-1e300"]}, {"value": [True, None]}, {"value": [[], {}]}, {"values": [[1]]}, {},
], ids=range(15))
def test_no_value_and_no_time_ends_what_asks(series: dict[str, object]) -> None:
    with served(answer(body([{"metric": {}, **series}, *ONE]))) as (client, _):
        assert [own.value for own in client.instant("up")] == [0.5]


def test_a_range_has_only_what_was_asked_for() -> None:
    """Else each answer could add to what is kept of the past."""
    series = [{"metric": {}, "values": [[at_s, "1"] for at_s in (0, 60, 70, 100, 130, 3e9)]},
              {"metric": {"a": "b"}, "values": [[3e9, "1"]]}]
    with served(answer(body(series, "matrix"))) as (client, _):
        (found,) = client.range("up", 80, 120, 20)
    assert [at_s for at_s, _ in found.points] == [70.0, 100.0, 130.0]


def test_a_server_that_is_gone_is_said() -> None:
    with served(answer(body(ONE))) as (client, _):
        pass
    with pytest.raises(GputopError, match=r"cannot reach .*: Connection refused"):
        client.instant("up")


@pytest.mark.parametrize(("limit", "message"), [
    ("MAX_PLAIN_BYTES", "the decompressed answer .* is larger than 1 MB"),
    ("MAX_BYTES", "the answer .* is larger than 1 MB\n")])
def test_a_flood_is_cut_and_the_limit_named(limit: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, limit, 1 << 20)
    with served(answer(b" " * (2 << 20))) as (client, _), pytest.raises(GputopError, match=message):
        client.instant("up")


def test_a_kept_connection_that_the_server_closed_is_opened_again() -> None:
    def once(handler: http.server.BaseHTTPRequestHandler) -> None:
        answer(body(ONE))(handler)
        handler.close_connection = True  # without having said so

    with served(once) as (client, asked):
        assert client.instant("up") and client.instant("up")
        assert len(asked) == 2


@pytest.mark.parametrize(("error", "limit"), [
    ("too long query; got 24002 bytes; mustn't exceed `-search.maxQueryLen=16384` bytes", 16384),
    ('error when executing query="' + "up or " * 4000 + '" on the time range (start=1, end=2, step=1): too long query; '
     "got 24002 bytes; mustn't exceed `-search.maxQueryLen=16384` bytes", 16384),
    ("too long query; got 24002 bytes; mustn't exceed `-search.maxQueryLen=" + "9" * 50, None),
], ids=["instant", "range", "no limit"])
def test_a_query_that_is_too_long_for_victoria_metrics(error: str, limit: int | None) -> None:
    said = json.dumps({"status": "error", "errorType": "422", "error": error}).encode()
    with served(answer(said, 422)) as (client, _), pytest.raises(QueryTooLong, match="is too long") as caught:
        client.instant("up")
    assert caught.value.max_bytes == limit


def test_warnings_of_the_server_are_kept() -> None:
    with served(answer(body(ONE, warnings=["a store is down\x1b"]))) as (client, _):
        client.instant("up")
        assert client.warnings == ["a store is down\ufffd"]


FIGURES = {name: f'{name}{{long="{"x" * 100}"}}' for name in ("a", "b", "c", "d")}


class Limited(CannedClient):
    """Refuses queries of more than ``most`` bytes, and names ``said`` as its limit."""

    most, said = 10**6, 0

    def _count(self, query: str) -> None:
        super()._count(query)
        if len(query.encode()) > self.most and '"scrapes"' not in query:
            raise QueryTooLong("too long", self.said or None)

    def taken(self) -> list[str]:
        return [query for query in self.queries if len(query.encode()) <= self.most or '"scrapes"' in query]


def limited(most: int, said: int) -> Limited:
    client = Limited({}, **{name: [({}, 1.0)] for name in FIGURES})
    client.most, client.said = most, said
    return client


def names(answer: list[Series]) -> list[str]:
    return [series.labels["figure"] for series in answer]


@pytest.mark.parametrize(("said", "asked"), [(400, 1 + 2), (0, 1 + 2), (10**9, 1 + 2), (399, 1 + 2), (1, 1)])
def test_a_refused_question_becomes_several_queries_and_the_limit_is_remembered(said: int, asked: int) -> None:
    client = limited(400, said)
    figures = FigureClient(client)  # type: ignore[arg-type]
    assert names(figures.instant(FIGURES)) == (list(FIGURES) if said != 1 else [])
    assert len(client.queries) == asked and figures.left_out == (set() if said != 1 else set(FIGURES))
    client.queries.clear()
    figures.instant(FIGURES)
    assert len(client.queries) == asked - 1  # none is refused again


def test_a_figure_without_room_is_left_out_of_the_present_and_refused_of_the_past() -> None:
    client = limited(400, 400)
    figures = FigureClient(client)  # type: ignore[arg-type]
    wide = {**FIGURES, "b": "x" * 500}
    assert names(figures.instant(wide)) == ["a", "c", "d"] and figures.left_out == {"b"}
    sent = len(client.queries)
    with pytest.raises(QueryTooLong, match="at most 400 bytes, but b would exceed"):
        figures.range(wide, NOW - 60, NOW, 60.0)
    assert len(client.queries) == sent


def test_a_server_that_refuses_everything_is_not_asked_for_ever() -> None:
    client = limited(-1, 0)
    figures = FigureClient(client)  # type: ignore[arg-type]
    assert figures.instant(FIGURES) == [] and figures.left_out == set(FIGURES)
    assert len(client.queries) <= 5


def cluster() -> Limited:
    low = {**JOB, **LOW}
    return Limited({**DCGM, "DCGM_FI_DEV_SM_CLOCK": 1600}, ["hpc_job"], activity=[(JOB, 0.9), ({**low}, 0.5)],
                   gpus=[(JOB, 32)], nodes=[(JOB, 4)], lowest=[(JOB, 0.5)], median=[(JOB, 0.9)], mad=[(JOB, 0.01)],
                   low_gpu=[(low, 0.5)], power_w=[(JOB, 2e4)], sm_clock_hz=[(low, 1.1e9)],
                   node_activity=[({**JOB, **NODE_1}, 0.8), ({**JOB, **NODE_2}, 0.9)])


def test_the_fleet_is_the_same_in_shorter_queries_and_says_what_they_cost() -> None:
    view = FleetView(open_jobs=("7",), open_nodes=(("7", "n1"),))
    whole = complete_fleet(Collector(cluster(), LIMITS, clock=lambda: NOW), view)  # type: ignore[arg-type]
    client = cluster()
    client.most = client.said = 1500
    collector = Collector(client, LIMITS, clock=lambda: NOW)  # type: ignore[arg-type]
    fleet = complete_fleet(collector, view)
    assert fleet.jobs == whole.jobs and fleet.gpus == whole.gpus and fleet.queries > whole.queries
    refused = len(client.queries) - len(client.taken())
    assert refused == 1  # the limit is remembered
    again = collector.refresh(view)
    (problem,) = (p for p in again.problems if "bytes" in p.message)
    assert again.queries > QUERIES and re.search(
        rf"at most 1,500 bytes, so this refresh sent {again.queries} queries instead of at most 4$", problem.message)
    assert "-search.maxQueryLen" in problem.fix
    assert not any("bytes" in p.message for p in whole.problems)


def test_a_figure_without_room_is_named() -> None:
    client = cluster()
    collector = Collector(client, LIMITS, clock=lambda: NOW)  # type: ignore[arg-type]
    collector.refresh(FleetView())
    client.most = client.said = 700
    fleet = collector.refresh(FleetView())
    (problem,) = (p for p in fleet.problems if "did not fit" in p.message)
    assert re.search(r"sent \d+ queries instead of at most 4; low_clock did not fit$", problem.message)
    assert fleet.jobs[0].activity is not None


def test_what_comes_in_time_is_shown_and_the_rest_is_named() -> None:
    client = by_label()
    client.fails['"power_w"'] = QueryTooSlow("did not answer within 20 s")
    collector = Collector(client, LIMITS, clock=lambda: NOW)  # type: ignore[arg-type]
    fleet = collector.refresh(FleetView())
    assert fleet.gpus == 56 and {job.id: job.activity for job in fleet.jobs} == {"7": 0.9, "8": 0.5}
    assert any("did not answer in time about power_w" in problem.message for problem in fleet.problems)
    client.fails['"activity"'] = QueryTooSlow("did not answer within 20 s")
    assert any("within 20 s" in problem.message for problem in collector.refresh(FleetView()).problems)


@pytest.mark.parametrize("packed", [False, True])
def test_a_flood_is_cut(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "MAX_PLAIN_BYTES", 1 << 20)
    with (served(answer(b" " * (2 << 20), packed=packed)) as (client, _),
          pytest.raises(GputopError, match="is larger than 1 MB")):
        client.instant("up")
