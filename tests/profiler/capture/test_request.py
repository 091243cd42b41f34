"""A request and its questions are values: an answer makes a new request, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from gputop.core.errors import EXIT_FAILED, EXIT_USAGE, GputopError
from gputop.profiler.capture.choose_workers import choose_workers
from gputop.profiler.capture.records import Server
from gputop.profiler.capture.request import (
    CaptureQuestion,
    CaptureRequest,
    answered,
    ask_job,
    ask_other_job,
    ask_other_user,
    ask_risk,
    ask_workers,
    require_no_question,
)

REQUEST = CaptureRequest(10.0, Path("logs"), force=True)
A, B = Server("a:1", "python train.py", 1), Server("b:1", "python eval.py", 2, owner="bob")
MANY = [Server(f"n{number}:1") for number in range(9)]
CHOICE = structs.replace(choose_workers([server.address for server in MANY], {}), risk="beware")


@pytest.mark.parametrize(("question", "key", "changes"), [
    (ask_job(REQUEST, [A, B]), "b:1", {"job": B}),
    (ask_other_user(REQUEST, B), "y", {"job": B, "allowed": B}),
    (ask_other_job(REQUEST, A, B), "y", {"allowed": A}),
    (ask_risk(REQUEST, "beware"), "y", {"accept_risk": True}),
    (ask_workers(REQUEST, MANY, CHOICE), "few", {
        "workers": frozenset(CHOICE.chosen), "notices": (CHOICE.text(),), "accept_risk": True}),
    (ask_workers(REQUEST, MANY, CHOICE), "all", {
        "workers": frozenset(server.address for server in MANY), "accept_risk": True}),
])
def test_an_answer_changes_what_it_is_about(question: CaptureQuestion, key: str, changes: dict[str, object]) -> None:
    assert answered(question, key) == structs.replace(REQUEST, **changes)
    with pytest.raises(KeyError):
        answered(question, "no such answer")


def test_where_nobody_can_be_asked_the_question_is_an_error_with_a_fix() -> None:
    require_no_question(None)
    with pytest.raises(GputopError, match="belongs to user bob, and you did not name it") as caught:
        require_no_question(ask_other_user(REQUEST, B))
    assert "--attach b:1" in caught.value.fix and caught.value.exit_code == EXIT_FAILED


def test_a_script_that_means_one_of_several_jobs_gets_their_list_and_the_status_of_wrong_usage() -> None:
    about = "PyTorch 2.6.0: python train.py --token=sk-live-4f8a9c2d7e1b"
    with pytest.raises(GputopError) as caught:
        require_no_question(ask_job(REQUEST, [structs.replace(A, address="pid:7", description=about), B]))
    assert caught.value.exit_code == EXIT_USAGE and caught.value.fix.endswith("gputop capture 7")
    assert caught.value.message.startswith("several jobs can be captured: pid:7 train.py")
    assert "b:1" in caught.value.message and "4f8a9c2d7e1b" not in caught.value.message
