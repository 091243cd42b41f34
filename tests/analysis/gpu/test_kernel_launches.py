"""The line for Nsight Compute, followed as ncu would: which launch of the job, counted from its start, it profiles."""

from __future__ import annotations

import itertools
import re
import shlex

import pytest

from gputop.analysis.gpu.device_time import timelines
from gputop.analysis.gpu.kernel_launches import function_name, with_ncu
from gputop.analysis.gpu.kernel_table import kernels
from gputop.analysis.steps.steps import find_steps
from gputop.trace.model import Kind, Trace, TraceGpu
from tests.trace.build import Builder, keras_steps

GEMM, OTHER = "void ns::Gemm<(int)128, float>(float const*, int)", "void ns::Gemm<(int)64, half>(half const*, int)"
STEP = (("PreGemm", 3.0), (OTHER, 5.0), (GEMM, 4.0), (GEMM, 90.0), ("volta_sgemm_128x64_nn", 8.0), (GEMM, 4.0))


def lines(trace: Trace) -> dict[str, str]:
    found = with_ncu(kernels(trace, timelines(trace)), trace, find_steps(trace))
    assert found is not None
    return {row.name: row.ncu for row in found.by_name}


def training(gpus: int = 1, steps: int = 6) -> Builder:
    built = keras_steps(Builder(gpus=gpus), steps, 1000, 700)
    for gpu in range(gpus):
        for step in range(steps):
            at = 1000.0 * step + 20
            for name, length in STEP:
                built.run(gpu, at + 10, length, name, launch=at + gpu)
                at += 100
    return built


def profiled(line: str, gpus: int = 1) -> tuple[int, str, float]:
    """The step and the launch that ncu would profile of a job like ``training`` that runs from its start."""
    words = shlex.split(line)
    options = dict(itertools.pairwise(words))
    assert options["--launch-count"] == "1" and options["--set"] == "full"
    skip, pattern = int(options["--launch-skip"]), options["--kernel-name"].removeprefix("regex:")
    for step in range(100):
        for name, length in STEP:
            function = name.removeprefix("void ").split("<")[0].rpartition("::")[2]  # --kernel-name-base function
            for _ in range(gpus):
                if re.search(pattern, function):
                    if not skip:
                        return step, name, length
                    skip -= 1
    raise AssertionError("ncu would profile nothing")


@pytest.mark.parametrize("gpus", [1, 2])
def test_ncu_gets_to_the_longest_launch_of_a_step_after_the_warm_up(gpus: int) -> None:
    found = lines(training(gpus).build())
    assert profiled(found[GEMM], gpus) == (10, GEMM, 90.0)
    assert profiled(found[OTHER], gpus) == (10, OTHER, 5.0)
    assert profiled(found["volta_sgemm_128x64_nn"], gpus) == (10, "volta_sgemm_128x64_nn", 8.0)


def test_the_pattern_is_that_of_one_function() -> None:
    line = lines(training().build())["PreGemm"]
    assert shlex.split(line)[4] == r"regex:\bPreGemm$" and line.endswith(" -o gputop-kernel python train.py")


@pytest.mark.parametrize(("job", "command"), [
    ("python3 train.py --lr=0.1 data/a", "python3 train.py --lr=0.1 data/a"), ("", "python train.py"),
    ("python train.py --token ***", "python train.py"), ("python a.py; rm -rf ~", "python train.py"),
    ("python $(x) `y`", "python train.py"), ("a\nb", "python train.py"),
])
def test_a_job_s_command_stands_there_where_a_shell_takes_it_as_it_is(job: str, command: str) -> None:
    trace = training().build()
    trace.job = job
    assert lines(trace)[GEMM].endswith(f" -o gputop-kernel {command}")


def test_a_program_without_a_framework_is_not_called_one_of_python() -> None:
    trace = Builder(format="nsys").run(0, 0, 50, "solve(float*)", launch=0).build()
    assert lines(trace)["solve(float*)"].endswith(" ./program")


@pytest.mark.parametrize(("kernel", "function"), [
    ("volta_sgemm_128x64_nn", "volta_sgemm_128x64_nn"),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::f(at::X&)::{lambda()#1}>(int)",
     "vectorized_elementwise_kernel"),
    ("void (anonymous namespace)::softmax<float>(float*)", "softmax"),
    ("Eigen::internal::EigenMetaKernel<A<B>, int>(A<B>, int)", "EigenMetaKernel"),
    ("_ZN3foo3barEv", "_ZN3foo3barEv"), ("loop_add_fusion.12", "loop_add_fusion.12"), ("<>", ""), ("", ""),
])
def test_function_names(kernel: str, function: str) -> None:
    assert function_name(kernel) == function


def test_what_is_no_kernel_of_nvidia_s_or_communicates_has_none() -> None:
    trace = training().build()
    trace.gpus[0] = TraceGpu("node", 0, compute_capability=(9, 4))  # as XSpaces tell AMD's
    assert not any(lines(trace).values())
    for amd in (training().host("hipExtModuleLaunchKernel", 0, 5),
                Builder().run(0, 0, 10, "Cijk_Alik_Bljk_BBS_BH_MT128x256x32")):  # files that tell nothing of their GPUs
        assert not any(lines(amd.build()).values())
    built = Builder().run(0, 0, 10, "ncclDevKernel_AllReduce", kind=Kind.COLLECTIVE).run(0, 20, 10, "_Zgemm$v")
    found = lines(built.build())
    assert found["ncclDevKernel_AllReduce"] == ""
    assert "--kernel-name-base mangled --kernel-name '_Zgemm$v' --launch-skip 0 " in found["_Zgemm$v"]
