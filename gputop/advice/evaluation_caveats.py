"""Advice on a window that does not train, or may not: said more softly, or not at all.

How a job evaluates says nothing about memory, precision or gradients of its training. Of the rest the fix may be
right for the evaluation, which is what ran; it is not known to save time of the training.
"""

from __future__ import annotations

from msgspec.structs import replace

from gputop.advice.registry import rule_of
from gputop.analysis.results import StepTimes
from gputop.analysis.steps.phases import EVALUATION, PREDICTION, UNKNOWN
from gputop.core.findings import Abstained, Finding, at_most

_CAPTURE = "capture again while the job trains (in Keras: during fit, between its first and its last step of an epoch)"


def with_evaluation_caveat(outcome: Finding | Abstained | None, steps: StepTimes | None) -> Finding | Abstained | None:
    """The outcome of a rule, true for what ran in the window."""
    if steps is None or not isinstance(outcome, Finding):
        return outcome
    if steps.phase in (EVALUATION, PREDICTION):
        rule = rule_of(outcome.id, "trace")
        if rule is not None and rule.training_only:
            return Abstained(outcome.id, f"training steps: the steps of this window are {steps.phase}; {_CAPTURE}")
        return replace(outcome, severity=at_most(outcome.severity, "medium"), why=(
            f"{outcome.why} This is {steps.phase}, not training: {_CAPTURE} before you change the training."))
    if steps.phase == UNKNOWN and UNKNOWN in steps.left_out_s:
        return replace(outcome, severity=at_most(outcome.severity, "medium"), why=(
            f"{outcome.why} The trace does not tell whether these steps train or evaluate: {_CAPTURE}."))
    return outcome
