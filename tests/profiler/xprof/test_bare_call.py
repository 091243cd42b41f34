"""The status of a gRPC call over a bare socket: read from what servers send, or said to be unreadable."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from concurrent import futures

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputop.core.errors import GputopError
from gputop.profiler.xprof.probe import GOAWAY, HEADERS, PING, SETTINGS, Unreadable, _integer, _status, frame, probe
from tests.profiler.fake_server import serve
from tests.profiler.xprof.talking_server import talking
from tests.waiting import PATIENCE_S

GREETING = frame(SETTINGS, 0, 0, b"")
LONG = b"m" * 300


def answer(block: bytes, flags: int = 5) -> bytes:
    return GREETING + frame(HEADERS, flags, 1, block)


@pytest.mark.parametrize("block", [
    b"\x40\x0bgrpc-status\x0213",
    b"\x88\x00\x0bgrpc-status\x0213",
    b"\x3f\xe1\x1f\x5f\x10application/grpc\x10\x0bgrpc-status\x0213",
    b"\x00\x0cgrpc-message" + _integer(len(LONG)) + LONG + b"\x0f\x2f\x00\x00\x0bgrpc-status\x0213",
])
def test_status(block):
    assert _status(block) == 13


@pytest.mark.parametrize("block", [
    b"", b"\x88", b"\x00\x0bgrpc-status\x02", b"\x00\x0bgrpc-status\x021x", b"\x40\x0bgrpc-stat",
    b"\x7f\xff\xff\xff\xff\xff",
    b"\x00\x0bgrpc-status" + _integer(5000) + b"9" * 5000,  # more digits than int() takes: no search survived it
    b"\x40\x88\x9a\xca\xc8\xb2\x12\x34\xda\x8f\x0213",  # the name in Huffman's code, as Go's gRPC writes it
])
def test_unreadable_status(block):
    with pytest.raises(Unreadable):
        _status(block)


@given(st.binary(max_size=80))
def test_any_block_is_a_status_or_unreadable(block):
    with contextlib.suppress(Unreadable):
        assert _status(block) >= 0


def test_a_server_is_recognized_without_the_grpc_package():
    code = ("import sys; from gputop.profiler.xprof.probe import probe; probe(sys.argv[1]); "
            "sys.exit('grpc' in sys.modules or 'google.protobuf' in sys.modules)")
    with serve() as server:
        assert subprocess.run([sys.executable, "-c", code, server.address], timeout=60).returncode == 0


@pytest.mark.parametrize(("reply", "cause"), [
    (answer(b"\x40\x0bgrpc-status\x0212"), "without the profiler service"),
    (answer(b"\x88", flags=4), "answered UNAVAILABLE|did not answer"),
    (GREETING + frame(GOAWAY, 0, 0, bytes(8)), "answered UNAVAILABLE|did not answer"),
    (GREETING + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01", "answered UNAVAILABLE|did not answer|INTERNAL"),
])
def test_what_is_no_answer_of_a_profiler_is_told(reply, cause):
    with talking(reply) as (address, _), pytest.raises(GputopError, match=cause):
        probe(address, timeout_s=1)


def test_another_status_is_told_in_the_words_of_the_server():
    class Refuse(grpc.GenericRpcHandler):
        def service(self, _):
            return grpc.unary_unary_rpc_method_handler(
                lambda _, context: context.abort(grpc.StatusCode.PERMISSION_DENIED, "not you"))

    server = grpc.server(futures.ThreadPoolExecutor(1), handlers=[Refuse()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with pytest.raises(GputopError, match="answered PERMISSION_DENIED: not you"):
        probe(f"127.0.0.1:{port}")
    server.stop(None).wait()


def test_a_ping_is_answered_before_the_status():
    reply = GREETING + frame(PING, 0, 0, b"12345678") + frame(
        HEADERS, 5, 1, b"\x88\x40\x0bgrpc-status\x0213")
    with talking(reply, close=False) as (address, _):
        assert probe(address, timeout_s=PATIENCE_S) >= 0


def test_a_server_that_stops_within_an_answer_is_waited_for_no_longer_than_asked():
    with talking(GREETING + b"\x00\x00\x21\x01", close=False) as (address, _), pytest.raises(
            GputopError, match="did not answer"):
        probe(address, timeout_s=0.2)
