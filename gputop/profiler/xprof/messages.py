"""The messages of the profiler service, as protobuf classes made at run time.

There is no generated code: a table of fields becomes file descriptors in a descriptor pool
of our own, so nothing collides with the classes TensorFlow registers under the same names,
and one gputop works with every protobuf from 4.21 on.

``messages.ProfileRequest`` … are the classes; they are built on first use, and protobuf is not
imported before. Field numbers: openxla/xla and tensorflow/tensorflow, ``profiler_service.proto``,
``profiler_options.proto``, ``xplane.proto``. What a class has no field for it hands on as it came.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from google.protobuf.message import Message

SERVICE = "tensorflow.ProfilerService"

_PACKAGE = "tensorflow"
# Message -> "number name type"; the type may be preceded by "repeated". Enums travel as int32: same wire.
_SCHEMA: dict[str, tuple[str, ...]] = {
    "XSpace": ("1 planes repeated XPlane",),
    "XPlane": ("2 name string",),
    "ProfileOptions": (
        "5 version uint32", "6 device_type int32", "1 include_dataset_ops bool", "2 host_tracer_level uint32",
        "3 device_tracer_level uint32", "4 python_tracer_level uint32", "7 enable_hlo_proto bool",
        "8 start_timestamp_ns uint64", "9 duration_ms uint64", "10 repository_path string",
    ),
    "ProfileRequest": (
        "1 duration_ms uint64", "2 max_events uint64", "3 tools repeated string", "4 opts ProfileOptions",
        "5 repository_root string", "6 session_id string", "7 host_name string", "9 emit_xspace bool",
    ),
    # ProfileResponse with the XSpace left unparsed: a trace of 100 MB reaches the disk
    # without ever becoming millions of objects.
    "RawProfileResponse": ("7 empty_trace bool", "8 xspace bytes"),
    "TerminateRequest": ("1 session_id string",),
    "TerminateResponse": (),
    "MonitorRequest": ("1 duration_ms uint64", "2 monitoring_level int32", "3 timestamp bool"),
}

# descriptor.proto's numbers for the scalar types used above.
_SCALARS = {"uint64": 4, "int32": 5, "bool": 8, "string": 9, "bytes": 12, "uint32": 13}
_MESSAGE = 11
_OPTIONAL, _REPEATED = 1, 3

_lock = threading.Lock()
_classes: dict[str, type[Message]] = {}


def __getattr__(name: str) -> Any:
    if name not in _SCHEMA:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _lock:
        if not _classes:
            _classes.update(_build())
    return _classes[name]


def _build() -> dict[str, type[Message]]:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    pool = descriptor_pool.DescriptorPool()
    file = descriptor_pb2.FileDescriptorProto(name=f"gputop/{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3")
    for name, specs in _SCHEMA.items():
        message = file.message_type.add(name=name)
        for spec in specs:
            number, field_name, *repeated, type_name = spec.split(" ")
            field: Any = message.field.add(
                name=field_name, number=int(number), label=_REPEATED if repeated else _OPTIONAL)
            if type_name in _SCALARS:
                field.type = _SCALARS[type_name]
            else:
                field.type, field.type_name = _MESSAGE, f".{_PACKAGE}.{type_name}"
    pool.AddSerializedFile(file.SerializeToString())

    get_class = getattr(message_factory, "GetMessageClass", None)  # protobuf >= 4.22
    if get_class is None:
        get_class = message_factory.MessageFactory(pool).GetPrototype  # type: ignore[attr-defined]
    return {name: get_class(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _SCHEMA}
