"""tf.functions and XLA: functions traced or compiled anew, ops run without one, kernels that XLA would fuse."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from msgspec.structs import replace

from gputop.advice.fix_code import code
from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import (
    HOST_EVENTS,
    NO_GPU,
    TraceFacts,
    host_rows_in_steps,
    on_host,
    recorder_s,
    removed_host_time,
    waits_for_host,
    without_recorder,
)
from gputop.advice.trace.job import JAX, Job
from gputop.advice.trace.kernel_rows import UNCERTAIN, ChainedKernels, by_stream, chained_kernels, kernels_in_steps
from gputop.advice.trace.optimizer_time import optimizer_time, part_held_up
from gputop.advice.verdict import Explanation, Missing, Verdict, known
from gputop.analysis.host.gaps import longest_on_host, ranked_work, work_in
from gputop.analysis.host.host_causes import EAGER_OPS
from gputop.analysis.host.host_ops import small_ops
from gputop.analysis.layers.pytorch import autograd_functions, linked_ops
from gputop.analysis.results import Functions
from gputop.analysis.steps.compilations import COMPILER, CUDNN, TRITON, function_name, rebuilt, trials, tried_again
from gputop.analysis.steps.jax_calls import is_own_op
from gputop.analysis.steps.phases import TRAINING
from gputop.analysis.steps.torch_compilations import built_again, script_builds, torch_builds
from gputop.analysis.what_if.cure import NO_ROWS, Cure
from gputop.core.findings import Claim, Culprit
from gputop.text.units import percent, seconds
from gputop.trace.host_calls import BACKWARD_NODE, GRADIENT, OPTIMIZER_CALL, within_calls
from gputop.trace.intervals import EMPTY, contains, coverage, in_order, intersect, merge, overlap, subtract
from gputop.trace.lookups import Mask, computes_on_cpu, host_rows, host_stat, name_mask, spans_of
from gputop.trace.model import I64, Trace
from gputop.trace.threads import MAIN, lines_of

_SAME_SHAPES = {
    "": "Call the function with the same shapes and types each time: pad or drop the last batch, pass Python values as "
        "tensors, and create the function once.",
    "jax": "Call the function with the same shapes and types each time: pad batches to a few lengths (buckets), pass "
           "changing numbers as arrays (not in static_argnums), and call jax.jit once, outside the loop. "
           "JAX_EXPLAIN_CACHE_MISSES=1 logs why a call compiles, and JAX_LOG_COMPILES=1 logs which calls compile.",
    "jax-op": "Join, cut, and pad arrays of changing lengths with NumPy, collect results in a Python list, or pad "
              "arrays to a few lengths: each of JAX's ops compiles for each new shape. JAX_LOG_COMPILES=1 logs them.",
    "pytorch": "Call the compiled function with the same shapes and types each time: drop or pad the last batch "
               "(drop_last=True), pad to a few lengths, and mark dimensions that change. TORCH_LOGS=recompiles logs "
               "why a call compiles.",
    CUDNN: "Limit the number of input shapes of convolutions: pad or crop to a few sizes, and drop the last batch. "
           "Alternatively, let cuDNN choose kernels without benchmarking.",
    TRITON: "Keep values that change with each batch out of the autotuner's key, or round them to a few values. "
            "TRITON_PRINT_AUTOTUNING=1 logs each choice.",
}
_SCRIPTED = ("Call the scripted function with the same shapes and types, let TorchScript compile the second version "
             "for any shape, or replace TorchScript with torch.compile.")
_ALREADY = "Assumes that all calls use a function that has already been created."
_MADE_ONCE = ("Create the function once, outside the loop, and call it in the loop: a new tf.function is always traced "
              "on its first call.")


class Retracing(Verdict, frozen=True, kw_only=True):
    function: str
    tracing_s: float  # per step, or of the window without steps
    count: int  # times it was traced or compiled anew in the window
    calls: int = 0  # 0: not known
    made: int | None = None  # calls of it that are the first of a new function by its name; None: none, or not told
    ever: int | None = None  # times it was traced since the job began
    compilations: int = 0  # by XLA
    compile_s: float = 0.0
    young_s: float | None = None  # age of the job, where nothing but repetition tells these calls from its start
    scripted: bool = False  # by TorchScript
    tuning_s: float = 0.0  # part of tracing_s in which kernels are tried out
    tries: str = ""  # who tries kernels in the steps; then nothing is compiled


def judge_retracing(facts: TraceFacts) -> Retracing | Missing | None:
    """A function is traced or compiled in two or more of its calls, and the GPU or the step waits for it."""
    functions, host, steps = facts.analysis.functions, facts.host, facts.steps
    if facts.framework == "pytorch":
        return _judge_recompiling(facts) or _judge_trials(facts)
    if (tried := _judge_trials(facts)) is not None:
        return tried
    if functions is None or host is None:
        if facts.analysis.ops is not None and facts.analysis.ops.eager_share == 1.0:
            return None  # nothing is a function
        return Missing(f"calls to tf.functions or jitted functions, which show retracing{HOST_EVENTS}")
    again = next((one for one in rebuilt(facts.trace) if one.built >= limit("retracing.count")), None)
    if again is None and (steps is None or steps.count < limit("host.steps")):
        return Missing("two complete steps, because the first tracing is normal; capture a longer trace")
    share = host.tracing_s / facts.period_s if facts.period_s > 0 else 0.0
    if again is None or share < limit("retracing.share"):
        return None
    enough = steps is not None and steps.count >= limit("host.steps")
    trains = enough and steps is not None and (steps.times.phase == TRAINING or not again.made)
    young_s = None if trains else _young_s(facts)
    if young_s is not None and steps is None and is_own_op(again.name):
        return Missing("two complete steps, because each of JAX's ops compiles once per shape as a job starts; capture "
                       "again in two minutes")
    tracing = waits_for_host(facts, "tracing")
    begins = longest_on_host(facts.trace, {again.name, f"PjitFunction({again.name})"}, tracing)
    ever = [use.tracing_count for use in functions.functions
            if use.name == again.name and use.tracing_count is not None and not again.made]
    return Retracing(
        gpus=facts.active_numbers, share=share, claim=facts.on_cpus("at least"), function=again.name,
        tracing_s=host.tracing_s, count=again.built, calls=again.calls, made=again.made or None,
        ever=max(ever) if ever else None,
        compilations=functions.xla_compilations, compile_s=functions.xla_compile_s,
        young_s=young_s, severest="high" if young_s is None else "medium",
        culprits=(Culprit(again.name, "host", host.tracing_s, facts.basis, at_s=next(iter(begins.values()), None)),),
        cure=Cure(host=removed_host_time(facts, "tracing"), assumes=_ALREADY))


def _young_s(facts: TraceFacts) -> float | None:
    """Age of a job that may still start; None where it is older, or its age is not known."""
    age_s = facts.trace.job_cpus.age_s if facts.trace.job_cpus is not None else None
    return age_s if age_s is not None and age_s < limit("retracing.age_s") else None


def _judge_recompiling(facts: TraceFacts) -> Retracing | None:
    """torch.compile or TorchScript compiles a function in two or more of its calls."""
    host, trace = facts.host, facts.trace
    again = next((one for one in (*torch_builds(trace, lines_of(trace, MAIN)), *script_builds(trace))
                  if len(one.start_ns) >= limit("retracing.count") and built_again(trace, one)), None)
    if again is None or host is None or host.tracing_s < limit("retracing.share") * facts.period_s:
        return None
    share = host.tracing_s / facts.period_s
    young_s, by_dynamo = _young_s(facts), again.by == "torch.compile"
    return Retracing(
        gpus=facts.active_numbers, share=share, scripted=not by_dynamo,
        function=f"Function {again.function} of {again.by}",
        tracing_s=host.tracing_s, count=len(again.start_ns), calls=again.calls,
        young_s=young_s, severest="high" if young_s is None else "medium",
        tuning_s=overlap(trials(trace)[COMPILER], facts.analyzed_spans) / 1e9 / facts.steps_or_window,
        culprits=(Culprit(f"{'Torch-Compiled Region: ' * by_dynamo}{again.function}", "host", host.tracing_s,
                          facts.basis, at_s=int(again.start_ns[(again.end_ns - again.start_ns).argmax()]) / 1e9),),
        cure=Cure(host=removed_host_time(facts, "tracing"), assumes=_ALREADY))


def _judge_trials(facts: TraceFacts) -> Retracing | None:
    """cuDNN or Triton tries out kernels in steps of the loop, and not only in its first ones."""
    trace, device, young_s = facts.trace, facts.trace.device, _young_s(facts)
    by = max((CUDNN, TRITON), key=lambda by: trials(trace)[by].total)
    again = tried_again(trace, by, facts.steps.edges_ns) if facts.steps is not None else NO_ROWS
    spans = intersect(trials(trace)[by], facts.analyzed_spans)
    tuning_s = spans.total / 1e9 / facts.steps_or_window
    computing = overlap(spans, merge(EMPTY, *(timeline.compute for timeline in facts.gpu_timelines)))
    if not len(again) or tuning_s < limit("retracing.share") * facts.period_s:
        return None
    return Retracing(
        gpus=facts.active_numbers, share=tuning_s / facts.period_s, function=f"Kernel selection by {by}",
        tracing_s=tuning_s, count=len(again), young_s=young_s, severest="high" if young_s is None else "medium",
        tries=by, of_parts={"compute": 1.0} if 2 * computing >= spans.total else {},
        cure=Cure(host={timeline.gpu: spans for timeline in facts.gpu_timelines},
                  scaled=((np.flatnonzero(contains(spans, device.launch_ns)), 0.0),),
                  assumes="Assumes that all calls use a kernel that has already been selected."))


def describe_retracing(v: Retracing, job: Job) -> Explanation:
    evidence = known({
        "tracing_s": v.tracing_s, "share_ratio": v.share, "retracings_count": float(v.count),
        "tracings_ever_count": None if v.ever is None else float(v.ever),
        "compilations_count": float(v.compilations) if v.compilations else None,
        "compile_s": v.compile_s if v.compilations else None, "calls_count": float(v.calls) if v.calls else None})
    traced = "compiled" if job.framework in ("jax", "pytorch") else "traced"
    how = f"{v.function} is {'repeated' if v.tries else f'{traced} again'} {v.count} times in the window"
    if v.made and job.framework != "pytorch":
        how = f"The program re-creates {v.function} {v.made} times in the window and traces each new function"
    elif v.calls:
        how += f", in {v.count} of {v.calls} calls"
    of_jax = "jax-op" if job.framework == "jax" and is_own_op(v.function) else ""
    keys = (v.tries,) if v.tries else (of_jax, *job.keys)
    action, snippet = _SAME_SHAPES.get(v.tries or of_jax or job.framework, _SAME_SHAPES[""]), code("retracing", *keys)
    if v.made and job.framework not in _SAME_SHAPES:
        action, snippet = _MADE_ONCE, code("retracing", "once")
    if v.scripted and job.framework == "pytorch":
        action, snippet = _SCRIPTED, code("retracing", "torchscript")
    return Explanation(
        title=(f"{v.function} is re-created and traced again in the loop" if v.made and job.framework != "pytorch" else
               f"{v.function} is {'repeated' if v.tries else f'{traced} repeatedly'}"
               ) + f": {percent(v.share)} of the {job.basis}",
        why=f"{how}, which takes {seconds(v.tracing_s)} ({percent(v.share)}) of the "
            f"{'mean step' if job.basis == 'step' else job.basis}"
            + (" while the GPUs wait." if v.gpus and not v.tries else ".")
            + (f" Kernel benchmarking (max-autotune) takes {seconds(v.tuning_s)} of this time." if v.tuning_s else "")
            + ("" if v.young_s is None else f" The job was only {seconds(v.young_s)} old, so these calls may be part "
                                            "of job startup. Capture again in two minutes to be sure."),
        evidence=evidence, action=action, snippet=snippet, source=source("retracing.share", "retracing.count"))


_MOSTLY_OPTIMIZER = 0.5  # share of the time of small ops
_NEVER = np.iinfo(np.int64).max
# Ops for each parameter of a model, from which it loops: a layer has 1 to 3, loops over rows, heads or time 30 to 3,000
# of them. Products for each, from which the loop is a recurrence.
_LOOP_OPS, _LOOP_PRODUCTS = 8, 4
_RECURRENCE = r"aten::(?:gru|lstm|rnn_(?:tanh|relu))$"
_LSTM, _PRODUCTS = r"aten::lstm_cell$", r"aten::(?:linear|addmm|mm|matmul|\w+_cell)$"
_WORTH_SAYING = 0.1  # share of the time: what the profiler itself takes of it


class EagerExecution(Verdict, frozen=True, kw_only=True):
    wait_s: float  # per step: the GPU, or without one the step, waits for Python
    eager_ratio: float  # share of the ops' time that is run eagerly; of PyTorch the share of all ops that is small
    ops_per_step: float | None
    # Of PyTorch's small ops.
    op_median_s: float = 0.0
    most_often: str = ""
    most_often_per_step: float = 0.0
    optimizer_ratio: float = 0.0  # share of wait_s in calls of the optimizer
    recording_s: float = 0.0  # part of wait_s that the profiler took to record the ops, estimated


def judge_eager_execution(facts: TraceFacts) -> EagerExecution | None:
    """The model runs op by op from Python, which takes longer to start an op than the GPU to run it."""
    ops, host = facts.analysis.ops, facts.host
    if facts.framework == "pytorch":
        return _judge_small_ops(facts)
    if ops is None or host is None or ops.eager_share is None:
        return None
    if ops.eager_share < limit("eager_execution.share") or not facts.shares:
        return None
    share = host.eager_s / facts.period_s
    if share < limit("eager_execution.cost"):
        return None
    begins = longest_on_host(facts.trace, {op.name for op in ops.eager}, waits_for_host(facts, "eager"))
    return EagerExecution(
        gpus=facts.active_numbers, share=share, claim=facts.on_cpus("at least"), wait_s=host.eager_s,
        eager_ratio=ops.eager_share, ops_per_step=ops.eager_ops_per_step,
        culprits=tuple(Culprit(op.name, "host", op.seconds / facts.steps_or_window, facts.basis,
                               at_s=begins.get(op.name)) for op in ops.eager),
        cure=Cure(host=removed_host_time(facts, "eager"),
                  assumes="Assumes that a function runs the ops without Python between them."))


def _judge_small_ops(facts: TraceFacts) -> EagerExecution | None:
    """PyTorch starts so many small ops that this takes a good part of the CPU's time; a GPU that waits for launches is
    :func:`gputop.advice.trace.launch.judge_launch_bound`'s."""
    host, trace = facts.host, facts.trace
    if host is None or not computes_on_cpu(trace) or not facts.shares:
        return None
    all_spans, per = waits_for_host(facts, "eager"), facts.steps_or_window * facts.processes
    # The backward passes of PyTorch's own recurrent layers have small ops that nothing in the job can join.
    functions, ops = linked_ops(trace, autograd_functions(trace))
    inside = within_calls(trace, host_rows(trace, _RECURRENCE), trace.host.line[ops], trace.host.start_ns[ops])
    spans, main = subtract(all_spans, spans_of(trace, functions[inside])), lines_of(trace, MAIN)
    eager_s = host.eager_s * spans.total / max(all_spans.total, 1)
    small = small_ops(trace, main)
    ops = small.rows
    ops = ops[coverage(spans, trace.host.start_ns[ops], trace.host.start_ns[ops] + 1) > 0]
    names, which = np.unique(trace.host.name[ops], return_inverse=True)
    counts = np.bincount(which)
    # Each pass of several that one update sums up has its own.
    if len(ops) < EAGER_OPS * round(min(counts[counts >= per].tolist(), default=per) / per) * per:
        return None
    # The step is shorter without the profiler's own part; other programs hold up ops as much as the rest of the step,
    # and an op that was held up is not counted as small.
    share, _ = without_recorder(facts, eager_s, spans, part_held_up(facts))
    if share < limit("eager_execution.share"):
        return None
    update = optimizer_time(facts)
    ratio = overlap(spans, update.spans) / spans.total
    claim = _claim(facts, ops)
    optimizer = ratio >= _MOSTLY_OPTIMIZER or (claim == "at most" and update.saved >= limit("eager_execution.share"))
    work = ranked_work(work_in(trace, spans, main)[0], per)
    return EagerExecution(
        gpus=(), share=share, saving=max(update.saved, 0.0) if optimizer else None,
        claim="about" if optimizer else claim, spans={NO_GPU: intersect(spans, update.spans) if optimizer else spans},
        wait_s=eager_s, eager_ratio=len(small.rows) / small.of, ops_per_step=len(ops) / per,
        op_median_s=float(np.median(trace.host.end_ns[ops] - trace.host.start_ns[ops])) / 1e9,
        most_often=trace.names[names[counts.argmax()]], most_often_per_step=float(counts.max()) / per,
        optimizer_ratio=ratio if optimizer else 0.0, recording_s=min(recorder_s(facts, spans), eager_s),
        culprits=on_host(facts, work, spans))


