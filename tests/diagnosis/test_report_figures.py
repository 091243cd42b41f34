from __future__ import annotations

import msgspec
import pytest

from gputop.analysis.results import Analysis
from gputop.diagnosis.diagnose import analyze_trace
from gputop.diagnosis.report import text_report
from gputop.trace.model import Kind, LaunchShape, MemoryKind
from tests.analysis.host.tf_data_traces import CALLER, training
from tests.trace.build import Builder, keras_steps

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def job(heavy: float = 300.0, thread: str | None = None) -> Builder:
    b = keras_steps(Builder(gpus=3), 6, 1000, 900)
    for i in range(6):
        for gpu in range(3):
            t = i * 1000 + 20
            b.run(gpu, t + 20, 10, "MemcpyH2D", kind=Kind.H2D, src=MemoryKind.PINNED, dst=MemoryKind.DEVICE,
                  size=250_000, op="IteratorGetNext:IteratorGetNext", launch=t)
            b.run(gpu, t + 40, heavy if gpu == 0 else 300, "void ampere_bf16_s16816gemm<layout>", launch=t + 5 * gpu,
                  op="model/dense/MatMul:MatMul", shape=LaunchShape((64, 1, 1), (256, 1, 1), 64, 0, 0.5), thread=thread)
            b.run(gpu, t + 850, 50, NCCL, kind=Kind.COLLECTIVE, launch=t + 20, size=1 << 20)
    return b


def text(b: Builder, width: int = 100) -> str:
    return text_report(analyze_trace(b.build()), width)


def test_kernels_by_time_with_type_and_occupancy():
    lines = text(job()).splitlines()
    at = next(i for i, line in enumerate(lines) if line.endswith("  kernel"))
    assert "occup.: occupancy, theoretical. In 16 bits: 100% of the kernels" in " ".join(lines[at - 2:at])
    assert " ".join(lines[at + 1].split()) == "86% 300 µs 1 300 µs bf16 100% 0-2 ampere_bf16_s16816gemm<layout>"
    assert " ".join(lines[at + 2].split()) == f"14% 50.0 µs 1 50.0 µs N/A N/A 0-2 {NCCL}"
    assert lines[at + 4].split()[:4] == ["op", "types", "MatMul", "86%,"]
    whole = " ".join(" ".join(lines).split())
    assert "0% of the kernels run for less than 20 µs, and 0% for less than" in whole and "| █ |" in whole


def test_copies_by_way_and_op():
    whole = text(job())
    assert "   2    h2d  pinned      1   244K  10.0 µs  25.0 GB/s\n" in whole
    assert "  mean  h2d              1   244K  10.0 µs  25.0 GB/s  IteratorGetNext\n" in whole
    unknown = Builder().run(0, 0, 10, "MemcpyD2D", kind=Kind.D2D)
    assert "   0   d2d  unknown → unknown      1  10.0 µs\n" in text(unknown)


def test_layers_are_unfolded_where_the_time_is_however_deep():
    b = Builder()
    for i in range(3):
        b.run(0, i * 100, 90, op=f"net/encoder/stage/block_{i}/attention/MatMul:MatMul")
        b.run(0, i * 100 + 90, 10, op=f"net/encoder/stage/block_{i}/norm/Mul:Mul")
    for i in range(100):
        b.run(0, 300 + i, 1, op=f"net/small/part_{i}/Mul:Mul")
    lines = [line[34:] for line in text(b).splitlines()]
    start = lines.index("  net")
    assert lines[start + 1:start + 4] == ["    encoder/stage", "      block_0", "        attention/MatMul"]
    assert not any(line.strip().startswith("part_") for line in lines)


def test_gpus_against_each_other():
    even, uneven = text(job()), " ".join(text(job(750)).split())
    assert "GPU's limit is unknown. The peak of this GPU is unknown" in even
    assert "  AllReduce      1  50.0 µs   50.0 µs       0%   1.0M\n" in even
    assert "Collectives 50.0 µs per GPU in each step: 50.0 µs transfer, 0% waiting for the last GPU to arrive." in even
    assert "3 GPUs compared\n  work         even: each GPU computes for at most 300 µs per step, within 0%" in even
    assert "GPU 0 computes 2.50× as long as the median of the others per step (750 µs)" in uneven
    assert "only one GPU computes for 60% of the time in which any GPU computes" in uneven
    assert "each GPU has its own host thread; the first launch of a step on GPU 2 comes 10.0 µs after" in uneven
    shared = " ".join(text(job(thread="python")).split())
    assert "100% of the launches come from host threads that serve several GPUs, half of them in runs of" in shared


def test_what_could_not_be_compared_says_why():
    whole = " ".join(text(Builder(gpus=2).run(0, 0, 10).run(1, 0, 10)).split())
    assert "first kernel not evaluated: no steps were found" in whole
    assert "launches not evaluated: the trace does not show which host calls" in whole
    assert "GPUs compared" not in text(Builder(gpus=2).run(0, 0, 10))


