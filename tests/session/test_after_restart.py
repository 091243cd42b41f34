"""When a job that was started again is captured."""

from __future__ import annotations

from gputop.session.watched_node import AfterRestart


def due_at(activity: dict[int, float | None], answers_from_s: int = 3) -> int | None:
    """The first second at which a capture is due; ``activity`` from each of these seconds on."""
    waits, now = AfterRestart(), None
    for second in range(200):
        now = activity.get(second, now)
        if waits.is_due(float(second), answers=second >= answers_from_s, activity=now):
            return second
    return None


def test_it_trains_once_its_gpus_have_been_busy_for_a_while() -> None:
    assert due_at({0: None, 20: 0.6}) == 30
    assert due_at({0: 0.6}) == 13  # from when it serves on
    assert due_at({0: None, 20: 0.6, 25: 0.0, 40: 0.5}) == 50  # a first step that compiles


def test_without_a_gpu_it_is_captured_after_a_minute_and_without_a_server_never() -> None:
    assert due_at({0: None}) == 63
    assert due_at({0: 0.6}, answers_from_s=1000) is None
