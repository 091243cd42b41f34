"""Reads a pickle that holds plain values, and nothing else.

Python's own ``pickle`` imports and calls what a file names; its C version also makes room for the memo that a file
asks for. This machine knows only the opcodes of None, bool, int, float, str, bytes, tuple, list and dict (PEP 307,
PEP 3154, CPython's Lib/pickletools.py): there is nothing in it that could import or call. Its time is in proportion to
the bytes that were read, and its memory bounded. What is used twice is one object: whoever looks at all uses of it may
look for hours.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from gputop.core.errors import GputopError

MAX_BYTES = 32 << 20  # 2,000 entries with 20 frames each take some 3 MB
MAX_OPCODES = 6_000_000
MAX_CONTAINERS = 1_000_000  # each takes some 200 bytes, and as little as one in the file
MAX_DEPTH = 32
_MAX_INTEGER_BYTES = 16
_MARK = object()
_NOT_READ = "PyTorch does not write such content into a flight recorder dump."


class _Damaged(Exception):
    """Error that says why the bytes are no pickle of plain values."""


def load(data: bytes, name: str) -> Any:
    """The value; ``name`` is what messages call the file. Raises GputopError.

    A list or dict that is used twice is the same object in both places. None contains itself.
    """
    try:
        if len(data) > MAX_BYTES:
            raise _Damaged(f"it is larger than {MAX_BYTES >> 20} MiB")
        return _Machine(data).run()
    except _Damaged as error:
        raise GputopError(f"gputop rejected {name}: {error}", _NOT_READ) from None


class _Machine:
    """The stack machine of the pickle format, over bytes in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._next = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        # By id; the memo and _kept hold the containers, so that no id is used twice.
        self._depth: dict[int, int] = {}
        self._shared: set[int] = set()
        self._kept: list[Any] = []

    def run(self) -> Any:
        data, actions = self._data, _ACTIONS
        for _ in range(MAX_OPCODES):
            if self._next >= len(data):
                raise _Damaged("it is cut")
            opcode = data[self._next]
            self._next += 1
            if opcode == 0x2E:  # STOP
                if len(self._stack) != 1 or self._stack[0] is _MARK:
                    raise _Damaged("it does not end with a single value")
                return self._stack[0]
            action = actions.get(opcode)
            if action is None:
                raise _Damaged(f"it contains more than plain values ({_opcode_name(opcode)} at byte {self._next - 1})")
            action(self)
        raise _Damaged(f"it has more than {MAX_OPCODES:,} instructions")

    def take(self, count: int) -> bytes:
        end = self._next + count
        if end > len(self._data):
            raise _Damaged("it is cut")
        part = self._data[self._next:end]
        self._next = end
        return part

    def number(self, form: str) -> Any:
        layout = struct.Struct(form)
        return layout.unpack(self.take(layout.size))[0]

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def push_text(self, length_form: str) -> None:
        # surrogatepass as pickle itself does: a file's name may hold any bytes.
        try:
            self.push(str(self.take(self.number(length_form)), "utf-8", "surrogatepass"))
        except UnicodeDecodeError:
            raise _Damaged("a string in it is not UTF-8") from None

    def push_integer(self) -> None:
        length = self.number("<B")
        if length > _MAX_INTEGER_BYTES:
            raise _Damaged(f"a number in it has more than {_MAX_INTEGER_BYTES} bytes")
        self.push(int.from_bytes(self.take(length), "little", signed=True))

    def push_container(self, value: list[Any] | dict[str, Any]) -> None:
        self._keep(value, 1)
        self.push(value)

    def push_tuple(self, items: list[Any]) -> None:
        whole = tuple(items)
        self._keep(whole, 1 + self._deepest(items))
        self.push(whole)

    def _keep(self, container: Any, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise _Damaged(f"it is nested more than {MAX_DEPTH} levels deep")
        if id(container) not in self._depth:  # the empty tuple is one object
            if len(self._kept) >= MAX_CONTAINERS:
                raise _Damaged(f"it has more than {MAX_CONTAINERS:,} lists, tuples and dicts")
            self._kept.append(container)
        self._depth[id(container)] = depth

    def _deepest(self, items: list[Any]) -> int:
        depth = self._depth
        return max((depth.get(id(item), 0) for item in items), default=0)

    def pop(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise _Damaged("it uses a value that does not exist")
        return self._stack.pop()

    def pop_last(self, count: int) -> list[Any]:
        return [self.pop() for _ in range(count)][::-1]

    def pop_to_mark(self) -> list[Any]:
        items: list[Any] = []
        while self._stack:
            item = self._stack.pop()
            if item is _MARK:
                return items[::-1]
            items.append(item)
        raise _Damaged("it uses a value that does not exist")

    def _target(self, kind: type, items: list[Any]) -> Any:
        """The container on top, which ``items`` go into. One that was used elsewhere takes none: it could contain
        itself."""
        if not self._stack or type(self._stack[-1]) is not kind:
            raise _Damaged("it adds items to a value that is not a container")
        target = self._stack[-1]
        if id(target) in self._shared:
            raise _Damaged("it changes a container that is already used elsewhere")
        self._keep(target, max(self._depth[id(target)], 1 + self._deepest(items)))
        return target

    def append(self, items: list[Any]) -> None:
        self._target(list, items).extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self._target(dict, items)
        keys = items[::2]
        if len(items) % 2 or not all(type(key) is str for key in keys):
            raise _Damaged("a key in it is not a string")
        target.update(zip(keys, items[1::2], strict=True))

    def memoize(self, index: int) -> None:
        if not self._stack or self._stack[-1] is _MARK:
            raise _Damaged("it stores a value that does not exist")
        self._memo[index] = self._stack[-1]

    def recall(self, index: int) -> None:
        if index not in self._memo:
            raise _Damaged("it loads a value that it did not store")
        value = self._memo[index]
        self._shared.add(id(value))
        self.push(value)


_ACTIONS: dict[int, Callable[[_Machine], object]] = {
    0x80: lambda m: m.take(1),  # PROTO
    0x95: lambda m: m.take(8),  # FRAME: how much to read ahead
    0x28: lambda m: m.push(_MARK),  # MARK
    0x4E: lambda m: m.push(None),  # NONE
    0x88: lambda m: m.push(True),  # NEWTRUE
    0x89: lambda m: m.push(False),  # NEWFALSE
    0x4A: lambda m: m.push(m.number("<i")),  # BININT
    0x4B: lambda m: m.push(m.number("<B")),  # BININT1
    0x4D: lambda m: m.push(m.number("<H")),  # BININT2
    0x8A: _Machine.push_integer,  # LONG1
    0x47: lambda m: m.push(m.number(">d")),  # BINFLOAT
    0x58: lambda m: m.push_text("<I"),  # BINUNICODE
    0x8C: lambda m: m.push_text("<B"),  # SHORT_BINUNICODE
    0x42: lambda m: m.push(m.take(m.number("<I"))),  # BINBYTES
    0x43: lambda m: m.push(m.take(m.number("<B"))),  # SHORT_BINBYTES
    0x5D: lambda m: m.push_container([]),  # EMPTY_LIST
    0x61: lambda m: m.append(m.pop_last(1)),  # APPEND
    0x65: lambda m: m.append(m.pop_to_mark()),  # APPENDS
    0x7D: lambda m: m.push_container({}),  # EMPTY_DICT
    0x73: lambda m: m.set_items(m.pop_last(2)),  # SETITEM
    0x75: lambda m: m.set_items(m.pop_to_mark()),  # SETITEMS
    0x29: lambda m: m.push_tuple([]),  # EMPTY_TUPLE
    0x74: lambda m: m.push_tuple(m.pop_to_mark()),  # TUPLE
    0x85: lambda m: m.push_tuple(m.pop_last(1)),  # TUPLE1
    0x86: lambda m: m.push_tuple(m.pop_last(2)),  # TUPLE2
    0x87: lambda m: m.push_tuple(m.pop_last(3)),  # TUPLE3
    0x71: lambda m: m.memoize(m.number("<B")),  # BINPUT
    0x72: lambda m: m.memoize(m.number("<I")),  # LONG_BINPUT
    0x94: lambda machine: machine.memoize(len(machine._memo)),  # MEMOIZE
    0x68: lambda m: m.recall(m.number("<B")),  # BINGET
    0x6A: lambda m: m.recall(m.number("<I")),  # LONG_BINGET
}


def _opcode_name(opcode: int) -> str:
    import pickletools  # for a message only

    return next((entry.name for entry in pickletools.opcodes if entry.code == chr(opcode)), f"byte {opcode:#04x}")
