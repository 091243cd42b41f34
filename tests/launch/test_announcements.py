from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys

import pytest

from gputop.launch.announcements import Announcement, Announcements
from gputop.launch.environment import new_token


def _tell(token: str, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as teller:
        teller.sendto(data, f"\0gputop-run-{token}")


def test_announcements_arrive_and_malformed_ones_do_not():
    token, received = new_token(), queue.Queue()
    announcements = Announcements(token, received.put)
    announcements.start()
    for nonsense in (b"", b"\xff", b"[]", b"{}", b'{"address": 1}'):
        _tell(token, nonsense)
    _tell(token, json.dumps({"address": None, "line": "none"}).encode())
    _tell(token, json.dumps({"address": "127.0.0.1:1", "line": "one"}).encode())
    assert received.get(timeout=30) == Announcement(None, "none")
    assert received.get(timeout=30) == Announcement("127.0.0.1:1", "one")
    announcements.close()
    assert received.empty()


def test_which_process_it_is_says_the_kernel():
    """Not the process: in a container it has another number there, which is somebody else's here."""
    token = new_token()
    announcements = Announcements(token, lambda _: None)
    _tell(token, json.dumps({"address": "pid:1", "line": "one"}).encode())
    assert announcements.receive(30) == Announcement(f"pid:{os.getpid()}", "one")
    announcements.close()


def test_no_announcement_is_none():
    announcements = Announcements(new_token(), lambda _: None)
    assert announcements.receive(0.0) is None
    announcements.close()


def test_announcements_are_made_printable():
    token = new_token()
    announcements = Announcements(token, lambda _: None)
    _tell(token, json.dumps({"address": None, "line": "\x1b[31mno server"}).encode())
    assert announcements.receive(30) == Announcement(None, "\ufffd[31mno server")
    announcements.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
@pytest.mark.parametrize("user", [None, 65534])
def test_other_users_are_not_listened_to_but_the_one_that_is_meant(user):
    token = new_token()
    announcements = Announcements(token, lambda _: None, user)
    code = (f"import os, socket; os.setuid(65534); s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); "
            f"s.sendto(b'{{\"address\": \"other:1\", \"line\": \"\"}}', chr(0) + 'gputop-run-{token}')")
    subprocess.run([sys.executable, "-c", code], check=True)
    _tell(token, json.dumps({"address": "127.0.0.1:1", "line": "mine"}).encode())
    heard = announcements.receive(30)
    assert heard is not None and heard.address == ("127.0.0.1:1" if user is None else "other:1")
    announcements.close()
