"""Reading a connected host engine: from the engine's values to those that are of now, and reasons for the rest."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from gputop.core.samples import Reading, missing_of
from gputop.sources.dcgm import fields
from gputop.sources.dcgm.connection import CallFailed, Engine, EngineGpu, Entity, Values
from gputop.sources.dcgm.fields import BY_METRIC, FieldValue
from gputop.sources.dcgm.watches import Subscription, Watches
from gputop.sources.nvml.status import plausible_reading

_NO_ANSWER = FieldValue(None, "the host engine did not return this value", 0, fields.NO_DATA)


class EngineAnswer(Struct, frozen=True):
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


class EngineReader:
    """State of one connection, gone with it: watches, lost GPUs, unwatched fields, ages of values.

    ``local``: the engine was reached at an address of this machine. Blocks; one thread uses it.
    """

    def __init__(self, engine: Engine, local: bool) -> None:
        self._engine = engine
        self._local = local
        self._watches = Watches()
        self._lost = LostGpus()
        self._unwatched = UnwatchedFields()
        self._staleness = StalenessTracker()

    def close(self) -> None:
        self._engine.close()

    def read(self, wanted: Subscription, interval_s: float, now_s: float, wall_s: float) -> EngineAnswer:
        """Set the watches that are wanted and read. ``interval_s`` is that of the reads, ``now_s`` monotonic and
        ``wall_s`` Unix time. Raises EngineError; the connection is then to be closed."""
        engine, uuids = self._engine, wanted.uuids
        devices = (*engine.gpus, *engine.instances)
        chosen = [gpu for gpu in devices if uuids is None or gpu.uuid in uuids]
        self._watch(chosen, wanted, interval_s, now_s)
        read = self._latest(chosen, wanted.ids, now_s)
        values: dict[str, dict[int, FieldValue]] = {}
        sources: dict[tuple[str, int], str] = {}
        for gpu in chosen:
            of_gpu = {i: read.get((gpu.entity, i), _NO_ANSWER) for i in _ids_of(gpu.is_instance, wanted.ids)}
            if self._lost.refusal(gpu) is None:
                blank = frozenset(i for i, value in of_gpu.items() if value.code == fields.NO_DATA)
                sources |= self._judge(gpu, of_gpu, now_s, wall_s, interval_s)
                self._lost.suspect(engine, gpu, of_gpu, blank, now_s)
            if (code := self._lost.code(gpu, now_s)) is not None:
                of_gpu = _without_values(of_gpu, code)
            values[gpu.uuid] = of_gpu
        return EngineAnswer(None, "", engine.version, self._local, engine.gpus, engine.instances,
                            frozenset(gpu.uuid for gpu in devices), values, sources, now_s, wall_s)

    def _watch(self, gpus: Sequence[EngineGpu], wanted: Subscription, interval_s: float, now_s: float) -> None:
        if self._lost.recheck(self._engine, now_s):
            self._watches.renew()
        refused = self._watches.follow(self._engine, gpus, wanted, interval_s)
        if refused is not None:
            self._lost.forget_refused()
            self._lost.note_refused(refused, now_s)
            self._unwatched.forget()

    def _latest(self, gpus: Sequence[EngineGpu], ids: Sequence[int], now_s: float) -> Values:
        """The engine's newest values of those fields that are worth asking for, and the last ones of the others."""
        read: Values = {}
        for instances in (False, True):
            readable = [gpu.entity for gpu in gpus if gpu.is_instance == instances and self._lost.refusal(gpu) is None]
            requests = self._unwatched.requests(self._engine, readable, _ids_of(instances, ids), now_s)
            for requested, entities in requests.items():
                read |= self._engine.read(entities, requested)
        self._unwatched.note(read, now_s)
        return read | self._unwatched.left_out

    def _judge(self, gpu: EngineGpu, values: dict[int, FieldValue], now_s: float, wall_s: float,
               interval_s: float) -> dict[tuple[str, int], str]:
        """Replace what is not of now by the reason. Returns the sources of what is updated slowly."""
        sources: dict[tuple[str, int], str] = {}
        for i, value in values.items():
            pace = now_s, wall_s, interval_s, self._watches.periods_s.get(i)
            if value.code == fields.NOT_WATCHED and gpu.entity in self._watches.problems:
                values[i] = replace(value, reason=self._watches.problems[gpu.entity], code=fields.OK)
            elif i == fields.XID:
                continue  # it comes by event, and may be old
            elif value.value is not None:
                values[i], source = self._staleness.check(gpu.uuid, i, value, *pace)
                if source:
                    sources[gpu.uuid, i] = source
            elif value.code == fields.NO_DATA:
                values[i] = self._staleness.blank(gpu.uuid, i, value, *pace)
        return sources


