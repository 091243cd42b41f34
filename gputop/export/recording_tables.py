"""A recording as tables. Figures are in base units (``_bytes``, ``_w``, ``_hz`` of their names; ratios 0-1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gputop.core.metrics import ADAPTER_METRICS, GPU_METRICS, HOST_METRICS
from gputop.core.samples import NodeSample
from gputop.export.write_tables import BATCH_ROWS, Batch, SqlTable, SqlTables
from gputop.replay.reader import Recording

Row = tuple[Any, ...]

_SIMULATED = ", simulated TEXT NOT NULL"  # yes or no, in each row: rows of several files are put together
SAMPLES = SqlTable.of("samples", "a sample of a GPU", (
    "time_s REAL NOT NULL, gpu TEXT NOT NULL, uuid TEXT, name TEXT, state TEXT, "
    + ", ".join(f"{metric} REAL" for metric in GPU_METRICS) + _SIMULATED))
HOST = SqlTable.of("host", "a sample of the host", (
    "time_s REAL NOT NULL, host TEXT, " + ", ".join(f"{metric} REAL" for metric in HOST_METRICS) + _SIMULATED))
ADAPTERS = SqlTable.of("rdma", "a sample of an RDMA adapter's port", (
    "time_s REAL NOT NULL, adapter TEXT NOT NULL, state TEXT, link_layer TEXT, numa_node INTEGER, "
    + ", ".join(f"{metric} REAL" for metric in ADAPTER_METRICS) + _SIMULATED))


def recording_tables(recording: Recording, *, whole: bool = True) -> SqlTables:
    """``whole``: or else the GPUs alone, for formats that hold one table."""
    tables = ((SAMPLES, _gpus), (HOST, _host), (ADAPTERS, _adapters))
    return SqlTables((table, _batches(recording, table, rows)) for table, rows in (tables if whole else tables[:1]))


def _simulated(sample: NodeSample) -> str:
    return "yes" if sample.simulated else "no"


def _gpus(sample: NodeSample) -> Iterator[Row]:
    for gpu in sample.gpus:
        yield (sample.time_s, gpu.info.label, gpu.info.uuid, gpu.info.name, gpu.state,
               *(gpu[metric].value for metric in GPU_METRICS), _simulated(sample))


def _host(sample: NodeSample) -> Iterator[Row]:
    yield (sample.time_s, sample.host.hostname, *(sample.host[metric].value for metric in HOST_METRICS),
           _simulated(sample))


def _adapters(sample: NodeSample) -> Iterator[Row]:
    for port in sample.host.adapters:
        yield (sample.time_s, port.name, port.state, port.link_layer, port.numa_node,
               *(port[metric].value for metric in ADAPTER_METRICS), _simulated(sample))


def _batches(recording: Recording, table: SqlTable, rows: Callable[[NodeSample], Iterable[Row]]) -> Iterator[Batch]:
    columns: list[list[Any]] = [[] for _ in table.columns]
    for i in range(len(recording)):
        for row in rows(recording.sample(i)):
            for column, value in zip(columns, row, strict=True):
                column.append(value)
        if len(columns[0]) >= BATCH_ROWS:
            yield columns
            columns = [[] for _ in table.columns]
    if columns[0]:
        yield columns
