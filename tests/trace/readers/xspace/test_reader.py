from __future__ import annotations

import gc
import gzip
import random
import weakref
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputop.core.errors import GputopError, NoDataError
from gputop.diagnosis.diagnose import analyze_to_facts
from gputop.trace.model import Kind, LaunchShape, MemoryKind
from gputop.trace.readers.xspace import uniform_messages
from gputop.trace.readers.xspace.reader import read_xspaces
from gputop.trace.readers.xspace.recordings import join_recordings, unrecorded_between
from tests import xspace_messages as messages
from tests.trace.readers.xspace.reference import (
    ALLOCATOR,
    INTEGERS,
    OTHER,
    START,
    STRINGS,
    Builder,
    check_equal,
    expected,
)
from tests.trace.readers.xspace.sample_space import sample
from tests.trace.readers.xspace.wire_encoding import encoded
from tests.trace.shares import SHARED

DATA = Path(__file__).resolve().parents[3] / "data"
CAPTURES = sorted(DATA.glob("*.xplane.pb.gz"))
AMD = sorted((SHARED / "xplane_amd").glob("*.pb"))


@pytest.mark.parametrize("path", [*CAPTURES, *AMD], ids=lambda p: p.name)
def test_real_captures_agree_with_protobuf_event_by_event(path):
    data = path.read_bytes()
    trace = check_equal(gzip.decompress(data) if path.suffix == ".gz" else data)
    assert trace.event_count > 100
    assert not trace.simulated


# Random XSpaces, also in encodings that protobuf's own writer would not choose.

NAMES = ("MatMul", "MemcpyH2D", "ncclDevKernel_AllReduce", "ThreadpoolListener::Region", "MemoryAllocation",
         "MemoryDeallocation", "ä", "")
STAT_NAMES = (*INTEGERS, *STRINGS, *OTHER, *ALLOCATOR, "allocator_name", "fragmentation", "region_type", "reference",
              "unused", "x/y:Z")
INT64 = st.one_of(st.integers(0, 3), st.integers(0, 200), st.integers(-(2**63), 2**63 - 1))
TIME = st.one_of(st.integers(0, 10**14), st.just(0))
VALUE = st.one_of(
    st.tuples(st.just("int64_value"), INT64), st.tuples(st.just("uint64_value"), st.integers(0, 2**64 - 1)),
    st.tuples(st.just("ref_value"), st.integers(0, len(STAT_NAMES) + 1)),
    st.tuples(st.just("str_value"), st.sampled_from((
        "kind_src:pinned kind_dst:device size:4096 dest:0 async:1", "XlaModule:", "scope/op:Type", "", "(null)"))),
    st.tuples(st.just("double_value"), st.floats()), st.tuples(st.just("bytes_value"), st.binary(max_size=4)),
)
STAT = st.tuples(st.integers(0, len(STAT_NAMES) + 1), VALUE)
EVENT = st.tuples(st.integers(0, 9), TIME, st.integers(0, 10**12), st.lists(STAT, max_size=5, unique_by=lambda s: s[0]),
                  st.sampled_from((False, False, False, True)))
LINE = st.tuples(st.sampled_from(("python", "Stream #1(Kernel)", "tf_Compute/-3")), INT64, st.integers(0, 10**12),
                 st.lists(EVENT, max_size=12))
PLANE = st.tuples(st.sampled_from(("/device:GPU:0", "/device:GPU:1", "/host:CPU", "/host:metadata", "other")),
                  st.lists(LINE, max_size=3), st.integers(0, 9))


def build(planes: list[Any], start: int | None) -> bytes:
    builder = Builder(start=start)
    for name, lines, known in planes:
        plane = builder.space.planes.add(name=name, id=-1)
        for i, text in enumerate(STAT_NAMES, 1):
            plane.stat_metadata[i].id, plane.stat_metadata[i].name = i, text
        for i in range(known):  # ids above have no entry
            plane.event_metadata[i].id, plane.event_metadata[i].name = i, NAMES[i % len(NAMES)]
            if not plane.event_metadata[i].name:
                plane.event_metadata[i].display_name = "shown"
        for line_name, line_id, timestamp, events in lines:
            line = plane.lines.add(name=line_name, id=line_id, timestamp_ns=timestamp)
            for metadata, offset, duration, stats, aggregate in events:
                event = line.events.add(metadata_id=metadata, duration_ps=duration)
                if aggregate:
                    event.num_occurrences = 3
                else:
                    event.offset_ps = offset
                for stat, (which, value) in stats:
                    setattr(event.stats.add(metadata_id=stat), which, value)
    return builder.bytes()


