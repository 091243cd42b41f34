from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputop.analysis.gpu.collectives import collectives, no_collectives, operation
from gputop.analysis.gpu.device_time import timelines
from gputop.core.findings import TraceNote
from gputop.trace.model import Kind
from tests.analyses import of_steps
from tests.trace.build import Builder, keras_steps


def judged(b: Builder):
    trace = b.build()
    return collectives(trace, timelines(trace), of_steps(trace))


def reduce(b: Builder, gpu: int, start: float, end: float) -> None:
    b.run(gpu, start, end - start, "ncclKernel_AllReduce_RING_LL_Sum_float", kind=Kind.COLLECTIVE)


def test_the_shortest_is_the_transfer_and_the_rest_waits_for_the_last():
    b = keras_steps(Builder(gpus=3), 5, 1000, 900)
    for i in range(5):
        for gpu, start in ((0, 100), (1, 300), (2, 380)):
            reduce(b, gpu, i * 1000 + start, i * 1000 + 400)
    c = judged(b)
    assert c is not None and c.count_per_step == 1
    assert c.summed_s == pytest.approx(5 * (300 + 100 + 20) * 1e-6)
    assert c.transfer_s == pytest.approx(5 * 3 * 20e-6)
    assert c.waiting == pytest.approx(1 - 60 / 420)
    assert c.last_to_arrive == {2: 5}


@pytest.mark.parametrize(("calls", "reason"), [
    ([(0, 0, 10), (0, 20, 30), (0, 40, 50), (1, 0, 10), (1, 40, 50)], "2 to 3"),
    ([(0, 0, 100), (1, 0, 1200)], "1.1 ms"),  # apart at their ends
    ([(0, 0, 10)], "only one GPU")])
def test_collectives_that_are_not_matched(calls, reason):
    b = Builder(gpus=2)
    for call in calls:
        reduce(b, *call)
    c = judged(b)
    assert c is not None and c.waiting is None is c.transfer_s and reason in (c.reason or "")
    assert c.summed_s == pytest.approx(sum(end - start for _, start, end in calls) * 1e-6)


@pytest.mark.parametrize(("apart", "count", "first", "end"), [(10_000, 4, 1, 100), (300, 12, 3, 101)])
def test_what_the_windows_edge_cut_off_on_one_gpu_is_left_out(apart, count, first, end):
    """The capture of GPU 1 begins later: between collectives, or amidst some that follow each other every 300 µs."""
    b, both = Builder(gpus=2), count - first
    for at in range(0, count * apart, apart):
        reduce(b, 0, at, at + 100)
        if at >= first * apart:
            reduce(b, 1, at + 60, at + end)
    c = judged(b)
    assert c is not None and c.reason is None and c.last_to_arrive == {1: both}
    assert c.transfer_s == pytest.approx(both * 2 * (end - 60) * 1e-6)
    assert c.waiting == pytest.approx(1 - 2 * (end - 60) / (40 + end))
    assert c.summed_s == pytest.approx((count * 100 + both * (end - 60)) * 1e-6)
    assert judged(Builder().run(0, 0, 10)) is None  # no collective


