from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gputop.trace.readers.xspace import wire
from gputop.trace.readers.xspace.wire import FIXED32, FIXED64, LENGTH, VARINT, Block, read_fields, signed, tag
from tests.trace.readers.xspace.wire_encoding import encoded

UINT64 = st.one_of(st.integers(0, 300), st.integers(0, 2**64 - 1), st.sampled_from([2**k for k in range(64)]))


FIELD = st.one_of(
    st.tuples(st.integers(1, 3000), st.just(VARINT), UINT64),
    st.tuples(st.integers(1, 3000), st.just(LENGTH), st.binary(max_size=300)),
    st.tuples(st.integers(1, 40), st.just(FIXED64), UINT64),
    st.tuples(st.integers(1, 40), st.just(FIXED32), st.integers(0, 2**32 - 1)),
)
MESSAGE = st.lists(FIELD, max_size=8)


def walked(messages: list[bytes], junk: bytes = b"") -> tuple[list[list[tuple[int, int, int | bytes]]], list[bool]]:
    """Each message's fields as the block walk sees them, and which messages are broken."""
    data = junk + b"".join(messages) + junk
    ends = np.cumsum([len(m) for m in messages])
    begins = ends - [len(m) for m in messages]
    block = Block(data, len(junk), len(data))
    broken = np.zeros(len(messages), bool)
    out: list[list[tuple[int, int, int | bytes]]] = [[] for _ in messages]
    for fields in block.walk(begins, ends, broken):
        for row, this, value, a, b in zip(*(x.tolist() for x in (
                fields.rows, np.broadcast_to(fields.tag, len(fields.rows)), fields.value, fields.begin, fields.end)),
                strict=True):
            content = block.bytes[a:b].tobytes() if this & 7 == LENGTH else value
            out[row].append((this >> 3, this & 7, content))
    return out, broken.tolist()


@given(st.lists(MESSAGE, min_size=1, max_size=12), st.binary(max_size=9))
def test_walk_sees_every_field_of_every_message(messages, junk):
    got, broken = walked([b"".join(encoded(*f) for f in m) for m in messages], junk)
    assert got == [[tuple(f) for f in m] for m in messages]
    assert not any(broken)


@given(st.lists(MESSAGE.filter(bool), min_size=1, max_size=6), st.data())
def test_a_cut_message_is_broken_and_the_others_are_not(messages, data):
    raw = [b"".join(encoded(*f) for f in m) for m in messages]
    which = data.draw(st.integers(0, len(raw) - 1))
    last = len(encoded(*messages[which][-1]))
    raw[which] = raw[which][: len(raw[which]) - data.draw(st.integers(1, last - 1))]
    got, broken = walked(raw)
    assert broken == [i == which for i in range(len(raw))]
    assert got[which] == [tuple(f) for f in messages[which][:-1]]


@given(st.lists(st.binary(max_size=60), max_size=20))
def test_walk_survives_any_bytes(messages):
    got, _ = walked([m for m in messages if m] or [b"\x08\x01"])
    for message in got:
        for number, _, _ in message:
            assert number >= 1


@given(st.binary(max_size=200), st.integers(-5, 210), st.integers(-5, 400))
def test_walk_rejects_spans_outside_the_data(data, begin, end):
    block = Block(data, 0, len(data))
    broken = np.zeros(1, bool)
    for fields in block.walk(np.array([begin]), np.array([end]), broken):
        assert (fields.end <= len(data)).all()
    assert broken[0] or (0 <= begin <= end <= len(data))


@given(st.lists(st.one_of(FIELD, st.tuples(st.just(4), st.just(LENGTH), st.binary(max_size=200))), max_size=60))
def test_read_fields_finds_the_wanted(message):
    data = b"\x00" + b"".join(encoded(*f) for f in message)
    found = read_fields(data, 1, len(data), (tag(4, LENGTH), tag(7, LENGTH), tag(1, VARINT), tag(3, VARINT)))
    assert not found.damaged
    for number in (4, 7):
        begin, end = found.pairs(tag(number, LENGTH))
        assert [data[a:b] for a, b in zip(begin, end, strict=True)] == [
            v for n, kind, v in message if n == number and kind == LENGTH]
    for number in (1, 3):
        values = [v for n, kind, v in message if n == number and kind == VARINT]
        assert found.values.get(tag(number, VARINT)) == (values[-1] if values else None)


@given(st.lists(st.binary(max_size=20000), min_size=2, max_size=8))
@settings(max_examples=25)
def test_runs_of_one_field_with_lengths_of_one_to_three_bytes(contents):
    data = b"".join(encoded(4, LENGTH, c) for c in contents) + encoded(5, VARINT, 7)
    found = read_fields(data, 0, len(data), (tag(4, LENGTH), tag(5, VARINT)))
    begin, end = found.pairs(tag(4, LENGTH))
    assert [data[a:b] for a, b in zip(begin, end, strict=True)] == contents
    assert found.values == {tag(5, VARINT): 7}


