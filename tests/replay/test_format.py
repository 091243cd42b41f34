"""Samples to records and back, over anything that a sample can be."""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from msgspec.structs import force_setattr

from gputop.core.metrics import ADAPTER_METRICS, CGROUP_METRICS, GPU_METRICS, HOST_METRICS
from gputop.core.samples import (
    MAX_GPUS,
    AdapterSample,
    CgroupSample,
    GpuInfo,
    GpuProcess,
    GpuSample,
    HostProcess,
    HostSample,
    NodeSample,
    PodContainer,
    ProcessSample,
    Reading,
    XidEvent,
)
from gputop.replay.decode import Damaged, Decoder
from gputop.replay.format import (
    DICTIONARY,
    RECORD,
    SAMPLE,
    SAMPLE_HEAD,
    SEGMENT,
    SEGMENT_SAMPLES,
    Encoder,
    pack,
    unpack,
)
from tests.fakes import node_sample
from tests.records import replace

# A command line may hold anything, lone surrogates of undecodable bytes too.
texts = st.text(st.characters(codec=None), max_size=8)
sources = texts.map(lambda text: text or None)
floats = st.floats(allow_nan=False, allow_infinity=False)
recorded = st.one_of(st.builds(lambda v, u, s, c: Reading(v, u, s, None, c),
                               st.one_of(floats, st.integers(-2**53, 2**53)), texts, sources, st.booleans()),
                     st.builds(Reading.missing, texts, texts, sources))
counts = st.one_of(st.none(), st.integers(0, 2**70))
processes = st.builds(GpuProcess, st.integers(0, 2**22), st.sampled_from(["C", "G", "C+G"]), st.none(), recorded,
                      recorded)
infos = st.builds(GpuInfo, st.integers(0, 31), texts, texts, texts, counts, counts)
gpu_samples = st.builds(
    GpuSample, infos, st.dictionaries(st.sampled_from(list(GPU_METRICS)), recorded, max_size=6),
    st.lists(processes, max_size=3).map(tuple), st.one_of(st.none(), texts), st.lists(texts, max_size=2).map(tuple),
    st.one_of(st.none(), texts), texts, texts)
groups = st.one_of(st.none(), st.builds(
    CgroupSample, texts, st.dictionaries(st.sampled_from(list(CGROUP_METRICS)), recorded, max_size=3)))
host_processes = st.builds(HostProcess, st.integers(0, 2**22), st.one_of(st.none(), texts),
                           st.one_of(st.none(), texts), recorded, recorded)
adapters = st.builds(AdapterSample, texts, texts, texts, counts, st.dictionaries(
    st.sampled_from(list(ADAPTER_METRICS)), recorded, max_size=3))
host_samples = st.builds(HostSample, texts, st.dictionaries(st.sampled_from(list(HOST_METRICS)), recorded, max_size=4),
                         counts, cgroup=groups, top_processes=st.lists(host_processes, max_size=3).map(tuple),
                         top_reason=st.one_of(st.none(), texts), adapters=st.lists(adapters, max_size=2).map(tuple))
process_samples = st.builds(ProcessSample, st.integers(0, 2**22), st.one_of(st.none(), texts),
                            st.one_of(st.none(), texts), recorded, recorded, counts,
                            st.dictionaries(st.integers(0, 31), processes, max_size=2), st.one_of(st.none(), texts),
                            counts, st.one_of(st.none(), st.floats(0, 4e9)), cgroup=groups,
                            numa_nodes=st.lists(st.integers(0, 7), max_size=2).map(tuple),
                            kubernetes=st.one_of(st.none(), st.builds(PodContainer, *([texts] * 2),
                                                                      *([st.one_of(st.none(), texts)] * 4))))
node_samples = st.builds(NodeSample, st.floats(0, 4e9), st.lists(gpu_samples, max_size=3).map(tuple), host_samples,
                         st.lists(process_samples, max_size=3).map(tuple), st.one_of(st.none(), floats), texts,
                         st.booleans(), st.one_of(st.none(), floats))


def records(data: bytes) -> list[tuple[int, bytes]]:
    out = []
    while data:
        kind, length, crc = RECORD.unpack_from(data)
        payload = data[RECORD.size:RECORD.size + length]
        assert zlib.crc32(payload, zlib.crc32(data[:5])) == crc
        out.append((kind, payload))
        data = data[RECORD.size + length:]
    return out


