"""Ops of a program that computes gradients that can be a part of its update: what takes the backward pass's results.

JAX names the forward and the backward pass by ``jvp`` and ``transpose``. What has neither is the update, but also
a rollout, an evaluation, or a shuffle that the same program runs. Along operands, an update comes after the backward
pass, within one turn of a loop: the next turn begins with new weights, so all of it would come after.
"""

from __future__ import annotations

from gputop.trace.readers.xspace.hlo import Instruction, Program

_BACKWARD = b"transpose("  # of jvp(...), in the name of an op
_PRODUCTS = ("dot", "convolution")


def after_gradient(program: Program, op: Instruction) -> bool:
    """Return whether the op comes after a gradient, or computes only for ops that do, such as a moving average's decay;
    True where the program computes none."""
    if program.updating is None:
        program.updating = _updating(program)
    return not program.updating or op.id in program.updating


def _updating(program: Program) -> set[int]:
    """Ids of these ops, the backward pass and the loops around it among them. XLA writes operands before what takes
    them, and computations before what calls them."""
    holds = dict[int, bool]()  # computations: whether they have an op of the backward pass
    backward = set[int]()  # instructions that are one, or call one
    for computation, (_, body) in program.bodies.items():
        here = {op.id for op in body if program.has(op, _BACKWARD) or any(holds.get(called) for called in op.called)}
        backward |= here
        holds[computation] = bool(here)
    if not backward:
        return set()
    after, given = set(backward), set[int]()  # and computations of which an argument comes after it
    for computation, (_, body) in reversed(program.bodies.items()):
        for op in body:
            taken = any(operand in after for operand in op.operands)
            if taken or (op.opcode == "parameter" and computation in given):
                after.add(op.id)
            if taken and (op.opcode != "while" or op.id not in backward):
                given.update(op.called)
        _add_what_serves_them(body, after, backward)
    return after


def _add_what_serves_them(body: tuple[Instruction, ...], after: set[int], backward: set[int]) -> None:
    """Add ops whose results only later ops take, and no pass does."""
    users = dict[int, list[int]]()
    for op in body:
        for operand in op.operands:
            users.setdefault(operand, []).append(op.id)
    for op in reversed(body):
        of_op = users.get(op.id, ())
        if of_op and op.opcode not in _PRODUCTS and all(user in after and user not in backward for user in of_op):
            after.add(op.id)
