"""What listens at an address: recognized and named, with nothing asked that could disturb it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from gputop.core.errors import EXIT_USAGE, GputopError
from gputop.profiler.addresses import is_local, parse_address, split_address
from gputop.profiler.xprof.probe import check_http2, probe
from tests.listening import free_port
from tests.profiler.fake_server import FakeProfiler, serve
from tests.profiler.xprof.talking_server import talking
from tests.waiting import PATIENCE_S


@pytest.mark.parametrize(("text", "address"), [
    ("6009", "127.0.0.1:6009"),
    (":6009", "127.0.0.1:6009"),
    ("localhost:6009", "127.0.0.1:6009"),
    ("0.0.0.0:6009", "127.0.0.1:6009"),
    ("[::]:6009", "127.0.0.1:6009"),
    ("[::1]:6009", "[::1]:6009"),
    ("grpc://node-7:06009", "node-7:6009"),
    (" node-7.example.org:65535 ", "node-7.example.org:65535"),
    ("[2001:DB8::0:1]:1", "[2001:db8::1]:1"),
    ("node_7.example.org.:1", "node_7.example.org.:1"),
    (f"{'n' * 63}:1", f"{'n' * 63}:1"),
    ("unix:/run/job 1/p.sock", "unix:/run/job 1/p.sock"),
    ("unix:///run/p.sock", "unix:/run/p.sock"),
    ("unix:p.sock", f"unix:{Path.cwd()}/p.sock"),
    ("unix-abstract:job", "unix-abstract:job"),
])
def test_parse_address(text, address):
    assert parse_address(text) == address
    assert parse_address(address) == address


@pytest.mark.parametrize(("text", "why"), [
    ("node", "port is missing"),
    ("node:", "port is a number"),
    ("node:0", "port is a number"),
    ("node:65536", "port is a number"),
    ("node:six", "port is a number"),
    ("node:-6", "port is a number"),
    ("node:²", "port is a number"),
    ("::1:6009", "brackets"),
    ("[::1]", ":PORT must follow"),
    ("[::g]:1", "IPv6"),
    ("a b:1", "spaces"),
    ("http://node:6006", "URL"),
    ("", "port is missing"),
    ("node..x:6009", "1 to 63 characters"),
    (".:6009", "1 to 63 characters"),
    (f"{'n' * 64}:6009", "1 to 63 characters"),
    (f"münchen.{'ü' * 64}:6009", "1 to 63 characters"),
    ("unix:", "must be followed by a path"),
    ("unix://host/p.sock", "must be followed by a path"),
    ("unix-abstract:a\nb", "control characters"),
    (f"unix:/{'n' * 107}", "at most 107 bytes"),
])
def test_wrong_addresses_are_wrong_usage(text, why):
    with pytest.raises(GputopError, match=why) as caught:
        parse_address(text)
    assert caught.value.exit_code == EXIT_USAGE
    assert caught.value.fix


def test_split_address():
    assert split_address("[::1]:6009") == ("::1", 6009)
    assert split_address("node:1") == ("node", 1)


def test_is_local():
    assert is_local("127.0.0.1:1")
    assert is_local("[::1]:1")
    assert is_local(f"{socket.gethostname()}:1")
    assert is_local("unix:/p.sock")
    assert not is_local("192.0.2.1:1")  # for documentation only, RFC 5737


@pytest.mark.parametrize(("reply", "cause"), [
    (b"HTTP/1.1 400 Bad Request\r\n\r\n", "web server"),
    (b"<!DOCTYPE HTML>\n<html>", "web server"),
    (b"\x15\x03\x01\x00\x02\x02\x16", "TLS"),
    (b"SSH-2.0-OpenSSH_9.6\r\n", "SSH"),
    (b"", "closed the connection"),
    (b"220 ready \x1b[31m", r"does not speak gRPC; it answered '220 ready"),
    (b"\x00\x00\x00\x05\x00\x00\x00\x00\x00", "does not speak gRPC"),
])
def test_ports_that_speak_something_else_are_named(reply, cause):
    with talking(reply) as (address, _), pytest.raises(GputopError, match=cause) as caught:
        probe(address, timeout_s=PATIENCE_S)
    assert address in caught.value.message
    assert "server.start" in caught.value.fix
    assert "\x1b" not in caught.value.message.replace("\\x1b", "")


def test_silent_port():
    with talking(None, close=False) as (address, _), pytest.raises(GputopError, match="sent nothing"):
        probe(address, timeout_s=0.1)


def test_nothing_listens():
    with pytest.raises(GputopError, match="nothing listens") as caught:
        probe(f"127.0.0.1:{free_port()}")
    assert "jax.profiler.start_server" in caught.value.fix


def test_a_server_that_greets_and_says_no_more():
    settings = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    with talking(settings, close=False) as (address, _), pytest.raises(GputopError, match="did not answer"):
        probe(address, timeout_s=0.3)


def test_nobody_is_behind_a_socket(tmp_path):
    with pytest.raises(GputopError, match="nothing listens at unix:"):
        probe(f"unix:{tmp_path}/none.sock")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "left.sock"))
    with pytest.raises(GputopError, match="nothing listens at unix:"):
        probe(f"unix:{tmp_path}/left.sock")


def test_unknown_host():
    with pytest.raises(GputopError, match="unknown host"):
        probe("no-such-host.invalid:6009")


def test_listening_only_sends_nothing():
    settings = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    with talking(settings) as (address, heard):
        check_http2(address, 10, listen_only=True)
    assert heard == [b""]


def test_profiler_server_is_recognized_and_nothing_in_it_runs():
    with serve() as server:
        assert probe(server.address) > 0
        assert server.requests == [] and server.terminated == []


def test_other_grpc_server():
    with serve(FakeProfiler(has_service=False)) as server, pytest.raises(GputopError, match="without the profiler"):
        probe(server.address)
