"""Phase and path of ops, by names that TensorFlow and JAX wrote."""

from __future__ import annotations

import pytest

from gputop.analysis.layers.scopes import scope_of

NAMES = [
    ("jit(step)/transpose(jvp(Net))/Dense_0/mul;jit(step)/transpose(jvp(Net))/add", "backward", "Net/Dense_0/mul"),
    ("jit(step)/jvp(jit(loss_fn))/dot_general", "forward", "dot_general"),
    ("jit(step)/jvp(Net)/block_0/Dense_0/dot_general", "forward", "Net/block_0/Dense_0/dot_general"),
    ("jit(step)/transpose(jvp(Net))/block_0/LayerNorm_0/reduce_sum", "backward", "Net/block_0/LayerNorm_0/reduce_sum"),
    ("jit(step)/transpose(jvp(Net))/jvp(Net)/checkpoint/rematted_computation/block_1/query/dot_general",
     "recomputation", "Net/block_1/query/dot_general"),
    ("jit(step)/transpose(jvp(Net))/jvp(Net)/checkpoint/block_1/mul", "backward", "Net/block_1/mul"),
    ("jit(step)/jvp(bsd,de->bse)/dot_general", "forward", "bsd,de->bse/dot_general"),
    ("jit(step)/jvp(jit(take_along_axis))/le", "forward", "le"),
    ("jit(step)/jvp(loss)/reduce_sum", "loss", "loss/reduce_sum"),
    ("jit(step)/while/body/sqrt", "optimizer", "sqrt"),
    ("jit(step)/transpose(jvp())/while/body/closed_call/remat2", "backward", "remat2"),
    ("jit(step)/jvp()/while", "forward", "while"),
    ("jit(step)/while", "optimizer", ""),
    ("jit(step)/jit(_normal)/jit(_normal_real)/erf_inv", "forward", "erf_inv"),  # an optimizer needs no noise
    ("jit(step)/jit(noise)/jit(_gumbel)/jit(_uniform)/while/body/closed_call/add", "forward", "add"),
    ("sequential/conv2d/Relu:_FusedConv2D", "forward", "sequential/conv2d/Relu"),
    ("gradient_tape/replica_1/sequential/conv2d/Conv2D/Conv2DBackpropFilter:Conv2DBackpropFilter", "backward",
     "sequential/conv2d/Conv2D/Conv2DBackpropFilter"),
    ("gradients/dense/MatMul_grad/MatMul:MatMul", "backward", "dense/MatMul_grad/MatMul"),
    ("Adam/Adam/update_4/ResourceApplyAdam:ResourceApplyAdam", "optimizer", "Adam/update_4/ResourceApplyAdam"),
    ("StatefulPartitionedCall/adamw/mul_3:Mul", "optimizer", "adamw/mul_3"),
    ("StatefulPartitionedCall/adam_w/truediv_1:RealDiv", "optimizer", "adam_w/truediv_1"),  # Keras 3's "adamw"
    ("rm_sprop/AssignSubVariableOp_2:AssignSubVariableOp", "optimizer", "rm_sprop/AssignSubVariableOp_2"),
    ("AdamWeightDecay/mul_3:Mul", "optimizer", "AdamWeightDecay/mul_3"),
    ("categorical_crossentropy/weighted_loss/Mul:Mul", "loss", "categorical_crossentropy/weighted_loss/Mul"),
    ("compile_loss/mse/Mean:Mean", "loss", "compile_loss/mse/Mean"),
    ("gradient_tape/compile_loss/mse/Mul:Mul", "backward", "compile_loss/mse/Mul"),
    ("ArgMax:ArgMax", "other ops", "ArgMax"),
    ("MatMul_22:MatMul", "forward", "MatMul_22"),  # TensorFlow 1, without a scope
    ("SoftmaxCrossEntropyWithLogits_21:SoftmaxCrossEntropyWithLogits", "loss", "SoftmaxCrossEntropyWithLogits_21"),
    ("GradientDescent/update_w/ApplyGradientDescent:ApplyGradientDescent", "optimizer",
     "GradientDescent/update_w/ApplyGradientDescent"),
    ("AssignAddVariableOp_2:AssignAddVariableOp", "other ops", "AssignAddVariableOp_2"),
    ("kernel", "other ops", ""),
    ("p['params']['Dense_0']['bias']", "other ops", ""),
    ("jit(step)/a)/b((/c/d:X", "optimizer", "a)/b((/c/d"),  # parentheses that do not match split somewhere
    ("jit(predict)/Net/Dense_0/dot_general", "forward", "Net/Dense_0/dot_general"),  # without gradients no update
]


@pytest.mark.parametrize(("name", "phase", "path"), NAMES)
def test_phase_and_path(name: str, phase: str, path: str) -> None:
    scope = scope_of(name, training=not name.startswith("jit(predict)"))
    assert (scope.phase, "/".join(scope.path)) == (phase, path)


def test_a_program_without_gradients_updates_nothing() -> None:
    assert scope_of("jit(predict)/Net/Dense_0/dot_general", False).phase == "forward"


def test_parentheses_that_do_not_match_split_somewhere() -> None:
    assert scope_of("jit(step)/a)/b((/c/d:X", True).path
