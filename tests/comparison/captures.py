"""Captures of simulated jobs as the monitor takes them, each taken and analyzed once."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from gputop.comparison.sides import Side
from gputop.replay.compared_files import read_side
from gputop.simulation.host_events import python_stacks
from gputop.simulation.loop import SimulatedLoop, StepKind
from gputop.simulation.scenarios import Scenario
from gputop.simulation.xspace import build_xspace
from gputop.trace.readers.stacks_file import write_stacks

_ORIGIN_NS = 1_700_000_000 * 10**9
_SECOND_NS = 10**9


def captured(scenario: Scenario, begin_s: int = 33) -> Side:
    """A capture of five steps or more: of an idle time that returns where that is what the scenario is about."""
    return _captured(scenario, begin_s)


@cache
def _captured(scenario: Scenario, begin_s: int) -> Side:
    loop, begin_ns = SimulatedLoop(scenario), begin_s * _SECOND_NS
    end_ns = begin_ns + int((1.6 if "launch" in scenario.id else 2.8) * _SECOND_NS)
    if scenario.id.startswith("slow-checkpoint"):
        saves = next(s for s in loop.steps(begin_ns, 10 * begin_ns) if s.kind is StepKind.CHECKPOINT)
        begin_ns, end_ns = saves.start_ns - 2 * _SECOND_NS, saves.next_ns + _SECOND_NS
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "demo-node.xplane.pb"
        path.write_bytes(build_xspace(loop, begin_ns, end_ns, _ORIGIN_NS, "demo-node"))
        stacks = python_stacks(loop, begin_ns, end_ns, _ORIGIN_NS)
        assert stacks is not None
        write_stacks(path.parent, {path.name: stacks})
        return read_side(path)
