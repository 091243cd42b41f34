"""MIG instances: the parts of a divided GPU, each a device of its own.

The board's figures (power, temperature, clocks, PCIe) belong to the GPU; an instance has
its memory, its processes and, on Hopper and newer, its activity through GPM.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from gputop.core.metrics import GPU_METRICS, RATIO, TENSOR_FLOP_UTIL
from gputop.core.samples import FAILED, LOST, GpuInfo, GpuSample, Reading, missing_of
from gputop.sources.nvml import status
from gputop.sources.nvml.fields import FIELDS, FieldReader
from gputop.sources.nvml.gpm import GPM_ONLY_METRICS, Gpm, WithGpm, unavailable_reason
from gputop.sources.nvml.processes import ProcessReader

_MAX_INSTANCES = 64  # per GPU: today's have 7; a sick driver reported 4294967295
CHECK_PERIOD_S = 10.0  # an instance is checked this often, in case its calls do not fail once it is destroyed
# What NVML answers where no instance has the number.
_NO_SUCH_INSTANCE = frozenset((status.NOT_FOUND, status.INVALID_ARGUMENT, status.NOT_SUPPORTED))
_MEMORY_FIELDS = tuple(field for field in FIELDS if "memory_used_bytes" in field.metrics)
_MEMORY = frozenset(metric for field in _MEMORY_FIELDS for metric in field.metrics)
_ACTIVITY = tuple(metric for metric in GPM_ONLY_METRICS if GPU_METRICS[metric].unit == RATIO)


class MigDevice(Struct, frozen=True):
    """An instance as NVML shows it. ``gpu_instance`` is the id that GPM and events know it by."""

    handle: Any
    gpu_instance: int
    info: GpuInfo


def in_mig_mode(nvml: Any, handle: Any) -> bool:
    """Return whether the GPU is divided. A lost GPU raises NVMLError."""
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE)
    except nvml.NVMLError as error:
        status.raise_if_gone(error)
        return False  # GPUs without MIG refuse the question


def mig_devices(nvml: Any, handle: Any, gpu: GpuInfo) -> list[MigDevice]:
    """The instances of a GPU that are visible to this process: in a container only its own.

    A lost GPU raises NVMLError.
    """
    try:
        count = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except nvml.NVMLError as error:
        status.raise_if_gone(error)
        return []
    devices = []
    for number in range(min(count, _MAX_INSTANCES)):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            uuid = status.nvml_text(nvml.nvmlDeviceGetUUID, part)
            gpu_instance = nvml.nvmlDeviceGetGpuInstanceId(part)
            name = _instance_name(nvml, part, gpu)
        except nvml.NVMLError as error:
            status.raise_if_gone(error)
            continue  # an unused number, or an instance that is not visible here
        devices.append(MigDevice(part, gpu_instance, GpuInfo(gpu.index, uuid, name, gpu.pci_bus_id, mig=number)))
    return devices


def _instance_name(nvml: Any, handle: Any, gpu: GpuInfo) -> str:
    """The driver's name, which has the profile in it ("… MIG 1g.10gb"), or else one of the same form."""
    name = status.nvml_text(nvml.nvmlDeviceGetName, handle)
    if " MIG " in name:
        return name
    about = nvml.nvmlDeviceGetAttributes_v2(handle)
    slices, parts = about.gpuInstanceSliceCount, about.computeInstanceSliceCount
    profile = f"{slices}g.{math.ceil(about.memorySizeMB / 1024)}gb"
    return f"{gpu.name} MIG {profile if parts == slices else f'{parts}c.{profile}'}"


def divided_reason(labels: Sequence[str]) -> str:
    """Reason why the activity of a GPU in MIG mode is not its own."""
    if labels:
        return f"partitioned into MIG instances: see {', '.join(labels)}"
    return "in MIG mode, but no MIG instance exists or is visible to this user (`nvidia-smi mig -lgi`)"


