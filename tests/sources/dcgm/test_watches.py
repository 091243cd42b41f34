"""gputop's own watches, with an engine that notes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from gputop.sources.dcgm import fields
from gputop.sources.dcgm.connection import EngineError, EngineGpu, Entity
from gputop.sources.dcgm.watches import SLOW_WATCH_S, Subscription, Watches

GPU = EngineGpu((1, 0), 0, "GPU-0")
OTHER = EngineGpu((1, 1), 1, "GPU-1")
INSTANCE = EngineGpu((4, 7), 0, "mig:0:1")
ORDINARY = Subscription((155,), None, watch_ordinary=True)
PROFILED = Subscription((1002,), None, None)


class NotingEngine:
    """An engine whose GPUs have all profiling fields, but for those in ``fails``, by GPU the code."""

    def __init__(self) -> None:
        self.watched: list[tuple[tuple[Entity, ...], tuple[int, ...], float, float]] = []
        self.fails: dict[int, int] = {}
        self.refused: dict[Entity, int] = {}
        self.updates = 0

    def unwatch(self) -> None:
        self.watched.clear()

    def update(self) -> None:
        self.updates += 1

    def profiling_fields(self, gpu: int) -> frozenset[int]:
        if gpu in self.fails:
            raise EngineError(self.fails[gpu], "profiling_fields")
        return frozenset(fields.PROFILING_IDS if gpu == 0 else (1002, 1004))

    def watch(self, entities: Iterable[Entity], ids: Sequence[int], interval_s: float,
              keep_s: float) -> dict[Entity, int]:
        self.watched.append((tuple(entities), tuple(ids), interval_s, keep_s))
        return {entity: code for entity, code in self.refused.items() if entity in self.watched[-1][0]}


class Scene:
    def __init__(self) -> None:
        self.engine, self.watches = NotingEngine(), Watches()

    def follow(self, wanted: Subscription, *gpus: EngineGpu, interval_s: float = 1.0) -> dict[Entity, int] | None:
        return self.watches.follow(self.engine, gpus, wanted, interval_s)  # type: ignore[arg-type]


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_nothing_is_watched_without_consent_or_a_gpu(scene: Scene) -> None:
    assert scene.follow(Subscription((155, 1002), None), GPU) is None
    assert scene.follow(ORDINARY) is None and scene.follow(PROFILED) is None
    assert not scene.engine.watched and not scene.watches.periods_s


def test_ordinary_fields_are_watched_as_fast_as_they_change(scene: Scene) -> None:
    assert scene.follow(ORDINARY, GPU, INSTANCE, interval_s=0.1) == {}
    assert scene.engine.watched == [
        ((GPU.entity,), fields.FAST_IDS, 0.1, 10.0), ((GPU.entity,), fields.LINK_IDS, 1.0, 10.0),
        ((GPU.entity,), fields.SLOW_IDS, SLOW_WATCH_S, 30.0),
        ((INSTANCE.entity,), fields.INSTANCE_FAST_IDS, 0.1, 10.0),
        ((INSTANCE.entity,), fields.INSTANCE_SLOW_IDS, SLOW_WATCH_S, 30.0)]
    assert scene.engine.updates == 1
    assert (scene.watches.periods_s[155], scene.watches.periods_s[164]) == (0.1, SLOW_WATCH_S)


def test_watches_stay_until_something_else_is_wanted(scene: Scene) -> None:
    assert scene.follow(PROFILED, GPU) == {}
    assert scene.follow(PROFILED, GPU) is None
    assert scene.follow(PROFILED, GPU, interval_s=5.0) == {}
    assert scene.engine.watched == [((GPU.entity,), fields.PROFILING_IDS, 5.0, 15.0)]
    assert scene.follow(PROFILED, GPU, OTHER, interval_s=5.0) == {}
    assert [entities for entities, *_ in scene.engine.watched] == [(GPU.entity,), (OTHER.entity,)]
    assert scene.follow(ORDINARY, GPU) == {}
    assert 1002 not in scene.watches.periods_s
    assert scene.follow(ORDINARY, GPU) is None
    scene.watches.renew()
    assert scene.follow(ORDINARY, GPU) == {}


def test_profiling_fields_are_those_of_each_gpu_that_is_chosen(scene: Scene) -> None:
    third = EngineGpu((1, 2), 2, "GPU-2")
    chosen = Subscription((1002,), None, frozenset(("GPU-1", "GPU-2")))
    scene.follow(chosen, GPU, OTHER, third)
    assert scene.engine.watched == [((OTHER.entity, third.entity), (1002, 1004), 1.0, 10.0)]


def test_what_cannot_be_profiled_says_why_and_the_rest_is_watched(scene: Scene) -> None:
    scene.engine.fails[0] = fields.MODULE_NOT_LOADED
    scene.engine.refused = {OTHER.entity: fields.GPU_IS_LOST}
    assert scene.follow(PROFILED, GPU, OTHER) == {OTHER.entity: fields.GPU_IS_LOST}
    assert scene.watches.problems.keys() == {GPU.entity}
    assert "cannot watch this field: the engine's profiling module is not loaded" in scene.watches.problems[GPU.entity]
    scene.engine.fails.clear()
    scene.watches.renew()
    scene.follow(PROFILED, GPU)
    assert not scene.watches.problems


@pytest.mark.parametrize("code", [fields.CONNECTION_NOT_VALID, fields.FUNCTION_NOT_FOUND])
def test_a_connection_that_is_gone_is_no_problem_of_a_gpu(scene: Scene, code: int) -> None:
    scene.engine.fails[0] = code
    with pytest.raises(EngineError):
        scene.follow(PROFILED, GPU)
    assert not scene.watches.problems
