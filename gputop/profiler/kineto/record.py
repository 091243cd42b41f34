"""Records running PyTorch jobs whose processes are clients: a probe, a plan, the recording, the traces.

Several processes, the ranks of a job on this node, are recorded over the same seconds: each gets the same start in its
config. A recording cannot be ended early: kineto has no message for that. The plan therefore counts with what the job
makes while its trace is built, besides the trace.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from gputop.core.errors import GputopError
from gputop.core.files import UnsafeFile, open_regular
from gputop.core.proc import ENVIRON_BYTES, read
from gputop.profiler.capture.footprint import free_resources
from gputop.profiler.capture.job_memory import Cost, JobMemory
from gputop.profiler.capture.plan import PROBE_S, FreeResources, Plan, Probe, needs_probe, plan
from gputop.profiler.client import CaptureResult, Progress
from gputop.profiler.discovery import rank_of
from gputop.profiler.kineto.clients import Client, is_same
from gputop.profiler.kineto.daemon import Daemon, Event, serving, wait
from gputop.profiler.kineto.folder import TRACE_PREFIX, SocketFolder
from gputop.profiler.kineto.protocol import RecordingConfig
from gputop.profiler.storage import MAX_COPY_BYTES, RunFolder

ENDING = ".pt.trace.json"  # as torch.profiler's own handler for TensorBoard names them
POLL_PERIOD_S = 5.0  # kineto's, unless a base config says otherwise
_POLL_TIMEOUT_S = 2 * POLL_PERIOD_S + 5
_LEAD_S = 0.5  # of a common start, after the latest poll that fetches it
_WRITE_TIMEOUT_S = 10.0  # for the file, after the recording and a poll; while the job builds it the polls say so
_BUILD_TIMEOUT_S = 180.0
_PERIOD_S = 0.125
# Resident memory of the job while 20,000 to 300,000 events became a trace (torch 2.13 on the CPU).
EVENT_BYTES = 2500
_MAX_PROBE_BYTES = 1 << 30
_SCAN_BYTES = 1 << 20
_EVENT = re.compile(rb'"ph": "X",\s{0,16}"cat": "([a-z_]{1,40})"')
_DEVICE = frozenset((b"kernel", b"gpu_memcpy", b"gpu_memset"))
_OVERLAP = 128  # of two pieces, so that no event is cut


@dataclass(frozen=True, slots=True)
class Grain:
    """What is recorded besides operations and kernels."""

    stacks: bool = False
    modules: bool = False


@dataclass(frozen=True, slots=True)
class KinetoCapture:
    """Traces by PID in ``results``, ``errors`` of processes that gave none. ``cost`` is that of the first process."""

    run_dir: Path
    plan: Plan
    cost: Cost
    results: dict[int, CaptureResult]
    errors: dict[int, GputopError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Asked:
    """What is wanted: at most ``seconds``, in a run folder of ``logdir``; ``force`` without a probe."""

    seconds: float
    logdir: Path
    force: bool = False
    grain: Grain | None = None


@dataclass(slots=True)
class Recorded:
    """A process on its way through a recording."""

    client: Client
    daemon: Daemon
    file: str = ""  # the name in the folder
    fetched_s: float = 0.0  # monotonic
    last_poll_s: float = 0.0
    busy_s: float = 0.0  # the last poll that said it records or builds
    error: GputopError | None = None


def record(clients: Sequence[Client], *, seconds: float, logdir: str | Path, force: bool = False,
           grain: Grain | None = None, on_progress: Callable[[Progress], None] | None = None,
           on_plan: Callable[[Plan], None] | None = None, stop: threading.Event | None = None) -> KinetoCapture:
    """Capture at most ``seconds`` of each client, at once, into one run folder below ``logdir``. Blocks.

    ``force``: exactly ``seconds``, without a probe. ``grain`` None: chosen by the probe. ``stop`` ends the wait, not
    the job's recording. Raises GputopError where no process gave a trace.
    """
    report, stop = on_progress or (lambda _: None), stop or threading.Event()
    memory = JobMemory(clients[0].pid, report)
    with contextlib.ExitStack() as stack:
        run = RunFolder.create(logdir, socket.gethostname(), ending=ENDING)
        stack.callback(run.discard)
        recorder = Recorder([Recorded(client, daemon) for client, daemon in _serve(clients, stack, stop)], memory, stop)
        recorder.wait_for_polls(seconds)
        return recorder.capture(run, Asked(seconds, Path(logdir).expanduser().absolute(), force, grain), on_plan)


def _serve(clients: Sequence[Client], stack: contextlib.ExitStack,
           stop: threading.Event) -> Iterator[tuple[Client, Daemon]]:
    """The daemon of each client; those of one folder share it. Raises GputopError."""
    daemons: dict[tuple[int, int], Daemon] = {}
    for client in clients:
        if client.folder is None:
            raise unsafe(client.pid)
        folder = stack.enter_context(SocketFolder.open(client.pid, client.folder, client.uid))
        state = os.fstat(folder.folder.fd)
        if not is_same(client):
            raise GputopError(f"process {client.pid} has ended", "Nothing was recorded.")
        key = state.st_dev, state.st_ino
        if key not in daemons:
            daemons[key] = stack.enter_context(serving(folder, stop.is_set))
        yield client, daemons[key]


def unsafe(pid: int) -> GputopError:
    """The error of a client that any local user can command."""
    return GputopError(
        f"process {pid} runs with KINETO_USE_DAEMON and without KINETO_IPC_SOCKET_DIR: any user of this node can have "
        "it overwrite files, so gputop does not use it",
        "Restart it with gputop run, or without KINETO_USE_DAEMON: gputop then switches it on safely.")


class Recorder:
    """One recording after another of the same processes."""

    def __init__(self, recorded: Sequence[Recorded], memory: JobMemory, stop: threading.Event) -> None:
        self._recorded, self._memory, self._stop = recorded, memory, stop
        self._daemons = list({id(r.daemon): r.daemon for r in recorded}.values())
        self._by_pid = {r.client.pid: r for r in recorded}

    def capture(self, run: RunFolder, asked: Asked, on_plan: Callable[[Plan], None] | None) -> KinetoCapture:
        """Probe, plan, record and save. Raises GputopError."""
        seconds, grain = asked.seconds, asked.grain
        chosen = Plan(seconds, seconds, f"full length, {'no' if asked.force else 'too short for a'} probe")
        if not asked.force and needs_probe(seconds):
            chosen, grain = self.probe(seconds, asked.logdir, grain)
        if on_plan is not None:
            on_plan(chosen)
        began = time.monotonic()
        self.record(chosen.chosen_s, grain or Grain(), "recording")
        took_s = time.monotonic() - began
        self._memory(Progress("saving", took_s, chosen.chosen_s))
        results, errors = {}, {r.client.pid: r.error for r in self._recorded if r.error is not None}
        for r in self._alive:
            try:
                results[r.client.pid] = self._save(r, run, asked, took_s)
            except GputopError as error:
                errors[r.client.pid] = error
        if not results:
            raise next(iter(errors.values()))
        return KinetoCapture(run.path, chosen, self._memory.cost(took_s, chosen.chosen_s), results, errors)

    @property
    def _alive(self) -> list[Recorded]:
        return [r for r in self._recorded if r.error is None]

    def wait_for_polls(self, seconds: float) -> None:
        """Until each process has polled and is ready; those that do not are out of it. Raises GputopError for all."""
        began = time.monotonic()
        ready: set[int] = set()
        while len(ready) < len(self._alive):
            elapsed_s = time.monotonic() - began
            ready |= {event.pid for event in self._step("connecting", elapsed_s, seconds) if event.ready}
            for r in self._alive:
                if r.client.pid in ready:
                    continue
                if r.last_poll_s and elapsed_s > _BUILD_TIMEOUT_S:
                    r.error = GputopError(f"process {r.client.pid} is busy with another recording for "
                                          f"{elapsed_s:.0f} s", "Its own torch.profiler or another tool records it.")
                elif not r.last_poll_s and elapsed_s > _POLL_TIMEOUT_S:
                    r.error = GputopError(
                        f"the kineto of process {r.client.pid} does not ask for work, though its socket is open",
                        "The job is stopped, or its kineto thread hangs: py-spy dump shows where. A restart helps.")
        self._raise_if_none()

    def probe(self, seconds: float, logdir: Path, grain: Grain | None) -> tuple[Plan, Grain]:
        """Record half a second and plan by it; the probe's files are gone afterwards. Raises GputopError."""
        before = self._memory.growth
        began = time.monotonic()
        self.record(PROBE_S, grain or Grain(), "probing")
        took_s = time.monotonic() - began
        probes = []
        for r in self._alive:
            try:
                probes.append((r, _measure(r, took_s, _growth(before, self._memory.growth))))
            except GputopError as error:
                r.error = error
            finally:
                r.daemon.folder.folder.remove(r.file)
        self._raise_if_none()
        rank, probe = max(probes, key=lambda one: one[1].events_per_s)
        free = free_resources("127.0.0.1", rank.client.pid, logdir)
        with contextlib.suppress(OSError):
            disk = os.fstatvfs(rank.daemon.folder.folder.fd)
            free = replace(free, disk_bytes=min(free.disk_bytes or float("inf"),
                                                disk.f_bavail * disk.f_frsize / len(self._recorded)))
        for name in ("shared_bytes", "job_bytes"):
            left = getattr(free, name)
            if left is not None:
                free = replace(free, **{name: left / len(self._recorded)})
        return self._plan(seconds, probe, free), grain or grain_for(probe)

    def _plan(self, seconds: float, probe: Probe, free: FreeResources) -> Plan:
        return replace(plan(seconds, probe, free), overview_s=0.0)

    def record(self, seconds: float, grain: Grain, phase: str) -> None:
        """One recording of all processes, up to their complete files. What goes wrong is each process's own; raises
        GputopError where it is that of all."""
        token = secrets.token_hex(6)
        several = len(self._alive) > 1
        start_s = time.time() + POLL_PERIOD_S + _LEAD_S if several else 0.0
        for r in self._alive:
            folder = r.daemon.folder
            config = RecordingConfig(folder.path / f"{TRACE_PREFIX}{token}.json", max(1, round(1000 * seconds)),
                                     round(1000 * start_s), grain.stacks, grain.modules)
            r.file, r.fetched_s, r.busy_s = config.written(r.client.own_pid), 0.0, 0.0
            try:
                r.daemon.register(r.client.pid, config)
            except ValueError as error:
                r.error = GputopError(str(error), "Start the job with gputop run.")
        began = time.monotonic()
        try:
            waiting = self._alive
            while waiting:
                elapsed_s = time.monotonic() - began
                building = all(r.fetched_s and time.monotonic() > r.fetched_s + seconds for r in waiting)
                self._step("receiving" if building and phase == "recording" else phase, elapsed_s, seconds)
                waiting = [r for r in waiting if not self._is_done(r, elapsed_s, seconds, start_s)]
        finally:
            for r in self._recorded:
                r.daemon.withdraw(r.client.pid)
        self._raise_if_none()

    def _is_done(self, r: Recorded, elapsed_s: float, seconds: float, start_s: float) -> bool:
        """Whether its file is there, or will not come: then its error is set."""
        folder, now = r.daemon.folder.folder, time.monotonic()
        if r.fetched_s and folder.has(r.file):
            return True
        pid = r.client.pid
        if not is_same(r.client):
            r.error = GputopError(f"process {pid} ended before its trace was written",
                                  "The trace is lost; capture earlier, or for a shorter time.")
        elif not r.fetched_s:
            if elapsed_s > _POLL_TIMEOUT_S:
                r.error = GputopError(f"process {pid} did not fetch the request within {elapsed_s:.0f} s",
                                      "It is stopped, hangs, or is recorded by its own torch.profiler. Nothing was "
                                      "recorded.")
        else:
            due_s = r.fetched_s + seconds + max(0.0, start_s - time.time()) + POLL_PERIOD_S + _WRITE_TIMEOUT_S
            if now > max(due_s, r.busy_s + POLL_PERIOD_S + _WRITE_TIMEOUT_S) or now > due_s + _BUILD_TIMEOUT_S:
                r.error = GputopError(
                    f"process {pid} took the request and wrote no trace within {now - r.fetched_s:.0f} s",
                    "Its torch.profiler was busy, or it cannot write to "
                    f"{r.daemon.folder.path} (disk full?). The job itself goes on.")
        return r.error is not None

    def _step(self, phase: str, elapsed_s: float, asked_s: float) -> list[Event]:
        """Answer for a moment, keep what came, report. Raises GputopError once stopped."""
        events = wait(self._daemons, _PERIOD_S)
        now = time.monotonic()
        for event in events:
            r = self._by_pid.get(event.pid)
            if r is None or event.report is not None:
                continue
            r.last_poll_s = now
            if event.configured:
                r.fetched_s = now
            if not event.ready:
                r.busy_s = now
        self._memory(Progress(phase, elapsed_s, asked_s))  # type: ignore[arg-type]
        if self._stop.is_set():
            raise GputopError("the capture was stopped",
                              "A recording that has begun ends in the job by itself, and its trace is thrown away.")
        return events

    def _save(self, r: Recorded, run: RunFolder, asked: Asked, took_s: float) -> CaptureResult:
        """The trace of one process in the run folder. Raises GputopError."""
        pid, rank, folder = r.client.pid, rank_name(r.client.pid), run
        if rank or len(self._recorded) > 1:
            folder = RunFolder.create(asked.logdir, f"{run.host}_{rank or f'pid{pid}'}", run.path.name, ENDING)
        try:
            with _open(r, MAX_COPY_BYTES) as source:
                bytes_ = os.fstat(source.fileno()).st_size
                path = folder.adopt(source, Path(f"/proc/{pid}/root{r.daemon.folder.path}/{r.file}"), self._stop.is_set)
        finally:
            if folder is not run:
                folder.discard()
            r.daemon.folder.folder.remove(r.file)
        return CaptureResult(f"pid {pid}", path, run.path, run.path.name, asked.seconds, took_s, bytes_, False,
                             "server disk")

    def _raise_if_none(self) -> None:
        errors = [r.error for r in self._recorded if r.error is not None]
        if len(errors) == len(self._recorded):
            raise errors[0]


