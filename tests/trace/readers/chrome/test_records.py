"""Whether text is decoded as records or parsed first makes no difference to the trace."""

from __future__ import annotations

import json
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputop.trace.readers.chrome import events as chrome_events
from gputop.trace.readers.chrome.reader import read_chrome
from gputop.trace.readers.chrome.records import decode_events, event_of, integer, integers, plain
from tests.trace.readers.chrome.kineto_file import event, kineto

ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 70), st.just(1 << 70), st.just(-5), st.floats(0, 9), st.just(math.nan),
    st.sampled_from(["7", "", "Float", "grid:4,1,1 block:64,1,1", "kind_src:pinned kind_dst:device size:99", "x:Y"]),
    st.lists(st.one_of(st.integers(0, 9), st.lists(st.integers(0, 9), max_size=3), st.sampled_from(["double", "8"])),
             max_size=4), st.just({}), st.just([1, 2, 3]))
ARGS = st.dictionaries(st.sampled_from([
    "device", "stream", "correlation", "correlation_id", "bytes", "registers per thread", "shared memory", "grid",
    "block", "est. achieved occupancy %", "Sequence number", "Concrete Inputs", "Input type", "Input Dims",
    "Input dims", "dtype", "In msg nelems", "CallFrom", "name", "Total Allocated", "Device Type", "kernel_details",
    "memcpy_details", "tf_op", "hlo_op", "hlo_module", "annotation", "step_num", "is_func", "id", "eager_op", "op",
    "other",
]), ODD, max_size=6)
EVENT = st.fixed_dictionaries(
    {"ph": st.sampled_from(["X", "X", "X", "X", "M", "i", "s", "B", "b"]),
     "ts": st.one_of(st.integers(0, 1000), st.sampled_from(["7", "12.5", " 3e2 ", "now"]))},
    optional={
        "dur": st.one_of(st.floats(0, 100), st.integers(-1, 10), ODD), "pid": st.one_of(st.integers(0, 3), ODD),
        "tid": st.one_of(st.integers(0, 3), ODD), "args": st.one_of(ARGS, ODD),
        "cat": st.sampled_from(["cpu_op", "kernel", "Kernel", "gpu_memcpy", "python_function", "user_annotation",
                                "Trace", "cuda_runtime", "", "Operator", "ac2g"]),
        "name": st.sampled_from([
            "ProfilerStep#3", "torch::autograd::AccumulateGrad", "aten::embedding_dense_backward", "process_name",
            "Memcpy HtoD (Pinned -> Device)", "nccl:all_reduce", "PyTorch Profiler (0)", "[memory]", "thread_name",
            "<f at 0x12>", "aten::_slow_conv2d_forward", "ncclDevKernel_AllReduce"])})


def read(events, monkeypatch, *, as_records):
    def refuse(text):
        raise msgspec.DecodeError

    with monkeypatch.context() as patch:
        if not as_records:
            patch.setattr(chrome_events.records, "decode_events", refuse)
        trace = read_chrome([("t.json", [json.dumps({**kineto(), "traceEvents": events}).encode()])])
    columns = {f"{kind}.{name}": getattr(getattr(trace, kind), name) for kind in ("device", "host", "allocator")
               for name in getattr(trace, kind).__struct_fields__ if name != "stats"}
    return trace, {**columns, **{name: np.stack(stat) for name, stat in trace.host.stats.items()}}


@given(events=st.lists(st.one_of(EVENT, ODD), max_size=8))
def test_both_ways_give_the_same(events):
    events = [event("cpu_op", "first", 1, 2), *events, event("cpu_op", "last", 3, 2)]
    with pytest.MonkeyPatch.context() as monkeypatch:
        (one, columns), (other, parsed) = (read(events, monkeypatch, as_records=way) for way in (True, False))
    assert (one.names, one.lines, one.gpus, one.launch_shapes, one.quality, one.profile_window_ns) == (
        other.names, other.lines, other.gpus, other.launch_shapes, other.quality, other.profile_window_ns)
    assert columns.keys() == parsed.keys()
    for name, column in columns.items():
        assert np.array_equal(column, parsed[name], equal_nan=column.dtype.kind == "f"), name


def test_records_are_the_usual_way():
    usual = kineto()["traceEvents"]
    assert decode_events(json.dumps(usual)) == [event_of(value) for value in usual]


@pytest.mark.parametrize("value", [None, 7, [], {"ph": 5, "ts": "now", "dur": None, "args": [1], "pid": [2]}])
def test_what_is_no_event_is_one_without_anything(value):
    found = event_of(value)
    assert found.ph == "" and math.isnan(found.ts) and found.args is None


def test_integers():
    for values in ([1, 2, -5], [1 << 62, 3], [1 << 70, 3], ["12", 3, None, True, 1.0], []):
        assert integers(values).tolist() == [integer(value) for value in values]


def test_what_was_left_as_text_and_cannot_be_decoded_is_nothing():
    args = decode_events(f'[{{"args": {{"Input Dims": {"9" * 5000}, "Concrete Inputs": [1]}}}}]')[0].args
    assert args is not None and plain(args.input_dims) is None and plain(args.concrete_inputs) == [1]
