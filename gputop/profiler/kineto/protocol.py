"""Messages between kineto's clients and their daemon (libkineto, DaemonConfigLoader and dynolog's ipcfabric).

A datagram is the size of its body (size_t), its type (32 bytes of text, ended by a zero) and the body. All numbers are
in the byte order and width of this machine: the socket does not leave it. Pure functions; any input is possible.
"""

from __future__ import annotations

import struct
from pathlib import PurePosixPath

from msgspec import Struct

DAEMON_NAME = "dynolog"  # of the daemon's socket in its folder
CLIENT_PREFIX = "dynoconfigclient"  # of a client's socket, before a UUID
HOLDING_PREFIX = f"{CLIENT_PREFIX}-"  # of that of gputop's own code in a job, which records with torch.profiler
MAX_FOLDER_CHARS = 55  # of KINETO_IPC_SOCKET_DIR: the client's socket has a name of 52 characters more
MAX_DATAGRAM_BYTES = 4096  # a request has 16 bytes and 4 for each ancestor; gputop's own message is short, too
REQUEST, GPUTOP = "req", "gputop"  # types of messages: kineto's only one, and that of gputop's code in a job

_HEADER = struct.Struct("=Q32s")
_REQUEST = struct.Struct("=iiq")  # struct LibkinetoRequest: type, number of PIDs, id of the job
_MAX_PIDS = 64  # a process has few ancestors; kineto itself sends at most 10
_CONFIG_BYTES = 2048
# Of libkineto's LibkinetoConfigType, a mask: it takes a config for events (1), for activities (2), or none at all.
_TAKES_ACTIVITIES = 2


class Message(Struct, frozen=True):
    """A datagram that is whole."""

    type: str
    body: bytes


class RecordingConfig(Struct, frozen=True):
    """Settings of one recording, and where the job's process writes it.

    ``file`` is a path as the job sees it; the process writes to :meth:`written`. ``start_ms``: Unix time;
    where that is too soon, as 0 is, it begins ``lead_ms`` after its request.
    """

    file: PurePosixPath
    duration_ms: int
    start_ms: int = 0
    lead_ms: int = 2000
    shapes: bool = True

    def text(self) -> str:
        """The lines of the config. Raises ValueError where the path cannot stand in one."""
        file = str(self.file)
        if not file.isascii() or not file.isprintable() or any(c in file for c in " ,#=\\") or not file.startswith("/"):
            raise ValueError(f"kineto does not accept the path {file!r}")
        lines = [f"ACTIVITIES_LOG_FILE={file}",
                 f"ACTIVITIES_DURATION_MSECS={self.duration_ms}",
                 "ACTIVITIES_WARMUP_PERIOD_SECS=0",  # 5 otherwise
                 "ACTIVITIES_MAX_GPU_BUFFER_SIZE_MB=512",
                 f"PROFILE_REPORT_INPUT_SHAPES={str(self.shapes).lower()}",
                 "PROFILE_WITH_STACK=false",
                 "PROFILE_WITH_MODULES=false"]
        if self.start_ms:
            lines.append(f"PROFILE_START_TIME={self.start_ms}")
        return "\n".join(lines)

    def written(self, pid: int) -> str:
        """The name of the file that the process writes; ``pid`` is its own as it sees it."""
        return f"{self.file.stem}_{pid}{self.file.suffix}"


def decode(datagram: bytes) -> Message | None:
    """The message in a datagram; None where it is none: too short, too long, cut, or of a type that is no word."""
    if not _HEADER.size <= len(datagram) <= MAX_DATAGRAM_BYTES:
        return None
    size, name = _HEADER.unpack_from(datagram)
    body = datagram[_HEADER.size:]
    name = name.partition(b"\0")[0]
    if size != len(body) or not name.isalnum():  # of bytes: ASCII only
        return None
    return Message(name.decode("ascii"), body)


def encode(type: str, body: bytes) -> bytes:
    return _HEADER.pack(len(body), type.encode("ascii")) + body


def encode_config(config: str) -> bytes:
    """The answer to a poll; an empty config is "nothing to record". Raises ValueError where it is too long."""
    body = config.encode("ascii")
    if len(body) > _CONFIG_BYTES:
        raise ValueError(f"a config of {len(body)} bytes is too long")
    return encode(REQUEST, body)


def takes_config(message: Message) -> bool | None:
    """Return whether the client that polls takes a config now, and is not busy with a recording; None for a message
    that is no poll. Whom else it names, whoever sends it may claim."""
    if message.type != REQUEST or len(message.body) < _REQUEST.size:
        return None
    kind, number, _ = _REQUEST.unpack_from(message.body)
    if not 0 <= number <= _MAX_PIDS or len(message.body) != _REQUEST.size + 4 * number:
        return None
    return bool(kind & _TAKES_ACTIVITIES)


def is_client_name(name: str) -> bool:
    """Return whether a socket in a daemon's folder has the name of a client."""
    rest = name.removeprefix(CLIENT_PREFIX)
    return rest != name and len(rest) <= 40 and all(c in "0123456789abcdefABCDEF-" for c in rest)
