"""tf.functions and XLA: functions traced or compiled anew, ops run without one, kernels that XLA would fuse."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import HOST_EVENTS, TraceFacts
from gputop.advice.trace.training_loop import EAGER, JAX, KERAS2, KERAS3, training_loop
from gputop.analysis.results_host import Functions
from gputop.core.findings import Abstained, Finding, Gain, at_most, severity_of
from gputop.text.units import percent, seconds
from gputop.trace.lookups import Mask, name_mask
from gputop.trace.model import I64, Kind, Trace

_RETRACED = {
    KERAS2: "# all batches alike; pad sequences to few lengths\nds = ds.batch(batch_size, drop_remainder=True)",
    KERAS3: "# all batches alike; pad sequences to few lengths\nds = ds.batch(batch_size, drop_remainder=True)",
    JAX: ("# few shapes, what is padded masked in the loss\n"
          "batch = jnp.pad(batch, ((0, bucket - len(batch)), (0, 0)))\n"
          "train_step = jax.jit(train_step)  # once, outside of the loop"),
}
_RETRACED_CUSTOM = (
    "@tf.function(reduce_retracing=True)  # outside of the loop\n"
    "def train_step(batch, rate): ...\n"
    "# Python numbers as tensors: a new value is no new function\n"
    "train_step(batch, tf.constant(rate))")


def retracing(facts: TraceFacts) -> Finding | Abstained | None:
    """The step's function is traced or compiled again and again, and the GPU waits for it."""
    functions, host = facts.analysis.functions, facts.host
    if facts.framework == "pytorch":
        return None
    if functions is None or host is None:
        if facts.analysis.ops is not None and facts.analysis.ops.eager_share == 1.0:
            return None  # nothing is a function
        return Abstained("retracing", (
            f"calls of tf.functions, which say whether they traced, or of jitted ones{HOST_EVENTS}"))
    steps = facts.analysis.steps
    if steps is None or steps.count < limit("host.steps"):
        return Abstained("retracing", "two whole steps: one tracing may be the first of all; capture longer")
    name, count, calls = _most_traced(functions, host.compiled)
    if count < limit("retracing.count") or host.tracing_s < limit("retracing.share") * facts.period_s:
        return None
    share = host.tracing_s / facts.period_s
    evidence = {"tracing_s": host.tracing_s, "share_ratio": share, "retracings_count": float(count)}
    told = [use.tracing_count for use in functions.functions if use.name == name and use.tracing_count is not None]
    if told:
        evidence["tracings_ever_count"] = float(max(told))
    if functions.xla_compilations:
        evidence["compilations_count"] = float(functions.xla_compilations)
        evidence["compile_s"] = functions.xla_compile_s
    if calls:
        evidence["calls_count"] = float(calls)
    traced = "compiled" if facts.framework == "jax" else "traced"
    why = (f"{name} was {traced} anew {count} times in the window"
           + (f", in {count} of {calls} calls" if calls else "")
           + f"; that takes {seconds(host.tracing_s)} of the mean step, {percent(share)}"
           + (", while the GPUs wait." if facts.active else "."))
    return Finding(
        id="retracing", severity=facts.capped_severity(share),
        title=f"{name} is {traced} again and again: {percent(share)} of the step",
        why=facts.with_caveat(why), evidence=evidence,
        action="Call the function with the same shapes and types each time: pad or drop the last batch, pass Python "
               "values as tensors, and create the function once.",
        snippet=_RETRACED.get(training_loop(facts), _RETRACED_CUSTOM),
        gain=Gain(share, "the time from such a call to its first op, if all calls used a function made before"),
        gpus=tuple(gpu.gpu for gpu in facts.active), source=source("retracing.share", "retracing.count"),
    )


def _most_traced(functions: Functions, compiled: Mapping[str, int]) -> tuple[str, int, int]:
    """The function traced or compiled anew most often in the window, how often, and its calls (0: not told)."""
    found = [(use.name, max(use.retracings, compiled.get(use.name, 0)), use.calls) for use in functions.functions]
    known = {name for name, _, _ in found}
    found += [(name, count, 0) for name, count in compiled.items() if name not in known]
    name, count, calls = max(found, key=lambda item: (item[1], item[0]), default=("", 0, 0))
    return re.sub(r"^PjitFunction\((.*)\)$", r"\1", name), count, calls


