"""Samples to records and back, over anything that a sample can be."""

from __future__ import annotations

import math
import struct
import zlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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
from gputop.replay.format import RECORD, SAMPLE, SEGMENT, SEGMENT_SAMPLES, TIME, DamagedRecord, Decoder, Encoder
from tests.fakes import node_sample
from tests.records import replace

texts = st.text(st.characters(codec="utf-8"), max_size=8)
sources = texts.map(lambda text: text or None)
floats = st.floats(allow_nan=False, allow_infinity=False)
recorded = st.one_of(st.builds(lambda v, u, s, c: Reading(v, u, s, None, c),
                               st.one_of(floats, st.integers(-2**53, 2**53)), texts, sources, st.booleans()),
                     st.builds(Reading.missing, texts, texts, sources))
counts = st.one_of(st.none(), st.integers(0, 2**62))
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
        elif decoder.take(kind, payload):
            out.append(decoder.sample())
    return out


@settings(max_examples=30)
@given(st.lists(node_samples, max_size=3))
def test_every_sample_comes_back_equal(samples: list[NodeSample]) -> None:
    encoder = Encoder()
    back = decode(b"".join(encoder.encode(s) for s in samples))
    assert back == samples
    assert repr(back) == repr(samples)  # -0.0 and 212 against 212.0, too


def test_a_lone_surrogate_is_recorded_as_what_it_is_shown_as() -> None:
    sample = node_sample(0, 1)
    strange = replace(sample, host=replace(sample.host, hostname="a\udce4b"))
    (back,) = decode(Encoder().encode(strange))
    assert back == replace(sample, host=replace(sample.host, hostname="a\ufffdb"))


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
    with pytest.raises(DamagedRecord):
        decode(Encoder().encode(changed))


def test_a_node_has_no_more_gpus_than_a_snapshot_takes() -> None:
    """Each has a history of some hundred kilobytes: 30 kB of a file held 4,000."""
    sample = node_sample(0, 1)
    many = tuple(replace(sample.gpus[0], info=GpuInfo(i, f"GPU-{i}", "H100")) for i in range(MAX_GPUS + 1))
    assert len(decode(Encoder().encode(replace(sample, gpus=many[:-1])))[0].gpus) == MAX_GPUS
    with pytest.raises(DamagedRecord, match="1024"):
        decode(Encoder().encode(replace(sample, gpus=many)))


def test_what_stays_the_same_costs_next_to_nothing() -> None:
    encoder = Encoder()
    first, second = len(encoder.encode(node_sample(0))), len(encoder.encode(node_sample(0)))
    assert second < 0.2 * first


def test_segments_stand_alone() -> None:
    encoder = Encoder()
    parts = [encoder.encode(node_sample(tick, 1)) for tick in range(SEGMENT_SAMPLES + 2)]
    assert [i for i, part in enumerate(parts) if records(part)[0][0] == SEGMENT] == [0, SEGMENT_SAMPLES]
    assert decode(b"".join(parts[SEGMENT_SAMPLES:])) == [node_sample(SEGMENT_SAMPLES + i, 1) for i in range(2)]


# -- files that gputop did not write ------------------------------------------------------------


def taken(raw: bytes) -> NodeSample:
    """The sample of a record that holds this."""
    payload, decoder = TIME.pack(0.0), Decoder()
    for block in (raw[i:i + 16384] for i in range(0, len(raw), 16384)):
        payload += struct.pack("<I", len(zlib.compress(block))) + zlib.compress(block)
    decoder.take(SAMPLE, payload)
    return decoder.sample()


def words_of(sample: NodeSample) -> dict[str, Any]:
    words: dict[str, Any] = msgspec.to_builtins(sample)
    return words


def test_fields_of_a_later_version_are_passed_over() -> None:
    words = words_of(node_sample(3, 2))
    words["host"]["weather"] = [True, {"a": None}]
    assert taken(msgspec.msgpack.encode(words)) == node_sample(3, 2)
    assert not Decoder().take(9, b"of a later version")


@pytest.mark.parametrize(("place", "value"), [
    (("host", "hostname"), 1), (("gpus",), "many"), (("gpus", 0, "info", "index"), "0"), (("host",), None),
    (("gpus", 0, "readings", "power_w"), {"value": None, "unit": "W"}), (("processes", 0, "gpus"), {"a": 1}),
    (("gpus", 0, "readings"), [[]]), (("time_s",), "now")])
def test_words_that_make_no_sample_are_damage(place: tuple[Any, ...], value: object) -> None:
    words = words_of(node_sample(0, 1))
    inner: Any = words
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with pytest.raises(DamagedRecord):
        taken(msgspec.msgpack.encode(words))


def test_hostile_sizes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for raw in (bytes(64 << 20), b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b""):
        with pytest.raises(DamagedRecord):
            taken(raw)
    monkeypatch.setattr("gputop.replay.format._MAX_SEGMENT_BYTES", 20_000)
    encoder, decoder = Encoder(), Decoder()
    with pytest.raises(DamagedRecord, match="too large"):
        for tick in range(99):
            for kind, payload in records(encoder.encode(node_sample(tick, 1))):
                decoder.take(kind, payload)


@given(st.data())
def test_any_change_of_the_words_gives_a_sample_or_damage(data: st.DataObject) -> None:
    raw = bytearray(msgspec.msgpack.encode(node_sample(0, 1)))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        sample = taken(bytes(raw))
    except DamagedRecord:
        return
    assert isinstance(sample, NodeSample) and all(isinstance(gpu, GpuSample) for gpu in sample.gpus)
