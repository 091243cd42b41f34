"""One connection to a DCGM host engine: lists, reads and watches. Blocks; one thread uses it.

Only plain calls of the bindings are used, and only values that the engine already holds: with
the live-data flag, DCGM 4.0 to 4.6 crashes on a profiling field.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from gputop.core.errors import EXIT_USAGE, GputopError
from gputop.sources.dcgm import fields
from gputop.sources.dcgm.bindings import Bindings
from gputop.sources.dcgm.fields import FieldValue, instance_key
from gputop.text.units import printable

DEFAULT_ADDRESS = "127.0.0.1:5555"
CONNECT_TIMEOUT_MS = 500  # DCGM's own 5 s also pass where the port refuses
KEEP_SAMPLES = 2  # samples of gputop's own watches: only the newest is read
MIN_WATCH_S = 0.1

Entity = tuple[int, int]  # as DCGM knows a device: kind and number
Values = dict[tuple[Entity, int], FieldValue]  # by entity and field
_GPU, _GPU_INSTANCE, _COMPUTE_INSTANCE = 1, 4, 5  # dcgm_field_entity_group_t: DCGM_FE_GPU, …_GPU_I, …_GPU_CI
_EMPTY_GROUP = 1  # dcgmGroupType_t: DCGM_GROUP_EMPTY
_NO_FLAGS = 0
_DOUBLE = ord("d")  # DCGM_FT_DOUBLE
# Of c_dcgmFieldValue_v2, with their types in the words of the struct module. The value is a union of both of its types.
_MEMBERS = {"entityGroupId": "I", "entityId": "I", "fieldId": "H", "fieldType": "h", "status": "i", "ts": "q"}
_INTEGER, _FLOAT = {"value": "q"}, {"value": "d"}
_NO_TEXT = re.compile(r"<<<[A-Z_]+>>>")  # what DCGM gives in place of a text that it lacks, as of a lost GPU's name
_VERSION = re.compile(r"\bversion:(\d{1,4}(?:\.\d{1,4}){0,3})")


class Address(Struct, frozen=True):
    """Address at which a host engine listens: a unix socket's ``path``, or ``host`` and ``port``."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"unix://{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def reach(self, timeout_s: float) -> bool:
        """Connect and disconnect; returns whether that was on this machine. Raises OSError where nothing answers."""
        if self.path:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(timeout_s)
                connection.connect(self.path)
            return True
        with socket.create_connection((self.host, self.port), timeout_s) as connection:
            return bool(connection.getpeername()[0] == connection.getsockname()[0])


def parse_address(text: str) -> Address:
    """HOST, HOST:PORT, [IPv6]:PORT or unix:///PATH. Raises GputopError (wrong usage)."""
    if text.startswith("unix://"):
        path = text.removeprefix("unix://")
        if path.startswith("/"):
            return Address(path=path)
    elif match := re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:/\[\]]+))(?::(\d{1,5}))?", text):
        port = int(match[3] or 5555)
        if 0 < port < 65536 and (match[1] is None or _is_ipv6(match[1])):
            return Address(match[1] or match[2], port)
    raise GputopError(f"--dcgm {text} is not the address of a DCGM host engine.",
                      "Give HOST:PORT, [IPv6]:PORT or unix:///path/to/socket.", EXIT_USAGE)


def _is_ipv6(text: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET6, text.partition("%")[0])
    except OSError:
        return False
    return True


class EngineError(Exception):
    """A DCGM call failed with ``code``: a :class:`CallFailed`, or the connection is gone."""

    def __init__(self, code: int, call: str) -> None:
        super().__init__(f"{fields.meaning(code)} in {call}")
        self.code = code

    @property
    def fails_all(self) -> bool:
        """Return whether the next call would fail, too: the connection is gone, or the bindings lack the function."""
        return self.code in fields.CONNECTION_GONE or self.code == fields.FUNCTION_NOT_FOUND


class CallFailed(EngineError):
    """A call failed, and the connection stays."""


class EngineGpu(Struct, frozen=True):
    """A GPU as the host engine lists it, or a MIG instance, whose ``uuid`` is its ``instance_key``."""

    entity: Entity
    gpu: int  # DCGM's number of the GPU
    uuid: str
    name: str = ""
    pci_bus_id: str = ""
    driver: str = ""
    mig_mode: bool = False
    slices: int = 0  # of an instance: those of its profile
    number: int | None = None  # its number among the GPU's MIG devices; None: it has no compute instance
    mig_ids: tuple[int, int] = (0, 0)  # NVML's of the GPU instance and of its first compute instance

    @property
    def is_instance(self) -> bool:
        return self.entity[0] == _GPU_INSTANCE

    @property
    def parent(self) -> Entity:
        return _GPU, self.gpu


