"""State of the node when a capture begins or ends: a value, which the session replaces with each sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from gputop.core.findings import Finding
from gputop.core.samples import NodeSample
from gputop.profiler.capture.records import CaptureRecord, Server

if TYPE_CHECKING:
    from gputop.core.captured_samples import GpuCounters
    from gputop.core.live_steps import LiveSteps
    from gputop.profiler.capture.choose_workers import Choice
    from gputop.session.idle_wait import ExpectedIdle
    from gputop.telemetry.history import History


class WatchedNode(Struct, frozen=True):
    """The newest sample, the history, and the live rules' findings with the time of their sample."""

    sample: NodeSample | None = None
    history: History | None = None
    interval_s: float = 1.0
    findings: tuple[Finding, ...] = ()
    rules_ran_s: float = 0.0

    def live_steps(self) -> LiveSteps | None:
        """The step period in the last minutes; None where none stands out."""
        from gputop.telemetry.step_period import live_steps

        return live_steps(self.history) if self.history is not None else None

    def counters(self, record: CaptureRecord, servers: Sequence[Server]) -> GpuCounters:
        """Samples of the GPUs of an analyzed capture of these servers."""
        from gputop.session.gpu_samples import counters_of

        return counters_of(record, servers, self.sample, self.history, self.interval_s)

    def worker_choice(self, servers: Sequence[Server]) -> Choice:
        """The few of these many workers that are worth a capture, by what is sampled here."""
        from gputop.profiler.discovery import crash_risk
        from gputop.session.worker_figures import choose

        risk = crash_risk([server.pid for server in servers if server.pid is not None]) or ""
        return replace(choose(servers, self.sample, self.history), risk=risk)

    def expected_idle(self, servers: Sequence[Server]) -> ExpectedIdle | None:
        """Next idle time of the GPUs of the job of these servers; None where that is not known."""
        from gputop.session.idle_wait import expected_idle
        from gputop.session.worker_figures import elsewhere

        expected = expected_idle(self.findings, self.rules_ran_s)
        pids = {server.pid for server in servers} - {None}
        held = {gpu for p in self.sample.processes if {p.pid, p.local_pid} & pids for gpu in p.gpus
                } if self.sample is not None else set()
        # Of another job, or of another node.
        if expected is None or (held and not held & expected.gpus) or all(map(elsewhere, servers)):
            return None
        return expected
