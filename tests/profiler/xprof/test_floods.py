"""Servers that keep the connection busy for ever: calls end by gputop's own clock, beside gRPC's."""

from __future__ import annotations

import threading

import grpc
import pytest

from gputop.core.errors import GputopError
from gputop.profiler.xprof import client, probe
from tests.profiler.broken_servers import FLOODS, flooding


@pytest.mark.parametrize("what", FLOODS)
def test_a_flood_does_not_outlive_the_deadline_of_a_probe(what):
    with flooding(what) as address, pytest.raises(GputopError, match=r"did not answer within 2 s"):
        probe.probe(address, 2.0)


def test_a_call_that_never_returns_is_given_up():
    """Whatever keeps gRPC from keeping its deadline."""
    never = threading.Event()
    try:
        with pytest.raises(grpc.RpcError) as raised:
            probe.call_within("127.0.0.1:9", 0.01, lambda channel: never.wait())
        assert raised.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    finally:
        never.set()


def test_what_a_call_returns_and_raises_passes():
    def fail(channel: grpc.Channel) -> None:
        raise ValueError("so")

    assert probe.call_within("127.0.0.1:9", 60.0, lambda channel: 7) == 7
    with pytest.raises(ValueError, match="so"):
        probe.call_within("127.0.0.1:9", 60.0, fail)


def test_a_channel_that_takes_long_to_close_is_left_to_itself(monkeypatch):
    never = threading.Event()
    monkeypatch.setattr(probe, "_CLOSE_S", 0.01)

    class Channel:
        def close(self) -> None:
            never.wait()

    called: list[str] = []
    probe.close_channel(Channel(), lambda: called.append("before"))
    assert called == ["before"]
    never.set()


def test_a_capture_ends_by_its_own_clock():
    class Call:
        def add_done_callback(self, callback: object) -> None:
            """It is never called."""

    call = client._Call("127.0.0.1:9", 0.01, None)
    with pytest.raises(client.TraceLost, match="did not send its trace"):
        call._watch(None, Call(), 0.0, lambda progress: None, threading.Event(), 0.01)
