from __future__ import annotations

import pytest

from gputop.analysis.gpu.device_time import gpu_use, kernel_types, timelines
from gputop.analysis.steps.steps import find_steps
from gputop.trace.model import Kind, MemoryKind
from tests.trace.build import Builder, keras_steps


def use(b: Builder, gpu: int = 0):
    trace = b.build()
    return gpu_use(trace, timelines(trace)[gpu], find_steps(trace))


def test_busy_is_the_union_of_streams_not_their_sum():
    b = Builder().run(0, 0, 60, stream=1).run(0, 20, 60, stream=2).run(0, 90, 10)
    u = use(b)
    assert u.window_s == pytest.approx(100e-6) and u.busy == pytest.approx(0.9) and u.compute == pytest.approx(0.9)
    assert u.compute_s_per_step is None
    for i in range(4):
        b.host("train", i * 100, 90, step_num=i)
    assert use(b).compute_s_per_step == pytest.approx(90e-6 / 3)


def test_collectives_and_copies_are_apart_from_compute():
    b = (Builder().run(0, 0, 50).run(0, 40, 30, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", kind=Kind.COLLECTIVE)
         .run(0, 70, 20, "MemcpyH2D", kind=Kind.H2D).run(0, 80, 20, stream=2))
    u = use(b)
    assert (u.compute, u.collectives, u.copies) == pytest.approx((0.7, 0.3, 0.2))
    assert u.collectives_exposed == pytest.approx(0.2)  # 10 of 30 µs run beside compute
    assert u.copies_exposed == pytest.approx(0.1)
    assert u.kernels == 3


def test_idle_is_the_hosts_fault_where_the_launch_began_after_the_idle():
    b = (Builder().run(0, 20, 10, launch=0)
         .run(0, 60, 10, launch=55)  # 30 µs idle, launched 25 µs into it
         .run(0, 80, 10, launch=65))  # 10 µs idle, launched before it began
    u = use(b)
    assert u.idle_host_fault == pytest.approx(0.75)
    assert u.launch_delay_median_s == pytest.approx(10e-6)  # from the end of the 5 µs call: 15, 0, 10


    u = use(Builder().run(0, 0, 10).run(0, 40, 10))  # without launches
    assert u.idle_host_fault is None and u.launch_delay_median_s is None


def test_what_begins_during_its_call_waited_for_nothing_and_what_begins_before_it_has_another_clock():
    during = (Builder().run(0, 20, 10, launch=10, launch_length=15).run(0, 60, 10, launch=50, launch_length=15))
    assert use(during).launch_delay_median_s == 0
    before = (Builder().run(0, 20, 10, launch=25).run(0, 60, 10, launch=65).run(0, 90, 5, launch=70))
    assert use(before).launch_delay_median_s is None
    trace = Builder().run(0, 20, 10, launch=0).build()
    trace.device.launch_end_ns[:] = -1  # then it counts from the call's start
    assert gpu_use(trace, timelines(trace)[0], None).launch_delay_median_s == pytest.approx(20e-6)


def test_one_moment_of_work_does_not_make_a_gpu_busy():
    one = Builder().host("python", 0, 1000).run(0, 500, 2)
    assert (use(one).window_s, use(one).busy) == pytest.approx((1e-3, 2e-3))
    half = Builder().host("python", 0, 1000).run(0, 300, 200).run(0, 600, 200)
    assert (use(half).window_s, use(half).busy) == pytest.approx((500e-6, 0.8))


def test_copies_by_direction():
    b = (Builder()
         .run(0, 0, 10, "MemcpyH2D", kind=Kind.H2D, size=1000, src=MemoryKind.PAGEABLE)
         .run(0, 10, 30, "MemcpyH2D", kind=Kind.H2D, size=3000, src=MemoryKind.PINNED)
         .run(0, 50, 20, "MemcpyD2H", kind=Kind.D2H, dst=MemoryKind.PAGEABLE)
         .run(0, 80, 10, "Memset", kind=Kind.MEMSET, size=99))
    u = use(b)
    assert u.copies_bytes == {"h2d": 4000, "d2h": None}
    assert u.copies_count == {"h2d": 2, "d2h": 1}
    assert u.copies_s == pytest.approx({"h2d": 40e-6, "d2h": 20e-6})
    assert u.copies_pageable_s == pytest.approx(30e-6)
    # An unknown kind of memory is not called pinned.
    assert use(Builder().run(0, 0, 10, "MemcpyH2D", kind=Kind.H2D, size=10)).copies_pageable_s is None


def test_types_and_tensor_cores_by_time():
    b = (Builder().run(0, 0, 30, "volta_sgemm_128x64_nn").run(0, 30, 60, "ampere_bf16_s16816gemm_bf16_128x128")
         .run(0, 90, 10, "EigenMetaKernel"))
    trace = b.build()
    types, tensor = kernel_types(trace, timelines(trace)[0])
    assert types == pytest.approx({"bf16": 0.6, "fp32": 0.3, "unknown": 0.1}) and tensor == pytest.approx(0.6)


def test_each_gap_names_the_event_that_ends_it():
    trace = (Builder().run(0, 20, 10, launch=0).run(0, 25, 2, stream=2)  # within the first: ends no gap
             .run(0, 60, 10, launch=55).run(0, 80, 10)).build()
    assert [timeline.gpu for timeline in timelines(Builder(gpus=3).run(1, 0, 10).build())] == [1]  # that has events
    (timeline,) = timelines(trace)
    gaps, start_us = timeline.gaps, (trace.device.start_ns - trace.device.start_ns[0]) // 1000 + 20
    assert ((gaps.end - gaps.start) // 1000).tolist() == [30, 10]
    assert start_us[timeline.after].tolist() == start_us[timeline.rows[timeline.resumes]].tolist() == [60, 80]
    assert gpu_use(trace, timeline, None).idle_host_fault == 1, "of 30 of 40 µs the launch is known"


def test_compute_per_step_goes_by_steps():
    b = keras_steps(Builder(), 4, 100, 90)
    for i in range(4):
        b.run(0, i * 100 + 20, 40)
    assert use(b).compute_s_per_step == pytest.approx(40e-6)
