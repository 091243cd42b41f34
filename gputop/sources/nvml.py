"""Live GPUs through NVML (``nvidia-ml-py``), with GPM where the GPU has it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gputop.samples import GpuInfo, NodeSample
from gputop.sources import nvml_status as status
from gputop.sources.selection import select_gpus
from gputop.text import printable

if TYPE_CHECKING:
    from gputop.sources.host import PsutilHost
    from gputop.sources.nvml_gpu import NvmlGpu


class NvmlSource:
    """Satisfies :class:`gputop.sources.Source` with this node's NVIDIA GPUs.

    ``gpus`` are the items of ``--gpus``: indices, ranges, UUIDs or the beginning of one.
    Importing this module loads neither nvidia-ml-py nor the driver; :meth:`open` does.
    """

    simulated = False

    def __init__(
        self,
        gpus: Sequence[str] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._wanted = tuple(gpus)
        self._clock = clock
        self._wall_clock = wall_clock
        self._nvml: Any = None
        self._driver = ""
        self._present: int | None = None
        self._probes: tuple[NvmlGpu, ...] = ()
        self._host: PsutilHost | None = None

    @property
    def label(self) -> str:
        """What is read, for the header: "NVML + GPM, driver 580.65.06"."""
        way = "NVML + GPM" if any(probe.has_gpm for probe in self._probes) else "NVML"
        return f"{way}, driver {self._driver}" if self._driver else way

    def open(self) -> None:
        """Start NVML and open the GPUs asked for.

        Raises :class:`gputop.errors.GputopError`: no driver or no GPU (nothing to see),
        a driver that cannot be talked to, or ``gpus`` that name a GPU which is not there.
        A GPU that is there but cannot be opened raises nothing: its probe says why.
        """
        import pynvml as nvml

        from gputop.sources.host import PsutilHost

        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise status.open_error(error.value) from error
        self._nvml = nvml
        try:
            self._driver = _text(nvml.nvmlSystemGetDriverVersion)
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            raise status.open_error(error.value) from error
        if not count:
            raise status.no_gpus()
        self._present = count
        found = [self._find(index) for index in range(count)]
        chosen = set(select_gpus(self._wanted, [(info.index, info.uuid) for info, _, _ in found]))
        self._probes = tuple(self._probe(*entry) for entry in found if entry[0].index in chosen)
        self._host = PsutilHost(clock=self._clock)

    @property
    def gpus(self) -> Sequence[NvmlGpu]:
        return self._probes

    @property
    def gpus_present(self) -> int | None:
        """How many GPUs the node has, those that ``--gpus`` leaves out included; None before ``open``."""
        return self._present

    @property
    def host(self) -> PsutilHost:
        if self._host is None:
            raise RuntimeError("the source is not open")
        return self._host

    def prefill(self, now_s: float, interval_s: float) -> Iterable[NodeSample]:
        """Nothing: the live node tells only of now."""
        return ()

    def profiler_endpoints(self) -> Mapping[str, str]:
        return {}

    def close(self) -> None:
        """Shut NVML down. Only while no probe is in a call."""
        if self._nvml is None:
            return
        nvml, self._nvml = self._nvml, None
        try:
            for probe in self._probes:
                probe.close()
            nvml.nvmlShutdown()
        except nvml.NVMLError:
            pass  # there is nothing left to save: the process goes on without NVML

    def _find(self, index: int) -> tuple[GpuInfo, Any, int]:
        """What the GPU at ``index`` is, its handle, and the NVML code if there is none."""
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = _text(nvml.nvmlDeviceGetUUID, handle)
        except nvml.NVMLError as error:
            return GpuInfo(index, f"index:{index}", f"GPU {index}"), None, error.value
        info = GpuInfo(
            index,
            uuid,
            self._ask(nvml.nvmlDeviceGetName, handle, f"GPU {index}", _text),
            self._ask(nvml.nvmlDeviceGetPciInfo, handle, "", lambda call, gpu: printable(call(gpu).busId)),
            self._ask(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle, None),
            self._ask(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle, None),
        )
        return info, handle, status.SUCCESS

    def _ask(
        self, call: Callable[..., Any], handle: Any, otherwise: Any, read: Callable[..., Any] | None = None
    ) -> Any:
        """One fact of a GPU, ``otherwise`` where it is refused. A lost GPU shows at its first reading."""
        try:
            return call(handle) if read is None else read(call, handle)
        except self._nvml.NVMLError:
            return otherwise

    def _probe(self, info: GpuInfo, handle: Any, code: int) -> NvmlGpu:
        from gputop.sources.nvml_gpu import NvmlGpu

        if handle is None:
            return NvmlGpu.unavailable(self._nvml, info, code)
        return NvmlGpu(self._nvml, handle, info, self._clock, self._wall_clock)


def _text(call: Callable[..., Any], *args: Any) -> str:
    """The text that an NVML call returns, whatever bytes it holds.

    nvidia-ml-py decodes as UTF-8 and raises for anything else; the function it wraps
    returns the bytes as they are.
    """
    return printable(getattr(call, "__wrapped__", call)(*args))
