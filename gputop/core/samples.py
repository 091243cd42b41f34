"""One sample of the node, as immutable values. Sources make these; everything else reads them.

Every figure is a :class:`Reading`: a value with unit and source, or the reason why there is none. They are structs of
msgspec: a sample has hundreds of values, and a frozen dataclass takes ten times as long to make.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct, field
from msgspec.structs import force_setattr

from gputop.core import metrics

MAX_GPUS = 1024  # GPUs of a node in a recording or snapshot; each has a history
LAST_TIME_S = 253_402_300_799.0  # the year 9999; localtime takes no more
UnixTime = Annotated[float, Meta(ge=0, le=LAST_TIME_S)]


class Reading(Struct, frozen=True):
    """A measured value, or why there is none: ``value`` and ``reason`` are never both set.

    ``source`` is what was asked ("GPM", "NVML", "psutil", "simulated"), None: not known; ``coarse`` marks
    a substitute that measures less than its name suggests. A number that is not finite is no value.
    """

    value: int | float | None
    unit: str
    source: str | None = None
    reason: str | None = None
    coarse: bool = False

    def __post_init__(self) -> None:
        value = self.value
        if (value is None) == (self.reason is None):
            raise ValueError(f"a reading has a value or a reason, not {value!r} and {self.reason!r}")
        if isinstance(value, float) and not math.isfinite(value):
            force_setattr(self, "value", None)
            force_setattr(self, "reason", f"{value} is not a measurement")

    @classmethod
    def missing(cls, unit: str, reason: str, source: str | None = None) -> Reading:
        return cls(None, unit, source, reason)


def reading_of(metric_id: str, value: float, source: str) -> Reading:
    return Reading(float(value), metrics.UNITS[metric_id], source)


def missing_of(metric_id: str, reason: str, source: str | None = None) -> Reading:
    return Reading.missing(metrics.UNITS[metric_id], reason, source)


class GpuInfo(Struct, frozen=True):
    """Facts about a GPU that do not change while gputop runs. ``index`` is NVML's; devices are keyed by ``uuid``.

    A MIG instance is a device of its own: it has its GPU's ``index``, ``mig`` is its number
    there and ``uuid`` begins with "MIG-".
    """

    index: int
    uuid: str
    name: str
    pci_bus_id: str = ""
    pcie_gen_max: int | None = None
    pcie_width_max: int | None = None
    numa_node: int | None = None  # the host memory next to it; None: not known, or the node has only one
    mig: int | None = None
    mig_mode: bool = False  # a whole GPU that is divided into MIG instances

    @property
    def label(self) -> str:
        """The device's name on screen: "3"; for MIG instance 1 of GPU 3 "3:1"."""
        return str(self.index) if self.mig is None else f"{self.index}:{self.mig}"


FULL_CORE_RATIO = 0.95  # a core this busy limits its thread, such as a Python process that launches kernels
UNIFIED_MEMORY = "host memory, which this GPU shares with the CPUs"  # source of its readings
# Reasons for values of a process that cannot be read.
ENDED = "the process has ended"
ZOMBIE = "zombie: the process has ended, but its parent has not reaped it"

OK = "ok"
LOST = "lost"
NOT_RESPONDING = "not responding"
FAILED = "failed"  # the GPU could not be opened or read; the message says why


class GpuProcess(Struct, frozen=True):
    """A process as one GPU sees it. ``memory_bytes`` counts on that GPU only."""

    pid: int
    kind: str  # "C" compute, "G" graphics, "C+G"
    mig: int | None  # the MIG instance it is on
    memory_bytes: Reading
    sm_ratio: Reading  # share of the GPU's SM time over the driver's last sampling window


class XidEvent(Struct, frozen=True):
    """A fault that the driver reported while gputop watched. ``xid`` is NVIDIA's number for it."""

    time_s: UnixTime
    xid: int


# Clock event (throttle) reasons by NVML's bits (nvml.h, nvmlClocksEventReason*): what they are called in a sample.
CLOCK_EVENTS = {
    0x001: "idle", 0x002: "application clocks", 0x004: "power cap", 0x008: "hw slowdown", 0x010: "sync boost",
    0x020: "thermal", 0x040: "hw thermal", 0x080: "power brake", 0x100: "display clocks",
}


