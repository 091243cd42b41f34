"""gputop's own watches in the host engine: which fields of which GPUs it reads for gputop, and how often."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from gputop.sources.dcgm import fields
from gputop.sources.dcgm.connection import Engine, EngineError, EngineGpu, Entity

LINK_WATCH_S = 1.0  # shortest period of the watches of the PCIe link and the video engines
SLOW_WATCH_S = 10.0  # period of gputop's own watches of limits and error counters
_KEEP_S = 10.0  # shortest time for which the engine keeps values


class Subscription(Struct, frozen=True):
    """Fields to read and watch. ``uuids`` None: every GPU that the engine lists. ``profiled``: those of them whose
    profiling fields are watched, None: all."""

    ids: tuple[int, ...] = ()
    uuids: frozenset[str] | None = frozenset()
    profiled: frozenset[str] | None = frozenset()  # only with the user's consent, or through GPM
    watch_ordinary: bool = False


class Watches:
    """The watches of one connection, set anew when others are needed.

    ``periods_s`` has the period of each field that is watched, ``problems`` the reason why the profiling fields of a
    GPU are not.
    """

    def __init__(self) -> None:
        self.periods_s: dict[int, float] = {}
        self.problems: dict[Entity, str] = {}
        self._goal: object = None  # what the watches that are set were made for

    def renew(self) -> None:
        """Have the next :meth:`follow` set all anew, even if nothing else is wanted: a GPU is there again."""
        self._goal = None

    def follow(self, engine: Engine, gpus: Sequence[EngineGpu], wanted: Subscription,
               interval_s: float) -> dict[Entity, int] | None:
        """Set the watches of ``gpus`` anew if those that are set were made for something else.

        Returns the entities that the engine refuses, with DCGM's code; None if the watches stay as they are.
        """
        profiled = [gpu for gpu in gpus if wanted.profiled is None or gpu.uuid in wanted.profiled]
        goal = ([gpu.entity for gpu in gpus], [gpu.entity for gpu in profiled], wanted.watch_ordinary, interval_s)
        if goal == self._goal or not (profiled or (gpus and wanted.watch_ordinary)):
            return None
        engine.unwatch()
        self.periods_s.clear()
        self.problems.clear()
        refused: dict[Entity, int] = {}
        if wanted.watch_ordinary:
            refused |= self._watch_ordinary(engine, gpus, interval_s)
            engine.update()
        if profiled:
            refused |= self._watch_profiling(engine, profiled, interval_s)
        self._goal = goal
        return refused

    def _watch_ordinary(self, engine: Engine, gpus: Sequence[EngineGpu], interval_s: float) -> dict[Entity, int]:
        whole = [gpu.entity for gpu in gpus if not gpu.is_instance]
        parts = [gpu.entity for gpu in gpus if gpu.is_instance]
        slow_s = max(SLOW_WATCH_S, interval_s)
        refused: dict[Entity, int] = {}
        for entities, ids, period_s in ((whole, fields.FAST_IDS, interval_s),
                                        (whole, fields.LINK_IDS, max(LINK_WATCH_S, interval_s)),
                                        (whole, fields.SLOW_IDS, slow_s),
                                        (parts, fields.INSTANCE_FAST_IDS, interval_s),
                                        (parts, fields.INSTANCE_SLOW_IDS, slow_s)):
            if entities:
                refused |= self._watch(engine, entities, ids, period_s)
        return refused

    def _watch_profiling(self, engine: Engine, gpus: Sequence[EngineGpu], interval_s: float) -> dict[Entity, int]:
        """Watch the profiling fields that each GPU supports; if that fails, keep the reason."""
        alike: dict[tuple[int, ...], list[Entity]] = {}
        for gpu in gpus:
            try:
                supported = engine.profiling_fields(gpu.gpu)
            except EngineError as error:
                self._note_problem(error, [gpu.entity])
            else:
                ids = tuple(i for i in fields.PROFILING_IDS if i in supported)
                alike.setdefault(ids, []).append(gpu.entity)
        refused: dict[Entity, int] = {}
        for ids, entities in alike.items():
            try:
                refused |= self._watch(engine, entities, ids, interval_s)
            except EngineError as error:
                self._note_problem(error, entities)
        return refused

    def _watch(self, engine: Engine, entities: Sequence[Entity], ids: Sequence[int],
               period_s: float) -> dict[Entity, int]:
        refused = engine.watch(entities, ids, period_s, max(_KEEP_S, 3 * period_s))
        self.periods_s.update(dict.fromkeys(ids, period_s))
        return refused

    def _note_problem(self, error: EngineError, entities: Sequence[Entity]) -> None:
        if error.fails_all:
            raise error
        for entity in entities:
            self.problems[entity] = f"cannot watch this field: {fields.meaning(error.code)}"
