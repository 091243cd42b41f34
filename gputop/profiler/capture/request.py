"""Request for a capture, and what must be answered before it begins: values, the same in monitor and commands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from gputop.core.errors import EXIT_USAGE, GputopError
from gputop.profiler.capture.choose_workers import Choice
from gputop.profiler.capture.records import Server
from gputop.text.commands import short_description
from gputop.text.units import printable

_MAX_LISTED = 20  # jobs
HARM = ("A capture slows that job down, uses some of its memory, and copies its activity into your trace. If py-spy is "
        "installed, the trace also contains the job's Python stacks. gputop remembers the answer until it exits.")


class CaptureRequest(Struct, frozen=True):
    """A capture that is wanted: ``seconds`` at most, saved below ``logdir``; and what has been answered for it.

    A probe may shorten the detail to what does not hurt the job, unless ``force``; an overview follows then.
    ``reason``: why the auto-capture wants it, which has nobody to ask. ``job``: the server of the job that is meant.
    ``allowed``: a server of another user, or one that took the place of a named one, that may be captured from.
    ``workers``: the addresses of those of many that are meant, ``notices`` why these. ``accept_risk``: even where a
    capture is known to end such jobs. ``hold``: even where torch.profiler holds the job at the end of it. ``process``:
    one without a server, which is made ready first; ``process_started``: when that began which was asked about.
    """

    seconds: float
    logdir: Path
    force: bool = False
    reason: str = ""
    job: Server | None = None
    allowed: Server | None = None
    workers: frozenset[str] | None = None
    notices: tuple[str, ...] = ()
    accept_risk: bool = False
    hold: bool = False
    process: int | None = None
    process_started: int | None = None  # field 22 of /proc/PID/stat


class CaptureAnswer(Struct, frozen=True):
    """One answer to a question: its key, how it is called, and the request that it makes."""

    key: str
    label: str
    request: CaptureRequest


class CaptureQuestion(Struct, frozen=True):
    """Question that somebody has to answer before a capture begins; without an answer none begins.

    ``sentence`` is the question, ``details`` what is to be known for it. ``problem`` and ``fix`` say it where nobody
    can be asked. ``servers``: one of each job; that of another user; or one that took the place of another.
    ``choice``: the workers that are proposed.
    """

    kind: Literal["job", "other user", "other job", "workers", "risk", "hold"]
    sentence: str
    details: str
    problem: str
    fix: str
    answers: tuple[CaptureAnswer, ...]
    servers: tuple[Server, ...] = ()
    choice: Choice | None = None

    def refusal(self) -> GputopError:
        """The error where nobody can be asked."""
        return GputopError(self.problem, self.fix, *((EXIT_USAGE,) if self.kind == "job" else ()))


def answered(question: CaptureQuestion, key: str) -> CaptureRequest:
    """The request that the answer ``key`` makes; raises KeyError for a key that is none of the answers."""
    return {answer.key: answer.request for answer in question.answers}[key]


def require_no_question(question: CaptureQuestion | None) -> None:
    """Raise GputopError for a question, where nobody can be asked."""
    if question is not None:
        raise question.refusal()


def ask_job(request: CaptureRequest, servers: Sequence[Server], ended: Server | None = None) -> CaptureQuestion:
    """Ask which of several jobs is meant, or which one after that of ``ended``. ``servers``: one of each job."""
    listed = "; ".join(printable(f"{server.address} {short_description(server.description)}".rstrip())
                       for server in servers[:_MAX_LISTED]) + ("; …" if len(servers) > _MAX_LISTED else "")
    return CaptureQuestion(
        "job", "Which job?",
        "Several jobs can be captured." if ended is None else f"The job at {ended.address} has ended.",
        f"several jobs can be captured: {listed}" if ended is None else
        f"the job at {ended.address} has ended; these other jobs can be captured: {listed}",
        f"Name the job to capture: gputop capture {servers[0].address.removeprefix('pid:')}",
        tuple(CaptureAnswer(server.address, server.description, replace(request, job=server)) for server in servers),
        tuple(servers))


def ask_other_user(request: CaptureRequest, server: Server) -> CaptureQuestion:
    """Ask whether to capture from the only server there is, which belongs to another user."""
    return CaptureQuestion(
        "other user", f"This server belongs to user {server.owner}. Capture from it?", HARM,
        f"the profiler server at {server.address} belongs to user {server.owner}, and you did not name it",
        f"A capture slows that job down and copies its activity. To capture anyway: --attach {server.address}",
        (CaptureAnswer("y", "Capture from it", replace(request, job=server, allowed=server)),), (server,))


def ask_other_job(request: CaptureRequest, server: Server, before: Server) -> CaptureQuestion:
    """Ask whether to capture from a named address at which another job answers than the one that was there before."""
    whose = (f"It belongs to user {server.owner}. " if server.owner else "" if server.pid is not None else
             "gputop cannot see its owner. ")
    return CaptureQuestion(
        "other job", f"Another job now answers at {server.address}. Capture from it?", whose + HARM,
        f"the job at {before.address} has ended, and another one now answers there",
        f"To capture it, restart gputop with --attach {server.address}",
        (CaptureAnswer("y", "Capture from it", replace(request, allowed=server)),), (server, before))


def ask_workers(request: CaptureRequest, servers: Sequence[Server], choice: Choice) -> CaptureQuestion:
    """Ask which of many workers to capture. Whoever answers has read the choice's risk."""
    few = replace(request, workers=frozenset(choice.chosen), notices=(choice.text(),), accept_risk=bool(choice.risk))
    every = replace(few, workers=frozenset(server.address for server in servers), notices=())
    return CaptureQuestion(
        "workers", "Which workers?", "",
        f"there are {choice.of} workers, and a capture slows down each of them", f"Proposed are {choice.text()}.",
        (CaptureAnswer("few", choice.text(), few), CaptureAnswer("all", "all of them", every)), choice=choice)


def ask_risk(request: CaptureRequest, risk: str) -> CaptureQuestion:
    """Ask whether to capture although that is known to end such jobs."""
    return CaptureQuestion(
        "risk", "This capture may end the job. Capture anyway?", risk, f"a capture may end the job: {risk}",
        "To capture anyway: gputop capture --accept-risk",
        (CaptureAnswer("y", "Capture anyway", replace(request, accept_risk=True)),))


def ask_hold(request: CaptureRequest, pid: int, problem: GputopError) -> CaptureQuestion:
    """Ask whether torch.profiler may hold a job that nothing else can record."""
    return CaptureQuestion(
        "hold", "The capture pauses this job at its end. Capture anyway?", problem.message, problem.message,
        problem.fix, (CaptureAnswer("y", "Capture anyway", replace(request, hold=True, process=pid)),))
