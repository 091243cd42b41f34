"""The metrics gputop knows, each defined once: id, label, unit and how to scale it.

Sources fill these ids, history stores them, views draw them. Ratios are 0-1; bytes are
bytes (never MiB); rates are per second.
"""

from __future__ import annotations

from msgspec import Struct

RATIO = "ratio"
BYTES = "bytes"
BYTES_PER_S = "bytes/s"
WATTS = "W"
CELSIUS = "°C"
HERTZ = "Hz"
COUNT = "count"

LEVELS = 8  # of full scale, each with its share of the time: what a history keeps of a lane, and pictures show


class Fault(Struct, frozen=True):
    """Words for a metric that counts faults of the hardware and is not zero."""

    event: str = ""  # what happened when it rises; empty where another metric counts the same event
    flag: str = ""  # a word that marks the GPU; empty where the fault is over: the GPU is sound
    state: str = ""  # what a metric of 0 or 1 means


class Metric(Struct, frozen=True):
    """One measured quantity of a GPU, of the host, of a control group or of an RDMA adapter.

    ``full_scale`` names the metric that is this one's 100% (memory used of memory total), or is a number in the
    metric's own unit, or None where the largest value in view is the scale.
    """

    id: str
    label: str
    unit: str
    full_scale: str | float | None
    help: str
    lane: bool = False  # worth a spectrogram lane and history
    fault: Fault | None = None


_GPU = (
    Metric("sm_active", "SM active", RATIO, 1.0,
           "share of time, averaged over all SMs, in which at least one warp was resident (GPM, DCGM)", True),
    Metric("gpu_util", "Util (coarse)", RATIO, 1.0,
           "share of time in which any kernel ran; does not show how much of the GPU was used", True),
    Metric("gr_active", "GR active", RATIO, 1.0, "share of time in which the graphics/compute engine was active"),
    Metric("sm_occupancy", "SM occupancy", RATIO, 1.0, "resident warps relative to the maximum that an SM can hold"),
    Metric("tensor_active", "Tensor active", RATIO, 1.0, "share of cycles in which the tensor pipe was active", True),
    Metric("tensor_flop_util", "Tensor FLOPs (est.)", RATIO, 1.0,
           "estimate of the tensor cores' FLOPs relative to their peak at the highest SM clock (OFU): tensor active × "
           "SM clock / SM clock max; excludes FLOPs outside of tensor cores", True),
    Metric("dram_active", "DRAM active", RATIO, 1.0, "share of cycles in which device memory moved data", True),
    Metric("fp64_active", "FP64 active", RATIO, 1.0, "share of cycles in which the FP64 pipe was active"),
    Metric("fp32_active", "FP32 active", RATIO, 1.0, "share of cycles in which the FP32 pipe was active"),
    Metric("fp16_active", "FP16 active", RATIO, 1.0,
           "share of cycles in which the FP16 pipe, excluding tensor cores, was active"),
    Metric("memory_used_bytes", "Memory used", BYTES, "memory_total_bytes",
           "device memory held by processes; TensorFlow reserves nearly all of it by default", True),
    Metric("memory_reserved_bytes", "Memory reserved", BYTES, "memory_total_bytes",
           "device memory reserved by the driver"),
    Metric("memory_total_bytes", "Memory", BYTES, None, "device memory installed"),
    Metric("pcie_rx_bytes_per_s", "PCIe RX", BYTES_PER_S, "pcie_max_bytes_per_s", "host to device", True),
    Metric("pcie_tx_bytes_per_s", "PCIe TX", BYTES_PER_S, "pcie_max_bytes_per_s", "device to host", True),
    Metric("pcie_max_bytes_per_s", "PCIe link", BYTES_PER_S, None,
           "raw rate of the link as currently trained: generation and width"),
    Metric("pcie_gen", "PCIe generation", COUNT, None, "current generation of the link (lower when idle)"),
    Metric("pcie_width", "PCIe width", COUNT, None, "current number of lanes of the link"),
    Metric("nvlink_rx_bytes_per_s", "NVLink RX", BYTES_PER_S, None, "received from other GPUs over all links", True),
    Metric("nvlink_tx_bytes_per_s", "NVLink TX", BYTES_PER_S, None, "sent to other GPUs over all links", True),
    Metric("power_w", "Power", WATTS, "power_limit_w", "board power", True),
    Metric("power_limit_w", "Power limit", WATTS, None, "enforced power limit"),
    Metric("power_limit_default_w", "Default limit", WATTS, None, "power limit that the board has by default"),
    Metric("temperature_c", "Temperature", CELSIUS, 100.0, "GPU core temperature", True),
    Metric("temperature_slowdown_c", "Slowdown at", CELSIUS, None,
           "core temperature at which the clocks are reduced"),
    Metric("memory_temperature_c", "Memory temp", CELSIUS, 100.0, "temperature of the device memory"),
    Metric("sm_clock_hz", "SM clock", HERTZ, "sm_clock_max_hz", "streaming multiprocessor clock", True),
    Metric("sm_clock_max_hz", "SM clock max", HERTZ, None, "highest SM clock"),
    Metric("memory_clock_hz", "Memory clock", HERTZ, "memory_clock_max_hz", "device memory clock"),
    Metric("memory_clock_max_hz", "Memory clock max", HERTZ, None, "highest memory clock"),
    Metric("encoder_util", "Encoder", RATIO, 1.0, "share of time in which the video encoder was busy"),
    Metric("decoder_util", "Decoder", RATIO, 1.0, "share of time in which the video or JPEG decoder was busy"),
    Metric("ecc_corrected", "ECC corrected", COUNT, None, "corrected memory errors since the driver was loaded",
           fault=Fault("memory error corrected")),
    Metric("ecc_uncorrected", "ECC uncorrected", COUNT, None,
           "uncorrectable memory errors since the driver was loaded; data was lost",
           fault=Fault("memory error that ECC could not correct", "ECC")),
    Metric("ecc_uncorrected_lifetime", "ECC uncorr. life", COUNT, None,
           "uncorrectable memory errors over the lifetime of the board", fault=Fault()),
    Metric("rows_remapped", "Rows remapped", COUNT, None,
           "rows of device memory replaced by spare rows after errors", fault=Fault("row of memory replaced")),
    Metric("row_remap_pending", "Remap pending", COUNT, None,
           "1: a row will be replaced at the next GPU reset",
           fault=Fault("row of memory waiting to be replaced", "remap",
                       "a row of memory will be replaced at the next reset")),
    Metric("row_remap_failed", "Remap failed", COUNT, None,
           "1: a row could not be replaced: the board is due for service",
           fault=Fault("row of memory could not be replaced", "remap", "a row of memory could not be replaced")),
)

