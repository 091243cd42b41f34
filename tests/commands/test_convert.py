"""A trace or a recording for other tools: what they read is what it holds."""

from __future__ import annotations

import gzip
import json
import shutil
import sqlite3
import sysconfig
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gputop.analysis.host.host_ops import input_executors
from gputop.analysis.results import Analysis
from gputop.cli import main
from gputop.core.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from gputop.core.samples import AdapterSample, Reading
from gputop.diagnosis.diagnose import analyze
from gputop.export import write_tables
from gputop.export.recording_tables import ADAPTERS, HOST, SAMPLES
from gputop.export.trace_tables import TRACE_TABLES
from gputop.export.write_tables import NAMES, SqlTable
from gputop.replay.format import RecordingWriter
from gputop.replay.reader import open_recording
from gputop.trace.lookups import host_stat
from gputop.trace.model import Kind
from gputop.trace.readers.load import load
from tests.fakes import node_sample
from tests.records import replace
from tests.simulation.simulated_capture import capture

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
Rows = list[tuple[Any, ...]]


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the simulated job: steps, launches, copies and collectives on eight GPUs."""
    path = tmp_path_factory.mktemp("convert") / "demo.xplane.pb"
    path.write_bytes(capture("gpu0-oversubscribed", 1.0)[3])
    return str(path)


@pytest.fixture(scope="module")
def analyzed(trace_file: str) -> Analysis:
    return analyze(trace_file)


@pytest.fixture(scope="module")
def sqlite_file(trace_file: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(trace_file, tmp_path_factory.mktemp("sqlite") / "t.sqlite")


@pytest.fixture(scope="module")
def json_file(trace_file: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(trace_file, tmp_path_factory.mktemp("json") / "t.json")


def convert(source: str, target: Path) -> Path:
    assert main(["convert", source, "-o", str(target)]) == EXIT_OK
    for path in target.iterdir() if target.is_dir() else [target]:
        assert path.stat().st_mode & 0o777 == 0o600
    return target


def test_the_tables_hold_each_event_and_the_analysis(
        trace_file: str, analyzed: Analysis, sqlite_file: Path) -> None:
    trace, analysis = load([trace_file]), analyzed
    with sqlite3.connect(sqlite_file) as tables:
        def asked(query: str) -> list[tuple[object, ...]]:
            return tables.execute(query).fetchall()

        time_ns = {kind: int((trace.device.end_ns - trace.device.start_ns)[trace.device.kind == kind].sum())
                   for kind in Kind if (trace.device.kind == kind).any()}
        assert dict(asked("SELECT kind, SUM(duration_ns) FROM gpu_work GROUP BY kind")) == {
            kind.name.lower(): time for kind, time in time_ns.items()}
        names = Counter(trace.names[i] for i in trace.host.name.tolist())
        assert dict(asked("SELECT name, COUNT(*) FROM host_work GROUP BY name")) == names
        launched = trace.device.launch_ns[trace.device.launch_ns >= 0]
        assert asked("SELECT COUNT(launch_ns), SUM(launch_ns) FROM device_events") == [(len(launched), launched.sum())]
        assert [row for (row,) in asked("SELECT id FROM findings ORDER BY rank")] == [f.id for f in analysis.findings]
        assert analysis.steps is not None and asked("SELECT COUNT(*) FROM steps") == [(analysis.steps.count,)]
        about = dict(asked("SELECT * FROM about"))
        assert about["simulated"] == "yes" and json.loads(str(about["analysis"])) == analysis.to_json()


def duckdb_of_sqlite(path: Path) -> Callable[[SqlTable], Rows]:
    """DuckDB's own reader of SQLite, an extension that a package brings for exactly that DuckDB."""
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")
    pytest.importorskip("duckdb_extension_sqlite_scanner", reason="DuckDB's reader of SQLite is not installed")
    (extension,) = Path(sysconfig.get_paths()["purelib"]).glob(
        "duckdb_extension_sqlite_scanner/extensions/*/*.duckdb_extension")
    tables = duckdb.connect()
    tables.execute(f"LOAD '{extension}'")
    tables.execute(f"ATTACH '{path}' AS file (TYPE sqlite)")
    return lambda table: tables.execute(f"SELECT * FROM file.{table.name}").fetchall()


def duckdb_of_parquet(path: Path) -> Callable[[SqlTable], Rows]:
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")
    return lambda table: duckdb.connect().execute(
        f"SELECT * FROM '{path / table.name if path.is_dir() else path.with_suffix('')}.parquet'").fetchall()