class GpuSample(Struct, frozen=True):
    """One sample of one GPU. A metric that was not read is missing, never 0."""

    info: GpuInfo
    readings: Mapping[str, Reading]
    processes: tuple[GpuProcess, ...] = ()
    processes_reason: str | None = None  # why the process list could not be read
    clock_event_reasons: tuple[str, ...] = ()  # active throttle reasons: "power cap", "thermal", …
    clock_events_reason: str | None = None  # why the throttle reasons could not be read
    state: str = OK
    message: str = ""  # with a state other than ok: the cause and the fix
    xids: tuple[XidEvent, ...] = ()  # all since gputop started, oldest first; the last few of a flood
    xids_reason: str | None = None  # why the driver does not report them

    @property
    def clock_event_bits(self) -> int | None:
        """The clock event reasons as NVML's bits; None where they could not be read."""
        if self.clock_events_reason is not None:
            return None
        return sum(bit for bit, name in CLOCK_EVENTS.items() if name in self.clock_event_reasons)

    @property
    def trouble(self) -> str:
        """State of the GPU without its number: the message, after the name of the state unless it says the state."""
        message = self.message.removeprefix(f"GPU {self.info.label} ")
        return message if message != self.message else f"{self.state}: {message}".rstrip(": ")

    def __getitem__(self, metric_id: str) -> Reading:
        reading = self.readings.get(metric_id)
        if reading is not None:
            return reading
        if metric_id == metrics.TENSOR_FLOP_UTIL:
            return self._tensor_flop_util()
        return missing_of(metric_id, self.message or "not sampled")

    def _tensor_flop_util(self) -> Reading:
        """An estimate of the same within 2 points of MFU on regular matrix products (arXiv 2605.20799)."""
        parts = [self[metric] for metric in metrics.TENSOR_FLOP_PARTS]
        for metric, part in zip(metrics.TENSOR_FLOP_PARTS, parts, strict=True):
            if not part.value and (part.reason is not None or metric == metrics.TENSOR_FLOP_PARTS[-1]):
                reason = part.reason if part.reason == self.message else (
                    f"{metrics.GPU_METRICS[metric].label}: {part.reason or 'the driver gives 0'}")
                return Reading.missing(metrics.RATIO, reason or "", part.source)
        active, clock, highest = (part.value or 0.0 for part in parts)
        sources = ", ".join(dict.fromkeys(part.source for part in parts if part.source))
        return Reading(min(1.0, active * clock / highest), metrics.RATIO, f"estimate from {sources}")

    def activity(self) -> tuple[str, Reading]:
        """The best measure of how busy the SMs are: ``sm_active``, else coarse ``gpu_util``. Returns the metric's id
        with its reading, so that a view can label the coarse one."""
        fine = self["sm_active"]
        if fine.value is not None:
            return "sm_active", fine
        coarse = self["gpu_util"]
        return ("gpu_util", coarse) if coarse.value is not None else ("sm_active", fine)


class CgroupSample(Struct, frozen=True):
    """Limits of a process's control groups (a container, a batch job), and how much of them is used.

    A limit that does not exist is missing, with the reason :data:`NO_LIMIT`.
    """

    name: str  # runtime and id of the container or job, or else the group's path
    readings: Mapping[str, Reading]

    def __getitem__(self, metric_id: str) -> Reading:
        return self.readings.get(metric_id) or missing_of(metric_id, "not sampled")


NO_LIMIT = "no limit"


class PodContainer(Struct, frozen=True):
    """The container of a Kubernetes pod that a process runs in.

    UID and id are the kernel's; the names are the kubelet's. All names are None where they are not known.
    """

    pod_uid: str
    container_id: str
    pod: str | None = None
    namespace: str | None = None
    container: str | None = None
    reason: str | None = None  # why there are no names

    @property
    def label(self) -> str:
        """The pod and its container in a line."""
        if self.pod is None:
            return f"pod UID {self.pod_uid}"
        return f"pod {self.namespace}/{self.pod}, container {self.container}"


class ProcessSample(Struct, frozen=True):
    """A process that holds a GPU, as the host sees it, joined with what its GPUs say.

    ``pid`` is the host's, which NVML lists; in a container the process has another one, ``local_pid``.
    """

    pid: int
    user: str | None
    command: str | None  # None: it vanished or may not be read; see ``reason``. With a reason: that of one that ended
    cpu_cores: Reading  # cores in use: 1.0 is one core full
    rss_bytes: Reading
    threads: int | None = None
    gpus: Mapping[int, GpuProcess] = field(default_factory=dict)  # by GPU index
    reason: str | None = None
    parent_pid: int | None = None  # None: not known
    started_s: UnixTime | None = None  # None: not known
    local_pid: int | None = None  # its PID where gputop runs, if that differs
    container: str | None = None  # the container it runs in: runtime and short id; None: none, or not known
    cuda_visible_devices: str | None = None  # of its environment; None: not set or not readable
    # From and to storage, child processes included, page cache hits excluded.
    io_read_bytes_per_s: Reading = field(default_factory=lambda: Reading.missing(metrics.BYTES_PER_S, "not sampled"))
    io_write_bytes_per_s: Reading = field(default_factory=lambda: Reading.missing(metrics.BYTES_PER_S, "not sampled"))
    container_pid: int | None = None  # its PID inside its container, if that differs
    note: str | None = None  # how the process was matched with the driver's PID, where that was inferred
    reasons: Mapping[str, str] = field(default_factory=dict)  # by field: why it is None although a value may exist
    cuda_device_order: str | None = None  # of its environment; the reason is that of cuda_visible_devices
    cgroup: CgroupSample | None = None  # None: not known, and the reason is that of ``container``
    numa_nodes: tuple[int, ...] = ()  # to whose CPUs it is bound; empty: to none, or not known
    framework: str = ""  # see gputop.core.framework; empty: none of those, or not known
    kubernetes: PodContainer | None = None  # None: in no pod, or not known, and the reason is that of ``container``

    @property
    def gpu_memory_bytes(self) -> float | None:
        """GPU memory over all GPUs; None where no GPU reports it."""
        reported = [p.memory_bytes.value for p in self.gpus.values() if p.memory_bytes.value is not None]
        return sum(reported) if reported else None

    @property
    def mean_sm_ratio(self) -> float | None:
        """Mean SM share over the GPUs it holds; None where no GPU reports it."""
        reported = [p.sm_ratio.value for p in self.gpus.values() if p.sm_ratio.value is not None]
        return sum(reported) / len(reported) if reported else None

    @property
    def io_bytes_per_s(self) -> float | None:
        """Storage read and written together; None where either is not known."""
        read, written = self.io_read_bytes_per_s.value, self.io_write_bytes_per_s.value
        return None if read is None or written is None else read + written


