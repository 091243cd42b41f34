"""Datagrams of any content; configs that kineto reads."""

from __future__ import annotations

import struct
from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputop.profiler.kineto.protocol import (
    MAX_DATAGRAM_BYTES,
    Message,
    RecordingConfig,
    decode,
    encode,
    encode_config,
    is_client_name,
    takes_config,
)

# Sent by torch 2.13.0 (its PIDs): 52 bytes of body, types 3.
_RECORDED = (b"\x2c" + bytes(7) + b"req" + bytes(29) + struct.pack("=iiq7i", 3, 7, 0, 28319, 28318, 28317, 28294, 28293,
                                                                  17151, 17150))


def test_a_poll_of_torch_is_understood():
    message = decode(_RECORDED)
    assert message is not None and message.type == "req"
    assert takes_config(message) is True


@pytest.mark.parametrize(("kind", "ready"), [(3, True), (2, True), (1, False), (0, False)])
def test_a_client_that_records_is_not_ready(kind, ready):
    assert takes_config(Message("req", struct.pack("=iiqi", kind, 1, 0, 5))) is ready


@pytest.mark.parametrize("datagram", [
    b"", b"req", bytes(40), _RECORDED[:-1], _RECORDED + b"x", b"\xff" * 8 + _RECORDED[8:],
    encode("req", bytes(MAX_DATAGRAM_BYTES)), _RECORDED[:8] + b"\xffeq" + _RECORDED[11:]],
    ids=["nothing", "short", "no type", "cut", "longer", "huge size", "too long", "no word"])
def test_what_is_no_message_is_none(datagram):
    assert decode(datagram) is None


@pytest.mark.parametrize("body", [
    b"", bytes(15), struct.pack("=iiq", 3, 1, 0), struct.pack("=iiq", 3, -1, 0), struct.pack("=iiq", 3, 2**31 - 1, 0),
    struct.pack("=iiq65i", 3, 65, 0, *range(65))])
def test_what_is_no_poll_is_none(body):
    assert takes_config(Message("req", body)) is None


def test_another_type_is_no_poll():
    assert takes_config(Message("ctxt", _RECORDED[40:])) is None


@given(st.binary(max_size=6000))
def test_any_datagram_is_taken(datagram):
    message = decode(datagram)
    if message is not None:
        assert encode(message.type, message.body)[40:] == message.body
        takes_config(message)


@given(st.text(max_size=80))
def test_a_client_s_name_leads_nowhere(name):
    assert not is_client_name(name) or "/" not in name


def test_a_client_s_name():
    assert is_client_name("dynoconfigclient717f161b-ee8f-455f-bb3a-90aec5acbe08")
    assert not is_client_name("dynoconfigclient/../x")
    assert not is_client_name("dynolog")


def test_a_config_says_what_to_record():
    config = RecordingConfig(PurePosixPath("/tmp/f/t.json"), 1500, 1_700_000_000_000, shapes=False)
    lines = config.text().split("\n")
    assert {"ACTIVITIES_LOG_FILE=/tmp/f/t.json", "ACTIVITIES_DURATION_MSECS=1500", "ACTIVITIES_WARMUP_PERIOD_SECS=0",
            "PROFILE_REPORT_INPUT_SHAPES=false", "PROFILE_WITH_MODULES=false",
            "PROFILE_START_TIME=1700000000000"} <= set(lines)
    assert config.written(12) == "t_12.json"
    assert encode_config(config.text())[8:11] == b"req"
    assert "PROFILE_START_TIME" not in RecordingConfig(PurePosixPath("/tmp/t.json"), 1).text()


@pytest.mark.parametrize("path", ["/tmp/a\nPROFILE_WITH_STACK=true", "/tmp/a b", "/tmp/ü", "t.json", "/tmp/a,b"])
def test_a_path_cannot_become_another_line(path):
    with pytest.raises(ValueError, match="does not accept the path"):
        RecordingConfig(PurePosixPath(path), 1).text()
