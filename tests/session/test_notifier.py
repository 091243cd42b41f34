"""What is told of a session, how often, and that no receiver can stop the rest."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from gputop.commands.common import check_notify
from gputop.core.codec import to_document
from gputop.core.errors import GputopError
from gputop.core.findings import Advice
from gputop.profiler.capture.records import CaptureStatus, Server
from gputop.session import notifier
from gputop.session.notifier import HOLD_S, REPEAT_S, News, Notification, Notifier, Ways, parse_ways, post, run_command
from tests.dripping import DRIPS, dripping
from tests.fakes import StillSession, node_sample
from tests.records import replace
from tests.tui.found import HEAVY
from tests.waiting import PATIENCE_S

TOLD = Notification.of("finding", 1.0, "node-07", "GPU 0 idles", "since 40 s", False)


class Told(StillSession):
    """A session whose clock and findings a test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1_000.0
        self.feed.clock = lambda: self.now_s
        self.news = News(self)

    def after(self, seconds: float, *findings: object) -> list[str]:
        self.now_s += seconds
        self.results.live = Advice(findings)  # type: ignore[arg-type]
        return [told.title for told in self.news.of("sample")]


def test_a_finding_is_told_once_it_has_lasted() -> None:
    session = Told()
    assert session.after(0, HEAVY) == [] and session.after(HOLD_S - 1, HEAVY) == []
    assert session.after(1, HEAVY) == [HEAVY.title] and session.after(60, HEAVY) == []
    assert session.after(1) == [] and session.after(1, HEAVY) == []
    assert session.after(HOLD_S, HEAVY) == [], "it came again within ten minutes"


def test_one_that_flickers_or_is_of_little_weight_is_not_told() -> None:
    session = Told()
    for _ in range(10):
        assert session.after(HOLD_S + 1, HEAVY) == []
    light = replace(HEAVY, severity="low")
    assert [session.after(10, light) for _ in range(4)] == [[]] * 4


def test_one_that_comes_again_later_is_told_again() -> None:
    session = Told()
    session.after(0, HEAVY)
    assert session.after(HOLD_S, HEAVY) == [HEAVY.title]
    session.after(REPEAT_S, HEAVY)
    assert session.after(HOLD_S, HEAVY) == [HEAVY.title]


def test_too_many_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier, "MOST_AN_HOUR", 2)
    session = Told()
    session.after(0)
    for pid in range(5):
        session.watch.ended_server = Server("127.0.0.1:1", "train.py", pid)
        assert len(session.after(1)) == (pid < 2)
    session.watch.ended_server = Server("127.0.0.1:1", "train.py", 9)
    session.now_s += 3600
    (told,) = session.news.of("sample")
    assert told.left_out == 3 and "3 other messages not sent" in told.line


def test_the_end_of_a_capture_is_told_once() -> None:
    session = Told()
    session.control.status = CaptureStatus("recording", "127.0.0.1:6009", 10.0, time_s=1_001.0)
    assert session.news.of("capture") == []
    session.control.status = CaptureStatus("failed", "127.0.0.1:6009", 10.0, message="it \x1b[2Jended", time_s=1_011.0)
    (told,) = session.news.of("capture")
    assert told.kind == "capture" and "failed" in told.title and "\x1b" not in told.details
    assert session.news.of("capture") == []