def in_sqlite(path: Path, name_of: Callable[[Any], Any] = lambda index: index) -> Callable[[SqlTable], Rows]:
    """Rows by Python's sqlite3, names by ``name_of``."""
    def rows(table: SqlTable) -> Rows:
        with sqlite3.connect(path) as tables:
            return [tuple(name_of(value) if column.is_name else value
                          for column, value in zip(table.columns, row, strict=True))
                    for row in tables.execute(f"SELECT * FROM {table.name}")]

    return rows


def test_duckdb_reads_sqlite_and_finds_the_same(sqlite_file: Path) -> None:
    asked, told = duckdb_of_sqlite(sqlite_file), in_sqlite(sqlite_file)
    for table in TRACE_TABLES:
        assert asked(table) == told(table), table.name


def test_duckdb_reads_parquet_and_finds_the_same(
        trace_file: str, sqlite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    monkeypatch.setattr(write_tables, "BATCH_ROWS", 1000)  # several row groups, each with names of its own
    names = load([trace_file]).names
    asked = duckdb_of_parquet(convert(trace_file, tmp_path / "t.parquet"))
    told = in_sqlite(sqlite_file, lambda i: None if i is None else names[i])
    rows = {table.name: asked(table) for table in TRACE_TABLES if table is not NAMES}
    assert len(rows["device_events"]) > 1000 and rows["findings"] and any(row[5] for row in rows["device_events"])
    for table in TRACE_TABLES:
        if table is not NAMES:
            assert rows[table.name] == told(table), table.name


def test_duckdb_reads_a_recording_and_finds_the_same(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    source = str(DATA / "v0_1_0" / "demo.gputop")
    rows = duckdb_of_parquet(convert(source, tmp_path / "r.parquet"))(SAMPLES)
    assert rows == in_sqlite(convert(source, tmp_path / "r.sqlite"))(SAMPLES)


def test_the_document_lists_every_table_and_column() -> None:
    document = (ROOT / "docs" / "tasks" / "convert.md").read_text()
    for table in (*TRACE_TABLES, SAMPLES):
        told = ", ".join(f"`{column.name}`" for column in table.columns[:5 if table is SAMPLES else None])
        rest = ", metrics, `simulated`" if table is SAMPLES else ""
        line = f"| `{table.name}` | {table.rows} | {told}{rest} |"
        assert line in document, f"docs/tasks/convert.md lacks\n{line}"


def test_without_pyarrow_nothing_is_written(
        trace_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(write_tables, "find_spec", lambda _: None)
    assert main(["convert", trace_file, "-o", str(tmp_path / "t.parquet")]) == EXIT_FAILED
    assert "pip install pyarrow" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_folder_that_is_there_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    target = tmp_path / "t.parquet"
    target.mkdir()
    (target / "mine").write_text("kept")
    trace_file = str(DATA / "keras3_fast.xplane.pb.gz")
    assert main(["convert", trace_file, "-o", str(target)]) == EXIT_FAILED
    assert "already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet"] and (target / "mine").read_text() == "kept"
    shutil.rmtree(target)
    convert(trace_file, target)


def test_names_that_are_no_text(tmp_path: Path) -> None:
    """A lone surrogate, which JSON can hold and UTF-8 cannot."""
    source = tmp_path / "hostile.json"
    source.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [
        {"ph": "X", "cat": cat, "name": "a\ud800\x00", "pid": 0, "tid": 7, "ts": 10.0 + i, "dur": 2.0,
         "args": {"device": 0, "stream": 7, "correlation": i}} for i, cat in enumerate(("kernel", "cuda_runtime"))]}))
    with sqlite3.connect(convert(str(source), tmp_path / "t.sqlite")) as tables:
        assert tables.execute("SELECT COUNT(*) FROM gpu_work").fetchall() == [(1,)]
    json.loads(convert(str(source), tmp_path / "out.json").read_text())
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    convert(str(source), tmp_path / "t.parquet")


def test_a_viewer_s_format_read_again_gives_the_same_figures(
        trace_file: str, analyzed: Analysis, json_file: Path, tmp_path: Path) -> None:
    packed = convert(trace_file, tmp_path / "t.json.gz")
    assert gzip.decompress(packed.read_bytes()) == json_file.read_bytes()
    before, after = analyzed, analyze(str(packed))
    assert [(use.gpu, use.kernels, use.busy) for use in after.gpus] == [
        (use.gpu, use.kernels, pytest.approx(use.busy, abs=1e-6)) for use in before.gpus]
    assert after.launch_threads.threads_per_gpu == before.launch_threads.threads_per_gpu
    assert before.simulated and after.simulated


