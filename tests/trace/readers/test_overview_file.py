"""The overview beside a trace: on the trace's clock, and nothing that cannot be."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputop.core.files import Folder
from gputop.diagnosis.diagnose import analyze, analyze_trace
from gputop.diagnosis.report import text_report
from gputop.session.auto_capture import remove_run
from gputop.trace.model import Trace
from gputop.trace.readers.capture_file import CaptureFile, write_capture
from gputop.trace.readers.clock_file import HostClock, write_clocks
from gputop.trace.readers.load import load
from gputop.trace.readers.xspace.recordings import join_recordings
from tests.profiler.fake_server import make_xspace

BEGAN_NS = 1_750_000_000 * 10**9
DETAIL = make_xspace(5, window_ns=(BEGAN_NS, BEGAN_NS + 2 * 10**9))
LATER = (BEGAN_NS + 3 * 10**9, BEGAN_NS + 10 * 10**9)
OVERVIEW = make_xspace(9, window_ns=LATER)


def saved(folder: Path, overview: bytes | None = OVERVIEW, host: str = "node", detail: bytes = DETAIL) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{host}.xplane.pb"
    path.write_bytes(detail)
    if overview is not None:
        (folder / f"{host}.overview.pb").write_bytes(overview)
    return path


def overview_of(trace: Trace) -> Trace:
    """The overview of the only rank."""
    assert list(trace.overviews) == [0]
    return trace.overviews[0]


def notes_of(trace: Trace) -> list[str]:
    return [note.message for note in trace.quality if note.id == "overview"]


def test_it_is_on_the_origin_of_the_trace(tmp_path: Path) -> None:
    path = saved(tmp_path)
    trace = load([path])
    assert trace.paths == [str(path)] and len(trace.host) == 5, "it is no host of the job"
    assert load([tmp_path]).paths == [str(path)]
    overview = overview_of(trace)
    assert len(overview.host) == 9 and not notes_of(trace)
    assert overview.origin_ns == trace.origin_ns == BEGAN_NS + 1_000
    assert overview.host.start_ns[0] == 3 * 10**9 and (overview.host.end_ns >= overview.host.start_ns).all()
    assert overview.profile_window_ns == (3 * 10**9 - 1_000, 10**10 - 1_000)
    assert not len(overview.device) and not overview.gpus and not overview.overviews
    assert {line.host for line in overview.lines} == set(overview.hosts) == set(trace.hosts)


def test_of_several_parts_the_time_between_is_unrecorded(tmp_path: Path) -> None:
    second = make_xspace(2, window_ns=(LATER[1] + 10**9, LATER[1] + 2 * 10**9))
    overview = overview_of(load([saved(tmp_path, join_recordings([second, OVERVIEW]))]))
    assert len(overview.host) == 11
    assert overview.unrecorded_ns == ((10**10 - 1_000, 11 * 10**9 - 1_000),)


def two_workers(folder: Path, first: bytes | None, second: bytes | None) -> Trace:
    """The trace of two hosts with these overviews; the second host is a second ahead of the machine that captured."""
    ahead = make_xspace(5, window_ns=(BEGAN_NS + 10**9, BEGAN_NS + 3 * 10**9))
    paths = [saved(folder, first, "a", make_xspace(6, window_ns=(BEGAN_NS, BEGAN_NS + 2 * 10**9))),
             saved(folder, second, "b", ahead)]
    write_clocks(folder, {path.name: HostClock(offset_ns=10**9 * rank) for rank, path in enumerate(paths)})
    return load([folder])


def test_of_several_workers_each_is_on_the_clock_of_its_own(tmp_path: Path) -> None:
    trace = two_workers(tmp_path, make_xspace(7, window_ns=LATER), OVERVIEW)
    assert [len(overview.host) for overview in trace.overviews.values()] == [7, 9] and not notes_of(trace)
    assert [overview.host.start_ns[0] for overview in trace.overviews.values()] == [3 * 10**9, 2 * 10**9]
    for rank, overview in trace.overviews.items():
        assert overview.hosts == [trace.hosts[rank]]
        assert {(line.host, line.rank) for line in overview.lines} == {(trace.hosts[rank], rank)}


@pytest.mark.parametrize("other", [None, b"{}"])
def test_a_worker_without_an_overview_is_said(tmp_path: Path, other: bytes | None) -> None:
    trace = two_workers(tmp_path, other, OVERVIEW)
    assert list(trace.overviews) == [1]
    note, *more = notes_of(trace)
    assert note.startswith("Rare events are missing for 1 of 2 workers, ") and trace.hosts[0] in note
    assert len(more) == (other is not None) and all(
        f"cannot use the rare events recorded next to the trace of {trace.hosts[0]}: " in m for m in more)
    assert note in " ".join(text_report(analyze_trace(trace), 10_000).split())


@pytest.mark.parametrize(("overview", "said"), [
    (b"", "No events"), (b"{}", "not an XSpace"), (b"\x0a\xff\xff\xff\xff\x0f", "."), (make_xspace(0), "."),
    (make_xspace(9), "does not show when"),
    (make_xspace(9, window_ns=(1, 2)), "at another time"),
    (make_xspace(9, window_ns=(LATER[0] + 86400 * 10**9, LATER[1] + 86400 * 10**9)), "at another time"),
])
def test_one_that_cannot_be_used_is_a_note(tmp_path: Path, overview: bytes, said: str) -> None:
    trace = load([saved(tmp_path, overview)])
    assert not trace.overviews and len(trace.host) == 5
    (note,) = notes_of(trace)
    assert note.startswith("gputop cannot use the rare events recorded next to this trace: ") and said in note


def test_what_is_left_of_a_cut_one_is_taken_with_a_note(tmp_path: Path) -> None:
    trace = load([saved(tmp_path, OVERVIEW + b"\x0a\xff\x01")])
    assert len(overview_of(trace).host) == 9
    (note,) = notes_of(trace)
    assert note.startswith("Overview next to this trace: ") and "truncated or damaged" in note


def test_it_is_read_as_a_trace_where_it_is_asked_for_itself(tmp_path: Path) -> None:
    saved(tmp_path)
    trace = load([tmp_path / "node.overview.pb"])
    assert len(trace.host) == 9 and not trace.overviews


@pytest.mark.parametrize("kind", ["folder", "fifo", "link to nothing", "itself"])
def test_what_is_no_file_is_a_note(tmp_path: Path, kind: str) -> None:
    path = saved(tmp_path, None)
    beside = tmp_path / "node.overview.pb"
    if kind == "folder":
        beside.mkdir()
    elif kind == "fifo":
        os.mkfifo(beside)
    else:
        beside.symlink_to("gone" if kind == "link to nothing" else beside.name)
    trace = load([path])
    assert not trace.overviews and len(notes_of(trace)) == 1


@given(st.lists(st.tuples(st.integers(0, len(OVERVIEW) - 1), st.integers(0, 255)), max_size=8))
def test_flipped_bytes_never_harm_the_trace(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    data = bytearray(OVERVIEW)
    for at, value in changes:
        data[at] = value
    trace = load([saved(tmp_path, bytes(data))])
    assert len(trace.host) == 5 and trace.profile_window_ns == (-1_000, 2 * 10**9 - 1_000)
    for overview in trace.overviews.values():
        assert abs(int(overview.host.start_ns[0])) < 1 << 62


def test_what_ended_the_recording_is_a_note_of_the_analysis(tmp_path: Path) -> None:
    path = saved(tmp_path, None)
    shutil.copy(Path(__file__).parents[2] / "data" / "keras3_fast.xplane.pb.gz", tmp_path / "k.xplane.pb.gz")
    path.unlink()
    write_capture(tmp_path, CaptureFile(files={"k.xplane.pb": None}, ended="gputop ended\x1b[2J it."))
    (note,) = [note for note in analyze([tmp_path]).trace.quality if note.id == "ended_early"]
    assert note.message.startswith("gputop ended") and note.message.isprintable()


def test_it_goes_with_its_run(tmp_path: Path) -> None:
    saved(tmp_path / "run")
    with Folder(tmp_path) as parent:
        assert remove_run(parent, "run") == []
    assert not (tmp_path / "run").exists()
