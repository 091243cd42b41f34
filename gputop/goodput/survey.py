"""One pass over the samples of days: the time of each GPU and job, the energy, the hours, the host's memory."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator

from msgspec.structs import asdict

from gputop.core.samples import GpuSample, NodeSample, ProcessSample
from gputop.goodput.memory_creep import Memory
from gputop.goodput.model import (
    LOST,
    STATES,
    TRAINING,
    UNKNOWN,
    Creep,
    GpuReport,
    Hour,
    JobReport,
    Spent,
    WorstHour,
)
from gputop.goodput.states import HOUR_S, GpuTime, HoldingProcess, JobTime, Tally

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
    def total(self) -> Spent:
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

    def gpus(self) -> Iterator[GpuReport]:
        for gpu, time in sorted(self._gpus.values(), key=lambda pair: (pair[0].info.index, pair[0].info.mig or 0)):
            yield GpuReport(gpu=gpu.info.label, uuid=gpu.info.uuid, name=gpu.info.name, **asdict(_spent(time.tally)))

    def jobs(self) -> Iterator[JobReport]:
        """Jobs, those with most GPU time first."""
        for job in sorted(self._jobs.values(), key=lambda job: -sum(job.tally.states_s.values())):
            yield JobReport(job=job.name, user=job.user, gpus=sorted(set(job.gpus.values())), begin_s=job.begin_s,
                            end_s=job.end_s, restarts=max(job.restarts.values(), default=0),
                            **asdict(_spent(job.tally)))

    def hours(self) -> list[Hour]:
        return [Hour(begin_s=float(hour * HOUR_S), states_s=_states(tally))
                for hour, tally in sorted(self._hours.items()) if sum(tally.states_s.values())]

    def worst_hours(self) -> list[WorstHour]:
        """Hours in which jobs lost most GPU time, worst first. Time without a job is no loss of a job."""
        hours = [(lost_s(hour), hour) for hour in self.hours()]
        bad = [(lost, hour) for lost, hour in hours if lost > _WORTH_NAMING * sum(hour.states_s.values())]
        return [WorstHour(begin_s=hour.begin_s, states_s=hour.states_s, lost_s=lost, findings=[])
                for lost, hour in heapq.nlargest(WORST_HOURS, bad, key=lambda pair: pair[0])]

    def creep(self) -> list[Creep]:
        return list(self._memory.creeps())


def lost_s(hour: Hour) -> float:
    return sum(hour.states_s.get(state, 0.0) for state in LOST)


def script_of(process: ProcessSample) -> str:
    """The command up to its first long option: what stays the same when a job is started again."""
    if process.command is None:
        return f"PID {process.pid}"
    return process.command.partition(" --")[0][:_SCRIPT_CHARS]


def _states(tally: Tally) -> dict[str, float]:
    return {state: tally.states_s[state] for state in STATES if tally.states_s.get(state)}


def _spent(tally: Tally) -> Spent:
    states = _states(tally)
    known_s = sum(states.values()) - states.get(UNKNOWN, 0.0)
    training_s = states.get(TRAINING, 0.0)
    return Spent(states_s=states, goodput_ratio=training_s / known_s if known_s else None,
                 energy_j=tally.energy_j if tally.lit else None, energy_unknown_s=tally.dark_s,
                 training_activity_ratio=tally.active_s / training_s if training_s else None,
                 training_activity_coarse=tally.coarse)
