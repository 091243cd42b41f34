"""Files that are no timeline, or a damaged one, end in a message."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
import pytest

from gputop.core.codec import to_document
from gputop.core.errors import GputopError
from gputop.diagnosis.diagnose import analyze_to_facts
from gputop.timeline.file_layout import Description, Extent, Writer, mapped
from gputop.timeline.read_timeline import Timeline
from tests.timeline.make import build
from tests.trace.build import Builder


@pytest.fixture
def file() -> Iterator[BinaryIO]:
    with tempfile.TemporaryFile(buffering=0) as opened:
        yield opened


def whole(file: BinaryIO) -> Extent:
    return build(analyze_to_facts(Builder().run(0, 10, 5, "kernel", launch=1).build()), file)


def test_a_timeline_outlives_its_file(file):
    timeline = Timeline.open(file, whole(file))
    file.close()
    found = timeline.at(0, 12_000)
    assert found is not None and found.name == "kernel"


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 4096])
@pytest.mark.parametrize("section", [Extent(0, 0, 0), Extent(0, 4, 1), Extent(1 << 40, 1 << 40, 7)])
def test_what_is_no_timeline(file, content, section):
    file.write(content)
    with pytest.raises(GputopError, match="not a gputop timeline"):
        Timeline.open(file, section)


def test_every_cut_and_every_damage_to_the_description_is_seen(file):
    section = whole(file)
    file.seek(0)
    data = file.read()
    for length in range(0, len(data), 97):
        file.truncate(0)
        file.seek(0)
        file.write(data[:length])
        with pytest.raises(GputopError):
            Timeline.open(file, section)
    for place in range(section.offset, len(data), 53):
        file.seek(0)
        file.write(data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1:])
        with pytest.raises(GputopError):
            Timeline.open(file, section)


@pytest.mark.parametrize(("whole", "said"), [(False, "is not valid"),
                                             (True, "events: str where a whole number belongs")])
def test_another_description_is_told_and_the_place_of_a_value_of_another_type(file, whole, said):
    about = to_document(Description((0, 1), (), False, 1, (), (), [], {}, (), (), "step", 1.0, [], [], [0]))
    with pytest.raises(GputopError, match=said):
        Timeline.open(file, Writer(file).describe({**about, "events": "many"} if whole else {"window_ns": [0, 1]}))


def test_columns_lie_at_multiples_of_eight_and_come_back(file):
    writer = Writer(file)
    writer.column("a", np.uint8, [np.arange(3), np.arange(2)])
    writer.column("none", np.int64, [])
    writer.column("b", np.int64, (np.array([i]) for i in range(4)))
    columns, about = mapped(file, writer.describe({"about": "it"}))
    assert about == {"about": "it"}
    assert {name: column.tolist() for name, column in columns.items()} == {
        "a": [0, 1, 2, 0, 1], "none": [], "b": [0, 1, 2, 3]}
    assert all(column.__array_interface__["data"][0] % 8 == 0 for column in columns.values())
    with pytest.raises(ValueError, match="read-only"):
        columns["b"][0] = 1


def test_the_description_is_json(file):
    offset, length, _ = whole(file)
    file.seek(offset)
    assert json.loads(file.read(length))["events"] == 2