def _claim(facts: TraceFacts, ops: I64) -> Claim:
    """Claim of a rewrite of these small ops, which saves their share.

    Where the forward pass runs many for each parameter, it loops over rows or parts of a tensor, which one op takes at
    once, and what else the loop does goes as well. A step of a recurrence waits for the one before: of these only LSTM
    has an op that is faster on a CPU. Else the layers themselves are small, or the loop is over parameters.
    """
    host, parameters = facts.trace.host, len(host_rows_in_steps(facts, GRADIENT))
    rows = np.intersect1d(ops, host_stat(host, "sequence")[0])
    # Behind the backward pass comes the optimizer, and what looks at gradients.
    passes, updates = (np.append(in_order(host.start_ns[host_rows(facts.trace, kind)]), _NEVER)
                       for kind in (BACKWARD_NODE, OPTIMIZER_CALL))
    next_pass, next_update = (of[np.searchsorted(of, host.start_ns[rows])] for of in (passes, updates))
    forward = host.name[rows[next_pass < next_update]]
    if not parameters or len(forward) < _LOOP_OPS * parameters:
        return "at most"
    if name_mask(facts.trace, _LSTM)[forward].any():
        return "about"
    return "at most" if name_mask(facts.trace, _PRODUCTS)[forward].sum() >= _LOOP_PRODUCTS * parameters else "at least"


