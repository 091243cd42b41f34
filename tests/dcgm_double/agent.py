"""dcgm_agent, as far as gputop uses it: plain functions that raise DCGMError."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.dcgm_double import DOUBLES, INT_BLANK, INTEGERS, NO_TEXT, PROFILING, Client, engine_at, number
from tests.dcgm_double import structs as s
from tests.records import replace


def host_engine_version(client: Client, reference: Any) -> int:
    """A C function: returns its code."""
    engine = client.engine
    code = engine.enter("dcgmHostengineVersionInfo") or (0 if client.alive else -21)
    if code == 0:
        reference._obj.rawBuildInfoString = f"version:{engine.version};arch:x86_64;buildtype:Release".encode()
    return code


class Agent:
    """The functions of one loaded library."""

    def __init__(self, library: s.Library) -> None:
        self._library = library

    def functions(self) -> dict[str, Callable[..., Any]]:
        found = {name: getattr(self, name) for name in dir(self) if name.startswith("dcgm")}
        return {name: self._checked(name, call) for name, call in found.items()}

    def _checked(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def function(*args: Any) -> Any:
            if args and isinstance(args[0], Client):
                client = args[0]
                code = client.engine.enter(name)
                if not client.alive:
                    raise s.DCGMError(-21)
                if code:
                    raise s.DCGMError(code)
            return call(*args)

        return function

    def dcgmInit(self) -> int:
        if not self._library.loaded:
            raise s.DCGMError(-10)
        self._library.initialized = True
        return 0

    def dcgmConnect_v2(self, address: str, parameters: s.c_dcgmConnectV2Params_v2) -> Client:
        assert self._library.initialized and 0 < parameters.timeoutMs <= 1000
        assert parameters.persistAfterDisconnect == 0, "watches would outlive gputop"
        engine = engine_at(address, bool(parameters.addressIsUnixSocket))
        if engine is None:
            raise s.DCGMError(-21)  # after timeoutMs
        code = engine.enter("dcgmConnect_v2")
        if code:
            raise s.DCGMError(code)
        client = Client(engine)
        engine.clients.append(client)
        return client

    def dcgmDisconnect(self, client: Client) -> int:
        client.alive = False
        client.engine.clients.remove(client)
        return 0

    def dcgmGetAllDevices(self, client: Client) -> list[int]:
        return list(client.engine.gpus)

    def dcgmGetDeviceAttributes(self, client: Client, gpu: int) -> s.c_dcgmDeviceAttributes_v3:
        if self._library.major > int(client.engine.version.split(".")[0]):
            raise s.DCGMError(-20)  # a newer client fails half-way on an older engine
        known = client.engine.gpus[gpu]
        attributes = s.c_dcgmDeviceAttributes_v3()
        if gpu in client.engine.silent | client.engine.lost and not client.engine.samples:  # from the start
            known = replace(known, name=NO_TEXT, driver=NO_TEXT)
        attributes.identifiers.uuid = known.uuid.encode()
        attributes.identifiers.deviceName = known.name.encode()
        attributes.identifiers.pciBusId = known.bus.encode()
        attributes.identifiers.driverVersion = known.driver.encode()
        return attributes

    def dcgmGetGpuInstanceHierarchy(self, client: Client) -> s.c_dcgmMigHierarchy_v2:
        answer = s.c_dcgmMigHierarchy_v2()
        found = [(gpu, i, nvml) for gpu in client.engine.gpus.values() for i, nvml in gpu.instances.items()]
        for gpu, i, nvml in found:  # each instance with the compute instance in it
            for kind, parent in ((4, (1, gpu.id)), (5, (4, i))):
                entry = answer.entityList[answer.count]
                entry.entity.entityGroupId, entry.entity.entityId = kind, i
                entry.parent.entityGroupId, entry.parent.entityId = parent
                entry.info.nvmlGpuIndex, entry.info.nvmlInstanceId = gpu.id, nvml
                entry.info.nvmlComputeInstanceId, entry.info.nvmlProfileSlices = (1 << 32) - 1 if kind == 4 else 0, 3
                answer.count += 1
        if client.engine.wild_counts:
            answer.count = (1 << 32) - 1
        return answer

    def dcgmEntitiesGetLatestValues(self, client: Client, entities: list[Any], ids: list[int], flags: int) -> Any:
        engine = client.engine
        engine.read_ids.append(list(ids))
        if flags & 1 and any(i in PROFILING for i in ids):
            engine.died_of_live_data = True
            engine.stop()
            raise s.DCGMError(-21)
        if any(i not in DOUBLES | INTEGERS or i in engine.unknown for i in ids):
            raise s.DCGMError(-3)
        if any(pair.entityId in engine.bad_gpus for pair in entities):
            raise s.DCGMError(-18)
        values = (s.c_dcgmFieldValue_v2 * (len(entities) * len(ids)))()
        keys = [(pair, i) for pair in entities for i in ids]
        watched = engine.watched()
        for value, (pair, i) in zip(values, keys, strict=True):
            value.entityGroupId, value.entityId, value.fieldId = pair.entityGroupId, pair.entityId, i
            gpu = number(pair.entityGroupId, pair.entityId)
            value.fieldType = ord("d" if i in DOUBLES else "i")
            sample = engine.samples.get((gpu, i))
            if sample is None:
                value.status = -14 if (gpu, i) in watched else -16
                engine.error_lines += value.status != -14
                value.value.i64 = INT_BLANK
                continue
            # After its watch has ended the last value stays readable, with status 0.
            value.status, value.ts = sample.status, sample.time_us
            engine.error_lines += sample.status not in (0, -14)
            if i in DOUBLES:
                value.value.dbl = sample.value
            else:
                value.value.i64 = int(sample.value)
        return values

    def dcgmProfGetSupportedMetricGroups(self, client: Client, gpu: int) -> s.c_dcgmProfGetMetricGroups_v3:
        supported = client.engine.gpus[gpu].profiling
        if supported is None:
            raise s.DCGMError(-33)
        answer = s.c_dcgmProfGetMetricGroups_v3()
        halves = [sorted(supported)[::2], sorted(supported)[1::2]]
        answer.numMetricGroups = len(halves)
        for group, ids in zip(answer.metricGroups, halves, strict=False):
            group.numFieldIds = len(ids)
            group.fieldIds[: len(ids)] = ids
            if client.engine.wild_counts:
                group.numFieldIds = (1 << 32) - 1
        if client.engine.wild_counts:
            answer.numMetricGroups = (1 << 32) - 1
        return answer

    def dcgmGroupCreate(self, client: Client, kind: int, name: str) -> int:
        assert kind == 1 and name
        number = client.engine.next_number()
        client.groups[number] = []
        return number

    def dcgmGroupAddEntity(self, client: Client, group: int, entity_group: int, entity: int) -> int:
        if entity_group == 1 and entity in client.engine.lost:
            client.engine.error_lines += 1
            raise s.DCGMError(-18)
        client.groups[group].append((entity_group, entity))
        return 0

    def dcgmGroupDestroy(self, client: Client, group: int) -> int:
        del client.groups[group]
        client.watches = {key: watch for key, watch in client.watches.items() if key[0] != group}
        return 0

    def dcgmFieldGroupCreate(self, client: Client, ids: list[int], name: str) -> int:
        engine = client.engine
        if any(name == other for other, _ in engine.field_names()):
            raise s.DCGMError(-26)
        if not ids or any(i not in DOUBLES | INTEGERS or i in engine.unknown for i in ids):
            raise s.DCGMError(-1)
        number = engine.next_number()
        client.field_groups[number] = (name, list(ids))
        return number

    def dcgmFieldGroupDestroy(self, client: Client, field_group: int) -> int:
        del client.field_groups[field_group]
        client.watches = {key: watch for key, watch in client.watches.items() if key[1] != field_group}
        return 0

    def dcgmWatchFields(self, client: Client, group: int, field_group: int, period_us: int, keep_s: float,
                        keep_samples: int) -> int:
        engine, ids = client.engine, client.field_groups[field_group][1]
        gpus = [gpu for kind, gpu in client.groups[group] if kind == 1]
        assert period_us >= 100_000 and 0 < keep_s < 300 and keep_samples > 0 and client.groups[group]
        profiling = [i for i in ids if i in PROFILING]
        if profiling and any(engine.gpus[gpu].profiling is None for gpu in gpus):
            # The others of the group keep one stale sample with status 0.
            others = {(gpu, i) for gpu in gpus for i in ids if i not in PROFILING}
            engine.others |= others
            engine.update()
            engine.others -= others
            engine.stuck |= others
            raise s.DCGMError(-33)
        client.watches[group, field_group] = (period_us, keep_s, keep_samples)
        return 0

    def dcgmUnwatchFields(self, client: Client, group: int, field_group: int) -> int:
        if client.watches.pop((group, field_group), None) is None:
            raise s.DCGMError(-16)
        return 0

    def dcgmUpdateAllFields(self, client: Client, wait: int) -> int:
        assert wait == 1
        client.engine.update()
        return 0

    def dcgmFieldGroupGetAll(self, client: Client) -> s.c_dcgmAllFieldGroup_v1:
        answer = s.c_dcgmAllFieldGroup_v1()
        names = client.engine.field_names()
        answer.numFieldGroups = len(names)
        for group, (name, ids) in zip(answer.fieldGroups, names, strict=False):
            group.fieldGroupName, group.numFieldIds = name.encode(), len(ids)
            group.fieldIds[: len(ids)] = ids
            if client.engine.wild_counts:
                group.numFieldIds = (1 << 32) - 1
        if client.engine.wild_counts:
            answer.numFieldGroups = (1 << 32) - 1
        return answer


