"""The host between and inside the steps: Python while the GPUs wait, and TF ops that no GPU runs."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import PurePath

import numpy as np
from msgspec import structs

from gputop.advice.fix_code import code
from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import (
    HOST_EVENTS,
    TORCH_HOST,
    TraceFacts,
    new_workers,
    on_host,
    removed_host_time,
    waits_for_host,
)
from gputop.advice.trace.input_fixes import KEEP_WORKERS, WORKERS_OR_SELDOM, fix_of_loader
from gputop.advice.trace.input_pace import paced_by_input
from gputop.advice.trace.job import CUSTOM, EAGER, JAX, KERAS, PYTORCH, Job, training_loop
from gputop.advice.trace.known_work import (
    FIT_ONCE,
    NEW_WORKERS,
    NO_TRAINING,
    WORK,
    UserFunction,
    known_work,
    named_work,
)
from gputop.advice.trace.other_programs import may_be_others, others_take
from gputop.advice.verdict import Explanation, Missing, Verdict, known
from gputop.analysis.host.host_spans import PYTHON_CALLBACK
from gputop.analysis.layers.scopes import scope_of
from gputop.analysis.results import GapWork, StackLine
from gputop.analysis.steps.model import Steps
from gputop.analysis.steps.phases import EVALUATION, PREDICTION
from gputop.analysis.steps.training_loops import training_loops
from gputop.analysis.what_if.cure import Cure
from gputop.text.units import percent, seconds
from gputop.trace.intervals import Spans, coverage, overlap
from gputop.trace.lookups import host_rows, host_stat, how_to_mark_steps
from gputop.trace.model import Trace

_BETWEEN_OPS = 0.1  # of a line's time in the gaps: less between ops is the sampling's error
_WORTH_NAMING = 0.01  # share of the gap; less is no part of the cause
_SAVED_BY_16 = 15 / 16  # share of the gaps that 16 steps a call save, besides time within each call
_BATCHES = "Preparing batches between steps takes {} of the step time"
_PREDICT_ONCE = ("Call predict() or evaluate() once for many samples. For a single batch, use predict_on_batch(x) or "
                 "test_on_batch(x, y), which create no dataset.")
_INSIDE = {  # by phase: what Keras calls it, and what does so without a new dataset iterator
    "evaluation": ("evaluate", "test_on_batch(x, y)"),
    "prediction": ("predict", "predict_on_batch(x)"),
}


class StepGapHost(Verdict, frozen=True, kw_only=True):
    gap_s: float  # per step
    silent_s: float | None  # of it, without any event on the host
    work: Sequence[GapWork]  # of the main thread, longest first
    executor_work: Sequence[GapWork]  # of TensorFlow's executors
    input_s: float | None = None  # what the input pipeline takes for a step's batches, where the steps wait for it
    loader_unseen: bool = False  # Nsight records no wait of PyTorch's for a batch
    inside: tuple[str, ...] = ()  # phases of Keras's that each step holds, in its callbacks
    new_workers: bool = False  # PyTorch's DataLoader starts its workers anew in most of the gaps
    acts: bool = False  # a model predicts between training steps of PyTorch: a policy acts in an environment
    lines: Sequence[StackLine] = ()  # of Python
    phase: str = ""  # of the steps
    one_cpu: bool = False  # the job may use no other
    slow_host: str | None = None  # the rank whose gaps these are, where the others' are far shorter


def judge_step_gap_host(facts: TraceFacts) -> StepGapHost | Missing | None:
    """The GPUs stand still while the host is between two calls of the step (PyTorch: runs no op): callbacks, metrics,
    logging, Python.

    Waiting for input, tracing and compiling, and ops run one by one as the model are not in these seconds.
    """
    host, steps = facts.host, facts.steps
    assert host is not None and host.gap_s is not None
    # Of one step the gap is in its middle, and only a tracer of Python shows what of it is work.
    stacks = facts.analysis.stacks
    traced = stacks is not None and stacks.source.startswith("tracer")
    if steps is None or steps.count < (1 if traced else limit("host.steps")):
        return Missing("two complete steps, because the gap is between steps; capture a longer trace, or mark the "
                       f"steps with {how_to_mark_steps(facts.trace)}")
    if not facts.shares or host.gap_s < limit("step_gap_host.share") * facts.period_s:
        return None
    share = host.gap_s / facts.period_s
    lines, of_ops = ([line for gaps in (stacks.gaps if stacks else ()) if gaps.gap == gap for line in gaps.lines]
                     for gap in ("gap", "eager"))
    most_s = {line.line: line.s_per_step / _BETWEEN_OPS for line in of_ops}
    runs_ops_s = sum(line.s_per_step for line in lines if line.s_per_step <= most_s.get(line.line, 0.0))
    named_s = limit("step_gap_host.named") * host.gap_s
    unnamed = known_work(WORK, (*host.gap_main, *host.gap_executor), named_s, lines) is None
    gaps = waits_for_host(facts, "gap")
    if unnamed and (unknown := _unknown_work(facts, steps, gaps, runs_ops_s > named_s, traced)) is not None:
        return unknown
    several = unnamed and not facts.active and not steps.inside and training_loop(facts) in KERAS
    # A replay knows when each batch was there; without one (no GPU) the steps may wait for the next one all the same.
    input_s = paced_by_input(facts) if facts.replay is None else None
    paced = input_s is not None and facts.period_s - input_s < limit("step_gap_host.share") * facts.period_s
    cpus = facts.trace.job_cpus
    one_cpu = cpus is not None and cpus.limit < 2
    bound = steps.inside or (one_cpu and any(line.loader for line in lines))
    work = tuple(item for item in host.gap_main if item.s_per_step >= _WORTH_NAMING * host.gap_s)
    return StepGapHost(gpus=facts.active_numbers, share=share, gap_s=host.gap_s,
                       severity="low" if paced else None, input_s=input_s if paced else None,
                       claim=None if paced else facts.on_cpus(
                           "at most" if bound else "at least" if several else "about"),
                       saving=_SAVED_BY_16 * share if several else None,
                       silent_s=host.gap_silent_s, work=work, executor_work=host.gap_executor, lines=lines,
                       culprits=on_host(facts, work, gaps), one_cpu=one_cpu, phase=steps.times.phase,
                       new_workers=overlap(gaps, new_workers(facts)) >= limit("step_gap_host.named") * max(
                           gaps.total, 1),
                       loader_unseen=facts.trace.format == "nsys" and not training_loops(facts.trace),
                       slow_host=_slow_rank(facts.trace, host.gap_host, host.gap_rank),
                       acts=facts.analysis.wall_time is not None and any(
                           part.id == PREDICTION for part in facts.analysis.wall_time.parts),
                       inside=steps.inside, cure=Cure(
                           host=removed_host_time(facts, "gap"),
                           assumes="Assumes that the host work between two calls overlaps with compute or is removed."))


def _unknown_work(facts: TraceFacts, steps: Steps, gaps: Spans, runs_ops: bool, traced: bool) -> Missing | None:
    """Reason why these gaps, without known work, may be no work of the host's; ``runs_ops``: most of their lines
    run ops one by one as well; ``traced``: a tracer recorded Python's calls."""
    host = facts.host
    assert host is not None and host.gap_s is not None
    share = host.gap_s / facts.period_s
    silent = (host.gap_silent_s or 0.0) >= limit("step_gap_host.named") * host.gap_s
    others = may_be_others(facts, share, silent=silent, least=limit("step_gap_host.share"))
    if others is not None:
        return Missing(others)
    if not facts.active and steps.times.unit == "period":
        return Missing(f"to know whether the loop had any work; {NO_TRAINING}")
    begin_ns, end_ns = steps.edges_ns.T.copy()
    of_steps_ns = np.sort(coverage(gaps, begin_ns, end_ns))
    # Python whose calls a tracer records shows an event: a thread without one waits, for a CPU as well.
    often = min(math.ceil((1 - limit("step_gap_host.rare")) * steps.count), max(steps.count - (silent and traced), 1))
    if of_steps_ns[:often].sum() < limit("step_gap_host.share") * (end_ns - begin_ns).sum():  # begins, or chance
        return Missing("more of the few long pauses that make up most of the time between steps, in a longer trace")
    if runs_ops:  # Python's way from op to op, as tracing for a gradient, takes long at times
        return Missing("samples of Python at other lines than those that run the ops one by one, because the pauses "
                       "between these ops are part of the step")
    recurring = host.gap_recurring if facts.trace.job_cpus is None or others_take(facts.trace.job_cpus) else None
    if recurring is not None and recurring * share < limit("step_gap_host.share"):
        return Missing("to know the cause of the pauses, which occur in a different part of each step, as if a thread "
                       "had no CPU. To see CPU use, capture the job on its own machine while other programs are idle")
    return None


