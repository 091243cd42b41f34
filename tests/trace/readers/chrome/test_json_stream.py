from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputop.trace.readers.chrome import json_stream
from gputop.trace.readers.chrome.json_stream import MAX_VALUE, decoder, read_list

VALUE = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)), max_leaves=8)


def pieces(raw: bytes, size: int) -> list[bytes]:
    return [raw[i:i + size] for i in range(0, len(raw), size)]


def read(raw: bytes, size: int = 1 << 20) -> tuple[list[Any], dict[str, Any], bool, bool]:
    taken: list[Any] = []
    kept, found, damaged = read_list(pieces(raw, size), "traceEvents", {"a", "rank"}, taken.extend, decoder(list[Any]),
                                     lambda value: value)
    return taken, kept, found, damaged


@pytest.fixture
def little_text(monkeypatch):
    monkeypatch.setattr(json_stream, "_TEXT", 64)


@given(events=st.lists(VALUE, max_size=12), others=st.dictionaries(st.sampled_from(("a", "b", "c", "rank")), VALUE),
       after=st.booleans(), size=st.integers(1, 200), indent=st.sampled_from((None, 0, 3)), ascii_=st.booleans(),
       text=st.sampled_from((1, 64, 1 << 18)))
def test_the_same_as_parsing_the_whole(events, others, after, size, indent, ascii_, text):
    document = {**others, "traceEvents": events} if after else {"traceEvents": events, **others}
    raw = json.dumps(document, indent=indent, ensure_ascii=ascii_).encode("utf-8", "surrogatepass")
    json_stream_text, json_stream._TEXT = json_stream._TEXT, text
    try:
        taken, kept, found, damaged = read(raw, size)
        listed = read(json.dumps(events, indent=indent).encode(), size)
    finally:
        json_stream._TEXT = json_stream_text
    assert (taken, found, damaged) == (json.loads(raw.decode("utf-8", "replace"))["traceEvents"], True, False)
    assert kept == {k: v for k, v in json.loads(raw.decode("utf-8", "replace")).items() if k in ("a", "rank")}
    assert listed == (events, {}, True, False)


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_a_cut_gives_what_came_before_it(little_text, size):
    events = [{"name": "a\\\"b", "ts": 1.5}, 12, -3.25e2, None, [{"x": [1, {}]}], "ä", 34]
    raw = json.dumps({"rank": 3, "traceEvents": events, "a": 17}).encode()
    for cut in range(len(raw)):
        taken, kept, _, damaged = read(raw[:cut], size)
        assert damaged
        assert taken == events[: len(taken)]
        assert kept in ({}, {"rank": 3}, {"rank": 3, "a": 17}, {"rank": 3, "a": 1})
    assert read(raw, size) == (events, {"rank": 3, "a": 17}, True, False)


@pytest.mark.parametrize(("raw", "taken", "damaged"), [
    (b"", [], True), (b"  ", [], True), (b"5", [], True), (b"{}", [], False), (b'{"traceEvents": 5}', [], False),
    (b"[]", [], False), (b"[1,,2,]", [1, 2], False), (b"[1] x", [1], True), (b"[1]   ", [1], False),
    (b"\xef\xbb\xbf[1]", [1], False), (b'["\xff"]', ["\ufffd"], False), (b"[1 nope", [1], True),
    (b'{"traceEvents": [1], "traceEvents": [2]}', [1, 2], False), (b'{"traceEvents": [1] "a": 2}', [1], False),
    (b'{"a" 5}', [], True), (b"{5: 5}", [], True), (b'{"a": }', [], True), (b'{"traceEvents": [1}', [1], True),
])
def test_documents(raw, taken, damaged):
    found = read(raw)
    assert (found[0], found[3]) == (taken, damaged)
    assert found[2] == (b"[" in raw)


def test_too_deep_and_too_long_is_damage():
    assert read(b"[1, " + b"[" * 200_000)[0::3] == ([1], True)
    assert read(b'[1, "' + b"a" * (3 * MAX_VALUE) + b'", 2]', 1 << 16)[0::3] == ([1], True)
    long = "a" * (MAX_VALUE // 2)
    assert read(json.dumps([1, long, 2]).encode(), 1 << 16)[0::3] == ([1, long, 2], False)


def test_all_pieces_are_asked_for():
    left = iter([b"[1", b"]", b" ", b" "])
    assert read_list(left, "traceEvents", (), [].extend, decoder(list[Any]), lambda value: value) == ({}, True, False)
    assert next(left, None) is None


@pytest.mark.parametrize("word", ["nan", "-nan", "NAN", "inf", "-inf", "Inf", "+inf", "nan(ind)", "-nan(ind)", "-NaN"])
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_what_is_no_number_in_c_loses_one_value(word, size, little_text):
    events = [{"name": "a, nan, b", "dur": i, "args": {"x": [1, 2]}} for i in range(20)]
    raw = json.dumps({"traceEvents": events, "rank": 3})
    raw = raw.replace('"dur": 7', f'"dur": {word}').replace('[1, 2]', f'[{word}, 2]', 1)
    taken, kept, found, damaged = read(raw.encode(), size)
    assert (found, damaged, kept, len(taken)) == (True, False, {"rank": 3}, 20)
    assert taken[7]["dur"] is None and taken[0]["args"]["x"] == [None, 2]
    assert [event["name"] for event in taken] == ["a, nan, b"] * 20
    assert [event["dur"] for i, event in enumerate(taken) if i != 7] == [*range(7), *range(8, 20)]


@pytest.mark.parametrize("word", ["nanny", "none", "in", "infinite", "-", "nan(", '"nan'])
def test_other_words_are_damage(word):
    assert read(f'[1, {word}, 2]'.encode())[3]
