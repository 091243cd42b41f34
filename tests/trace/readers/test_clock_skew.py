"""The clocks of several hosts: known offsets found again, and abstention where they cannot be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gputop.trace.readers.clock_file import FILE, HostClock, read_clocks, write_clocks
from gputop.trace.readers.clock_skew import Skew, skew
from gputop.trace.readers.load import load
from tests import xspace_messages as messages

MS = 1_000_000


def ranks(n: int, seed: int, *, step_ns: int = 100 * MS, late_ns: int = 5 * MS) -> tuple[np.ndarray, ...]:
    """Collectives of two ranks on one clock: each begins when it is ready, both end together."""
    random = np.random.default_rng(seed)
    at = np.cumsum(random.integers(step_ns * 8 // 10, step_ns * 12 // 10, n))
    a, b = (at + random.integers(0, late_ns, n) for _ in range(2))
    end = np.maximum(a, b) + 2 * MS
    return a, end + random.integers(0, 5_000, n), b, end + random.integers(0, 5_000, n)


@given(seed=st.integers(0, 1000), offset=st.integers(-900 * MS, 900 * MS), cut_a=st.integers(0, 5),
       cut_b=st.integers(0, 5))
@settings(max_examples=40)
def test_a_known_offset_is_found_though_the_windows_differ(seed, offset, cut_a, cut_b):
    a_start, a_end, b_start, b_end = ranks(60, seed)
    found = skew(a_start[cut_a:], a_end[cut_a:], b_start[cut_b:] + offset, b_end[cut_b:] + offset, 1000 * MS)
    assert isinstance(found, Skew)
    assert abs(found.offset_ns - offset) < 5_000 and found.error_ns < 5_000
    assert found.matched == 60 - max(cut_a, cut_b)


TIMES = st.lists(st.tuples(st.integers(-(1 << 60), 1 << 60), st.integers(0, 1 << 40)), max_size=30).map(
    lambda pairs: np.array(sorted((start, start + length) for start, length in pairs), np.int64).reshape(-1, 2).T)


@given(TIMES, TIMES, st.integers(1, 1 << 50))
def test_whatever_the_files_say_there_is_an_answer_within_what_clocks_can_differ(a, b, within):
    found = skew(*a, *b, within)
    assert isinstance(found, str) or (abs(found.offset_ns) <= within and found.error_ns >= 0 and found.matched >= 5)


def test_what_the_capture_knows_tells_one_step_from_the_next():
    """Steps as regular as a clock: any of them could be the same one."""
    start = np.arange(50) * 10 * MS
    end = start + 2 * MS
    assert "ways to match" in skew(start, end, start + 3 * MS, end + 3 * MS, 1000 * MS)
    assert skew(start, end, start + 3 * MS, end + 3 * MS, 4 * MS) == Skew(3 * MS, 0, 50)


@pytest.mark.parametrize(("count", "within", "why"), [(3, MS, "only 3 collectives"), (50, MS, "no way to match")])
def test_abstains_with_the_reason(count, within, why):
    a_start, a_end, b_start, b_end = ranks(count, 1)
    assert why in skew(a_start, a_end, b_start + 30 * MS, b_end + 30 * MS, within)


def test_a_rank_cannot_end_before_another_begins():
    """Unrelated operations of the same number are not taken for the same."""
    a_start = np.arange(20) * 100 * MS
    b_start = a_start + np.where(np.arange(20) % 2, 30 * MS, -30 * MS)
    assert isinstance(skew(a_start, a_start + MS, b_start, b_start + MS, 1000 * MS), str)


def space(machine: str, start: np.ndarray, end: np.ndarray, began_ns: int | None) -> bytes:
    """An XSpace with these host collectives, as TensorFlow's on the CPU."""
    out = messages.XSpace(hostnames=[machine])
    plane = out.planes.add(name="/host:CPU")
    plane.event_metadata[1].id, plane.event_metadata[1].name = 1, "loss/CollectiveReduceV2:CollectiveReduceV2"
    line = plane.lines.add(id=1, name="tf_Compute/1", timestamp_ns=0)
    for a, b in zip(start.tolist(), end.tolist(), strict=True):
        line.events.add(metadata_id=1, offset_ps=a * 1000, duration_ps=(b - a) * 1000)
    if began_ns is not None:
        session = out.planes.add(name="Task Environment")
        for i, (name, value) in enumerate((("profile_start_time", began_ns), ("profile_stop_time", began_ns + 10**10))):
            session.stat_metadata[i].id, session.stat_metadata[i].name = i, name
            session.stats.add(metadata_id=i, uint64_value=value)
    return bytes(out.SerializeToString())


