"""The bytes of a trace file, read as a whole."""

from __future__ import annotations

import os
import random

import pytest

from gputop.trace.readers import content


@pytest.mark.parametrize("size", (0, 1, 99, 100, 101, 200, 437))
def test_parts_of_a_large_file_are_its_bytes(tmp_path, monkeypatch, size):
    monkeypatch.setattr(content, "_PART_BYTES", 100)
    path, expected = tmp_path / "large", random.Random(size).randbytes(size)
    path.write_bytes(expected)
    data = content.read_all(path, set(), 1e9)
    assert len(data) == size and data[:] == expected


@pytest.mark.parametrize("left", (0, 99, 100, 250, 436))
def test_a_file_that_became_shorter_ends_there(tmp_path, monkeypatch, left):
    monkeypatch.setattr(content, "_PART_BYTES", 100)
    path, expected = tmp_path / "large", random.Random(left).randbytes(437)
    path.write_bytes(expected)
    size_then = os.fstat

    def cut_after(descriptor):
        state = size_then(descriptor)
        os.truncate(path, left)
        return state

    monkeypatch.setattr(content, "_is_sparse", lambda descriptor: False)
    monkeypatch.setattr(content.os, "fstat", cut_after)
    assert content.read_all(path, set(), 1e9)[:] == expected[:left]
