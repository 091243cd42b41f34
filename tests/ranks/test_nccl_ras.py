"""The client of NCCL's RAS against a server that speaks each version, and against what should not be there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputop.core.errors import GputopError
from gputop.ranks import nccl_ras
from gputop.ranks.model import Rank, RasAnswer, find_absence
from gputop.ranks.ras_answers import read_json, read_text
from tests.listening import free_port, listening
from tests.ranks.ras_double import Job, as_json, as_text, serving
from tests.records import replace

STUCK = Job((100, 100, 100, 100, 100, 99, 100, 100))
VERSIONS = ["2.24.3", "2.25.1", "2.27.7", "2.28.7", "2.29.2"]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_rank_that_did_not_come_is_named_in_every_version(version: str) -> None:
    with serving(replace(STUCK, version=version)) as (address, server):
        first, last = nccl_ras.ask(address), nccl_ras.ask(address)
    assert server.asked == 2
    assert last.nccl == version and last.counts_all == (version >= "2.28")
    absence = find_absence(first, last)
    assert absence is not None
    assert absence.absent == (Rank(5, "10.0.0.1", 1005, 5),)
    assert (absence.absent_at, absence.waiting_at, absence.absent_count, absence.waiting_count) == (99, 100, 1, 7)
    assert absence.operation == (None if version < "2.26" else "AllReduce")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_rank_that_does_not_answer_is_named_in_every_version(version: str) -> None:
    with serving(Job((100,) * 8, gone=frozenset({3}), version=version)) as (address, server):
        answer = nccl_ras.ask(address)
    assert server.asked == 1  # the comma that 2.28.7 lacks is mended
    absence = find_absence(answer, answer)
    assert absence is not None and absence.silent and absence.waiting_count == 7
    assert [rank.number for rank in absence.absent] == [3] and absence.absent[0].trouble == "the rank does not answer"
    assert absence.absent[0].pid == 1003 and absence.absent[0].host == "10.0.0.1"


def test_before_2_26_of_several_that_do_not_answer_the_processes_are_not_known() -> None:
    answer = read_text(as_text(Job((100,) * 8, gone=frozenset({3, 5}), version="2.25.1")), 0.0)
    assert [(rank.number, rank.pid) for rank in answer.communicators[0].silent] == [(3, None), (5, None)]


def test_ranks_of_another_status_are_none_of_another_count() -> None:
    for version in VERSIONS:
        answer = read_text(as_text(replace(STUCK, starting=2, version=version)), 0.0)
        (levels,) = answer.communicators[0].levels.values()
        assert [(level.count, level.size, [rank.number for rank in level.ranks]) for level in levels] == [
            (99, 1, [5]), (100, 7, [])]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_mismatch_that_moves_and_ranks_that_agree_are_normal(version: str) -> None:
    moving = replace(STUCK, version=version, reduces=(120, 120, 120, 120, 120, 119, 120, 120))
    even = Job((100,) * 8, version=version)
    with serving(replace(STUCK, version=version), moving, even) as (address, _):
        answers = [nccl_ras.ask(address) for _ in range(4)]
    assert all(find_absence(a, b) is None for a, b in pairwise(answers))


def test_a_half_of_the_ranks_is_counted_but_not_named_by_text() -> None:
    halves = Job((100,) * 4 + (99,) * 4, version="2.27.7")
    absence = find_absence(*[read_text(as_text(halves), 0.0)] * 2)
    assert absence is not None and absence.absent == () and absence.absent_count == absence.waiting_count == 4


@pytest.mark.parametrize(("way", "words"), [
    ("silent", "in time"), ("stalls", "in time"), ("half", "incomplete"), ("http", "not NCCL"), ("endless", "NCCL|in "
                                                                                                            "time"),
])
@pytest.mark.parametrize("version", ["2.27.7", "2.29.2"])
def test_what_is_wrong_with_an_answer_is_said_and_ends(way: str, words: str, version: str,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ras, "_MAX_BYTES", 1 << 20)
    with serving(replace(STUCK, version=version), way=way) as (address, _), pytest.raises(GputopError, match=words):
        nccl_ras.ask(address, timeout_s=0.4 if "in time" in words else 20.0)


def test_nobody_there() -> None:
    with pytest.raises(nccl_ras.NotServed, match="is not listening"):
        nccl_ras.ask(f"127.0.0.1:{free_port()}")


@given(st.data())
def test_damaged_answers_are_refused_or_read_within_bounds(data: st.DataObject) -> None:
    job = Job((100, 7, 100, 0), gone=frozenset({3}), version=data.draw(st.sampled_from(VERSIONS)))
    make, read = data.draw(st.sampled_from([(as_json, read_json), (as_text, read_text)]))
    raw = bytearray(make(job))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(raw)))
        raw[at:at + data.draw(st.integers(0, 40))] = data.draw(st.sampled_from([
            b"", b"\0", b"-1", b"9" * 5000, b"\x1b[2J", b"\n", b'"', b"1e999", b"[" * 3000, b"NaN", b"Rank 9 -- "]))
    answer = None
    with contextlib.suppress(GputopError):
        answer = read(bytes(raw), 0.0)
    if answer is None:
        return
    find_absence(answer, answer)
    for c in answer.communicators:
        for rank in (*c.silent, *(r for levels in c.levels.values() for level in levels for r in level.ranks)):
            assert 0 <= rank.number < 2**63 and len(rank.host) <= 64 and rank.host.isprintable()


def test_whoever_took_the_port_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_RAS_ADDR", raising=False)
    with serving(STUCK) as (address, server):
        monkeypatch.setattr(nccl_ras, "DEFAULT_ADDRESS", address)
        assert nccl_ras.ask_job([os.getpid()], frozenset()).communicators
        for uids, who in ((frozenset({4242}), "user 4242, who owns"), (frozenset({4242, 0}), "user 4242"),
                          (frozenset[int](), "a user unknown to gputop")):
            monkeypatch.setattr(nccl_ras, "listening_uids", lambda proc, host, port, uids=uids: uids)
            with pytest.raises(GputopError, match=who):
                nccl_ras.ask_job([os.getpid()], frozenset())
        monkeypatch.setenv("NCCL_RAS_ADDR", address)  # the user has named it
        assert nccl_ras.ask_job([os.getpid()], frozenset()).communicators
    assert server.asked == 2


def test_the_address_is_asked_whose_owner_was_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name has two addresses: what listens at ::1, which is tried first, may be anybody's."""
    monkeypatch.delenv("NCCL_RAS_ADDR", raising=False)
    heard: list[bytes] = []
    with serving(STUCK) as (address, server), contextlib.ExitStack() as parts:
        port = int(address.rpartition(":")[2])
        try:
            parts.enter_context(listening(lambda own: heard.append(own.recv(100)), host="::1", port=port))
        except OSError:
            pytest.skip("this machine has no IPv6")
        monkeypatch.setattr(nccl_ras, "DEFAULT_ADDRESS", f"localhost:{port}")
        places = [(family, socket.SOCK_STREAM, 6, "", place) for family, place in (
            (socket.AF_INET6, ("::1", port, 0, 0)), (socket.AF_INET, ("127.0.0.1", port)))]
        monkeypatch.setattr(nccl_ras.socket, "getaddrinfo", lambda *_, **__: places)
        monkeypatch.setattr(nccl_ras, "listening_uids", lambda proc, host, port: frozenset(
            {4242 if host == "::1" else os.geteuid()}))
        assert nccl_ras.ask_job([os.getpid()], frozenset()).communicators
        del places[1]
        with pytest.raises(GputopError, match=r"user 4242, .* listens at \[::1\]"):
            nccl_ras.ask_job([os.getpid()], frozenset())
    assert server.asked == 1 and not any(heard)


