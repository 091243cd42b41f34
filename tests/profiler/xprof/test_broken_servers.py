"""Servers that die at any byte, announce more than they send or anybody could hold, or write what no memory holds."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from gputop.profiler import recording
from gputop.profiler.recording import TraceLost
from gputop.profiler.xprof import client, server_disk
from tests.profiler.broken_servers import announcing, cutting
from tests.profiler.capturing import capture
from tests.profiler.fake_server import FakeProfiler, make_xspace, serve

TWO_GIB = 2**31


@pytest.fixture
def unprobed(monkeypatch):
    """The one connection there is is the capture's."""
    monkeypatch.setattr(client, "probe", lambda address: None)


def test_a_server_that_dies_at_each_byte_of_its_answer(logdir, unprobed, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)  # takes as long as all the rest
    monkeypatch.setattr(recording, "_EXIT_S", 0.0)  # the job goes on
    runs, kept = logdir / "plugins" / "profile", []
    runs.mkdir(parents=True)
    with serve() as server, cutting(server.address) as proxy:
        capture(proxy.address, seconds=0.001, logdir=logdir, pid=os.getpid())
        length = proxy.passed
        _remove(runs)
        assert length > len(server.xspace)
        for proxy.cut_after in range(1, length):
            try:
                capture(proxy.address, seconds=0.001, logdir=logdir, pid=os.getpid())
            except TraceLost as error:
                assert "the connection was lost" in error.message and error.fix
            else:
                kept.append(proxy.cut_after)
                assert next(logdir.rglob("*.xplane.pb")).read_bytes() == server.xspace
                _remove(runs)
            assert list(runs.iterdir()) == [], proxy.cut_after
    assert not kept or min(kept) > len(server.xspace), "all or nothing"


def test_an_answer_that_comes_byte_by_byte(logdir):
    with serve() as server, cutting(server.address) as proxy:
        proxy.at_once = 1
        result = capture(proxy.address, seconds=0.001, logdir=logdir)
    assert result.path.read_bytes() == server.xspace


def _remove(runs: Path) -> None:
    (run,) = runs.iterdir()
    shutil.rmtree(run)


def test_an_answer_of_2_gb_is_refused_when_it_is_announced(logdir, unprobed):
    with announcing(TWO_GIB) as address, pytest.raises(TraceLost, match="too large") as caught:
        capture(address, seconds=0.001, logdir=logdir, pid=os.getpid())
    assert str(TWO_GIB) in caught.value.message and "fewer seconds" in caught.value.fix
    assert not logdir.exists()


def test_a_trace_of_more_than_2_gb_on_the_servers_disk(logdir, monkeypatch):
    """Nearly all of it is a hole, in a field nobody knows; what follows that is read."""
    monkeypatch.setattr(server_disk, "_shares_files", lambda pid: True)
    with serve(FakeProfiler(writes_disk=True, hole_bytes=TWO_GIB, after_hole=make_xspace(errors=("late",)))) as server:
        result = capture(server.address, seconds=0.001, logdir=logdir)
    assert result.bytes == result.path.stat().st_size > TWO_GIB
    assert result.errors == ("late",) and result.warnings == ()