def _growth(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def grain_for(probe: Probe) -> Grain:
    """What is worth its cost in a job that makes so many events."""
    return Grain()


def _open(r: Recorded, max_bytes: int) -> BinaryIO:
    """The file that the process wrote. Raises GputopError for anything but a regular file of its user."""
    try:
        return open_regular(r.file, max_bytes, follow_links=False, owners=frozenset({r.client.uid}),
                            folder_fd=r.daemon.folder.folder.fd)
    except OSError as error:
        reason = error.strerror or str(error)
        raise GputopError(f"the trace of process {r.client.pid} is not taken: {reason}",
                          "Somebody exchanged it." if isinstance(error, UnsafeFile) else "Capture again.") from None


def _measure(r: Recorded, took_s: float, growth: int | None) -> Probe:
    """What the file of a probe shows. Raises GputopError."""
    from gputop.profiler.capture.volume import step_time

    with _open(r, _MAX_PROBE_BYTES) as file:
        host, devices = count_events(file)
        bytes_ = os.fstat(file.fileno()).st_size
        found = step_time(Path(f"/proc/self/fd/{file.fileno()}"), host + devices)
    step_s, sure = found or (None, False)
    multiple = EVENT_BYTES * (host + devices) / bytes_ if bytes_ else 0.0
    return Probe(PROBE_S, took_s, bytes_, host, devices, step_s, growth, sure, multiple)


def count_events(file: BinaryIO) -> tuple[int, int]:
    """Events of the host and of devices in kineto's JSON, by their beginnings; not decoded. Raises OSError."""
    host = devices = 0
    rest = b""
    while data := file.read(_SCAN_BYTES):
        text = rest + data
        end = 0
        for match in _EVENT.finditer(text):
            end = match.end()
            if match[1] in _DEVICE:
                devices += 1
            else:
                host += 1
        rest = text[max(end, len(text) - _OVERLAP):]
    return host, devices


def rank_name(pid: int) -> str:
    """"rank3" by the environment that the process was started with; empty where it has no rank."""
    try:
        text = read(f"/proc/{pid}/environ", ENVIRON_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    environ = dict(entry.partition("=")[::2] for entry in text.split("\0") if "=" in entry)
    return (rank_of(environ) or "").replace(" ", "")[:32]
