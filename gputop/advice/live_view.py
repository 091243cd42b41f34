"""What the live rules look at: windows of history, the processes on each GPU, what is shown already."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gputop.advice.finding import Abstained, Finding
from gputop.advice.thresholds import limit
from gputop.history import History
from gputop.samples import OK, GpuSample, NodeSample, ProcessSample
from gputop.text import ranges

F64 = npt.NDArray[np.float64]

NO_PROCESS = "no compute process holds a GPU: start the job, or look at the node it runs on"
NO_PROCESS_WATCHED = "no compute process holds a GPU that is watched: leave out --gpus to see all GPUs of the node"

# Servers that hold a GPU for others to share, not jobs.
_SERVICES = ("nvidia-cuda-mps", "nvidia-persistenced", "nv-hostengine", "dcgm")


@dataclass(frozen=True, slots=True)
class Window:
    """One metric of all GPUs over a window: times[n], values[n, gpu], readings and mean per GPU.

    The mean is NaN where the readings do not cover the window.
    """

    times: F64
    values: npt.NDArray[np.float32]
    count: npt.NDArray[np.int64]
    mean: F64


def _window(times: F64, values: npt.NDArray[np.float32], seconds: float, end_s: float) -> Window:
    here = ~np.isnan(values)
    count = here.sum(axis=0)
    mean = np.full(values.shape[1], np.nan)
    enough = np.flatnonzero(count >= limit("min_readings"))
    if len(enough):
        some = here[:, enough]
        first = times[some.argmax(axis=0)]
        last = times[len(times) - 1 - some[::-1].argmax(axis=0)]
        # A reading stands for the time to the next one, so first to last lacks one step.
        seen_s = (last - first) * count[enough] / (count[enough] - 1)
        good = (seen_s >= limit("coverage") * seconds) & (end_s - last <= (1 - limit("coverage")) * seconds)
        total = np.where(some, values[:, enough], np.float32(0)).sum(axis=0, dtype=np.float64)
        mean[enough] = np.where(good, total / count[enough], np.nan)
    return Window(times, values, count, mean)


class View:
    """One tick's view of the node for all live rules. Asks history once for each metric and window."""

    def __init__(self, history: History, sample: NodeSample, previous: tuple[Finding, ...]) -> None:
        self.history = history
        self.sample = sample
        self.previous = previous
        self.boards = [g for g in sample.gpus if g.state == OK and g.info.mig is None]  # GPUs that can be read
        # Rules about a job and its GPUs hold for whole ones: the parts of a divided GPU belong to different jobs.
        self.working = [g for g in self.boards if not g.info.mig_mode]
        self._column = {uuid: i for i, uuid in enumerate(history.uuids)}
        self._shown: dict[str, frozenset[int]] = {}
        self._windows: dict[tuple[str, float], Window] = {}

    # -- what is shown ------------------------------------------------------------------------

    def shown(self, finding_id: str) -> frozenset[int]:
        """The GPUs for which this finding is on screen."""
        if finding_id not in self._shown:
            self._shown[finding_id] = frozenset(g for f in self.previous if f.id == finding_id for g in f.gpus)
        return self._shown[finding_id]

    def limit(self, finding_id: str, name: str, gpu: int) -> float:
        """The threshold ``name`` to leave where the finding is shown for ``gpu``, else to enter."""
        return limit(f"{finding_id}.{name}{'leave' if gpu in self.shown(finding_id) else 'enter'}")

    # -- what can be seen -----------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Whether all GPUs of the node are watched (``--gpus`` leaves some out)."""
        return not self.sample.gpus_unwatched

    def sees_below(self, index: int) -> bool:
        """Whether all GPUs before this one are watched, so that none of a job's can lie among them unseen."""
        return self.complete or set(range(index)) <= {g.info.index for g in self.sample.gpus}

    def seconds(self, threshold_id: str) -> float:
        """The length of a window: the threshold, or at slow intervals as long as enough readings take."""
        return max(limit(threshold_id), limit("min_readings") * (self.sample.interval_s or 0.0))

    # -- readings -----------------------------------------------------------------------------

    def window(self, metric: str, seconds: float) -> Window:
        key, end_s = (metric, seconds), self.sample.time_s
        if key not in self._windows:
            times, values = self.history.windows(metric, seconds, end_s=end_s)
            self._windows[key] = _window(times, values, seconds, end_s)
        return self._windows[key]

    def mean(self, gpu: GpuSample, metric: str, seconds: float) -> float | None:
        """Mean over the last ``seconds``; None where too little of them was seen."""
        mean = float(self.window(metric, seconds).mean[self._column[gpu.info.uuid]])
        return None if mean != mean else mean

    def span(self, gpu: GpuSample, metric: str, seconds: float) -> float | None:
        """Largest less smallest reading of the last ``seconds``; None where too little of them was seen."""
        values = self.window(metric, seconds).values[:, self._column[gpu.info.uuid]]
        return None if self.mean(gpu, metric, seconds) is None else float(np.nanmax(values) - np.nanmin(values))

    def readings_count(self, gpu: GpuSample, metric: str, seconds: float) -> int:
        return int(self.window(metric, seconds).count[self._column[gpu.info.uuid]])

    def activity(self, gpu: GpuSample, seconds: float) -> tuple[str, float] | None:
        """How busy the GPU was: SM activity, or else coarse utilization; (metric, mean)."""
        for metric in ("sm_active", "gpu_util"):
            mean = self.mean(gpu, metric, seconds)
            if mean is not None:
                return metric, mean
        return None

    def slice_means(self, gpus: Sequence[GpuSample], metric: str, seconds: float) -> list[list[float]]:
        """Means of these GPUs in each slice of the last ``seconds``, oldest first; slices with a GPU
        without readings are left out. There are :meth:`slices` of them at most."""
        window, count = self.window(metric, seconds), self.slices(seconds)
        values = window.values[:, [self._column[g.info.uuid] for g in gpus]].astype(np.float64)
        # A reading tells of the interval before it: its middle decides, so that late ticks fall into their slice too.
        age_s = self.sample.time_s - window.times + (self.sample.interval_s or 0.0) / 2
        place = np.floor(age_s * count / seconds)
        out = []
        for number in range(count - 1, -1, -1):
            part = values[place == number]
            here = ~np.isnan(part)
            counts = here.sum(axis=0)
            if counts.all():
                out.append((np.where(here, part, 0.0).sum(axis=0) / counts).tolist())
        return out

    def slices(self, seconds: float) -> int:
        """How many slices the last ``seconds`` have: each as long as an interval at least."""
        return round(seconds / max(limit("slice_s"), self.sample.interval_s or 0.0))

    # -- processes ----------------------------------------------------------------------------

    @property
    def processes(self) -> list[ProcessSample]:
        """The processes that compute on a GPU, services left out."""
        return [p for p in self.sample.processes if self.compute_gpus(p) and not is_service(p)]

    def compute_gpus(self, process: ProcessSample) -> list[GpuSample]:
        """The readable GPUs ``process`` computes on, lowest index first."""
        held = [g for g in self.working if g.info.index in process.gpus]
        return sorted((g for g in held if "C" in process.gpus[g.info.index].kind), key=lambda g: g.info.index)

    def age_s(self, process: ProcessSample) -> float:
        """For how long the process is known to exist at least."""
        since = [self.history.held_since(g.info.uuid, process.pid) for g in self.compute_gpus(process)]
        known = [s for s in (*since, process.started_s) if s is not None]
        return max(0.0, self.sample.time_s - min(known)) if known else 0.0

    def without_process(self, seconds: float) -> tuple[list[GpuSample], list[GpuSample]]:
        """The GPUs for which no compute process was listed for that long: the idle ones, and those at work all
        the same. From inside a container the processes of others cannot be seen."""
        idle: list[GpuSample] = []
        at_work: list[GpuSample] = []
        for gpu in self.working:
            since_s, activity = self.history.held_since(gpu.info.uuid, None), self.activity(gpu, seconds)
            if gpu.processes_reason is not None or since_s is None or self.sample.time_s - since_s < seconds:
                continue
            if activity is not None:
                works = activity[1] > self.limit("unused_gpu", "", gpu.info.index)
                (at_work if works else idle).append(gpu)
        return idle, at_work

    def unlisted(self, finding_id: str, gpus: Sequence[GpuSample]) -> Abstained:
        """GPUs at work without a process: who uses them is not known."""
        return Abstained(finding_id, f"the processes on {gpus_text(gpus)}: at work, but the driver lists none; a "
                                     "container sees those of others only with --pid=host")

    def no_process(self, finding_id: str) -> Abstained:
        """Why there is no process to judge."""
        if self.boards and not self.working:
            return Abstained(finding_id, "a whole GPU: jobs on MIG instances are not judged from live figures")
        unread = [g for g in self.sample.gpus if g.processes_reason is not None]
        if unread:
            return Abstained(finding_id, f"the processes on {gpus_text(unread)}: {unread[0].processes_reason}")
        at_work = self.without_process(self.seconds("unused_gpu.window_s"))[1]
        if at_work:
            return self.unlisted(finding_id, at_work)
        return Abstained(finding_id, NO_PROCESS if self.complete else NO_PROCESS_WATCHED)