def _without_values(values: Mapping[int, FieldValue], code: int) -> dict[int, FieldValue]:
    """Return the fields of a GPU that is lost or silent: the reason in place of each value, but for its last Xid."""
    stale = [values[i].reason for i in fields.FAST_METRIC_IDS if i in values and values[i].code == fields.STALE_DATA]
    since = next((reason for reason in stale if "since" in reason and "yet" not in reason), "no value")
    gone = FieldValue(None, since if code == fields.SILENT else fields.meaning(code), 0, code)
    return {i: value if i == fields.XID and value.value is not None else gone for i, value in values.items()}


def _ids_of(instance: bool, ids: Iterable[int]) -> tuple[int, ...]:
    """Field ids among ``ids`` that a GPU, or a MIG instance, has."""
    return tuple(i for i in ids if not instance or i in fields.INSTANCE_IDS)


# -- the age of values ------------------------------------------------------------------------------

FRESH_S = 2.0
BLANK_S = 20.0  # how long the first sample of somebody else's watch may stay blank
_LONGEST_PERIOD_S = 300.0  # a slower watch does not extend the limit


def clock_text(time_s: float) -> str:
    """A time of day for a reason. Not an age: a reason that changes at each tick would fill recordings."""
    return time.strftime("%H:%M:%S", time.localtime(time_s))


class _LastUpdate(Struct):
    time_us: int
    changed_s: float  # monotonic: when this time was first seen, less its age then
    period_s: float | None  # between the last two times
    period_before_s: float | None = None  # and between the two before