def describe_eager_execution(v: EagerExecution, job: Job) -> Explanation:
    if job.framework == "pytorch":
        return _small_ops_of_pytorch(v, job)
    evidence = known({"eager_wait_s": v.wait_s, "share_ratio": v.share, "eager_ratio": v.eager_ratio,
                      "eager_ops_per_step": v.ops_per_step})
    each = "Ops run" if v.ops_per_step is None else f"{v.ops_per_step:.0f} ops per step run"
    if job.loop == JAX:
        return _eager_in_jax(v, job, evidence)
    waits = "the GPU waits for Python for" if v.gpus else "Python takes"
    return Explanation(
        title=f"Eager ops cost {percent(v.share)} of the {job.basis}",
        why=f"{each} one by one from Python, and {waits} {percent(v.share)} of the {job.basis}.",
        evidence=evidence, action="Put the whole training step into one tf.function.",
        snippet=code("eager_execution", *job.keys), source=source("eager_execution.share"))


def _small_ops_of_pytorch(v: EagerExecution, job: Job) -> Explanation:
    per = "per step" if job.basis == "step" else f"per {job.basis}"
    ops = "Small ops" if v.ops_per_step is None else f"{v.ops_per_step:,.0f} small ops {per}"
    evidence = known({"eager_wait_s": v.wait_s, "share_ratio": v.share, "op_median_s": v.op_median_s,
                      "optimizer_ratio": v.optimizer_ratio or None, "small_ops_per_step": v.ops_per_step})
    why = (f"Python starts {ops[:1].lower()}{ops[1:]}, which take {seconds(v.op_median_s)} each (median). PyTorch "
           "needs 1 to 10 µs to start an op, so such ops do little computation. The most frequent op is "
           f"{v.most_often}, which runs {v.most_often_per_step:,.0f} times.")
    if v.recording_s >= _WORTH_SAYING * v.wait_s:
        evidence["recording_s"] = v.recording_s
        why += (f" About {seconds(v.recording_s)} of the {seconds(v.wait_s)} is profiler overhead, which is "
                "not counted.")
    action, snippet = ("Replace loops over rows, elements, or layers with one op on the whole tensor, and compile the "
                       "rest: torch.compile fuses small ops."), code("eager_execution", "pytorch")
    gain = "assumes that a few ops on whole tensors replace these ops, in almost no time"
    if v.optimizer_ratio:
        gain = "assumes that one call updates all parameters, in almost no time"
        action, snippet = (f"The optimizer takes {percent(v.optimizer_ratio)} of this time because it updates one "
                           "parameter after another: update all parameters in one call."), code(
                               "eager_execution", "pytorch-optimizer")
    elif job.compiled:
        action, snippet = ("Find out what torch.compile leaves out, because it compiles only part of the job. Replace "
                           "loops over rows or elements with one op on the whole tensor."), code(
                               "elementwise_unfused", "graph-breaks")
    return Explanation(
        title=f"{ops} take {percent(v.share)} of the {job.basis}", why=why, evidence=evidence, action=action,
        snippet=snippet, gain=gain, source=source("eager_execution.share", "launch_bound.recording_s"))