def decode(data: bytes) -> list[NodeSample]:
    decoder, out = Decoder(), []
    for kind, payload in records(data):
        if kind == SEGMENT:
            decoder = Decoder()
        elif kind == DICTIONARY:
            decoder.learn(payload)
        else:
            decoder.advance(payload)
            out.append(decoder.sample())
    return out


@settings(max_examples=30, deadline=None)
@given(st.lists(node_samples, max_size=3))
def test_every_sample_comes_back_equal(samples: list[NodeSample]) -> None:
    encoder = Encoder()
    back = decode(b"".join(encoder.encode(s) for s in samples))
    assert back == samples
    assert repr(back) == repr(samples)  # -0.0 and 212 against 212.0, too


@settings(max_examples=60, deadline=None)
@given(arrays(np.float64, st.integers(0, 30)), arrays(np.float64, st.integers(0, 30)))
def test_numbers_come_back_bit_for_bit(numbers: np.ndarray, previous: np.ndarray) -> None:
    back = unpack(pack(numbers, previous), len(numbers), previous)
    assert back.tobytes() == numbers.tobytes()


def test_a_value_that_is_no_number_is_not_shown_as_one() -> None:
    """It ended the monitor that replayed it. Older recordings, and damaged ones, hold such numbers."""
    def recorded_as(value: float, unit: str) -> Reading:
        reading = Reading(1.0, unit)
        force_setattr(reading, "value", value)
        return reading

    def odd(gpu: GpuSample, tick: int) -> GpuSample:
        process = replace(gpu.processes[0], sm_ratio=recorded_as(math.inf, "ratio"))
        return replace(gpu, processes=(process,), readings={
            **gpu.readings, "sm_active": recorded_as(math.nan, "ratio"), "power_w": recorded_as(math.inf, "W")})

    back = decode(Encoder().encode(node_sample(0, 1, change=odd)))[0].gpus[0]
    for reading in (back["sm_active"], back["power_w"], back.processes[0].sm_ratio):
        assert reading.value is None and "not a measurement" in (reading.reason or "")


@pytest.mark.parametrize("time_s", [math.nan, math.inf, -1.0, 1e12, 1e300])
@pytest.mark.parametrize("place", ["sample", "xid", "process"])
def test_a_time_that_no_calendar_has_is_damage(place: str, time_s: float) -> None:
    """It ended the text of a snapshot and the box of details, which show it in local time."""
    sample = node_sample(0, 1)
    changed = {
        "sample": replace(sample, time_s=time_s),
        "xid": replace(sample, gpus=(replace(sample.gpus[0], xids=(XidEvent(time_s, 79),)),)),
        "process": replace(sample, processes=(replace(sample.processes[0], started_s=time_s),))}[place]
    assert decode(Encoder().encode(sample))
    with pytest.raises(Damaged, match="not a number"):
        decode(Encoder().encode(changed))


def test_a_node_has_no_more_gpus_than_a_snapshot_takes() -> None:
    """Each has a history of some hundred kilobytes: 30 kB of a file held 4,000."""
    sample = node_sample(0, 1)
    many = tuple(replace(sample.gpus[0], info=GpuInfo(i, f"GPU-{i}", "H100")) for i in range(MAX_GPUS + 1))
    assert len(decode(Encoder().encode(replace(sample, gpus=many[:-1])))[0].gpus) == MAX_GPUS
    with pytest.raises(Damaged, match="1024"):
        decode(Encoder().encode(replace(sample, gpus=many)))


def test_what_stays_the_same_costs_next_to_nothing() -> None:
    encoder = Encoder()
    first, second = len(encoder.encode(node_sample(0))), len(encoder.encode(node_sample(0)))
    assert second < 100 < first


def test_segments_stand_alone() -> None:
    encoder = Encoder()
    parts = [encoder.encode(node_sample(tick, 1)) for tick in range(SEGMENT_SAMPLES + 2)]
    assert [i for i, part in enumerate(parts) if records(part)[0][0] == SEGMENT] == [0, SEGMENT_SAMPLES]
    assert decode(b"".join(parts[SEGMENT_SAMPLES:])) == [node_sample(SEGMENT_SAMPLES + i, 1) for i in range(2)]