def _slow_rank(trace: Trace, host: str | None, rank: int | None) -> str | None:
    """Name of a rank: its number, or its file, which is named after host and port, where each host has one; else by its
    host. None without a ``host``."""
    if host is None:
        return None
    if rank is not None:
        return str(rank)
    if len(trace.paths) != len(trace.hosts):
        return host
    name = PurePath(trace.paths[trace.hosts.index(host)]).name
    return name.removesuffix(".gz").removesuffix(".xplane.pb") or host


def describe_step_gap_host(v: StepGapHost, job: Job) -> Explanation:
    what, action, snippet = _gap_fix(v, job)
    where = ("The host is between two steps" if job.framework != "pytorch" else
             "The host makes no CUDA call" if v.loader_unseen else "Python runs no ops")
    where, but = f"{where} and no GPU has work" if v.gpus else where, ""
    if not v.gpus and job.framework == "pytorch":
        but = f", apart from small ops after the {'model' if job.trains is False else 'optimizer'}'s call"
    of_rank = "" if v.slow_host is None else f" on rank {v.slow_host}"
    others = "" if v.slow_host is None else " The other ranks have no such gaps and wait for this rank."
    gain = "assumes that the host work between two calls overlaps with compute or is removed"
    later = ""
    if v.input_s is not None:
        later = (f" However, the input pipeline is slower and takes {seconds(v.input_s)} for the batches of a step. "
                 "Until the pipeline is faster, the host work costs time only if both need the same CPUs or Python's "
                 "global interpreter lock (GIL).")
        gain = "unknown, because the input pipeline is slower: speed up the pipeline, then capture again"
    title = f"Host work between steps takes {percent(v.share)} of the step{of_rank}"
    # Of many small functions none takes most of the gap.
    made = [line for line in v.lines if line.loader and not (v.inside or v.new_workers)]
    if made and sum(line.s_per_step for line in made) >= limit("step_gap_host.named") * v.gap_s:
        title = _BATCHES.format(percent(v.share))
        action, snippet = fix_of_loader(made[0].loader, v.one_cpu)
    return Explanation(
        title=title,
        why=f"{where} for {seconds(v.gap_s)} of each step ({percent(v.share)}){of_rank}{but}. Host activity "
            f"during this time: {what}.{others}{later}",
        evidence=known({"gap_s": v.gap_s, "share_ratio": v.share, "no_event_s": v.silent_s, "pipeline_s": v.input_s}),
        action=action, snippet=snippet, gain=gain, source=source("step_gap_host.share"))


