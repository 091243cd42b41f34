"""The DCGM host engine, read by a daemon thread of its own, so that no caller waits for it.

A caller requests an update once per tick and takes the newest snapshot. The thread connects
(it searches the bindings only where something listens), sets the watches it may, reads, and
reconnects with a back-off after the engine went away.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from gputop.core.errors import GputopError
from gputop.sources.dcgm import bindings as dcgm_bindings
from gputop.sources.dcgm import fields as dcgm_fields
from gputop.sources.dcgm.bindings import Bindings, Installed
from gputop.sources.dcgm.connection import MIN_WATCH_S, Address, Engine, EngineError, EngineGpu, Entity
from gputop.sources.dcgm.fields import FieldValue
from gputop.sources.dcgm.staleness import StalenessTracker, clock_text
from gputop.sources.dcgm.unwatched import UnwatchedFields

REACH_TIMEOUT_S = 0.5
FIRST_RETRY_S = 1.0
MAX_RETRY_S = 60.0
HANG_TIMEOUT_S = 5.0  # connecting may import the bindings from a slow disk; no call takes this long
LINK_WATCH_S = 1.0  # shortest period of the watches of the PCIe link and the video engines
SLOW_WATCH_S = 10.0  # period of gputop's own watches of limits and error counters
REFUSED_RETRY_S = 60.0  # a lost GPU may come back; each question is an error line in the engine's log
SUSPECT_RETRY_S = 20.0  # for a GPU that gives blanks but is not lost
CLOSE_TIMEOUT_S = 0.5
START = "sudo systemctl start nvidia-dcgm   # or: sudo nv-hostengine"
_STABLE_CONNECTION_S = 10.0  # a connection of this age resets the back-off


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine's last answer. ``values`` by GPU UUID and field; a stale one is a reason, not a value."""

    error: str | None = "not asked yet"  # why there are no values
    fix: str = ""
    version: str = ""
    local: bool = False  # the engine was reached at an address of this machine
    gpus: tuple[EngineGpu, ...] = ()
    instances: tuple[EngineGpu, ...] = ()
    listed: frozenset[str] = frozenset()  # UUIDs of all that the engine has, MIG instances too
    values: Mapping[str, Mapping[int, FieldValue]] = field(default_factory=dict)
    sources: Mapping[tuple[str, int], str] = field(default_factory=dict)  # of values that come slowly
    asked_s: float = 0.0  # monotonic: when the engine was asked for them
    time_s: float = 0.0  # the same as Unix time


@dataclass(frozen=True, slots=True)
class Subscription:
    """Fields to read and watch. ``uuids`` None: every GPU that the engine lists. ``profiled``: those of them whose
    profiling fields are watched, None: all."""

    ids: tuple[int, ...] = ()
    uuids: frozenset[str] | None = frozenset()
    profiled: frozenset[str] | None = frozenset()  # only with the user's consent, or through GPM
    watch_ordinary: bool = False


