"""Live GPUs through NVML (``nvidia-ml-py``), with GPM where the GPU has it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gputop.sources.base import LiveSource
from gputop.sources.nvml import status
from gputop.sources.selection import select_gpus

if TYPE_CHECKING:
    from gputop.sources.host.source import PsutilHost
    from gputop.sources.nvml.devices import Device
    from gputop.sources.nvml.xid_watch import XidWatch

OPEN_DEADLINE_S = 2.0  # for all GPUs together; without persistence mode the first call also starts the GPU


class NvmlSource(LiveSource):
    """Satisfies :class:`gputop.sources.base.Source` with this node's NVIDIA GPUs.

    ``gpus`` are the items of ``--gpus``, see :func:`gputop.sources.selection.select_gpus`. A GPU in MIG mode is
    followed by its instances. One that does not answer in time is reported as not responding until it does. Importing
    this module loads neither nvidia-ml-py nor the driver; :meth:`open` does.
    """

    def __init__(self, gpus: Sequence[str] = (), *, clock: Callable[[], float] = time.monotonic,
                 wall_clock: Callable[[], float] = time.time, environ: Mapping[str, str] = os.environ,
                 root: Path = Path("/"), open_deadline_s: float = OPEN_DEADLINE_S) -> None:
        self._wanted = tuple(gpus)
        self._clock = clock
        self._wall_clock = wall_clock
        self._environ = environ
        self._root = root
        self._open_deadline_s = open_deadline_s
        self._nvml: Any = None
        self._driver = ""
        self.gpus_present: int | None = None  # with those that --gpus leaves out; None before open()
        self.gpus: tuple[Device, ...] = ()
        self._watch: XidWatch | None = None

    @property
    def label(self) -> str:
        way = "NVML + GPM" if any(device.has_gpm for device in self.gpus) else "NVML"
        return f"{way}, driver {self._driver}" if self._driver else way

    def open(self) -> None:
        """Start NVML and open the GPUs asked for.

        Raises :class:`gputop.core.errors.GputopError`: no driver or no GPU (nothing to see),
        a driver that cannot be talked to, or ``gpus`` that name a GPU which is not there.
        A GPU that is there but cannot be opened, or does not answer, raises nothing: its probe says why.
        """
        nvml = status.import_pynvml()
        from gputop.sources.nvml.devices import Device, PendingDevice
        from gputop.sources.nvml.xid_watch import XidWatch

        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise status.open_error(error.value) from error
        self._nvml = nvml
        try:
            self._driver = status.nvml_text(nvml.nvmlSystemGetDriverVersion)
            count = nvml.nvmlDeviceGetCount()
            self._watch = watch = XidWatch(nvml, self._wall_clock)
            pending_devices = [PendingDevice(nvml, index, self._clock, self._wall_clock, watch, self._root)
                               for index in range(count)]
            for pending in pending_devices:
                pending.start()
        except nvml.NVMLError as error:
            raise status.open_error(error.value) from error
        if not count:
            raise status.no_gpus()
        self.gpus_present = count
        until_s = self._clock() + self._open_deadline_s
        for pending in pending_devices:
            pending.opened_too_late = not pending.done.wait(max(0.0, until_s - self._clock()))
        pending_of = {info: (pending, i) for pending in pending_devices for i, info in enumerate(pending.infos)}
        chosen = select_gpus(self._wanted, list(pending_of), self._environ)
        self.gpus = tuple(Device(*pending_of[info], watch) for info in chosen)
        for pending in pending_devices:
            for probe in pending.probes:
                if probe.info not in chosen:
                    probe.close()
        watch.start()

    @property
    def host(self) -> PsutilHost:
        return self.own_host(self._clock)

    def close(self) -> None:
        """Shut NVML down. Only while no probe is in a call."""
        if self._nvml is None:
            return
        nvml, self._nvml = self._nvml, None
        try:
            if self._watch is not None:
                self._watch.stop()
            for device in self.gpus:
                device.close()
            nvml.nvmlShutdown()
        except nvml.NVMLError:
            pass  # nothing left to release