_EAGER_SNIPPETS = {
    KERAS2: "model.compile(optimizer, loss, run_eagerly=False)\ntf.config.run_functions_eagerly(False)",
    KERAS3: "model.compile(optimizer, loss, run_eagerly=False)\ntf.config.run_functions_eagerly(False)",
}
_EAGER_CUSTOM = (
    "@tf.function  # the whole step: forward, gradients, optimizer.apply_gradients\n"
    "def train_step(x, y): ...\n"
    "# Keras: model.compile(..., run_eagerly=False)")


def eager_execution(facts: TraceFacts) -> Finding | Abstained | None:
    """The model runs op by op from Python, which takes longer to start an op than the GPU to run it."""
    ops, host = facts.analysis.ops, facts.host
    if facts.framework in ("jax", "pytorch"):
        return None
    if ops is None or host is None or ops.eager_share is None:
        return Abstained("eager_execution", (
            "ops run eagerly and calls of tf.functions (EagerExecute); capture with host_tracer_level 2, as gputop "
            "does"))
    if ops.eager_share < limit("eager_execution.share") or facts.period_s <= 0:
        return None
    share = host.eager_s / facts.period_s
    if share < limit("eager_execution.cost"):
        return None
    evidence = {"eager_wait_s": host.eager_s, "share_ratio": share, "eager_ratio": ops.eager_share}
    if ops.eager_ops_per_step is not None:
        evidence["eager_ops_per_step"] = ops.eager_ops_per_step
    names = ", ".join(dict.fromkeys(op.name for op in ops.eager[:4]))
    each = f"{ops.eager_ops_per_step:.0f} ops a step" if ops.eager_ops_per_step is not None else "Ops"
    waits = "the GPU waits for Python" if facts.active else "Python takes"
    why = f"{each} ({names}, …) are run one by one from Python; {waits} {percent(share)} of the {facts.basis}."
    return Finding(
        id="eager_execution", severity=facts.capped_severity(share),
        title=f"Ops run eagerly cost {percent(share)} of the {facts.basis}",
        why=facts.with_caveat(why), evidence=evidence,
        action="Put the whole training step into a tf.function.",
        snippet=_EAGER_SNIPPETS.get(_loop(facts), _EAGER_CUSTOM),
        gain=Gain(share, "at most: all of Python's time from op to op, if a function launched them ahead of the GPU"),
        gpus=tuple(gpu.gpu for gpu in facts.active), source=source("eager_execution.share"),
    )


def _loop(facts: TraceFacts) -> str:
    return training_loop(facts) if training_loop(facts) != EAGER else ""


# Ops whose kernels read and write each element once.
_ELEMENTWISE = (
    r"(?:Add(?:V2|N)?|Sub|Mul|(?:Real|Float)?Div(?:NoNan)?|Maximum|Minimum|(?:Leaky)?Relu6?(?:Grad)?|S?Elu(?:Grad)?|"
    r"Gelu(?:Grad)?|Sigmoid(?:Grad)?|Tanh(?:Grad)?|Softplus(?:Grad)?|Softsign(?:Grad)?|Exp|Expm1|Log|Log1p|Sqrt(?:Grad)?|"
    r"Rsqrt(?:Grad)?|Square|SquaredDifference|Pow|Erfc?|Neg|Abs|Sign|Reciprocal|Inv(?:Grad)?|Cast|Select(?:V2)?|"
    r"Greater(?:Equal)?|Less(?:Equal)?|Equal|NotEqual|Logical\w+|ClipByValue|BiasAdd)")
_BY_OP = rf".*:{_ELEMENTWISE}$"
_BY_NAME = rf"{_ELEMENTWISE}_GPU_DT_\w+_kernel|.*(?:EigenMetaKernel|BiasNHWCKernel|BiasNCHWKernel)"
_XLA_KERNEL = r"(?:\w*_)?fusion(?:_\d+)?$|\w*(?:loop|input|wrapped)_\w*fusion|triton_"


