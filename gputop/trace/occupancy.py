"""Number of warps of a kernel that an SM can hold, by the rules of NVIDIA's occupancy calculator.

For traces with registers, shared memory and block size but without the occupancy. Limits:
CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; other GPUs'
occupancy stays unknown. The carve-out of shared memory is assumed to be the largest.
"""

from __future__ import annotations

import math
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

_WARP = 32
_REGISTERS = 65_536  # per SM
_REGISTER_UNIT = 256  # allocated to a warp at a time
SCHEDULERS = 4  # of an SM, each with its part of the registers and warps of its own
MAX_SMS = 4096  # of a GPU; a larger number is damage (a B200 has 148)


class LaunchShape(Struct, frozen=True):
    """Launch shape of a kernel. ``occupancy`` is the share of an SM's warps that can be resident, None: unknown."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    registers: int = -1  # per thread; -1: not in the trace
    shared_bytes: int = -1  # static and dynamic, per block; -1: not in the trace
    occupancy: float | None = None


class _Sm(Struct, frozen=True):
    warps: int
    blocks: int
    shared_bytes: int
    shared_unit: int  # allocated to a block at a time
    shared_reserved: int  # for the system, per block


_SM = {
    (7, 0): _Sm(64, 32, 96 << 10, 256, 0),
    (7, 5): _Sm(32, 16, 64 << 10, 256, 0),
    (8, 0): _Sm(64, 32, 164 << 10, 128, 1024),
    (8, 6): _Sm(48, 16, 100 << 10, 128, 1024),
    (8, 9): _Sm(48, 24, 100 << 10, 128, 1024),
    (9, 0): _Sm(64, 32, 228 << 10, 128, 1024),
}


def sm_count(value: object) -> int | None:
    """The number of a GPU's SMs as a trace tells it; None where that cannot be one."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_SMS else None


def resident_blocks(compute_capability: tuple[int, int] | None, threads: int, registers: int,
                    shared_bytes: int) -> int | None:
    """Blocks of ``threads`` threads that one SM can hold; None for an unknown GPU or a block that fits none.

    ``registers`` are per thread, ``shared_bytes`` static and dynamic of a block.
    """
    sm = _SM.get(compute_capability) if compute_capability else None
    if sm is None or threads <= 0 or registers < 0 or shared_bytes < 0:
        return None
    warps = _up(threads, _WARP) // _WARP
    blocks = min(sm.blocks, sm.warps // warps)
    if registers:
        per_warp = _up(registers * _WARP, _REGISTER_UNIT)
        blocks = min(blocks, _REGISTERS // SCHEDULERS // per_warp * SCHEDULERS // warps)
    shared = _up(shared_bytes + sm.shared_reserved, sm.shared_unit)
    if shared:
        blocks = min(blocks, sm.shared_bytes // shared)
    return blocks or None


def theoretical_occupancy(compute_capability: tuple[int, int] | None, threads: int, registers: int,
                          shared_bytes: int) -> float | None:
    """Share of an SM's warps that can be resident; None where :func:`resident_blocks` is."""
    blocks = resident_blocks(compute_capability, threads, registers, shared_bytes)
    if blocks is None or compute_capability is None:
        return None
    return blocks * (_up(threads, _WARP) // _WARP) / _SM[compute_capability].warps


def with_estimate(shape: LaunchShape, major: Any, minor: Any, sms: Any) -> LaunchShape:
    """The shape with its occupancy as kineto estimates it, where it has none and the GPU's figures are known.

    Kineto's "est. achieved occupancy" also bounds the blocks by those the grid has for each SM.
    """
    threads = math.prod(shape.block)
    if shape.occupancy is not None or not all(isinstance(n, int) for n in (major, minor, sms)) or sms <= 0:
        return shape
    blocks = resident_blocks((major, minor), threads, shape.registers, shape.shared_bytes)
    if blocks is None:
        return shape
    blocks_per_sm = min(blocks, math.prod(shape.grid) / sms)
    return replace(shape, occupancy=blocks_per_sm * threads / (_SM[major, minor].warps * _WARP))


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
