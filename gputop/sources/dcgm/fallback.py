"""The node's GPUs through NVML and GPM, with the metrics they lack from a DCGM host engine.

Each metric comes from the first source that has it: GPM or NVML, then DCGM fields that are already watched (or that
gputop watches, with the user's consent), then NVML's coarse substitute. DCGM is contacted only once a GPU lacks its SM
activity, and on a thread of its own: no tick waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace

from gputop.core.samples import OK, GpuInfo, GpuSample, Reading, XidEvent
from gputop.sources.base import GpuProbe, HostProbe, LiveSource, Source
from gputop.sources.dcgm.engine_reader import dcgm_reading, engine_name
from gputop.sources.dcgm.fields import BY_METRIC, PROFILING, PROFILING_IDS, instance_key

if TYPE_CHECKING:
    from gputop.sources.dcgm.client import DcgmClient
    from gputop.sources.dcgm.engine_reader import EngineAnswer

TICKS_BEFORE_DCGM = 3  # GPM has no value at its first ticks, and may miss one at any time
_PROFILING_METRICS = frozenset(field.metric for field in PROFILING)


class NvmlWithDcgmFallback(LiveSource):
    """Satisfies :class:`gputop.sources.base.Source`. ``connect`` makes the DCGM client, when it is first needed.

    ``watch`` is the user's consent to watches of profiling fields.
    """

    def __init__(self, nvml: Source, connect: Callable[[], DcgmClient], *, watch: bool = False) -> None:
        self._nvml = nvml
        self._connect = connect
        self.watch = watch
        self._lock = threading.Lock()
        self._client: DcgmClient | None = None
        self.gpus: tuple[_GpuWithDcgmFallback, ...] = ()

    @property
    def label(self) -> str:
        if self._client is None or not any(probe.from_dcgm for probe in self.gpus):
            return self._nvml.label
        way, comma, driver = self._nvml.label.partition(",")
        return f"{way} + {engine_name(self._client.snapshot())}{comma}{driver}"

    def open(self) -> None:
        self._nvml.open()
        self.gpus = tuple(_GpuWithDcgmFallback(probe, self._get_client, self.watch) for probe in self._nvml.gpus)

    def _get_client(self) -> DcgmClient:
        """The client, made for the first GPU that needs it."""
        with self._lock:
            if self._client is None:
                self._client = self._connect()
            return self._client

    @property
    def gpus_present(self) -> int | None:
        return self._nvml.gpus_present

    @property
    def host(self) -> HostProbe:
        return self._nvml.host

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._nvml.close()


class _GpuWithDcgmFallback:
    """One GPU: NVML's probe, its missing metrics filled from the host engine's newest answer."""

    def __init__(self, probe: GpuProbe, get_client: Callable[[], DcgmClient], watch: bool) -> None:
        self._probe = probe
        self._get_client = get_client
        self._client: DcgmClient | None = None  # None while DCGM is not needed
        self._watch = watch
        self._ticks_without = 0
        self._wanted: set[str] = set()
        self.from_dcgm = False  # whether the last sample holds a value of DCGM

    @property
    def info(self) -> GpuInfo:
        return self._probe.info

    def read(self, now_s: float) -> GpuSample:
        if self._client is not None:
            self._client.request_update(now_s)  # first: the engine answers while NVML is read
        sample = self._probe.read(now_s)
        self.from_dcgm = False
        if sample.state != OK or self.info.mig_mode:  # a divided GPU is followed by its instances
            return sample
        if sample["sm_active"].value is not None:  # decisive: what else GPM lacks, DCGM lacks too
            self._ticks_without = 0
            self._client = None
            return sample
        self._ticks_without += 1
        if self._client is None:
            if self._ticks_without < TICKS_BEFORE_DCGM and getattr(self._probe, "has_gpm", False):
                return sample
            self._client = self._get_client()
        every = ((metric, sample[metric]) for metric in BY_METRIC)
        lacking = {metric: reading for metric, reading in every if reading.value is None or reading.coarse}
        new = lacking.keys() - self._wanted
        if new:
            self._wanted |= new
            ids = (*PROFILING_IDS, *(field.id for metric in new for field in BY_METRIC[metric]))
            self._client.subscribe(ids, [self._key()], profiling=self._watch)
        self._client.request_update(now_s)
        return replace(sample, readings=self._filled(self._client.snapshot(), sample, lacking))

    def xids(self) -> tuple[tuple[XidEvent, ...], str | None]:
        return self._probe.xids()

    def _filled(self, snapshot: EngineAnswer, sample: GpuSample, lacking: Mapping[str, Reading]) -> dict[str, Reading]:
        # DCGM knows an instance only by numbers, which mean nothing on another machine.
        readings, key = dict(sample.readings), self._key() if snapshot.local else self.info.uuid
        for metric, reading in lacking.items():
            other = dcgm_reading(snapshot, key, metric)
            if other.value is not None and not (other.coarse and reading.value is not None):
                readings[metric] = other
                self.from_dcgm = True
            elif reading.value is None and metric in _PROFILING_METRICS:
                readings[metric] = replace(reading, reason=f"{reading.reason}; DCGM: {other.reason}")
        return readings

    def _key(self) -> str:
        instance = getattr(getattr(self._probe, "probe", None), "gpu_instance", None)
        return self.info.uuid if instance is None else instance_key(self.info.index, instance)
