"""The messages of an XSpace as TensorFlow has them, with their maps and choices, to make and to check traces with; and
those of the profiler service that gputop has.

Made as :mod:`gputop.profiler.xprof.messages` makes its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from gputop.profiler.xprof import messages as service

if TYPE_CHECKING:
    from google.protobuf.message import Message

_PACKAGE = "tensorflow.profiler"
# Message -> "number name type"; the type may be preceded by "repeated", be "map<int64,Message>", and be followed by
# "/oneof". Enums travel as int32: same wire.
_SCHEMA: dict[str, tuple[str, ...]] = {
    "XSpace": ("1 planes repeated XPlane", "2 errors repeated string", "3 warnings repeated string",
               "4 hostnames repeated string"),
    "XPlane": ("1 id int64", "2 name string", "3 lines repeated XLine", "4 event_metadata map<int64,XEventMetadata>",
               "5 stat_metadata map<int64,XStatMetadata>", "6 stats repeated XStat"),
    "XLine": ("1 id int64", "10 display_id int64", "2 name string", "11 display_name string", "3 timestamp_ns int64",
              "9 duration_ps int64", "4 events repeated XEvent"),
    "XEvent": ("1 metadata_id int64", "2 offset_ps int64/data", "5 num_occurrences int64/data", "3 duration_ps int64",
               "4 stats repeated XStat"),
    "XStat": ("1 metadata_id int64", "2 double_value double/value", "3 uint64_value uint64/value",
              "4 int64_value int64/value", "5 str_value string/value", "6 bytes_value bytes/value",
              "7 ref_value uint64/value", "8 compressed_str_value bytes/value"),
    "XEventMetadata": ("1 id int64", "2 name string", "4 display_name string", "3 metadata bytes",
                       "5 stats repeated XStat", "6 child_id repeated int64"),
    "XStatMetadata": ("1 id int64", "2 name string", "3 description string"),
    "ProfileResponse": ("7 empty_trace bool", "8 xspace XSpace"),
}
# descriptor.proto's numbers for the scalar types used above.
_SCALARS = {"double": 1, "int64": 3, "uint64": 4, "bool": 8, "string": 9, "bytes": 12}
_MESSAGE, _OPTIONAL, _REPEATED = 11, 1, 3


def __getattr__(name: str) -> Any:
    return _CLASSES[name] if name in _CLASSES else getattr(service, name)


def _build() -> dict[str, type[Message]]:
    file = descriptor_pb2.FileDescriptorProto(name="gputop/xspace.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _SCHEMA.items():
        _add_fields(file.message_type.add(name=name), fields)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    get_class = getattr(message_factory, "GetMessageClass", None)  # protobuf >= 4.22
    if get_class is None:
        get_class = message_factory.MessageFactory(pool).GetPrototype  # type: ignore[attr-defined]
    return {name: get_class(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _SCHEMA}


def _add_fields(message: descriptor_pb2.DescriptorProto, fields: tuple[str, ...]) -> None:
    oneofs: list[str] = []
    for spec in fields:
        number, name, *repeated, kind = spec.split(" ")
        type_name, _, oneof = kind.partition("/")
        if type_name.startswith("map<"):  # a repeated message that is nested, as protobuf demands
            entry = message.nested_type.add(name="".join(map(str.capitalize, name.split("_"))) + "Entry")
            entry.options.map_entry = True
            key, value = type_name[4:-1].split(",")
            _add_fields(entry, (f"1 key {key}", f"2 value {value}"))
            repeated, type_name = ["repeated"], f"{message.name}.{entry.name}"
        field: Any = message.field.add(name=name, number=int(number), label=_REPEATED if repeated else _OPTIONAL)
        if type_name in _SCALARS:
            field.type = _SCALARS[type_name]
        else:
            field.type, field.type_name = _MESSAGE, f".{_PACKAGE}.{type_name}"
        if oneof:
            if oneof not in oneofs:
                oneofs.append(oneof)
                message.oneof_decl.add(name=oneof)
            field.oneof_index = oneofs.index(oneof)


_CLASSES = _build()
