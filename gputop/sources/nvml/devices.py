"""Opens GPUs, each on a thread of its own, so that one that hangs delays no other; holds the source's probes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from gputop.core.samples import GpuInfo, GpuSample, XidEvent
from gputop.sources.nvml import status
from gputop.sources.nvml.gpu import NvmlGpu
from gputop.sources.nvml.mig import MigInstance, divided_reason, in_mig_mode, mig_devices
from gputop.sources.nvml.xid_watch import Log, XidWatch
from gputop.sources.selection import placeholder_uuid
from gputop.text.units import printable

_T = TypeVar("_T")
_OPENED_TOO_LATE = "the GPU started responding after gputop had started. Restart gputop to see the GPU's MIG instances"


class PendingDevice:
    """A GPU that is being opened. ``done`` is set once ``gpu`` or ``error`` is set."""

    def __init__(self, nvml: Any, index: int, clock: Callable[[], float], wall_clock: Callable[[], float],
                 watch: XidWatch, root: Path = Path("/")) -> None:
        self.index = index
        self.done = threading.Event()
        self.opened_too_late = False  # after the deadline: its MIG instances are not shown
        self.gpu: NvmlGpu | None = None
        self.instances: tuple[MigInstance, ...] = ()
        self.error: Exception | None = None
        self._nvml = nvml
        self._clock = clock
        self._wall_clock = wall_clock
        self._watch = watch
        self._root = root

    def start(self) -> None:
        status.start_nvml_thread(self._nvml, f"open{self.index}", self._run)

    @property
    def probes(self) -> tuple[NvmlGpu | MigInstance, ...]:
        """The GPU, then its MIG instances; none before the GPU has answered."""
        return (self.gpu, *self.instances) if self.done.is_set() and self.gpu is not None else ()

    @property
    def infos(self) -> list[GpuInfo]:
        """The infos of the GPU and its instances; a placeholder before the GPU has answered."""
        return [probe.info for probe in self.probes] or [_placeholder_info(self.index)]

    def _run(self) -> None:
        try:
            self._open()
        except Exception as error:  # noqa: BLE001  thread boundary: read() raises it in the probe's own thread
            self.error = error
        finally:
            self.done.set()

    def _open(self) -> None:
        nvml, index = self._nvml, self.index
        info = _placeholder_info(index)
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            info = replace(info, uuid=status.nvml_text(nvml.nvmlDeviceGetUUID, handle))
            info = self._describe(handle, info)
            gpu, instances = self._make(handle, info)
            self._watch.add(info.uuid, lambda: gpu.handle)
            self.gpu, self.instances = gpu, instances
        except nvml.NVMLError as error:
            self.gpu = NvmlGpu.unavailable(nvml, info, error.value)

    def _describe(self, handle: Any, info: GpuInfo) -> GpuInfo:
        nvml, ask = self._nvml, self._ask
        bus_id = ask("", lambda: printable(nvml.nvmlDeviceGetPciInfo(handle).busId))
        return replace(
            info, name=ask(info.name, lambda: status.nvml_text(nvml.nvmlDeviceGetName, handle)), pci_bus_id=bus_id,
            pcie_gen_max=ask(None, lambda: _plausible("pcie_gen", nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))),
            pcie_width_max=ask(None, lambda: _plausible("pcie_width", nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))),
            numa_node=numa_node(bus_id, self._root), mig_mode=in_mig_mode(nvml, handle))

    def _ask(self, otherwise: _T, call: Callable[[], _T]) -> _T:
        """One fact about a GPU, or ``otherwise`` where it is refused. A lost GPU raises NVMLError."""
        try:
            return call()
        except self._nvml.NVMLError as error:
            status.raise_if_gone(error)
            return otherwise
        except UnicodeDecodeError:  # nvidia-ml-py decodes the fields of a structure by itself
            return otherwise

    def _make(self, handle: Any, info: GpuInfo) -> tuple[NvmlGpu, tuple[MigInstance, ...]]:
        nvml, clock, wall_clock = self._nvml, self._clock, self._wall_clock
        if not info.mig_mode:
            return NvmlGpu(nvml, handle, info, clock, wall_clock), ()
        devices = mig_devices(nvml, handle, info)
        reason = _OPENED_TOO_LATE if self.opened_too_late else divided_reason([device.info.label for device in devices])
        gpu = NvmlGpu(nvml, handle, info, clock, wall_clock, reason)
        return gpu, tuple(MigInstance(nvml, handle, device, clock, wall_clock) for device in devices)


class Device:
    """Satisfies :class:`gputop.sources.base.GpuProbe`: a :class:`PendingDevice` or an instance of it, with Xid events.

    Until the GPU is open :meth:`read` blocks, as a call in the driver does.
    """

    def __init__(self, pending: PendingDevice, index: int, watch: XidWatch) -> None:
        self._pending = pending
        self._place = index
        self._watch = watch
        self._log: Log = ()
        self._xids: tuple[XidEvent, ...] = ()

    @property
    def info(self) -> GpuInfo:
        return self._pending.infos[self._place]

    @property
    def probe(self) -> NvmlGpu | MigInstance | None:
        """The probe of the opened device; None before the GPU is open."""
        probes = self._pending.probes
        return probes[self._place] if probes else None

    @property
    def has_gpm(self) -> bool:
        probe = self.probe
        return probe is not None and probe.has_gpm

    def read(self, now_s: float) -> GpuSample:
        self._pending.done.wait()
        probe = self.probe
        if probe is None:
            raise self._pending.error or RuntimeError("the GPU was not opened")
        sample = probe.read(now_s)
        xids, reason = self.xids()
        return replace(sample, xids=xids, xids_reason=reason) if xids or reason else sample

    def xids(self) -> tuple[tuple[XidEvent, ...], str | None]:
        """The Xids so far, or why they are not known. From any thread, also while :meth:`read` hangs."""
        probe = self.probe
        uuid = self._pending.infos[0].uuid
        log = self._watch.log(uuid)
        if log is not self._log:
            # An instance gets its own events and those of the whole GPU; the GPU gets all events.
            mine = (None, probe.gpu_instance) if isinstance(probe, MigInstance) else None
            self._xids = tuple(event for event, instance in log if mine is None or instance in mine)
            self._log = log
        return self._xids, self._watch.reason(uuid)

    def close(self) -> None:
        probe = self.probe
        if probe is not None:
            probe.close()


def numa_node(bus_id: str, root: Path = Path("/")) -> int | None:
    """The NUMA node next to a PCI device ("00000000:18:00.0"); None: the kernel names none."""
    domain, _, rest = bus_id.partition(":")
    with contextlib.suppress(OSError, ValueError):
        path = root / f"sys/bus/pci/devices/{int(domain, 16):04x}:{rest.lower()}/numa_node"
        node = int(path.read_text())
        return node if node >= 0 else None
    return None


def _plausible(metric: str, number: int) -> int | None:
    return number if status.implausible_reason(metric, number) is None else None


def _placeholder_info(index: int) -> GpuInfo:
    return GpuInfo(index, placeholder_uuid(index), f"GPU {index}")
