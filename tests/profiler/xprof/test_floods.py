"""Servers that keep the connection busy for ever: calls end by gputop's own clock, beside gRPC's."""

from __future__ import annotations

import threading
from collections.abc import Callable

import grpc
import pytest

from gputop.core.errors import GputopError
from gputop.profiler.xprof import client, probe
from tests.profiler.broken_servers import FLOODS, flooding
from tests.waiting import PATIENCE_S


@pytest.mark.parametrize("what", FLOODS)
def test_a_flood_does_not_outlive_the_deadline_of_a_probe(what):
    with flooding(what) as address, pytest.raises(GputopError, match=r"did not answer within 2 s"):
        probe.probe(address, 2.0)


class Late(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.DEADLINE_EXCEEDED

    def details(self) -> str:
        return "Deadline Exceeded"


@pytest.mark.parametrize("kept_by", ["gRPC", "gputop"])
def test_a_call_that_is_late_or_never_returns_is_given_up(kept_by, monkeypatch):
    """Whatever keeps gRPC from keeping its deadline."""
    never, closed = threading.Event(), threading.Event()

    def call(message: bytes, timeout: float) -> None:
        if kept_by == "gRPC":
            raise Late
        never.wait()

    class Channel:
        def unary_unary(self, method: str) -> Callable[..., object]:
            return call

        def close(self) -> None:
            closed.set()

    monkeypatch.setattr(probe, "open_channel", lambda address: Channel())
    with pytest.raises(GputopError, match=r"did not answer within 0.01 s"):
        probe._status_by_grpc("127.0.0.1:9", "/m", b"", 0.01)
    never.set()
    assert closed.wait(PATIENCE_S)


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
