"""The ways to capture that gputop has, by the address of what is captured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gputop.profiler.addresses import parse_address, process_of

if TYPE_CHECKING:
    from gputop.profiler.recording import Recorder


def prepare() -> None:
    """Import what a recording needs."""
    from gputop.profiler.xprof.probe import load_grpc

    load_grpc()


def check(address: str, timeout_s: float) -> None:
    """Check that an address of :func:`~gputop.profiler.addresses.parse_address` answers; raises GputopError."""
    if (process := process_of(address)) is not None:
        from gputop.profiler.kineto.recorder import KinetoRecorder

        KinetoRecorder(process).round_trip_s()
        return
    from gputop.profiler.xprof.probe import probe

    probe(address, timeout_s)


def recorder_of(address: str, pid: int | None = None) -> Recorder:
    """Recorder of the process behind an address, which is ``pid`` where that is known; raises GputopError (usage)."""
    address = parse_address(address)
    if (process := process_of(address)) is not None:
        from gputop.profiler.kineto.recorder import KinetoRecorder

        return KinetoRecorder(process)
    from gputop.profiler.capture.job_memory import job_pid
    from gputop.profiler.xprof.client import XProfRecorder

    return XProfRecorder(address, job_pid(address, pid))