def is_service(process: ProcessSample) -> bool:
    return any(name in (process.command or "") for name in _SERVICES)


def same_job(a: ProcessSample, b: ProcessSample, complete: bool = True) -> bool:
    """Whether two processes belong to one job: parent and child, ranks, workers of one program.

    Ranks run one command, but for numbers, as one user, on different GPUs; where not all GPUs
    are watched (not ``complete``) they may differ on the others. The same command word for
    word is taken for a worker of the other, also on the same GPU.
    """
    if a.parent_pid == b.pid or b.parent_pid == a.pid:
        return True
    if a.user != b.user or a.command is None or b.command is None:
        return False
    if a.command == b.command:
        return True
    return _pattern(a.command) == _pattern(b.command) and (not complete or set(a.gpus) != set(b.gpus))


def _pattern(command: str) -> str:
    return re.sub(r"\d+", "#", command)


# -- words --------------------------------------------------------------------------------------

def gpus_text(gpus: Iterable[GpuSample | int]) -> str:
    """ "GPU 3", "GPUs 0-2, 5"."""
    indices = {g if isinstance(g, int) else g.info.index for g in gpus}
    return ("GPU " if len(indices) == 1 else "GPUs ") + ranges(indices, ", ")


def name_of(process: ProcessSample) -> str:
    """A short name: the script or program, with the pid."""
    words = (process.command or "").split()
    scripts = [w for w in words if w.endswith(".py")]
    name = (scripts or words or ["process"])[0].rsplit("/", 1)[-1]
    return f"{name} (pid {process.pid})"

