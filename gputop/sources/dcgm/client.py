"""The DCGM host engine, read by a daemon thread of its own, so that no caller waits for it.

A caller requests an update once per tick and takes the newest snapshot. The thread connects
(it searches the bindings only where something listens), sets the watches it may, reads, and
reconnects with a back-off after the engine went away.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from msgspec.structs import replace

from gputop.core.errors import GputopError
from gputop.sources.dcgm.bindings import find_installed, load
from gputop.sources.dcgm.connection import MIN_WATCH_S, Address, Engine, EngineError
from gputop.sources.dcgm.engine_reader import EngineAnswer, EngineReader, clock_text
from gputop.sources.dcgm.fields import FUNCTION_NOT_FOUND
from gputop.sources.dcgm.watches import Subscription

REACH_TIMEOUT_S = 0.5
HANG_TIMEOUT_S = 5.0  # connecting may import the bindings from a slow disk; no call takes this long
CLOSE_TIMEOUT_S = 0.5
START = "sudo systemctl start nvidia-dcgm   # or: sudo nv-hostengine"
FIRST_RETRY_S = 1.0
MAX_RETRY_S = 60.0
STABLE_CONNECTION_S = 10.0  # a connection of this age resets the back-off


class UpdateRequests:
    """Requests that any thread makes and one thread answers: an answer serves all requests made before it was begun.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._made = self._answered = 0
        self._made_s = 0.0  # monotonic: when the last one was made
        self._ended = False

    def make(self) -> bool:
        """Request an update; returns at once, False after the end."""
        with self._changed:
            if not self._ended:
                self._made += 1
                self._made_s = time.monotonic()
                self._changed.notify_all()
            return not self._ended

    def wait(self, timeout_s: float) -> bool:
        """Wait for the last request's answer; False if that takes longer than ``timeout_s``.

        The time counts from the request, so that several callers of one answer share one timeout.
        """
        with self._changed:
            made, left_s = self._made, self._made_s + timeout_s - time.monotonic()
            return self._changed.wait_for(lambda: self._answered >= made, max(0.0, left_s))

    def take(self) -> int | None:
        """Wait for a request without an answer, on the thread that answers; returns its number, None after the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._answered < self._made)
            return None if self._ended else self._made

    def answer(self, number: int) -> None:
        """Note that the request of this number, and all before it, have their answer."""
        with self._changed:
            self._answered = number
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()


class Backoff:
    """A second after the first failure, then twice as long each time. All times are monotonic."""

    def __init__(self) -> None:
        self._retry_s = FIRST_RETRY_S
        self._due_s = -math.inf
        self._connected_s = 0.0

    def due(self, now_s: float) -> bool:
        return now_s >= self._due_s

    def connected(self, now_s: float) -> None:
        self._connected_s = now_s

    def answered(self, now_s: float) -> None:
        """Note an answer over the connection: one that holds forgets the failures before it."""
        if now_s - self._connected_s > STABLE_CONNECTION_S:
            self._retry_s = FIRST_RETRY_S

    def failed(self, now_s: float) -> None:
        self._due_s = now_s + self._retry_s
        self._retry_s = min(MAX_RETRY_S, 2 * self._retry_s)


class TickPace:
    """``interval_s`` is the one set at first, and another one once three ticks in a row have kept to it."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._tick_s: float | None = None
        self._gaps_s: list[float] = []  # the last three

    def note(self, tick_s: float) -> bool:
        """Note a tick at ``tick_s`` (Unix time); returns False for the one that was noted last."""
        if tick_s == self._tick_s:
            return False
        if self._tick_s is not None:
            self._gaps_s = [*self._gaps_s[-2:], tick_s - self._tick_s]
            least_s, most_s, pace_s = min(self._gaps_s), max(self._gaps_s), max(MIN_WATCH_S, sum(self._gaps_s) / 3)
            if len(self._gaps_s) == 3 and 0 < most_s < 1.3 * least_s and not 0.7 < pace_s / self.interval_s < 1.4:
                self.interval_s = round(pace_s, 1)
        self._tick_s = tick_s
        return True


