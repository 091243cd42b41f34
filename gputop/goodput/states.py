"""States of a GPU, sample by sample. A state is known when it ends: what follows decides it, too."""

from __future__ import annotations

from collections import defaultdict

from msgspec import Struct, field

from gputop.advice.registry import limit
from gputop.core.samples import OK, GpuSample
from gputop.goodput.model import CHECKPOINT, IDLE, RESTART, STARTING, TRAINING, UNKNOWN, WAITING

BUSY, SPINS, LOW, FREE, BLIND = range(5)  # what one sample shows

HOUR_S = 3600
RESTART_S = 1800.0  # the same command within half an hour is a restart, later a new start
# So much written while the GPU does nothing is taken for a checkpoint: logs and summaries are far below.
CHECKPOINT_BYTES_PER_S = 20e6
CHECKPOINT_BYTES = 200e6


class Tally(Struct):
    """GPU seconds by state, and the energy."""

    states_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    energy_j: float = 0.0
    dark_s: float = 0.0  # without a reading of power
    lit: bool = False  # power was read at all
    active_s: float = 0.0  # training time, each second times the activity in it
    coarse: bool = False  # of some of it the driver gave the coarse utilization only

    def add_power(self, seconds: float, watts: float | None) -> None:
        if watts is None:
            self.dark_s += seconds
        else:
            self.energy_j += seconds * watts
            self.lit = True


class JobTime(Struct):
    """GPU time of one user's processes of one command; see :class:`gputop.goodput.model.JobReport`."""

    name: str
    user: str | None
    begin_s: float
    end_s: float
    tally: Tally = field(default_factory=Tally)
    restarts: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # by the GPU's UUID
    gpus: dict[str, str] = field(default_factory=dict)  # label by UUID


class HoldingProcess(Struct, frozen=True):
    """The process that has a GPU, and what it writes to storage (None: not known)."""

    pid: int
    job: JobTime
    write_bytes_per_s: float | None


class _Stretch(Struct):
    """Samples of one kind in a row."""

    kind: int
    job: JobTime | None
    seconds: float = 0.0
    written_bytes: float = 0.0
    active_s: float = 0.0  # each second times the activity in it
    coarse: bool = False  # of some of it the driver gave the coarse utilization only
    hours_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))


class GpuTime:
    """The time of one GPU. ``hours`` is shared by all GPUs: seconds by hour and state."""

    def __init__(self, hours: dict[int, Tally]) -> None:
        self.tally = Tally()
        self._hours = hours
        self._stretch: _Stretch | None = None
        self.holder: HoldingProcess | None = None  # the last one, also after it ended
        self._begun = True  # the holder has worked; it may have before the recording began
        self._again = False  # it follows one of the same job

    def add(self, time_s: float, seconds: float, gpu: GpuSample, holder: HoldingProcess | None) -> None:
        """``seconds`` before ``time_s``; 0 behind a gap of the recording."""
        if seconds == 0:
            self.close()
        kind = kind_of(gpu, holder is not None)
        if holder is not None and (self.holder is None or holder.pid != self.holder.pid):
            self._change_holder(gpu.info.uuid, holder)
        if self._stretch is None or kind != self._stretch.kind:
            self.close()
            self._stretch = _Stretch(kind, holder.job if holder else None)
        stretch = self._stretch
        stretch.seconds += seconds
        stretch.hours_s[int((time_s - seconds / 2) // HOUR_S)] += seconds
        which, activity = gpu.activity()
        stretch.active_s += seconds * (activity.value or 0.0)
        stretch.coarse |= which == "gpu_util"
        watts = gpu["power_w"].value
        self.tally.add_power(seconds, watts)
        if holder is not None:
            self.holder = holder
            holder.job.tally.add_power(seconds, watts)
            stretch.written_bytes += seconds * (holder.write_bytes_per_s or 0.0)

    def close(self) -> None:
        """End the present stretch; at the end of all samples, too."""
        stretch, self._stretch = self._stretch, None
        if stretch is not None:
            self._settle(stretch, self._state(stretch), stretch.job)

    def _change_holder(self, uuid: str, holder: HoldingProcess) -> None:
        stretch = self._stretch
        self._again = self.holder is not None and self.holder.job is holder.job
        if stretch is not None and stretch.kind == FREE and self._again:
            self._again = stretch.seconds <= RESTART_S
            if self._again:
                self._stretch = None
                self._settle(stretch, RESTART, holder.job)
        self.close()
        self._begun = False
        if self.holder is not None and self._again:
            holder.job.restarts[uuid] += 1
        elif self.holder is None and (stretch is None or stretch.kind != FREE):
            self._begun = True  # it was there when the recording began

    def _state(self, stretch: _Stretch) -> str:
        if stretch.kind in (FREE, BLIND):
            return IDLE if stretch.kind == FREE else UNKNOWN
        if stretch.kind == BUSY or (stretch.kind == SPINS and stretch.seconds < limit("spinning.window_s")):
            self._begun = True
            return TRAINING
        if stretch.kind == LOW and not self._begun and stretch.seconds <= RESTART_S:
            return RESTART if self._again else STARTING
        written = stretch.written_bytes
        if stretch.kind == LOW and written >= max(CHECKPOINT_BYTES, CHECKPOINT_BYTES_PER_S * stretch.seconds):
            return CHECKPOINT
        return WAITING

    def _settle(self, stretch: _Stretch, state: str, job: JobTime | None) -> None:
        for tally in (self.tally, *((job.tally,) if job is not None else ())):
            tally.states_s[state] += stretch.seconds
            if state == TRAINING:
                tally.active_s += stretch.active_s
                tally.coarse |= stretch.coarse
        for hour, seconds in stretch.hours_s.items():
            self._hours[hour].states_s[state] += seconds


def kind_of(gpu: GpuSample, held: bool) -> int:
    """State that one sample shows. Activity of a GPU that nobody is seen to hold is work all the same."""
    active = gpu.activity()[1].value
    if gpu.state != OK or active is None:
        return BLIND
    if active < limit("low_sm_active.pause"):
        return LOW if held else FREE
    return SPINS if held and _spins(gpu) else BUSY


def _spins(gpu: GpuSample) -> bool:
    """Kernels that run and compute nothing, by the limits of the rule ``spinning``; not where a figure is missing."""
    util, power, allowed = (gpu[metric].value for metric in ("gpu_util", "power_w", "power_limit_w"))
    if util is None or util < limit("spinning.util_enter") or power is None or not allowed:
        return False
    sm, tensor, dram = (gpu[metric].value for metric in ("sm_active", "tensor_active", "dram_active"))
    if sm is None or tensor is None or dram is None:
        rx, tx = (gpu[f"pcie_{way}_bytes_per_s"].value for way in ("rx", "tx"))
        quiet = rx is not None and tx is not None and rx + tx <= limit("spinning.traffic_enter")
        return sm is None and quiet and power <= limit("spinning.coarse_power_enter") * allowed
    return (sm <= limit("spinning.sm_enter") and tensor <= limit("spinning.tensor_enter")
            and dram <= limit("spinning.dram_enter") and power <= limit("spinning.power_enter") * allowed)
