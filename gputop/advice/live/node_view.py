"""The view of the node that the live rules judge: windows of history, the processes on each GPU, what is shown
already."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from statistics import median

from msgspec import Struct

from gputop.advice.registry import limit, rule_of
from gputop.advice.verdict import Missing
from gputop.core.findings import Finding, Severity
from gputop.core.samples import ENDED, OK, ZOMBIE, GpuSample, NodeSample, ProcessSample
from gputop.ranks.model import RasReport
from gputop.telemetry.history import History, HostHistoryPoint, Series
from gputop.text.units import ranges

NO_PROCESS = "a compute process that holds a GPU: start the job, or run gputop on the node where the job is running"
NO_PROCESS_WATCHED = "a compute process on the watched GPUs: omit --gpus to see all GPUs of the node"

_LONGEST = {"sm_active": "recurring_idle.window_s", "tensor_active": "tensor_idle.window_s",
            "gpu_util": "low_sm_active.window_s"}

# Servers that hold a GPU for others to share, not jobs.
_SERVICES = ("nvidia-cuda-mps", "nvidia-persistenced", "nv-hostengine", "dcgm")


class Window(Struct, frozen=True):
    """One metric of all GPUs over a window: times[n], values[gpu][n], readings and mean per GPU.

    The mean is NaN where the readings do not cover the window.
    """

    times: Series
    values: list[Series]
    count: list[int]
    mean: Series


def _window(times: Series, values: list[Series], seconds: float, end_s: float) -> Window:
    counts, means = [], []
    fewest, covered = limit("min_readings"), limit("coverage")
    seen_least_s, late_most_s = covered * seconds, (1 - covered) * seconds
    for readings in values:
        total, count, mean = sum(readings), len(readings), math.nan
        first, last = (times[0], times[-1]) if times else (math.nan, math.nan)
        if total != total:  # something is missing, which is rare
            readable = [i for i, v in enumerate(readings) if v == v]
            total, count = sum([readings[i] for i in readable]), len(readable)
            first, last = (times[readable[0]], times[readable[-1]]) if readable else (math.nan, math.nan)
        # A reading stands for the time to the next one, so first to last lacks one step.
        if (count >= fewest and (last - first) * count / max(1, count - 1) >= seen_least_s
                and end_s - last <= late_most_s):
            mean = total / count
        counts.append(count)
        means.append(mean)
    return Window(times, values, counts, means)


def _mean(values: Series) -> float:
    """Mean of the known values; NaN where there is none."""
    total = sum(values)
    if total != total:
        values = [v for v in values if v == v]
        total = sum(values)
    return total / len(values) if values else math.nan


class NodeView:
    """One sample's view of the node for all live rules. It asks the history once for each metric and window."""

    def __init__(self, history: History, sample: NodeSample, previous: tuple[Finding, ...],
                 ranks: RasReport | None = None, unprotected: tuple[int, ...] | None = None,
                 profiled: Mapping[int, float] | None = None) -> None:
        """``ranks``: what NCCL tells of the job; None: it was not asked. ``unprotected``: PIDs of jobs whose profiler
        any local user can command; None: nobody looked. ``profiled``: the share of its steps that a job's own
        torch.profiler records, by PID; None: no capture was tried."""
        self.ranks = ranks
        self.unprotected, self.profiled = unprotected, profiled
        self.history = history
        self.sample = sample
        self.previous = previous
        self.readable_gpus = [g for g in sample.gpus if g.state == OK and g.info.mig is None]
        # Rules about a job and its GPUs hold for whole ones: the parts of a divided GPU belong to different jobs.
        self.whole_gpus = [g for g in self.readable_gpus if not g.info.mig_mode]
        self._column = {uuid: i for i, uuid in enumerate(history.uuids)}
        self._shown: dict[str, frozenset[int]] = {}
        self._windows: dict[tuple[str, float], Window] = {}
        self._tables: dict[tuple[str, float], list[Series]] = {}
        self._readings: dict[str, tuple[float, Series, list[Series]]] = {}
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
        """Return whether an earlier rule found one of these on this sample."""
        return any(finding_id in finding_ids for finding_id, _ in self._found)

    def gpus_explained_by(self, *finding_ids: str) -> frozenset[int]:
        """The GPUs whose state one of these findings, made before on this sample, accounts for."""
        return frozenset(i for finding_id, gpus in self._found if finding_id in finding_ids for i in gpus)

    def gpus_left_out(self, rule_id: str) -> frozenset[int]:
        """The GPUs that this rule leaves out: a rule before it accounts for their state."""
        rule = rule_of(rule_id, "live")
        return frozenset() if rule is None else self.gpus_explained_by(*rule.yields_to)

    # -- what is shown ------------------------------------------------------------------------

    def shown(self, finding_id: str) -> frozenset[int]:
        if finding_id not in self._shown:
            self._shown[finding_id] = frozenset(g for f in self.previous if f.id == finding_id for g in f.gpus)
        return self._shown[finding_id]

    def limit(self, finding_id: str, name: str, gpu: int) -> float:
        """The threshold ``name`` to leave where the finding is shown for ``gpu``, else to enter."""
        return limit(f"{finding_id}.{name}{'leave' if gpu in self.shown(finding_id) else 'enter'}")

    # -- what can be seen -----------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Return whether all GPUs of the node are watched (``--gpus`` leaves some out)."""
        return not self.sample.gpus_unwatched

    def seconds(self, threshold_id: str) -> float:
        return self.enough(limit(threshold_id))

    def enough(self, seconds: float) -> float:
        """The length of a window of so many seconds: at slow intervals as long as enough readings take."""
        return max(seconds, limit("min_readings") * (self.sample.interval_s or 0.0))

    # -- readings -----------------------------------------------------------------------------

    def window(self, metric: str, seconds: float) -> Window:
        window = self._windows.get((metric, seconds))
        if window is None:
            window = self._windows[metric, seconds] = self._cut(metric, seconds)
        return window

    def _cut(self, metric: str, seconds: float) -> Window:
        fetched, end_s = self._readings.get(metric), self.sample.time_s
        if fetched is None or fetched[0] < seconds:
            # What rules ask for over several windows is fetched once, for the longest.
            longest = max(seconds, self.seconds(_LONGEST[metric])) if metric in _LONGEST else seconds
            fetched = self._readings[metric] = (longest, *self.history.windows(metric, longest, end_s=end_s))
        first = bisect_left(fetched[1], end_s - seconds)
        times, values = fetched[1][first:], [readings[first:] for readings in fetched[2]] if first else fetched[2]
        return _window(times, values, seconds, end_s)

    def column(self, gpu: GpuSample) -> int:
        return self._column[gpu.info.uuid]

    def all_values(self, gpu: GpuSample, metric: str, seconds: float) -> Series:
        """The readings of the last ``seconds``, NaN where a sample had none."""
        return self.window(metric, seconds).values[self.column(gpu)]

    def values(self, gpu: GpuSample, metric: str, seconds: float) -> Series:
        """The readings of the last ``seconds``, those that there are."""
        return [v for v in self.all_values(gpu, metric, seconds) if v == v]

    def mean(self, gpu: GpuSample, metric: str, seconds: float) -> float | None:
        """Mean over the last ``seconds``; None where too little of them was seen."""
        mean = self.window(metric, seconds).mean[self.column(gpu)]
        return None if mean != mean else mean

    def share(self, gpu: GpuSample, metric: str, seconds: float, full: str = "") -> float | None:
        """The mean of a metric, as a share of what ``full`` is now; None where either is not known."""
        mean, most = self.mean(gpu, metric, seconds), gpu[full].value if full else 1.0
        return mean / most if mean is not None and most else None

    def span(self, gpu: GpuSample, metric: str, seconds: float) -> float | None:
        """Largest less smallest reading of the last ``seconds``; None where too little of them was seen."""
        if self.mean(gpu, metric, seconds) is None:
            return None
        values = self.values(gpu, metric, seconds)
        return max(values) - min(values)

    def activity(self, gpu: GpuSample, seconds: float) -> tuple[str, float] | None:
        """Activity of the GPU: SM activity, or else coarse utilization; (metric, mean)."""
        for metric in ("sm_active", "gpu_util"):
            mean = self.mean(gpu, metric, seconds)
            if mean is not None:
                return metric, mean
        return None

    def slice_means(self, gpus: Sequence[GpuSample], metric: str, seconds: float) -> list[list[float]]:
        """Means of these GPUs in each slice of the last ``seconds``, oldest first; slices with a GPU
        without readings are left out. There are :meth:`slices` of them at most."""
        table = [self.slice_table(gpu, metric, seconds) for gpu in gpus]
        return [[*means] for means in zip(*table, strict=True) if all(mean == mean for mean in means)]

    def slice_table(self, gpu: GpuSample, metric: str, seconds: float) -> Series:
        """Mean of this GPU in each slice of the last ``seconds``, oldest first, NaN without readings."""
        key = (metric, seconds)
        if key not in self._tables:
            window, count = self.window(metric, seconds), self.slices(seconds)
            # A reading is of the interval before it: its middle decides, so late samples fall into their slice too.
            newest_s = self.sample.time_s + (self.sample.interval_s or 0.0) / 2
            parts: list[tuple[int, int]] = []  # the readings of each slice
            places = [count - 1 - math.floor((newest_s - time_s) * count / seconds) for time_s in window.times]
            for number in range(count):
                parts.append((bisect_left(places, number), bisect_left(places, number + 1)))
            self._tables[key] = [[_mean(readings[a:b]) for a, b in parts] for readings in window.values]
        return self._tables[key][self.column(gpu)]

    def slices(self, seconds: float) -> int:
        """Number of slices of the last ``seconds``, each at least an interval long."""
        return round(seconds / max(limit("slice_s"), self.sample.interval_s or 0.0))

    # -- processes ----------------------------------------------------------------------------

    @cached_property
    def processes(self) -> list[ProcessSample]:
        """The processes that compute on a GPU, without services and those that have ended."""
        return [p for p in self.sample.processes if self.compute_gpus(p) and p.reason not in (ENDED, ZOMBIE)
                and not any(name in (p.command or "") for name in _SERVICES)]

    def compute_gpus(self, process: ProcessSample) -> list[GpuSample]:
        """The readable GPUs ``process`` computes on, lowest index first."""
        held = [g for g in self.whole_gpus if g.info.index in process.gpus]
        return sorted((g for g in held if "C" in process.gpus[g.info.index].kind), key=lambda g: g.info.index)

    def framework(self, gpus: Iterable[int]) -> str:
        """Framework that all processes on these GPUs train with (:mod:`gputop.core.framework`); empty where they
        differ, or where it is not known."""
        held = set(gpus)
        frameworks = {p.framework for p in self.processes if held & set(p.gpus)}
        return frameworks.pop() if len(frameworks) == 1 else ""

    def age_s(self, process: ProcessSample) -> float:
        """Lower bound of the process's age."""
        since = [self.history.held_since(g.info.uuid, process.pid) for g in self.compute_gpus(process)]
        seen_s = [s for s in (*since, process.started_s) if s is not None]
        return max(0.0, self.sample.time_s - min(seen_s)) if seen_s else 0.0

    @cached_property
    def warmed_up_gpus(self) -> list[GpuSample]:
        """The whole GPUs whose job is past its start-up, and those on which no process is listed: from
        inside a container those of others cannot be seen."""
        return [g for g in self.whole_gpus if self.age_on_s(g) >= limit("idle_gpu.age_s")
                and (not g.processes or any("C" in process.kind for process in g.processes))]  # else it only draws

    def age_on_s(self, gpu: GpuSample) -> float:
        """Lower bound of the age of the oldest process on this GPU; infinite where none is listed."""
        return self._ages_s.get(gpu.info.index, math.inf)

    @cached_property
    def _ages_s(self) -> dict[int, float]:
        ages_s: dict[int, float] = {}
        for process in self.processes:
            age_s = self.age_s(process)
            for gpu in self.compute_gpus(process):
                ages_s[gpu.info.index] = max(age_s, ages_s.get(gpu.info.index, 0.0))
        return ages_s

    def level(self, finding_id: str, name: str, severity: Severity) -> float:
        """The threshold ``name`` to leave where the finding is shown with this severity, else to enter."""
        return limit(f"{name}{'leave' if self.was_shown_as(finding_id, severity) else 'enter'}")

    def was_shown_as(self, finding_id: str, severity: Severity) -> bool:
        """Return whether this finding is on screen with this severity."""
        return any(f.id == finding_id and f.severity == severity for f in self.previous)

    def full_cores(self, seconds: float) -> float:
        """Mean number of the host's cores that had no time left; 0 where that is not known."""
        cores = [point.full_cores for point in self.host(seconds) if point.full_cores is not None]
        return sum(cores) / len(cores) if cores else 0.0

    def host(self, seconds: float) -> list[HostHistoryPoint]:
        if seconds not in self._hosts:
            self._hosts[seconds] = self.history.host(seconds, end_s=self.sample.time_s)
        return self._hosts[seconds]

    def host_mean(self, value: Callable[[HostHistoryPoint], float | None], seconds: float) -> float | None:
        """Mean of a figure of the host over the window; None where too little of it was seen."""
        points = self.host(seconds)
        readings = [math.nan if (v := value(point)) is None else v for point in points]
        (mean,) = _window([point.time_s for point in points], [readings], seconds, self.sample.time_s).mean
        return None if mean != mean else mean

    def not_at_work(self, seconds: float) -> Missing:
        """Abstention because no GPU could be judged by how it works."""
        if self.processes and self.warmed_up_gpus:
            return Missing(f"{seconds:.0f} s of readings from a working GPU")
        if self.processes:
            return Missing(f"a job that is past startup ({limit('idle_gpu.age_s'):.0f} s)")
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
            if activity is not None and activity[1] <= self.limit("unused_gpu", "", gpu.info.index):
                idle.append(gpu)
            elif activity is not None and not gpu.processes:  # else a screen is drawn
                at_work.append(gpu)
        return idle, at_work

    def unlisted(self, gpus: Sequence[GpuSample]) -> Missing:
        """GPUs at work without a process: who uses them is not known."""
        return Missing(f"data on the processes on {gpus_text(gpus)}; the GPU is working, but the driver lists no "
                       "process; a container sees other processes only with --pid=host")

    def no_process(self) -> Missing:
        """Abstention because there is no process to judge."""
        if self.readable_gpus and not self.whole_gpus:
            return Missing("a whole GPU; gputop cannot evaluate jobs on MIG instances from live samples")
        unread = [g for g in self.sample.gpus if g.processes_reason is not None]
        if unread:
            return Missing(f"data on the processes on {gpus_text(unread)} ({unread[0].processes_reason})")
        at_work = self.without_process(self.seconds("unused_gpu.window_s"))[1]
        if at_work:
            return self.unlisted(at_work)
        return Missing(NO_PROCESS if self.complete else NO_PROCESS_WATCHED)


