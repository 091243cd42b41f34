"""Records a PyTorch process by torch.profiler in a thread of its own, where kineto's daemon mode is out of reach.

That is a process that has used torch.profiler itself. The way has a price: when the recording ends, torch.profiler
holds Python's lock, and with it the job, for about half a second per 25,000 events (torch 2.13). So it is taken only
after a question, and records less.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gputop.core.errors import GputopError
from gputop.launch import environment, target
from gputop.launch.attach import ANSWER_TIMEOUT_S, running_in, silent_text
from gputop.launch.kineto import FRAMEWORKS, PASTE, read_report, source_of
from gputop.profiler.capture.job_memory import JobMemory
from gputop.profiler.capture.plan import FreeResources, Plan, Probe
from gputop.profiler.client import Progress
from gputop.profiler.kineto.clients import Client
from gputop.profiler.kineto.daemon import serving
from gputop.profiler.kineto.folder import TRACE_PREFIX, SocketFolder
from gputop.profiler.kineto.record import ENDING, Asked, Grain, KinetoCapture, Recorded, Recorder
from gputop.profiler.storage import RunFolder

HOLD_S_PER_EVENT = 0.5 / 25_000  # torch 2.13 on the CPU: 0.53 to 0.56 s for 27,000 events
_MAX_HOLD_S = 1.0
_MIN_S = 0.2
WHAT_THE_THREAD_DOES = (
    "It has used torch.profiler before, so only torch.profiler itself can record it. That holds the job for about half "
    "a second per 25,000 events, when the recording ends; gputop keeps this below a second or two.")
_END_TIMEOUT_S = 60.0


def record_by_thread(pid: int, *, seconds: float, logdir: str | Path, force: bool = False,
                     on_progress: Callable[[Progress], None] | None = None,
                     on_plan: Callable[[Plan], None] | None = None,
                     stop: threading.Event | None = None) -> KinetoCapture:
    """Capture at most ``seconds`` of a process. Blocks. Raises GputopError."""
    process = target.examine(pid, frameworks=FRAMEWORKS)
    client = Client(pid, pid, process.uid, None, process.started)
    memory = JobMemory(pid, on_progress or (lambda _: None))
    stop = stop or threading.Event()
    with contextlib.ExitStack() as stack:
        run = RunFolder.create(logdir, socket.gethostname(), ending=ENDING)
        stack.callback(run.discard)
        folder = stack.enter_context(SocketFolder.create(pid, process.uid))
        stack.callback(folder.remove)
        server = stack.enter_context(serving(folder, stop.is_set))
        recorder = _ThreadRecorder(process, Recorded(client, server), memory, stop)
        return recorder.capture(run, Asked(seconds, Path(logdir).expanduser().absolute(), force), on_plan)


class _ThreadRecorder(Recorder):
    """Has the process's torch.profiler record it, once for each recording."""

    def __init__(self, process: target.Target, recorded: Recorded, memory: JobMemory, stop: threading.Event) -> None:
        super().__init__([recorded], memory, stop)
        self._process, self._only = process, recorded

    def record(self, seconds: float, grain: Grain, phase: str) -> None:
        """See :meth:`Recorder.record`; of the grain nothing is asked."""
        token, r = environment.new_token(), self._only
        r.file = f"{TRACE_PREFIX}{secrets.token_hex(6)}.json"
        folder = str(r.daemon.folder.path)
        until_s = time.time() + ANSWER_TIMEOUT_S
        source = source_of(f"record_now({folder!r}, {r.file!r}, {seconds}, {token!r}, {until_s})")
        began = time.monotonic()
        with running_in(self._process, silent_text(source, "gputop_kineto")):
            self._wait_for(token, "recording", began + ANSWER_TIMEOUT_S, phase, seconds)
        self._wait_for(token, "written", time.monotonic() + seconds + _END_TIMEOUT_S, phase, seconds)

    def _wait_for(self, token: str, wanted: str, deadline: float, phase: str, seconds: float) -> None:
        """Raises GputopError where the process reports anything else, or nothing until then."""
        pid, began = self._process.pid, time.monotonic()
        while time.monotonic() < deadline:
            for event in self._step(phase, time.monotonic() - began, seconds):
                report = read_report(event.report, token) if event.pid == pid else None
                if report is None:
                    continue
                if report[0] in (wanted, "written"):
                    return
                if report[0] != "recording":
                    raise GputopError(f"torch.profiler did not record process {pid}: {report[1] or report[0]}", PASTE)
            if not Path(f"/proc/{pid}").exists():
                raise GputopError(f"process {pid} ended before its trace was written", "Capture earlier.")
        raise GputopError(f"process {pid} did not report within {time.monotonic() - began:.0f} s that it is {wanted}",
                          f"py-spy dump --pid {pid} shows where it is. Else: {PASTE}")

    def _plan(self, seconds: float, probe: Probe, free: FreeResources) -> Plan:
        """As short as the pause is to be."""
        chosen = super()._plan(seconds, probe, free)
        bearable_s = max(_MIN_S, _MAX_HOLD_S / HOLD_S_PER_EVENT / max(1.0, probe.events_per_s))
        if chosen.chosen_s <= bearable_s:
            return chosen
        return replace(chosen, chosen_s=round(bearable_s, 1),
                       why=f"torch.profiler holds the job for {_MAX_HOLD_S:g} s at the end of a longer one")
