from __future__ import annotations

from functools import cache

import pytest

from gputop.simulation.loop import SimulatedLoop
from gputop.simulation.scenarios import SCENARIOS

SECOND = 10**9


@cache
def scenario_loop(name: str) -> SimulatedLoop:
    """A scenario's loop; made once, as it is a function of its scenario."""
    return SimulatedLoop(SCENARIOS[name])


@pytest.fixture(params=sorted(SCENARIOS))
def loop(request: pytest.FixtureRequest) -> SimulatedLoop:
    """Each scenario's loop."""
    return scenario_loop(request.param)


@pytest.fixture
def gpu0_loop() -> SimulatedLoop:
    return scenario_loop("gpu0-oversubscribed")


@pytest.fixture
def input_loop() -> SimulatedLoop:
    return scenario_loop("input-bound")


def training(loop: SimulatedLoop, seconds: float) -> tuple[int, int]:
    """That much plain training, from some way into an epoch; a short one does not evaluate."""
    start = loop.epoch_start(100 * SECOND) + (20 if loop.scenario.eval_steps else 2) * SECOND
    return start, start + int(seconds * SECOND)