# Field number → the same for the message in it; what is not listed is no message.
MAP_ENTRY: dict[int, Any] = {2: {}}  # protobuf's parser drops entries of maps that have unknown fields
NESTED: dict[int, Any] = {1: {3: {4: {4: {}}}, 4: MAP_ENTRY, 5: MAP_ENTRY, 6: {}}}


def scrambled(data: bytes, nested: dict[int, Any], seed: int) -> bytes:
    """The same message with its fields in another order and unknown fields among them; equal messages in it stay equal:
    a thread that is listed twice is known by its bytes."""
    rng = random.Random(seed ^ zlib.crc32(data))
    by_number: dict[int, list[bytes]] = {}
    pos = 0

    def varint() -> int:
        nonlocal pos
        value = shift = 0
        while True:
            byte = data[pos]
            pos += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while pos < len(data):
        begin = pos
        head = varint()
        if head & 7 == 2:
            size = varint()
            content = data[pos:pos + size]
            pos += size
            if head >> 3 in nested:
                content = scrambled(content, nested[head >> 3], seed)
            field = encoded(head >> 3, 2, content)
        else:
            pos += {1: 8, 5: 4}.get(head & 7, 0)
            if head & 7 == 0:
                varint()
            field = data[begin:pos]
        by_number.setdefault(head >> 3, []).append(field)
    for unknown in (encoded(15, 0, 2**64 - 1), encoded(16, 2, b"abc"), encoded(900, 1, 7), encoded(14, 5, 1)):
        if rng.random() < 0.3 and nested is not MAP_ENTRY:
            by_number.setdefault(-len(by_number) - 1, []).append(unknown)
    # Fields of one number keep their order, as they do in a repeated field.
    order = [number for number, fields in by_number.items() for _ in fields]
    rng.shuffle(order)
    return b"".join(by_number[number].pop(0) for number in order)


@given(st.lists(PLANE, min_size=1, max_size=4), st.sampled_from((None, START)), st.integers(0, 2**32),
       st.sampled_from((1, 64)))
def test_random_xspaces_agree_with_protobuf_event_by_event(planes, start, seed, together):
    data = build(planes, start)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uniform_messages, "_FEW_EVENTS", together)  # 1: by their layouts wherever that can be done
        check_equal(data)
        check_equal(scrambled(data, NESTED, seed))


def test_an_op_that_an_annotation_names_beside_one_of_xla_of_another_kind():
    """hlo_op as a number, which no profiler writes, is none; found by the test above."""
    stats = [(STAT_NAMES.index(stat) + 1, value) for stat, value in (
        ("annotation", ("ref_value", STAT_NAMES.index("x/y:Z") + 1)), ("hlo_op", ("int64_value", 0)))]
    trace = check_equal(build([("/device:GPU:0", [("python", 0, 0, [(0, 0, 0, stats, False)])], 1)], None))
    assert trace is not None and trace.names[trace.device.tf_op[0]] == "x/y:Z"


@given(st.lists(PLANE, min_size=1, max_size=3), st.data())
def test_damage_never_crashes_and_invents_nothing_when_cut(planes, data):
    whole = build(planes, START)
    cut = whole[: data.draw(st.integers(1, len(whole)))]
    rows = expected(whole)
    try:
        trace = read_xspaces([("x", "fallback", cut)])
    except GputopError:
        return
    names = {row[2] for row in rows[0]} | {row[1] for row in rows[1]}
    assert {trace.names[i] for i in (*trace.device.name.tolist(), *trace.host.name.tolist())} <= names
    # All that the file lists, twice or not: a line that is cut is no longer equal to the one that it repeats.
    assert trace.event_count <= sum(len(line.events) for plane in messages.XSpace.FromString(whole).planes
                                    for line in plane.lines)
    if trace.event_count < sum(sum(c.values()) for c in rows):
        # A cut right after a line or plane leaves a whole, shorter XSpace; every other cut is noted.
        whole_planes = messages.XSpace()
        try:
            whole_planes.ParseFromString(cut)
        except Exception:  # noqa: BLE001  protobuf's DecodeError has a different home in each version
            assert any(q.id == "truncated" for q in trace.quality)


@given(st.binary(max_size=400))
def test_any_bytes_give_a_trace_or_a_clear_error(data):
    try:
        read_xspaces([("x", "fallback", data)])
    except GputopError as error:
        assert error.message