def test_of_an_answer_that_is_too_large_the_text_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job((100,) * 400)
    monkeypatch.setattr(nccl_ras, "_MAX_BYTES", len(as_text(job)) + 1)
    with serving(job) as (address, server):
        assert not nccl_ras.ask(address).counts_all and server.asked == 2


_TEXT = "NCCL version 2.27.7 compiled with CUDA 12.9\n{}\nWarnings\n"


@pytest.mark.parametrize(("read", "data"), [
    (read_json, b"{" * (4 << 20)), (read_json, b"[" + b"{}," * (1 << 20)), (read_json, b'{"a":' * (1 << 19)),
    (read_json, b'{"nvml_dev": 1' + b"\n" * (1 << 20)),
    (read_json, json.dumps({"nccl_version": "2", "ras": {}, "communicators": [{"hash": "0x1", "size": 1, "ranks": [
        {"rank": 1, "collective_counts": dict.fromkeys(map(str, range(200)), 1)}] * 600}]}).encode()),
    (read_text, _TEXT.format("".join(f"#0-{n} ({n:x}) ERROR\n" for n in range(20_000))).encode()),
    (read_text, _TEXT.format("#0-0 (a) INCOMPLETE\n  The missing ranks: " + "1," * 200_000).encode()),
    (read_text, _TEXT.format("".join(f"  Process {n} on node a managing GPU 0\n" for n in range(101_000))).encode()),
], ids=["braces", "objects", "depth", "lines", "counts", "blocks", "missing", "processes"])
def test_no_answer_takes_more_than_its_bounds(read: Callable[[bytes, float], RasAnswer], data: bytes) -> None:
    """Each took gigabytes, or time that grows with the square of its size."""
    with pytest.raises(GputopError):
        read(data, 0.0)