class HostProcess(Struct, frozen=True):
    """A process that uses much of the node's CPU or memory, with or without a GPU; children not counted."""

    pid: int
    user: str | None
    command: str | None  # None: it vanished or may not be read
    cpu_cores: Reading  # since the scan of the process table before
    rss_bytes: Reading


PORT_ACTIVE = "ACTIVE"  # the state of a port whose link works, as the kernel spells it


class AdapterSample(Struct, frozen=True):
    """A port of an RDMA adapter (InfiniBand or RoCE). Its traffic goes past the kernel: no network card shows it."""

    name: str  # "mlx5_0"; of an adapter with several ports "mlx5_0:2"
    state: str  # PORT_ACTIVE, "DOWN", "INIT", …; "" where the kernel does not tell it
    link_layer: str  # "InfiniBand", "Ethernet"
    numa_node: int | None  # None: not known, or the node has only one
    readings: Mapping[str, Reading]

    def __getitem__(self, metric_id: str) -> Reading:
        return self.readings.get(metric_id) or missing_of(metric_id, "not sampled")

    @property
    def load_ratio(self) -> float | None:
        """The fuller direction's traffic, of what the link carries; None where that is not known."""
        link = self["rdma_max_bytes_per_s"].value
        reported = [v for m in ("rdma_rx_bytes_per_s", "rdma_tx_bytes_per_s") if (v := self[m].value) is not None]
        return max(reported) / link if reported and link else None


class HostSample(Struct, frozen=True):
    """One sample of the host. ``cpu_count`` is the number of logical cores online."""

    hostname: str
    readings: Mapping[str, Reading]
    cpu_count: int | None = None
    core_ratios: tuple[float, ...] = ()  # busy share of each logical core, in their order; empty: not known
    cpu_limit_cores: float | None = None  # what gputop's container or cpuset grants; None: all, or not known
    cgroup: CgroupSample | None = None  # gputop's own; None: not sampled
    # Those with most CPU and those with most memory, in no order; refreshed every few seconds.
    top_processes: tuple[HostProcess, ...] = ()
    top_reason: str | None = "not sampled"  # why there are none
    adapters: tuple[AdapterSample, ...] = ()  # its RDMA ports, by name

    @classmethod
    def missing(cls, hostname: str, reason: str) -> HostSample:
        return cls(hostname, {m.id: Reading.missing(m.unit, reason) for m in metrics.HOST_METRICS.values()})

    @property
    def full_cores(self) -> int:
        """Number of cores that are busy at least :data:`FULL_CORE_RATIO` of the time."""
        return sum(core >= FULL_CORE_RATIO for core in self.core_ratios)

    def __getitem__(self, metric_id: str) -> Reading:
        return self.readings.get(metric_id) or missing_of(metric_id, "not sampled")


class NodeSample(Struct, frozen=True):
    """One tick: all GPUs, the host and the processes that hold GPUs.

    ``time_s`` is Unix time; ``interval_s`` the time since the tick before (None at the first).
    ``source`` is the source's label for the header ("NVML + GPM, driver 580.65").
    ``gpus_present`` is how many GPUs the node has, watched or not; None: ``gpus`` are all.
    """

    time_s: UnixTime
    gpus: Annotated[tuple[GpuSample, ...], Meta(max_length=MAX_GPUS)]
    host: HostSample
    processes: tuple[ProcessSample, ...] = ()
    interval_s: float | None = None
    source: str = ""
    simulated: bool = False
    own_cpu_ratio: float | None = None  # what gputop itself uses, in cores: a mean of some seconds
    gpus_present: int | None = None

    @property
    def gpus_unwatched(self) -> int:
        """Number of the node's GPUs that ``--gpus`` left out."""
        return 0 if self.gpus_present is None else max(0, self.gpus_present - len(self.gpus))

    @property
    def busy_without_gpu(self) -> list[HostProcess]:
        """The processes that use a core or more and hold no GPU, three at most, busiest first."""
        holders = {p.local_pid or p.pid for p in self.processes}
        busy = [(cores, p) for p in self.host.top_processes
                if p.pid not in holders and (cores := p.cpu_cores.value or 0.0) >= 1.0]
        return [p for _, p in sorted(busy, key=lambda pair: -pair[0])[:3]]