class StalenessTracker:
    """Tracks the time stamp of each value of one connection: a value stays readable after its watch has ended. Its age
    counts from its last change on our clock, because the engine may be on another machine with another clock."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], _LastUpdate] = {}
        self._blank_since: dict[tuple[str, int], tuple[float, float]] = {}  # monotonic and Unix time

    def blank(self, uuid: str, field_id: int, value: FieldValue, now_s: float, wall_s: float, tick_s: float,
              watch_s: float | None) -> FieldValue:
        """A blank ``value``; once that takes longer than a first sample may, without the hope for one."""
        since_s, since_wall_s = self._blank_since.setdefault((uuid, field_id), (now_s, wall_s))
        limit_s = BLANK_S if watch_s is None else max(FRESH_S, 2.5 * tick_s, 2.5 * watch_s)
        if now_s - since_s <= limit_s:
            return value
        # Of a field that never had one it is the time of gputop's first question.
        reason = (f"no value since {clock_text(since_wall_s)}" if (uuid, field_id) in self._seen else
                  f"no value yet, requested since {clock_text(since_wall_s)}")
        return FieldValue(None, reason, value.time_us, fields.STALE_DATA)

    def check(self, uuid: str, field_id: int, value: FieldValue, now_s: float, wall_s: float, tick_s: float,
              watch_s: float | None) -> tuple[FieldValue, str]:
        """``value``, or the reason that it is stale; and the source to show where it is updated slowly, else "".

        ``tick_s`` is the interval at which gputop asks, ``watch_s`` that of its own watch, if it has one.
        """
        self._blank_since.pop((uuid, field_id), None)
        seen = self._seen.get((uuid, field_id))
        if seen is None:
            age_s = max(0.0, wall_s - value.time_us / 1e6)
            seen = self._seen[uuid, field_id] = _LastUpdate(value.time_us, now_s - age_s, None)
        elif value.time_us != seen.time_us:
            seen.period_before_s = seen.period_s
            period_s = (value.time_us - seen.time_us) / 1e6
            seen.period_s = period_s if 0 < period_s <= _LONGEST_PERIOD_S else None
            seen.time_us, seen.changed_s = value.time_us, now_s
        age_s = now_s - seen.changed_s
        limit_s = max(FRESH_S, 2.5 * tick_s, 2.5 * (watch_s or 0.0))
        if seen.period_s is not None:
            limit_s = max(limit_s, 2 * seen.period_s + 1)
        if age_s > limit_s:
            when = clock_text(value.time_us / 1e6)
            reason = f"field {field_id} was last updated at {when}: its watch has ended or is very slow"
            return FieldValue(None, reason, value.time_us, fields.STALE_DATA), ""
        # Twice, because a single gap is a pause of the engine and no slow watch.
        shortest_s = min(seen.period_s or 0.0, seen.period_before_s or 0.0)
        slow = shortest_s > max(FRESH_S, 2 * tick_s)
        return value, f"{fields.SOURCE}, every {seen.period_s:.0f} s" if slow else ""


# -- lost GPUs --------------------------------------------------------------------------------------

REFUSED_RETRY_S = 60.0  # a lost GPU may come back; each question is an error line in the engine's log
SUSPECT_RETRY_S = 20.0  # for a GPU that gives blanks but is not lost
LOST_AFTER_S = 30.0  # of silence: until then the driver may be busy, or refuse all calls for a while
_LOST_XIDS = (79, 119)  # fallen off the bus; its GSP does not answer (NVIDIA, Xid errors)


class LostGpus:
    """GPUs and MIG instances that are lost, as far as one connection shows it.

    The engine refuses to watch a GPU that is detached, and says so if it is asked. It does not know that a GPU is lost
    of which only the driver says so: such a GPU falls silent, all its fast fields that had values are blank. So do
    those whose driver refuses all calls, or takes seconds for them: it counts as lost once that has lasted, or the
    driver reports the Xid of a loss.
    """

    def __init__(self) -> None:
        self._refused: dict[Entity, int] = {}  # DCGM's code for what it does not watch
        self._recheck_s: dict[Entity, float] = {}  # of those, and of GPUs that give nothing but blanks
        self._gave: dict[Entity, set[int]] = {}  # the fast fields of which it had a value
        self._silent: dict[Entity, float] = {}  # since when all these fields are blank
        self._xids: dict[Entity, FieldValue | None] = {}  # the one that was there first
        self._fallen: set[Entity] = set()  # with the Xid of a loss since then

    def refusal(self, gpu: EngineGpu) -> int | None:
        """DCGM's code for why the GPU, or that of the instance, is not watched."""
        return self._refused.get(gpu.entity, self._refused.get(gpu.parent))

    def code(self, gpu: EngineGpu, now_s: float) -> int | None:
        """DCGM's code for why the GPU has no values: a :meth:`refusal`, or silence; None: it has some."""
        code = self.refusal(gpu)
        since_s = min((self._silent[each] for each in (gpu.entity, gpu.parent) if each in self._silent), default=None)
        if code is not None or since_s is None:
            return code
        fallen = not self._fallen.isdisjoint((gpu.entity, gpu.parent))
        return fields.GPU_IS_LOST if fallen or now_s - since_s >= LOST_AFTER_S else fields.SILENT

    def note_refused(self, refused: Mapping[Entity, int], now_s: float) -> None:
        for entity, code in refused.items():
            if code != fields.OK:
                self._refused[entity] = code
                self._recheck_s[entity] = now_s + REFUSED_RETRY_S

    def forget_refused(self) -> None:
        """Take all for watched: the watches are set anew."""
        self._refused.clear()

    def recheck(self, engine: Engine, now_s: float) -> bool:
        """Ask again about what was refused a while ago; returns whether some of it is there again."""
        due = [entity for entity in self._refused if now_s >= self._recheck_s[entity]]
        for entity in due:
            self._recheck_s[entity] = now_s + REFUSED_RETRY_S
            if engine.refusal(entity) == fields.OK:
                del self._refused[entity], self._recheck_s[entity]
        return any(entity not in self._refused for entity in due)

    def suspect(self, engine: Engine, gpu: EngineGpu, values: Mapping[int, FieldValue], blank: frozenset[int],
                now_s: float) -> None:
        """Find out whether the GPU is lost if it gives blanks for too long. ``values`` are those of now, or the reasons
        that there is none; ``blank`` are the fields that the engine gave as blanks."""
        self._note_silence(gpu, values, blank, now_s)
        xid = values.get(fields.XID)
        first = self._xids.setdefault(gpu.entity, xid)
        if xid is not None and xid.value in _LOST_XIDS and (first is None or xid.time_us != first.time_us):
            self._fallen.add(gpu.entity)
        fast = [values[i] for i in (*fields.FAST_IDS, *fields.PROFILING_IDS) if i in values and i != fields.XID]
        if any(value.value is not None for value in fast):
            self._recheck_s.pop(gpu.entity, None)
        elif (any(value.code == fields.STALE_DATA for value in fast)
              and now_s >= self._recheck_s.get(gpu.entity, now_s)):
            self._recheck_s[gpu.entity] = now_s + SUSPECT_RETRY_S
            self.note_refused({gpu.entity: engine.refusal(gpu.entity)}, now_s)

    def _note_silence(self, gpu: EngineGpu, values: Mapping[int, FieldValue], blank: frozenset[int],
                      now_s: float) -> None:
        """Slow fields say nothing: some are 0 of a lost GPU."""
        answers = {i for i in (*fields.FAST_METRIC_IDS, *fields.PROFILING_IDS)
                   if i in values and values[i].value is not None}
        gave = self._gave.setdefault(gpu.entity, set())
        gave |= answers.intersection(fields.FAST_METRIC_IDS)
        if answers:
            self._silent.pop(gpu.entity, None)
            self._fallen.discard(gpu.entity)
        elif gave and gave <= blank and all(values[i].code == fields.STALE_DATA for i in gave) and (
                not gpu.is_instance):  # which somebody may have dissolved
            self._silent.setdefault(gpu.entity, now_s)


