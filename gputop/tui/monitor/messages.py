"""The monitor's messages: above the findings, and when a capture or an attach has ended."""

from __future__ import annotations

from collections.abc import Iterable

from gputop.advice.registry import EXPLANATIONS
from gputop.core.errors import GputopError, sentences
from gputop.profiler.capture.records import CaptureStatus, Server, usable
from gputop.render.gpu_columns import unread_text
from gputop.session.session import Session
from gputop.text.units import printable, seconds

NO_SERVER = ("No profiler server found; a capture needs one.",
             "Running job: gputop attach PID. New job: gputop run -- python …. ?: more.")
OFFER = "Press c to start one in the running job (gputop asks first). ?: other ways."

# Findings that say how to read the column of the memory, and nothing to do: they are a word there.
OF_MEMORY_COLUMN = frozenset({"memory_preallocated"})
FAILURE_SHOWN_S = 30.0  # how long a failed capture is told


def panel_intro(session: Session, no_server: tuple[str, ...] = NO_SERVER) -> tuple[str, ...]:
    """The lines above the findings: that nothing is wrong and what limits the job, or how to learn more."""
    status, earlier = status_shown(session), session.captured_before_restart
    # The verdict on an earlier job says nothing of the one that runs.
    record = None if earlier else session.results.last_capture
    findings = tuple(f for f in session.results.findings if not earlier or f.origin == "live")
    if status is not None and status.phase == "failed":
        return (sentences(f"The capture failed: {status.message}"), status.fix)
    if record is not None and record.analysis is None:
        return ("The trace could not be analyzed, but it is kept on disk. Press t to see why.",)
    unread = tuple(filter(None, (unread_text(session.feed.sample),)))
    weighty = any(f.severity != "low" for f in findings)
    if weighty or record is not None:
        from gputop.diagnosis.wall_text import wall_sentence, worth_saying  # brings the results of a capture: 0.6 MB

        wall = record.analysis.wall_time if record is not None and record.analysis is not None else None
        limit = record.limit.splitlines() if record is not None and not weighty else ()
        return (*unread, *limit, *((wall_sentence(wall),) if wall is not None and worth_saying(wall) else ()))
    nothing = unread
    watched = session.feed.sample is not None and session.feed.sample.gpus
    if watched and not unread and all(f.id in EXPLANATIONS for f in findings):
        nothing = tuple(filter(None, (session.results.live.limit,)))
    if session.feed.player is not None:
        return nothing  # there is no job to capture from
    if session.control.running:
        assert status is not None
        if status.phase == "waiting":
            return nothing
        what = "The trace is being analyzed" if status.phase == "analyzing" else "A capture is running"
        return (*nothing, f"{what}: its findings will appear here.")
    if usable(session.watch.servers):
        count = session.watch.earlier.count
        before = (f"J: {_captures(count)} from earlier, in {session.control.options.logdir}",)
        # A finding that names the key says what it shows, too.
        press = () if any(f.unknown for f in findings) else ("Press c to see where the step's time goes.",)
        return (*nothing, *press, *(before if count and session.results.last_capture is None and not findings else ()))
    offered = no_server is NO_SERVER and session.processes_to_serve()
    return (*nothing, NO_SERVER[0], OFFER) if offered else (*nothing, *no_server)


def earlier_verdict(session: Session) -> tuple[str, ...]:
    """Limit of an earlier job, where the capture that is shown is of one and names nothing to do."""
    record = session.results.last_capture
    if not session.captured_before_restart or record is None or any(f.severity != "low" for f in record.findings):
        return ()
    if record.analysis is None:
        return ("Earlier job: the trace could not be analyzed. Press t to see why.",)
    return (f"Earlier job: {record.limit.splitlines()[0]}",) if record.limit else ()


def refused(error: GputopError, no_server: tuple[str, ...] = NO_SERVER) -> tuple[str, ...]:
    """Reason why there was nothing to capture from, and the ways out: those of ``no_server`` where it knows the job
    better."""
    return (begun_as_sentence(sentences(error.message)), *((error.fix,) if no_server is NO_SERVER else no_server))


def begun_as_sentence(message: str) -> str:
    """An error's message with a capital letter; a name that it begins with, as of a file or a program, stays."""
    first, space, rest = message.partition(" ")
    return (first[:1].upper() + first[1:] if first.isalpha() and first != "gputop" else first) + space + rest


def attached(server: Server, servers: Iterable[Server] = ()) -> str:
    """The answer to an address that the user entered; ``servers``: all, of which another one may be kept."""
    if server.problem is None:
        return f"Attached to {server.address}. Press c to capture from it."
    kept = next(iter(usable(servers)), None)
    if kept is not None and not server.asked:
        return printable(f"Could not attach to {server.address}: {server.problem}. Still attached to {kept.address}.")
    return printable(f"No profiler server at {server.address}: {server.problem}")


def status_shown(session: Session) -> CaptureStatus | None:
    """The state of the capture under way or of the last one. A failure is shown for a while: after that it matters
    whether there is a server."""
    status = session.control.status
    if status is not None and status.phase == "failed" and session.feed.clock() - status.time_s > FAILURE_SHOWN_S:
        return None
    return status


def of_note(session: Session, status: CaptureStatus) -> tuple[str, ...]:
    """Notice on a capture that has ended, besides its findings; the rest is behind J."""
    record = session.results.last_capture
    if status.phase == "failed" or record is None:
        return ()
    shorter = record.plan is not None and record.plan.shortened
    lines = [*record.remarks[:len(record.notices) + shorter], *compared_to_baseline(session)]
    if session.feed.player is None and session.feed.source.simulated and len(session.results.captures) == 1:
        lines.append("Press D to restart the simulated job with the first finding's fix, then c and B.")
    return ("\n".join(map(printable, lines)),) if lines else ()


def compared_to_baseline(session: Session) -> tuple[str, ...]:
    """Step time of a capture beside that of A, the baseline; nothing where no capture is A."""
    before, record = session.results.baseline, session.results.last_capture
    if before is None or record is None or record is before or before.step_s is None or record.step_s is None:
        return ()
    return (f"{seconds(before.step_s)}/step in A, {seconds(record.step_s)} now. Press B to see what changed.",)


def no_capture(session: Session, then: str = "") -> str:
    """Reason why there is no capture, and how to take one; ``then`` says what it is needed for."""
    if session.control.running:
        first = "The first capture is running."
    elif earlier := session.watch.earlier.count:  # they are on the disk: nobody is told that there is none
        first = f"No capture in this session yet. Press c to capture, or J to open {_captures(earlier)} from earlier."
    else:
        first = "No capture yet. Press c to capture."
    return f"{first} {then}".rstrip()


def _captures(number: int) -> str:
    return "a capture" if number == 1 else f"{number} captures"
