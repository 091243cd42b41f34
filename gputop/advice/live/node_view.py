"""What the live rules see of the node: windows of history, the processes on each GPU, what is shown already."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from gputop.advice.registry import limit, rule_of
from gputop.advice.verdict import Missing
from gputop.core.findings import Finding, Severity
from gputop.core.samples import OK, GpuSample, NodeSample, ProcessSample
from gputop.ranks.model import Report
from gputop.telemetry.history import History, HostHistoryPoint
from gputop.text.commands import program_name
from gputop.text.units import ranges

F64 = npt.NDArray[np.float64]

NO_PROCESS = "no compute process holds a GPU: start the job, or look at the node it runs on"
NO_PROCESS_WATCHED = "no compute process holds a GPU that is watched: leave out --gpus to see all GPUs of the node"

_LONGEST = {"sm_active": "tensor_idle.window_s", "tensor_active": "tensor_idle.window_s",
            "gpu_util": "low_sm_active.window_s"}

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
    n, gpus = values.shape
    total = values.sum(axis=0, dtype=np.float64)
    count = np.full(gpus, n)
    mean = np.full(gpus, np.nan)
    if not n:
        return Window(times, values, count, mean)
    first: F64 | np.float64 = times[0]
    last: F64 | np.float64 = times[-1]
    if np.isnan(total).any():  # else nothing is missing, as nearly always
        here = ~np.isnan(values)
        count = here.sum(axis=0)
        total = np.where(here, values, np.float32(0)).sum(axis=0, dtype=np.float64)
        first, last = times[here.argmax(axis=0)], times[n - 1 - here[::-1].argmax(axis=0)]
    # A reading stands for the time to the next one, so first to last lacks one step.
    seen_s = (last - first) * count / np.maximum(count - 1, 1)
    good = ((count >= limit("min_readings")) & (seen_s >= limit("coverage") * seconds)
            & (end_s - last <= (1 - limit("coverage")) * seconds))
    np.divide(total, count, out=mean, where=good)
    return Window(times, values, count, mean)


class NodeView:
    """One sample's view of the node for all live rules. It asks the history once for each metric and window."""

    def __init__(self, history: History, sample: NodeSample, previous: tuple[Finding, ...],
                 ranks: Report | None = None) -> None:
        """``ranks``: what NCCL tells of the job; None: it was not asked."""
        self.ranks = ranks
        self.history = history
        self.sample = sample
        self.previous = previous
        self.readable_gpus = [g for g in sample.gpus if g.state == OK and g.info.mig is None]
        # Rules about a job and its GPUs hold for whole ones: the parts of a divided GPU belong to different jobs.
        self.whole_gpus = [g for g in self.readable_gpus if not g.info.mig_mode]
        self._column = {uuid: i for i, uuid in enumerate(history.uuids)}
        self._shown: dict[str, frozenset[int]] = {}
        self._windows: dict[tuple[str, float], Window] = {}
        self._tables: dict[tuple[str, float], F64] = {}
        self._readings: dict[str, tuple[float, F64, npt.NDArray[np.float32]]] = {}
        self._shares: dict[tuple[tuple[str, ...], float], F64] = {}
        self._hosts: dict[float, list[HostHistoryPoint]] = {}
        self._found: list[tuple[str, frozenset[int]]] = []

    # -- what the rules before found ------------------------------------------------------------

    def note(self, finding: Finding) -> None:
        """Remember a finding of this sample for the rules that come after it."""
        indices = set(finding.gpus)
        rule = rule_of(finding.id, "live")
        if rule is not None and rule.holds_up_job:
            for process in self.processes:
                held = {g.info.index for g in self.compute_gpus(process)}
                indices |= held if held & set(finding.gpus) else set()
        self._found.append((finding.id, frozenset(indices)))

    def found(self, *finding_ids: str) -> bool:
        """Whether a rule before found, on this sample, one of these."""
        return any(found in finding_ids for found, _ in self._found)

    def gpus_explained_by(self, *finding_ids: str) -> frozenset[int]:
        """The GPUs whose state one of these findings, made before on this sample, accounts for."""
        return frozenset(i for found, gpus in self._found if found in finding_ids for i in gpus)

    def gpus_left_out(self, rule_id: str) -> frozenset[int]:
        """The GPUs that this rule leaves out: a rule before it accounts for their state."""
        rule = rule_of(rule_id, "live")
        return frozenset() if rule is None else self.gpus_explained_by(*rule.yields_to)

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
            fetched = self._readings.get(metric)
            if fetched is None or fetched[0] < seconds:
                # What rules ask for over several windows is fetched once, for the longest.
                longest = max(seconds, self.seconds(_LONGEST[metric])) if metric in _LONGEST else seconds
                fetched = self._readings[metric] = (longest, *self.history.windows(metric, longest, end_s=end_s))
            first = int(np.searchsorted(fetched[1], end_s - seconds, "left"))
            times, values = fetched[1][first:], fetched[2][first:]
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
        # A reading is of the interval before it: its middle decides, so that late samples fall into their slice too.
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

    def slice_table(self, metric: str, seconds: float) -> F64:
        """Mean of each GPU in each slice of the last ``seconds``: [slice, gpu], oldest first, NaN without readings.

        For GPUs one by one; :meth:`column` tells where one is.
        """
        key = (metric, seconds)
        if key not in self._tables:
            window, count = self.window(metric, seconds), self.slices(seconds)
            table = np.full((count, window.values.shape[1]), np.nan)
            age_s = self.sample.time_s - window.times + (self.sample.interval_s or 0.0) / 2
            place = count - 1 - np.floor(age_s * count / seconds).astype(np.int64)
            inside = (place >= 0) & (place < count)
            place, values = place[inside], window.values[inside]
            if len(place):
                starts = np.flatnonzero(np.diff(place, prepend=-1))
                here = ~np.isnan(values)
                total = np.add.reduceat(np.where(here, values, np.float32(0)), starts, axis=0, dtype=np.float64)
                counts = np.add.reduceat(here, starts, axis=0, dtype=np.int64)
                rows = np.full(total.shape, np.nan)
                np.divide(total, counts, out=rows, where=counts > 0)
                table[place[starts]] = rows
            self._tables[key] = table
        return self._tables[key]

    def column(self, gpu: GpuSample) -> int:
        """Where this GPU is in the values of a :class:`Window` and in a :meth:`slice_table`."""
        return self._column[gpu.info.uuid]

    def slices(self, seconds: float) -> int:
        """How many slices the last ``seconds`` have: each as long as an interval at least."""
        return round(seconds / max(limit("slice_s"), self.sample.interval_s or 0.0))

    def clock_event_share(self, gpu: GpuSample, reasons: tuple[str, ...], seconds: float) -> float | None:
        """Share of the samples in which any of these clock event reasons was active; None where not known."""
        key = (reasons, seconds)
        if key not in self._shares:
            self._shares[key] = self.history.clock_event_shares(reasons, seconds)
        share = float(self._shares[key][self._column[gpu.info.uuid]])
        return None if share != share else share

    # -- processes ----------------------------------------------------------------------------

    @cached_property
    def processes(self) -> list[ProcessSample]:
        """The processes that compute on a GPU, services left out."""
        return [p for p in self.sample.processes if self.compute_gpus(p) and not is_service(p)]

    def compute_gpus(self, process: ProcessSample) -> list[GpuSample]:
        """The readable GPUs ``process`` computes on, lowest index first."""
        held = [g for g in self.whole_gpus if g.info.index in process.gpus]
        return sorted((g for g in held if "C" in process.gpus[g.info.index].kind), key=lambda g: g.info.index)

    def age_s(self, process: ProcessSample) -> float:
        """For how long the process is known to exist at least."""
        since = [self.history.held_since(g.info.uuid, process.pid) for g in self.compute_gpus(process)]
        known = [s for s in (*since, process.started_s) if s is not None]
        return max(0.0, self.sample.time_s - min(known)) if known else 0.0

    @cached_property
    def warmed_up_gpus(self) -> list[GpuSample]:
        """The whole GPUs whose job is past its start-up, and those on which no process is listed: from
        inside a container those of others cannot be seen."""
        age_s: dict[int, float] = {}
        for process in self.processes:
            age = self.age_s(process)
            for gpu in self.compute_gpus(process):
                age_s[gpu.info.index] = max(age, age_s.get(gpu.info.index, 0.0))
        return [g for g in self.whole_gpus if age_s.get(g.info.index, math.inf) >= limit("idle_gpu.age_s")]

    def was_shown_as(self, finding_id: str, severity: Severity) -> bool:
        """Whether this finding is on screen with this severity."""
        return any(f.id == finding_id and f.severity == severity for f in self.previous)

    def full_cores(self, seconds: float) -> float:
        """How many cores of the host had no time left, on average; 0 where that is not known."""
        known = [point.full_cores for point in self.host(seconds) if point.full_cores is not None]
        return sum(known) / len(known) if known else 0.0

    def host(self, seconds: float) -> list[HostHistoryPoint]:
        if seconds not in self._hosts:
            self._hosts[seconds] = self.history.host(seconds, end_s=self.sample.time_s)
        return self._hosts[seconds]

    def host_mean(self, value: Callable[[HostHistoryPoint], float | None], seconds: float) -> float | None:
        """Mean of a figure of the host over the window; None where too little of it was seen."""
        known = [(point.time_s, v) for point in self.host(seconds) if (v := value(point)) is not None]
        if len(known) < limit("min_readings"):
            return None
        seen_s = (known[-1][0] - known[0][0]) * len(known) / (len(known) - 1)
        late_s = self.sample.time_s - known[-1][0]
        if seen_s < limit("coverage") * seconds or late_s > (1 - limit("coverage")) * seconds:
            return None
        return sum(v for _, v in known) / len(known)

    def not_at_work(self, seconds: float) -> Missing:
        """Why no GPU could be judged by how it works."""
        if self.processes and self.warmed_up_gpus:
            return Missing(f"{seconds:.0f} s of readings of a GPU at work")
        if self.processes:
            return Missing(f"a job that is past its start-up ({limit('idle_gpu.age_s'):.0f} s)")
        return self.no_process()

    def without_process(self, seconds: float) -> tuple[list[GpuSample], list[GpuSample]]:
        """The GPUs for which no compute process was listed for that long: the idle ones, and those at work all
        the same. From inside a container the processes of others cannot be seen."""
        idle: list[GpuSample] = []
        at_work: list[GpuSample] = []
        for gpu in self.whole_gpus:
            since_s, activity = self.history.held_since(gpu.info.uuid, None), self.activity(gpu, seconds)
            if gpu.processes_reason is not None or since_s is None or self.sample.time_s - since_s < seconds:
                continue
            if activity is not None:
                works = activity[1] > self.limit("unused_gpu", "", gpu.info.index)
                (at_work if works else idle).append(gpu)
        return idle, at_work

    def unlisted(self, gpus: Sequence[GpuSample]) -> Missing:
        """GPUs at work without a process: who uses them is not known."""
        return Missing(f"the processes on {gpus_text(gpus)}: at work, but the driver lists none; a container sees "
                       "those of others only with --pid=host")

    def no_process(self) -> Missing:
        """Why there is no process to judge."""
        if self.readable_gpus and not self.whole_gpus:
            return Missing("a whole GPU: jobs on MIG instances are not judged from live figures")
        unread = [g for g in self.sample.gpus if g.processes_reason is not None]
        if unread:
            return Missing(f"the processes on {gpus_text(unread)}: {unread[0].processes_reason}")
        at_work = self.without_process(self.seconds("unused_gpu.window_s"))[1]
        if at_work:
            return self.unlisted(at_work)
        return Missing(NO_PROCESS if self.complete else NO_PROCESS_WATCHED)


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
    return f"{program_name(process.command or 'process')} (pid {process.pid})"

