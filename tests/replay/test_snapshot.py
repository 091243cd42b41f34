"""A document and back, and documents that are none."""

from __future__ import annotations

import copy
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputop.core.errors import GputopError
from gputop.core.metrics import ADAPTER_METRICS, TENSOR_FLOP_UTIL
from gputop.core.samples import AdapterSample, Reading
from gputop.export.html import to_html
from gputop.export.snapshot import document, to_json, to_text
from gputop.replay.snapshot_document import Snapshot, from_document, from_json, is_snapshot, read
from gputop.text import redaction
from tests.export.scene import session
from tests.fakes import StillSession
from tests.records import replace


def written(watched: StillSession) -> Snapshot:
    """What is read of its snapshot."""
    return from_document(json.loads(to_json(document(watched))))


@cache
def _document() -> dict[str, Any]:
    return json.loads(to_json(document(session(2))))  # type: ignore[no-any-return]


def test_what_is_written_is_read() -> None:
    watched = session()
    s = written(watched)
    known = {m: r for g in s.sample.gpus for m, r in g.readings.items() if r.reason != "not sampled"}
    assert set(known) == {*watched.feed.sample.gpus[0].readings, TENSOR_FLOP_UTIL}
    for read_back, gpu in zip(s.sample.gpus, watched.feed.sample.gpus, strict=True):
        assert replace(read_back, readings=gpu.readings) == gpu
        assert all(read_back[m] == gpu[m] for m in known)
    assert s.sample.processes == redaction.sample(watched.feed.sample).processes
    assert s.sample.host.core_ratios == (1.0, 0.3)
    assert s.sample.host["cpu_ratio"] == watched.feed.sample.host["cpu_ratio"]
    assert s.findings == watched.results.findings and s.live.abstained == watched.results.live.abstained
    assert s.capture is not None and s.capture.report == watched.results.last_capture.report
    last = watched.results.last_capture
    assert s.capture.analysis == last.analysis and s.remarks == last.remarks
    assert [server.problem for server in s.servers] == [None, "no answer"]


def test_adapters_and_numa_nodes_are_read_back_and_printed() -> None:
    watched = session()
    adapter = AdapterSample("mlx5_0", "ACTIVE", "InfiniBand", 1, {
        m: Reading(7e9, metric.unit, "test") for m, metric in ADAPTER_METRICS.items()})
    watched.feed.sample = replace(watched.feed.sample, host=replace(watched.feed.sample.host, adapters=(adapter,)),
                             processes=tuple(replace(p, numa_nodes=(1,)) for p in watched.feed.sample.processes))
    s = written(watched)
    assert s.sample.host.adapters == (adapter,) and s.sample.processes[0].numa_nodes == (1,)
    text = to_text(watched)
    assert "RDMA mlx5_0  ACTIVE, NUMA node 1  in 7.0 GB/s" in text and "bound to NUMA node 1" in text
    assert "mlx5_0 ACTIVE" in to_html(document(watched))


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1e40", "NaN", "Infinity"])
def test_a_number_that_is_none_is_refused_wherever_it_stands(number: str, tmp_path: Path) -> None:
    """Written into an analysis, it once ended the monitor on `s`, which could not write it again."""
    text = to_json(_document())
    path = tmp_path / "s.json"
    analysis = text.index('"analysis"')
    for begin in (text.index('"time_s": '), text.index('"value": '), text.index('"window_s": ', analysis)):
        at = text.index(": ", begin) + 2
        end = re.compile(r"[,\n}]").search(text, at).start()  # type: ignore[union-attr]
        path.write_text(text[:at] + number + text[end:])
        with pytest.raises(GputopError, match=r"damaged|no snapshot"):
            read(path)


def test_a_sample_that_holds_such_a_number_is_written_without_it() -> None:
    watched = session()
    gpu = watched.feed.sample.gpus[0]
    readings = {**gpu.readings, "power_w": replace(gpu["power_w"], value=float("inf"))}
    host = replace(watched.feed.sample.host, core_ratios=(0.5, float("nan")))
    watched.feed.sample = replace(watched.feed.sample, host=host,
                             gpus=(replace(gpu, readings=readings), *watched.feed.sample.gpus[1:]))
    read_back = written(watched)
    assert read_back.sample.gpus[0]["power_w"].value is None and read_back.sample.host.core_ratios == ()


def test_the_spectrogram_says_how_often_each_level_was_reached() -> None:
    doc = document(StillSession(ticks=100))
    grid = from_document(doc).spectrogram
    assert grid is not None and grid.slice_s == 2.0 and grid.slices == 50 and len(grid.gpus) == 8
    (track,) = grid.gpus["GPU-test-0"]
    assert track.metric == "sm_active"
    seen = [levels for levels in track.levels if levels is not None]
    assert len(seen) >= 49 and all(sum(levels) == pytest.approx(1, abs=0.01) for levels in seen)
    coarse = from_document(document(StillSession(ticks=10, fine=False))).spectrogram
    assert coarse is not None and coarse.gpus["GPU-test-0"][0].metric == "gpu_util"
    assert coarse.slices == 30, "a short history is not drawn as if it were a long one"


