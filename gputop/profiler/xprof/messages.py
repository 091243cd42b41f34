"""The messages of the profiler service and of the XSpace, as protobuf classes made at run time.

There is no generated code: a table of fields becomes file descriptors in a descriptor pool
of our own, so nothing collides with the classes TensorFlow registers under the same names,
and one gputop works with every protobuf from 4.21 on.

``messages.ProfileRequest``, ``messages.XSpace`` … are the classes; they are built on first
use, and protobuf is not imported before. Field numbers: openxla/xla and tensorflow/tensorflow,
``profiler_service.proto``, ``profiler_options.proto``, ``xplane.proto``.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto
    from google.protobuf.message import Message

SERVICE = "tensorflow.ProfilerService"

# One file per package. Message -> "number name type"; the type may be preceded by "repeated",
# be "map<int64,Message>", and be followed by "/oneof". Enums travel as int32: same wire.
_SCHEMA: dict[str, dict[str, tuple[str, ...]]] = {
    "tensorflow.profiler": {
        "XSpace": (
            "1 planes repeated XPlane", "2 errors repeated string", "3 warnings repeated string",
            "4 hostnames repeated string",
        ),
        "XPlane": (
            "1 id int64", "2 name string", "3 lines repeated XLine",
            "4 event_metadata map<int64,XEventMetadata>", "5 stat_metadata map<int64,XStatMetadata>",
            "6 stats repeated XStat",
        ),
        "XLine": (
            "1 id int64", "10 display_id int64", "2 name string", "11 display_name string",
            "3 timestamp_ns int64", "9 duration_ps int64", "4 events repeated XEvent",
        ),
        "XEvent": (
            "1 metadata_id int64", "2 offset_ps int64/data", "5 num_occurrences int64/data",
            "3 duration_ps int64", "4 stats repeated XStat",
        ),
        "XStat": (
            "1 metadata_id int64", "2 double_value double/value", "3 uint64_value uint64/value",
            "4 int64_value int64/value", "5 str_value string/value", "6 bytes_value bytes/value",
            "7 ref_value uint64/value", "8 compressed_str_value bytes/value",
        ),
        "XEventMetadata": (
            "1 id int64", "2 name string", "4 display_name string", "3 metadata bytes",
            "5 stats repeated XStat", "6 child_id repeated int64",
        ),
        "XStatMetadata": ("1 id int64", "2 name string", "3 description string"),
    },
    "tensorflow": {
        "ProfileOptions": (
            "5 version uint32", "6 device_type int32", "1 include_dataset_ops bool", "2 host_tracer_level uint32",
            "3 device_tracer_level uint32", "4 python_tracer_level uint32", "7 enable_hlo_proto bool",
            "8 start_timestamp_ns uint64", "9 duration_ms uint64", "10 repository_path string",
        ),
        "ProfileRequest": (
            "1 duration_ms uint64", "2 max_events uint64", "3 tools repeated string", "4 opts ProfileOptions",
            "5 repository_root string", "6 session_id string", "7 host_name string", "9 emit_xspace bool",
        ),
        "ProfileResponse": ("7 empty_trace bool", "8 xspace tensorflow.profiler.XSpace"),
        # The same bytes as ProfileResponse, the XSpace left unparsed: a trace of 100 MB
        # reaches the disk without ever becoming millions of objects.
        "RawProfileResponse": ("7 empty_trace bool", "8 xspace bytes"),
        "TerminateRequest": ("1 session_id string",),
        "TerminateResponse": (),
        "MonitorRequest": ("1 duration_ms uint64", "2 monitoring_level int32", "3 timestamp bool"),
    },
}

# descriptor.proto's numbers for the scalar types used above.
_SCALARS = {"double": 1, "int64": 3, "uint64": 4, "int32": 5, "bool": 8, "string": 9, "bytes": 12, "uint32": 13}
_MESSAGE = 11
_OPTIONAL, _REPEATED = 1, 3

_lock = threading.Lock()
_classes: dict[str, type[Message]] = {}


def __getattr__(name: str) -> Any:
    for messages in _SCHEMA.values():
        if name in messages:
            with _lock:
                if not _classes:
                    _classes.update(_build())
            return _classes[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _build() -> dict[str, type[Message]]:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    pool = descriptor_pool.DescriptorPool()
    for package, schema in _SCHEMA.items():
        file = descriptor_pb2.FileDescriptorProto(name=f"gputop/{package}.proto", package=package, syntax="proto3")
        if package == "tensorflow":
            file.dependency.append("gputop/tensorflow.profiler.proto")
        for name, fields in schema.items():
            _add_message(file, package, name, fields)
        pool.AddSerializedFile(file.SerializeToString())

    out: dict[str, type[Message]] = {}
    get_class = getattr(message_factory, "GetMessageClass", None)  # protobuf >= 4.22
    if get_class is None:
        get_class = message_factory.MessageFactory(pool).GetPrototype  # type: ignore[attr-defined]
    for package, schema in _SCHEMA.items():
        for name in schema:
            out[name] = get_class(pool.FindMessageTypeByName(f"{package}.{name}"))
    return out


def _add_message(file: FileDescriptorProto, package: str, name: str, fields: tuple[str, ...]) -> None:
    message = file.message_type.add(name=name)
    oneofs: list[str] = []
    for spec in fields:
        number, field_name, type_name = spec.split(" ", 2)
        label = _OPTIONAL
        oneof = None
        if type_name.startswith("repeated "):
            label, type_name = _REPEATED, type_name.removeprefix("repeated ")
        elif type_name.startswith("map<"):
            label, type_name = _REPEATED, _add_map_entry(message, package, field_name, type_name)
        if "/" in type_name:
            type_name, oneof = type_name.split("/")
        field = message.field.add(name=field_name, number=int(number), label=label)
        _set_type(field, package, type_name)
        if oneof is not None:
            if oneof not in oneofs:
                oneofs.append(oneof)
                message.oneof_decl.add(name=oneof)
            field.oneof_index = oneofs.index(oneof)


def _add_map_entry(message: DescriptorProto, package: str, field_name: str, type_name: str) -> str:
    """Add the nested entry type protobuf demands for a map; returns its name relative to the package."""
    key, value = type_name.removeprefix("map<").removesuffix(">").split(",")
    entry = message.nested_type.add(name="".join(part.capitalize() for part in field_name.split("_")) + "Entry")
    entry.options.map_entry = True
    for number, (entry_field, entry_type) in enumerate((("key", key), ("value", value)), start=1):
        _set_type(entry.field.add(name=entry_field, number=number, label=_OPTIONAL), package, entry_type)
    return f"{message.name}.{entry.name}"


def _set_type(field: Any, package: str, type_name: str) -> None:
    if type_name in _SCALARS:
        field.type = _SCALARS[type_name]
    else:
        field.type = _MESSAGE
        field.type_name = "." + (type_name if type_name.startswith("tensorflow.") else f"{package}.{type_name}")
