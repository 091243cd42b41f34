"""A recording as CSV: a row for each sample and GPU, a column for each metric."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from gputop.core.metrics import GPU_METRICS
from gputop.replay.reader import Recording

_ROWS = 1 << 10  # of which a piece of text is made


def pieces(recording: Recording) -> Iterator[bytes]:
    """The table, a piece at a time. Cells are in base units (``_bytes``, ``_w``, ``_hz`` of the heading; ratios 0-1),
    empty where there is no value."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(("time_s", "gpu", "uuid", "name", "state", *GPU_METRICS))
    for i in range(len(recording)):
        sample = recording.sample(i)
        for gpu in sample.gpus:
            values = [gpu[metric].value for metric in GPU_METRICS]
            writer.writerow((sample.time_s, gpu.info.label, gpu.info.uuid, gpu.info.name, gpu.state, *values))
        if i % _ROWS == _ROWS - 1:
            yield text.getvalue().encode()
            text.seek(0)
            text.truncate()
    yield text.getvalue().encode()
