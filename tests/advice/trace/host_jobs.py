"""Synthetic jobs whose host keeps the GPUs waiting, each in one way; times are microseconds."""

from __future__ import annotations

from typing import Any

from gputop.core.findings import Finding
from gputop.trace.model import Kind
from tests.advice.trace.traces import STEP, STEPS, abstained, findings, launched_ahead
from tests.trace.build import Builder, keras_steps

EXECUTOR, WORKER = "tf_Compute/1", "tf_data_private_threadpool/"
BF16 = "sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x32_stage4_warpsize2x2x1_tensor16x8x16_kernel"
HOST_RULES = {"step_gap_host", "host_placement", "retracing", "eager_execution", "thread_contention", "xla_off"}


def found(job: Builder) -> dict[str, Finding]:
    """What the rules on the host's side say."""
    return {id_: finding for id_, finding in findings(job).items() if id_ in HOST_RULES}


def missing(job: Builder) -> dict[str, str]:
    """What those rules lack that abstain."""
    return {id_: what for id_, what in abstained(job).items() if id_ in HOST_RULES}


def kernels(b: Builder, step: int, begin: float, end: float, ahead: float = 0.0) -> None:
    """Of a backward pass, back to back, launched as they start or ``ahead`` before, from the executor."""
    t, length = begin, 196
    while t + length <= end:
        at = step * STEP + t
        b.run(0, at, length, BF16, launch=max(at - ahead - 2, 0), launch_length=2, thread=EXECUTOR,
              op="gradient_tape/dense/MatMul:MatMul")
        t += length


def gap(share: float, *, silent: bool = False, name: str = "Mean", gpus: int = 1) -> Builder:
    """Keras 3: for ``share`` of each step the host is between two calls and the GPU idle; ``name`` runs there."""
    b = Builder(gpus=gpus)
    call = STEP * (1 - share)
    keras_steps(b, STEPS + 1, STEP, call - 10)
    for i in range(STEPS + 1):
        b.host("multi_step_on_iterator", i * STEP, call - 5, tf_function_call="notTraced-nonXla", tracing_count=1)
        if not silent:
            b.host("EagerExecute", i * STEP + call, STEP * share - 20, eager_op=name, is_func=0)
        if gpus:
            kernels(b, i, 20, call, ahead=10)
    return b


def torch_gap(share: float, *, pauses: int = 1) -> Builder:
    """PyTorch: for ``share`` of each step, in one pause or several, Python runs no op and the GPU has no work."""
    b = Builder(gpus=1, format="chrome")
    for i in range(STEPS):
        b.host(f"ProfilerStep#{i}", i * STEP, STEP - 2, step_num=i)
        for k in range(pauses):
            first, last = (i + k / pauses) * STEP, (i + (k + 1 - share) / pauses) * STEP
            for at in range(round(first), round(last) - 100, 100):
                b.host("aten::mm", at, 20)
                b.run(0, at + 5, 99, BF16, launch=at + 2, thread="python")
    return b


def placed(share: float, op: str = "model/py:EagerPyFunc", **stats: Any) -> Builder:
    """In the midst of each call an op runs on the executor for ``share`` of the step while the GPU waits."""
    b = keras_steps(Builder(gpus=1), STEPS + 1, STEP, STEP - 50)
    for i in range(STEPS + 1):
        first, long = 4_000, STEP * share
        kernels(b, i, 20, first, ahead=10)
        b.host(op, i * STEP + first, long - 10, line=EXECUTOR, **stats)
        kernels(b, i, first + long, STEP - 20, ahead=0)
    return b


def retraced(share: float, every: int = 1) -> Builder:
    """A custom loop: each ``every``-th call traces for ``share`` of a step (of that call) before its first kernel."""
    b = Builder(gpus=1)
    for i in range(STEPS + 1):
        at, traces = i * STEP, i % every == 0
        begin = STEP * share if traces else 100
        b.host("train_step", at, STEP - 40, tf_function_call="traced-nonXla" if traces else "notTraced-nonXla",
               tracing_count=7 + i)
        if traces:
            b.host("tf.function-graph_building", at + 10, begin * 0.8)
        b.host("EagerExecute", at + begin - 30, STEP - begin - 20, is_func=1, eager_op="__inference_train_step_9")
        kernels(b, i, begin, STEP - 30)
    return b


def eager(ops: int, pause: float, length: float = 100.0) -> Builder:
    """Each step asks for a batch, then runs ``ops`` ops from Python, each a kernel of ``length`` after ``pause``."""
    b = Builder(gpus=1)
    step = ops * (length + pause) + 200
    for i in range(STEPS + 1):
        at = i * step
        b.host("EagerExecute", at, 50, eager_op="IteratorGetNext", is_func=0)
        b.host("IteratorGetNextOp::DoCompute", at + 5, 20)
        for k in range(ops):
            start = at + 100 + k * (length + pause)
            b.host("EagerExecute", start, pause, eager_op="MatMul", is_func=0)
            b.run(0, start + pause, length, BF16, launch=start + pause - 6, launch_length=4, thread="python")
    return b


def contended(workers: int, *, cpus: int = 8, stall: float = 400.0, every: int = 8, together: float = 0.9,
              pool: str = EXECUTOR) -> Builder:
    """Launches every 100 µs ahead of kernels of 100 µs, each ``every``-th late by ``stall`` while tf.data works."""
    b = keras_steps(Builder(gpus=1), STEPS + 1, STEP, STEP - 50)
    for i in range(STEPS + 1):
        t, n = i * STEP + 100, 0
        while t + 100 < (i + 1) * STEP - 200:
            b.run(0, t, 100, BF16, launch=t - 4, launch_length=3, thread=pool)
            n += 1
            t += 101 + (stall if n % every == 0 else 0)
        b.host("Iterator::Root::Prefetch", i * STEP + 10, 5, line="tf_data_iterator_get_next/1", id=2, cpu_budget=cpus)
        for w in range(workers):
            b.host("decode:DecodeJpeg", i * STEP, STEP * together, line=f"{WORKER}{w}")
    return b


def chained(row: int, *, part: float = 0.4, xla: bool = False, trains: bool = True) -> Builder:
    """Matmuls and rows of ``row`` element-wise kernels, which take ``part`` of each step; a full queue."""
    b = keras_steps(Builder(gpus=1), STEPS + 1, STEP, STEP - 50)
    rows = 5
    each = STEP * part / rows / row
    for i in range(STEPS + 1):
        b.host("multi_step_on_iterator", i * STEP, STEP - 60,
               tf_function_call="notTraced-xla" if xla else "notTraced-nonXla")
        t = i * STEP
        for _ in range(rows):
            matmul = STEP * (1 - part) / rows - 1
            b.run(0, t, matmul, BF16, launch=max(t - 900, 0), thread=EXECUTOR,
                  op="gradient_tape/dense/MatMul:MatMul" if trains else "dense/MatMul:MatMul")
            t += matmul
            for _ in range(row):
                b.run(0, t, each, "Mul_GPU_DT_BFLOAT16_DT_BFLOAT16_kernel", kind=Kind.COMPUTE, launch=max(t - 900, 0),
                      thread=EXECUTOR, op="gelu/mul:Mul")
                t += each
            t += 1
    return launched_ahead(b)
