"""State of the node when a capture begins or ends: a value, which the session replaces with each sample; and when one
begins that waits for idle GPUs, or for a job that was started again. Pure, without clocks of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from gputop.core.captured_samples import GpuCounters, LiveSteps
from gputop.core.findings import Finding
from gputop.core.samples import NodeSample, ProcessSample
from gputop.profiler.capture.records import CaptureRecord, Server
from gputop.text.units import seconds

if TYPE_CHECKING:
    from gputop.profiler.capture.choose_workers import Choice
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


# -- when a capture begins --------------------------------------------------------------------------

LEAD_S = 3.5  # connecting, the test capture of half a second and its answer; 2 to 4 s with TensorFlow
_MARGIN_SHARE = 0.3  # share of the recording before the idle time at most: it has to reach it
_GIVE_UP_PERIODS = 1.5


class ExpectedIdle(Struct, frozen=True):
    """The next idle time of ``idle_s``: its begin (Unix time), give or take ``spread_s``. ``gpus`` are NVML indices."""

    gpus: frozenset[int]
    begin_s: float
    period_s: float
    spread_s: float
    idle_s: float = 0.0


def expected_idle(findings: Iterable[Finding], judged_s: float) -> ExpectedIdle | None:
    """Idle time expected by findings of the moment ``judged_s``; None: no GPU is idle at regular intervals."""
    for finding in findings:
        if finding.id == "recurring_idle" and "next_idle_in_s" in finding.evidence:
            evidence = finding.evidence
            return ExpectedIdle(frozenset(finding.gpus), judged_s + evidence["next_idle_in_s"],
                                evidence["idle_period_s"], evidence["idle_period_spread_s"],
                                evidence.get("idle_s", 0.0))
    return None


class IdleWait:
    """A capture of ``capture_s`` that has waited since ``now_s``."""

    def __init__(self, expected: ExpectedIdle, capture_s: float, now_s: float) -> None:
        self._lead_s = LEAD_S + min(expected.spread_s, _MARGIN_SHARE * capture_s)
        self._period_s = expected.period_s
        self._until_s = now_s + _GIVE_UP_PERIODS * expected.period_s
        self.begin_s = expected.begin_s
        while self.start_s <= now_s:  # too late for its beginning: the one after it
            self.begin_s += self._period_s

    @property
    def start_s(self) -> float:
        """Time at which the capture begins, so that the recording runs when the idle time comes."""
        return self.begin_s - self._lead_s

    def over(self, now_s: float, expected: ExpectedIdle | None) -> bool:
        """Return whether the capture begins now. ``expected``: what is known by now; None: nothing new."""
        if expected is not None and now_s < self.start_s:
            begin_s = expected.begin_s
            while begin_s < self.begin_s - 0.5 * expected.period_s:  # one before that which is waited for
                begin_s += expected.period_s
            self.begin_s, self._period_s = begin_s, expected.period_s
        return now_s >= min(self.start_s, self._until_s)

    def text(self, now_s: float) -> str:
        """Text for people: "the idle time in about 40 s"."""
        left_s = self.begin_s - now_s
        return f"the idle time in about {round(left_s / 5) * 5 if left_s >= 12.5 else max(1, round(left_s))} s"

    @property
    def missed(self) -> str:
        """Note on a capture that began at the end of its patience; empty for one that began in time."""
        if self.start_s <= self._until_s:
            return ""
        return (f"gputop expected idle time every {seconds(self._period_s)}, but none occurred; the capture may show "
                "none")


_BUSY_S = 10.0  # of GPUs at work, after which tracing, compilation and autotuning are mostly over
_LATEST_S = 60.0  # after the server answered: without a GPU, or of one at little work
BUSY = 0.05  # least activity of a GPU at work


class AfterRestart:
    """The wait for a job that was started again, from one sample to the next. Times are Unix seconds."""

    def __init__(self) -> None:
        self._answered_s: float | None = None
        self._busy_s: float | None = None

    def is_due(self, now_s: float, *, answers: bool, activity: float | None) -> bool:
        """Return whether to capture now. ``answers``: its profiler server does; ``activity``: the highest of the GPUs
        that the job holds, None without one."""
        if not answers:
            self._answered_s = self._busy_s = None
            return False
        if self._answered_s is None:
            self._answered_s = now_s
        if activity is None or activity < BUSY:
            self._busy_s = None
        elif self._busy_s is None:
            self._busy_s = now_s
        busy = self._busy_s is not None and now_s - self._busy_s >= _BUSY_S
        return busy or now_s - self._answered_s >= _LATEST_S