# -- fields that nobody watches ---------------------------------------------------------------------

CHECK_S = 10.0  # how often the groups are listed, while there are unwatched fields
TRIES = 3  # after a change: a group is there a moment before its watch
FAILED_RETRY_S = 60.0  # for any other error
BLIND_RETRY_S = 600.0  # where the groups cannot be listed

Pair = tuple[Entity, int]


class UnwatchedFields:
    """Unwatched fields of one connection. ``left_out`` has the last answer for each field that is not asked for now.

    Each field without a value is an error line in the engine's log. So one that nobody watches is asked for once, and
    again when the field groups of the engine's clients have changed: a watch needs such a group. To list the groups
    writes nothing into the log.
    """

    def __init__(self) -> None:
        self.left_out: dict[Pair, FieldValue] = {}
        self._due_s: dict[Pair, float] = {}
        self._groups: Mapping[str, frozenset[int]] | None = None
        self._check_s = -math.inf
        self._tries = 0
        self._new_ids: frozenset[int] = frozenset()

    def requests(self, engine: Engine, entities: Sequence[Entity], ids: Sequence[int],
                 now_s: float) -> dict[tuple[int, ...], list[Entity]]:
        """Requests to make now: fields to entities. Raises EngineError where the connection is gone."""
        if now_s >= self._check_s:
            self._check(engine, now_s)
        for pair in [pair for pair, due_s in self._due_s.items() if now_s >= due_s]:
            del self._due_s[pair], self.left_out[pair]
        requests: dict[tuple[int, ...], list[Entity]] = {}
        for entity in entities:
            wanted = tuple(i for i in ids if (entity, i) not in self.left_out)
            if wanted:
                requests.setdefault(wanted, []).append(entity)
        return requests

    def note(self, read: Mapping[Pair, FieldValue], now_s: float) -> None:
        """Leave out from now on what had an error instead of a value."""
        for pair, value in read.items():
            if value.code not in (fields.OK, fields.NO_DATA):
                unwatched_s = BLIND_RETRY_S if self._groups is None else math.inf
                self.left_out[pair] = value
                self._due_s[pair] = now_s + (unwatched_s if value.code == fields.NOT_WATCHED else FAILED_RETRY_S)

    def forget(self) -> None:
        """Ask for everything again: gputop's own watches have changed."""
        self.left_out.clear()
        self._due_s.clear()

    def _check(self, engine: Engine, now_s: float) -> None:
        self._check_s = now_s + CHECK_S
        try:
            groups: Mapping[str, frozenset[int]] | None = engine.field_groups()
        except CallFailed:
            groups = None
        before, self._groups = self._groups, groups
        if before is not None and groups is not None and groups != before:
            self._new_ids = frozenset().union(*(ids for name, ids in groups.items() if before.get(name) != ids))
            self._tries = TRIES
        if self._tries:
            self._tries -= 1
            self._due_s |= {pair: -math.inf for pair in self._due_s if pair[1] in self._new_ids}


