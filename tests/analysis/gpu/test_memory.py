from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputop.analysis.gpu.allocators import POINTS, downsample, memory
from gputop.analysis.results import Holder
from gputop.core.codec import to_document
from gputop.trace import limits
from gputop.trace.readers.load import load
from tests.trace.build import Builder
from tests.trace.readers.xspace.reference import Builder as XSpace

AMD = Path(__file__).resolve().parents[3] / "../shared/data/xplane_amd"
GPU = "GPU_0_bfc"


def test_holders_are_what_was_allocated_and_not_yet_freed_at_the_peak():
    b = Builder(gpus=0).host("x", 0, 100)
    b.memory(1, GPU, 500, 500, 900, op="a/Conv2D:Conv2D", size=100, address=1)
    b.memory(2, GPU, 650, 350, 900, op="b/MatMul:MatMul", size=150, address=2)
    b.memory(3, GPU, 500, 500, 900, size=150, address=2, free=True)
    b.memory(4, GPU, 700, 300, 900, op="a/Conv2D:Conv2D", size=200, address=2)  # the address again
    b.memory(5, GPU, 750, 250, 900, size=50, address=3, fragmentation=0.25)  # the peak; no op is named
    b.memory(6, GPU, 650, 350, 900, size=100, address=1, free=True, fragmentation=0.5)
    b.memory(7, GPU, 700, 300, 900, op="late:Late", size=50, address=4)
    (use,) = memory(b.build())
    assert (use.peak_bytes, use.peak_in_window_bytes, use.capacity_bytes) == (900, 750, 1000)
    assert use.holders == (Holder("a/Conv2D:Conv2D", 300, 2),)
    assert use.unattributed_bytes == 450 and use.allocated_before_bytes == 400
    assert use.headroom_bytes == 250 and use.peak_s == pytest.approx(5e-6)
    assert (use.allocations, use.frees) == (5, 2)
    assert use.fragmentation_at_peak == 0.25 and use.fragmentation_max == 0.5
    assert use.timeline_s == pytest.approx([i * 1e-6 for i in range(1, 8)])
    assert use.timeline_in_use_bytes == (500, 650, 500, 700, 750, 650, 700)


def test_unknown_values_are_none_and_json_has_no_nan():
    b = Builder(gpus=0).memory(1, GPU, 500, 500, 900).memory(2, GPU, 400, 600, 900, fragmentation=math.inf)
    (use,) = memory(b.build())
    assert use.fragmentation_at_peak is use.fragmentation_max is None
    assert use.unattributed_bytes is use.allocated_before_bytes is None
    assert use.holders == ()
    assert json.loads(json.dumps(to_document(use), allow_nan=False))["timeline_in_use_bytes"] == [500, 400]


def test_the_lifetimes_peak_is_not_the_windows():
    b = Builder().memory(0, GPU, 300, 700, 800).memory(5, GPU, 500, 500, 800).memory(2, "odd", 5, -1, 5)
    # Names that TensorFlow cuts on Windows are those of GPUs.
    for i, name in enumerate(("\0pu_host_bfc", "\ufffdPU_1_bfc", "other_bfc", "\0PU_2_bfc")):
        b.memory(i, name, 10, 90, 20)
    uses = memory(b.build())
    assert [u.allocator for u in uses] == [GPU, "GPU_1_bfc", "GPU_2_bfc", "gpu_host_bfc", "other_bfc"]
    assert (uses[0].peak_bytes, uses[0].peak_in_window_bytes, uses[0].capacity_bytes) == (800, 500, 1000)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=300), st.integers(2, 40))
def test_downsampling_keeps_order_the_extremes_and_the_limit(values, points):
    kept = downsample(np.array(values, np.int64), points)
    assert len(kept) <= max(points, 2) and (np.diff(kept) > 0).all()
    chosen = [values[i] for i in kept]
    assert max(chosen) == max(values) and min(chosen) == min(values)


