"""What blanks and refusals say of a GPU, with an engine that answers as it is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from gputop.sources.dcgm import fields
from gputop.sources.dcgm.connection import EngineGpu, Entity
from gputop.sources.dcgm.engine_reader import LOST_AFTER_S, REFUSED_RETRY_S, SUSPECT_RETRY_S, LostGpus
from gputop.sources.dcgm.fields import FieldValue

POWER, TEMPERATURE, LIMIT, SM_ACTIVE = 155, 150, 164, 1002
GPU = EngineGpu((1, 0), 0, "GPU-0")
INSTANCE = EngineGpu((4, 7), 0, "mig:0:1")
OTHER = EngineGpu((1, 1), 1, "GPU-1")


class AskedEngine:
    """An engine that refuses some devices, and counts how often it is asked."""

    def __init__(self, refusals: Mapping[Entity, int] | None = None) -> None:
        self.refusals = dict(refusals or {})
        self.asked: Counter[Entity] = Counter()

    def refusal(self, entity: Entity) -> int:
        self.asked[entity] += 1
        return self.refusals.get(entity, fields.OK)


def values(*present: int, stale: tuple[int, ...] = ()) -> dict[int, FieldValue]:
    return {i: FieldValue(1.0) for i in present} | {
        i: FieldValue(None, "no value since 12:00", 0, fields.STALE_DATA) for i in stale}


def suspect(lost: LostGpus, engine: Any, gpu: EngineGpu, now_s: float, seen: dict[int, FieldValue]) -> None:
    lost.suspect(engine, gpu, seen, frozenset(i for i, value in seen.items() if value.value is None), now_s)


def test_what_the_engine_refuses_is_lost_until_it_takes_it_again() -> None:
    lost, engine = LostGpus(), AskedEngine({GPU.entity: fields.GPU_IS_LOST})
    lost.note_refused({GPU.entity: fields.GPU_IS_LOST, OTHER.entity: fields.OK}, 0.0)
    assert lost.refusal(GPU) == lost.code(GPU, 0.0) == fields.GPU_IS_LOST
    assert lost.refusal(INSTANCE) == fields.GPU_IS_LOST, "it is a part of the GPU"
    assert lost.refusal(OTHER) is None and lost.code(OTHER, 0.0) is None
    assert not lost.recheck(engine, REFUSED_RETRY_S - 1) and not engine.asked  # type: ignore[arg-type]
    assert not lost.recheck(engine, REFUSED_RETRY_S)  # type: ignore[arg-type]
    engine.refusals.clear()
    assert not lost.recheck(engine, REFUSED_RETRY_S + 1)  # type: ignore[arg-type]
    assert lost.recheck(engine, 2 * REFUSED_RETRY_S)  # type: ignore[arg-type]
    assert lost.refusal(GPU) is None and engine.asked == {GPU.entity: 2}


def test_refusals_are_forgotten_with_the_watches_that_were_refused() -> None:
    lost = LostGpus()
    lost.note_refused({GPU.entity: fields.GPU_IS_LOST}, 0.0)
    lost.forget_refused()
    assert lost.refusal(GPU) is None


def test_the_engine_is_asked_rarely_about_a_gpu_that_gives_blanks() -> None:
    lost, engine = LostGpus(), AskedEngine()
    for second in range(round(2 * SUSPECT_RETRY_S)):
        suspect(lost, engine, GPU, float(second), values(stale=(POWER,)))
    assert engine.asked == {GPU.entity: 2} and lost.code(GPU, 0.0) is None
    engine.refusals[GPU.entity] = fields.GPU_IS_LOST
    suspect(lost, engine, GPU, 2 * SUSPECT_RETRY_S, values(stale=(POWER,)))
    assert lost.refusal(GPU) == fields.GPU_IS_LOST


@pytest.mark.parametrize("seen", [values(POWER), values(LIMIT), values(SM_ACTIVE, stale=(POWER,)), {}])
def test_no_engine_is_asked_about_a_gpu_with_a_fast_value_or_without_blanks(seen: dict[int, FieldValue]) -> None:
    lost, engine = LostGpus(), AskedEngine()
    suspect(lost, engine, GPU, 0.0, seen)
    assert not engine.asked


def test_a_gpu_whose_fast_fields_are_all_blank_that_had_values_is_lost() -> None:
    lost, engine = LostGpus(), AskedEngine()
    suspect(lost, engine, GPU, 0.0, values(POWER, TEMPERATURE, LIMIT))
    suspect(lost, engine, GPU, 1.0, values(TEMPERATURE, LIMIT, stale=(POWER,)))
    assert lost.code(GPU, 0.0) is None, "one field is not the GPU"
    suspect(lost, engine, GPU, 2.0, values(LIMIT, stale=(POWER, TEMPERATURE)))
    assert lost.code(GPU, 2.0) == lost.code(INSTANCE, 2.0) == fields.SILENT
    assert lost.code(GPU, 2.0 + LOST_AFTER_S) == lost.code(INSTANCE, 2.0 + LOST_AFTER_S) == fields.GPU_IS_LOST
    assert lost.refusal(GPU) is None, "it is still asked for: only so is it seen to come back"
    suspect(lost, engine, GPU, 3.0, values(POWER, stale=(TEMPERATURE,)))
    assert lost.code(GPU, 0.0) is None


def test_silence_of_a_mig_instance_or_of_a_gpu_that_never_spoke_is_no_loss() -> None:
    lost, engine = LostGpus(), AskedEngine()
    suspect(lost, engine, INSTANCE, 0.0, values(252, 253))
    suspect(lost, engine, INSTANCE, 1.0, values(stale=(252, 253)))
    suspect(lost, engine, GPU, 1.0, values(stale=(POWER, TEMPERATURE)))
    assert lost.code(INSTANCE, 0.0) is None and lost.code(GPU, 0.0) is None


def test_a_silent_gpu_with_the_xid_of_a_loss_is_lost_at_once() -> None:
    for before, now, expected in ((0, 79, fields.GPU_IS_LOST), (0, 31, fields.SILENT), (79, 79, fields.SILENT)):
        lost, engine = LostGpus(), AskedEngine()
        first = FieldValue(float(before), time_us=1)
        suspect(lost, engine, GPU, 0.0, {**values(POWER, LIMIT), fields.XID: first})
        xid = first if now == before else FieldValue(float(now), time_us=2)
        seen = {**values(LIMIT, stale=(POWER,)), fields.XID: xid}
        lost.suspect(engine, GPU, seen, frozenset((POWER,)), 1.0)  # type: ignore[arg-type]
        assert lost.code(GPU, 1.0) == expected
