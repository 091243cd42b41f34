"""The tables of the GPUs' side on real traces: they add up, and say what is known of these jobs."""

from __future__ import annotations

import pytest

from tests.diagnosis.real_traces import FILES, analyzed, needs_data, trace_of

# Of ResNet-50, which the A100 trace trains; its gradients are all-reduced once a step.
RESNET50_PARAMETERS = 25_557_032


@needs_data
@pytest.mark.parametrize("name", FILES)
def test_tables_add_up(name):
    a = analyzed(name)
    used = {gpu.gpu: gpu for gpu in a.gpus if gpu.busy}
    if any(gpu.kernels for gpu in used.values()):
        k = a.kernels
        assert k is not None and k.count == sum(gpu.kernels for gpu in used.values())
        for rows in (k.by_name, k.by_op or k.by_name, k.by_op_type or k.by_name):
            assert sum(row.count for row in rows) == k.count
            assert sum(row.time_s for row in rows) == pytest.approx(k.time_s)
            assert sum(row.share for row in rows) == pytest.approx(1)
            for gpu, time in k.time_s_by_gpu.items():
                assert sum(row.by_gpu[gpu].time_s for row in rows if gpu in row.by_gpu) == pytest.approx(time)
                assert sum(row.by_gpu[gpu].count for row in rows if gpu in row.by_gpu) == used[gpu].kernels
    for gpu in used.values():
        rows = [row for row in (a.copies.rows if a.copies else ()) if row.gpu == gpu.gpu]
        for way, seconds in gpu.copies_s.items():
            own = [row for row in rows if row.direction == way]
            assert sum(row.time_s for row in own) == pytest.approx(seconds)
            assert sum(row.count for row in own) == gpu.copies_count[way]
            assert sum(row.bytes or 0 for row in own) == (gpu.copies_bytes[way] or 0)
    if a.collectives:
        assert sum(op.time_s for op in a.collectives.operations) == pytest.approx(a.collectives.summed_s)
    for sizes in a.kernel_sizes:
        assert sum(sizes.count) <= used[sizes.gpu].kernels
        assert sizes.count_per_step is None or sum(sizes.count_per_step) <= sum(sizes.count)


@needs_data
def test_an_all_reduce_of_the_model():
    (reduce, broadcast) = analyzed("a100").collectives.operations
    assert (reduce.operation, broadcast.operation) == ("AllReduce", "Broadcast")
    assert reduce.bytes == 3 * 4 * RESNET50_PARAMETERS and reduce.count_per_step == 5
    assert reduce.transfer_s is None and "only one GPU" in (reduce.reason or "")


@needs_data
def test_operations_of_dlrm_and_its_replicas():
    a = analyzed("dlrm")
    assert a.collectives is not None and a.replicas is not None and a.replicas.work is not None
    assert {op.operation: op.count_per_step for op in a.collectives.operations} == {"SendRecv": 5, "AllReduce": 3}
    assert all(op.waiting is not None and op.waiting > 0.8 for op in a.collectives.operations)
    # Two ranks run a quarter more kernels than the others.
    assert [w.gpu for w in a.replicas.work if (w.kernels_ratio or 0) > 1.2] == [1, 3]
    assert all(0.8 < (w.compute_ratio or 0) < 1.3 for w in a.replicas.work)
    assert a.replicas.launches is not None and a.replicas.launches.shared_launches == 0
    assert a.replicas.missing == {"first_kernel": "the trace has only one step"}


@needs_data
def test_two_gpus_of_a_pipeline_run_side_by_side():
    r = analyzed("mfu").replicas
    assert r is not None and r.compute is not None and r.compute.serial is not None and not r.missing
    assert r.compute.serial < 0.2 < (r.compute.serial_by_chance or 0) and r.compute.exactly[2] > 0.75
    assert r.gpu0_ratio == pytest.approx(1, abs=0.05)


@needs_data
def test_occupancy_is_unknown_where_the_trace_does_not_tell():
    for name in ("amd_8gpu", "mfu", "h100"):
        k = analyzed(name).kernels
        assert k is not None and k.occupancy_is is None and all(row.occupancy is None for row in k.by_name)
    v100 = analyzed("v100").kernels
    assert v100 is not None and v100.occupancy_is == "estimated"
    assert all(row.occupancy is not None and 0 <= row.occupancy <= 1 for row in v100.by_name)


@needs_data
def test_launch_shapes_of_an_nsys_report():
    trace = trace_of("h100")
    kernels = trace.device.kind <= 1
    assert (trace.device.shape[kernels] >= 0).all() and (trace.device.shape[~kernels] == -1).all()
    assert all(s.block[0] * s.block[1] * s.block[2] <= 1024 and s.registers <= 255 for s in trace.launch_shapes)


@needs_data
def test_pinned_copies_at_link_rate():
    rows = [r for r in analyzed("h100").copies.rows if (r.direction, r.source) == ("h2d", "pinned")]
    assert [r.bytes_per_s for r in rows] == pytest.approx([27.7e9] * 2, rel=2e-3)
    assert [r.bytes for r in rows] == pytest.approx([25.5e9] * 2, rel=2e-3)
