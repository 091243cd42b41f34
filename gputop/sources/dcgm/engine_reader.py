"""Reading a connected host engine: from the engine's values to those that are of now, and reasons for the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from gputop.sources.dcgm import fields
from gputop.sources.dcgm.connection import Engine, EngineGpu, Values
from gputop.sources.dcgm.fields import FieldValue
from gputop.sources.dcgm.lost_gpus import LostGpus
from gputop.sources.dcgm.staleness import StalenessTracker
from gputop.sources.dcgm.unwatched import UnwatchedFields
from gputop.sources.dcgm.watches import Subscription, Watches

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