def _eager_in_jax(v: EagerExecution, job: Job, evidence: Mapping[str, float]) -> Explanation:
    """Each op outside of jax.jit is a program of its own."""
    ops = "Small jitted ops" if v.ops_per_step is None else f"{v.ops_per_step:.0f} small jitted ops per step"
    most = ", ".join(function_name(culprit.name) for culprit in v.culprits[:3])
    waits, everything = "the GPU waits for Python for" if v.gpus else "Python takes", v.eager_ratio == 1.0
    return Explanation(
        title=f"{ops} run one by one from Python: {percent(v.share)} of the {job.basis}",
        why=f"{ops} ({most}) run one by one from Python, each as a separate program, and {waits} {percent(v.share)} of "
            f"the {job.basis}.",
        evidence=evidence,
        action=("Wrap the whole function that the loop calls in a single jax.jit; currently each JAX op is compiled "
                "separately." if everything else "Wrap the whole update in a single jax.jit: gradients, optimizer "
                "update, apply_updates, and metrics."),
        snippet=code("eager_execution", "jax" if everything else "jax-update"),
        source=source("eager_execution.share"))


# Ops whose kernels read and write each element once.
_ELEMENTWISE = (
    r"(?:Add(?:V2|N)?|Sub|Mul|(?:Real|Float)?Div(?:NoNan)?|Maximum|Minimum|(?:Leaky)?Relu6?(?:Grad)?|S?Elu(?:Grad)?|"
    r"Gelu(?:Grad)?|Sigmoid(?:Grad)?|Tanh(?:Grad)?|Softplus(?:Grad)?|Softsign(?:Grad)?|Exp|Expm1|Log|Log1p|Sqrt(?:Grad)?|"
    r"Rsqrt(?:Grad)?|Square|SquaredDifference|Pow|Erfc?|Neg|Abs|Sign|Reciprocal|Inv(?:Grad)?|Cast|Select(?:V2)?|"
    r"Greater(?:Equal)?|Less(?:Equal)?|Equal|NotEqual|Logical\w+|ClipByValue|BiasAdd)")
