"""The advice from a trace: all rules over its analysis. Pure: no clock, no files.

A new rule is one function here in RULES and its limits in ``thresholds.py``. It returns a
finding, an abstention where its inputs are missing, or None where it sees nothing wrong.
"""

from __future__ import annotations

from collections.abc import Callable

from gputop.advice.finding import Abstained, Advice, Finding, collect
from gputop.advice.trace_balance import replica_imbalance
from gputop.advice.trace_copies import copies_excessive
from gputop.advice.trace_facts import TraceFacts
from gputop.advice.trace_input import input_bound
from gputop.advice.trace_launch import launch_bound
from gputop.advice.trace_memory import batch_size_headroom

RULES: tuple[Callable[[TraceFacts], Finding | Abstained | None], ...] = (
    input_bound, launch_bound, replica_imbalance, copies_excessive, batch_size_headroom,
)


def advise(facts: TraceFacts) -> Advice:
    """What all rules have to say about one trace."""
    return collect(rule(facts) for rule in RULES)
