"""Traces of a job's ranks on this node, for gputop on another one (:mod:`gputop.session.other_nodes`)."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from msgspec.structs import replace

from gputop.core.errors import EXIT_USAGE, GputopError, NoDataError
from gputop.core.files import copy_bounded, open_regular, temporary_place
from gputop.launch.serve import make_ready
from gputop.launch.target import find_ranks, is_meeting_address
from gputop.profiler.capture.multi_worker import capture_workers
from gputop.profiler.capture.outcomes import Outcome
from gputop.profiler.capture.plan import Plan
from gputop.profiler.capture.request import CaptureRequest
from gputop.profiler.clocks import ClockBounds
from gputop.profiler.kineto.recorder import ENDING
from gputop.profiler.recording import Recorder
from gputop.profiler.storage import MAX_COPY_BYTES
from gputop.profiler.ways import recorder_of
from gputop.session.other_nodes import ALIVE_PERIOD_S, SCHEMA, Alive, NodeReady, Ranks, RankTrace, Start
from gputop.telemetry.agents import Request, read_line, write_line


def answer(request: Request) -> None:
    """Record the ranks here with whoever has asked, and send the traces. Raises GputopError where none can be
    recorded."""
    if not is_meeting_address(request.ranks_of):
        raise GputopError(f"{request.ranks_of!r} is not a rendezvous address",
                          "Give the job's MASTER_ADDR:MASTER_PORT.", EXIT_USAGE)
    pids = find_ranks(request.ranks_of)
    if not pids:
        raise NoDataError(f"no rank of the job with rendezvous address {request.ranks_of} runs here, or gputop may not "
                          "read its environment", "Log in as the job's user.")
    ready, failed = _make_ready(pids)
    if not ready:
        raise next(iter(failed.values()))
    with tempfile.TemporaryDirectory(prefix="gputop-ranks-", dir=temporary_place()) as folder:
        _record(ready, failed, CaptureRequest(request.seconds, Path(folder), request.force))


def _make_ready(pids: Sequence[int]) -> tuple[list[Recorder], dict[str, GputopError]]:
    """The recorders of those that can be recorded, and why the others cannot."""
    ready, failed = [], {}
    for pid in pids:
        try:
            ready.append(recorder_of(make_ready(pid).address))
        except GputopError as error:
            failed[f"pid:{pid}"] = error
    return ready, failed


def _record(recorders: Sequence[Recorder], failed: dict[str, GputopError], request: CaptureRequest) -> None:
    """Raises GputopError."""
    received: list[float] = []
    to_node, from_node = sys.stdin.buffer, sys.stdout.buffer

    over, quiet = threading.Event(), threading.Lock()

    def alive() -> None:
        while not over.wait(ALIVE_PERIOD_S):
            with quiet, contextlib.suppress(OSError):
                if not over.is_set():
                    write_line(from_node, Alive(SCHEMA))

    def agree(plan: Plan, _: float) -> tuple[Plan, float]:
        lead_s = max(recorder.limits.lead_s for recorder in recorders)
        write_line(from_node, NodeReady(SCHEMA, plan.chosen_s, lead_s, time.time()))
        start = read_line(to_node, Start)
        received.append(time.time())
        threading.Thread(target=alive, name="gputop-alive", daemon=True).start()
        ahead_s = ClockBounds(min(start.low_s, received[0] - start.now_s), received[0] - start.now_s).estimate_s()
        return replace(plan, chosen_s=min(plan.chosen_s, start.seconds), overview_s=0.0), start.start_s + ahead_s

    try:
        captured = capture_workers(recorders, request, lambda _: None, lambda _: None, threading.Event(), agree)
    finally:
        with quiet:
            over.set()
    outcomes = captured.outcomes
    refused = tuple(RankTrace(address, "", problem=error.message, fix=error.fix) for address, error in failed.items())
    write_line(from_node, Ranks(SCHEMA, received[0], (*map(_rank_of, outcomes), *refused)))
    for outcome in outcomes:
        if outcome.result is not None:
            _send(outcome.result.path, from_node)
    from_node.flush()


def _rank_of(outcome: Outcome) -> RankTrace:
    result, error = outcome.result, outcome.error
    if result is None:
        return RankTrace(outcome.address, outcome.name, problem=error.message if error is not None else "nothing came",
                         fix=error.fix if error is not None else "")
    name = result.path.name.removesuffix(ENDING)
    return RankTrace(outcome.address, name, result.bytes, result.took_s, outcome.began_s)


def _send(path: Path, out: IO[bytes]) -> None:
    with open_regular(path, follow_links=False) as trace:
        copy_bounded(trace, out, MAX_COPY_BYTES)  # type: ignore[arg-type]