# -- words --------------------------------------------------------------------------------------

def gpus_text(gpus: Iterable[GpuSample | int]) -> str:
    """ "GPU 3", "GPUs 0-2, 5"."""
    indices = {g if isinstance(g, int) else g.info.index for g in gpus}
    return ("GPU " if len(indices) == 1 else "GPUs ") + ranges(indices, ", ")


# -- falls of the SM activity of a job from a level that it held for minutes ---------------------

SLICE_S, _MOST_SLICES = 60.0, 1440  # of the history, which has them for a day


class Fall(Struct, frozen=True):
    """SM activity was steady at ``best`` and has stayed at ``now`` for ``lasts_s``."""

    best: float
    now: float
    lasts_s: float


def fall_of(means: Sequence[float]) -> Fall | None:
    """Fall of the means of whole minutes (oldest first); None where there is none, or where it comes and goes."""
    unknown = max((i for i, mean in enumerate(means) if mean != mean), default=-1)
    values = means[unknown + 1:]
    rule = "below_own_best"
    held, lasts = (max(1, round(limit(f"{rule}.{name}") / SLICE_S)) for name in ("before_s", "after_s"))
    if len(values) < held + lasts or values[-1] > limit(f"{rule}.ratio") * max(values):
        return None  # as nearly always
    level = sorted(values)[-held]
    above = [i for i, value in enumerate(values) if value >= limit(f"{rule}.steady") * level]
    begin = above[-1] + 1 if above else 0
    before, after = values[:begin], values[begin:]
    # All of it: a job whose phases take turns has no level of its own.
    if len(above) < begin or len(before) < held or len(after) < lasts or level < limit("unused_gpu.peer_busy"):
        return None
    best = median(before)
    return Fall(best, median(after), len(after) * SLICE_S) if max(after) <= limit(f"{rule}.ratio") * best else None


def falls(view: NodeView) -> dict[int, Fall]:
    """Falls by GPU, for jobs that are past their start; those that are idle or without a process are left out."""
    slices = max(1, min(_MOST_SLICES, round(limit("below_own_best.window_s") / SLICE_S)))
    end_s, means = view.history.slice_means("sm_active", SLICE_S, slices)
    out = {}
    for gpu in view.warmed_up_gpus:
        # Without the job's start, which is not its level.
        known_s = view.age_on_s(gpu) - limit("idle_gpu.age_s") - (view.sample.time_s - end_s)
        of_gpu = means[view.column(gpu)][-max(1, int(min(slices, known_s / SLICE_S))):]
        if (fall := fall_of(of_gpu)) is not None:
            out[gpu.info.index] = fall
    return out
