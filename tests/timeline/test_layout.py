"""Files that are no timeline, or a damaged one, end in a message."""

from __future__ import annotations

import io
import json
import struct

import numpy as np
import pytest

from gputop.core.codec import to_document
from gputop.core.errors import GputopError
from gputop.diagnosis.diagnose import analyze_to_facts
from gputop.timeline.build import build
from gputop.timeline.file_layout import VERSION, Description, Writer, mapped
from gputop.timeline.read_timeline import Timeline
from tests.trace.build import Builder


@pytest.fixture
def whole(tmp_path):
    path = tmp_path / "timeline"
    with path.open("wb") as file:
        build(analyze_to_facts(Builder().run(0, 10, 5, "kernel", launch=1).build()), file)
    return path


def test_a_path_opens_and_outlives_its_file(whole):
    timeline = Timeline.open(whole)
    whole.unlink()
    found = timeline.at(0, 12_000)
    assert found is not None and found.name == "kernel"


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 4096, b"gputopTL" + b"\0" * 24])
def test_what_is_no_timeline(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(GputopError, match="not a gputop timeline"):
        Timeline.open(path)


def test_no_file_at_all(tmp_path):
    with pytest.raises(GputopError, match="No such file"):
        Timeline.open(tmp_path / "none")


def test_every_cut_and_every_damage_to_the_description_is_seen(whole):
    data = whole.read_bytes()
    for length in range(0, len(data), 97):
        whole.write_bytes(data[:length])
        with pytest.raises(GputopError):
            Timeline.open(whole)
    offset = struct.unpack_from("<Q", data, 16)[0]
    for place in [*range(32), *range(offset, len(data), 53)]:
        whole.write_bytes(data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1:])
        with pytest.raises(GputopError):
            Timeline.open(whole)


def test_an_interrupted_writer_leaves_no_timeline(tmp_path):
    path = tmp_path / "half"
    with path.open("wb") as file:
        Writer(file).column("start", np.int64, [np.arange(5)])
    with pytest.raises(GputopError, match="does not start like a timeline"):
        Timeline.open(path)


def test_another_version_and_another_description(tmp_path, whole):
    data = bytearray(whole.read_bytes())
    struct.pack_into("<I", data, 8, VERSION + 1)
    whole.write_bytes(data)
    with pytest.raises(GputopError, match=f"version {VERSION + 1}"):
        Timeline.open(whole)
    path = tmp_path / "other"
    with path.open("wb") as file:
        writer = Writer(file)
        writer.column("start", np.int64, [np.arange(5)])
        writer.finish({"window_ns": [0, 1]})
    with pytest.raises(GputopError, match="is not valid"):
        Timeline.open(path)


def test_a_value_of_another_type_is_told_with_its_place(tmp_path):
    about = to_document(Description((0, 1), (), False, 1, (), (), [], {}, (), (), "step", 1.0, [], [], [0]))
    path = tmp_path / "other"
    with path.open("wb") as file:
        Writer(file).finish({**about, "events": "many"})
    with pytest.raises(GputopError, match="events: str where a whole number belongs"):
        Timeline.open(path)


def test_columns_lie_at_multiples_of_eight_and_come_back(tmp_path):
    path = tmp_path / "columns"
    with path.open("wb") as file:
        writer = Writer(file)
        writer.column("a", np.uint8, [np.arange(3), np.arange(2)])
        writer.column("none", np.int64, [])
        writer.column("b", np.int64, (np.array([i]) for i in range(4)))
        writer.finish({"about": "it"})
    with path.open("rb") as file:
        columns, about = mapped(file)
    assert about == {"about": "it"}
    assert {name: column.tolist() for name, column in columns.items()} == {
        "a": [0, 1, 2, 0, 1], "none": [], "b": [0, 1, 2, 3]}
    assert all(column.__array_interface__["data"][0] % 8 == 0 for column in columns.values())
    with pytest.raises(ValueError, match="read-only"):
        columns["b"][0] = 1


def test_the_description_is_json():
    file = io.BytesIO()
    build(analyze_to_facts(Builder().run(0, 10, 5).build()), file)
    data = file.getvalue()
    offset, length = struct.unpack_from("<QQ", data, 16)
    assert json.loads(data[offset:offset + length])["events"] == 1
