"""The messages of an XSpace as TensorFlow has them, with their maps and choices, to make and to check traces with; and
those of the profiler service that gputop has.

Made as :mod:`gputop.profiler.xprof.messages` makes its own.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from gputop.profiler.xprof import messages as service

if TYPE_CHECKING:
    from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto
    from google.protobuf.message import Message

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
        "ProfileResponse": ("7 empty_trace bool", "8 xspace tensorflow.profiler.XSpace"),
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
    return getattr(service, name)


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