def out_of_the_step(words: Explanation, verdict: StepGapHost, function: UserFunction) -> Explanation:
    """The words with the fix for the function that takes most of the gap; those of a prediction in each step have a
    better one."""
    if verdict.inside or verdict.new_workers or known_work(
            WORK[:1], (), limit("step_gap_host.named") * verdict.gap_s, verdict.lines):
        return words
    if function.loader:
        action, snippet = fix_of_loader(function.loader, verdict.one_cpu)
        return structs.replace(
            words, title=_BATCHES.format(percent(verdict.share)), snippet=snippet,
            action=f"The loop waits while {function.name} ({function.location}) prepares its batch. {action}")
    if function.holds_loop:
        return structs.replace(
            words, action=f"Move the work at {function.location} out of the loop, or do it every N steps. If this work "
                          "prepares batches, prepare them ahead of time in workers or a thread.",
            snippet=code("step_gap_host", "line", WHERE=function.location))
    return structs.replace(
        words, action=f"Move {function.name} ({function.location}) out of the training loop, or run it every N steps.",
        snippet=code("step_gap_host", "function", FUNCTION=function.name, WHERE=function.location))


def _gap_fix(v: StepGapHost, job: Job) -> tuple[str, str, str | None]:
    """Content of the gap, the action, and the code."""
    loop, seldom = job.loop, code("step_gap_host", "seldom")
    most = limit("step_gap_host.named") * v.gap_s
    recognized = known_work(WORK, (*v.work, *v.executor_work), most, v.lines)
    if v.new_workers and loop == PYTORCH:
        return NEW_WORKERS, KEEP_WORKERS, code("input_bound", "torch")
    if v.inside and (recognized is None or recognized[0].kind == "iterator"):
        return _work_inside(v, loop, most)
    if recognized is not None:
        kind, named = recognized
        return f"{kind.what}, {named_work(named)}", kind.action, kind.code(job)
    what = _gap_content(v, loop, most)
    if loop in KERAS and any(item.name.startswith("MakeIterator::") and item.count_per_step >= 1 for item in v.work):
        if v.phase in (EVALUATION, PREDICTION):
            return what, _PREDICT_ONCE, FIT_ONCE.code(job)
        return what, FIT_ONCE.action, FIT_ONCE.code(job)  # a call of fit() for each step
    if loop in KERAS:
        return what, ("Run several steps per call from Python, and move work (.numpy(), get_weights(), print) out of "
                      "metrics and per-batch callbacks."), code("step_gap_host", "keras")
    if loop == PYTORCH and v.loader_unseen:
        return what, WORKERS_OR_SELDOM, code("input_bound", "torch")
    if job.trains is False:
        return (what, "Prepare the next inputs and process results while the model runs: in a thread, or in separate "
                "processes.", code("step_gap_host", job.server) or code("input_bound", "ahead"))
    if loop == PYTORCH and v.acts:
        return what, ("A policy acts between the steps: run several environments at once, in processes of their own "
                      "(a vector environment), and move logging out of the loop."), None
    if loop == PYTORCH:
        return what, ("Move logging, metrics, gc.collect(), and saving out of the loop, or do this work every hundred "
                      "steps. Prepare data in DataLoader workers. Do not read results at each step."), seldom
    if loop in (CUSTOM, EAGER, JAX):
        return what, ("Move the work between the steps into the step's function, or do it every hundred steps. Do not "
                      f"read results at each step{', so that the loop runs ahead of the GPU' * bool(v.gpus)}."), seldom
    return what, "Find out what Python does between the steps, and move that work out of the loop.", code(
        "step_gap_host", "python")


