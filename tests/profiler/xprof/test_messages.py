"""Our messages are TensorFlow's: same numbers, same types, same bytes."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import xspace_messages as messages

tensorflow = importlib.util.find_spec("tensorflow")
FOLDER = Path(tensorflow.origin).parent if tensorflow and tensorflow.origin else Path("tensorflow is not installed")
needs_tensorflow_files = pytest.mark.skipif(tensorflow is None, reason="TensorFlow is not installed")


@pytest.mark.parametrize("module", ["xprof.messages", "xprof.client", "discovery"])
def test_nothing_heavy_is_imported_before_first_use(module):
    code = f"import gputop.profiler.{module}, sys; print([m for m in ('grpc', 'google.protobuf') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_unknown_message():
    with pytest.raises(AttributeError, match="Nope"):
        messages.Nope  # noqa: B018


def test_maps_oneofs_and_negative_ids():
    space = messages.XSpace()
    plane = space.planes.add()
    plane.event_metadata[-3].name = "x"
    plane.lines.add(id=-9).events.add(offset_ps=0)
    again = messages.XSpace.FromString(space.SerializeToString())
    assert again == space
    assert again.planes[0].event_metadata[-3].name == "x"
    assert again.planes[0].lines[0].events[0].WhichOneof("data") == "offset_ps"


def test_raw_response_holds_the_xspace_bytes():
    space = messages.XSpace(hostnames=["a"])
    response = messages.ProfileResponse(empty_trace=True, xspace=space)
    raw = messages.RawProfileResponse.FromString(response.SerializeToString())
    assert raw.empty_trace and raw.xspace == space.SerializeToString()


# TensorFlow's generated modules need nothing of TensorFlow but each other: loaded by path,
# in a process of their own, they cost milliseconds. Every field of every message gets a value.
ROUND_TRIP = """
import importlib.util, sys
from google.protobuf.json_format import MessageToDict
from tests import xspace_messages as messages

def load(name):
    spec = importlib.util.spec_from_file_location(name, f"{sys.argv[1]}/tsl/profiler/protobuf/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

VALUES = {1: 1.5, 3: -5, 4: 2**63 + 1, 5: 1, 8: True, 9: "text", 12: b"bytes", 13: 7, 14: 1}

def fill(message, oneof, depth=0):
    for field in message.DESCRIPTOR.fields:
        choices = field.containing_oneof.fields if field.containing_oneof else [field]
        if choices[oneof % len(choices)] != field:
            continue
        if field.name == "compressed_str_value" or depth > 4:
            continue  # newer than TensorFlow 2.21
        value = getattr(message, field.name)
        if field.type == 11 and field.message_type.GetOptions().map_entry:
            fill(value[-3], oneof, depth + 1)
        elif field.type == 11:
            fill(value.add() if hasattr(value, "add") else value, oneof, depth + 1)
        elif hasattr(value, "append"):
            value.append(VALUES[field.type])
        else:
            setattr(message, field.name, VALUES[field.type])

xplane, options = load("xplane_pb2"), load("profiler_options_pb2")
for ours, theirs in ((messages.XSpace, xplane.XSpace), (messages.ProfileOptions, options.ProfileOptions)):
    for oneof in range(7):
        message = ours()
        fill(message, oneof)
        data = message.SerializeToString(deterministic=True)
        parsed = theirs.FromString(data)
        plain = lambda m: MessageToDict(m, use_integers_for_enums=True, preserving_proto_field_name=True)
        assert plain(parsed) == plain(message), (plain(parsed), plain(message))
        assert ours.FromString(parsed.SerializeToString()) == message
        assert len(data) > 20
print("equal")
"""


@needs_tensorflow_files
def test_bytes_equal_those_of_tensorflows_classes():
    done = subprocess.run([sys.executable, "-c", ROUND_TRIP, str(FOLDER)], capture_output=True, text=True)
    assert done.stdout == "equal\n", done.stderr


@needs_tensorflow_files
def test_service_field_numbers_are_those_of_tensorflows_headers():
    """The service has no Python classes in TensorFlow; its C++ headers tell the numbers."""
    folder = FOLDER / "include/tensorflow/tsl/profiler/protobuf"
    text = (folder / "profiler_service.pb.h").read_text()
    theirs: dict[str, dict[str, int]] = {}
    for found in re.finditer(r"^class \S+ (\w+) final|^\s+k(\w+)FieldNumber = (\d+),", text, re.MULTILINE):
        if found[1]:
            fields = theirs.setdefault(found[1], {})
        else:
            fields[found[2]] = int(found[3])
    for name in ("ProfileRequest", "ProfileResponse", "TerminateRequest", "MonitorRequest"):
        ours = {"".join(part.capitalize() for part in f.name.split("_")): f.number
                for f in getattr(messages, name).DESCRIPTOR.fields}
        assert ours and ours.items() <= theirs[name].items(), name  # those that gputop uses