@pytest.mark.parametrize("window", [1 << 10, 1 << 14])
@given(contents=st.lists(st.one_of(
    st.binary(max_size=40), st.lists(st.binary(max_size=9), max_size=7).map(
        lambda inner: b"".join(encoded(4, LENGTH, i) for i in inner)),  # the same tag inside, as an event's stats have
    st.binary(min_size=128, max_size=300)), min_size=1, max_size=30), times=st.integers(1, 60),
    tail=st.sampled_from((b"", encoded(5, VARINT, 7), encoded(4, LENGTH, b"x" * 20_000), b"\x22\x7f")))
@settings(max_examples=40)
def test_long_runs_are_walked_as_short_ones_are(window, contents, times, tail):
    data = b"".join(encoded(4, LENGTH, c) for c in contents) * times + tail
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "_SERIAL_BYTES", len(data))  # the plain loop
        expected = read_fields(data, 0, len(data), (tag(4, LENGTH), tag(5, VARINT)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "_SERIAL_BYTES", 50)
        patch.setattr(wire, "_MIN_STRIDE_BYTES", 400)
        patch.setattr(wire, "_SEARCH_BYTES", 90)
        patch.setattr(wire, "_FIRST_WINDOW_BYTES", window)
        found = read_fields(data, 0, len(data), (tag(4, LENGTH), tag(5, VARINT)))
    assert found == expected


def test_a_run_of_megabytes():
    contents = [bytes([i % 251]) * (i * 7 % 90) + encoded(4, LENGTH, b"ab") * (i % 3) for i in range(120_000)]
    data = b"".join(encoded(4, LENGTH, c) for c in contents) + encoded(5, VARINT, 7)
    found = read_fields(data, 0, len(data), (tag(4, LENGTH), tag(5, VARINT)))
    begin, end = found.pairs(tag(4, LENGTH))
    assert len(data) > wire._SERIAL_BYTES + wire._FIRST_WINDOW_BYTES
    assert [data[a:b] for a, b in zip(begin.tolist(), end.tolist(), strict=True)] == contents
    assert found.values == {tag(5, VARINT): 7}


@given(st.lists(st.binary(max_size=30), min_size=1, max_size=6), st.integers(1, 29))
def test_read_fields_keeps_what_came_before_a_cut(contents, missing):
    raw = [encoded(4, LENGTH, c) for c in contents]
    data = b"".join(raw)[: -min(missing, len(raw[-1]) - 1)] if len(raw[-1]) > 2 else b"".join(raw)[:-1]
    found = read_fields(data, 0, len(data), (tag(4, LENGTH),))
    begin, end = found.pairs(tag(4, LENGTH), whole=True)
    assert found.damaged
    assert [data[a:b] for a, b in zip(begin, end, strict=True)] == contents[:-1]


@given(st.binary(max_size=300))
def test_read_fields_survives_any_bytes(data):
    found = read_fields(data, 0, len(data), (tag(1, LENGTH), tag(2, VARINT)))
    begin, end = found.pairs(tag(1, LENGTH))
    assert (begin <= end).all()
    assert (end <= len(data)).all()


def test_first_varint_looks_only_at_the_first_field():
    messages = [encoded(1, VARINT, 5), encoded(1, VARINT, 300), encoded(1, VARINT, 70000), encoded(2, VARINT, 5),
                b"\x08" + b"\xff" * 10, b""]
    ends = np.cumsum([len(m) for m in messages])
    block = Block(b"".join(messages), 0, int(ends[-1]))
    begin = ends - [len(m) for m in messages]
    value, after = block.peek_varint(tag(1, VARINT), begin)
    assert value.tolist() == [5, 300, 70000, -1, -1, -1]
    assert (after - begin).tolist()[:3] == [2, 3, 4]


def test_of_tells_where_a_tag_is():
    same = Block(encoded(3, VARINT, 7) * 2, 0, 4)
    (fields,) = same.walk(np.array([0, 2]), np.array([2, 4]), np.zeros(2, bool))
    assert fields.value[fields.mask(tag(3, VARINT))].tolist() == [7, 7]
    assert fields.value[fields.mask(tag(4, VARINT))].tolist() == []
    mixed = Block(encoded(3, VARINT, 7) + encoded(1000, VARINT, 8) + encoded(5, VARINT, 9), 0, 7)
    (fields,) = mixed.walk(np.array([0, 2, 5]), np.array([2, 5, 7]), np.zeros(3, bool))
    assert fields.value[fields.mask(tag(1000, VARINT), tag(3, VARINT))].tolist() == [7, 8]
    assert not fields.mask(tag(4, VARINT)).any()


def test_signed():
    assert signed(2**64 - 1) == -1
    assert signed(5) == 5
