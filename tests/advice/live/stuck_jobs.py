"""A job whose GPUs are stuck, as live rules see it."""

from __future__ import annotations

from tests.advice.live.scene import Level

STUCK: dict[str, Level | None] = {
    "tensor_active": 0.0, "dram_active": 0.001, "power_w": 130.0,
    "pcie_rx_bytes_per_s": 2e5, "pcie_tx_bytes_per_s": 2e5,
}
