from __future__ import annotations

import numpy as np
import pytest

from gputop.simulation.encode import INT, REF, UINT, Plane, StatColumn, events, field_varint, stat, varint
from tests import xspace_messages as messages


def _line(data: bytes):  # type: ignore[no-untyped-def]
    return messages.XLine.FromString(data)


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 2**32, 2**63 - 1, -1, -(2**63)])
def test_varints_are_protobufs(value: int) -> None:
    assert messages.XLine(id=value).SerializeToString() == (field_varint(1, value) if value else b"")
    assert len(varint(value)) <= 10


@pytest.mark.parametrize("rows", [1, 5, 40_000])  # the last in several chunks
def test_events_by_the_column_read_back_as_written(rows: int) -> None:
    rng = np.random.default_rng(rows)
    ids, offset, duration = (rng.integers(1, high, rows) for high in (300, 2**53, 2**31))
    correlation, reference = rng.integers(0, 2**32, rows), rng.integers(1, 2**14, rows)
    used = rng.integers(0, 2**40, rows)
    data = events(
        ids, offset, duration,
        [StatColumn(7, UINT, correlation), StatColumn(8, REF, reference), StatColumn(9, INT, used)],
        [stat(3, "$$1"), stat(4, 0.25), stat(5, -2)])
    line = _line(data)
    assert len(line.events) == rows
    for i in {0, rows // 2, rows - 1}:
        event = line.events[i]
        assert (event.metadata_id, event.offset_ps, event.duration_ps) == (ids[i], offset[i], duration[i])
        stats = {s.metadata_id: s for s in event.stats}
        assert (stats[7].uint64_value, stats[8].ref_value) == (correlation[i], reference[i])
        assert stats[9].int64_value == used[i]
        assert [stats[3].str_value, stats[4].double_value, stats[5].int64_value] == ["$$1", 0.25, -2]
    # Canonical: what protobuf itself would have written.
    assert line.SerializeToString() == data


def test_a_group_may_be_empty() -> None:
    none = np.zeros(0, np.int64)
    assert events(none, none, none, [StatColumn(1, UINT, none)]) == b""


def test_a_plane_names_what_its_events_use() -> None:
    plane = Plane("/host:CPU", 3)
    plane.add_stat("device_vendor", "Nvidia")
    plane.add_stat("memory_size", 1 << 36)
    plane.add_line(-5, "python", 12, [plane.event("EagerExecute", 4, 2, {"is_func": 1, "eager_op": "f", "share": 0.5})])
    plane.add_line(6, "nothing", 0, [b""])
    read = messages.XSpace.FromString(plane.finish()).planes[0]
    assert (read.id, read.name) == (3, "/host:CPU")
    assert [(line.id, line.name, line.timestamp_ns) for line in read.lines] == [(-5, "python", 12)]
    event = read.lines[0].events[0]
    assert (event.offset_ps, event.duration_ps) == (4_000, 2_000)
    assert read.event_metadata[event.metadata_id].name == "EagerExecute"
    stats = {read.stat_metadata[s.metadata_id].name: s for s in event.stats}
    assert stats["is_func"].uint64_value == 1 and stats["share"].double_value == 0.5
    assert read.stat_metadata[stats["eager_op"].ref_value].name == "f"
    own = {read.stat_metadata[s.metadata_id].name: s for s in read.stats}
    assert own["device_vendor"].str_value == "Nvidia" and own["memory_size"].uint64_value == 1 << 36
