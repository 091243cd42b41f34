"""Recording and capturing by XProf's way, with what most tests do not care for left out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from gputop.profiler.capture import multi_worker, safe_capture
from gputop.profiler.capture.job_memory import Cost
from gputop.profiler.capture.outcomes import MultiWorkerCapture
from gputop.profiler.capture.plan import Plan
from gputop.profiler.capture.request import CaptureRequest
from gputop.profiler.recording import CaptureResult, Progress, Recorder, RecordingOrder
from gputop.profiler.ways import recorder_of

Address = tuple[str, int | None]


def ignore(_: object) -> None:
    pass


def capture(address: str, *, seconds: float = 10.0, logdir: str | Path, pid: int | None = None,
            on_progress: Callable[[Progress], None] = ignore, stop: threading.Event | None = None,
            **recording: Any) -> CaptureResult:
    return recorder_of(address, pid).record(RecordingOrder(seconds, logdir, **recording), on_progress,
                                            stop or threading.Event())


def capture_with_probe(address: str, *, seconds: float, logdir: Path, pid: int | None = None, force: bool = False,
                       on_progress: Callable[[Progress], None] = ignore, on_plan: Callable[[Plan], None] = ignore,
                       stop: threading.Event | None = None) -> tuple[CaptureResult, Plan, Cost]:
    return safe_capture.capture_with_probe(recorder_of(address, pid), CaptureRequest(seconds, logdir, force),
                                           on_progress, on_plan, stop or threading.Event())


def capture_workers(servers: Sequence[Address], *, seconds: float, logdir: Path, force: bool = False,
                    on_progress: Callable[[Progress], None] = ignore, on_plan: Callable[[Plan], None] = ignore,
                    stop: threading.Event | None = None) -> MultiWorkerCapture:
    return multi_worker.capture_workers(recorders_of(servers), CaptureRequest(seconds, logdir, force), on_progress,
                                        on_plan, stop or threading.Event())


def recorders_of(servers: Iterable[Address]) -> list[Recorder]:
    return [recorder_of(address, pid) for address, pid in servers]


def names_below(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if p.is_file())
