"""dcgm_structs, as far as gputop uses it: the structures, the error, the library."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

DCGM_MAX_STR_LENGTH = 256
_GROUPS = 10
_IDS = 64


class DCGMError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"DCGM error {value}")
        self.value = value


class c_dcgmConnectV2Params_v2(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint), ("persistAfterDisconnect", ctypes.c_uint), ("timeoutMs", ctypes.c_uint),
                ("addressIsUnixSocket", ctypes.c_uint)]


class c_dcgmGroupEntityPair_t(ctypes.Structure):
    _fields_ = [("entityGroupId", ctypes.c_uint32), ("entityId", ctypes.c_uint32)]


class c_dcgmVersionInfo_v2(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("rawBuildInfoString", ctypes.c_char * 512)]


dcgmVersionInfo_version2 = ctypes.sizeof(c_dcgmVersionInfo_v2) | 2 << 24


class c_dcgmDeviceIdentifiers_v1(ctypes.Structure):
    _fields_ = [(name, ctypes.c_char * DCGM_MAX_STR_LENGTH)
                for name in ("deviceName", "pciBusId", "uuid", "driverVersion")]


class c_dcgmDeviceAttributes_v3(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint), ("identifiers", c_dcgmDeviceIdentifiers_v1)]


class _Value(ctypes.Union):
    _fields_ = [("i64", ctypes.c_int64), ("dbl", ctypes.c_double), ("str", ctypes.c_char * DCGM_MAX_STR_LENGTH)]


class c_dcgmFieldValue_v2(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint), ("entityGroupId", ctypes.c_uint), ("entityId", ctypes.c_uint),
                ("fieldId", ctypes.c_ushort), ("fieldType", ctypes.c_short), ("status", ctypes.c_int),
                ("unused", ctypes.c_uint), ("ts", ctypes.c_int64), ("value", _Value)]


class c_dcgmProfMetricGroupInfo_v2(ctypes.Structure):
    _fields_ = [("majorId", ctypes.c_ushort), ("minorId", ctypes.c_ushort), ("numFieldIds", ctypes.c_uint32),
                ("fieldIds", ctypes.c_ushort * _IDS)]


class c_dcgmProfGetMetricGroups_v3(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("gpuId", ctypes.c_uint32), ("numMetricGroups", ctypes.c_uint32),
                ("metricGroups", c_dcgmProfMetricGroupInfo_v2 * _GROUPS)]


class c_dcgmFieldGroupInfo_v1(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("numFieldIds", ctypes.c_uint32), ("fieldGroupId", ctypes.c_void_p),
                ("fieldGroupName", ctypes.c_char * DCGM_MAX_STR_LENGTH), ("fieldIds", ctypes.c_uint16 * 128)]


class c_dcgmAllFieldGroup_v1(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("numFieldGroups", ctypes.c_uint32),
                ("fieldGroups", c_dcgmFieldGroupInfo_v1 * 64)]


class c_dcgmMigEntityInfo_t(ctypes.Structure):
    _fields_ = [("gpuUuid", ctypes.c_char * 128), ("nvmlGpuIndex", ctypes.c_uint), ("nvmlInstanceId", ctypes.c_uint),
                ("nvmlComputeInstanceId", ctypes.c_uint), ("nvmlMigProfileId", ctypes.c_uint),
                ("nvmlProfileSlices", ctypes.c_uint)]


class c_dcgmMigHierarchyInfo_v2(ctypes.Structure):
    _fields_ = [("entity", c_dcgmGroupEntityPair_t), ("parent", c_dcgmGroupEntityPair_t),
                ("info", c_dcgmMigEntityInfo_t)]


class c_dcgmMigHierarchy_v2(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint), ("count", ctypes.c_uint), ("entityList", c_dcgmMigHierarchyInfo_v2 * 64)]


class Library:
    """libdcgm.so of one major version, as its bindings load it."""

    def __init__(self, major: int) -> None:
        self.major = major
        self.loaded = ""
        self.initialized = False

    def load(self, libDcgmPath: str | None = None) -> None:
        folders = [libDcgmPath] if libDcgmPath else []
        folders += os.environ.get("LD_LIBRARY_PATH", "").split(":")
        for folder in folders:
            path = Path(folder) / f"libdcgm.so.{self.major}"
            if path.is_file() and path.read_bytes() != b"broken":
                self.loaded = str(path)
                return
        raise DCGMError(-25)

    def pointer(self, name: str) -> Any:
        from tests.dcgm_double.agent import host_engine_version

        if name != "dcgmHostengineVersionInfo":
            raise DCGMError(-20)
        return host_engine_version
