"""The bytes of a trace file, read as a whole."""

from __future__ import annotations

import os
import random

import pytest

from gputop.trace.readers import content


@pytest.mark.parametrize("size", (0, 1, 437))
def test_a_file_is_read_as_it_is(tmp_path, size):
    path, expected = tmp_path / "large", random.Random(size).randbytes(size)
    path.write_bytes(expected)
    data = content.read_all(path, set(), 1e9)
    assert len(data) == size and data[:] == expected


@pytest.mark.parametrize("left", (0, 99, 436))
def test_a_file_that_became_shorter_ends_there(tmp_path, monkeypatch, left):
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