def test_where_to_ask() -> None:
    local = frozenset({"10.0.0.1"})
    assert nccl_ras.address_of({}, [], local) == "localhost:28028"
    assert nccl_ras.address_of({"NCCL_RAS_ADDR": "far:1"}, [{"NCCL_RAS_ADDR": "10.0.0.1:2"}], local) == "far:1"
    assert nccl_ras.address_of({}, [{}, {"NCCL_RAS_ADDR": "10.0.0.1:2"}], local) == "10.0.0.1:2"
    assert nccl_ras.address_of({}, [{"NCCL_RAS_ADDR": "[::]:3"}], local) == "localhost:3"
    assert nccl_ras.address_of({}, [{"NCCL_RAS_ADDR": "evil.example:4"}], local) == "localhost:28028"
    with pytest.raises(GputopError, match="NCCL_RAS_ENABLE=0"):
        nccl_ras.address_of({}, [{"NCCL_RAS_ENABLE": "0"}], local)
    for wrong in ("", "host", "host:0", "host:99999", "host:x", ":5"):
        with pytest.raises(GputopError, match="HOST:PORT"):
            nccl_ras.split(wrong)


def test_the_double_writes_as_nccl_does() -> None:
    """Against the format strings of libnccl.so.2 (nvidia-nccl-cu12 2.32.3), which no machine without a GPU can run."""
    patterns = []
    for line in (Path(__file__).parent / "ras_formats.txt").read_text().splitlines():
        words = re.sub(r"%-?[\d.\\]*l?([dusfx])", lambda own: {
            "d": r" *-?\d+", "u": r"\d+", "f": r"\d+\.\d+", "x": "[0-9a-f]+", "s": "[^\n]*?"}[own[1]], re.escape(line))
        patterns.append(re.compile(words if line[0] != '"' else words.strip()))

    def known(line: str) -> bool:
        return any(pattern.fullmatch(line) for pattern in patterns)

    job = Job((100, 7, 100, 0, 100, 100, 100, 100), gone=frozenset({3}), starting=2, version="2.32.3")
    text = as_text(job).decode().replace("Communicators... (0.00s)", "Communicators...")
    assert [line for line in text.split("\n") if line and not known(line)] == []
    document = [line.strip().rstrip(",") for line in as_json(job).decode().splitlines()]
    rows = [line for line in document if line.startswith('"')]
    assert len(rows) > 100 and [line for line in rows if not (known(line) or known(line + ","))] == []
