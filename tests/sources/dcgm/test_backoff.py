"""When to connect again."""

from __future__ import annotations

import pytest

from gputop.sources.dcgm.client import MAX_RETRY_S, STABLE_CONNECTION_S, Backoff


def pauses(backoff: Backoff, failures: int) -> list[float]:
    """Seconds after each failure until it is time again."""
    pauses_s = []
    for _ in range(failures):
        backoff.failed(0.0)
        pauses_s.append(next(float(s) for s in range(1000) if backoff.due(s)))
    return pauses_s


def test_the_first_try_is_due_at_once_and_each_failure_doubles_the_pause() -> None:
    backoff = Backoff()
    assert backoff.due(0.0)
    assert pauses(backoff, 8) == [1, 2, 4, 8, 16, 32, MAX_RETRY_S, MAX_RETRY_S]


@pytest.mark.parametrize(("held_s", "next_pauses"), [
    (STABLE_CONNECTION_S, [8, 16]), (STABLE_CONNECTION_S + 0.1, [1, 2])], ids=["breaks soon", "holds"])
def test_only_a_connection_that_holds_forgets_the_failures(held_s: float, next_pauses: list[float]) -> None:
    backoff = Backoff()
    pauses(backoff, 3)
    backoff.connected(100.0)
    backoff.answered(100.0 + held_s)
    assert pauses(backoff, 2) == next_pauses