def test_texts_that_never_repeat_begin_a_new_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gputop.replay.format.SEGMENT_DICTIONARY_BYTES", 20_000)
    encoder, segments = Encoder(), 0
    for tick in range(40):
        sample = node_sample(tick, 1)
        host = HostSample("x" * 1000 + str(tick), sample.host.readings)
        segments += records(encoder.encode(NodeSample(sample.time_s, sample.gpus, host)))[0][0] == SEGMENT
    assert segments == 3


def test_a_value_of_no_known_type_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="cannot record"):
        Encoder().encode(NodeSample(0.0, (), HostSample("h", {}), source=object()))  # type: ignore[arg-type]


# -- files that gputop did not write ------------------------------------------------------------


def words_of(sample: NodeSample) -> tuple[dict[str, Any], bytes]:
    parts = dict(records(Encoder().encode(sample)))
    return json.loads(zlib.decompress(parts[DICTIONARY])), parts[SAMPLE]


def play(words: object, payload: bytes) -> NodeSample:
    decoder = Decoder()
    decoder.learn(zlib.compress(json.dumps(words).encode()))
    decoder.advance(payload)
    return decoder.sample()


def test_fields_and_classes_of_a_later_version_are_passed_over() -> None:
    words, payload = words_of(node_sample(3, 2))
    for schema in words["shapes"]:
        if schema[0] == "HostSample":
            schema[1].append("weather")
            schema[2].append(["t", True, ["int", "9"]])
    assert play(words, payload) == node_sample(3, 2)


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
    (_itself, None), (_unknown_item, "unknown item"), (_reading_without_reason, r"\[1\]\[0\]: a reading has"),
    (_text_as_number, r"gpus\[0\].info.index: str where a whole number belongs"),
    (_no_name, "host: hostname is missing"),
])
def test_words_that_make_no_sample_are_damage(harm: Callable[[dict[str, Any]], None], message: str | None) -> None:
    words, payload = words_of(node_sample(0, 1))
    harm(words)
    with pytest.raises(Damaged, match=message):
        play(words, payload)


def test_nesting_without_end_is_damage() -> None:
    raw = json.dumps(words_of(node_sample(0, 1))[0]).replace('"f"', "[" * 100_000, 1)
    with pytest.raises(Damaged):
        Decoder().learn(zlib.compress(raw.encode()))


def test_hostile_sizes_are_bounded() -> None:
    _, payload = words_of(node_sample(0, 1))
    decoder = Decoder()
    with pytest.raises(Damaged):
        decoder.advance(SAMPLE_HEAD.pack(0.0, 2**32 - 1, 0) + b"\0" * 100)
    with pytest.raises(Damaged):
        decoder.advance(payload[:-3])
    with pytest.raises(Damaged):
        decoder.advance(SAMPLE_HEAD.pack(0.0, 4, 1) + zlib.compress(bytes(64 << 20), 1))
    with pytest.raises(Damaged):
        decoder.learn(zlib.compress(b" " * (64 << 20), 1))
    with pytest.raises(Damaged):
        decoder.advance(struct.pack("<d", 0.0))


def test_many_small_records_of_a_segment_do_not_fill_memory() -> None:
    """Six of these, of 18 kB each, took 700 MB, and a recording may hold any number."""
    many = zlib.compress(json.dumps({"texts": ["aaaaa"] * 1_500_000, "shapes": []}).encode(), 9)
    decoder = Decoder()
    decoder.learn(many)
    assert len(many) < 50_000
    with pytest.raises(Damaged, match="too many texts"):
        for _ in range(3):
            decoder.learn(many)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_change_of_the_words_gives_a_sample_or_damage(data: st.DataObject) -> None:
    words, payload = words_of(node_sample(0, 1))
    raw = bytearray(json.dumps(words).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.sampled_from(b'"[]{},:0123sfipmtr\\ntrue'))
    decoder = Decoder()
    try:
        decoder.learn(zlib.compress(bytes(raw)))
        decoder.advance(payload)
        sample = decoder.sample()
    except Damaged:
        return
    assert isinstance(sample, NodeSample) and all(isinstance(gpu, GpuSample) for gpu in sample.gpus)
