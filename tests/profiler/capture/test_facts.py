"""What documents say of how a capture was made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gputop.core.codec import to_document
from gputop.core.errors import GputopError
from gputop.profiler.capture.facts import facts_of
from gputop.profiler.capture.job_memory import Cost
from gputop.profiler.capture.outcomes import Outcome
from gputop.profiler.capture.plan import Plan, Probe
from gputop.profiler.capture.records import CaptureRecord

PROBE = Probe(0.5, 0.6, 500_000, 70_000, 50_000, 0.1)


def document(**changes: Any) -> Any:
    return to_document(facts_of(CaptureRecord("a:1", Path("/t/x"), 1.0, 20.0, 5.0, **changes)))


def test_the_probe_has_rates_in_base_units() -> None:
    found = document(plan=Plan(10.0, 2.0, "so", PROBE, ("a note",)))
    assert (found["asked_s"], found["chosen_s"], found["unknown"]) == (10.0, 2.0, ["a note"])
    assert found["probe"] == {"seconds": 0.5, "took_s": 0.6, "bytes": 500_000, "host_events_per_s": 140_000,
                              "device_events_per_s": 100_000, "step_s": 0.1, "growth_bytes": None}
    assert document(plan=Plan(1.0, 1.0, "full length"))["probe"] is None


def test_what_was_not_there_is_left_out() -> None:
    assert document() == {"address": "a:1", "path": "/t/x", "time_s": 1.0, "asked_s": 20.0, "took_s": 5.0, "notes": []}


def test_the_steps_are_told_of_the_whole_and_not_of_each_worker() -> None:
    failed = Outcome("b:1", "b", error=GputopError("refused", "start it"))
    found = document(cost=Cost(8.0, 4.0, 10, 30, 20), workers=(Outcome("a:1", "a", cost=Cost(8.0, 4.0)), failed))
    assert found["cost"]["first_steps_s"] is None and found["cost"]["memory_peak_bytes"] == 30
    assert "first_steps_s" not in found["workers"][0]["cost"]
    assert found["workers"][1]["error"] == {"message": "refused", "fix": "start it"}
