"""GPUs as a DCGM host engine sees them (``--source dcgm``), on this machine or another.

DCGM gives a value only of a field that is watched, so gputop watches the ordinary fields itself: they cost the engine a
few NVML calls and touch no counter. Profiling fields (10xx) it only reads where somebody else watches them, unless the
user consents (``--dcgm-watch``) or the engine has them from GPM, which takes no counters from anybody.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from gputop.core import samples
from gputop.core.errors import GputopError, NoDataError
from gputop.core.metrics import BYTES
from gputop.core.proc import read_or_empty
from gputop.sources.base import HostProbe, LiveSource
from gputop.sources.dcgm import fields
from gputop.sources.dcgm.client import DcgmClient
from gputop.sources.dcgm.connection import EngineGpu
from gputop.sources.dcgm.engine_reader import EngineAnswer, dcgm_reading, engine_name, missing_reason, reads_through_gpm
from gputop.sources.nvml.gpu import clock_events
from gputop.sources.nvml.mig import divided_reason
from gputop.sources.nvml.status import lost_message, unreadable_message
from gputop.sources.nvml.traffic import link_rate
from gputop.sources.selection import select_gpus

OPEN_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 0.05  # a read takes about a millisecond; a later answer is shown at the next tick
_XIDS_KEPT = 100
_MAX_GPUS = 256
_MEMORY_TOTAL = 250
_NO_PROCESSES = "DCGM does not list processes. To see them, run gputop --source auto on the node"


class DcgmSource(LiveSource):
    """Satisfies :class:`gputop.sources.base.Source`. ``gpus`` are the items of ``--gpus``."""

    def __init__(self, client: DcgmClient, gpus: Sequence[str] = (), *, watch: bool = False,
                 root: Path = Path("/")) -> None:
        self._client = client
        self._wanted = tuple(gpus)
        self._watch = watch
        self._root = root
        self._profiled: list[str] | None = None  # those whose profiling fields are watched; None: nobody consented
        self.gpus: tuple[_DcgmGpu, ...] = ()
        self.gpus_present: int | None = None
        self._host: HostProbe | None = None
        self._local = False

    @property
    def label(self) -> str:
        """Label for the header: "DCGM 4.2 host engine at 127.0.0.1:5555, driver 580.65"."""
        snapshot = self._client.snapshot()
        where = "at" if self._local else "on another machine, at"
        driver = next((f", driver {gpu.driver}" for gpu in snapshot.gpus if gpu.driver), "")
        return f"{engine_name(snapshot)} {where} {self._client.address}{driver}"

    def open(self) -> None:
        """Connect and list the GPUs. Raises GputopError where the engine cannot be talked to."""
        client = self._client
        ids = (*fields.PROFILING_IDS, *fields.FAST_IDS, *fields.LINK_IDS, *fields.SLOW_IDS)
        client.subscribe(ids, None, ordinary=True)
        client.request_update(client.now_s())
        answered = client.wait(OPEN_TIMEOUT_S)
        snapshot = client.snapshot()
        if snapshot.error is not None or not answered:
            reason = snapshot.error if answered else f"no answer within {OPEN_TIMEOUT_S:.0f} s"
            raise GputopError(f"DCGM at {client.address}: {reason}",
                              snapshot.fix or "sudo systemctl restart nvidia-dcgm")
        if not snapshot.gpus:
            raise NoDataError(f"The DCGM host engine at {client.address} lists no GPU.", "dcgmi discovery -l")
        keys = _infos(snapshot)
        infos = list(keys)
        self.gpus_present = len(snapshot.gpus)
        chosen = select_gpus(self._wanted, infos)
        self.gpus = tuple(
            _DcgmGpu(client, info, keys[info], "" if not info.mig_mode else divided_reason(
                [one.label for one in infos if one.index == info.index and one.mig is not None]),
                     _xid(snapshot, keys[info]), self._follow_gpm)
            for info in chosen)
        wanted = [keys[info] for info in chosen]
        profiled = self._profiled = wanted if self._watch else _read_through_gpm(snapshot, wanted)
        if profiled or len(chosen) < len(infos):
            # Profiling watches can take counters from others: only those of the GPUs that are asked for.
            client.choose(wanted, profiled)
            client.request_update(client.now_s() + 1e-3)
            client.wait(OPEN_TIMEOUT_S)
        # A local port may lead to a tunnel; a socket in the file system is the engine's own.
        self._local = snapshot.local and (bool(client.address.path) or _is_of_this_machine(snapshot.gpus, self._root))
        self._host = self.own_host() if self._local else _RemoteHost(str(client.address))

    def _follow_gpm(self, snapshot: EngineAnswer) -> None:
        """Have the profiling fields of GPUs watched that have shown only now that the engine reads them through GPM:
        one that was lost when gputop started, and has come back."""
        wanted = [gpu.key for gpu in self.gpus]
        if self._profiled is None or len(self._profiled) == len(wanted):
            return
        if more := [key for key in _read_through_gpm(snapshot, wanted) if key not in self._profiled]:
            self._profiled = [*self._profiled, *more]
            self._client.choose(wanted, self._profiled)

    @property
    def host(self) -> HostProbe:
        if self._host is None:
            raise RuntimeError("the source is not open")
        return self._host

    def close(self) -> None:
        self._client.close()


class _DcgmGpu:
    """One GPU of the host engine. All of them are served by one answer per tick."""

    def __init__(self, client: DcgmClient, info: samples.GpuInfo, key: str, divided: str, xid: fields.FieldValue | None,
                 on_answer: Callable[[EngineAnswer], None]) -> None:
        """``key`` is the device's in the client's values, ``divided`` why a GPU in MIG mode has no activity."""
        self.info = info
        self.key = key
        self._on_answer = on_answer
        self._divided = divided
        self._client = client
        self._xids: tuple[samples.XidEvent, ...] = ()
        self._xids_reason: str | None = "not asked yet"
        self._last_xid_us = 0 if xid is None else xid.time_us  # one from before gputop began is not reported

    def read(self, now_s: float) -> samples.GpuSample:
        self._client.request_update(now_s)
        self._client.wait(READ_TIMEOUT_S)
        snapshot = self._client.snapshot()
        if snapshot.error is not None:
            return self._without(samples.FAILED, ". ".join(filter(None, (snapshot.error, snapshot.fix))))
        values = snapshot.values.get(self.key)
        if values is None:
            return self._without(samples.LOST, f"the host engine no longer lists GPU {self.info.index}")
        self._on_answer(snapshot)
        xid = None if self.info.mig is not None else _xid(snapshot, self.key)
        if xid is not None and xid.value:
            if xid.time_us != self._last_xid_us:  # the engine keeps the last one only
                self._xids = (*self._xids[1 - _XIDS_KEPT:], samples.XidEvent(xid.time_us / 1e6, int(xid.value)))
            self._last_xid_us = xid.time_us
        codes = {value.code for value in values.values()}
        if fields.SILENT in codes:
            since = next(value.reason for value in values.values() if value.code == fields.SILENT)
            return self._without(samples.FAILED, (
                f"GPU {self.info.index} has {since}: the GPU is lost, or the driver rejects all calls. gputop keeps "
                "trying. `dmesg | grep Xid` shows the cause."))
        for code, nvml_code in ((fields.GPU_IS_LOST, 15), (fields.RESET_REQUIRED, 16)):
            if code in codes:
                return self._without(samples.LOST, lost_message(nvml_code, self.info.index))
        if self.info.mig is not None:
            return self._instance_sample(snapshot)
        measured = [values[i] for i in fields.FAST_METRIC_IDS if i in values]
        if measured and all(value.code == fields.STALE_DATA for value in measured):
            return self._without(samples.FAILED, unreadable_message(measured[0].reason, self.info.index))
        readings = {metric: dcgm_reading(snapshot, self.key, metric) for metric in fields.BY_METRIC}
        used, total = readings["memory_used_bytes"].value, readings["memory_total_bytes"].value
        if used is not None and total is not None and used > total:
            readings["memory_used_bytes"] = samples.Reading.missing(
                BYTES, f"the driver reported {used / 2**30:.1f} GiB, more than the GPU has", fields.SOURCE)
        if self._divided:
            readings |= {field.metric: replace(readings[field.metric], reason=self._divided)
                         for field in fields.PROFILING if readings[field.metric].value is None}
        readings["pcie_max_bytes_per_s"] = link_rate(readings["pcie_gen"], readings["pcie_width"], fields.SOURCE)
        events, events_reason = _clock_events(values)
        watched = xid is not None and xid.code in (fields.OK, fields.NO_DATA)
        self._xids_reason = None if watched else missing_reason(fields.XID, xid)
        return samples.GpuSample(self.info, readings, (), _NO_PROCESSES, events, events_reason, xids=self._xids,
                                 xids_reason=self._xids_reason)

    def _instance_sample(self, snapshot: EngineAnswer) -> samples.GpuSample:
        board = f"measured for the whole GPU: see GPU {self.info.index}"
        readings = {
            metric: dcgm_reading(snapshot, self.key, metric) if metric in fields.INSTANCE_METRICS
            else samples.missing_of(metric, board, fields.SOURCE)
            for metric in (*fields.BY_METRIC, "pcie_max_bytes_per_s")}
        self._xids_reason = board
        return samples.GpuSample(self.info, readings, (), _NO_PROCESSES, (), board, xids_reason=board)

    def xids(self) -> tuple[tuple[samples.XidEvent, ...], str | None]:
        return self._xids, self._xids_reason

    def _without(self, state: str, reason: str) -> samples.GpuSample:
        return samples.GpuSample(self.info, {}, processes_reason=reason, clock_events_reason=reason, state=state,
                                 message=reason, xids=self._xids, xids_reason=reason)


class _RemoteHost:
    """The host of an engine on another machine: all its figures are missing, with that reason."""

    def __init__(self, address: str) -> None:
        reason = f"the GPUs are on another machine ({address}): for host values, run gputop there"
        self._sample = samples.HostSample.missing(address, reason)

    def read(self, now_s: float) -> samples.HostSample:
        return self._sample

    def processes(self, now_s: float, gpus: Sequence[samples.GpuSample]) -> tuple[samples.ProcessSample, ...]:
        return ()


def _infos(snapshot: EngineAnswer) -> dict[samples.GpuInfo, str]:
    """The engine's GPUs and MIG instances with NVML's numbers, no number twice, and their keys in the snapshot.

    A detached or lost GPU keeps the last one that NVML gave it, which may be another's now; it then gets one
    that is free.
    """
    def whole(gpu: EngineGpu, field_id: int, limit: int) -> int | None:
        value = snapshot.values.get(gpu.uuid, {}).get(field_id)
        number = None if value is None else value.value
        return int(number) if number is not None and 0 <= number < limit else None

    def time_us(gpu: EngineGpu) -> int:
        return max((value.time_us for value in snapshot.values.get(gpu.uuid, {}).values()), default=0)

    numbers: dict[str, int] = {}
    for gpu in sorted(snapshot.gpus, key=time_us, reverse=True):  # those that answer now come first
        number = whole(gpu, fields.NVML_INDEX, _MAX_GPUS)
        if number is not None and number not in numbers.values():
            numbers[gpu.uuid] = number
    for gpu in snapshot.gpus:
        if gpu.uuid not in numbers:
            taken = set(numbers.values())
            numbers[gpu.uuid] = next(n for n in (gpu.gpu, *range(_MAX_GPUS * 2)) if n not in taken)
    key_of: dict[samples.GpuInfo, str] = {}
    for gpu in snapshot.gpus:
        # By key, because an engine could list one twice.
        parts = {part.uuid: part for part in snapshot.instances if part.gpu == gpu.gpu and part.number is not None}
        info = samples.GpuInfo(
            numbers[gpu.uuid], gpu.uuid, gpu.name, gpu.pci_bus_id, whole(gpu, fields.PCIE_GEN_MAX, 17),
            whole(gpu, fields.PCIE_WIDTH_MAX, 65), mig_mode=gpu.mig_mode or bool(parts))
        key_of[info] = gpu.uuid
        for key, part in sorted(parts.items(), key=lambda entry: entry[1].number or 0):
            instance, compute = part.mig_ids
            # The name that NVML gave to MIG devices before R470, and that CUDA still understands.
            uuid = f"MIG-{gpu.uuid}/{instance}/{compute}"
            memory_mib = whole(part, _MEMORY_TOTAL, 1 << 30)
            profile = f" {part.slices}g.{math.ceil(memory_mib / 1024)}gb" if memory_mib and part.slices else ""
            key_of[samples.GpuInfo(info.index, uuid, f"{gpu.name} MIG{profile}", gpu.pci_bus_id, mig=part.number)] = key
    return key_of


def _read_through_gpm(snapshot: EngineAnswer, keys: Sequence[str]) -> list[str]:
    """The GPUs and instances whose profiling fields the engine reads through GPM. One that is lost has no capability;
    it takes nothing from the others."""
    driver = next((gpu.driver for gpu in snapshot.gpus if gpu.driver), "")  # one that is lost names none
    capable = {gpu.gpu for gpu in snapshot.gpus if reads_through_gpm(
        snapshot.version, driver, snapshot.values.get(gpu.uuid, {}).get(fields.COMPUTE_CAPABILITY))}
    return [gpu.uuid for gpu in (*snapshot.gpus, *snapshot.instances) if gpu.uuid in keys and gpu.gpu in capable]


def _xid(snapshot: EngineAnswer, key: str) -> fields.FieldValue | None:
    return snapshot.values.get(key, {}).get(fields.XID)


def _clock_events(values: Mapping[int, fields.FieldValue]) -> tuple[tuple[str, ...], str | None]:
    value = values.get(fields.CLOCK_EVENTS)
    if value is None or value.value is None:
        return (), missing_reason(fields.CLOCK_EVENTS, value)
    return clock_events(int(value.value)), None


def _is_of_this_machine(gpus: Sequence[EngineGpu], root: Path) -> bool:
    """Return whether one of the engine's GPUs is in this machine: a local port may lead to a tunnel. Where the driver
    shows no GPU, as in a container, nothing speaks for one.

    The driver shows its GPUs to everyone, but not always their UUIDs; then the bus address is compared.
    """
    uuids: set[str] = set()
    buses: set[str] = set()
    for folder in (root / "proc/driver/nvidia/gpus").glob("*"):
        match = re.search(rb"^GPU UUID:\s*(GPU-[0-9a-f-]+)\s*$", read_or_empty(f"{folder}/information"), re.MULTILINE)
        if match:
            uuids.add(match[1].decode())
        else:
            buses.add(folder.name.casefold())
    return not (uuids or buses) or any(
        gpu.uuid in uuids or gpu.pci_bus_id.casefold().removeprefix("0000") in buses for gpu in gpus)