def test_many_kernels_and_ways_are_cut_short():
    b = Builder(gpus=2)
    for i in range(32):
        b.run(0, i * 100, 50 + i, f"kernel_{i}")
    for i, memory in enumerate([*MemoryKind] * 4):
        b.run(i // 12, 4000 + i * 100, 10, "MemcpyH2D", kind=Kind.H2D if i % 12 < 6 else Kind.D2H, src=memory)
    whole = text(b)
    assert whole.count("  and 12 more rows\n") == 1 and "  and 4 more rows\n" in whole


def test_control_characters_do_not_reach_the_terminal():
    b = Builder(gpus=2)
    for gpu in range(2):
        b.run(gpu, 0, 10, "evil\x1b[2Jkernel", op="a\x07b:Bad\x1b[31m")
        b.run(gpu, 20, 10, "MemcpyH2D", kind=Kind.H2D, op="c\r\nd:X")
    whole = text(b)
    assert not set(whole) & {"\x1b", "\x07", "\r"} and "kernel" in whole


@pytest.mark.parametrize("width", [60, 80, 140])
def test_lines_keep_to_the_width(width):
    lines = text(job(750), width).splitlines()
    at = lines.index("3 GPUs compared")
    end = next(i for i, line in enumerate(lines) if line.startswith("Gaps "))
    assert max(len(line) for line in lines[at:end + 1] if not line.strip().startswith("ncu ")) <= width


def test_an_analysis_of_older_fields_still_prints():
    a: Analysis = analyze_trace(job().build())
    bare = msgspec.structs.replace(a, kernels=None, kernel_sizes=(), copies=None, replicas=None, collectives=None)
    assert "Kernels" not in text_report(bare, findings=False)
    assert "GPUs compared" not in text_report(bare, findings=False)


def words(b: Builder) -> str:
    return " ".join(text(b, 80).split())


def test_a_pipeline_that_is_waited_for_is_shown_by_stage():
    b = keras_steps(training(), 10, 100, 90)
    for i in range(10):
        b.host("IteratorGetNextOp::DoCompute", i * 100, 12, CALLER)
    assert ("PrefetchDataset:4 [8,2]: 10 batches, 10.0 µs per call; bounded by ParallelMapV2 < BatchV2 < Prefetch < "
            "Root." in words(b))
    lines = [line.split() for line in text(b, 80).splitlines()]
    assert ["30.0", "µs", "70.7", "µs", "2", "N/A", "ParallelMapV2"] in [line[:7] for line in lines]
    assert ["0", "s", "8.1", "µs", "N/A", "50%", "Prefetch", "<", "Root"] in lines


def test_gaps_name_what_fills_them_and_small_ones_are_not_worth_a_line():
    b = keras_steps(Builder(gpus=0), 5, 100, 60)
    for i in range(5):
        b.host("metric\x1b[31m", i * 100 + 70, 25)
    whole = words(b)
    assert "Gaps 40.0 µs per step" in whole and "25.0 µs, Python without events 15.0 µs" in whole
    assert "\x1b" not in whole and "Gaps" not in words(keras_steps(Builder(gpus=0), 5, 1000, 995))


def test_retracing_and_xla_and_eager_ops():
    b = keras_steps(Builder(gpus=0), 4, 100, 50)
    for i in range(4):
        b.host("train_step", i * 100, 50, tf_function_call="traced-nonXla", tracing_count=i + 2)
        b.host("EagerExecute", i * 100 + 60, 30, is_func=0, eager_op="Square")
        b.host("m/Where:Where", i * 100 + 5, 10, "tf_Compute/1")
    b.host("compiled", 500, 50, tf_function_call="notTraced-xla").host("GpuCompiler::RunBackend", 501, 40)
    whole = words(b)
    assert "1 50.0 µs 4 4 no train_step" in whole and "XLA compiled once, in 40.0 µs." in whole
    assert "Where host 1 10.0 µs" in whole and "Square eager 1 30.0 µs" in whole
    assert "Eager ops take 38% of the time in calls from Python." in whole


def test_launch_threads_and_what_contends_with_them():
    b = keras_steps(Builder(gpus=2), 10, 100, 90)
    for i in range(10):
        for gpu in range(2):
            b.run(gpu, i * 100 + 10, 30, launch=i * 100 + 2 + gpu, thread=f"tf_gpu_private_{gpu}/1")
        b.host("m/Decode:Decode", i * 100 + 40, 60, "tf_data_private_threadpool/1")
    b.host("Iterator::Root", 0, 3, CALLER, cpu_budget=16)
    whole = words(b)
    assert "Launches by 2 host threads, 1 per GPU; TF_GPU_THREAD_MODE gpu_private" in whole
    assert "during launches on 16 CPUs; tf.data works for 86% of the time in which GPUs wait" in whole
    one = words(Builder().run(0, 10, 30, launch=1, thread="python/7").run(0, 50, 30, launch=45, thread="python/7"))
    assert "Launches by one thread, python/7" in one and "MODE" not in one and "busy during" not in one


def test_the_fullest_allocator_names_its_holders():
    b = Builder(gpus=1).run(0, 0, 10)
    b.memory(1, "GPU_0_bfc", 6 * 2**30, 4 * 2**30, 0, op="m/attention/einsum/Einsum:Einsum", size=2**30, address=1,
             fragmentation=0.25)
    b.memory(2, "gpu_host_bfc", 1, 2**30, 1)
    whole = words(b)
    assert "GPU_0_bfc: 4.0 GiB free at the peak in this window, fragmentation 25%." in whole
    assert "GPU_0_bfc 1.0G 10% m/attention/einsum/Einsum:Einsum" in whole and "GPU_0_bfc 5.0G 50% Allocated" in whole