def test_operations_are_matched_each_on_their_own():
    b = keras_steps(Builder(gpus=2), 5, 1000, 900)
    for i in range(5):
        for gpu in range(2):
            # The two streams' collectives overlap, so that their order of start differs between the GPUs.
            t = i * 1000 + 100
            b.run(gpu, t + (5 if gpu else 0), 95 if gpu else 100, "ncclDevKernel_AllGather_RING_LL",
                  kind=Kind.COLLECTIVE, size=4096)
            b.run(gpu, t + (2 if gpu else 3), 398 if gpu else 397, "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL",
                  kind=Kind.COLLECTIVE, stream=2)
            b.run(gpu, t + 50, 100, stream=3)
    c = judged(b)
    assert c is not None and c.reason is None and c.count_per_step == 2
    scatter, gather = c.operations
    assert (scatter.operation, gather.operation) == ("ReduceScatter", "AllGather")
    assert (gather.count, gather.count_per_step, gather.bytes, scatter.bytes) == (10, 1, 10 * 4096, None)
    assert gather.transfer_s == pytest.approx(10 * 95e-6) and gather.waiting == pytest.approx(1 - 190 / 195)
    assert gather.exposed_s == pytest.approx({0: 5 * 50e-6, 1: 5 * 45e-6})
    assert scatter.exposed_s == pytest.approx({0: 5 * 297e-6, 1: 5 * 298e-6})
    assert c.transfer_s == pytest.approx(gather.transfer_s + (scatter.transfer_s or 0))
    assert c.summed_s == pytest.approx(gather.time_s + scatter.time_s) and c.last_to_arrive == {0: 5, 1: 5}


def test_one_operation_that_does_not_match_leaves_the_others_their_figures():
    b = Builder(gpus=2)
    for gpu in range(2):
        reduce(b, gpu, 20 * gpu, 100)
        for start in (200, 400):
            b.run(gpu, start, 50, "ncclKernel_Broadcast_RING_LL_Sum_int8_t", kind=Kind.COLLECTIVE)
    b.run(0, 300, 50, "ncclKernel_Broadcast_RING_LL_Sum_int8_t", kind=Kind.COLLECTIVE)
    b.run(1, 5000, 50, "ncclKernel_SendRecv", kind=Kind.COLLECTIVE)
    c = judged(b)
    assert c is not None and c.transfer_s is None and c.reason is not None
    by_name = {op.operation: op for op in c.operations}
    assert by_name["AllReduce"].transfer_s == pytest.approx(2 * 80e-6) and by_name["AllReduce"].reason is None
    assert "2 to 3" in (by_name["Broadcast"].reason or "") and by_name["Broadcast"].waiting is None
    assert by_name["SendRecv"].reason == "only one GPU ran collectives" and by_name["SendRecv"].exposed_s == {1: 50e-6}


def test_ranks_on_different_clocks_are_not_matched():
    b = Builder(gpus=2)
    for gpu in range(2):
        reduce(b, gpu, 0, 100)
    trace = b.build()
    trace.quality.append(TraceNote("no_common_clock", "…"))
    c = collectives(trace, timelines(trace), None)
    assert c is not None and c.waiting is None and "clock" in (c.reason or "")


@pytest.mark.parametrize(("kernel", "name"), [
    ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", "AllReduce"),
    ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "ReduceScatter"),
    ("ncclDevKernel_AllGather_RING_LL", "AllGather"), ("ncclDevKernel_SendRecv(x)", "SendRecv"),
    ("ncclKernel_Broadcast_RING_LL_Sum_int8_t", "Broadcast"), ("ncclDevKernel_Reduce_Sum_f32_RING_LL", "Reduce"),
    ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", "unknown"), ("nccl:all_to_all", "AllToAll"),
    ("rcclGenericKernel<1, false>(ReduceScatter)", "unknown"),
    ("void dpsk::ep::internode::dispatch<false, 8, false, 8>(int4*, float*, long*)", "AllToAll"),
    ("void hybrid_ep::combine_kernel<8>(int4*)", "AllToAll"),
    ("mori::moe::EpDispatchIntraNodeKernel<hip_bfloat16>(mori::moe::EpDispatchCombineArgs)", "AllToAll"),
    ("void tensorrt_llm::kernels::moeAllToAllKernel<8>(int)", "AllToAll"),
    ("ncclSymkDevKernel_AllGather_LLMC(ncclSymkDevWorkArgs4K)", "AllGather"),
    ("void (anonymous namespace)::multimem_all_reduce_kernel<float, 16>(float*)", "AllReduce"),
    ("void vllm::cross_device_reduce_2stage<half, 8>(vllm::RankData*)", "AllReduce"),
    ("nvshmemi_reducescatter_on_stream_kernel<float>(int)", "ReduceScatter"),
    ("void nvshmemi_barrier_on_stream_kernel<0>(int)", "Barrier"),
    ("void deep_ep::internode::combine<8>(int4*)", "AllToAll"),
])
def test_operations_by_the_kernels_name(kernel, name):
    assert operation(kernel) == name


