"""CUDA graphs: is one recorded again and again, in place of once?"""

from __future__ import annotations

import numpy as np

from gputop.advice import savings
from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import TraceFacts
from gputop.advice.trace.job import Job
from gputop.advice.verdict import Explanation, Missing, Verdict
from gputop.analysis.what_if.cure import Cure
from gputop.core.findings import Culprit
from gputop.text.units import count, percent, seconds
from gputop.trace.intervals import EMPTY, Spans, intersect, merge, union
from gputop.trace.lookups import by_line, host_rows
from gputop.trace.model import I64

_BEGIN = r"(?:cuda|cu|hip)StreamBeginCapture"
_MADE = r"(?:cuda|cu|hip)GraphInstantiate"
_ONCE = {
    "pytorch": "graph = torch.cuda.CUDAGraph()\n"
               "with torch.cuda.graph(graph):  # once, before the loop, on tensors that stay\n"
               "    y = model(x)\n"
               "x.copy_(batch); graph.replay()  # in the loop",
    "jax": "XLA_FLAGS=--xla_gpu_enable_command_buffer= python train.py  # to compare: runs without CUDA graphs",
    "tensorflow": "XLA_FLAGS=--xla_gpu_enable_command_buffer= python train.py  # to compare: runs without CUDA graphs",
}
_RECORD_ONCE = ("Record the graph once, before the loop, and only launch it in the loop. Keep shapes and the addresses "
                "of its inputs: copy new inputs into the memory that it was recorded on.")
_BY_XLA = ("XLA records these graphs itself: call the function with the same shapes each time, and compare with a run "
           "without graphs.")
_WHAT_CHANGES = {"pytorch": " With torch.compile, TORCH_LOGS=recompiles,cudagraphs logs why a graph is recorded."}


class GraphRecapture(Verdict, frozen=True, kw_only=True):
    recorded: float  # graphs per step
    recording_s: float  # on the host, per step
    idle_s: float  # of the GPUs meanwhile, per step and GPU


def judge_graph_recapture(facts: TraceFacts) -> GraphRecapture | Missing | None:
    """A CUDA graph is recorded or instantiated in most steps, while the GPU is idle: it should be once."""
    steps = facts.steps
    if steps is None or steps.count < limit("graph_recapture.steps"):
        return None
    if steps.times.unit != "step":  # each layer may have a graph of its own
        return Missing("marked steps, to see whether the same graph is recorded again")
    recordings, made_ns = _recordings(facts)
    edges = steps.edges_ns
    in_step = np.searchsorted(edges[:, 0], made_ns, side="right") - 1
    in_step = in_step[(in_step >= 0) & (made_ns < edges[np.maximum(in_step, 0), 1])]
    if len(np.unique(in_step)) <= limit("graph_recapture.recurring") * steps.count:
        return None
    idle = {timeline.gpu: intersect(intersect(timeline.gaps.spans, recordings), facts.analyzed_spans)
            for timeline in facts.gpu_timelines}
    idle_s = sum(spans.total for spans in idle.values()) / max(len(idle), 1) / steps.count / 1e9
    share = savings.removed(idle_s, facts.period_s)
    if share < limit("graph_recapture.share"):
        return None
    recording_s = intersect(recordings, facts.analyzed_spans).total / steps.count / 1e9
    return GraphRecapture(
        gpus=facts.active_numbers, share=share, recorded=len(in_step) / steps.count,
        recording_s=recording_s, idle_s=idle_s,
        culprits=(Culprit("recording of CUDA graphs", "host", recording_s, facts.basis),),
        cure=Cure(host=idle, assumes="Each graph is recorded once, before these steps."))


def _recordings(facts: TraceFacts) -> tuple[Spans, I64]:
    """Spans from the begin of each capture to the end of the instantiation that follows on its thread, or of the
    instantiation alone where nothing is captured; and when graphs were instantiated."""
    host = facts.trace.host
    begun, made = host_rows(facts.trace, _BEGIN), host_rows(facts.trace, _MADE)
    spans = EMPTY
    begun_on = {line: begun[rows] for line, rows in by_line(host.line[begun]).items()} if len(begun) else {}
    for line, rows in (by_line(host.line[made]).items() if len(made) else ()):
        made_on_line, starts = made[rows], host.start_ns[begun_on.get(line, begun[:0])]
        ends = host.end_ns[made_on_line]
        # The first capture after the instantiation before.
        first = np.searchsorted(starts, np.concatenate(([np.iinfo(np.int64).min], ends[:-1])))
        has_capture = first < len(starts)
        start = host.start_ns[made_on_line].copy()
        start[has_capture] = np.minimum(starts[first[has_capture]], start[has_capture])
        spans = merge(spans, union(start, ends))
    return spans, host.start_ns[made]


def describe_graph_recapture(v: GraphRecapture, job: Job) -> Explanation:
    return Explanation(
        title=f"CUDA graphs are recorded anew in each {job.basis}: {percent(v.share)} of it",
        why=f"{count(v.recorded)} CUDA graphs per {job.basis} are recorded and instantiated, which takes "
            f"{seconds(v.recording_s)} on the host. Meanwhile the GPU is idle, for {percent(v.share)} of the "
            f"{job.basis}. A graph saves time only if it is launched many times.",
        evidence={"graphs_per_step": v.recorded, "graph_recording_s": v.recording_s, "idle_while_recording_s": v.idle_s,
                  "share_ratio": v.share},
        action=_BY_XLA if job.framework in ("tensorflow", "jax") else _RECORD_ONCE + _WHAT_CHANGES.get(
            job.framework, ""),
        snippet=_ONCE.get(job.framework),
        gain="at most: the GPU's idle time while graphs are recorded",
        source=source("graph_recapture.share", "graph_recapture.recurring"),
    )