def _work_inside(v: StepGapHost, loop: str, most: float) -> tuple[str, str, str | None]:
    """The same for steps that predict or evaluate each time, in a callback or in a loop of the user's own."""
    calls = [_INSIDE[phase] for phase in v.inside]
    names, without_iterator = " and ".join(f"{name}()" for name, _ in calls), calls[0][1]
    verbs = ("run", "create") if len(calls) > 1 else ("runs", "creates")
    return (f"{names} {verbs[0]} in each step and {verbs[1]} a dataset and its iterator every time; "
            + _gap_content(v, loop, most),
            f"Call {names} every hundred steps. For a single batch, use {without_iterator}, which creates no dataset.",
            code("step_gap_host", "inside", CALL=without_iterator))


def _gap_content(v: StepGapHost, loop: str, most: float) -> str:
    """Content of a gap in which no known kind of work takes most of the time."""
    silent, shown = v.silent_s or 0.0, named_work(v.work)
    if silent >= most or not shown:
        python = ("mainly the wait for the DataLoader, which Nsight does not record; otherwise logging and metrics"
                  if v.loader_unseen and loop == PYTORCH else "typically callbacks, logging, or data handling")
        return f"Python without events for {seconds(silent)} ({python})" + (f"; the rest is {shown}" if shown else "")
    return f"mainly {shown}" + (f", and Python without events for {seconds(silent)}" if silent >= 0.1 * v.gap_s else "")