# -- values to readings in the metrics' units ----------------------------------------------------

_GPM_DRIVER = 520  # the first driver with GPM
WATCH_HINT = "start gputop with --dcgm-watch, or dcgm-exporter"


def dcgm_reading(snapshot: EngineAnswer, uuid: str, metric: str) -> Reading:
    """One metric of the GPU ``uuid`` from DCGM, or why it has none."""
    if snapshot.error is not None:
        return missing_of(metric, snapshot.error, fields.SOURCE)
    of_gpu = snapshot.values.get(uuid)
    if of_gpu is None:
        reason = "not asked yet" if uuid in snapshot.listed else "the host engine does not list this GPU"
        return missing_of(metric, reason, fields.SOURCE)
    total = 0.0
    of_metric = BY_METRIC[metric]
    for part in of_metric:
        value = of_gpu.get(part.id)
        if value is None or value.value is None:
            return missing_of(metric, missing_reason(part.id, value), fields.SOURCE)
        total += value.value * part.factor
    source = snapshot.sources.get((uuid, of_metric[0].id), fields.SOURCE)
    return plausible_reading(metric, total, source, of_metric[0].coarse)


def missing_reason(field_id: int, value: FieldValue | None) -> str:
    """Reason why a field has no value, for a reading."""
    if value is None:
        return f"gputop has requested field {field_id}"
    if value.code == fields.NOT_WATCHED:
        hint = WATCH_HINT if fields.is_profiling(field_id) else "start dcgm-exporter or gputop --source dcgm"
        return f"no program watches field {field_id}: {hint}"
    return value.reason if value.reason.startswith("field ") else f"field {field_id}: {value.reason}"


def engine_name(snapshot: EngineAnswer) -> str:
    """The host engine's name for a header: "DCGM 4.2 host engine"."""
    version = ".".join(snapshot.version.split(".")[:2])
    return f"DCGM {version} host engine" if version else "DCGM host engine"


def reads_through_gpm(version: str, driver: str, capability: FieldValue | None) -> bool:
    """Return whether an engine reads a GPU's profiling fields through GPM: a watch of them takes no counters from
    anybody.

    So it does since DCGM 3.1 on Hopper and newer (compute capability 9), with a driver that has GPM (R520).
    """
    engine, release = re.match(r"(\d+)\.(\d+)", version), re.match(r"\d+", driver)
    if engine is None or release is None or capability is None or capability.value is None:
        return False
    return ((int(engine[1]), int(engine[2])) >= (3, 1) and int(release[0]) >= _GPM_DRIVER
            and 9 <= int(capability.value) >> 16 < 100)