_BY_OP = rf".*:{_ELEMENTWISE}$"
_BY_NAME = rf"{_ELEMENTWISE}_GPU_DT_\w+_kernel|.*(?:EigenMetaKernel|BiasNHWCKernel|BiasNCHWKernel)"
_XLA_KERNEL = r"(?:\w*_)?fusion(?:_\d+)?$|\w*(?:loop|input|wrapped)_\w*fusion|triton_"


def judge_xla_off(facts: TraceFacts) -> ChainedKernels | None:
    """Element-wise kernels in a row, each of which reads and writes its whole tensor; XLA would make them one."""
    if _sees_xla(facts.trace, facts.analysis.functions):
        return None
    kernels = by_stream(facts.trace, kernels_in_steps(facts))
    saved_s, chains = chained_kernels(facts, kernels, _elementwise(facts.trace, kernels))
    if saved_s < limit("xla_off.share") * facts.period_s:
        return None
    share = saved_s / facts.period_s
    return replace(chains, share=share, severest="medium")


def describe_xla_off(v: ChainedKernels, job: Job) -> Explanation:
    chained = v.chained_s / job.period_s
    return Explanation(
        title=f"XLA is off and could fuse kernels that take {percent(chained)} of the {job.basis}",
        why=f"XLA does not compile any function. {v.chains:.0f} chains of element-wise kernels that run back to back "
            f"on the same tensors take {percent(chained)} of the {job.basis}. Only a test shows whether "
            "XLA fuses these kernels for this model.",
        evidence={"chained_s": v.chained_s, "chained_ratio": chained, "chains_count": v.chains, "share_ratio": v.share},
        action="Try XLA: compile the step, and compare the step time after the slow first step.",
        snippet=job.xla, gain=UNCERTAIN, source=source("xla_off.share", "xla_off.chain") + "; DLProf: XLA off")


def _sees_xla(trace: Trace, functions: Functions | None) -> bool:
    if functions is not None and (functions.xla_modules or functions.xla_runs or functions.xla_compilations
                                  or any(use.xla for use in functions.functions)):
        return True
    return bool(name_mask(trace, _XLA_KERNEL).take(trace.device.name).any())


def _elementwise(trace: Trace, kernels: I64) -> Mask:
    device = trace.device
    by_op, by_name = name_mask(trace, _BY_OP), name_mask(trace, _BY_NAME)
    op = device.tf_op[kernels]
    return np.asarray(np.where(op >= 0, by_op[op], by_name[device.name[kernels]]), bool)
