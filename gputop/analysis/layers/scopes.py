"""Phase of the training step and layer of the model that an op belongs to, by its name.

XLA's op names (JAX) say ``jit(step)/jvp(Model)/Dense_0/dot_general`` for the forward pass, ``transpose(jvp(Model))/…``
for the backward pass and ``rematted_computation`` for what is computed again. TensorFlow's say ``model/dense/MatMul``
and ``gradient_tape/model/dense/MatMul/MatMul_1`` (docs/contributing/trace-notes.md, "Phases and layers").
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import NamedTuple

from gputop.trace.model import HloOp

INPUT = "input"  # ops that make a batch on the loop's own thread
PHASES = ("forward", "loss", "backward", "recomputation", "optimizer", "other ops")

_WRAPPED = re.compile(r"(\w+)\((.*)\)", re.DOTALL)
_TRANSFORMS = frozenset({"jvp", "transpose", "vmap", "remat", "checkpoint", "custom_jvp", "custom_vjp", "shard_map"})
# Parts of names that stand for a transformation or a call, not for a part of the model.
_NO_LAYER = re.compile(
    r"while|body|cond|then|else|branch_\d+_fun|scan|checkpoint|rematted_computation|remat\d?|closed_call|core_call|"
    r"shard_map|pjit|custom_[jv]\w+_call\w*|(Stateful)?PartitionedCall(_\d+)?|replica_\d+|gradient_tape|gradients(_\d+)?|"
    r"cluster_\d+_\d+|")
_GRADIENT = re.compile(r"(?:^|/)(?:gradient_tape|gradients(?:_\d+)?)/")
LOSS = re.compile(
    r"loss|crossentropy|cross_entropy|mean_(?:squared|absolute)\w*error|hinge|huber|kl_divergence|log_?cosh",
    re.IGNORECASE)
_OPTIMIZER = re.compile(
    r"(?:gradient_?descent|adam(?:_?w(?:eight_?decay)?|ax|delta)?|nadam|adagrad|adadelta|adafactor|sgd|momentum|"
    r"rm_?sprop|ftrl|lamb|lion|lars|muon|nesterov|"
    r"loss_?scale_?optimizer\w*|optimizer\w*)(?:_\d+)?", re.IGNORECASE)
_DIFFERENTIATED = re.compile(r"jvp\((\w+)[)/]")  # modules
_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
# jax.random's, of which an optimizer needs none: noise, dropout masks, time steps of a diffusion.
_RANDOM = re.compile(r"/jit\(_?(?:uniform|normal|truncated_normal|bernoulli|categorical|gumbel|randint|permutation|"
                     r"shuffle|choice|exponential|laplace|gamma|beta|dirichlet|poisson)\)|/(?:random_bits|threefry)")
_UPDATE = re.compile(r"(?:Resource)?(?:Sparse)?Apply\w+")
# Ops of a model, in a scope or not.
_OF_MODEL = re.compile(r"_?(?:Fused|Batch|Sparse)?MatMul(?:V\d)?|\w*Conv[123]D|Einsum|\w*Pool|BiasAdd|FusedBatch\w*")
_ASSIGN = frozenset({"AssignAddVariableOp", "AssignSubVariableOp"})


class Scope(NamedTuple):
    """An op's phase and its path, from the outermost scope to the op. ``path`` is empty where the name has no scope."""

    phase: str
    path: tuple[str, ...]


@lru_cache(maxsize=65536)
def scope_of(op_name: str, training: bool | None) -> Scope:
    """``training``: whether the program differentiates, so that what is neither forward nor backward is an update; None
    where it does, and the op has no part in the update."""
    op_name = op_name.partition(";")[0]  # where XLA made one op of several it lists their names
    name, _, type_ = op_name.rpartition(":") if ":" in op_name.rsplit("/", 1)[-1] else (op_name, "", "")
    if "/" not in name and not type_:
        return Scope("other ops", ())
    path: list[str] = []
    wrappers: set[str] = set()
    scope = ""
    for part in _parts(name):
        scope, used = _unwrapped(part)
        wrappers |= used
        if scope and not _NO_LAYER.fullmatch(scope) and path[-1:] != [scope]:
            path.append(scope)
    if not path and scope and wrappers & {"jvp", "transpose"}:  # a loop or a call itself, of a phase that is known
        path.append(scope)
    return Scope(_phase(name, type_, path, wrappers, training), tuple(path))


def trainings(ops: Sequence[HloOp], program: Sequence[Hashable]) -> list[bool | None]:
    """Argument ``training`` of :func:`scope_of` for each of these ops, of these programs. What runs in a module and is
    not differentiated predicts: with new weights, it comes after the gradient as well."""
    training = {of for op, of in zip(ops, program, strict=True) if differentiates(op.op_name)}
    products = {op.op_name for op in ops if not op.after_gradient and op.op_name.rpartition("/")[2] in _PRODUCTS}
    modules = {module for op in ops for module in _DIFFERENTIATED.findall(op.op_name)}
    modules.update(path[0] for name in products if len(path := scope_of(name, False).path) > 1)
    return [of in training and op.op_name not in products and modules.isdisjoint(op.op_name.split("/")) and (
        op.after_gradient or None) for op, of in zip(ops, program, strict=True)]


def differentiates(op_name: str) -> bool:
    """Return whether an op of XLA's belongs to a program that computes gradients."""
    return "jvp(" in op_name or "transpose(" in op_name


def _phase(name: str, type_: str, path: list[str], wrappers: set[str], training: bool | None) -> str:
    scopes = path[:-1]
    if "rematted_computation" in name:
        return "recomputation"
    if "transpose" in wrappers or _GRADIENT.search(name):
        return "backward"
    if _UPDATE.fullmatch(type_) or any(_OPTIMIZER.fullmatch(scope) for scope in scopes):
        return "optimizer"
    if any(LOSS.search(scope) for scope in scopes):
        return "loss"
    if "jvp" in wrappers:
        return "forward"
    if wrappers:  # JAX
        random = _RANDOM.search(name) is not None
        return "optimizer" if training and not random else "forward" if random or training is False else "other ops"
    if not scopes and LOSS.search(type_):
        return "loss"
    return "forward" if _OF_MODEL.fullmatch(type_) or (scopes and type_ not in _ASSIGN) else "other ops"


def _parts(name: str) -> list[str]:
    """Split at slashes outside parentheses."""
    if "(" not in name:
        return name.split("/")
    parts, depth = [""], 0
    for text in re.split(r"([/()])", name):
        if text == "/" and depth <= 0:
            parts.append("")
            continue
        depth += (text == "(") - (text == ")")
        parts[-1] += text
    return parts


def _unwrapped(part: str) -> tuple[str, set[str]]:
    """A part of a name without the transformations around it, and those."""
    used: set[str] = set()
    while (match := _WRAPPED.fullmatch(part)) is not None:
        if match[1] in ("jit", "pjit", "pmap"):
            return "", used | {"jit"}
        if match[1] not in _TRANSFORMS:
            break
        used.add(match[1])
        part = match[2]
    return part, used
