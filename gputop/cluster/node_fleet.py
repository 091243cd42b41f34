"""The jobs and GPUs of nodes whose snapshots were taken again and again, and what was seen of them since.

A snapshot is of one second. Activity is therefore the mean of what was seen in the last five minutes, and a GPU is
compared with its peers only once that is enough.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from gputop.cluster import slurm
from gputop.cluster.model import (
    NO_JOB,
    Gpu,
    Group,
    History,
    IdleGpus,
    Job,
    LowClock,
    Mapped,
    Node,
    fields_of,
    less_active,
    together,
    upper_median,
)
from gputop.cluster.node_answer import Holder, NodeAnswer, NodeGpu
from gputop.cluster.ssh import NodeProblem
from gputop.cluster.view import Limits, View
from gputop.profiler.addresses import short_name
from gputop.text.units import printable

MEAN_S = 300.0
_ENOUGH_SAMPLES = 5  # of a mean that is compared with others
_PROGRAM_CHARS = 60


class GpuPast(Struct):
    """Record of what was seen of a GPU: by slot of the history sum and number, and the newest one by one."""

    first_s: float
    busy_s: float  # when it last did more than nothing; at first: first_s
    seen_s: float
    kind: str = ""
    slots: dict[int, tuple[float, int]] = field(default_factory=dict)
    newest: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=64))
    clock_slots: dict[int, tuple[float, int]] = field(default_factory=dict)  # as slots, of the SM clock
    clocks: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=64))


class Watched(Struct):
    """A node: its newest snapshot, the past of the GPUs in it, and how it was asked last."""

    asked_s: float = -1e9
    problem: NodeProblem | None = None
    running: bool = False  # it is being asked
    answer: NodeAnswer | None = None
    got_s: float = 0.0  # when it was given, by this machine's clock
    gpus: dict[str, GpuPast] = field(default_factory=dict)  # by UUID

    def remember(self, answer: NodeAnswer, now_s: float, view: View, limits: Limits, gap_s: float) -> None:
        """``gap_s``: not seen for longer, what was before says nothing of the time between."""
        self.answer, self.got_s = answer, now_s
        oldest = int(now_s // view.step_s) - int(view.span_s // view.step_s)
        for uuid in self.gpus.keys() - {gpu.uuid for gpu in answer.gpus}:
            del self.gpus[uuid]
        for gpu in answer.gpus:
            past = self.gpus.get(gpu.uuid)
            if past is None or now_s - past.seen_s > gap_s:
                slots, clock_slots = ({}, {}) if past is None else (past.slots, past.clock_slots)
                past = self.gpus[gpu.uuid] = GpuPast(now_s, now_s, now_s, slots=slots, clock_slots=clock_slots)
            if gpu.activity is None:
                continue
            if gpu.kind != past.kind:
                past.kind = gpu.kind
                past.newest.clear()
            past.seen_s = now_s
            if gpu.activity > limits.idle:
                past.busy_s = now_s
            past.newest.append((now_s, gpu.activity))
            slot = int(now_s // view.step_s) + 1  # which ends after it
            _add(past.slots, slot, gpu.activity, oldest)
            if (clock := gpu.figures.get("sm_clock_hz")) is not None:
                past.clocks.append((now_s, clock))
                _add(past.clock_slots, slot, clock, oldest)


def _add(slots: dict[int, tuple[float, int]], slot: int, value: float, oldest: int) -> None:
    total, count = slots.get(slot, (0.0, 0))
    slots[slot] = (total + value, count + 1)
    for old in [old for old in slots if old <= oldest]:
        del slots[old]


class FleetBuilder:
    """Makes the jobs of what is known at ``now_s``."""

    def __init__(self, nodes: Mapping[str, Watched], view: View, limits: Limits, now_s: float) -> None:
        self._nodes, self._view, self._limits, self._now_s = nodes, view, limits, now_s

    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of activity."""
        return tuple(sorted({past.kind for node in self._nodes.values() for past in node.gpus.values() if past.kind}))

    def _all(self) -> list[tuple[str, NodeGpu]]:
        """Every GPU once, with the name of its node: a node may have been named twice."""
        out: dict[str, tuple[str, NodeGpu]] = {}
        for name, node in self._nodes.items():
            for gpu in node.answer.gpus if node.answer is not None else ():
                out.setdefault(gpu.uuid, (name, gpu))
        return list(out.values())

    def fleet(self, running: Sequence[slurm.SlurmJob]) -> tuple[tuple[Job, ...], Group | None, tuple[Node, ...], int]:
        """The jobs, what belongs to none, on which nodes, and how many GPUs there are. ``running``: Slurm's."""
        gpus = self._all()
        jobs: dict[str, _Job] = {}
        taken: set[str] = set()
        for mapped_job in self._of_slurm(gpus, running):
            jobs[mapped_job.id] = mapped_job
            taken |= {gpu.uuid for _, gpu in mapped_job.gpus}
        for name, gpu in gpus:
            for holder in gpu.holders[:1] if gpu.uuid not in taken else ():
                mapped_job = _of_holder(holder)
                job = jobs.setdefault(mapped_job.id, mapped_job)
                job.gpus.append((name, gpu))
                job.start_s = min((s for s in (job.start_s, holder.started_s) if s is not None), default=None)
                taken.add(gpu.uuid)
        free = [self._gpu(name, gpu) for name, gpu in gpus if gpu.uuid not in taken]
        nodes = tuple(self._node(NO_JOB, name, node_gpus) for name, node_gpus in _by_node(free).items())
        built = tuple(self._job(mapped_job) for mapped_job in jobs.values())
        return built, _group(free) if free else None, nodes, len(gpus)

    def _of_slurm(self, gpus: Sequence[tuple[str, NodeGpu]], running: Sequence[slurm.SlurmJob]) -> list[_Job]:
        """Slurm's jobs: by the control groups of their processes where these account for all their GPUs, else by
        node."""
        by_node: dict[str, list[tuple[str, NodeGpu]]] = {}
        for name, gpu in gpus:
            answer = self._nodes[name].answer
            for alias in {short_name(name.rpartition("@")[2]),
                          short_name(answer.hostname) if answer is not None else ""}:
                by_node.setdefault(alias, []).append((name, gpu))
        out = []
        for job in running:
            held = {node: by_node[short] for node in job.gpus if (short := short_name(node)) in by_node}
            if not held:
                continue
            job_gpus = {node: [(name, gpu) for name, gpu in node_gpus
                               if any(holder.container == f"slurm {job.number}" for holder in gpu.holders)]
                        for node, node_gpus in held.items()}
            mapped: Mapped = "label"
            if any(len(job_gpus[node]) != job.gpus[node] for node in held):
                job_gpus, mapped = held, "node" if all(len(held[n]) <= job.gpus[n] for n in held) else "shared node"
            out.append(_Job(job.id, "slurm_job_id" if mapped == "label" else "", mapped, job.name, job.user,
                            job.start_s, job.number, [pair for pairs in job_gpus.values() for pair in pairs],
                            sum(job.gpus.values()), len(job.gpus)))
        return out

    def _gpu(self, node: str, gpu: NodeGpu) -> Gpu:
        past = self._nodes[node].gpus[gpu.uuid]
        now_s = self._nodes[node].got_s
        recent = [value for at_s, value in past.newest if at_s > now_s - MEAN_S]
        is_measured = recent and gpu.activity is not None
        return Gpu(node=node, gpu=gpu.label, uuid=gpu.uuid, activity=sum(recent) / len(recent) if is_measured else None,
                   kind=past.kind, figures=gpu.figures, history=_history([past], self._view, self._now_s))

    def _past(self, gpu: Gpu) -> GpuPast:
        return self._nodes[gpu.node].gpus[gpu.uuid]

    def _node(self, job: str, name: str, gpus: tuple[Gpu, ...]) -> Node:
        return Node(**fields_of(_group(gpus)), name=name, each=gpus if (job, name) in self._view.open_nodes else (),
                    history=_history([self._past(gpu) for gpu in gpus], self._view, self._now_s))

    def _job(self, mapped_job: _Job) -> Job:
        gpus = [self._gpu(name, gpu) for name, gpu in mapped_job.gpus]
        group = _group(gpus)
        whole = mapped_job.mapped != "shared node"
        pasts = [self._past(gpu) for gpu in gpus]
        enough = whole and mapped_job.mapped != "process" and group.kind != "mixed" and all(
            len(past.newest) >= _ENOUGH_SAMPLES for past in pasts)
        median = upper_median(gpu.activity for gpu in gpus) if enough else None
        nodes = [self._node(mapped_job.id, name, node_gpus) for name, node_gpus in _by_node(gpus).items()]
        node_median = upper_median(node.activity for node in nodes) if enough else None
        below = self._limits.below
        low = less_active(gpus, None if median is None else median - below)
        return Job(
            **{**fields_of(group), "gpus": mapped_job.held or group.gpus}, id=mapped_job.id, label=mapped_job.label,
            mapped=mapped_job.mapped, name=mapped_job.name, user=mapped_job.user, start_s=mapped_job.start_s,
            number=mapped_job.number, nodes=mapped_job.nodes or len(nodes),
            node_names=tuple(node.name for node in nodes),
            idle_gpus=sum(bool(past.kind) and past.seen_s - past.busy_s >= self._limits.idle_s for past in pasts)
            if whole else None, median=median,
            mad=None if median is None else upper_median(
                abs(gpu.activity - median) for gpu in gpus if gpu.activity is not None),
            low_gpus=tuple(sorted(low, key=lambda gpu: gpu.activity or 0.0)), node_median=node_median,
            low_clocks=self._low_clocks(mapped_job, gpus) if enough else (),
            low_nodes=less_active(nodes, None if node_median is None else node_median - below),
            peers={name: value for name in ("sm_clock_hz", "pcie_width", "power_limit_w")
                   if (value := upper_median(gpu.figures.get(name) for gpu in gpus)) is not None},
            history=_history(pasts, self._view, self._now_s),
            **(self._idle_history(pasts) if whole else {}),
            each=tuple(nodes) if mapped_job.id in self._view.open_jobs else ())

    def _idle_history(self, pasts: Sequence[GpuPast]) -> dict[str, Any]:
        idle = _history(pasts, self._view, self._now_s, idle=self._limits.idle)
        measured = _history(pasts, self._view, self._now_s, idle=inf)
        busy = replace(idle, values=tuple(
            None if all_ is None or of_idle is None else all_ - of_idle
            for all_, of_idle in zip(measured.values, idle.values, strict=True)))
        return {"idle_history": idle, "idle": IdleGpus(busy_history=busy)}

    def _low_clocks(self, mapped_job: _Job, gpus: Sequence[Gpu]) -> tuple[LowClock, ...]:
        """The busy GPUs of a job whose clocks are low among those of their model."""
        by_model: dict[str, list[tuple[float, Gpu]]] = {}
        for (_, answer), gpu in zip(mapped_job.gpus, gpus, strict=True):
            past = self._past(gpu)
            recent = [hz for at_s, hz in past.clocks if at_s > self._nodes[gpu.node].got_s - MEAN_S]
            if len(recent) >= _ENOUGH_SAMPLES and (gpu.activity or 0.0) > self._limits.busy and answer.model:
                by_model.setdefault(answer.model, []).append((sum(recent) / len(recent), gpu))
        out = []
        for clocks in by_model.values():
            median = upper_median(hz for hz, _ in clocks)
            assert median is not None
            mad = upper_median(abs(hz - median) for hz, _ in clocks) or 0.0
            low = [(hz, gpu) for hz, gpu in clocks if hz < self._limits.clock * median]
            out += [LowClock(gpu=gpu, clock_hz=hz, median_hz=median, mad_hz=mad, gpus=len(clocks), low=len(low),
                             history=_grid([self._past(gpu).clock_slots], self._view, self._now_s)) for hz, gpu in low]
        return tuple(sorted(out, key=lambda low: low.clock_hz))


