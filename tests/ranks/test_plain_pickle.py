"""The reader of pickles: what it builds is what pickle builds, and it builds plain values only."""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
from typing import Any

import pytest

from gputop.core.errors import GputopError
from gputop.ranks import plain_pickle
from gputop.ranks.plain_pickle import MAX_DEPTH, load

SHARED = ["a", 1]
PLAIN = {
    "none": None, "flags": [True, False], "integers": [0, 255, 256, 65535, 65536, -1, 2 ** 31, -2 ** 63, 2 ** 63],
    "float": 0.5, "text": "ä" * 300, "bytes": [b"x", b"y" * 300], "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
    "shared": [SHARED, SHARED], "nested": {"a": {"b": [{}]}}}


class Opens:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/gputop-was-here",)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_are_read_as_pickle_reads_them(protocol: int) -> None:
    value = {key: own for key, own in PLAIN.items() if protocol > 2 or key != "bytes"}  # an object in protocol 2
    loaded = load(pickle.dumps(value, protocol), "dump")
    assert loaded == value and loaded["shared"][0] is loaded["shared"][1]


@pytest.mark.parametrize("protocol", [2, 4])
def test_an_object_is_refused_by_its_opcode(protocol: int, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(os, "system", called.append)
    with pytest.raises(GputopError, match=r"more than plain values \((STACK_)?GLOBAL at byte \d+\)"):
        load(pickle.dumps([Opens()], protocol), "dump")
    assert not called


@pytest.mark.parametrize(("data", "words"), [
    (b"cos\nsystem\n(S'true'\ntR.", "GLOBAL"),
    (b"(S'true'\nios\nsystem\n.", "STRING"),
    (b"\x80\x02K\x01K\x01R.", "REDUCE"),
    (b"\x80\x02}}b.", "BUILD"),
    (b"\x80\x02\x82\x01.", "EXT1"),
    (b"P1\n.", "PERSID"),
    (b"\x80\x02K\x01Q.", "BINPERSID"),
    (b"I" + b"9" * 1_000_000 + b"\n.", "INT"),
    (b"\x80\x02\x8b\xff\xff\xff\x7f", "LONG4"),
    (b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40), "BINBYTES8"),
    (b"\xff.", "byte 0xff"),
    (b"", "cut"), (b"\x80", "cut"), (b"\x80\x02]", "cut"),
    (b"\x80\x02X" + struct.pack("<I", 1 << 30) + b"short", "cut"),
    (b"\x80\x02B" + struct.pack("<I", (1 << 32) - 1), "cut"),
    (b"\x80\x02\x8a\xff" + b"\xff" * 255 + b".", "16 bytes"),
    (b"\x80\x02X\x01\x00\x00\x00\xff.", "UTF-8"),
    (b".", "single value"), (b"(.", "single value"), (b"NN.", "single value"),
    (b"a", "not exist"), (b"(a", "not exist"), (b"e", "not exist"), (b"(q\x00", "not exist"), (b"q\x00", "not exist"),
    (b"h\x07.", "did not store"), (b"NNa.", "not a container"), (b"]NNs.", "not a container"),
    (b"}K\x01Ns.", "not a string"), (b"}(X\x01\x00\x00\x00au.", "not a string"),
    (b"]q\x00h\x00a.", "already used elsewhere"),  # a list in itself
    (b"]q\x00}X\x01\x00\x00\x00ah\x00sa.", "already used elsewhere"),  # a list in a dict in that list
    (b"]" * 100 + b"a" * 99 + b".", "nested"), (b")" + b"\x85" * 100_000 + b".", "nested"),
])
def test_hostile_and_damaged_pickles(data: bytes, words: str) -> None:
    with pytest.raises(GputopError, match=words) as refused:
        load(data, "dump 3")
    assert refused.value.message.startswith("gputop rejected dump 3")


def test_a_memo_takes_no_more_than_what_is_stored() -> None:
    # CPython's own unpickler makes room for as many values as the index says: 32 GB here.
    assert load(b"\x80\x02Nr\xff\xff\xff\xff.", "dump") is None


def test_shared_values_that_would_fill_the_memory_as_copies_do_not() -> None:
    # Each list holds the one before ten times: 10^25 values, were they copies.
    levels = b"".join(b"](" + (b"h" + bytes([i])) * 10 + b"eq" + bytes([i + 1])
                      for i in range(25))
    whole = load(b"\x80\x02(]q\x00" + levels + b"t.", "dump")
    assert len(whole) == 26 and whole[25][0] is whole[25][9] is whole[24]


def test_depth_size_and_instructions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    deep: Any = None
    for _ in range(MAX_DEPTH):
        deep = [deep]
    assert load(pickle.dumps(deep, 2), "dump") == deep
    with pytest.raises(GputopError, match="nested"):
        load(pickle.dumps([deep], 2), "dump")
    monkeypatch.setattr(plain_pickle, "MAX_OPCODES", 200)
    with pytest.raises(GputopError, match="200 instructions"):
        load(b"N" * 201, "dump")
    monkeypatch.setattr(plain_pickle, "MAX_CONTAINERS", 50)
    for container in (b"]", b"}", b"N\x85"):  # 200 bytes each, for one in the file
        with pytest.raises(GputopError, match="more than 50 lists"):
            load(container * 51, "dump")
    monkeypatch.setattr(plain_pickle, "MAX_BYTES", 10)
    with pytest.raises(GputopError, match="larger"):
        load(b"N" * 11, "dump")


def test_any_cut_of_a_pickle_is_refused() -> None:
    data = pickle.dumps(PLAIN, 4)
    for end in range(len(data)):
        with pytest.raises(GputopError):
            load(data[:end], "dump")


def test_any_changed_byte_is_refused_or_gives_plain_values() -> None:
    data = pickle.dumps({"a": [1, "b", (2.5, None)]}, 2)
    for changed in range(len(data)):
        for byte in range(256):
            with contextlib.suppress(GputopError):
                value = load(data[:changed] + bytes([byte]) + data[changed + 1:], "dump")
                assert type(value) in (dict, list, tuple, str, bytes, int, float, bool, type(None))