# By framework: what it is called, and what to do.
_NOT_TENSORFLOW = {
    "pytorch": (
        "PyTorch ops",
        "Keep the tensors of these ops on the GPU, or run the ops in DataLoader workers. A tensor created without "
        "device= is on the CPU."),
    "jax": (
        "Python callbacks",
        "Write the work of jax.pure_callback, io_callback or debug.print in jax.numpy, or return the values and use "
        "them outside the step, for example every hundred steps."),
}
_CALLBACK_GAIN = "assumes that the callbacks run outside the step"
_CALL_GAIN = "; without callbacks, JAX also calls the function without running Python"
_CALLED_BY_PYTHON = r"ExecuteReplicated\.__call__$"
_PLACEMENT_GAIN = "assumes that these ops run in the input pipeline or take almost no time on the GPU"
_REPLACE = "use a newer TensorFlow version, or replace what needs it, such as a sparse gradient."
_INPUT_OPS = re.compile(
    r"\w*(?:String|Regex|Decode|Parse|Lookup|Hash(?!Table)|Unicode|Sparse|Ragged|Unique|Encode|ReadFile)\w*$")
# Types for which TensorFlow has GPU kernels of the usual number types (float, half, bfloat16).
_HAS_KERNEL = re.compile(
    r"(?:Batch)?MatMul\w*|Conv2D\w*|_Fused\w+|BiasAdd\w*|Relu\w*|FusedBatchNorm\w*|AddV2|Add|Sub|Mul|RealDiv|Sum|Mean|Max|"
    r"Softmax\w*|Transpose|Tile|Concat\w*|Cast|GatherV2|ResourceGather|ResourceApply\w+|Assign\w*VariableOp|Exp|Tanh|"
    r"Sigmoid|Square|Sqrt|Rsqrt|Pow|OneHot|TopKV2|ArgMax|Cumsum|Random\w+|StatelessRandom\w+|Einsum$")


_RECORD_OP_NS, _MUCH_RECORDED = 1_000, 0.1  # an op took 1.2 µs (measured); gputop's own figure
_MOST_STEPS = 0.9  # share of the placement's time, if all steps were as those that are seen


class HostPlacement(Verdict, frozen=True, kw_only=True):
    wait_s: float  # per step: ops on the host while the GPU has nothing to do
    work: Sequence[GapWork]  # those ops, longest first
    slowly_called: bool  # whether JAX calls the function through Python, as it does where it holds callbacks