class DcgmClient:
    """Thread-safe. ``bindings`` is the folder of ``--dcgm-bindings``; without it ``root`` and ``env`` are searched."""

    def __init__(self, address: Address, *, bindings: Path | None = None, interval_s: float = 1.0,
                 clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time,
                 root: Path = Path("/"), env: Mapping[str, str] = os.environ) -> None:
        self.address = address
        self._clock = clock
        self._wall_clock = wall_clock
        self._lock = threading.Lock()  # of the next two, and the start of the thread
        self._subscription = Subscription()
        self._pace = TickPace(interval_s)
        self._requests = UpdateRequests()
        self._thread: threading.Thread | None = None
        self._step_began: tuple[float, float] | None = None  # the step under way: monotonic and Unix time
        self._snapshot = EngineAnswer()
        # Below: used by the thread only.
        self._searched = root, env, bindings
        self._preferred = 0  # the major version of the bindings that the engine understands, which come first
        self._backoff = Backoff()
        self._reader: EngineReader | None = None  # None: not connected

    # -- for callers --------------------------------------------------------------------------

    def subscribe(self, ids: Iterable[int], uuids: Iterable[str] | None, *, profiling: bool = False,
                  ordinary: bool = False) -> None:
        """Read ``ids`` of the GPUs ``uuids`` (None: all) from now on, in addition to earlier subscriptions."""
        with self._lock:
            old = self._subscription
            self._subscription = Subscription(
                tuple(dict.fromkeys((*old.ids, *ids))),
                None if uuids is None or old.uuids is None else old.uuids | frozenset(uuids),
                None if profiling else old.profiled, old.watch_ordinary or ordinary)

    def choose(self, uuids: Iterable[str], profiled: Iterable[str]) -> None:
        """Read and watch these GPUs alone from now on, and the profiling fields of those that are ``profiled``."""
        with self._lock:
            self._subscription = replace(self._subscription, uuids=frozenset(uuids), profiled=frozenset(profiled))

    def request_update(self, tick_s: float) -> None:
        """Request one read of the engine for the tick at ``tick_s`` (Unix time); returns at once."""
        with self._lock:
            if self._pace.note(tick_s) and self._requests.make() and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gputop-dcgm", daemon=True)
                self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the last request's answer; False if that takes longer than ``timeout_s`` from the request on."""
        return self._requests.wait(timeout_s)

    def snapshot(self) -> EngineAnswer:
        """The newest answer; an error instead where it is too old to be shown."""
        snapshot, began, now_s = self._snapshot, self._step_began, self._clock()
        if began is not None and now_s - began[0] > HANG_TIMEOUT_S:
            reason = f"the host engine at {self.address} does not respond: a call has hung since {clock_text(began[1])}"
            return replace(snapshot, error=reason, fix="sudo systemctl restart nvidia-dcgm", values={})
        if snapshot.error is None and now_s - snapshot.asked_s > max(2.0, 2.5 * self._pace.interval_s):
            reason = f"the host engine at {self.address} has not answered since {clock_text(snapshot.time_s)}"
            return replace(snapshot, error=reason, values={})
        return snapshot

    def now_s(self) -> float:
        """Unix time, from the client's clock."""
        return self._wall_clock()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Undo the watches and disconnect. Waits ``timeout_s`` at most; a hanging call is left to its thread:
        the engine itself undoes the watches of a client that is gone."""
        with self._lock:
            self._requests.end()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while (request := self._requests.take()) is not None:
            try:
                self.step()
            except Exception as error:  # noqa: BLE001  thread boundary: otherwise DCGM would stop without a message
                self._snapshot = EngineAnswer(f"internal error in gputop's DCGM client: {error!r}", "Please report it.")
                self._disconnect()
            self._requests.answer(request)
        self._disconnect()

    def step(self) -> None:
        """Connect if a retry is due, or read. Called by the thread for each tick; blocks."""
        now_s = self._clock()
        self._step_began = now_s, self._wall_clock()
        try:
            if self._reader is not None:
                self._poll(self._reader)
                self._backoff.answered(now_s)
            elif self._backoff.due(now_s):
                self._connect()
        except GputopError as error:
            self._on_connection_lost(error.message, error.fix)
        except EngineError as error:
            self._on_connection_lost(f"the connection to the host engine at {self.address} was lost: {error}", START)
        finally:
            self._step_began = None

    def _on_connection_lost(self, reason: str, fix: str) -> None:
        self._disconnect()
        self._snapshot = EngineAnswer(reason, fix)
        self._backoff.failed(self._clock())

    def _disconnect(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _connect(self) -> None:
        """Connect and read once; raises GputopError."""
        address = self.address
        try:
            local = address.reach(REACH_TIMEOUT_S)
        except PermissionError as error:
            raise GputopError(f"this user is not allowed to connect to {address}",
                              f"ls -l {address.path}   # join its group, or give the engine a TCP port") from error
        except OSError as error:
            detail = "" if isinstance(error, ConnectionRefusedError) else f" ({error.strerror or error})"
            raise GputopError(f"no host engine answers at {address}{detail}", START) from error
        problems: list[GputopError] = []
        for entry in sorted(find_installed(*self._searched), key=lambda entry: entry.major != self._preferred):
            try:
                self._reader = EngineReader(Engine(load(entry), address), local)
                self._backoff.connected(self._clock())
                self._poll(self._reader)
                self._preferred = entry.major
                return
            except GputopError as error:
                problems.append(error)
            except EngineError as error:
                self._disconnect()
                problems.append(GputopError(
                    f"DCGM {entry.major} cannot communicate with the program that listens at {address}: {error}",
                    "Check whether the program is a DCGM host engine of the same version: dcgmi discovery -l "
                    "--host " + str(address)))
                if error.code != FUNCTION_NOT_FOUND:
                    break  # other bindings would reach the same engine
        raise problems[0]

    def _poll(self, reader: EngineReader) -> None:
        self._snapshot = reader.read(self._subscription, self._pace.interval_s, self._clock(), self._wall_clock())
