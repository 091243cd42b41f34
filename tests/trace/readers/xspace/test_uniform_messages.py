"""What is read of events by their layout equals what protobuf's own parser reads of each."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputop.trace.readers.xspace import uniform_messages
from gputop.trace.readers.xspace.fields import EVENT_DURATION_PS, EVENT_METADATA_ID, EVENT_OFFSET_PS
from gputop.trace.readers.xspace.uniform_messages import find_uniform
from gputop.trace.readers.xspace.wire import Block
from tests import xspace_messages as messages

NUMBER = st.one_of(st.integers(1, 127), st.integers(128, 1 << 14), st.integers(1, (1 << 56) - 1),
                   st.integers(1 << 56, (1 << 63) - 1))
VALUE = st.one_of(
    st.tuples(st.just("uint64_value"), NUMBER), st.tuples(st.just("int64_value"), st.integers(-(1 << 63), -1)),
    st.tuples(st.just("int64_value"), NUMBER), st.tuples(st.just("ref_value"), NUMBER),
    st.tuples(st.just("double_value"), st.floats(allow_nan=False)),
    st.tuples(st.just("str_value"), st.text(max_size=9)),
    st.tuples(st.just("bytes_value"), st.binary(max_size=140)), st.just(None))
EVENT = st.tuples(NUMBER, NUMBER, NUMBER, st.lists(st.tuples(st.integers(1, 300), VALUE), max_size=4))


def encoded(event) -> bytes:
    name, offset, duration, stats = event
    out = messages.XEvent(metadata_id=name, offset_ps=offset, duration_ps=duration)
    for stat_id, value in stats:
        stat = out.stats.add(metadata_id=stat_id)
        if value is not None:
            setattr(stat, *value)
    return out.SerializeToString()


@pytest.fixture
def in_pairs(monkeypatch):
    """Two events make a group."""
    monkeypatch.setattr(uniform_messages, "_FEW_EVENTS", 2)


def found_in(raw: list[bytes], junk: bytes = b"\x08\x22\xff"):
    """By the event's place: its numbers by tag, and its stats as (id, tag, value), as the groups have them; and the
    places of all others."""
    block = Block(junk + b"".join(raw) + junk, 0, sum(map(len, raw)) + 2 * len(junk))
    ends = np.cumsum([len(one) for one in raw]) + len(junk)
    groups, others = find_uniform(block, ends - [len(one) for one in raw], ends)
    out = {}
    for group in groups:
        numbers, stats = dict(group.numbers()), [(place, group.value(place)) for place in group.layout.stats]
        for i, row in enumerate(group.rows.tolist()):
            assert row not in out
            out[row] = ({tag: int(values[i]) for tag, values in numbers.items()},
                        [(place.stat_id, place.tag, int(values[i]), int(group.begin[i]) + place.begin)
                         for place, values in stats])
    return out, others.tolist(), block


def parsed(raw: bytes):
    event = messages.XEvent.FromString(raw)
    numbers = {EVENT_METADATA_ID: event.metadata_id, EVENT_OFFSET_PS: event.offset_ps,
               EVENT_DURATION_PS: event.duration_ps}
    return {tag: value for tag, value in numbers.items() if value}, event.stats


@given(st.lists(EVENT, min_size=1, max_size=5), st.lists(st.integers(0, 4), min_size=2, max_size=40),
       st.lists(st.binary(max_size=20), max_size=3))
def test_groups_have_what_the_parser_has(in_pairs, kinds, order, damaged):
    raw = [encoded(kinds[i % len(kinds)]) for i in order] + damaged
    found, others, block = found_in(raw)
    assert sorted([*found, *others]) == list(range(len(raw)))
    for row, (numbers, stats) in found.items():
        expected, expected_stats = parsed(raw[row])
        assert {tag: value for tag, value in numbers.items() if value} == expected
        assert len(stats) == len(expected_stats)
        for (stat_id, tag, value, begin), stat in zip(stats, expected_stats, strict=True):
            which = stat.WhichOneof("value")
            assert (stat_id, tag >> 3) == (stat.metadata_id, stat.DESCRIPTOR.fields_by_name[which].number)
            own = getattr(stat, which)
            if which in ("str_value", "bytes_value"):
                assert block.bytes[begin:begin + value].tobytes() == (own if isinstance(own, bytes) else own.encode())
            else:
                assert value == (np.float64(own).view(np.uint64) if which == "double_value" else own)


def kernel(i: int) -> bytes:
    return encoded((1 + i % 100, 1_000_000 + 1000 * i, 300_000 + i, [(3, ("uint64_value", 20_000 + i)),
                                                                      (300, ("ref_value", 200 + i % 50))]))


def test_events_that_differ_in_numbers_only_are_one_group(in_pairs):
    found, others, _ = found_in([kernel(i) for i in range(1000)])
    assert len(found) == 1000 and not others
    assert [found[i][1][0][2] for i in (0, 999)] == [20_000, 20_999]


@pytest.mark.parametrize("odd", [
    kernel(5) + b"\x28\x05",  # an aggregate's number of occurrences
    kernel(5) + b"\x70\x01",  # a field that nobody knows
    kernel(5) + b"\x80\x01\x01",  # one with a longer tag
    kernel(5) + b"\x22\x04\x18\x07\x08\x03",  # a stat whose value comes before its id
    kernel(5) + b"\x22\x06\x08\x03\x18\x07\x20\x08",  # one with two values
    kernel(5) + b"\x22\x02\x08\x03",  # one without a value
    kernel(5) + b"\x22\x00",
    kernel(5)[:-1],  # cut off
    kernel(5) + b"\x22\x09\x08\x03\x18\x07",  # longer than the event
    encoded((3, (1 << 64) - (1 << 62) >> 1, 5, [])),  # a number of nine bytes
    b"",
])
def test_what_only_a_walk_can_judge_is_left_to_it(in_pairs, odd):
    raw = [kernel(i) for i in range(50)] + [odd, odd, odd]
    found, others, _ = found_in(raw)
    assert sorted(found) == list(range(50)) and others == [50, 51, 52]


def test_few_events_are_left_to_the_walk():
    found, others, _ = found_in([kernel(i) for i in range(10)])
    assert not found and others == list(range(10))
