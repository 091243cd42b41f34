"""Recordings of gputop 0.1.0 with harm done to their words."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gputop.core.samples import GpuSample, NodeSample
from gputop.replay.format import HEADER, RECORD, SAMPLE, DamagedRecord
from gputop.replay.format_of_0_1_0 import _SAMPLE_HEAD, DICTIONARY, OldDecoder
from gputop.replay.reader import Recording

FILE = Path(__file__).parents[1] / "data" / "v0_1_0" / "demo.gputop"


def written() -> tuple[dict[str, Any], bytes]:
    """The first dictionary of a file of that version, and its first sample."""
    data, found = FILE.read_bytes()[HEADER.size:], dict[int, bytes]()
    while not {DICTIONARY, SAMPLE} <= found.keys():
        kind, length, _ = RECORD.unpack_from(data)
        found[kind], data = data[RECORD.size:RECORD.size + length], data[RECORD.size + length:]
    return json.loads(zlib.decompress(found[DICTIONARY])), found[SAMPLE]


def written_sample() -> NodeSample:
    with Recording(FILE) as recording:
        return recording.sample(0)


def play(words: object, payload: bytes) -> NodeSample:
    decoder = OldDecoder()
    decoder.take(DICTIONARY, zlib.compress(json.dumps(words).encode()))
    decoder.take(SAMPLE, payload)
    return decoder.sample()


def test_fields_and_classes_of_a_later_version_are_passed_over() -> None:
    words, payload = written()
    for schema in words["shapes"]:
        if schema[0] == "HostSample":
            schema[1].append("weather")
            schema[2].append(["t", True, ["int", "9"]])
    assert play(words, payload) == written_sample()


def _no_texts(words: dict[str, Any]) -> None:
    words["texts"] = []


def _number_as_text(words: dict[str, Any]) -> None:
    words["texts"] = [1] * len(words["texts"])


def _other_type(words: dict[str, Any]) -> None:
    next(s for s in words["shapes"] if s[0] == "NodeSample")[2][1] = "s"  # gpus: a text


def _itself(words: dict[str, Any]) -> None:
    words["shapes"] = [["NodeSample", ["time_s", "more"], ["f", ["p", "NodeSample"]]]]


def _unknown_item(words: dict[str, Any]) -> None:
    words["shapes"][-1][1].append("later")
    words["shapes"][-1][2].append(["?", 1])


def _reading_without_reason(words: dict[str, Any]) -> None:
    readings = next(s for s in words["shapes"] if s[0] == "readings")
    readings[1][0][1] = None


def _text_as_number(words: dict[str, Any]) -> None:
    next(s for s in words["shapes"] if s[0] == "GpuInfo")[2][0] = "s"


def _no_name(words: dict[str, Any]) -> None:
    schema = next(s for s in words["shapes"] if s[0] == "HostSample")
    schema[1][0] = "name_of_later"


@pytest.mark.parametrize(("harm", "message"), [
    (_no_texts, "out of range"), (_number_as_text, r"texts\[0\]: int where a text belongs"), (_other_type, None),
    (_itself, None), (_unknown_item, "unknown item"), (_reading_without_reason, None),
    (_text_as_number, r"gpus\[0\].info.index: str where a whole number belongs"),
    (_no_name, "host: hostname is missing"),
])
def test_words_that_make_no_sample_are_damage(harm: Callable[[dict[str, Any]], None], message: str | None) -> None:
    words, payload = written()
    harm(words)
    with pytest.raises(DamagedRecord, match=message):
        play(words, payload)


def test_nesting_without_end_is_damage() -> None:
    raw = json.dumps(written()[0]).replace('"f"', "[" * 100_000, 1)
    with pytest.raises(DamagedRecord):
        OldDecoder().take(DICTIONARY, zlib.compress(raw.encode()))


def test_hostile_sizes_are_bounded() -> None:
    _, payload = written()
    decoder = OldDecoder()
    with pytest.raises(DamagedRecord):
        decoder.take(SAMPLE, _SAMPLE_HEAD.pack(0.0, 2**32 - 1, 0) + b"\0" * 100)
    with pytest.raises(DamagedRecord):
        decoder.take(SAMPLE, payload[:-3])
    with pytest.raises(DamagedRecord):
        decoder.take(SAMPLE, _SAMPLE_HEAD.pack(0.0, 4, 1) + zlib.compress(bytes(64 << 20), 1))
    with pytest.raises(DamagedRecord):
        decoder.take(DICTIONARY, zlib.compress(b" " * (64 << 20), 1))
    with pytest.raises(DamagedRecord):
        decoder.take(SAMPLE, struct.pack("<d", 0.0))


def test_many_small_records_of_a_segment_do_not_fill_memory() -> None:
    """Six of these, of 18 kB each, took 700 MB, and a recording may hold any number."""
    many = zlib.compress(json.dumps({"texts": ["aaaaa"] * 1_500_000, "shapes": []}).encode(), 9)
    decoder = OldDecoder()
    decoder.take(DICTIONARY, many)
    assert len(many) < 50_000
    with pytest.raises(DamagedRecord, match="too many strings"):
        for _ in range(3):
            decoder.take(DICTIONARY, many)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_change_of_the_words_gives_a_sample_or_damage(data: st.DataObject) -> None:
    words, payload = written()
    raw = bytearray(json.dumps(words).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.sampled_from(b'"[]{},:0123sfipmtr\\ntrue'))
    decoder = OldDecoder()
    try:
        decoder.take(DICTIONARY, zlib.compress(bytes(raw)))
        decoder.take(SAMPLE, payload)
        sample = decoder.sample()
    except DamagedRecord:
        return
    assert isinstance(sample, NodeSample) and all(isinstance(gpu, GpuSample) for gpu in sample.gpus)
