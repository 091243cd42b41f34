"""A capture of a simulated job."""

from __future__ import annotations

from functools import cache

from gputop.simulation.loop import SimulatedLoop
from gputop.simulation.xspace import build_xspace
from tests.simulation.conftest import SECOND, scenario_loop, training

ORIGIN = 1_790_000_000 * SECOND


@cache
def capture(name: str, seconds: float) -> tuple[SimulatedLoop, int, int, bytes]:
    loop = scenario_loop(name)
    start, end = training(loop, seconds)
    return loop, start, end, build_xspace(loop, start, end, ORIGIN, "demo-node")