@given(st.data())
def test_flipped_bytes_never_crash(data):
    raw = bytearray(sample().bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        trace = read_xspaces([("x", "fallback", bytes(raw))])
    except GputopError:
        return
    assert (trace.device.end_ns >= trace.device.start_ns).all()
    assert trace.window_ns[0] <= trace.window_ns[1]


def test_gpus_launches_copies_and_operations():
    trace = sample().read()
    d, names = trace.device, trace.names
    assert [(g.host, g.ordinal, g.compute_capability, g.memory_bytes) for g in trace.gpus] == [
        ("node", 0, (9, 0), 80 << 30), ("node", 1, None, None)]
    assert [names[i] for i in d.name] == ["gemm_bf16_tensorop", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "MemcpyH2D",
                                          "MemcpyD2H"]
    assert d.kind.tolist() == [Kind.COMPUTE, Kind.COLLECTIVE, Kind.H2D, Kind.D2H]
    assert d.start_ns.tolist() == [1500, 1700, 2000, 2020]
    assert d.launch_ns.tolist() == [1000, 1020, 1040, -1]
    assert d.launch_end_ns.tolist() == [1005, 1025, 1046, -1]
    assert [trace.lines[i].name if i >= 0 else None for i in d.launch_line] == ["tf_Compute/-5"] * 3 + [None]
    assert d.bytes.tolist() == [-1, -1, 4096, 77]
    assert d.src.tolist() == [0, 0, MemoryKind.PAGEABLE, 0]
    assert d.dst.tolist() == [0, 0, MemoryKind.DEVICE, 0]
    assert [names[i] if i >= 0 else None for i in d.tf_op] == ["layer/MatMul:MatMul", "jit_step/all-reduce.1", None,
                                                               "Mean/_9:_Send"]
    assert trace.origin_ns == START
    assert trace.profile_window_ns == (0, 10**9)
    assert trace.hosts == ["node"]
    assert trace.host.stats["step_num"][1].tolist() == [4]
    assert trace.quality == []


def test_kernels_without_an_op_in_cuda_graphs():
    assert not sample().read().cuda_graphs
    for graph, op, told in ((7, None, True), (0, None, False), (7, "layer/MatMul:MatMul", False)):
        b = sample()
        line = b.line("/device:GPU:0", "Stream #15(Kernel)", 3000)
        b.event("/device:GPU:0", line, "gemm", 0, 10, cuda_graph_id=graph, **({"tf_op": (op,)} if op else {}))
        assert b.read().cuda_graphs == told


def test_launch_shapes_of_kernels():
    b = Builder()
    line = b.line("/device:GPU:0", "Stream #1(Kernel)")
    details = "regs:32 static_shared:0 dynamic_shared:0 grid:64,1,1 block:256,1,1 occ_pct:37.5"
    b.event("/device:GPU:0", line, "k", 0, 10, kernel_details=(details,))
    b.event("/device:GPU:0", line, "k", 10, 10, kernel_details=details)
    b.event("/device:GPU:0", line, "k", 20, 10, kernel_details=(" grid:1,1,1 block:64,1,1 group_mem:0 occ_pct:0",))
    b.event("/device:GPU:0", line, "k", 30, 10)
    trace = b.read()
    assert trace.device.shape.tolist() == [trace.device.shape[0]] * 2 + [trace.device.shape[2], -1]
    assert trace.launch_shapes[trace.device.shape[0]] == LaunchShape((64, 1, 1), (256, 1, 1), 32, 0, 0.375)
    assert trace.launch_shapes[trace.device.shape[2]] == LaunchShape((1, 1, 1), (64, 1, 1), -1, 0, None)
    assert len(trace.launch_shapes) == 2 and trace.occupancy_is == "theoretical"


@pytest.mark.parametrize(("vendor", "occupancy", "sms"), [("Nvidia", 12 / 64, 132), ("AMD", None, None)])
def test_occupancy_is_reckoned_for_nvidias_gpus_only(vendor, occupancy, sms):
    b = Builder()
    plane = b.plane("/device:GPU:0")
    for name, value in (("compute_cap_major", 9), ("compute_cap_minor", 0), ("core_count", 132),
                        ("device_vendor", vendor)):
        b.stat(plane, plane.stats.add(), name, value)
    line = b.line("/device:GPU:0", "Stream #1(Kernel)")
    b.event("/device:GPU:0", line, "k", 0, 10, kernel_details=(
        "regs:168 static_shared:1024 dynamic_shared:229376 grid:264,1,1 block:384,1,1 occ_pct:0",))
    trace = b.read()
    assert [shape.occupancy for shape in trace.launch_shapes] == [occupancy] and trace.gpus[0].sms == sms


def test_launches_go_by_device_where_the_host_tells_it():
    b = Builder()
    for gpu in (0, 1):
        line = b.line(f"/device:GPU:{gpu}", "Stream #1(Kernel)")
        b.event(f"/device:GPU:{gpu}", line, "k", 1000 + gpu, 10, correlation_id=7)
        thread = b.line("/host:CPU", f"thread {gpu}")
        b.event("/host:CPU", thread, "cuLaunchKernel", 100 * (gpu + 1), 5, correlation_id=7, device_id=gpu)
    trace = b.read()
    assert trace.device.launch_ns.tolist() == [0, 100]


def test_another_numbering_on_the_hosts_side_is_ignored():
    b = Builder()
    line = b.line("/device:GPU:0", "Stream #1(Kernel)")
    b.event("/device:GPU:0", line, "__amd_rocclr_copyBuffer.kd", 1000, 10, correlation_id=7)
    b.event("/host:CPU", b.line("/host:CPU", "t"), "hipMemcpyDtoDAsync", 100, 5, correlation_id=7, device_id=47645,
            memcpy_details="kind:Unknown size:512 dest:0 async:1")
    trace = b.read()
    assert trace.device.launch_ns.tolist() == [0]
    assert trace.device.kind.tolist() == [Kind.D2D]
    assert trace.device.bytes.tolist() == [512]


def test_derived_lines_and_noise_are_left_out():
    b = sample()
    for name in ("TensorFlow Ops", "TensorFlow Name Scope", "Steps"):
        b.event("/device:GPU:0", b.line("/device:GPU:0", name), "0", 0, 9000)
    unknown = b.line("/device:GPU:0", "Ops of tomorrow")
    unknown.id = 0xDEADBEEF + 7  # as TensorFlow numbers derived lines
    b.event("/device:GPU:0", unknown, "MatMul", 0, 9000)
    noise = b.line("/host:CPU", "pool")
    for i in range(50):
        b.event("/host:CPU", noise, "ThreadpoolListener::StartRegion", i, 1)
    trace = b.read()
    assert len(trace.device) == len(trace.host) == 4 and not trace.quality
    assert "Steps" not in {line.name for line in trace.lines}
    assert [trace.names[i] for i in trace.step_events.name] == ["0"]
    assert (trace.step_events.end_ns - trace.step_events.start_ns).tolist() == [9000]
    unknown.id = 7
    trace = b.read()
    assert len(trace.device) == 4
    assert [note.id for note in trace.quality] == ["not_streams"] and "Ops of tomorrow" in trace.quality[0].message


def test_a_plane_that_is_listed_twice_counts_once():
    once = sample().read()
    b = sample()
    copy = b.space.planes.add()
    copy.CopyFrom(b.plane("/device:GPU:0"))
    trace = b.read()
    assert len(trace.device) == len(once.device) and trace.device.end_ns.tolist() == once.device.end_ns.tolist()
    assert [note.id for note in trace.quality] == ["duplicate_events"]
    assert trace.quality[0].message.startswith("4 events of GPU 0 ")


def test_a_line_that_is_listed_twice_counts_once():
    b = sample()
    streams = [line for line in b.plane("/device:GPU:0").lines if line.events]
    copy = b.plane("/device:GPU:0").lines.add()
    copy.CopyFrom(streams[0])
    copy.name = streams[0].name.replace("(", "(Memset,")
    trace = b.read()
    assert len(trace.device) == 4 and [note.id for note in trace.quality] == ["duplicate_events"]


@pytest.mark.parametrize("what", ["line", "plane"])
def test_threads_of_the_host_that_are_listed_twice_count_once(what):
    def space() -> Builder:
        b = Builder()
        lines = [b.line("/host:CPU", name) for name in ("python", "tf_Compute/1", "tf_Compute/1")]
        for i, line in enumerate(lines):
            line.id = 100 + i
        for i in range(5):
            b.event("/host:CPU", lines[0], "train", 20 * i, 10, step_num=i)
            b.event("/host:CPU", lines[1], "cuLaunchKernel", 20 * i, 5, correlation_id=i + 1, device_id=0)
            b.event("/host:CPU", lines[2], "x", 20 * i, 9)  # another thread of the same name
        stream = b.line("/device:GPU:0", "Stream #13(Kernel)", 2000)
        for i in range(5):
            b.event("/device:GPU:0", stream, "gemm", 20 * i, 10, correlation_id=i + 1)
        return b

    once, b = space().read(), space()
    plane = b.plane("/host:CPU")
    if what == "plane":
        b.space.planes.add().CopyFrom(plane)
    else:
        plane.lines.add().CopyFrom(plane.lines[1])
    trace = b.read()
    for column in ("line", "name", "start_ns", "end_ns"):
        assert getattr(trace.host, column).tolist() == getattr(once.host, column).tolist()
    assert trace.device.launch_line.tolist() == once.device.launch_line.tolist()
    assert once.quality == [] and [note.id for note in trace.quality] == ["duplicate_events"]


def test_kernels_of_one_graph_launch_on_two_streams_are_two():
    b = Builder()
    for stream in (13, 14):
        b.event("/device:GPU:0", b.line("/device:GPU:0", f"Stream #{stream}(Kernel)"), "fusion", 0, 100,
                correlation_id=7)
    trace = b.read()
    assert len(trace.device) == 2 and not trace.quality


def test_allocator_events():
    b = Builder()
    line = b.line("/host:CPU", "python")
    b.event("/host:CPU", line, "MemoryAllocation", 5, 0, allocator_name=("GPU_0_bfc",), bytes_allocated=100,
            bytes_available=900, peak_bytes_in_use=400, tf_op="a/b:C")
    trace = b.read()
    a = trace.allocator
    assert [trace.names[i] for i in (*a.allocator, *a.tf_op)] == ["GPU_0_bfc", "a/b:C"]
    assert (a.in_use_bytes[0], a.available_bytes[0], a.peak_bytes[0]) == (100, 900, 400)
    assert len(trace.host) == 0


def test_integers_in_text_count_as_integers():
    b = Builder()
    b.event("/host:CPU", b.line("/host:CPU", "python"), "train", 5, 1, step_num="12", is_func=("1",), _r="yes")
    stats = b.read().host.stats
    assert stats["step_num"][1].tolist() == [12]
    assert stats["is_func"][1].tolist() == [1]
    assert "_r" not in stats


def test_several_hosts_share_one_clock():
    files = []
    for i in range(2):
        b = Builder(f"node{i}", START + 500 * i)
        b.event("/device:GPU:0", b.line("/device:GPU:0", "Stream #1(Kernel)", 10), "k", 0, 5, correlation_id=1)
        b.event("/host:CPU", b.line("/host:CPU", "t"), "cuLaunchKernel", 2 + i, 1, correlation_id=1)
        files.append((f"node{i}.xplane.pb", "", b.bytes()))
    trace = read_xspaces(files)
    assert trace.hosts == ["node0", "node1"]
    assert [g.host for g in trace.gpus] == ["node0", "node1"]
    assert trace.origin_ns == START + 2
    assert trace.device.start_ns.tolist() == [8, 508]
    assert trace.device.launch_ns.tolist() == [0, 501]


class Content(bytearray):
    """The bytes of a file, of which a test can tell whether anything still holds them."""


def test_the_bytes_of_one_file_are_given_back_before_the_next_is_read():
    b = Builder("node", START)
    b.event("/device:GPU:0", b.line("/device:GPU:0", "Stream #1(Kernel)", 10), "k", 0, 5, correlation_id=1)
    held: list[weakref.ref[Content]] = []

    def reader(data: bytes) -> Callable[[], Content]:
        def read() -> Content:
            gc.collect()
            assert [content() for content in held] == [None] * len(held)
            content = Content(data)
            held.append(weakref.ref(content))
            return content

        return read

    trace = read_xspaces([("a", "", reader(b.bytes())), ("b", "", reader(b"no trace")), ("c", "", reader(b.bytes()))])
    assert len(trace.hosts) == 2 and len(held) == 3


def recording(start: int, steps: int, *, markers: bool = True, first_id: int = 1) -> bytes:
    """A recording of a second with steps of 100 ms, each of one kernel; correlation ids count from ``first_id``."""
    b = Builder("node", start)
    if first_id > 1:  # another order of names, and so other ids for them
        b.plane("/host:CPU").event_metadata[1].id, b.plane("/host:CPU").event_metadata[1].name = 1, "other"
    stream, python = b.line("/device:GPU:0", "Stream #1(Kernel)"), b.line("/host:CPU", "python")
    stream.id, python.id = 7, 8
    for i in range(steps):
        begin = 10_000_000 + i * 100_000_000
        if markers:
            b.event("/host:CPU", python, "train", begin, 90_000_000, step_num=i, _r=1)
        b.event("/host:CPU", python, "cuLaunchKernel", begin + 1000, 1000, correlation_id=i + 1)
        b.event("/device:GPU:0", stream, "gemm", begin + 5000, 50_000_000, correlation_id=i + 1)
    return b.bytes()


class TestJoinedRecordings:
    """What a server recorded all the time, handed over in two parts: the newest comes first in the file."""

    def test_are_one_trace_on_one_clock(self):
        older, newer = recording(START, 9), recording(START + 1_300_000_000, 8, first_id=2)
        trace = read_xspaces([("x.xplane.pb", "", join_recordings([newer, older]))])
        assert len(trace.device) == 17 and len(trace.gpus) == 1 and len(trace.lines) == 2
        assert trace.origin_ns == START + 10_000_000 and trace.profile_window_ns == (-10_000_000, 2_290_000_000)
        assert trace.unrecorded_ns == ((990_000_000, 1_290_000_000),)
        assert (trace.device.launch_ns == trace.device.start_ns - 4000).all(), "launches are looked for in their part"
        assert [q.id for q in trace.quality] == ["unrecorded"] and "0.30 s" in trace.quality[0].message

    def test_no_step_reaches_into_what_is_missing(self):
        older, newer = recording(START, 9), recording(START + 1_300_000_000, 8)
        analysis = analyze_to_facts(read_xspaces([("x.xplane.pb", "", join_recordings([newer, older]))])).analysis
        assert analysis.steps is not None and analysis.steps.count == 15
        assert analysis.steps.durations_s == pytest.approx([0.1] * 15)
        assert analysis.trace.unrecorded_s == pytest.approx(0.3) and analysis.trace.start_s == (START + 10**7) / 1e9

    def test_without_steps_the_longest_is_analyzed(self):
        older, newer = recording(START, 2, markers=False), recording(START + 3_000_000_000, 1, markers=False)
        analysis = analyze_to_facts(read_xspaces([("x.xplane.pb", "", join_recordings([newer, older]))])).analysis
        assert analysis.steps is None and "one_recording" in [note.id for note in analysis.trace.quality]
        assert analysis.gpus[0].kernels == 2 and analysis.trace.window_s == pytest.approx(0.150005, abs=1e-5)

    def test_one_stays_as_it_is(self):
        assert join_recordings([recording(START, 2)]) == recording(START, 2)

    def test_the_time_between_is_that_of_no_recording(self):
        assert unrecorded_between([(50, 60), (0, 10), (12, 50), (5, 11)]) == [(11, 12)]
        assert unrecorded_between([(0, 10)]) == unrecorded_between([]) == []


def test_nothing_to_see():
    b = Builder()
    b.plane("/device:GPU:0")
    b.space.errors.append("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")
    with pytest.raises(NoDataError) as caught:
        b.read()
    assert caught.value.exit_code == 3
    assert "NVreg_RestrictProfilingToAdminUsers=0" in caught.value.fix


def test_a_cut_file_keeps_what_was_read():
    b = sample()
    data = b.bytes()
    with_tail = data + b"\x0a\xff\x7f\x12\x09/host:CPU"
    trace = read_xspaces([("x", "", with_tail)])
    assert len(trace.device) == 4
    assert [q.id for q in trace.quality] == ["truncated"]


def test_a_cut_file_without_events_is_called_that_and_no_idle_gpu():
    b = Builder()
    b.plane("/device:GPU:0")
    with pytest.raises(NoDataError) as caught:
        read_xspaces([("x", "", b.bytes() + b"\x0a\xff\x7f\x12\x09/host:CPU")])
    assert "truncated or damaged" in caught.value.message and "GPU" not in caught.value.message


def test_what_the_profiler_reports_is_passed_on():
    b = sample()
    b.space.warnings.append("Detected GPU events dropped on node: 12 callback events")
    b.space.errors.append("CUPTI_ERROR_UNKNOWN")
    notes = {q.id: q.message for q in b.read().quality}
    assert "12 callback events" in notes["dropped_events"]
    assert "CUPTI_ERROR_UNKNOWN" in notes["capture_error"]
