from __future__ import annotations

import pytest

from gputop.trace.derived_lines import is_derived, stream_key, streams


@pytest.mark.parametrize("name", [
    "Steps", "TensorFlow Ops", "TensorFlow Name Scope", "Framework Ops", "Framework Name Scope", "XLA Ops",
    "XLA Modules", "Source code", "Launch Stats",
])
def test_every_versions_names(name):
    assert is_derived(name, 5)


@pytest.mark.parametrize("line_id", [0xDEADBEEF, 0xDEADBEEF + 3, -559038737, -559038734])
def test_ids_tell_under_any_name(line_id):
    assert is_derived("Something new", line_id)


@pytest.mark.parametrize("line_id", [0, 13, -105233264, 3735928559 - 1, "3735928559", True, None])
def test_streams_are_not_derived(line_id):
    assert not is_derived("Stream #13(Compute)", line_id)


def test_where_some_lines_are_called_streams_the_others_are_none():
    assert streams({"Stream #13(Kernel)", "stream 7", "Ops of tomorrow"}) == {"Stream #13(Kernel)", "stream 7"}
    assert streams({"a", "b"}) == {"a", "b"}


def test_a_stream_goes_by_its_number():
    assert stream_key("Stream #13(Kernel)") == stream_key("Stream #13(Compute)") != stream_key("Stream #1(Kernel)")
    assert stream_key("other") == "other"
