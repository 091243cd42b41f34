"""FLOPs that gputop counts in XLA's programs against what the mathematics says and XLA's own cost analysis. Needs JAX.

    python benchmarks/hlo_flops.py [--write FILE] [--blocks FILE] [--products FILE] [--trace FILE] [--rollout FILE]

``--write`` saves the program of the transformer block's training step, before optimization, for the tests,
``--blocks`` all programs of the first table, before and after optimization, ``--products`` those of products and
convolutions of every kind, each with the number of FLOPs that its own result tells: of ones, the sum of all outputs is
the number of products. ``--rollout`` saves the optimized program of reinforcement learning, whose one call acts,
shuffles, updates in turns, and evaluates. ``--trace`` saves a capture of two training steps of blocks in a scan, run on
the CPU. XLA's figure holds element-wise arithmetic, too; the optimized program of the CPU keeps dots and convolutions.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from gputop.trace.readers.xspace.hlo import Program
from gputop.trace.readers.xspace.hlo_work import hlo_op
from gputop.trace.readers.xspace.wire import Quota

BATCH, SIZE, IN, OUT = 2, 16, 8, 12
TOKENS, MODEL, HEADS = 32, 64, 4


def as_proto(module: bytes) -> bytes:
    """The module as the only field of a HloProto, as traces hold it."""
    size, length = len(module), b""
    while size > 0x7F:
        length, size = length + bytes((size & 0x7F | 0x80,)), size >> 7
    return b"\x0a" + length + bytes((size,)) + module


def counted(module: bytes) -> float:
    """All FLOPs of a program whose loops run once."""
    data = as_proto(module)
    program = Program(data, 0, len(data), Quota(1 << 23))
    total = 0.0
    for name, id_ in program.ids.items():
        op, found = program.instruction(id_), hlo_op(program, name)
        if op is not None and op.opcode in ("dot", "convolution"):
            assert found is not None and found.flops is not None
            total += sum(flops for _, flops in found.flops)
    return total


def conv(x: jax.Array, w: jax.Array, stride: int = 1, padding: str = "SAME") -> jax.Array:
    return jax.lax.conv_general_dilated(x, w, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def conv_flops(size: int, kernel: int, in_: int, out: int, stride: int = 1) -> float:
    """Of a convolution with padding to the same size: the places along a dimension that lie inside the image."""
    outputs = -(-size // stride)
    low = max((outputs - 1) * stride + kernel - size, 0) // 2
    inside = sum(0 <= o * stride + k - low < size for o in range(outputs) for k in range(kernel))
    return 2.0 * BATCH * in_ * out * inside**2


def resnet_block(p: list[jax.Array], x: jax.Array) -> jax.Array:
    y = jax.nn.relu(conv(x, p[0], 2))
    return jax.nn.relu(conv(y, p[1]) + conv(x, p[2], 2))


def transformer_block(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    with jax.named_scope("attention"):
        q, k, v = (jnp.reshape(x @ p[n], (BATCH, TOKENS, HEADS, MODEL // HEADS)) for n in "qkv")
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        x = x + jnp.reshape(jnp.einsum("bhqk,bkhd->bqhd", scores, v), x.shape) @ p["o"]
    with jax.named_scope("mlp"):
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def training_step(p: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
    def loss(p: dict[str, jax.Array]) -> jax.Array:
        with jax.named_scope("block"):
            y = jax.checkpoint(transformer_block)(p, x)
        with jax.named_scope("loss"):
            return jnp.mean(y**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(loss)(p))


def cases() -> list[tuple[str, Callable[..., Any], tuple[Any, ...], float]]:
    """Name, function, arguments, analytic FLOPs."""
    key = jax.random.key(0)
    image, kernel = jnp.ones((BATCH, SIZE, SIZE, IN)), jnp.ones((3, 3, IN, OUT))
    forward = conv_flops(SIZE, 3, IN, OUT)
    block = [jax.random.normal(key, s) for s in ((3, 3, IN, OUT), (3, 3, OUT, OUT), (1, 1, IN, OUT))]
    of_block = (conv_flops(SIZE, 3, IN, OUT, 2) + conv_flops(SIZE // 2, 3, OUT, OUT)
                + conv_flops(SIZE, 1, IN, OUT, 2))
    shapes = {**dict.fromkeys("qkvo", (MODEL, MODEL)), "up": (MODEL, 4 * MODEL), "down": (4 * MODEL, MODEL)}
    p = {n: jax.random.normal(key, s) for n, s in shapes.items()}
    x = jnp.ones((BATCH, TOKENS, MODEL))
    of_transformer = (2.0 * BATCH * TOKENS * sum(math.prod(s) for s in shapes.values())
                      + 4.0 * BATCH * TOKENS * TOKENS * MODEL)
    # The forward pass again where the backward pass begins, without its last product, whose result it does not need.
    recomputed = of_transformer - 2.0 * BATCH * TOKENS * 4 * MODEL * MODEL
    no_gradient = 3 * 2.0 * BATCH * TOKENS * MODEL * MODEL  # of the block's input through q, k and v
    return [
        ("matmul 64 x 128 x 32", jnp.matmul, (jnp.ones((64, 128)), jnp.ones((128, 32))), 2.0 * 64 * 128 * 32),
        ("matmul, gradients of both", jax.grad(lambda a, b: (a @ b).sum() ** 2, (0, 1)),
         (jnp.ones((64, 128)), jnp.ones((128, 32))), 3 * 2.0 * 64 * 128 * 32),
        ("batched matmul", jnp.matmul, (jnp.ones((4, 16, 8)), jnp.ones((4, 8, 24))), 2.0 * 4 * 16 * 8 * 24),
        ("convolution 3x3", conv, (image, kernel), forward),
        ("convolution, all gradients", jax.grad(lambda x, w: (conv(x, w) ** 2).sum(), (0, 1)), (image, kernel),
         3 * forward),
        ("ResNet block, forward", resnet_block, (block, image), of_block),
        ("ResNet block, training", jax.grad(lambda p, x: (resnet_block(p, x) ** 2).sum(), (0, 1)), (block, image),
         3 * of_block),
        ("transformer block, forward", transformer_block, (p, x), of_transformer),
        ("transformer block, training, recomputed", training_step, (p, x),
         3 * of_transformer + recomputed - no_gradient),
    ]


def one_of_each() -> list[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Products and convolutions whose outputs, of ones, are their numbers of products."""
    def convolution(image: tuple[int, ...], kernel: tuple[int, ...], **how: Any) -> tuple[Callable[..., Any], Any]:
        def run(x: jax.Array, w: jax.Array) -> Any:
            y, back = jax.vjp(lambda x, w: jax.lax.conv_general_dilated(
                x, w, dimension_numbers=("NHWC", "HWIO", "NHWC"), **how), x, w)
            return y, back(jnp.ones_like(y))
        return run, (jnp.ones(image), jnp.ones(kernel))

    image = (2, 9, 10, 4)
    same = {"window_strides": (1, 1), "padding": "SAME"}
    a, b = jnp.ones((3, 5, 7), jnp.bfloat16), jnp.ones((3, 7, 4), jnp.bfloat16)
    return [
        ("product in bf16, of a batch", lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32), (a, b)),
        ("dot_general, two batch dimensions, two contracted", lambda a, b: jax.lax.dot_general(
            a, b, (((2, 4), (3, 0)), ((0, 1), (1, 2)))), (jnp.ones((2, 3, 4, 5, 6)), jnp.ones((6, 2, 3, 4, 7)))),
        *((f"convolution, {name}, and its gradients", *convolution(*about, **how)) for name, *about, how in (
            ("strided", image, (3, 3, 4, 6), {**same, "window_strides": (2, 3)}),
            ("grouped", image, (3, 3, 2, 6), {**same, "feature_group_count": 2}),
            ("depthwise", image, (3, 3, 1, 8), {**same, "feature_group_count": 4}),
            ("dilated", image, (3, 3, 4, 6), {**same, "rhs_dilation": (2, 1)}),
            ("transposed", image, (4, 4, 4, 6), {
                "window_strides": (1, 1), "padding": ((2, 2), (2, 2)), "lhs_dilation": (2, 2)}),
            ("without padding", image, (3, 5, 4, 6), {"window_strides": (1, 1), "padding": "VALID"}))),
    ]