class MigInstance(WithGpm):
    """Satisfies :class:`gputop.sources.base.GpuProbe`. Everything of one instance, read by one thread."""

    def __init__(self, nvml: Any, gpu_handle: Any, device: MigDevice, clock: Callable[[], float],
                 wall_clock: Callable[[], float]) -> None:
        """A lost GPU raises NVMLError."""
        self.info = info = device.info
        self._nvml = nvml
        self._gpu_handle = gpu_handle
        self._device = device
        self._clock = clock
        self._check_due_s = clock() + CHECK_PERIOD_S
        self._final_sample: GpuSample | None = None
        self._board_reason = f"measured for the whole GPU: see GPU {info.index}"
        self._fixed_readings = {
            metric: missing_of(metric, self._board_reason, "NVML") for metric in GPU_METRICS
            if metric not in _ACTIVITY and metric not in _MEMORY and metric != TENSOR_FLOP_UTIL}
        self._fixed_readings["gpu_util"] = missing_of(
            "gpu_util", "NVML reports no utilization for MIG instances", "NVML")
        self._memory = FieldReader(nvml, device.handle, clock(), device.gpu_instance, True, _MEMORY_FIELDS)
        self._no_memory: Reading | None = None  # what the last check of the instance was for
        self._processes = ProcessReader(nvml, device.handle, clock, wall_clock, device.gpu_instance, info.mig)
        self._gpm: Gpm | None = None
        reason = unavailable_reason(nvml, gpu_handle)
        if reason is None:
            try:
                self._gpm = Gpm(nvml, gpu_handle, clock, device.gpu_instance)
            except nvml.NVMLError as error:
                reason = status.reason(error.value, "nvmlGpmSampleAlloc")
        if reason is not None:
            self._disable_gpm(reason)

    @property
    def gpu_instance(self) -> int:
        """NVML's id of the GPU instance, which events name."""
        return self._device.gpu_instance

    def read(self, now_s: float) -> GpuSample:
        if self._final_sample is not None:
            return self._final_sample
        try:
            if self._clock() >= self._check_due_s:
                self._check()
            return self._final_sample or self._sample()
        except self._nvml.NVMLError as error:
            return self._mark_unusable(LOST, status.lost_message(error.value, self.info.index) + status.RESTART)

    def _sample(self) -> GpuSample:
        readings = self._fixed_readings | self._memory.read(self._clock())
        used = readings["memory_used_bytes"]
        if used.value is None and used is not self._no_memory:
            self._no_memory = used
            self._check()
        if self._gpm is not None and self._final_sample is None:
            self._add_activity(readings)
        if self._final_sample is not None:
            return self._final_sample
        processes, reason = self._processes.read()
        return GpuSample(self.info, readings, processes, reason, (), self._board_reason)

    def _mark_unusable(self, state: str, message: str) -> GpuSample:
        self._gpu_handle = self._gpm = None
        self._final_sample = GpuSample(
            self.info, {}, processes_reason=message, clock_events_reason=message, state=state, message=message)
        return self._final_sample

    def _check(self) -> None:
        """Check whether the instance still exists; end the probe where it does not."""
        nvml, info = self._nvml, self.info
        self._check_due_s = self._clock() + CHECK_PERIOD_S
        try:
            handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(self._gpu_handle, info.mig)
            if status.nvml_text(nvml.nvmlDeviceGetUUID, handle) == info.uuid:
                return
        except nvml.NVMLError as error:
            status.raise_if_gone(error)
            if error.value not in _NO_SUCH_INSTANCE:
                return  # a transient fault says nothing about the instance
        self._mark_unusable(FAILED, f"MIG instance {info.label} no longer exists: it was destroyed, or GPU "
                                    f"{info.index} was repartitioned. Restart gputop to see the current instances.")

    # -- what is read ----------------------------------------------------------------------------

    def _add_activity(self, readings: dict[str, Reading]) -> None:
        nvml, gpm = self._nvml, self._gpm
        assert gpm is not None
        try:
            activity = gpm.read()
        except nvml.NVMLError as error:
            status.raise_if_gone(error)
            self._check()
            if self._final_sample is None:
                gpm.close()
                self._disable_gpm(status.reason(error.value, "nvmlGpmMigSampleGet"))
                readings.update(self._fixed_readings)
            return
        # Traffic is counted for the whole board; for an instance GPM only refuses it.
        readings.update((metric, activity[metric]) for metric in _ACTIVITY)

    def _disable_gpm(self, reason: str) -> None:
        self._gpm = None
        for metric in _ACTIVITY:
            self._fixed_readings[metric] = missing_of(metric, reason, "GPM")
