"""A trace read for a comparison in a process of its own: ``python -m gputop.comparison.worker PATH`` prints it as JSON.

Reading a trace takes seconds and memory that the monitor must not give. What is left of it for a comparison is small:
the monitor keeps it, and compares without reading anything twice.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from gputop.analysis.results import Analysis
from gputop.comparison.series import StepSeries
from gputop.comparison.sides import Side
from gputop.core.errors import GputopError
from gputop.core.findings import Finding
from gputop.diagnosis.worker import answer, run_in_worker
from gputop.trace.model import F64


class _Series(msgspec.Struct, frozen=True):
    """A :class:`StepSeries` whose arrays are the bytes of 64-bit floats: they hold NaN, which JSON has not."""

    step_s: bytes
    parts: Mapping[str, bytes]
    gpus: Mapping[int, Mapping[str, bytes]]
    waiting: bytes | None


class _Read(msgspec.Struct, frozen=True):
    analysis: Analysis
    series: _Series | None
    gpu_names: tuple[str, ...]
    findings_at_capture: tuple[Finding, ...] | None


def read_in_worker(path: str, stop: threading.Event | None = None) -> Side:
    """The side that a trace makes; blocks.

    Raises GputopError as :func:`gputop.comparison.sides.read_side` does and
    :func:`gputop.diagnosis.worker.analyze_in_worker`.
    """
    read = run_in_worker("gputop.comparison.worker", [path], _Read, stop, what="comparison")
    try:
        series = None if read.series is None else _unpacked(read.series)
    except ValueError as error:
        raise GputopError(f"The comparison of {path} was answered with no numbers: {error}",
                          "Please report this with the trace.") from error
    return Side(path, "trace", read.analysis, series=series, gpu_names=read.gpu_names,
                findings_at_capture=read.findings_at_capture)


def _packed(series: StepSeries) -> _Series:
    return _Series(series.step_s.tobytes(), {name: part.tobytes() for name, part in series.parts.items()},
                   {gpu: {name: values.astype(float).tobytes() for name, values in figures.items()}
                    for gpu, figures in series.gpus.items()},
                   None if series.waiting is None else series.waiting.tobytes())


def _unpacked(series: _Series) -> StepSeries:
    count = len(_floats(series.step_s))

    def numbers(data: bytes) -> F64:
        found = _floats(data)
        if len(found) != count:
            raise ValueError(f"{len(found)} figures for {count} steps")
        return found

    return StepSeries(numbers(series.step_s), {name: numbers(part) for name, part in series.parts.items()},
                      {gpu: {name: numbers(values) for name, values in figures.items()}
                       for gpu, figures in series.gpus.items()},
                      None if series.waiting is None else numbers(series.waiting))


def _floats(data: bytes) -> F64:
    return np.frombuffer(data, np.float64)


def main(arguments: Sequence[str]) -> int:
    """Read the trace and print it."""
    from gputop.comparison.sides import read_side

    def work() -> _Read:
        side = read_side(arguments[0])
        assert side.analysis is not None
        return _Read(side.analysis, None if side.series is None else _packed(side.series), side.gpu_names,
                     side.findings_at_capture)

    return answer(work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
