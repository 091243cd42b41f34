"""Plays a recording: the samples of a file, one after the other, at the pace of their times.

The samples are complete, so a :class:`Player` takes the place of both the source and the sampler of a session. Its
clock is the recording's: ages, and the time the live rules look back on, are in recorded time.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from gputop.core.errors import GputopError
from gputop.core.samples import NodeSample

MAX_SPEED = math.inf
SPEEDS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, MAX_SPEED)
MAX_WAIT_S = 10.0  # recorded time in which nothing was sampled is passed over

# The samples before the starting point fill the history: in these steps, not all of them.
_FINE_HISTORY_S, _FINE_STEP_S = 600.0, 1.0
_COARSE_HISTORY_S, _COARSE_STEP_S = 6 * 3600.0, 10.0


class SampleSequence(Protocol):
    """Sequence that is played: a :class:`gputop.replay.reader.Recording`, say."""

    @property
    def times_s(self) -> Sequence[float]: ...

    def __len__(self) -> int: ...

    def sample(self, index: int) -> NodeSample: ...

    def index_at(self, time_s: float) -> int: ...

    def close(self) -> None: ...


class Player:
    """Plays ``recording`` from ``start_s`` seconds after its first sample, ``speed`` times as fast.

    Has what a session asks of a source and of a :class:`gputop.telemetry.sampler.Sampler`, and beside it
    seek, speed and pause. After :meth:`start` samples come from a thread of the player. At the end
    it stays on the last one. All methods may be called from any thread; the recording is the
    player's from now on. ``simulated`` and ``label`` are those of what was recorded.
    """

    badge = "REPLAY"  # what the header calls it

    def __init__(self, recording: SampleSequence, *, start_s: float = 0.0, speed: float = 1.0,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.recording = recording
        self.speed = speed
        self.paused = False
        self._on_sample: Callable[[NodeSample], None] = lambda sample: None
        self._on_error: Callable[[GputopError], None] = lambda error: None
        self._clock = clock
        self._changed = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        times = recording.times_s
        steps = sorted(b - a for a, b in itertools.pairwise(times[:600]) if b > a)
        self.interval_s = steps[len(steps) // 2] if steps else 1.0
        first = recording.sample(0)
        self.simulated, self.label = first.simulated, first.source
        self._shown = -1  # the sample handed on last
        self._index = recording.index_at(times[0] + start_s)  # the one that is played
        self._seek_to: int | None = self._index
        self._due_s = 0.0  # when the next sample is due, by ``clock``

    # -- as source and sampler ----------------------------------------------------------------

    def profiler_endpoints(self) -> Mapping[str, str]:
        """None: what was recorded runs no longer."""
        return {}

    def connect(self, on_sample: Callable[[NodeSample], None], on_error: Callable[[GputopError], None]) -> None:
        """Say who gets the samples; before :meth:`start`."""
        self._on_sample, self._on_error = on_sample, on_error

    def start(self) -> None:
        self._thread = threading.Thread(target=self._play, name="gputop-player", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 0.5) -> None:
        """End; after it returned in time no callback comes any more."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def set_interval(self, interval_s: float) -> None:
        """The interval of a recording is what it was."""

    # -- as a player --------------------------------------------------------------------------

    def now_s(self) -> float:
        """The moment that is played, Unix time."""
        return self.recording.times_s[self._index]

    @property
    def place_s(self) -> tuple[float, float]:
        """Seconds from the first sample to the one that is played, and to the last one."""
        times = self.recording.times_s
        return self.now_s() - times[0], times[-1] - times[0]

    @property
    def at_end(self) -> bool:
        return self._index == len(self.recording) - 1

    def state(self) -> str:
        """The speed, or why playing has halted, for the header."""
        if self.at_end:
            return "end of recording"
        text = "max speed" if self.speed == MAX_SPEED else f"{self.speed:g}×"
        return f"{text}, paused" if self.paused else text

    def toggle_pause(self) -> None:
        with self._changed:
            self.paused = not self.paused
            self._due_s = self._clock()
            self._changed.notify_all()

    def change_speed(self, by: int) -> None:
        with self._changed:
            nearest = min(range(len(SPEEDS)), key=lambda i: abs(min(SPEEDS[i], 1e6) - min(self.speed, 1e6)))
            self.speed = SPEEDS[min(len(SPEEDS) - 1, max(0, nearest + by))]
            self._due_s = min(self._due_s, self._clock() + self._wait_s())
            self._changed.notify_all()

    def seek(self, by_s: float) -> None:
        """Go ``by_s`` seconds of recorded time forward, or back; stays within the recording."""
        with self._changed:
            here = self._index if self._seek_to is None else self._seek_to
            target = self.recording.index_at(self.recording.times_s[here] + by_s)
            if target == here and by_s:  # a hole in the recording: go to its other side
                target = min(len(self.recording) - 1, max(0, here + (1 if by_s > 0 else -1)))
            self._seek_to = target
            self._changed.notify_all()

    # -- the player's thread ------------------------------------------------------------------

    def _play(self) -> None:
        try:
            while (order := self._wait()) is not None:
                for sample in self._samples_to_show(*order):
                    if self._stopping:
                        return
                    self._on_sample(sample)
                self._shown = order[1]
        except GputopError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001  thread boundary: else the screen would freeze without a word
            self._fail(GputopError(f"gputop stopped playing: {error!r}", "This is a bug in gputop; please report it."))
        finally:
            self.recording.close()

    def _fail(self, error: GputopError) -> None:
        if not self._stopping:
            self._on_error(error)

    def _wait(self) -> tuple[int, int] | None:
        """Wait until a sample is due; (the one shown before, the one to show), None at the stop."""
        with self._changed:
            while not self._stopping:
                now_s = self._clock()
                if self._seek_to is not None:
                    self._index, self._seek_to = self._seek_to, None
                    self._due_s = now_s + self._wait_s()
                    return self._shown, self._index
                if self.paused or self.at_end:
                    self._changed.wait()
                elif now_s < self._due_s:
                    self._changed.wait(self._due_s - now_s)
                else:
                    self._index += 1
                    # From when it was due, so that playing does not fall behind by its own cost.
                    self._due_s = max(self._due_s, now_s - 1.0) + self._wait_s()
                    return self._index - 1, self._index
        return None

    def _wait_s(self) -> float:
        """Return how long the sample that is shown stays."""
        if self.at_end:
            return 0.0
        gap_s = self.recording.times_s[self._index + 1] - self.recording.times_s[self._index]
        return max(0.0, min(gap_s, max(MAX_WAIT_S, 2 * self.interval_s))) / self.speed

    def _samples_to_show(self, before: int, index: int) -> Iterator[NodeSample]:
        """Sample ``index`` and, ahead of it, what history lacks between the one shown before and it."""
        times = self.recording.times_s
        now_s = last_s = times[index]
        past = []
        for i in range(index - 1, before, -1):
            ago_s = now_s - times[i]
            if ago_s > _COARSE_HISTORY_S:
                break
            if last_s - times[i] >= 0.99 * (_FINE_STEP_S if ago_s <= _FINE_HISTORY_S else _COARSE_STEP_S):
                past.append(i)
                last_s = times[i]
        for i in (*reversed(past), index):
            yield self.recording.sample(i)
