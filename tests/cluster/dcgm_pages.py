"""The pages of dcgm-exporter by its default counters file: up to 4.8, and 4.9 with DCGM 4.7's names and units."""

from __future__ import annotations

from typing import NamedTuple

MIB, MHZ, PERCENT = 2.0**20, 1e6, 0.01


class Renamed(NamedTuple):
    """A metric under its older and its newer name; the older one's unit is ``unit`` of the newer."""

    old: str
    new: str
    value: float  # in the newer unit
    unit: float = 1.0
    figure: str = ""  # what it is in gputop


# The default page. That DCGM kept a name does not mean that its unit is new: TX and RX are bytes per second in both.
METRICS = (
    Renamed("DCGM_FI_DEV_SM_CLOCK", "DCGM_FI_DEV_SM_CLOCK_HERTZ", 1.98e9, MHZ, "sm_clock_hz"),
    Renamed("DCGM_FI_DEV_MEM_CLOCK", "DCGM_FI_DEV_MEMORY_CLOCK_HERTZ", 2.619e9, MHZ),
    Renamed("DCGM_FI_DEV_MEMORY_TEMP", "DCGM_FI_DEV_MEMORY_TEMP_CELSIUS", 71, 1, "memory_temperature_c"),
    Renamed("DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_GPU_TEMP_CELSIUS", 64, 1, "temperature_c"),
    Renamed("DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_BOARD_POWER_WATTS", 655.5, 1, "power_w"),
    Renamed("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL", 5e9, 1e-3),
    Renamed("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "DCGM_FI_DEV_PCIE_REPLAY_TOTAL", 0),
    Renamed("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_GPU_UTIL_RATIO", 0.97, PERCENT, "util"),
    Renamed("DCGM_FI_DEV_MEM_COPY_UTIL", "DCGM_FI_DEV_MEMORY_UTIL_RATIO", 0.42, PERCENT),
    Renamed("DCGM_FI_DEV_ENC_UTIL", "DCGM_FI_DEV_ENC_UTIL_RATIO", 0, PERCENT),
    Renamed("DCGM_FI_DEV_DEC_UTIL", "DCGM_FI_DEV_DEC_UTIL_RATIO", 0, PERCENT),
    Renamed("DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_XID_ERROR", 94, 1, "xid"),
    Renamed("DCGM_FI_DEV_FB_FREE", "DCGM_FI_DEV_FB_FREE_BYTES", 10000 * MIB, MIB, "memory_free_bytes"),
    Renamed("DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_USED_BYTES", 70000 * MIB, MIB, "memory_used_bytes"),
    Renamed("DCGM_FI_DEV_FB_RESERVED", "DCGM_FI_DEV_FB_RESERVED_BYTES", 600 * MIB, MIB, "memory_reserved_bytes"),
    Renamed("DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", "DCGM_FI_DEV_NVLINK_THROUGHPUT_BYTES_PER_SECOND", 1.024e9, 1.024e6),
    Renamed("DCGM_FI_DEV_VGPU_LICENSE_STATUS", "DCGM_FI_DEV_VGPU_LICENSE_STATUS", 0),
    Renamed("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", "DCGM_FI_DEV_ROW_REMAP_UNCORRECTABLE_TOTAL", 0),
    Renamed("DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS", "DCGM_FI_DEV_ROW_REMAP_CORRECTABLE_TOTAL", 0),
    Renamed("DCGM_FI_DEV_ROW_REMAP_FAILURE", "DCGM_FI_DEV_ROW_REMAP_FAILED", 1, 1, "rows_remap_failed"),
    Renamed("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO", 0.96, 1, "gr_active"),
    Renamed("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "DCGM_FI_PROF_TENSOR_UTIL_RATIO", 0.45, 1, "tensor_active"),
    Renamed("DCGM_FI_PROF_DRAM_ACTIVE", "DCGM_FI_PROF_DRAM_UTIL_RATIO", 0.6),
    Renamed("DCGM_FI_PROF_PCIE_TX_BYTES", "DCGM_FI_PROF_PCIE_TX_BYTES", 2e9),
    Renamed("DCGM_FI_PROF_PCIE_RX_BYTES", "DCGM_FI_PROF_PCIE_RX_BYTES", 3e9),
)
# Those that a site adds to its counters file.
ADDED = (
    Renamed("DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_SM_UTIL_RATIO", 0.88, 1, "sm_active"),
    Renamed("DCGM_FI_DEV_POWER_MGMT_LIMIT", "DCGM_FI_DEV_BOARD_POWER_LIMIT_REQUESTED_WATTS", 700, 1, "power_limit_w"),
    Renamed("DCGM_FI_DEV_ENFORCED_POWER_LIMIT", "DCGM_FI_DEV_BOARD_POWER_LIMIT_ENFORCED_WATTS", 700, 1,
            "power_limit_w"),
    Renamed("DCGM_FI_DEV_THERMAL_VIOLATION", "DCGM_FI_DEV_GPU_THERMAL_THROTTLE_SECONDS_TOTAL", 3.0, 1e-9,
            "thermal_violation"),
    Renamed("DCGM_FI_DEV_POWER_VIOLATION", "DCGM_FI_DEV_GPU_POWER_THROTTLE_SECONDS_TOTAL", 2.0, 1e-9,
            "power_violation"),
)


def values(*, new: bool) -> dict[str, float]:
    """What the page of one GPU says."""
    own = {one.new if new else one.old: one.value if new else one.value / one.unit for one in METRICS}
    return own | ({"DCGM_FI_DEV_FB_CAPACITY_BYTES": 81559 * MIB} if new else {})


def page(node: str, *, new: bool, gpus: int = 8, job: str = "4711", **changed: float) -> bytes:
    """The whole page; ``changed`` are values of metrics that it has otherwise."""
    host, driver = ("hostname", "DCGM_FI_SYSTEM_DRIVER_VERSION") if new else ("Hostname", "DCGM_FI_DRIVER_VERSION")
    labels = [f'gpu="{i}",UUID="GPU-{node}-{i}",pci_bus_id="00000000:{i + 1:02x}:00.0",device="nvidia{i}",'
              f'modelName="NVIDIA H100 80GB HBM3",{host}="{node}",{driver}="580.65.06",hpc_job="{job}"'
              for i in range(gpus)]
    return "".join(f"# HELP {name} A metric.\n# TYPE {name} gauge\n"
                   + "".join(f"{name}{{{own}}} {value!r}\n" for own in labels)
                   for name, value in (values(new=new) | changed).items()).encode()
