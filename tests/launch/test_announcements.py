from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gputop.launch.attach import Announcement, Announcements
from gputop.launch.environment import new_token
from gputop.launch.inside import gputop_serve
from gputop.launch.inside.gputop_serve import socket_name
from tests.processes import once_ready
from tests.waiting import PATIENCE_S

_needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")


def _send(token: str, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as teller:
        teller.sendto(data, socket_name("run", token))


def _tell(token: str, address: str | None, line: str) -> None:
    _send(token, json.dumps({"address": address, "line": line}).encode())


def _tell_as_nobody(token: str, address: str | None, line: str) -> None:
    code = ("import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); "
            f"s.sendto(sys.argv[1].encode(), {socket_name('run', token)!r})")
    subprocess.run([sys.executable, "-c", code, json.dumps({"address": address, "line": line})], check=True)


@pytest.fixture
def server() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def test_announcements_arrive_and_malformed_ones_do_not(server):
    """Printable, and with the number that the process has here: in a container it has another one."""
    token, received = new_token(), queue.Queue()
    with contextlib.closing(Announcements(token)) as announcements:
        announcements.start(received.put)
        for nonsense in (b"", b"\xff", b"[]", b"{}", b'{"address": 1}', b'{"address": "[", "line": ""}'):
            _send(token, nonsense)
        for told, address, line, text in (
                (None, None, "none", "none"), (server, server, "one", "one"),
                ("pid:1", f"pid:{os.getpid()}", "two", "two"),
                (None, None, "\x1b[31mno server", "\ufffd[31mno server")):
            _tell(token, told, line)
            assert received.get(timeout=PATIENCE_S) == Announcement(address, text)
    assert received.empty()


@pytest.mark.parametrize("address", ["10.9.8.7:6009", "host.example:6009", "unix:/tmp/x", "127.0.0.1:1", "nothing"])
def test_a_server_that_the_job_does_not_have_is_not_announced(address, server):
    """gputop would capture there without a question: it may be another user's, or on another machine."""
    token = new_token()
    with contextlib.closing(Announcements(token)) as announcements:
        _tell(token, address, "one")
        _tell(token, server, "two")
        assert announcements.receive(PATIENCE_S) == Announcement(server, "two") and announcements.receive(0.0) is None


@_needs_root
def test_a_server_of_another_user_is_not_announced(server):
    token = new_token()
    with contextlib.closing(Announcements(token, 65534)) as announcements:
        _tell_as_nobody(token, server, "")
        _tell(token, server, "mine")
        assert announcements.receive(PATIENCE_S) == Announcement(server, "mine")


@_needs_root
@pytest.mark.parametrize("user", [None, 65534])
def test_other_users_are_not_listened_to_but_the_one_that_is_meant(user):
    token = new_token()
    with contextlib.closing(Announcements(token, user)) as announcements:
        _tell_as_nobody(token, None, "other")
        _tell(token, None, "mine")
        assert announcements.receive(PATIENCE_S) == Announcement(None, "mine" if user is None else "other")


def test_no_name_that_others_see_shows_the_token(monkeypatch):
    """Whoever knew it could bind the claims of a job's ranks before these do: none would be captured."""
    token = new_token()
    monkeypatch.setattr(gputop_serve, "_claim", None)
    with contextlib.closing(Announcements(token)):
        assert gputop_serve._claimed(token)
        assert token not in Path("/proc/self/net/unix").read_text(errors="replace")
    gputop_serve._release()


def test_a_process_that_nobody_named_claims_by_a_name_of_its_own(monkeypatch):
    names = set()
    for _ in range(2):
        monkeypatch.setattr(gputop_serve, "_claim", None)
        monkeypatch.delenv("GPUTOP_RUN", raising=False)
        assert gputop_serve.claimed()
        names.add(os.environ["GPUTOP_RUN"])
        gputop_serve._release()
    assert len(names) == 2 and not any(str(os.getpid()) == name.removeprefix("pid-") for name in names)


_FLOOD = """
import os, socket, sys
os.setuid(65534)
senders, sent = [], 1
while sent:  # each takes a part of the queue
    senders.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    senders[-1].setblocking(False)
    sent = 0
    try:
        while True:
            senders[-1].sendto(b"x", chr(0) + sys.argv[1])
            sent += 1
    except BlockingIOError:
        pass
print("ready", flush=True)
sys.stdin.read()
"""


def _is_sending(thread: threading.Thread) -> bool:
    """Whether it waits in sendto(2)."""
    with contextlib.suppress(OSError):  # it has ended
        call = Path(f"/proc/self/task/{thread.native_id}/syscall").read_text().split()[0]
        return call in {"44", "206"}  # of x86-64 and aarch64
    return False


@_needs_root
def test_another_user_who_fills_the_socket_does_not_silence_the_job(monkeypatch):
    monkeypatch.setattr(gputop_serve, "_TELL_S", 60)
    token = new_token()
    with contextlib.closing(Announcements(token)) as announcements, \
            once_ready(sys.executable, "-c", _FLOOD, socket_name("run", token)[1:]):
        teller = threading.Thread(target=gputop_serve._tell, args=("one", token, None))
        teller.start()
        while teller.is_alive() and not _is_sending(teller):
            pass
        assert announcements.receive(PATIENCE_S) == Announcement(None, "one")
        teller.join()
