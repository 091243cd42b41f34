"""Feed of a session with samples: a source and its sampler, or a player; the history and the step period.

Each sample passes here once, on the thread of the sampler or of the player. It enters the history; the session
is told of it and runs the live rules. History and rules are imported with the first sample that enters the history,
after the session has shown the first sample: the first frame does not wait for that import.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from gputop.core.errors import GputopError
from gputop.core.samples import NodeSample
from gputop.replay.player import Player
from gputop.sources.base import Source
from gputop.telemetry.sampler import Sampler

if TYPE_CHECKING:
    from gputop.telemetry.history import History
    from gputop.telemetry.step_period import StepPeriodEstimate

STEP_PERIOD_UPDATE_S = 10.0  # at least; an estimate over five minutes of samples takes 40 ms
_NEW_SHARE = 0.1  # and so much of the history the estimate is made from is new by then
_BACKLOG_INTERVALS = 5  # a sample older than so many intervals belongs to the past of a recording

# "before_backfill": the sample is not in the history yet; "backfill": it is the newest of a history that has just
# begun; "live": it has been added to the history.
Arrival = Literal["before_backfill", "backfill", "live"]


class SampleReceiver(Protocol):
    """Receiver of what a feed reports. All calls come from the thread of the sampler or of the player."""

    def sample_stored(self, sample: NodeSample) -> None:
        """The history has this sample, which may be of the past."""

    def sample_updated(self, sample: NodeSample, arrival: Arrival) -> None:
        """This is now the newest sample."""

    def sampling_failed(self, error: GputopError) -> None:
        """Note that no more samples will come."""


class SampleFeed:
    """The newest sample, the history and the step period, kept up to date by a sampler or a player."""

    def __init__(self, source: Source | Player, interval_s: float, clock: Callable[[], float],
                 sampler: Sampler | None, receiver: SampleReceiver, *, estimate_step_period: bool) -> None:
        """``sampler``: one of this source that runs already and waits to be connected."""
        self.source = source
        self.player = source if isinstance(source, Player) else None
        self.clock = self.player.now_s if self.player is not None else clock
        self.sample: NodeSample | None = None
        self.history: History | None = None
        self.step_period: StepPeriodEstimate | None = None  # None: not estimated yet
        self._estimate_step_period = estimate_step_period
        self._period_checked_s = 0.0  # time of the sample at which the step period was estimated last
        self._backfill_expected = False
        self._pending: list[NodeSample] = []  # samples that arrived before the backfill
        self._receiver = receiver
        self._sampler_runs = sampler is not None
        self._sampler = source if isinstance(source, Player) else sampler or Sampler(source, interval_s)

    def start(self) -> None:
        """Connect to the sampler or the player, and start it unless it runs."""
        if isinstance(self._sampler, Player):
            self._sampler.connect(self.on_sample, self._receiver.sampling_failed)
        else:
            self._backfill_expected = True
            self._sampler.connect(self.on_sample, self._receiver.sampling_failed, self.on_backfill)
        if not self._sampler_runs:
            self._sampler.start()

    def stop(self) -> None:
        self._sampler.stop()

    @property
    def known_gpus(self) -> NodeSample | None:
        """The newest sample; before the first one, a sample of the GPUs alone where the sampler has that already."""
        return self.sample or (None if isinstance(self._sampler, Player) else self._sampler.first_gpus)

    @property
    def interval_s(self) -> float:
        return self._sampler.interval_s

    def set_interval(self, seconds: float) -> None:
        self._sampler.set_interval(seconds)

    def on_sample(self, sample: NodeSample) -> None:
        """Take a new sample; called on the thread of the sampler or the player."""
        of_the_past = self.clock() - sample.time_s > _BACKLOG_INTERVALS * max(1.0, self.interval_s)
        if self.history is None and (self._backfill_expected or not of_the_past):
            self.sample = sample
            self._receiver.sample_updated(sample, "before_backfill")
            if self._backfill_expected:
                self._pending.append(sample)  # the history begins with the backfill
                return
        self._store(sample)
        if of_the_past:
            return
        self._receiver.sample_updated(sample, "live")
        self._update_step_period(sample)

    def on_backfill(self, samples: Sequence[NodeSample]) -> None:
        """Begin the history with what the source knows of the time before the first sample."""
        self._backfill_expected = False
        pending, self._pending = self._pending, []
        for sample in (*(s for s in samples if not pending or s.time_s < pending[0].time_s), *pending):
            self._store(sample)
        if pending:
            self._receiver.sample_updated(pending[-1], "backfill")

    def _store(self, sample: NodeSample) -> None:
        if self.history is None:
            from gputop.telemetry.history import History

            self.history = History()
        self.history.append(sample)
        self._receiver.sample_stored(sample)
        self.sample = sample

    def _update_step_period(self, sample: NodeSample) -> None:
        """Estimate the step period every 10 to 30 s. It is on the screen with the next sample."""
        if not self._estimate_step_period or 0 <= sample.time_s - self._period_checked_s < STEP_PERIOD_UPDATE_S:
            return
        from gputop.telemetry.step_period import estimate_step_period, reach_s

        assert self.history is not None
        oldest_s = self.history.oldest_s
        used_s = min(reach_s(self.interval_s), sample.time_s - oldest_s) if oldest_s is not None else 0.0
        if 0 <= sample.time_s - self._period_checked_s < _NEW_SHARE * used_s:
            return
        self._period_checked_s = sample.time_s
        self.step_period = estimate_step_period(self.history)
