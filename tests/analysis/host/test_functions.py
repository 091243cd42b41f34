from __future__ import annotations

from pathlib import Path

import pytest

from gputop.analysis.host.functions import functions
from gputop.trace.readers.load import load
from tests.trace.build import Builder

DATA = Path(__file__).resolve().parents[2] / "data"


def test_retracing_is_every_tracing_but_the_first():
    b = Builder(gpus=0)
    for i in range(3):
        b.host("train_step", i * 100, 90, tf_function_call="traced-nonXla", tracing_count=i + 1)
        b.host("tf.function-graph_building", i * 100 + 1, 60)
        b.host("helper", i * 100 + 10, 30, tf_function_call="traced-nonXla", tracing_count=i + 5)  # traced inside
        b.host("tf.function-graph_building", i * 100 + 11, 20)
    b.host("train_step", 300, 10, tf_function_call="notTraced-nonXla", tracing_count=3)
    found = functions(b.build())
    assert found is not None and [use.name for use in found.functions] == ["train_step", "helper"]
    train, helper = found.functions
    assert (train.calls, train.tracings, train.retracings, train.tracing_count) == (4, 3, 2, 3)
    assert train.modes == {"notTraced-nonXla": 1, "traced-nonXla": 3} and train.xla is False
    assert train.tracing_s == pytest.approx(120e-6) and helper.tracing_s == pytest.approx(60e-6)  # each instant once
    assert train.tracing_calls_s == pytest.approx(270e-6)
    assert helper.retracings == 3 and found.retracings == 5 and found.tracing_s == pytest.approx(180e-6)


    twice = Builder(gpus=0).host("f", 0, 90, tf_function_call="traced-nonXla", tracing_count=2)  # it makes variables
    twice.host("tf.function-graph_building", 1, 30).host("tf.function-graph_building", 40, 30)
    used = functions(twice.build())
    assert used is not None and (used.functions[0].tracings, used.retracings) == (1, 0)
    bare = functions(Builder(gpus=0).host("f", 0, 90, tf_function_call="traced-xla", tracing_count=2).build())
    assert bare is not None  # without events of graph building the calls that traced count
    assert bare.functions[0].tracing_s == pytest.approx(90e-6) and bare.functions[0].xla is True


def test_xla_inside_a_function_counts_as_compiled():
    b = Builder(gpus=0)
    for i in range(3):
        b.host("multi_step_on_iterator", i * 100, 80, tf_function_call="notTraced-nonXla")
        b.host("CpuExecutable::ExecuteAsyncOnStream", i * 100 + 20, 40, "tf_Compute/1")
    b.host("CpuCompiler::RunBackend", 300, 50).host("CpuCompiler::CompileCpuExecutable", 301, 40)
    found = functions(b.build())
    assert found is not None and found.functions[0].xla is True and found.functions[0].xla_s == pytest.approx(120e-6)
    assert (found.xla_runs, found.xla_compilations) == (3, 1) and found.xla_compile_s == pytest.approx(50e-6)


def test_kernels_of_a_functions_module_tell_that_it_is_compiled():
    b = Builder().host("one_step_on_data", 0, 80, tf_function_call="notTraced-nonXla")
    b.host("other", 100, 80, tf_function_call="notTraced-nonXla")
    b.run(0, 10, 20, op="a_inference_one_step_on_data_220__.5/loop_fusion.3")
    b.run(0, 40, 20, op="cluster_0__XlaCompiledKernel_true.17/fusion").run(0, 70, 20, op="model/dense/MatMul:MatMul")
    found = functions(b.build())
    assert found is not None and found.xla_modules == ("a_inference_one_step_on_data_220", "cluster_0")
    assert {use.name: use.xla for use in found.functions} == {"one_step_on_data": True, "other": False}


def test_modules_started_on_gpus_are_named_by_the_host_too():
    b = Builder().host("multi_step_on_iterator", 0, 80, tf_function_call="notTraced-nonXla")
    b.host("a_inference_one_step_on_data_220__.5:XLA GPU module", 10, 30, "tf_Compute/1").run(0, 20, 30)
    b.host("HLO Transforms:a_inference_one_step_on_data_220__.5", 50, 20, "tf_Compute/1")
    found = functions(b.build())
    assert found is not None and found.xla_modules == ("a_inference_one_step_on_data_220",) and found.xla_runs == 1
    assert found.functions[0].xla_s == pytest.approx(30e-6) and found.xla_compile_s == pytest.approx(20e-6)


def test_real_retracing():
    found = functions(load([DATA / "tf_retracing.xplane.pb.gz"]))
    assert found is not None and len(found.functions) == 1
    use = found.functions[0]
    assert use.name == "train_step" and use.calls == use.tracings == use.retracings >= 10
    assert 0.3 * use.tracing_calls_s < use.tracing_s < use.tracing_calls_s
    assert (use.tracing_count or 0) > use.calls and use.xla is False and found.xla_compilations == 0


@pytest.mark.parametrize("name", ["x", "a_inference_" + "_" * 300_000, "jit_" * 1000 + "__" * 100_000])
def test_a_name_that_is_made_to_be_slow_is_no_module(name):
    assert functions(Builder(gpus=0).host(name, 0, 90).build()) is None


def test_no_functions():
    assert functions(Builder(gpus=0).host("x", 0, 1).build()) is None
