"""State of the node when a capture begins or ends: a value, which the session replaces with each sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from gputop.core.findings import Finding
from gputop.core.live_steps import LiveSteps
from gputop.core.samples import NodeSample, ProcessSample
from gputop.profiler.capture.records import CaptureRecord, Server

if TYPE_CHECKING:
    from gputop.core.captured_samples import GpuCounters
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

    def live_steps(self, servers: Sequence[Server]) -> LiveSteps | None:
        """The step period in the last minutes, and the idle time that returns, of the job of these servers; None where
        nothing is sampled."""
        from gputop.telemetry.step_period import live_steps

        history, sample, idle = self.history, self.sample, self.expected_idle(servers)
        if history is None or sample is None:
            return None
        began_s = [p.started_s or history.held_since(gpu.info.uuid, p.pid) for gpu in sample.gpus
                   for p in self._processes(servers) or sample.processes if gpu.info.index in p.gpus]
        since_s = max(filter(None, (*began_s, history.oldest_s)), default=sample.time_s)
        return replace(live_steps(history) or LiveSteps((), 0.0, self.interval_s, self.interval_s),
                       idle_s=idle.idle_s if idle else 0.0, idle_period_s=idle.period_s if idle else None,
                       seen_s=max(0.0, sample.time_s - since_s))

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
        held = {gpu for p in self._processes(servers) for gpu in p.gpus}
        # Of another job, or of another node.
        if expected is None or (held and not held & expected.gpus) or all(map(elsewhere, servers)):
            return None
        return expected

    def _processes(self, servers: Sequence[Server]) -> list[ProcessSample]:
        pids = {server.pid for server in servers} - {None}
        return [p for p in self.sample.processes if {p.pid, p.local_pid} & pids] if self.sample is not None else []