GPU_METRICS: dict[str, Metric] = {m.id: m for m in _GPU}
LANE_METRICS: tuple[str, ...] = tuple(m.id for m in _GPU if m.lane)
TENSOR_FLOP_UTIL = "tensor_flop_util"  # no source gives it: it is the product of the first two over the third
TENSOR_FLOP_PARTS = ("tensor_active", "sm_clock_hz", "sm_clock_max_hz")
FAULTS: dict[str, Fault] = {m.id: m.fault for m in _GPU if m.fault is not None}

_HOST = (
    Metric("cpu_ratio", "CPU", RATIO, 1.0, "busy share of all cores"),
    Metric("iowait_ratio", "I/O wait", RATIO, 1.0, "share of CPU time spent idle with outstanding disk requests"),
    Metric("memory_used_bytes", "RAM used", BYTES, "memory_total_bytes", "host memory in use (total - available)"),
    Metric("memory_total_bytes", "RAM", BYTES, None, "host memory installed"),
    Metric("disk_read_bytes_per_s", "Disk read", BYTES_PER_S, None, "read from all disks"),
    Metric("disk_write_bytes_per_s", "Disk write", BYTES_PER_S, None, "written to all disks"),
    Metric("net_rx_bytes_per_s", "Net in", BYTES_PER_S, None, "received by all network cards"),
    Metric("net_tx_bytes_per_s", "Net out", BYTES_PER_S, None, "sent by all network cards"),
)

HOST_METRICS: dict[str, Metric] = {m.id: m for m in _HOST}

_CGROUP = (
    Metric("cpu_limit_cores", "CPU limit", COUNT, None, "the smallest of the applicable CPU quotas and cpusets"),
    Metric("cpu_used_cores", "CPU used", COUNT, "cpu_limit_cores", "used by all processes under that limit"),
    Metric("cpu_throttled_ratio", "CPU throttled", RATIO, 1.0,
           "share of the scheduler's periods (usually 100 ms) in which the quota ran out and all threads stopped"),
    Metric("memory_limit_bytes", "Memory limit", BYTES, None, "the applicable limit that is closest to being reached"),
    Metric("memory_used_bytes", "Memory used", BYTES, "memory_limit_bytes",
           "memory use under that limit, excluding page cache that can be dropped immediately (inactive_file)"),
    Metric("oom_kills", "OOM kills", COUNT, None,
           "processes that the kernel killed at the limit since the group was created"),
)

CGROUP_METRICS: dict[str, Metric] = {m.id: m for m in _CGROUP}

_ADAPTER = (
    Metric("rdma_rx_bytes_per_s", "RDMA in", BYTES_PER_S, "rdma_max_bytes_per_s", "received by the adapter's port"),
    Metric("rdma_tx_bytes_per_s", "RDMA out", BYTES_PER_S, "rdma_max_bytes_per_s", "sent by the adapter's port"),
    Metric("rdma_max_bytes_per_s", "RDMA link", BYTES_PER_S, None, "current rate of the link, in each direction"),
    Metric("rdma_retransmits", "RDMA retransmits", COUNT, None,
           "retransmissions by the port's connections, after a sequence error or a timeout, since the driver was "
           "loaded", fault=Fault()),
)

ADAPTER_METRICS: dict[str, Metric] = {m.id: m for m in _ADAPTER}
UNITS: dict[str, str] = {m.id: m.unit for m in (*_GPU, *_HOST, *_CGROUP, *_ADAPTER)}  # those of one id have one