def xla_off(facts: TraceFacts) -> Finding | Abstained | None:
    """Element-wise kernels in a row, each of which reads and writes its whole tensor; XLA would make them one."""
    if facts.framework in ("jax", "pytorch"):
        return None
    if not facts.active or facts.shares is None:
        return Abstained("xla_off", "GPU activity in the trace")
    functions = facts.analysis.functions
    if facts.framework != "tensorflow" or (functions is None and facts.analysis.ops is None):
        return Abstained("xla_off", (
            f"TensorFlow's functions or ops on the host, which say whether XLA compiled them{HOST_EVENTS}"))
    if _sees_xla(facts.trace, functions):
        return None
    saved, chained, chains = _chains(facts)
    if facts.period_s <= 0 or saved < limit("xla_off.share") * facts.period_s:
        return None
    share = saved / facts.period_s
    how = training_loop(facts)
    several = len(facts.active) > 1
    if how in (KERAS2, KERAS3) and not several:
        snippet = "model.compile(optimizer, loss, jit_compile=True)"
    elif several:
        snippet = "# compiles clusters, leaves the collectives out\nTF_XLA_FLAGS=--tf_xla_auto_jit=2 python train.py"
    else:
        snippet = ("@tf.function(jit_compile=True)  # shapes must stay the same\n"
                   "def train_step(x, y): ...")
    return Finding(
        id="xla_off", severity=at_most(severity_of(share), "medium"),
        title=f"XLA is off and could fuse kernels: up to {percent(share)} of the {facts.basis}",
        why=f"No function is compiled by XLA, and {percent(chained / facts.period_s)} of the {facts.basis} goes into "
            f"{chains:.0f} rows of element-wise kernels, one after the other over the same tensors. Fused they might "
            f"save up to {percent(share)}; whether XLA does so for this model only a try can tell.",
        evidence={"chained_s": chained, "chained_ratio": chained / facts.period_s, "chains_count": chains,
                  "share_ratio": share},
        action="Try XLA on the step: compile it and compare the step time after the first, slow step.",
        snippet=snippet,
        gain=Gain(share, "at most, not sure: fused, a row reads two tensors and writes one; now each kernel does both"),
        gpus=tuple(gpu.gpu for gpu in facts.active),
        source=source("xla_off.share", "xla_off.chain") + "; DLProf: XLA off",
    )


def _sees_xla(trace: Trace, functions: Functions | None) -> bool:
    if functions is not None and (functions.xla_modules or functions.xla_runs or functions.xla_compilations
                                  or any(use.xla for use in functions.functions)):
        return True
    return bool(name_mask(trace, _XLA_KERNEL)[trace.device.name].any())


def _chains(facts: TraceFacts) -> tuple[float, float, float]:
    """Per step (or window) and GPU: seconds that fusing would save, seconds in rows of element-wise kernels, rows."""
    trace = facts.trace
    device = trace.device
    steps = facts.analysis.steps
    kernels = np.flatnonzero(device.kind <= Kind.COLLECTIVE)
    if steps is not None:
        bounds = np.array(steps.bounds_ns)
        at = np.searchsorted(bounds[:, 0], device.start_ns[kernels], side="right") - 1
        kernels = kernels[(at >= 0) & (device.start_ns[kernels] < bounds[np.maximum(at, 0), 1])]
    kernels = kernels[np.lexsort((device.start_ns[kernels], device.line[kernels]))]
    if not len(kernels):
        return 0.0, 0.0, 0.0
    chained = _elementwise(trace, kernels)
    line = device.line[kernels]
    begins = np.concatenate(([True], (chained[1:] != chained[:-1]) | (line[1:] != line[:-1])))
    row = np.cumsum(begins) - 1
    count = np.bincount(row)
    length = np.bincount(row, weights=device.end_ns[kernels] - device.start_ns[kernels])
    long = (count >= limit("xla_off.chain")) & chained[begins]
    saved = float((length[long] * (1 - 1.5 / count[long])).sum())
    per = 1e9 * (steps.count if steps is not None else 1) * len(facts.active)
    return saved / per, float(length[long].sum()) / per, float(long.sum()) * 1e9 / per


def _elementwise(trace: Trace, kernels: I64) -> Mask:
    device = trace.device
    by_op, by_name = name_mask(trace, _BY_OP), name_mask(trace, _BY_NAME)
    op = device.tf_op[kernels]
    return np.asarray(np.where(op >= 0, by_op[op], by_name[device.name[kernels]]), bool)
