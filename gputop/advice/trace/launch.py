"""Launches: does the GPU wait for the host to hand it kernels?"""

from __future__ import annotations

from statistics import median

import numpy as np

from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import TraceFacts, idle_before
from gputop.advice.trace.job import Job
from gputop.advice.trace.snippets import GRAPH_BREAKS, xla_on_step
from gputop.advice.verdict import Explanation, Verdict
from gputop.analysis.layers.culprits import Events
from gputop.analysis.what_if.cure import Cure
from gputop.analysis.what_if.host_waits import host_waits
from gputop.text.units import percent, seconds
from gputop.trace.intervals import Spans, in_order
from gputop.trace.lookups import by_line, launching_lines, rows_of
from gputop.trace.model import I64, DeviceEvents, Kind

_SNIPPETS = {
    "jax": "train_step = jax.jit(train_step, donate_argnums=0)  # the whole step, update included",
    "jax, compiled": "state, losses = jax.lax.scan(train_step, state, batches)  # several steps in a call, inside jit",
    "pytorch": 'model = torch.compile(model, mode="reduce-overhead")  # fuses kernels, replays them as a CUDA graph',
    # A CUDA graph cannot be captured over a call that waits for the GPU.
    "pytorch, with waits": "model = torch.compile(model)  # a CUDA graph only once the step waits for no copy",
    "pytorch, compiled": f'{GRAPH_BREAKS}\nmodel = torch.compile(model, mode="reduce-overhead")  # replays CUDA graphs',
    "pytorch, compiled, with waits": GRAPH_BREAKS,
}
_SHORTEST_S = 1e-7  # no kernel starts so soon after its launch
_ONE_BY_ONE = 0.5  # share of the kernels that have a launch of their own


# What turns CUDA graphs off, by the server of language models; each records them by default.
_SERVERS = {
    "vLLM": "vllm serve MODEL  # without --enforce-eager: CUDA graphs for the batch sizes in use",
    "SGLang": "python -m sglang.launch_server --model-path MODEL  # without --disable-cuda-graph",
}


class LaunchBound(Verdict, frozen=True, kw_only=True):
    kernel_median_s: float
    kernels_per_s: float
    launch_delay_s: float | None  # from a launch to its kernel's start, median
    idle_host_fault: float | None  # share of the idle time in which the next kernel was not launched yet
    pace_s: float | None  # from one launch to the next
    waits: bool = False  # whether the host waits for the GPU more than once per step
    recorded: float | None = None  # events that PyTorch's profiler recorded per step in the launching threads' waits
    recording_s: float | None = None  # what that took of them, estimated


def judge_launch_bound(facts: TraceFacts) -> LaunchBound | None:
    """The GPU runs out of work while the host is busy launching more.

    Idle time that another cause explains (input wait, waiting for another GPU, copies, host work between launches) is
    not in the share ``launch``, so this fires for launches alone.
    """
    assert facts.shares is not None
    gpus, share = facts.active, facts.shares["launch"]
    delays = [gpu.launch_delay_median_s for gpu in gpus if gpu.launch_delay_median_s is not None]
    if share < limit("launch_bound.share") or (delays and min(delays) >= limit("launch_bound.deep_queue_s")):
        return None
    faults = [gpu.idle_host_fault for gpu in gpus if gpu.idle_host_fault is not None]
    waits = {gpu: parts["launch"] for gpu, parts in facts.parts.items()}
    recorded = _recorded(facts, waits) if facts.framework == "pytorch" else None
    launches = _launches_in(facts, waits)
    idle_ns = idle_before(facts, "launch")
    late = np.flatnonzero(idle_ns)
    return LaunchBound(
        gpus=facts.active_numbers, share=share,
        kernel_median_s=median(gpu.kernel_median_s for gpu in gpus if gpu.kernel_median_s is not None),
        kernels_per_s=sum(gpu.kernels_per_s for gpu in gpus) / len(gpus),
        launch_delay_s=median(delays) if delays else None,
        idle_host_fault=sum(faults) / len(faults) if faults else None, pace_s=launch_pace_s(facts),
        waits=_waits_within_steps(facts), recorded=recorded,
        recording_s=None if recorded is None else (
            recorded * limit("launch_bound.recording_s") + launches * limit("launch_bound.recorded_launch_s")),
        events=Events(late, idle_ns[late], idle=True),
        cure=Cure(host=waits, assumes=(
            "Each kernel is launched before its GPU waits for it, as with one call for many kernels; kernels take as "
            "long as now.")),
    )


def _recorded(facts: TraceFacts, waits: dict[int, Spans]) -> float:
    """Host events per step, or in the window, that begin in a wait, on the threads that launch; mean of the GPUs."""
    host = facts.trace.host
    launching = np.zeros(len(facts.trace.lines), bool)
    launching[launching_lines(facts.trace)] = True
    began = host.start_ns[rows_of(launching[host.line])]  # in order, as all events of a trace
    events = sum(int((np.searchsorted(began, spans.end) - np.searchsorted(began, spans.start)).sum())
                 for spans in waits.values())
    return events / max(len(waits), 1) / facts.steps_or_window


