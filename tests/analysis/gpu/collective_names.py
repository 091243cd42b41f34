"""Names of collectives as they stand in traces."""

from __future__ import annotations

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