class Engine:
    """Connects on creation. Every method raises :class:`EngineError`, and the connection is then
    gone unless it is a :class:`CallFailed`; groups and watches are gone with it.
    """

    def __init__(self, bindings: Bindings, address: Address) -> None:
        self._agent = bindings.agent
        self._structs = bindings.structs
        parameters = self._structs.c_dcgmConnectV2Params_v2()
        parameters.persistAfterDisconnect = 0  # whatever happens to gputop, the engine undoes its watches
        parameters.timeoutMs = CONNECT_TIMEOUT_MS
        parameters.addressIsUnixSocket = int(bool(address.path))
        self._gone = False
        self._handle = self._call("dcgmConnect_v2", address.path or str(address), parameters, handle=False)
        value_type = self._structs.c_dcgmFieldValue_v2
        self._rows, self._floats = _packed(value_type, _MEMBERS | _INTEGER), _packed(value_type, _FLOAT)
        self._watches: list[tuple[Any, Any]] = []  # (group, field group)
        self._refused: dict[int, str] = {}  # by field id
        self._unreadable: dict[Entity, str] = {}  # entities that fail every read
        try:
            self.version = self._ask_version()
            self.gpus = _distinct(self._describe(gpu) for gpu in dict.fromkeys(self._call("dcgmGetAllDevices")))
            self.instances = self._find_instances()
        except EngineError:
            self.close()
            raise

    def close(self) -> None:
        """Undo the watches and disconnect. A broken connection is not used again: that may take long."""
        if not self._gone:
            with contextlib.suppress(EngineError):
                self.unwatch()
        with contextlib.suppress(EngineError):
            self._call("dcgmDisconnect")

    # -- reading ------------------------------------------------------------------------------

    def read(self, entities: Sequence[Entity], ids: Sequence[int]) -> Values:
        """The newest values by entity and field that the engine holds; this measures nothing.

        One id that the engine does not know fails a whole read: it is found once and then left out.
        """
        accepted = [i for i in ids if i not in self._refused]
        asked = [entity for entity in entities if entity not in self._unreadable]
        values: Values = {}
        if asked and accepted:
            try:
                values = self._latest(asked, accepted)
            except EngineError as error:
                if error.fails_all:
                    raise
                values, failed = self._read_one_by_one(asked, accepted)
                if not values:
                    raise
                self._refused.update(failed)
        for entity in entities:
            for i in ids:
                if (reason := self._unreadable.get(entity) or self._refused.get(i)) is not None:
                    values[entity, i] = FieldValue(None, reason)
        return values

    def _read_one_by_one(self, entities: Sequence[Entity], ids: Sequence[int]) -> tuple[Values, dict[int, str]]:
        """Each field alone; where none works, each entity alone. Returns the values and the fields that failed."""
        values: Values = {}
        failed: dict[int, str] = {}
        for i in ids:
            try:
                values |= self._latest(entities, [i])
            except CallFailed as error:
                failed[i] = f"field {i}: {fields.meaning(error.code)}"
        if not values and len(entities) > 1:
            whys: dict[Entity, str] = {}
            for entity in entities:
                read, missed = self._read_one_by_one([entity], ids)
                values |= read
                if read:
                    failed = missed
                else:
                    whys[entity] = next(iter(missed.values()))
            if values:
                self._unreadable.update(whys)
        return values, failed

    def _latest(self, entities: Sequence[Entity], ids: Sequence[int]) -> Values:
        pair = self._structs.c_dcgmGroupEntityPair_t
        answer = self._call("dcgmEntitiesGetLatestValues", [pair(*entity) for entity in entities], list(ids), _NO_FLAGS)
        values = zip(self._rows.iter_unpack(answer), self._floats.iter_unpack(answer), strict=True)
        wanted = frozenset(ids)
        return {
            ((kind, number), i): fields.decode(status, of_type == _DOUBLE, integer, double, time_us)
            for (kind, number, i, of_type, status, time_us, integer), (double,) in values
            if i in wanted  # rows that the engine did not fill are all zeros
        }

    # -- watching -----------------------------------------------------------------------------

    def profiling_fields(self, gpu: int) -> frozenset[int]:
        """The 10xx fields that the engine can read on this GPU. Raises EngineError where there are none."""
        answer = self._call("dcgmProfGetSupportedMetricGroups", gpu)
        groups = answer.metricGroups[: answer.numMetricGroups]
        supported = frozenset(i for group in groups for i in group.fieldIds[: group.numFieldIds])
        if not supported:
            raise CallFailed(fields.PROFILING_NOT_SUPPORTED, "dcgmProfGetSupportedMetricGroups")
        return supported

    def watch(self, entities: Iterable[Entity], ids: Sequence[int], interval_s: float,
              keep_s: float) -> dict[Entity, int]:
        """Have the engine read ``ids`` every ``interval_s`` until :meth:`unwatch` or the end of the connection.

        Returns the entities that the engine refuses, with DCGM's code: a lost GPU, say. The others are watched.

        Profiling fields need a group of their own: where profiling does not work, their refusal would
        leave the other fields of the group with one stale value.
        """
        if any(map(fields.is_profiling, ids)) and not all(map(fields.is_profiling, ids)):
            raise ValueError("profiling fields need a separate field group")
        group = self._call("dcgmGroupCreate", _EMPTY_GROUP, _new_name())
        field_group = None
        try:
            codes = {entity: self._add(group, entity) for entity in entities}
            refused = {entity: code for entity, code in codes.items() if code != fields.OK}
            if len(refused) == len(codes):
                self._destroy_groups(group, None)
                return refused
            field_group = self._field_group([i for i in ids if i not in self._refused])
            period_us = round(max(MIN_WATCH_S, interval_s) * 1e6)
            self._call("dcgmWatchFields", group, field_group, period_us, keep_s, KEEP_SAMPLES)
        except EngineError:
            self._destroy_groups(group, field_group)
            raise
        self._watches.append((group, field_group))
        return refused

    def refusal(self, entity: Entity) -> int:
        """DCGM's code for why it would not watch the entity now, :data:`fields.OK` if it would.

        The values of a lost GPU are blanks without an error; this tells.
        """
        group = self._call("dcgmGroupCreate", _EMPTY_GROUP, _new_name())
        code = self._add(group, entity)
        self._destroy_groups(group, None)
        return code

    def _add(self, group: Any, entity: Entity) -> int:
        try:
            self._call("dcgmGroupAddEntity", group, *entity)
        except EngineError as error:
            if error.fails_all:
                raise
            return error.code
        return fields.OK

    def _field_group(self, ids: list[int]) -> Any:
        """A field group of those ``ids`` that the engine knows: an unknown one fails the whole group."""
        try:
            return self._call("dcgmFieldGroupCreate", ids, _new_name())
        except CallFailed:
            if len(ids) == 1:
                raise
            good = []
            for i in ids:
                try:
                    self._destroy_groups(None, self._call("dcgmFieldGroupCreate", [i], _new_name()))
                except CallFailed as refusal:
                    self._refused[i] = f"field {i}: {fields.meaning(refusal.code)}"
                else:
                    good.append(i)
            if not good or len(good) == len(ids):
                raise
            return self._call("dcgmFieldGroupCreate", good, _new_name())

    def _destroy_groups(self, group: Any, field_group: Any) -> None:
        for call, each in (("dcgmFieldGroupDestroy", field_group), ("dcgmGroupDestroy", group)):
            if each is not None:
                with contextlib.suppress(EngineError):
                    self._call(call, each)

    def unwatch(self) -> None:
        watches, self._watches = self._watches, []
        for group, field_group in watches:
            with contextlib.suppress(EngineError):
                self._call("dcgmUnwatchFields", group, field_group)
            self._destroy_groups(group, field_group)

    def update(self) -> None:
        """Wait until every new watch has been read once."""
        self._call("dcgmUpdateAllFields", 1)

    def field_groups(self) -> dict[str, frozenset[int]]:
        """The field groups of all other clients: their ids by name. A watch needs such a group."""
        answer = self._call("dcgmFieldGroupGetAll")
        own_prefix = f"gputop-{os.getpid()}-"
        groups = {_text(group.fieldGroupName): frozenset(group.fieldIds[: group.numFieldIds])
                  for group in answer.fieldGroups[: answer.numFieldGroups]}
        return {name: ids for name, ids in groups.items() if not name.startswith(own_prefix)}

    def watchers(self, ids: Iterable[int]) -> tuple[str, ...]:
        """Names of the field groups of all other clients that hold one of ``ids``."""
        wanted = frozenset(ids)
        return tuple(sorted(name for name, held in self.field_groups().items() if wanted & held))

    # -- calls --------------------------------------------------------------------------------

    def _call(self, name: str, *arguments: Any, handle: bool = True) -> Any:
        function = getattr(self._agent, name, None)
        if function is None:  # bindings older than the call
            raise CallFailed(fields.FUNCTION_NOT_FOUND, name)
        try:
            return function(self._handle, *arguments) if handle else function(*arguments)
        except self._structs.DCGMError as error:
            self._gone = error.value in fields.CONNECTION_GONE
            raise (EngineError if self._gone else CallFailed)(int(error.value), name) from error

    def _ask_version(self) -> str:
        """The engine's version, "" if unknown. The bindings have no wrapper for this call."""
        structs = self._structs
        try:
            answer = structs.c_dcgmVersionInfo_v2()
            answer.version = structs.dcgmVersionInfo_version2
            function = structs._dcgmGetFunctionPointer("dcgmHostengineVersionInfo")
            code = function(self._handle, ctypes.byref(answer))
        except (structs.DCGMError, AttributeError):
            return ""
        if code in fields.CONNECTION_GONE:
            raise EngineError(code, "dcgmHostengineVersionInfo")
        match = _VERSION.search(_text(answer.rawBuildInfoString)) if code == fields.OK else None
        return match[1] if match else ""

    def _describe(self, gpu: int) -> EngineGpu:
        try:
            attributes = self._call("dcgmGetDeviceAttributes", gpu)
        except EngineError as error:
            if error.fails_all:
                raise
            return EngineGpu((_GPU, gpu), gpu, f"dcgm:{gpu}", f"GPU {gpu}")  # lost, or being reset
        identifiers = attributes.identifiers
        mig = getattr(getattr(attributes, "settings", None), "migModeEnabled", 0) == 1
        return EngineGpu((_GPU, gpu), gpu, _text(identifiers.uuid), _text(identifiers.deviceName) or f"GPU {gpu}",
                         _text(identifiers.pciBusId), _text(identifiers.driverVersion), mig)

    def _find_instances(self) -> tuple[EngineGpu, ...]:
        """The current GPU instances (MIG); none where the engine does not list them."""
        try:
            answer = self._call("dcgmGetGpuInstanceHierarchy")
        except CallFailed:
            return ()
        entries = answer.entityList[: answer.count]
        # NVML's MIG devices are the compute instances; it counts them in the order of these ids.
        devices = sorted({(e.info.nvmlGpuIndex, e.info.nvmlInstanceId, getattr(e.info, "nvmlComputeInstanceId", 0))
                          for e in entries if e.entity.entityGroupId == _COMPUTE_INSTANCE})
        instances: dict[Entity, EngineGpu] = {}
        for entry in entries:
            if entry.entity.entityGroupId == _GPU_INSTANCE:
                index, instance = entry.info.nvmlGpuIndex, entry.info.nvmlInstanceId
                of_gpu = [(gi, ci) for gpu, gi, ci in devices if gpu == index]
                first = next((position for position, (gi, _) in enumerate(of_gpu) if gi == instance), None)
                entity = (_GPU_INSTANCE, entry.entity.entityId)
                instances[entity] = EngineGpu(
                    entity, entry.parent.entityId, instance_key(index, instance),
                    slices=getattr(entry.info, "nvmlProfileSlices", 0), number=first,
                    mig_ids=(instance, 0) if first is None else of_gpu[first])
        return tuple(instances.values())


def _new_name() -> str:
    """A name that no other client uses for a group, nor one with this process's number in another container: names are
    unique in the engine."""
    return f"gputop-{os.getpid()}-{os.urandom(6).hex()}"


def _distinct(gpus: Iterable[EngineGpu]) -> tuple[EngineGpu, ...]:
    """The GPUs with a UUID each: a lost one may have none any more."""
    by_uuid: dict[str, EngineGpu] = {}
    for gpu in gpus:
        one = gpu if gpu.uuid and gpu.uuid not in by_uuid else replace(gpu, uuid=f"dcgm:{gpu.gpu}")
        by_uuid[one.uuid] = one
    return tuple(by_uuid.values())


def _text(value: bytes | str) -> str:
    text = printable(value)
    return "" if _NO_TEXT.fullmatch(text) else text


def _packed(value_type: Any, members: Mapping[str, str]) -> struct.Struct:
    """Unpacker of these members of a structure, in their order in memory; ctypes takes a microsecond for each."""
    text, end = "=", 0
    for name, code in members.items():
        offset = getattr(value_type, name).offset
        text += f"{offset - end}x{code}"
        end = offset + struct.calcsize("=" + code)
    return struct.Struct(f"{text}{ctypes.sizeof(value_type) - end}x")