def test_a_long_timeline_is_short_in_json():
    b = Builder(gpus=0)
    for i in range(3000):
        b.memory(i, GPU, i % 7, 10 - i % 7, 6)
    (use,) = memory(b.build())
    assert len(use.timeline_s) <= POINTS and max(use.timeline_in_use_bytes) == 6


Action = st.tuples(st.integers(0, 4), st.integers(1, 50), st.sampled_from(["a:A", "b:B", None]))


@given(st.lists(Action, min_size=1, max_size=40))
def test_holders_against_a_heap_kept_by_hand(actions):
    """Each action allocates at an address that is free, or frees it."""
    b, heap, in_use, best = Builder(gpus=0).host("x", 0, 1), {}, 0, (-1, {})
    for time, (address, size, op) in enumerate(actions):
        if address in heap:
            in_use -= heap.pop(address)[1]
            b.memory(time, GPU, in_use, 5000 - in_use, 0, size=size, address=address, free=True)
        else:
            heap[address] = (op, size)
            in_use += size
            b.memory(time, GPU, in_use, 5000 - in_use, 0, op=op, size=size, address=address)
        if in_use > best[0]:
            best = in_use, dict(heap)
    (use,) = memory(b.build())
    peak, held = best
    assert use.peak_in_window_bytes == peak
    want: dict[str, int] = {}
    for op, size in held.values():
        if op is not None:
            want[op] = want.get(op, 0) + size
    assert {h.op: h.bytes for h in use.holders} == want
    assert use.unattributed_bytes == peak - sum(want.values()) and use.allocated_before_bytes == 0


def test_the_reader_fills_the_columns_of_single_allocations():
    x = XSpace()
    line = x.line("/host:CPU", "tf_Compute/1")
    known = {"allocator_name": (GPU,), "bytes_allocated": 700, "bytes_available": 300, "peak_bytes_in_use": 700}
    x.event("/host:CPU", line, "MemoryAllocation", 10, 0, **known, requested_bytes=90, allocation_bytes=100, addr=77,
            fragmentation=0.5, tf_op=("a/MatMul:MatMul",))
    x.event("/host:CPU", line, "MemoryDeallocation", 20, 0, **known, addr=77, tf_op=("(null)",), fragmentation=math.nan)
    trace = x.read()
    a = trace.allocator
    assert a.is_free.tolist() == [False, True] and a.address.tolist() == [77, 77]
    assert a.allocation_bytes.tolist() == [100, -1]
    assert a.fragmentation[0] == 0.5 and np.isnan(a.fragmentation[1])
    assert [trace.names[i] if i >= 0 else None for i in a.tf_op] == ["a/MatMul:MatMul", None]


@pytest.mark.skipif(not AMD.exists(), reason="the shared real traces are not on this machine")
def test_real_allocators_agree_with_themselves():
    """In use after an allocation or release is what it was before, by the size that the event itself tells."""
    trace = load(sorted(AMD.resolve().glob("te_fused*.pb")))
    a = trace.allocator
    change = np.where(a.is_free, -a.allocation_bytes, a.allocation_bytes)
    assert (np.diff(a.in_use_bytes) == change[1:]).all()
    (use,) = memory(trace)
    assert use.allocations == 30 and use.frees == 29 and use.peak_in_window_bytes == 663228416
    assert use.headroom_bytes == use.capacity_bytes - 663228416 and 0 < (use.fragmentation_max or 0) < 1
    assert use.holders == () and use.unattributed_bytes == use.peak_in_window_bytes  # JAX names no ops there
    assert use.allocated_before_bytes == 134219008


def test_only_so_many_allocators_are_analyzed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "MAX_ALLOCATORS", 2)
    x = XSpace()
    line = x.line("/host:CPU", "tf_Compute/1")
    for i in range(3):
        x.event("/host:CPU", line, "MemoryAllocation", 10 * i, 0, allocator_name=(f"{i}_bfc",), bytes_allocated=700,
                bytes_available=300, peak_bytes_in_use=700)
    trace = x.read()
    assert len(memory(trace)) == 2
    assert "3 memory allocators" in {note.id: note.message for note in trace.quality}["left_out"]
