"""Recordings of gputop 0.1.0 with harm done to their words."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
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


@pytest.mark.parametrize(("place", "value", "message"), [
    (("texts",), [], "out of range"),
    (("texts",), [1] * 1000, r"texts\[0\]: int where a text belongs"),
    (("shapes", "NodeSample", 2, 1), "s", None),  # gpus: a text
    (("shapes",), [["NodeSample", ["time_s", "more"], ["f", ["p", "NodeSample"]]]], None),  # of itself
    (("shapes", -1, 2, 0), ["?", 1], "unknown item"),
    (("shapes", "readings", 1, 0, 1), None, None),  # a reading without a reason
    (("shapes", "GpuInfo", 0), "HostSample", "invalid structure"),
    (("shapes", "GpuInfo", 2, 0), "s", r"gpus\[0\].info.index: str where a whole number belongs"),
    (("shapes", "HostSample", 1, 0), "name_of_later", "host: hostname is missing"),
])
def test_words_that_make_no_sample_are_damage(place: tuple[Any, ...], value: object, message: str | None) -> None:
    words, payload = written()
    inner: Any = words
    for key in place[:-1]:
        by_name = isinstance(inner, list) and isinstance(key, str)
        inner = next(shape for shape in inner if shape[0] == key) if by_name else inner[key]
    inner[place[-1]] = value
    with pytest.raises(DamagedRecord, match=message):
        play(words, payload)


def test_nesting_without_end_is_damage() -> None:
    raw = json.dumps(written()[0]).replace('"f"', "[" * 100_000, 1)
    with pytest.raises(DamagedRecord):
        OldDecoder().take(DICTIONARY, zlib.compress(raw.encode()))


def test_hostile_sizes_are_bounded() -> None:
    _, payload = written()
    decoder = OldDecoder()
    for kind, harmful in (
        (SAMPLE, _SAMPLE_HEAD.pack(0.0, 2**32 - 1, 0) + b"\0" * 100), (SAMPLE, payload[:-3]),
        (SAMPLE, _SAMPLE_HEAD.pack(0.0, 4, 1) + zlib.compress(bytes(64 << 20), 1)),
        (DICTIONARY, zlib.compress(b" " * (64 << 20), 1)), (SAMPLE, struct.pack("<d", 0.0))):
        with pytest.raises(DamagedRecord):
            decoder.take(kind, harmful)


def test_many_small_records_of_a_segment_do_not_fill_memory() -> None:
    """Six of these, of 18 kB each, took 700 MB, and a recording may hold any number."""
    many = zlib.compress(json.dumps({"texts": ["aaaaa"] * 1_500_000, "shapes": []}).encode(), 9)
    decoder = OldDecoder()
    decoder.take(DICTIONARY, many)
    assert len(many) < 50_000
    with pytest.raises(DamagedRecord, match="too many strings"):
        for _ in range(3):
            decoder.take(DICTIONARY, many)


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
