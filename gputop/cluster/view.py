"""Request to whoever collects a fleet: what somebody looks at, and the limits by which the rules judge."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from gputop.cluster.model import Fleet


class FleetLimits(Struct, frozen=True):
    """Limits of what is asked for: GPUs that have not passed the activity ``idle`` for ``idle_s``, and GPUs whose
    activity is ``below`` the median by so much; and those more active than ``busy`` whose SM clock is below ``clock``
    of the median. The rules decide."""

    idle: float
    idle_s: float
    below: float
    busy: float
    clock: float


class FleetView(Struct, frozen=True):
    """Part of a fleet that somebody looks at. ``jobs``: those whose history is wanted first; none: all."""

    span_s: float = 3 * 3600.0
    step_s: float = 120.0
    jobs: tuple[str, ...] = ()
    open_jobs: tuple[str, ...] = ()
    open_nodes: tuple[tuple[str, str], ...] = ()  # job, node


class FleetCollector(Protocol):
    """Collector that can be asked for a fleet, again and again; from one thread."""

    settled: bool  # whether nothing more is wanted: the next refresh can wait

    def refresh(self, view: FleetView) -> Fleet:
        """The fleet now. Raises GputopError only before the first answer."""
        ...
