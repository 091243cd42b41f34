"""What the monitor says in words: before the findings, and when a capture or an attach has come to its end."""

from __future__ import annotations

from gputop.advice.registry import EXPLANATIONS
from gputop.session.session import Session
from gputop.text.units import printable, seconds

NO_SERVER = ("A trace tells more, but no profiler server was found.",
             "gputop attach PID starts one in the running job; gputop run -- python … starts jobs with one. "
             "? tells more.")


def panel_intro(session: Session, no_server: tuple[str, ...] = NO_SERVER) -> tuple[str, ...]:
    """What to say before the findings: that nothing is wrong and what the limit is, or how to learn more."""
    record = session.last_capture
    if record is not None and record.analysis is None:
        return ("The trace could not be analysed; it is kept on disk. Press t for why.",)
    if any(f.severity != "low" for f in session.findings):
        return ()
    if record is not None:
        return (record.limit,)
    nothing: tuple[str, ...] = ()
    if all(f.id in EXPLANATIONS for f in session.findings):
        nothing = (f"Nothing found in the live figures so far that costs time. {session.live.limit}".rstrip(),)
    if session.player is not None:
        return nothing  # a recording has no job that could be asked for more
    if _under_way(session):
        return (*nothing, "A capture is under way: what it tells of the step's time comes here.")
    if any(s.problem is None for s in session.servers):
        return (*nothing, "Press c to capture a trace: it tells where the step's time goes.")
    return (*nothing, *no_server)


def capture_summary(session: Session) -> str:
    """A capture has come to its good end. Over the panel it is to be short: what is as asked, and the path, t tells."""
    record = session.last_capture
    of_note: tuple[str, ...] = ()
    if record is not None:
        of_note = record.notices
        if record.plan is not None and record.plan.shortened:
            of_note = record.remarks[:len(of_note) + 1]  # with why it is shorter than asked
            of_note += (record.cost.text(),) if record.cost is not None else ()
    lines = [*of_note, *compared_to_baseline(session), "t: its timeline. T: its tables. J: all that is to say of it."]
    return "\n".join(map(printable, lines))


def compared_to_baseline(session: Session) -> tuple[str, ...]:
    """After a capture: its step time beside A's; nothing where there is no A."""
    before, record = session.baseline, session.last_capture
    if before is None or record is None or record is before or before.step_s is None or record.step_s is None:
        return ()
    return (f"{seconds(before.step_s)}/step in A, {seconds(record.step_s)} now. B: what changed, noise or not.",)


def no_capture(session: Session, then: str = "") -> str:
    """Why what is made of a capture is not there, and what to do; ``then`` is what it is good for."""
    first = "The first capture is under way." if _under_way(session) else "No capture yet: press c."
    return f"{first} {then}".rstrip()


def _under_way(session: Session) -> bool:
    return session.status is not None and session.status.running
