"""GPUs that the host engine has lost: it gives blanks for them, without an error."""

from __future__ import annotations

from collections.abc import Mapping

from gputop.sources.dcgm import fields
from gputop.sources.dcgm.connection import Engine, EngineGpu, Entity
from gputop.sources.dcgm.fields import FieldValue

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
