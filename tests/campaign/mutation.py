"""Inputs that nobody meant to write, made of ones that somebody did.

Each kind of file is changed in its own structure as well as in its bytes: a length that lies is seldom made by flipping
a bit, and a wrong checksum hides everything behind it.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import sqlite3
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gputop.replay.format import HEADER, RECORD, record
from tests.profiler.fake_server import varint

MAX_BYTES = 1 << 18  # of one input
_NUMBERS = (0, 1, -1, 127, 128, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**53 + 1, 2**62, 2**63 - 1, 2**63,
            2**64 - 1, -(2**63), 10**30, 10**400)
_FLOATS = (0.5, -0.0, 1e-320, 1e30, 1e308, -1e308, float("inf"), float("nan"))
_TEXTS = ("", "\x1b[2J\x1b]0;title\x07", "\x9b31m", "\u202eabc\u2066", "\ud800", "\x00", "\r\n", "a" * 5000,
          "/etc/passwd", "../../../x", "{BAIT}", "%s%n{0}", "[bold]x[/bold]", "<script>", "NaN", "1e999", "-1", "GPU-0",
          "/device:GPU:0", "/host:CPU", "train", "ncclAllReduce", "🜲")
_NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?")  # in a text, as Prometheus has its values
_NUMBER_TEXTS = ("0", "-1", "0.5", "-0.0", "1", "1e13", "-1e13", "9.9e13", "1e-300", "1e6", "99999999999", "1e999")
_DIGITS = re.compile(rb"[0-9]+")
# In names, too: more than int() takes, and such as only isdigit() or isdecimal() does.
_OTHER_DIGITS = (b"0", b"00000000000000000001", b"9" * 30, b"9" * 5000, "\u00b2".encode(), "\u0663".encode())
_TOKENS = (b"\xff" * 10, b"\x00" * 8, b"\x80" * 9 + b"\x01", b"\x1b]52;c;QQ==\x07", b"1e999", b"[" * 200,
           b'{"a":' * 200, b'"\\ud800"', b"null", b"-9223372036854775809", b"\xf0\x9f\x9c\xb2", b"'''",
           b"\x7f\xff\xff\xff", b"\x1f\x8b",
           b"SQLite format 3\x00")


def mutated(random_: random.Random, seeds: Sequence[bytes], kind: str) -> bytes:
    """A new input made of one or two of ``seeds``; ``kind`` is a key of :data:`STRUCTURES`, or anything else."""
    data = random_.choice(seeds)
    change = STRUCTURES.get(kind)
    if change is not None and random_.random() < 0.7:
        data = change(random_, data)
        if random_.random() < 0.8:
            return data[:MAX_BYTES]
    for _ in range(random_.choice((1, 1, 2, 4, 16))):
        data = _bytes(random_, data, seeds)
    return data[:MAX_BYTES]


def _bytes(random_: random.Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    at = random_.randrange(len(data) + 1)
    end = min(len(data), at + random_.choice((1, 2, 4, 8, 64, 1024)))
    piece = data[at:end]
    how = random_.randrange(9)
    if how == 8:
        return _renumbered(random_, data, at)
    if how == 0 and piece:
        return data[:at] + bytes((piece[0] ^ 1 << random_.randrange(8),)) + data[at + 1:]
    if how == 1:
        return data[:at] + data[end:]
    if how == 2:
        return data[:at] + piece * random_.choice((2, 3, 100)) + data[end:]
    if how == 3:
        return data[:at] + random_.choice(_TOKENS) + data[random_.choice((at, end)):]
    if how == 4:
        number = random_.choice(_NUMBERS) & (2**64 - 1)
        size = random_.choice((1, 2, 4, 8))
        raw = random_.choice((varint(number), number.to_bytes(8, "little")[:size], number.to_bytes(8, "big")[-size:]))
        return data[:at] + raw + data[at + len(raw):]
    if how == 5:
        other = random_.choice(seeds)
        begin = random_.randrange(len(other) + 1)
        return data[:at] + other[begin:begin + random_.choice((8, 256, 1 << 16))] + data[end:]
    if how == 6:
        return data[:at]
    return data[:at] + random_.randbytes(len(piece)) + data[end:]


def _renumbered(random_: random.Random, data: bytes, at: int = 0) -> bytes:
    """With other digits in the place of the next ones."""
    found = _DIGITS.search(data, at)
    return data[:found.start()] + random_.choice(_OTHER_DIGITS) + data[found.end():] if found else data


# -- protobuf ------------------------------------------------------------------------------------


def _fields(data: bytes) -> list[tuple[int, int, Any]] | None:
    """The fields of a message: number, wire type, value; None where it is none."""
    found, at = [], 0
    try:
        while at < len(data):
            key, at = _varint(data, at)
            number, wire = key >> 3, key & 7
            if number == 0 or wire not in (0, 1, 2, 5):
                return None
            if wire == 0:
                value, at = _varint(data, at)
                found.append((number, wire, value))
                continue
            size, at = _varint(data, at) if wire == 2 else (8 if wire == 1 else 4, at)
            if at + size > len(data):
                return None
            found.append((number, wire, data[at:at + size]))
            at += size
    except IndexError:
        return None
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value & (2**64 - 1), at


def _encoded(fields: Sequence[tuple[int, int, Any]]) -> bytes:
    out = bytearray()
    for number, wire, value in fields:
        out += varint(number << 3 | wire)
        out += varint(value) if wire == 0 else (varint(len(value)) if wire == 2 else b"") + value
    return bytes(out)


def protobuf(random_: random.Random, data: bytes, depth: int = 0) -> bytes:
    """One to three fields changed, removed, repeated or moved, at any depth; every length around them is right."""
    fields = _fields(data)
    if not fields:
        return _bytes(random_, data, (data,))
    for _ in range(random_.choice((1, 1, 3)) if depth == 0 else 1):
        at = random_.randrange(len(fields))
        number, wire, value = fields[at]
        how = random_.randrange(7)
        if wire == 2 and how < 5 and depth < 6:
            fields[at] = (number, wire, protobuf(random_, value, depth + 1))
        elif how == 0:
            fields[at:at + 1] = []
        elif how == 1:
            fields[at:at] = [fields[at]] * random_.choice((1, 10, 300))
        elif how == 2:
            fields[at] = (random_.randrange(1, 16), wire, value)
        elif wire == 0:
            fields[at] = (number, 0, random_.choice((*_NUMBERS[:-2], value + 1, random_.getrandbits(64))) & (2**64 - 1))
        elif wire == 2:
            text = random_.choice(_TEXTS).encode("utf-8", "surrogatepass")
            fields[at] = (number, 2, random_.choice((text, value + text, value[:len(value) // 2],
                                                         _renumbered(random_, value))))
        else:
            fields[at] = (number, wire, random_.randbytes(len(value)))
        if not fields:
            break
    return _encoded(fields)


# -- JSON ----------------------------------------------------------------------------------------


def document(random_: random.Random, data: bytes) -> bytes:
    """A JSON document with one to five values of another type, size or text."""
    try:
        root = json.loads(data)
    except (ValueError, RecursionError):
        return _bytes(random_, data, (data,))
    for _ in range(random_.choice((1, 1, 2, 5))):
        at: Any = root
        while isinstance(at, (dict, list)) and at:
            key = random_.choice(list(at) if isinstance(at, dict) else range(len(at)))
            if not isinstance(at[key], (dict, list)) or not at[key] or random_.random() < 0.12:
                if isinstance(at, dict) and random_.random() < 0.15:
                    at[random_.choice(_TEXTS)] = at.pop(key)
                elif random_.random() < 0.1:
                    del at[key]
                else:
                    at[key] = _value(random_, at[key])
                break
            at = at[key]
    try:
        text = json.dumps(root, ensure_ascii=random_.random() < 0.5)
    except (ValueError, RecursionError):
        return data
    return text.replace("Infinity", "1e999").encode("utf-8", "surrogatepass")


def _value(random_: random.Random, before: Any) -> Any:
    if isinstance(before, str) and _NUMBER.fullmatch(before) and random_.random() < 0.6:
        return random_.choice(_NUMBER_TEXTS)
    if isinstance(before, str) and random_.random() < 0.3:
        return _renumbered(random_, before.encode("utf-8", "surrogatepass")).decode("utf-8", "surrogatepass")
    how = random_.randrange(8)
    if how == 0:
        return random_.choice(_TEXTS)
    if how == 1:
        return random_.choice(_NUMBERS)
    if how == 2:
        return random_.choice(_FLOATS)
    if how == 3:
        return random_.choice((None, True, False, [], {}, [[]], [None], {"": None}))
    if how == 4:
        return [before] * random_.choice((1, 3, 500))
    if how == 5 and isinstance(before, (int, float)) and abs(before) < 1e300:
        return before * random_.choice((-1, 0, 1e9, 1e-9))
    if how == 6 and isinstance(before, list):
        return before[:random_.randrange(len(before) + 1)] + before
    return {"x": before} if how == 7 else str(before)


# -- recordings ----------------------------------------------------------------------------------


def recording(random_: random.Random, data: bytes) -> bytes:
    """Records with other contents under right checksums: the text of dictionaries, the numbers of samples."""
    out, at = bytearray(data[:HEADER.size]), HEADER.size
    while at + RECORD.size <= len(data):
        kind, length, _ = RECORD.unpack_from(data, at)
        payload = data[at + RECORD.size:at + RECORD.size + length]
        at += RECORD.size + length
        if random_.random() < 0.2:
            if kind == 2:
                try:
                    payload = zlib.compress(document(random_, zlib.decompress(payload)))
                except zlib.error:
                    payload = _bytes(random_, payload, (data,))
            else:
                payload = _bytes(random_, payload, (data,))
            kind = random_.choice((kind, kind, kind, kind, random_.randrange(5)))
        out += record(kind, payload)
    return bytes(out)


# -- SQLite --------------------------------------------------------------------------------------

_SQL_VALUES = ("NULL", "'x'", "X'00ff'", "1e300", "-1", "0", "9223372036854775807", "-9223372036854775808",
               "char(27)||'[2J'", "zeroblob(100000)", "printf('%.*c', 5000, 'x')", "'1e999'", "4611686018427387904")


def database(random_: random.Random, data: bytes) -> bytes:
    """A report in which SQLite itself has changed values, rows, columns and tables."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.sqlite"
        path.write_bytes(data)
        connection = sqlite3.connect(path)
        try:
            for _ in range(random_.choice((1, 2, 5))):
                tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
                table = random_.choice(tables)
                columns = [row[1] for row in connection.execute(f'PRAGMA table_info("{table}")')]
                column, value = random_.choice(columns), random_.choice(_SQL_VALUES)
                some = random_.choice(("", " WHERE rowid % 2", " WHERE rowid = 1"))
                connection.execute(random_.choice((
                    f'UPDATE "{table}" SET "{column}" = {value}{some}',
                    f'UPDATE "{table}" SET "{column}" = "{random_.choice(columns)}"{some}',
                    f'DELETE FROM "{table}"{some}', f'DROP TABLE "{table}"',
                    f'INSERT INTO "{table}" SELECT * FROM "{table}"',
                    f'ALTER TABLE "{table}" RENAME COLUMN "{column}" TO "x{random_.randrange(99)}"',
                )))
                connection.commit()
        except (sqlite3.Error, IndexError, ValueError):  # what it wrote before is damage enough
            pass
        finally:
            connection.close()
        return path.read_bytes()


def _compressed(change: Callable[[random.Random, bytes], bytes]) -> Callable[[random.Random, bytes], bytes]:
    """The same for the content of a gzip file."""
    def changed(random_: random.Random, data: bytes) -> bytes:
        try:
            return gzip.compress(change(random_, gzip.decompress(data)), 1)
        except (OSError, EOFError, zlib.error):
            return _bytes(random_, data, (data,))
    return changed


STRUCTURES: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "protobuf": protobuf, "protobuf.gz": _compressed(protobuf), "json": document, "json.gz": _compressed(document),
    "recording": recording, "sqlite": database,
}