class _Job(Struct):
    id: str
    label: str
    mapped: Mapped
    name: str
    user: str | None
    start_s: float | None
    number: str
    gpus: list[tuple[str, NodeGpu]]  # with their nodes
    held: int = 0  # GPUs, as Slurm counts them; 0: those that are seen
    nodes: int = 0  # likewise


def _of_holder(holder: Holder) -> _Job:
    """Return the job of a process: by its control group a job of Slurm; else what the same user runs by the same
    program."""
    runtime, _, number = (holder.container or "").partition(" ")
    user = printable(holder.user) if holder.user else None
    if runtime == "slurm" and number:
        number = printable(number)[:_PROGRAM_CHARS]
        return _Job(number, "slurm_job_id", "label", "", user, None, number, [])
    name = printable(holder.program)[:_PROGRAM_CHARS]
    return _Job(f"{user or '?'}/{name}", "", "process", name, user, None, "", [])


def _by_node(gpus: Sequence[Gpu]) -> dict[str, tuple[Gpu, ...]]:
    out: dict[str, tuple[Gpu, ...]] = {}
    for gpu in gpus:
        out[gpu.node] = (*out.get(gpu.node, ()), gpu)
    return dict(sorted(out.items()))


def _group(gpus: Sequence[Gpu]) -> Group:
    return together(Group(gpus=1, activity=gpu.activity, kind=gpu.kind, tensor_active=gpu.figures.get("tensor_active"),
                          memory_used_bytes=gpu.figures.get("memory_used_bytes"),
                          memory_total_bytes=gpu.figures.get("memory_total_bytes"),
                          power_w=gpu.figures.get("power_w")) for gpu in gpus)


def _history(pasts: Sequence[GpuPast], view: View, now_s: float, idle: float | None = None) -> History:
    """The mean activity of some GPUs by slot; with ``idle`` how many of them were not above that."""
    return _grid([past.slots for past in pasts], view, now_s, idle)


def _grid(slots_of: Sequence[Mapping[int, tuple[float, int]]], view: View, now_s: float,
          idle: float | None = None) -> History:
    last = int(now_s // view.step_s) + 1
    first = last - int(view.span_s // view.step_s) + 1
    values: list[float | None] = []
    for slot in range(first, last + 1):
        means = [total / count for slots in slots_of for total, count in [slots.get(slot, (0.0, 0))] if count]
        values.append(None if not means else sum(means) / len(means) if idle is None
                      else float(sum(mean <= idle for mean in means)))
    return History(first * view.step_s, view.step_s, tuple(values))
