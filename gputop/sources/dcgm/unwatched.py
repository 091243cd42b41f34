"""Fields that are not worth asking for: each one without a value is an error line in the engine's log.

A field that nobody watches is asked for once, and again when the field groups of the engine's clients have
changed: a watch needs such a group. To list the groups writes nothing into the log.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gputop.sources.dcgm import fields
from gputop.sources.dcgm.connection import CallFailed, Engine, Entity
from gputop.sources.dcgm.fields import FieldValue

CHECK_S = 10.0  # how often the groups are listed, while there are unwatched fields
TRIES = 3  # after a change: a group is there a moment before its watch
FAILED_RETRY_S = 60.0  # for any other error
BLIND_RETRY_S = 600.0  # where the groups cannot be listed

Pair = tuple[Entity, int]


class UnwatchedFields:
    """Unwatched fields of one connection. ``left_out`` has the last answer for each field that is not asked for now."""

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