pieces = st.lists(st.tuples(
    st.integers(0, 2), st.integers(0, 3000), st.integers(1, 400),
    st.sampled_from(["AllReduce", "AllGather", "Compute"])), min_size=1, max_size=25)


@given(pieces, st.integers(0, 1000))
def test_operations_against_plain_counting_in_any_order(events, seed):
    b = Builder(gpus=3)
    for gpu, start, length, name in events:
        compute = name == "Compute"
        b.run(gpu, start, length, "gemm" if compute else f"ncclDevKernel_{name}_RING_LL",
              kind=Kind.COMPUTE if compute else Kind.COLLECTIVE, stream=2 if compute else 1)
    c = judged(b)
    shuffled = b.build(seed)
    assert collectives(shuffled, timelines(shuffled), None) == c
    names = {e[3] for e in events} - {"Compute"}
    assert (c is None) == (not names)
    assert {op.operation for op in (c.operations if c else ())} == names
    for op in c.operations if c else ():
        own = [e for e in events if e[3] == op.operation]
        assert op.count == len(own) and op.time_s == pytest.approx(sum(e[2] for e in own) * 1e-6)
        for gpu in {e[0] for e in own}:
            inside, compute = ({t for g, s, n, name in events if g == gpu and name == kind for t in range(s, s + n)}
                               for kind in (op.operation, "Compute"))
            assert op.exposed_s[gpu] == pytest.approx(len(inside - compute) * 1e-6)
        assert (op.transfer_s is None) == (op.reason is not None)
        if op.transfer_s is not None:
            assert 0 < op.transfer_s <= op.time_s * (1 + 1e-9) and op.waiting is not None and 0 <= op.waiting < 1


def test_alike_collectives_in_any_order_of_the_file():
    """Two that start together: which of them is matched with which is decided by their ends, not by the file."""
    b = Builder(gpus=2)
    for gpu, start, length in ((0, 0, 1), (0, 0, 1), (0, 0, 2), (0, 2, 1), (1, 0, 1), (1, 0, 1), (1, 201, 1),
                               (1, 201, 2)):
        b.run(gpu, start, length, "ncclDevKernel_AllReduce_RING_LL", kind=Kind.COLLECTIVE)
    expected = judged(b)
    assert expected is not None and expected.reason is None
    for seed in range(40):
        shuffled = b.build(seed)
        assert collectives(shuffled, timelines(shuffled), None) == expected


@pytest.mark.parametrize(("more", "reason"), [(0, "up to 2.0 ms apart"), (1, "different numbers of collectives (3 t")])
def test_equally_many_collectives_that_end_apart_are_no_other_number(more, reason):
    b = Builder(gpus=2)
    for i in range(3):
        for gpu in range(2):
            b.run(gpu, 5_000 * i, 1_000 + 2_000 * gpu * (i == 2), "ncclDevKernel_SendRecv", kind=Kind.COLLECTIVE)
    for _ in range(more):
        b.run(1, 30_000, 100, "ncclDevKernel_SendRecv", kind=Kind.COLLECTIVE)
    assert reason in judged(b).reason


def test_gpus_that_compute_without_any_collective_are_worth_a_word():
    b = Builder(gpus=8)
    for gpu in range(8):
        b.run(gpu, 0, 100)
    assert no_collectives(b.build()).startswith("8 GPUs compute, but none of them ran a collective")
    assert no_collectives(b.run(1, 200, 10, "MemcpyP2P", kind=Kind.P2P).build()) is None
    assert no_collectives(Builder(gpus=2).run(0, 0, 100).build()) is None