def test_a_list_of_numbers_is_one_line() -> None:
    text = to_json({"texts": ["[\n 1,\n 2]", "a"], "numbers": [1, -2.5, None, 1e-9], "nested": [[1], []]})
    assert '"numbers": [ 1, -2.5, null, 1e-09 ]' in text
    assert json.loads(text) == {"texts": ["[\n 1,\n 2]", "a"], "numbers": [1, -2.5, None, 1e-9], "nested": [[1], []]}


@pytest.mark.parametrize(("change", "message"), [
    ({"schema": "gputop.snapshot/2"}, "type gputop.snapshot/2"), ({"schema": "gputop.analysis/1"}, "gputop.analysis/1"),
    ({"schema": 7}, "not a gputop document"), ({"gpus": None}, "gpus: null where a list"),
    ({"time_s": 1e300}, "is too large"), ({"time_s": 1e12}, "time_s: not a number"),
    ({"time_s": -1.0}, "time_s: not a number >= 0"), ({"interval_s": True}, "interval_s: bool where a number"),
    ({"simulated": 1}, "simulated: int where true or false"), ({"source": ["x"]}, "where a text"),
    ({"history": {"start_s": 0, "slice_s": 5, "slices": 10**9, "gpus": {}}}, "history.slices: not a whole number <="),
    ({"history": {"start_s": 0, "slice_s": 5, "slices": 1, "gpus": {"a": {"sm_active": {"mean": []}}}}},
     "0 of 1 slices"),
    ({"spectrogram": {"start_s": 0, "slice_s": 0.0, "slices": 1, "gpus": {}}}, "slice_s: not a number >= 0.1"),
    ({"findings": [{}]}, "is missing"), ({"capture": []}, "damaged"),
])
def test_a_document_that_is_wrong_says_where(change: dict[str, Any], message: str) -> None:
    with pytest.raises(GputopError, match=message) as caught:
        from_document({**_document(), **change}, "a.json")
    assert "a.json" in caught.value.message and caught.value.fix
    missing = {k: v for k, v in _document().items() if k not in change}
    with pytest.raises(GputopError):
        from_document({**missing, **({} if "spectrogram" not in change else {"schema": None})})


@pytest.mark.parametrize(("data", "message"), [
    (b"", "not a snapshot, or is damaged"), (b"{", "damaged"), (b"[1, 2]", "not a gputop document"),
    (b"null", "not a gputop document"),
    (b"[" * 100_000, "damaged"), (b'{"schema": NaN}', "NaN is not a number"), (b"\xff\xfe{}", "damaged"),
    (b'{"schema": ' + b"9" * 5000 + b"}", "damaged"), (b"<html></html>", "damaged"),
])
def test_a_file_that_is_none_says_so(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(data)
    with pytest.raises(GputopError, match=message):
        read(path)


def test_a_truncated_file_is_damaged_wherever_it_ends(tmp_path: Path) -> None:
    data = to_json(_document()).encode()
    for part in range(1, 20):
        (tmp_path / "cut.json").write_bytes(data[: len(data) * part // 20])
        with pytest.raises(GputopError, match="damaged"):
            read(tmp_path / "cut.json")


def test_what_cannot_be_read_is_no_snapshot(tmp_path: Path) -> None:
    assert not is_snapshot(tmp_path / "none") and not is_snapshot(tmp_path)
    with pytest.raises(GputopError, match="cannot read"):
        read(tmp_path / "none")
    (tmp_path / "r").write_bytes(b"\x89GTOPR\r\n")
    assert not is_snapshot(tmp_path / "r")


def test_what_a_later_version_adds_is_passed_over() -> None:
    doc = copy.deepcopy(_document())
    doc["new"] = doc["gpus"][0]["new"] = doc["findings"][0]["new"] = {"a": 1}
    doc["gpus"][0]["readings"]["new_metric"] = "in a form of its own"
    assert from_document(doc).sample.gpus[0].info.index == 0


_JUNK = st.one_of(st.none(), st.booleans(), st.integers(-10, 10), st.just(10**400), st.floats(), st.text(max_size=5),
                  st.just([]), st.just({}), st.just([[]]), st.just({"a": {}}), st.just("\ud800"), st.just(1e308))


@given(st.data())
def test_whatever_stands_in_a_document_it_is_drawn_or_refused(data: st.DataObject) -> None:
    doc = copy.deepcopy(_document())
    at: Any = doc
    while True:
        keys = list(at) if isinstance(at, dict) else range(len(at))
        key = data.draw(st.sampled_from(keys))
        inner = at[key]
        if not isinstance(inner, (dict, list)) or not inner or data.draw(st.integers(0, 3)) == 0:
            break
        at = inner
    at[key] = data.draw(_JUNK)
    try:
        from_document(doc)
    except GputopError:
        return
    doc = json.loads(json.dumps(doc).replace("NaN", "0").replace("-Infinity", "0").replace("Infinity", "0"))
    assert to_html(doc).endswith("</html>\n")


def test_a_page_that_begins_its_document_very_often_is_read_in_linear_time(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("<html>" + '<script type="application/json" id="gputop-snapshot">{' * 200_000)
    with pytest.raises(GputopError, match="is not a snapshot"):
        read(path)


def test_what_a_node_answers_has_a_number_of_values() -> None:
    with pytest.raises(GputopError, match="more than 500,000 values"):
        from_json(b'{"gpus": [' + b"[]," * 300_000 + b"[]]}")