def test_ops_of_the_input_pipeline_are_still_known_in_a_viewer_s_format(tmp_path: Path) -> None:
    """By ids of all 64 bits: without them a generator's PyFunc was taken for an op of the model."""
    source = str(DATA / "keras3_slow_input.xplane.pb.gz")
    before, after = (load([path]) for path in (source, str(convert(source, tmp_path / "t.json"))))
    for stat in ("id", "parent_id"):
        (_, old), (_, new) = (host_stat(trace.host, stat) for trace in (before, after))
        assert len(old) and max(abs(old)) >= 1 << 62 and sorted(old) == sorted(new)
    assert len(input_executors(after)) == len(input_executors(before))


def test_launches_are_tied_to_what_they_started(json_file: Path) -> None:
    events = json.loads(json_file.read_text())["traceEvents"]
    begun = {e["id"]: e["ts"] for e in events if e["ph"] == "s"}
    ended = [(e["id"], e["ts"]) for e in events if e["ph"] == "f"]
    assert ended and all(ts >= begun[number] for number, ts in ended)


def test_a_recording_is_a_row_for_each_sample_and_gpu(tmp_path: Path) -> None:
    source = DATA / "v0_1_0" / "demo.gputop"
    names = [column.name for column in SAMPLES.columns]
    read = in_sqlite(convert(str(source), tmp_path / "r.sqlite"))
    rows = [dict(zip(names, row, strict=True)) for row in read(SAMPLES)]
    with open_recording(source) as recording:
        sample = recording.sample(len(recording) - 1)
        assert len(rows) == sum(len(recording.sample(i).gpus) for i in range(len(recording)))
    for row, gpu in zip(rows[-len(sample.gpus):], sample.gpus, strict=True):
        assert row["uuid"] == gpu.info.uuid and row["power_w"] == gpu["power_w"].value
        unknown = [metric for metric, reading in gpu.readings.items() if reading.value is None]
        assert all(row[metric] is None for metric in unknown)


@pytest.mark.parametrize(("source", "target", "status"), [
    ("TRACE", "t.xlsx", EXIT_USAGE), ("TRACE", "r.csv", EXIT_USAGE), ("missing", "t.json", EXIT_FAILED),
    ("TRACE", "no/such/folder/t.json", EXIT_FAILED),
])
def test_what_cannot_be_converted_leaves_no_file(
        trace_file: str, tmp_path: Path, source: str, target: str, status: int,
        capsys: pytest.CaptureFixture[str]) -> None:
    path = trace_file if source == "TRACE" else str(tmp_path / source)
    assert main(["convert", path, "-o", str(tmp_path / target)]) == status
    assert capsys.readouterr().err.startswith("gputop: ") and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("source", "simulated"), [("demo", "yes"), ("measured", "no")])
def test_each_table_of_a_recording_says_whether_it_is_simulated(tmp_path: Path, source: str, simulated: str) -> None:
    path = DATA / "v0_1_0" / "demo.gputop"
    if source == "measured":
        path = tmp_path / "r.rec"
        with closing(RecordingWriter(path)) as writer:
            writer.append(node_sample(0, 2))
    with sqlite3.connect(convert(str(path), tmp_path / "r.sqlite")) as tables:
        for table in (SAMPLES, HOST):
            assert tables.execute(f"SELECT DISTINCT simulated FROM {table.name}").fetchall() == [(simulated,)]
        assert ADAPTERS.columns[-1].name == "simulated"
    pyarrow = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    table = pyarrow.read_table(convert(str(path), tmp_path / "r.parquet"))
    assert set(table.column("simulated").to_pylist()) == {simulated}


def test_sqlite_has_the_host_of_a_recording_and_its_adapters(tmp_path: Path) -> None:
    source, ports = tmp_path / "r.rec", {"rdma_rx_bytes_per_s": Reading(4e9, "bytes/s")}
    samples = [replace(node_sample(i, 2), host=replace(node_sample(i, 2).host, adapters=(
        AdapterSample("mlx5_0", "ACTIVE", "InfiniBand", 1, ports),))) for i in range(3)]
    with closing(RecordingWriter(source)) as writer:
        for sample in samples:
            writer.append(sample)
    rows = in_sqlite(convert(str(source), tmp_path / "r.sqlite"))
    places = {table: {column.name: i for i, column in enumerate(table.columns)} for table in (HOST, ADAPTERS)}
    assert [(row[0], row[places[HOST]["cpu_ratio"]]) for row in rows(HOST)] == [
        (sample.time_s, sample.host["cpu_ratio"].value) for sample in samples]
    assert [row[:5] for row in rows(ADAPTERS)] == [(s.time_s, "mlx5_0", "ACTIVE", "InfiniBand", 1) for s in samples]
    assert {row[places[ADAPTERS]["rdma_rx_bytes_per_s"]] for row in rows(ADAPTERS)} == {4e9}
    assert {row[places[ADAPTERS]["rdma_tx_bytes_per_s"]] for row in rows(ADAPTERS)} == {None}  # not 0
    assert len(rows(SAMPLES)) == 6