def scanned(layers: int = 3) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Training of blocks in a loop, and its arguments."""
    shapes = {**dict.fromkeys("qkvo", (MODEL, MODEL)), "up": (MODEL, 4 * MODEL), "down": (4 * MODEL, MODEL)}
    weights = {n: 0.02 * jax.random.normal(jax.random.key(0), (layers, *s)) for n, s in shapes.items()}

    def step(p: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        def loss(p: dict[str, jax.Array]) -> jax.Array:
            with jax.named_scope("blocks"):
                y, _ = jax.lax.scan(lambda x, one: (transformer_block(one, x), None), x, p)
            with jax.named_scope("loss"):
                return jnp.mean(y**2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(loss)(p))

    return jax.jit(step), (weights, jnp.ones((BATCH, TOKENS, MODEL)))


def rollout(w: dict[str, jax.Array], mean: dict[str, jax.Array], state: jax.Array, key: jax.Array) -> Any:
    def policy(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        with jax.named_scope("Policy"):
            return jnp.tanh(x @ w["in"]) @ w["out"]

    def act(state: jax.Array, key: jax.Array) -> Any:
        action = jax.random.categorical(key, policy(w, state))
        return jnp.cos(state) + 0.1 * action[:, None], (state, action)

    def update(carry: Any, batch: Any) -> Any:
        w, mean = carry
        gradient = jax.grad(lambda w: jnp.mean(jnp.take_along_axis(policy(w, batch[0]), batch[1][:, None], 1)))(w)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
        return (jax.tree.map(lambda w, m: w - 0.01 * jnp.sign(m), w, mean), mean), None

    state, seen = jax.lax.scan(act, state, jax.random.split(key, 32))
    order = jax.random.permutation(key, 32 * len(state))
    batches = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[order].reshape(8, -1, *x.shape[2:]), seen)
    (w, mean), _ = jax.lax.scan(update, (w, mean), batches)
    after, _ = jax.lax.scan(lambda state, _: (policy(w, state) @ jnp.ones((2, 4)), None), state, length=16)
    return w, mean, state, after


def write_rollout(path: Path) -> None:
    w = {"in": jnp.ones((4, 16)), "out": jnp.ones((16, 2))}
    compiled = jax.jit(rollout).lower(w, w, jnp.ones((64, 4)), jax.random.key(0)).compile()
    module = compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    path.write_bytes(gzip.compress(as_proto(module), mtime=0))


def write_trace(path: Path) -> None:
    step, (p, x) = scanned()
    p = jax.block_until_ready(step(p, x))
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level, options.python_tracer_level = 2, 0
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        for number in range(2):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                p = jax.block_until_ready(step(p, x))
        jax.profiler.stop_trace()
        found, = Path(folder).glob("plugins/profile/*/*.xplane.pb")
        path.write_bytes(gzip.compress(found.read_bytes(), mtime=0))


def write_blocks(path: Path) -> None:
    document = {}
    for name, function, arguments, _ in cases():
        lowered = jax.jit(function).lower(*arguments)
        modules = lowered.compiler_ir("hlo"), lowered.compile().runtime_executable().hlo_modules()[0]
        document[name] = [base64.b64encode(as_proto(module.as_serialized_hlo_module_proto())).decode()
                          for module in modules]
    path.write_bytes(gzip.compress(json.dumps(document, indent=1).encode(), mtime=0))


def write_products(path: Path) -> None:
    document = {}
    for name, function, arguments in one_of_each():
        result = jax.tree.leaves(jax.jit(function)(*arguments))
        module = jax.jit(function).lower(*arguments).compiler_ir("hlo").as_serialized_hlo_module_proto()
        document[name] = (2.0 * sum(float(part.sum()) for part in result),
                          base64.b64encode(as_proto(module)).decode())
    path.write_bytes(gzip.compress(json.dumps(document, indent=1).encode(), mtime=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, default=None)
    parser.add_argument("--blocks", type=Path, default=None)
    parser.add_argument("--products", type=Path, default=None)
    parser.add_argument("--trace", type=Path, default=None)
    parser.add_argument("--rollout", type=Path, default=None)
    args = parser.parse_args()
    if args.blocks is not None:
        write_blocks(args.blocks)
    if args.products is not None:
        write_products(args.products)
    if args.rollout is not None:
        write_rollout(args.rollout)
    if args.trace is not None:
        write_trace(args.trace)
    print(f"{'program':<42}{'analytic':>14}{'counted':>14}{'optimized':>14}{'XLA':>14}")
    for name, function, arguments, analytic in cases():
        lowered = jax.jit(function).lower(*arguments)
        compiled = lowered.compile()
        plain = lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
        optimized = compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
        xla = (compiled.cost_analysis() or {}).get("flops", math.nan)
        print(f"{name:<42}{analytic:>14,.0f}{counted(plain):>14,.0f}{counted(optimized):>14,.0f}{xla:>14,.0f}")
        if args.write is not None and function is training_step:
            args.write.write_bytes(gzip.compress(as_proto(plain), mtime=0))
    for name, function, arguments in one_of_each():
        compiled = jax.jit(function).lower(*arguments).compile()
        analytic = 2.0 * sum(float(part.sum()) for part in jax.tree.leaves(compiled(*arguments)))
        plain = jax.jit(function).lower(*arguments).compiler_ir("hlo").as_serialized_hlo_module_proto()
        optimized = compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
        xla = (compiled.cost_analysis() or {}).get("flops", math.nan)
        print(f"{name[:41]:<42}{analytic:>14,.0f}{counted(plain):>14,.0f}{counted(optimized):>14,.0f}{xla:>14,.0f}")


if __name__ == "__main__":
    main()
