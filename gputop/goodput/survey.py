"""One pass over the samples of days: the time of each GPU and job, the energy, the hours, the host's memory.

A state of a GPU is known when it ends: what follows decides it, too.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator

from msgspec import Struct, field
from msgspec.structs import asdict

from gputop.advice.registry import limit
from gputop.core.samples import OK, GpuSample, NodeSample, ProcessSample
from gputop.goodput import model
from gputop.goodput.memory_creep import Memory

MAX_JOBS = 200
OTHERS = "other commands"
WORST_HOURS = 5
_WORTH_NAMING = 0.02  # share of an hour's GPU time; less lost is a few checkpoints
_SCRIPT_CHARS = 300


class Survey:
    """Takes samples in the order of time; the properties hold after :meth:`finish`."""

    def __init__(self) -> None:
        self.recorded_s = 0.0
        self.simulated = False
        self.processes_unread_s = 0.0  # GPU time in which the processes of a GPU could not be listed
        self._hours: dict[int, Tally] = defaultdict(Tally)
        self._gpus: dict[str, tuple[GpuSample, GpuTime]] = {}
        self._jobs: dict[tuple[str | None, str], JobTime] = {}
        self._memory = Memory(script_of)

    def add(self, sample: NodeSample, seconds: float) -> None:
        """``seconds``: the time before the sample that it stands for; 0 where none was recorded."""
        self.recorded_s += seconds
        self.simulated |= sample.simulated
        processes = {process.pid: process for process in sample.processes}
        writes = self._writes(sample)
        for gpu in sample.gpus:
            if gpu.info.mig_mode:
                continue  # its instances are GPUs of their own; the driver tells no activity of the whole
            _, time = self._gpus.get(gpu.info.uuid) or (gpu, GpuTime(self._hours))
            self._gpus[gpu.info.uuid] = gpu, time
            self.processes_unread_s += seconds * (gpu.processes_reason is not None)
            time.add(sample.time_s, seconds, gpu, self._holder(gpu, time.holder, processes, writes, sample.time_s))
        self._memory.add(sample)

    def finish(self) -> None:
        for _, time in self._gpus.values():
            time.close()

    def _holder(self, gpu: GpuSample, before: HoldingProcess | None, processes: dict[int, ProcessSample],
                writes: dict[tuple[str | None, str], float], time_s: float) -> HoldingProcess | None:
        """Holder of the GPU: the one that had it, as long as it does, else the one with most memory on it."""
        held = [candidate for candidate in gpu.processes if "C" in candidate.kind]
        if not held:
            return None
        holder = next((holder for holder in held if before is not None and holder.pid == before.pid), None) or max(
            held, key=lambda holder: (holder.memory_bytes.value or 0.0, -holder.pid))
        process = processes.get(holder.pid)
        if before is not None and before.pid == holder.pid and (process is None or process.command is None):
            before.job.end_s = time_s  # it ends: the host knows it no more, the driver still lists it
            return HoldingProcess(holder.pid, before.job, None)
        key = (process.user, script_of(process)) if process is not None else (None, f"PID {holder.pid}")
        if key not in self._jobs and len(self._jobs) >= MAX_JOBS:
            key = (None, OTHERS)
        job = self._jobs.setdefault(key, JobTime(key[1], key[0], time_s, time_s))
        job.end_s = time_s
        job.gpus[gpu.info.uuid] = gpu.info.label
        return HoldingProcess(holder.pid, job, writes.get(key))

    @staticmethod
    def _writes(sample: NodeSample) -> dict[tuple[str | None, str], float]:
        """Bytes per second that each job writes to storage: one rank saves while the others wait."""
        writes: dict[tuple[str | None, str], float] = defaultdict(float)
        for process in sample.processes:
            writes[process.user, script_of(process)] += process.io_write_bytes_per_s.value or 0.0
        return writes

    # -- results ------------------------------------------------------------------------------------

    @property
    def total(self) -> model.Spent:
        total = Tally()
        for tally in (time.tally for _, time in self._gpus.values()):
            for state, seconds in tally.states_s.items():
                total.states_s[state] += seconds
            total.energy_j += tally.energy_j
            total.dark_s += tally.dark_s
            total.lit |= tally.lit
            total.active_s += tally.active_s
            total.coarse |= tally.coarse
        return _spent(total)

    def gpus(self) -> Iterator[model.GpuReport]:
        for gpu, time in sorted(self._gpus.values(), key=lambda pair: (pair[0].info.index, pair[0].info.mig or 0)):
            info = gpu.info
            yield model.GpuReport(gpu=info.label, uuid=info.uuid, name=info.name, **asdict(_spent(time.tally)))

    def jobs(self) -> Iterator[model.JobReport]:
        """Jobs, those with most GPU time first."""
        for job in sorted(self._jobs.values(), key=lambda job: -sum(job.tally.states_s.values())):
            yield model.JobReport(job=job.name, user=job.user, gpus=sorted(set(job.gpus.values())), begin_s=job.begin_s,
                                  end_s=job.end_s, restarts=max(job.restarts.values(), default=0),
                                  **asdict(_spent(job.tally)))

    def hours(self) -> list[model.Hour]:
        return [model.Hour(begin_s=float(hour * HOUR_S), states_s=_states(tally))
                for hour, tally in sorted(self._hours.items()) if sum(tally.states_s.values())]

    def worst_hours(self) -> list[model.WorstHour]:
        """Hours in which jobs lost most GPU time, worst first. Time without a job is no loss of a job."""
        hours = [(lost_s(hour), hour) for hour in self.hours()]
        bad = [(lost, hour) for lost, hour in hours if lost > _WORTH_NAMING * sum(hour.states_s.values())]
        return [model.WorstHour(begin_s=hour.begin_s, states_s=hour.states_s, lost_s=lost, findings=[])
                for lost, hour in heapq.nlargest(WORST_HOURS, bad, key=lambda pair: pair[0])]

    def creep(self) -> list[model.Creep]:
        return list(self._memory.creeps())


def lost_s(hour: model.Hour) -> float:
    return sum(hour.states_s.get(state, 0.0) for state in model.LOST)


def script_of(process: ProcessSample) -> str:
    """The command up to its first long option: what stays the same when a job is started again."""
    if process.command is None:
        return f"PID {process.pid}"
    return process.command.partition(" --")[0][:_SCRIPT_CHARS]


def _states(tally: Tally) -> dict[str, float]:
    return {state: tally.states_s[state] for state in model.STATES if tally.states_s.get(state)}


def _spent(tally: Tally) -> model.Spent:
    states = _states(tally)
    known_s = sum(states.values()) - states.get(model.UNKNOWN, 0.0)
    training_s = states.get(model.TRAINING, 0.0)
    return model.Spent(states_s=states, goodput_ratio=training_s / known_s if known_s else None,
                       energy_j=tally.energy_j if tally.lit else None, energy_unknown_s=tally.dark_s,
                       training_activity_ratio=tally.active_s / training_s if training_s else None,
                       training_activity_coarse=tally.coarse)


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
        stretch.coarse |= seconds > 0 and which == "gpu_util"
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
                self._settle(stretch, model.RESTART, holder.job)
        self.close()
        self._begun = False
        if self.holder is not None and self._again:
            holder.job.restarts[uuid] += 1
        elif self.holder is None and (stretch is None or stretch.kind != FREE):
            self._begun = True  # it was there when the recording began

    def _state(self, stretch: _Stretch) -> str:
        if stretch.kind in (FREE, BLIND):
            return model.IDLE if stretch.kind == FREE else model.UNKNOWN
        if stretch.kind == BUSY or (stretch.kind == SPINS and stretch.seconds < limit("spinning.window_s")):
            self._begun = True
            return model.TRAINING
        if stretch.kind == LOW and not self._begun and stretch.seconds <= RESTART_S:
            return model.RESTART if self._again else model.STARTING
        written = stretch.written_bytes
        if stretch.kind == LOW and written >= max(CHECKPOINT_BYTES, CHECKPOINT_BYTES_PER_S * stretch.seconds):
            return model.CHECKPOINT
        return model.WAITING

    def _settle(self, stretch: _Stretch, state: str, job: JobTime | None) -> None:
        for tally in (self.tally, *((job.tally,) if job is not None else ())):
            tally.states_s[state] += stretch.seconds
            if state == model.TRAINING:
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