def _launches_in(facts: TraceFacts, waits: dict[int, Spans]) -> float:
    """Launches and copies per step, or in the window, that begin in a wait; mean of the GPUs. The profiler records each
    where the driver runs it."""
    launch_ns = in_order(np.unique(facts.trace.device.launch_ns))
    launches = sum(int((np.searchsorted(launch_ns, spans.end) - np.searchsorted(launch_ns, spans.start)).sum())
                   for spans in waits.values())
    return launches / max(len(waits), 1) / facts.steps_or_window


def _waits_within_steps(facts: TraceFacts) -> bool:
    """Return whether the host waits for the GPU within the steps: once at the end of each is the fetched loss."""
    waits = host_waits(facts.trace, limit("copies_pageable.bytes"))
    threads = max(len(np.unique(waits.line)), 1)
    marked = facts.steps is not None and bool(facts.steps.call_ends_ns)
    return len(waits.line) / threads > (1.5 * facts.steps_or_window if marked else 0.5 * facts.steps_or_window)


def describe_launch_bound(v: LaunchBound, job: Job) -> Explanation:
    evidence = {"launch_wait_s": v.share * job.period_s, "share_ratio": v.share, "kernel_median_s": v.kernel_median_s,
                "kernels_per_s": v.kernels_per_s}
    if v.launch_delay_s is not None and v.launch_delay_s >= _SHORTEST_S:  # less: the clocks differ
        evidence["launch_delay_median_s"] = v.launch_delay_s
    if v.idle_host_fault is not None:
        evidence["idle_host_fault_ratio"] = v.idle_host_fault
    if v.pace_s is not None:
        evidence["launch_pace_s"] = v.pace_s
    why = f"For {percent(v.share)} of the {job.basis} a GPU is idle and its next kernel is not launched yet."
    if v.kernel_median_s < limit("launch_bound.short_kernel_s"):
        why += f" Half of the kernels run for less than {seconds(v.kernel_median_s)}, while "
        why += (f"the host launches one every {seconds(v.pace_s)}."
                if v.pace_s is not None and v.pace_s > v.kernel_median_s else "launching one takes 20-40 µs."
                if not job.graphs else "CUDA graphs launch many at a time.")
    least_s = limit("launch_bound.recording_share") * evidence["launch_wait_s"]
    if v.recorded and v.recording_s and v.recording_s >= least_s:
        evidence["recording_s"] = v.recording_s
        why += (f" About {seconds(v.recording_s)} of this wait is the profiler's own work: it records each launch and "
                f"{v.recorded:,.0f} ops and Python functions. Without the profiler the wait is shorter.")
    kind = f"{', compiled' if job.compiled else ''}{', with waits' if v.waits else ''}"
    server = _SERVERS.get(job.server)
    if server is not None and not job.graphs:
        action = (f"Let {job.server} record CUDA graphs, which launch all kernels of a batch at once. During this "
                  "recording it launched each kernel separately.")
    elif job.graphs:
        action = ("CUDA graphs run already: prepare and launch the next one while the GPU works, record what still "
                  "runs between two graphs, and raise the batch size if memory allows.")
    elif job.compiled and job.framework == "jax":
        kind = ", compiled"
        action = ("The step is compiled already: run several steps in one call, put separate calls into one function, "
                  "and raise the batch size if memory allows.")
    elif job.compiled:
        action = ("A part of the model is compiled already: find what breaks its graph and what is compiled again, "
                  "and compile the rest. Then raise the batch size if memory allows.")
    else:
        action = ("Launch fewer, larger kernels: compile the step so that kernels are fused. Then raise the batch "
                  "size if memory allows.")
    return Explanation(
        title=f"GPU waits for launches {percent(v.share)} of the {job.basis}", why=why, evidence=evidence,
        action=action,
        snippet=None if job.graphs else server if server is not None else (
            xla_on_step(job) if job.framework == "tensorflow" else
            _SNIPPETS.get(job.framework + kind, _SNIPPETS.get(job.framework))),
        gain="at most: all gaps between launches, if kernels were always queued ahead",
        source=source("launch_bound.share", "launch_bound.short_kernel_s") + "; HTA: idle by fault of the host",
    )


def _distinct(in_order_ns: I64) -> I64:
    return in_order_ns[np.concatenate(([True], in_order_ns[1:] != in_order_ns[:-1]))]


def launch_pace_s(facts: TraceFacts) -> float | None:
    """Median time from one launch to the next on a thread; None where launches are not known, or most kernels are not
    launched one by one."""
    return facts.cached("launch_pace_s", lambda: _launch_pace_s(facts.trace.device))


def _launch_pace_s(device: DeviceEvents) -> float | None:
    launched = rows_of((device.launch_ns >= 0) & (device.kind <= Kind.COLLECTIVE))
    launch = device.launch_ns[launched]
    if len(launch) < 2:
        return None
    # The kernels of a CUDA graph have one launch: calls are counted, not kernels.
    calls = [_distinct(in_order(launch[on_line])) for on_line in by_line(device.launch_line[launched]).values()]
    if sum(map(len, calls)) < _ONE_BY_ONE * len(launch):
        return None
    apart = np.concatenate([np.diff(starts) for starts in calls])
    return float(np.median(apart)) / 1e9 if len(apart) else None