@pytest.fixture
def two(tmp_path):
    """Writes two hosts' traces; returns the trace read, and how far apart the ends of its collectives are."""
    a_start, a_end, b_start, b_end = ranks(40, 7)

    def write(offset_ns: int, machines=("a", "b"), clocks: dict[str, HostClock] | None = None, began: bool = True):
        base = 1_700_000_000 * 10**9
        for name, machine, (start, end), ahead in zip("ab", machines, ((a_start, a_end), (b_start, b_end)),
                                                      (0, offset_ns), strict=True):
            (tmp_path / f"{name}.xplane.pb").write_bytes(space(machine, start, end, base + ahead if began else None))
        if clocks:
            write_clocks(tmp_path, clocks)
        trace = load([tmp_path])
        lines = np.array([line.host for line in trace.lines])[trace.host.line]
        ends = [np.sort(trace.host.end_ns[lines == host]) for host in trace.hosts]
        return trace, int(np.abs(ends[1] - ends[0]).max())

    return write


class TestInATrace:
    def test_the_second_host_is_moved_onto_the_first_one_s_clock(self, two):
        trace, apart = two(250 * MS)
        assert apart < 10_000
        (note,) = [n for n in trace.quality if n.id == "clocks"]
        assert "The clock of b was 250 ms ahead of that of a, measured with 40 collectives" in note.message
        lo, hi = trace.profile_window_ns
        assert hi - lo == pytest.approx(10**10, abs=10_000), "the window is moved with its events"

    def test_clocks_that_agree_are_left_alone(self, two):
        trace, apart = two(0)
        assert apart < 10_000 and "agree to" in trace.quality[-1].message

    def test_what_the_capture_found_comes_first(self, two):
        trace, apart = two(30 * 10**9, clocks={"a.xplane.pb": HostClock(0, MS),
                                               "b.xplane.pb": HostClock(30 * 10**9 - MS, 5 * MS)})
        assert apart < 10_000
        assert "1.0 ms ahead" in trace.quality[-1].message

    def test_processes_of_one_machine_share_its_clock(self, two):
        trace, _ = two(0, machines=("a", "a"))
        assert trace.hosts == ["a", "a rank 1"] and not trace.quality

    def test_processes_of_another_machine_are_moved_together(self, tmp_path):
        """The second of them ran too few collectives to tell, and the capture took its clock for another."""
        a_start, a_end, b_start, b_end = ranks(40, 7)
        base, ahead = 1_700_000_000 * 10**9, 250 * MS
        for name, machine, start, end, began in (
            ("a", "a", a_start, a_end, base), ("b", "b", b_start, b_end, base + ahead),
            ("c", "b", b_start[:3], b_end[:3], base + ahead)):
            (tmp_path / f"{name}.xplane.pb").write_bytes(space(machine, start, end, began))
        write_clocks(tmp_path, {"a.xplane.pb": HostClock(0, MS), "b.xplane.pb": HostClock(ahead - 2 * MS, 5 * MS),
                                "c.xplane.pb": HostClock(ahead + 3 * MS, 5 * MS)})
        trace = load([tmp_path])
        lines = np.array([line.host for line in trace.lines])[trace.host.line]
        a, b, c = (np.sort(trace.host.end_ns[lines == host]) for host in ("a", "b", "b rank 2"))
        assert np.abs(a - b).max() < 10_000 and np.abs(b[:3] - c).max() == 0
        assert [n.message[:14] for n in trace.quality if n.id == "clocks"] == ["The clock of b"]

    def test_servers_that_do_not_say_when_they_began(self, two):
        began = 1_700_000_000 * 10**9
        trace, apart = two(0, began=False, machines=("a", "a"), clocks={
            "a.xplane.pb": HostClock(0, 0, began), "b.xplane.pb": HostClock(0, 0, began + 7)})
        assert apart < 10_000 and not trace.quality and trace.origin_ns > began

    def test_nobody_knows_their_clocks(self, two):
        trace, _ = two(0, began=False)
        assert [n.id for n in trace.quality] == ["no_common_clock"]

    def test_a_clock_of_one_host_alone_is_no_common_one(self, tmp_path):
        """Times since 1970 and times since the file's begin would be 56 years apart."""
        start, end, *_ = ranks(40, 7)
        for name, began in (("a", 1_700_000_000 * 10**9), ("b", None)):
            (tmp_path / f"{name}.xplane.pb").write_bytes(space(name, start, end, began))
        trace = load([tmp_path])
        assert [n.id for n in trace.quality] == ["no_common_clock"] and trace.window_ns[1] < 10**11
        lines = np.array([line.host for line in trace.lines])[trace.host.line]
        assert [int(trace.host.start_ns[lines == host].min()) for host in ("a", "b")] == [0, 0]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "other/1", "files": {}}',
                                  '{"schema": "gputop.clocks/1", "files": {"a": {"offset_ns": "1"}}}',
                                  '{"schema": "gputop.clocks/1", "files": {"a": {"offset_ns": 1e300, "error_ns": 0, '
                                  '"began_ns": null}}}'])
def test_damaged_notes_on_clocks_count_for_nothing(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    assert read_clocks(tmp_path) == {}
    write_clocks(tmp_path, {"a": HostClock(1, 2, 3), "b": HostClock()})
    assert read_clocks(tmp_path) == {"a": HostClock(1, 2, 3), "b": HostClock()}