def judge_host_placement(facts: TraceFacts) -> HostPlacement | Missing | None:
    """Ops of the step's function run on the CPU, long enough that the GPU stands still: no kernel, or put there."""
    host = facts.host
    if facts.framework in _NOT_TENSORFLOW and (host is None or host.placement_s is None):
        return None
    # Without a GPU only the Python counts that a compiled function calls.
    if not facts.active and facts.framework != "jax" and (host is None or not host.placement):
        return Missing("GPU activity in the trace, because all ops run on the host without a GPU")
    if host is None or host.placement_s is None:
        return Missing("data on the model's ops on the host threads" + (
            TORCH_HOST if facts.framework == "pytorch" else HOST_EVENTS))
    if not facts.shares or host.placement_s < limit("host_placement.share") * facts.period_s or not host.placement:
        return None
    share = min(host.placement_s / facts.period_s, 1.0)
    removed = removed_host_time(facts, "placement")
    replayed_ns = sum(spans.total for spans in removed.values())
    cure = Cure(host=removed, assumes="Assumes that these ops overlap with the step or take almost no time on the GPU.")
    # Of a few steps a replay misses too much of the first one, in which the GPU's first event comes late.
    whole = not removed or replayed_ns >= _MOST_STEPS * share * facts.analyzed_spans.total * len(removed)
    slowly = not facts.active and facts.steps is not None and (
        len(host_rows(facts.trace, _CALLED_BY_PYTHON)) >= facts.steps.count)
    bound = slowly or _recording_slows(facts.trace)
    return HostPlacement(gpus=facts.active_numbers, share=share, wait_s=host.placement_s, work=host.placement,
                         slowly_called=slowly, claim="at least" if bound else facts.on_cpus("about"),
                         culprits=on_host(facts, host.placement, waits_for_host(facts, "placement")),
                         cure=cure if whole else None)


def _recording_slows(trace: Trace) -> bool:
    """Return whether to record the ops of XLA's programs on a CPU takes a good part of the time: in theirs, not in that
    of Python."""
    begin, end = trace.window_ns
    return len(host_stat(trace.host, "hlo")[0]) * _RECORD_OP_NS > _MUCH_RECORDED * (end - begin)


def describe_host_placement(v: HostPlacement, job: Job) -> Explanation:
    evidence = {"host_ops_s": v.wait_s, "share_ratio": v.share}
    held_up = "The GPU is idle" if v.gpus else "The compiled function waits"
    python = job.framework != "pytorch" and re.match(PYTHON_CALLBACK, v.work[0].name) is not None
    run = "Python callbacks run" if job.framework == "jax" else "Python code runs" if python else "ops run on the CPU"
    why = (f"{held_up} for {percent(v.share)} of the {job.basis} while {run} in the middle of "
           f"{'it' if job.basis == 'step' else 'a step'}.")
    if job.framework in _NOT_TENSORFLOW:
        (kind, action), snippet = _NOT_TENSORFLOW[job.framework], code("host_placement", job.framework)
    else:
        kind = "Python (py_function, numpy_function)" if python else "TF ops"
        action, key = _placement_fix([work.name for work in v.work])
        snippet = code("host_placement", key)
    return Explanation(
        title=f"{'GPU' if v.gpus else 'Compiled function'} waits for {kind} on the host for {percent(v.share)} of the "
              f"{job.basis}", why=why, evidence=evidence, action=action, snippet=snippet,
        gain=(_PLACEMENT_GAIN if job.framework != "jax" else _CALLBACK_GAIN + _CALL_GAIN * v.slowly_called),
        source=source("host_placement.share"))


def _placement_fix(ops: Sequence[str]) -> tuple[str, str]:
    """Fix for the first of these ops that needs no gradients, else for the first one, and the key of its code."""
    before = [op for op in ops if scope_of(op, training=True).phase not in ("backward", "optimizer")]
    kind = (before or ops)[0].rsplit(":", 1)[-1]
    if re.match(PYTHON_CALLBACK, kind):
        return ("Rewrite the tf.py_function or numpy_function in TensorFlow ops, or move it to the input pipeline.",
                "input")
    if _HAS_KERNEL.match(kind):
        return (f"{kind} has a GPU kernel: check whether tf.device, an integer type or a variable on the CPU keeps it "
                "on the host.", "placed")
    if not before:
        return (f"{kind} seems to have no GPU kernel here and needs gradients, which the input pipeline does not have: "
                f"{_REPLACE}", "placed")
    if _INPUT_OPS.match(kind):
        rest = next((f" For {op.rsplit(':', 1)[-1]}, {_REPLACE}" for op in ops if op not in before), "")
        return f"{kind} prepares data: do this in the input pipeline, which overlaps with the step.{rest}", "input"
    return (f"{kind} seems to have no GPU kernel: move it to the input pipeline, replace it, or run it once for many "
            "steps.", "placed")