class DcgmClient:
    """Thread-safe. ``bindings`` is the folder of ``--dcgm-bindings``; without it ``root`` and ``env`` are searched."""

    def __init__(
        self,
        address: Address,
        *,
        bindings: Path | None = None,
        interval_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        root: Path = Path("/"),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.address = address
        self._folder = bindings
        self._interval_s = interval_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._root = root
        self._env = os.environ if env is None else env
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._subscription = Subscription()
        self._tick_s: float | None = None
        self._gaps_s: list[float] = []
        self._asked = self._answered = 0
        self._asked_s = 0.0
        self._step_began: tuple[float, float] | None = None  # the step under way: monotonic and Unix time
        self._snapshot = Snapshot()
        # Below: used by the thread only.
        self._engine: Engine | None = None
        self._local = False
        self._loaded: dict[int, Bindings] = {}
        self._last_major = 0
        self._retry_s = FIRST_RETRY_S
        self._retry_at_s: float | None = None
        self._connected_s = 0.0
        self._watched: object = None
        self._own_watch_s: dict[int, float] = {}  # by field: the period of our own watch
        self._problems: dict[Entity, str] = {}  # why profiling fields are not watched there
        self._refused: dict[Entity, int] = {}  # DCGM's code for what it does not watch: a lost GPU, say
        self._recheck_s: dict[Entity, float] = {}  # of those, and of GPUs that give nothing but blanks
        self._gave: dict[Entity, set[int]] = {}  # by GPU: the fast fields of which it had a value
        self._fell_silent: set[Entity] = set()  # GPUs of which all these fields are blank now
        self._unwatched = UnwatchedFields()
        self._staleness = StalenessTracker()

    # -- for callers --------------------------------------------------------------------------

    def subscribe(self, ids: Iterable[int], uuids: Iterable[str] | None, *, profiling: bool = False,
             ordinary: bool = False) -> None:
        """Read ``ids`` of the GPUs ``uuids`` (None: all) from now on, in addition to earlier subscriptions."""
        with self._changed:
            old = self._subscription
            everywhere = uuids is None or old.uuids is None
            self._subscription = Subscription(
                tuple(dict.fromkeys((*old.ids, *ids))),
                None if everywhere else (old.uuids or frozenset()) | frozenset(uuids or ()),
                None if profiling else old.profiled,
                old.watch_ordinary or ordinary,
            )

    def choose(self, uuids: Iterable[str], profiled: Iterable[str]) -> None:
        """Read and watch these GPUs alone from now on, and the profiling fields of those that are ``profiled``."""
        with self._changed:
            self._subscription = replace(self._subscription, uuids=frozenset(uuids), profiled=frozenset(profiled))

    def request_update(self, tick_s: float) -> None:
        """Request one read of the engine for the tick at ``tick_s`` (Unix time); returns at once."""
        with self._changed:
            if tick_s == self._tick_s or self._stopping:
                return
            if self._tick_s is not None:
                self._gaps_s = [*self._gaps_s[-2:], tick_s - self._tick_s]
            self._tick_s = tick_s
            self._asked += 1
            self._asked_s = time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gputop-dcgm", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the last request's answer; False where that takes longer than ``timeout_s``.

        The time counts from the request, so that several callers of one answer share one timeout.
        """
        with self._changed:
            asked, left_s = self._asked, self._asked_s + timeout_s - time.monotonic()
            return self._changed.wait_for(lambda: self._answered >= asked, max(0.0, left_s))

    def snapshot(self) -> Snapshot:
        """The newest answer; an error instead where it is too old to be shown."""
        snapshot, began, now_s = self._snapshot, self._step_began, self._clock()
        if began is not None and now_s - began[0] > HANG_TIMEOUT_S:
            reason = f"the host engine at {self.address} does not respond: a call has hung since {clock_text(began[1])}"
            return replace(snapshot, error=reason, fix="sudo systemctl restart nvidia-dcgm", values={})
        if snapshot.error is None and now_s - snapshot.asked_s > max(2.0, 2.5 * self._interval_s):
            reason = f"the host engine at {self.address} has not answered since {clock_text(snapshot.time_s)}"
            return replace(snapshot, error=reason, values={})
        return snapshot

    def now_s(self) -> float:
        """Unix time, from the client's clock."""
        return self._wall_clock()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Undo the watches and disconnect. Waits ``timeout_s`` at most; a hanging call is left to its thread:
        the engine itself undoes the watches of a client that is gone."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._answered < self._asked)
                if self._stopping:
                    break
                asked = self._asked
            try:
                self.step()
            except Exception as error:  # noqa: BLE001  thread boundary: otherwise DCGM would stop without a message
                self._snapshot = Snapshot(f"gputop failed in its DCGM part: {error!r}", "Please report it.")
                self._disconnect()
            with self._changed:
                self._answered = asked
                self._changed.notify_all()
        self._disconnect()

    def step(self) -> None:
        """Connect if a retry is due, or read. Called by the thread for each tick; blocks."""
        now_s = self._clock()
        self._step_began = now_s, self._wall_clock()
        try:
            self._follow_interval()
            if self._engine is None:
                if self._retry_at_s is not None and now_s < self._retry_at_s:
                    return
                self._connect()
            else:
                self._poll(self._engine)
                if now_s - self._connected_s > _STABLE_CONNECTION_S:
                    self._retry_s = FIRST_RETRY_S
        except GputopError as error:
            self._on_connection_lost(error.message, error.fix)
        except EngineError as error:
            self._on_connection_lost(f"the connection to the host engine at {self.address} was lost: {error}", START)
        finally:
            self._step_began = None

    def _on_connection_lost(self, reason: str, fix: str) -> None:
        self._disconnect()
        self._snapshot = Snapshot(reason, fix)
        self._retry_at_s = self._clock() + self._retry_s
        self._retry_s = min(MAX_RETRY_S, 2 * self._retry_s)

    def _disconnect(self) -> None:
        engine, self._engine = self._engine, None
        self._watched = None
        self._own_watch_s.clear()
        self._refused.clear()
        self._recheck_s.clear()
        self._gave.clear()
        self._fell_silent.clear()
        self._unwatched = UnwatchedFields()
        self._staleness = StalenessTracker()  # else the time without a connection would pass for a slow watch
        if engine is not None:
            engine.close()

    def _connect(self) -> None:
        """Connect and read once; raises GputopError."""
        address = self.address
        try:
            self._local = address.reach(REACH_TIMEOUT_S)
        except PermissionError as error:
            raise GputopError(f"this user may not connect to {address}",
                              f"ls -l {address.path}   # its group may; or give the engine a TCP port") from error
        except OSError as error:
            detail = "" if isinstance(error, ConnectionRefusedError) else f" ({error.strerror or error})"
            raise GputopError(f"no host engine answers at {address}{detail}", START) from error
        installed = dcgm_bindings.find_installed(self._root, self._env, self._folder)
        installed.sort(key=lambda entry: entry.major == self._last_major, reverse=True)  # stable: else newest first
        problems: list[GputopError] = []
        for entry in installed:
            try:
                self._connect_with(entry)
                return
            except GputopError as error:
                problems.append(error)
            except EngineError as error:
                self._disconnect()
                problems.append(GputopError(
                    f"DCGM {entry.major} cannot talk to the program that listens at {address}: {error}",
                    "Check whether it is a DCGM host engine of the same version: "
                    "dcgmi discovery -l --host " + str(address)))
                if error.code != dcgm_fields.FUNCTION_NOT_FOUND:
                    break  # other bindings would reach the same engine
        raise problems[0]

    def _connect_with(self, installed: Installed) -> None:
        bindings = self._loaded.get(installed.major)
        if bindings is None:
            bindings = self._loaded[installed.major] = dcgm_bindings.load(installed)
        self._engine = Engine(bindings, self.address)
        self._connected_s = self._clock()
        self._poll(self._engine)
        self._last_major = installed.major

    def _poll(self, engine: Engine) -> None:
        wanted = self._subscription
        uuids = wanted.uuids
        chosen = [gpu for gpu in (*engine.gpus, *engine.instances) if uuids is None or gpu.uuid in uuids]
        now_s, wall_s = self._clock(), self._wall_clock()
        self._recheck_refused(engine, now_s)
        self._watch(engine, chosen, wanted)
        read: dict[tuple[Entity, int], FieldValue] = {}
        for instances in (False, True):
            readable = [gpu.entity for gpu in chosen if gpu.is_instance == instances and self._refusal(gpu) is None]
            for ids, entities in self._unwatched.requests(engine, readable, _ids_of(instances, wanted.ids),
                                                          now_s).items():
                read |= engine.read(entities, ids)
        self._unwatched.note(read, now_s)
        read |= self._unwatched.left_out
        values: dict[str, dict[int, FieldValue]] = {}
        sources: dict[tuple[str, int], str] = {}
        for gpu in chosen:
            of_gpu = {i: read.get((gpu.entity, i), _NO_ANSWER) for i in _ids_of(gpu.is_instance, wanted.ids)}
            if self._refusal(gpu) is None:
                blank = frozenset(i for i, value in of_gpu.items() if value.code == dcgm_fields.NO_DATA)
                sources |= self._judge(gpu, of_gpu, now_s, wall_s)
                self._suspect(engine, gpu, of_gpu, blank, now_s)
            code = self._refusal(gpu)
            if code is None and not self._fell_silent.isdisjoint((gpu.entity, gpu.parent)):
                code = dcgm_fields.GPU_IS_LOST
            if code is not None:
                of_gpu = dict.fromkeys(of_gpu, FieldValue(None, dcgm_fields.meaning(code), 0, code))
            values[gpu.uuid] = of_gpu
        listed = frozenset(gpu.uuid for gpu in (*engine.gpus, *engine.instances))
        self._snapshot = Snapshot(None, "", engine.version, self._local, engine.gpus, engine.instances, listed, values,
                                  sources, now_s, wall_s)

    def _refusal(self, gpu: EngineGpu) -> int | None:
        """DCGM's code for why the GPU, or that of the instance, is not watched."""
        return self._refused.get(gpu.entity, self._refused.get(gpu.parent))

    def _judge(self, gpu: EngineGpu, values: dict[int, FieldValue], now_s: float,
               wall_s: float) -> dict[tuple[str, int], str]:
        """Replace what is not of now by the reason. Returns the sources of what is updated slowly."""
        sources: dict[tuple[str, int], str] = {}
        for i, value in values.items():
            pace = now_s, wall_s, self._interval_s, self._own_watch_s.get(i)
            if value.code == dcgm_fields.NOT_WATCHED and gpu.entity in self._problems:
                values[i] = replace(value, reason=self._problems[gpu.entity], code=dcgm_fields.OK)
            elif i == dcgm_fields.XID:
                continue  # it comes by event, and may be old
            elif value.value is not None:
                values[i], source = self._staleness.check(gpu.uuid, i, value, *pace)
                if source:
                    sources[gpu.uuid, i] = source
            elif value.code == dcgm_fields.NO_DATA:
                values[i] = self._staleness.blank(gpu.uuid, i, value, *pace)
        return sources

    def _suspect(self, engine: Engine, gpu: EngineGpu, values: Mapping[int, FieldValue], blank: frozenset[int],
                 now_s: float) -> None:
        """Ask whether a GPU that gives blanks for too long is lost: no value says so. The engine is asked, which knows
        it of one that is detached, but not of one whose driver says that it is lost: of that all fast fields are blank
        that had values. Slow ones say nothing: some are 0 then."""
        of_now = [values[i] for i in (*dcgm_fields.FAST_IDS, *dcgm_fields.PROFILING_IDS)
                  if i in values and i != dcgm_fields.XID]
        measured = [i for i in (*dcgm_fields.FAST_METRIC_IDS, *dcgm_fields.PROFILING_IDS) if i in values]
        answers = {i for i in measured if values[i].value is not None}
        gave = self._gave.setdefault(gpu.entity, set())
        gave |= answers.intersection(dcgm_fields.FAST_METRIC_IDS)
        if answers:
            self._fell_silent.discard(gpu.entity)
        elif gave and gave <= blank and all(values[i].code == dcgm_fields.STALE_DATA for i in gave) and (
                not gpu.is_instance):  # which somebody may have dissolved
            self._fell_silent.add(gpu.entity)
        if any(value.value is not None for value in of_now):
            self._recheck_s.pop(gpu.entity, None)
        elif (any(value.code == dcgm_fields.STALE_DATA for value in of_now)
              and now_s >= self._recheck_s.get(gpu.entity, now_s)):
            self._recheck_s[gpu.entity] = now_s + SUSPECT_RETRY_S
            self._note_refused({gpu.entity: engine.refusal(gpu.entity)}, now_s)

    def _note_refused(self, refused: Mapping[Entity, int], now_s: float) -> None:
        for entity, code in refused.items():
            if code != dcgm_fields.OK:
                self._refused[entity] = code
                self._recheck_s[entity] = now_s + REFUSED_RETRY_S

    def _recheck_refused(self, engine: Engine, now_s: float) -> None:
        """A GPU that is there again is watched again."""
        for entity in [entity for entity in self._refused if now_s >= self._recheck_s[entity]]:
            self._recheck_s[entity] = now_s + REFUSED_RETRY_S
            if engine.refusal(entity) == dcgm_fields.OK:
                del self._refused[entity], self._recheck_s[entity]
                self._watched = None

    # -- watches ------------------------------------------------------------------------------

    def _follow_interval(self) -> None:
        """Follow the interval of the ticks, once it has changed for three of them."""
        gaps_s = self._gaps_s
        if len(gaps_s) == 3 and min(gaps_s) > 0 and max(gaps_s) < 1.3 * min(gaps_s):
            pace_s = max(MIN_WATCH_S, sum(gaps_s) / 3)
            if not 0.7 < pace_s / self._interval_s < 1.4:
                self._interval_s = round(pace_s, 1)

    def _watch(self, engine: Engine, gpus: list[EngineGpu], wanted: Subscription) -> None:
        profiled = [gpu for gpu in gpus if wanted.profiled is None or gpu.uuid in wanted.profiled]
        goal = ([gpu.entity for gpu in gpus], [gpu.entity for gpu in profiled], wanted.watch_ordinary, self._interval_s)
        if goal == self._watched or not (profiled or (gpus and wanted.watch_ordinary)):
            return
        engine.unwatch()
        self._own_watch_s.clear()
        self._problems.clear()
        self._refused.clear()
        self._unwatched.forget()
        keep_s = max(10.0, 3 * self._interval_s)
        if wanted.watch_ordinary:
            whole = [gpu.entity for gpu in gpus if not gpu.is_instance]
            parts = [gpu.entity for gpu in gpus if gpu.is_instance]
            slow_s = max(SLOW_WATCH_S, self._interval_s)
            for of, ids, period_s in ((whole, dcgm_fields.FAST_IDS, self._interval_s),
                                      (whole, dcgm_fields.LINK_IDS, max(LINK_WATCH_S, self._interval_s)),
                                      (whole, dcgm_fields.SLOW_IDS, slow_s),
                                      (parts, dcgm_fields.INSTANCE_FAST_IDS, self._interval_s),
                                      (parts, dcgm_fields.INSTANCE_SLOW_IDS, slow_s)):
                if not of:
                    continue
                refused = engine.watch(of, ids, period_s, max(keep_s, 3 * period_s))
                self._note_refused(refused, self._clock())
                self._own_watch_s.update(dict.fromkeys(ids, period_s))
            engine.update()
        if profiled:
            self._watch_profiling(engine, profiled, keep_s)
        self._watched = goal

    def _watch_profiling(self, engine: Engine, gpus: list[EngineGpu], keep_s: float) -> None:
        """Watch the profiling fields that each GPU supports; where that fails, keep the reason."""
        alike: dict[tuple[int, ...], list[Entity]] = {}
        for gpu in gpus:
            try:
                supported = engine.profiling_fields(gpu.gpu)
            except EngineError as error:
                self._profiling_problem(error, [gpu.entity])
            else:
                ids = tuple(i for i in dcgm_fields.PROFILING_IDS if i in supported)
                alike.setdefault(ids, []).append(gpu.entity)
        for ids, entities in alike.items():
            try:
                self._note_refused(engine.watch(entities, ids, self._interval_s, keep_s), self._clock())
                self._own_watch_s.update(dict.fromkeys(ids, self._interval_s))
            except EngineError as error:
                self._profiling_problem(error, entities)

    def _profiling_problem(self, error: EngineError, entities: list[Entity]) -> None:
        if error.code in dcgm_fields.CONNECTION_GONE or error.code == dcgm_fields.FUNCTION_NOT_FOUND:
            raise error
        for entity in entities:
            self._problems[entity] = f"it cannot be watched: {dcgm_fields.meaning(error.code)}"


def _ids_of(instance: bool, ids: Iterable[int]) -> tuple[int, ...]:
    """Field ids among ``ids`` that a GPU, or a MIG instance, has."""
    return tuple(i for i in ids if not instance or i in dcgm_fields.INSTANCE_IDS)


_NO_ANSWER = FieldValue(None, "the host engine gave no answer for it", 0, dcgm_fields.NO_DATA)
