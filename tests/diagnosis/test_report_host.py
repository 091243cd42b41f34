from __future__ import annotations

from gputop.diagnosis.diagnose import analyze_trace
from gputop.diagnosis.report import text_report
from gputop.trace.model import Trace
from tests.analysis.host.tf_data_traces import CALLER, training
from tests.trace.build import Builder, keras_steps


def report(trace: Trace, width: int = 80) -> str:
    return text_report(analyze_trace(trace), width)


def words(trace: Trace) -> str:
    return " ".join(report(trace).split())


def test_a_pipeline_that_is_waited_for_is_shown_by_stage():
    b = keras_steps(training(), 10, 100, 90)
    for i in range(10):
        b.host("IteratorGetNextOp::DoCompute", i * 100, 12, CALLER)
    text = report(b.build())
    assert ("PrefetchDataset:4 [8,2]: 10 batches, 10.0 µs per call; bounded by ParallelMapV2 < BatchV2 < Prefetch < "
            "Root." in " ".join(text.split()))
    lines = [line.split() for line in text.splitlines()]
    assert ["30.0", "µs", "70.7", "µs", "2", "N/A", "ParallelMapV2"] in [line[:7] for line in lines]
    assert ["0", "s", "8.1", "µs", "N/A", "50%", "Prefetch", "<", "Root"] in lines


def test_gaps_name_what_fills_them_and_small_ones_are_not_worth_a_line():
    b = keras_steps(Builder(gpus=0), 5, 100, 60)
    for i in range(5):
        b.host("metric\x1b[31m", i * 100 + 70, 25)
    text = words(b.build())
    assert "Gaps 40.0 µs per step" in text and "25.0 µs, Python without events 15.0 µs" in text and "\x1b" not in text
    assert "Gaps" not in words(keras_steps(Builder(gpus=0), 5, 1000, 995).build())


def test_retracing_and_xla_and_eager_ops():
    b = keras_steps(Builder(gpus=0), 4, 100, 50)
    for i in range(4):
        b.host("train_step", i * 100, 50, tf_function_call="traced-nonXla", tracing_count=i + 2)
        b.host("EagerExecute", i * 100 + 60, 30, is_func=0, eager_op="Square")
        b.host("m/Where:Where", i * 100 + 5, 10, "tf_Compute/1")
    b.host("compiled", 500, 50, tf_function_call="notTraced-xla").host("GpuCompiler::RunBackend", 501, 40)
    text = words(b.build())
    assert "1 50.0 µs 4 4 no train_step" in text and "XLA compiled once, in 40.0 µs." in text
    assert "Where host 1 10.0 µs" in text and "Square eager 1 30.0 µs" in text
    assert "Eager ops take 38% of the time in ops and functions." in text


def test_launch_threads_and_what_contends_with_them():
    b = keras_steps(Builder(gpus=2), 10, 100, 90)
    for i in range(10):
        for gpu in range(2):
            b.run(gpu, i * 100 + 10, 30, launch=i * 100 + 2 + gpu, thread=f"tf_gpu_private_{gpu}/1")
        b.host("m/Decode:Decode", i * 100 + 40, 60, "tf_data_private_threadpool/1")
    b.host("Iterator::Root", 0, 3, CALLER, cpu_budget=16)
    text = words(b.build())
    assert "Launches by 2 host threads, 1 per GPU; TF_GPU_THREAD_MODE gpu_private" in text
    assert "during launches on 16 CPUs; tf.data works for 86% of the time in which GPUs wait" in text
    b = Builder().run(0, 10, 30, launch=1, thread="python/7").run(0, 50, 30, launch=45, thread="python/7")
    one = words(b.build())
    assert "Launches by one thread, python/7" in one and "MODE" not in one and "busy during" not in one


def test_the_fullest_allocator_names_its_holders():
    b = Builder(gpus=1).run(0, 0, 10)
    b.memory(1, "GPU_0_bfc", 6 * 2**30, 4 * 2**30, 0, op="m/attention/einsum/Einsum:Einsum", size=2**30, address=1,
             fragmentation=0.25)
    b.memory(2, "gpu_host_bfc", 1, 2**30, 1)
    text = words(b.build())
    assert "GPU_0_bfc: 4.0 GiB free at the peak in this window, fragmentation 25%." in text
    assert "GPU_0_bfc 1.0G 10% m/attention/einsum/Einsum:Einsum" in text and "GPU_0_bfc 5.0G 50% Allocated" in text
