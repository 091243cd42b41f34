"""The sampled stacks beside a trace: read back as they were, and nothing that cannot be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputop.core.codec import to_document
from gputop.diagnosis.diagnose import analyze
from gputop.trace.readers.stacks_file import FILE, read_stacks, stacks_of, write_stacks
from tests.analysis.host.stack_samples import sampled

SAMPLES = sampled({"MainThread": [(0.0, "a.py:1 f"), (0.5, "a.py:1 f > b.py:2 g")]}, 1.0)
TRACE = Path(__file__).resolve().parents[2] / "data" / "keras3_slow_input.xplane.pb.gz"


def document(**changes: Any) -> bytes:
    own = to_document(SAMPLES) | changes
    return json.dumps({"schema": "gputop.capture_stacks/1", "files": {"a": own}}).encode()


def test_they_are_read_back_for_their_own_trace(tmp_path: Path) -> None:
    write_stacks(tmp_path, {"a.xplane.pb": SAMPLES, "b.xplane.pb": "py-spy is not installed"})
    assert stacks_of([str(tmp_path / "a.xplane.pb.gz"), str(tmp_path / "b.xplane.pb")]) == ((SAMPLES,), "")
    assert stacks_of([str(tmp_path / "b.xplane.pb")]) == ((), "py-spy is not installed")
    assert stacks_of([str(tmp_path / "c.xplane.pb")]) == ((), "") == stacks_of([])


@pytest.mark.parametrize("data", [
    b"", b"[]", b"{", document(rate_hz=0), document(length_s=0), document(start_s=-1), document(start_s=1e20),
    document(missed=2), document(frames=[]), document(stacks=[[0, 9]]), document(stacks=[[-1]]),
    document(threads=[{"name": "x", "main": True, "times_us": [0, 0], "stacks": [0, 0]}]),
    document(threads=[{"name": "x", "main": True, "times_us": [5, 1], "stacks": [0, 0]}]),
    document(threads=[{"name": "x", "main": True, "times_us": [-5], "stacks": [0]}]),
    document(threads=[{"name": "x", "main": True, "times_us": [1, 2], "stacks": [0]}]),
    document(threads=[{"name": "x", "main": True, "times_us": [1], "stacks": [7]}]),
    document(threads=[{"name": "x", "main": True, "times_us": [10 ** 12], "stacks": [0]}]),
    document(threads=[{"name": "x" * 999, "main": True, "times_us": [1], "stacks": [0]}]),
    document(frames=[{"function": "f", "file": "a", "line": -1}] * 2), document(cpu_s=float("1e300")),
    document(stacks=[[0] * 301]), document().replace(b"stacks/1", b"stacks/2"), document().replace(b"1.0", b"NaN"),
])
def test_a_damaged_file_is_none(tmp_path: Path, data: bytes) -> None:
    (tmp_path / FILE).write_bytes(data)
    assert not read_stacks(tmp_path).files


def test_names_are_safe_to_show(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(document(frames=[{"function": "f\x1b[2J", "file": "a\n", "line": 1},
                                                   {"function": "\ud800", "file": "", "line": 2}]))
    (found,) = read_stacks(tmp_path).files.values()
    assert not isinstance(found, str)
    assert all(frame.function.isprintable() and frame.file.isprintable() for frame in found.frames)


@given(st.integers(0, len(document()) - 1), st.binary(min_size=1, max_size=3))
def test_any_bytes_are_read_or_are_none(tmp_path: Path, at: int, put: bytes) -> None:
    data = document()
    (tmp_path / FILE).write_bytes(data[:at] + put + data[at + len(put):])
    read_stacks(tmp_path)


def test_the_analysis_of_a_captured_trace_has_them(tmp_path: Path) -> None:
    folder = tmp_path / "plugins" / "profile" / "run"
    folder.mkdir(parents=True)
    shutil.copy(TRACE, folder / "vm.xplane.pb.gz")
    assert analyze(folder).stacks is None
    start_s = analyze(folder).trace.start_s
    assert start_s is not None
    write_stacks(folder, {"vm.xplane.pb": sampled(
        {"MainThread": [(0.001 * i, f"a.py:{1 + i % 2} f") for i in range(3000)]}, 3.0, start_s=start_s)})
    found = analyze(tmp_path).stacks
    assert found is not None and found.flame and found.gaps
