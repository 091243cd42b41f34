"""The ways to capture that gputop has, by the address of what is captured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gputop.profiler.addresses import parse_address

if TYPE_CHECKING:
    from gputop.profiler.recording import Recorder


def prepare() -> None:
    """Import what a recording needs."""
    from gputop.profiler.xprof.probe import load_grpc

    load_grpc()


def recorder_of(address: str, pid: int | None = None) -> Recorder:
    """What records the process behind an address, which is ``pid`` where that is known; raises GputopError (usage)."""
    from gputop.profiler.capture.footprint import job_pid
    from gputop.profiler.xprof.client import XProfRecorder

    address = parse_address(address)
    return XProfRecorder(address, job_pid(address, pid))