class Hook(BaseHTTPRequestHandler):
    """Keeps what is posted; answers with the status in its path."""

    got: ClassVar[list[tuple[str | None, object]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.got.append((self.headers["Authorization"], json.loads(body)))
        status = int(self.path.strip("/"))
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/200")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def hook() -> Iterator[str]:
    Hook.got.clear()
    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_webhook_is_told(hook: str) -> None:
    post(f"{hook}/204", "s3cret", TOLD)
    ((authorization, body),) = Hook.got
    assert authorization == "Bearer s3cret" and body == {**to_document(TOLD), "allowed_mentions": {"parse": []}}
    assert body["text"] == body["content"] == "node-07: GPU 0 idles"


def test_no_name_in_a_trace_mentions_anybody() -> None:
    name = "op @everyone @here <!channel> <@U12> <@&9> <#7> <https://a.example|b> [b](https://c.example) a & b"
    document = to_document(Notification.of("finding", 1.0, "node-07", name, "since 40 s", False))
    assert document["title"] == name
    text, content = str(document["text"]), str(document["content"])
    # As Slack wants it escaped, https://api.slack.com/reference/surfaces/formatting#escaping.
    assert not {"<", ">"} & {*text} and "&lt;" in text and " a &amp; b" in text
    for shown in (text, content):
        assert not re.search(r"@\w|<[@!#&\w]|\]\(", shown)
        assert shown.replace("\u200b", "").replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&") == (
            f"node-07: {name}")


@pytest.mark.parametrize(("url", "host"), [
    ("http://hooks.example/x", "hooks.example"), ("http://a@hooks.example:80/x", "hooks.example"),
    ("https://hooks.example/x", ""), ("http://localhost:9/x", ""), ("http://[::1]/x", ""), ("", ""),
])
def test_a_webhook_in_the_clear_is_said(url: str, host: str, monkeypatch: pytest.MonkeyPatch,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    ways = Ways(webhook=url, token="s3cret")
    assert ways.in_the_clear == host
    monkeypatch.setattr(notifier, "parse_ways", lambda texts: ways)
    check_notify(argparse.Namespace(notify=["webhook"], command=None))
    said = capsys.readouterr().err
    assert ("unencrypted; use https://" in said) == bool(host) and host in said and "s3cret" not in said


@pytest.mark.parametrize("status", [302, 401, 500])
def test_what_a_webhook_answers_is_said_without_its_address(hook: str, status: int) -> None:
    with pytest.raises(RuntimeError, match=f"it answered {status}$"):
        post(f"{hook}/{status}", "s3cret", TOLD)
    assert len(Hook.got) == 1, "a redirection is not followed: the token is for this address"


def test_a_webhook_that_is_not_there() -> None:
    with pytest.raises(RuntimeError, match="ConnectionRefusedError"):
        post("http://127.0.0.1:1/x", "", TOLD)


@pytest.mark.parametrize("way", DRIPS)
def test_a_webhook_that_answers_a_byte_at_a_time_is_left_in_time(way: str) -> None:
    answers = way in ("body", "chunks", "chunk size", "trailers")  # whose content is not read
    end = contextlib.nullcontext() if answers else pytest.raises(RuntimeError, match="TimeoutError")
    with dripping(way) as address, end:
        post(f"http://{address}/x", "", TOLD, timeout_s=PATIENCE_S if answers else 0.2)


def test_a_command_gets_the_line_and_the_document(tmp_path: Path) -> None:
    out = tmp_path / "out"
    keep = "import sys; open(sys.argv[1], 'w').write(sys.argv[2] + chr(10) + sys.stdin.read())"
    run_command([sys.executable, "-c", keep, str(out)], TOLD)
    line, document = out.read_text().split("\n")
    assert line == TOLD.line and json.loads(document) == to_document(TOLD)


def test_a_command_that_hangs_is_ended() -> None:
    with pytest.raises(RuntimeError, match="took more than"):
        run_command([sys.executable, "-c", "import signal; signal.pause()"], TOLD, timeout_s=0.05)


def test_a_command_that_fails_or_is_missing_stops_nobody() -> None:
    done, session = threading.Event(), Told()
    session.ring = lambda _: done.set()
    notifier = Notifier(session, Ways(True, (("/no/such/command",), ("false",))))
    session.watch.ended_server = Server("127.0.0.1:1", "train.py", 7)
    notifier._changed("sample")
    assert done.is_set()
    threads = [t for t in threading.enumerate() if t.name == "gputop-notify"]
    notifier.close()
    for thread in threads:
        thread.join()
    assert "/no/such/command failed" in notifier.problem and "the command exited with status 1" in notifier.problem


def test_what_is_told_last_is_waited_for(tmp_path: Path) -> None:
    session, file = Told(), tmp_path / "told"
    notifier = Notifier(session, Ways(False, (("sh", "-c", f"cat > {file}"),)))
    session.watch.ended_server = Server("127.0.0.1:1", "train.py", 7)
    notifier._changed("sample")
    notifier.close(60)
    assert json.loads(file.read_text())["kind"] == "job" and not notifier.problem


@pytest.mark.parametrize(("way", "says"), [
    ("mail", "does not support"), ("command:", "does not support"), ("command:'x", "No closing quotation"),
    ("command:cat >> log", "'>>' needs a shell"), ("command:cat; ls", "'cat;' needs a shell"),
    ("webhook", "needs an address in GPUTOP_WEBHOOK_URL"),
])
def test_what_is_no_way_is_wrong_usage(way: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUTOP_WEBHOOK_URL", raising=False)
    with pytest.raises(GputopError, match=says) as caught:
        parse_ways([way])
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("url", ["http://[x", "https://", "http://host:99999/x", "http://host:0", "http://:80/x"])
def test_an_address_without_a_host_is_no_webhook(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUTOP_WEBHOOK_URL", url)
    with pytest.raises(GputopError, match="needs an address"):
        parse_ways(["webhook"])


def test_secrets_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUTOP_WEBHOOK_URL", "https://hooks.example/x")
    monkeypatch.setenv("GPUTOP_WEBHOOK_TOKEN", "s3cret")
    assert parse_ways(["bell", "webhook", "command:logger -t gputop"]) == Ways(
        True, (("logger", "-t", "gputop"),), "https://hooks.example/x", "s3cret")


def test_a_gpu_that_is_lost_is_told_once_and_that_it_is_back() -> None:
    session = Told()

    def sample(state: str) -> None:
        session.now_s += 1
        first, *others = node_sample(0).gpus
        session.feed.sample = replace(node_sample(0), time_s=session.now_s, gpus=(replace(first, state=state), *others))
        session.results.events.note_sample(session.feed.sample)

    told = []
    for state in ("ok", "failed", "failed", "lost", "lost", "ok", "ok"):
        sample(state)
        told.append(session.after(0))
    assert told == [[], [], [], ["GPU 0: lost"], [], ["GPU 0 is back"], []]
