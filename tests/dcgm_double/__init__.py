"""A contract double of NVIDIA's Python bindings of DCGM and of the host engine behind them.

It behaves as real host engines 4.6.0 and 3.3.9 were seen to (telemetry facts), as far as gputop
uses them. :func:`install` lays the bindings out as DCGM 3 or 4 does; :class:`HostEngine` is what
they talk to. In a subprocess the engine is made from the environment, once something is connected to::

    DCGM_DOUBLE='{"port": 5555, "gpus": [{"id": 0, "uuid": "GPU-0"}], "watched": [1002], "figures": {"1002": 0.5}}'

where the test listens on that port. With ``"answers": 3`` it dies after so many answers.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from tests.waiting import PATIENCE_S

LAYOUT = {
    4: "usr/share/datacenter-gpu-manager-4/bindings/python3",
    3: "usr/local/dcgm/bindings/python3",
}
INT_BLANK = 0x7FFFFFFFFFFFFFF0
DOUBLE_BLANK = 140737488355328.0
RATIOS = frozenset(range(1001, 1009))
PROFILING = frozenset(range(1001, 1013))
DOUBLES = RATIOS | {155, 164}
INTEGERS = frozenset((52, 63, 100, 101, 112, 113, 114, 140, 150, 158, 203, 206, 207, 230, 235, 236, 237, 238, 250, 252,
                      253, 310, 311, 313, 393, 394, 395, 396, 1009, 1010, 1011, 1012))
ZEROS = frozenset((140, 393, 394, 395, 396))  # of a GPU that the driver calls lost, although nobody measured them
NO_TEXT = "<<<NULL>>>"  # in place of a text, as the name of a GPU that was lost at the start
INSTANCES = 1000  # tables of the double have instance 3 under 1003
_FILES = {
    "dcgm_structs": "from tests.dcgm_double.structs import *\nfrom tests.dcgm_double.structs import Library\n"
                    "from tests.dcgm_double.structs import DCGMError\n"
                    "_library = Library({major})  # libdcgm.so.{major}\n"
                    "_dcgmInit = _library.load\n_dcgmGetFunctionPointer = _library.pointer\n",
    "dcgm_fields": "import dcgm_structs\nDCGM_FT_DOUBLE = 'd'\nDCGM_FT_INT64 = 'i'\n",
    "dcgmvalue": "DCGM_INT64_BLANK = 0x7ffffffffffffff0\n",
    "dcgm_agent": "import dcgm_structs\nimport dcgm_fields\nimport dcgmvalue\n"
                  "from tests.dcgm_double.agent import Agent\n"
                  "globals().update(Agent(dcgm_structs._library).functions())\n",
    "pydcgm": "import dcgm_agent\n",
}


def install(root: Path, *majors: int, library: bool = True) -> Path:
    """Lay out the bindings of DCGM ``majors`` below ``root``, with their libraries; returns ``root``."""
    for major in majors:
        install_bindings(root / LAYOUT[major], major)
        if library:
            install_library(root / "usr/lib" / f"{platform.machine()}-linux-gnu", major)
    return root


def install_bindings(folder: Path, major: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in _FILES.items():
        (folder / f"{name}.py").write_text(text.format(major=major))
    return folder


def install_library(folder: Path, major: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"libdcgm.so.{major}"
    path.write_bytes(b"")
    return path


def number(kind: int, entity: int) -> int:
    assert kind in (1, 4), "neither a GPU nor a GPU instance"
    return entity + (INSTANCES if kind == 4 else 0)


@dataclass
class Gpu:
    """A GPU of the engine. ``profiling`` None: the engine cannot profile it. ``instances``: NVML's ids of its
    GPU instances (MIG) by DCGM's number."""

    id: int
    uuid: str
    name: str = "NVIDIA A100-SXM4-80GB"
    bus: str = "00000000:07:00.0"
    driver: str = "550.54.15"
    profiling: frozenset[int] | None = PROFILING
    instances: dict[int, int] = field(default_factory=dict)


@dataclass
class _Sample:
    value: float
    time_us: int
    status: int = 0


@dataclass
class Client:
    """What the engine keeps for a connection, and forgets with it."""

    engine: HostEngine
    alive: bool = True
    groups: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    field_groups: dict[int, tuple[str, list[int]]] = field(default_factory=dict)
    watches: dict[tuple[int, int], tuple[int, float, int]] = field(default_factory=dict)  # of groups: us, keep, number


class HostEngine:
    """One host engine. Listens on a real port or socket, which a client's first check connects to."""

    all: ClassVar[list[HostEngine]] = []

    def __init__(self, gpus: Iterable[Gpu], *, version: str = "4.6.0", path: str = "",
                 clock: Callable[[], float] = time.time, elsewhere: int = 0) -> None:
        """``elsewhere`` is a port that another process listens on; such an engine is ``live``."""
        self.gpus = {gpu.id: gpu for gpu in gpus}
        self.version = version
        self.clock = clock
        self.alive = True
        self.answers: int | None = None  # after so many it dies
        self.clients: list[Client] = []
        self.others: set[tuple[int, int]] = set()  # (gpu, field) that somebody else watches
        self.other_groups: list[tuple[str, list[int]]] = []
        self.figures: dict[tuple[int, int], float] = {}
        self.samples: dict[tuple[int, int], _Sample] = {}
        self.stuck: set[tuple[int, int]] = set()  # never updated again: see the refused watch below
        self.lost: set[int] = set()  # GPUs that give blanks with status 0 for ever and join no group (-18)
        self.silent: set[int] = set()  # GPUs that NVML answers for with code 15: blanks, some zeros, no refusal
        self.error_lines = 0  # in the engine's log: one for each value that is read and has an error
        self.wild_counts = False  # answers say that they hold more than their arrays
        self.unknown: set[int] = set()
        self.fails: dict[str, int] = {}  # by function: the code it returns
        self.bad_gpus: set[int] = set()  # a read that names one fails as a whole
        self.died_of_live_data = False
        self.calls: Counter[str] = Counter()
        self.read_ids: list[list[int]] = []
        self._hang_in = ""
        self._hanging, self._released = threading.Event(), threading.Event()
        self._numbers = iter(range(1, 1 << 30))
        self._path = path
        self.live = bool(elsewhere)  # updates at every read
        self._socket = socket.socket() if elsewhere else self._listen(0)
        self.port = elsewhere or (0 if path else int(self._socket.getsockname()[1]))
        HostEngine.all.append(self)

    def _listen(self, port: int) -> socket.socket:
        if self._path:
            Path(self._path).unlink(missing_ok=True)
            listening = socket.socket(socket.AF_UNIX)
            listening.bind(self._path)
            listening.listen()
            return listening
        return socket.create_server(("127.0.0.1", port))

    @property
    def address(self) -> str:
        return f"unix://{self._path}" if self._path else f"127.0.0.1:{self.port}"

    def serves(self, address: str, is_path: bool) -> bool:
        return address == (self._path if is_path else self.address) and bool(self._path) == is_path

    def close(self) -> None:
        self.stop()
        self.release()
        if self in HostEngine.all:
            HostEngine.all.remove(self)

    # -- what tests do with it ----------------------------------------------------------------

    def stop(self) -> None:
        """The engine dies: connections end, and nothing listens any more."""
        self.alive = False
        for client in self.clients:
            client.alive = False
        self.clients.clear()
        self._socket.close()

    def start(self) -> None:
        """A new engine at the same place: it knows nothing of the old one's clients and samples."""
        self._socket = self._listen(self.port)
        self.samples.clear()
        self.stuck.clear()
        self.alive = True

    def watched_by_others(self, ids: Iterable[int], gpus: Iterable[int] | None = None) -> None:
        wanted = list(ids)
        self.others |= {(gpu, i) for gpu in (self.gpus if gpus is None else gpus) for i in wanted}
        self.other_groups.append((f"watch-{len(self.other_groups)}", wanted))

    def watched_by_nobody_else(self) -> None:
        """The other clients go, and with them their watches and field groups; the last values stay."""
        self.others.clear()
        self.other_groups.clear()

    def watched(self) -> set[tuple[int, int]]:
        """(GPU, field); a GPU instance has its number from :data:`INSTANCES` on. A late call of another thread may
        destroy groups meanwhile."""
        own = {
            (number(kind, entity), i)
            for client in list(self.clients)
            for group, fields in list(client.watches)
            for kind, entity in client.groups.get(group, ())
            for i in client.field_groups.get(fields, ("", ()))[1]}
        return own | self.others

    def update(self) -> None:
        """Read every watched field once; the first sample of a profiling field is blank."""
        now_us = round(self.clock() * 1e6)
        for key in self.watched() - self.stuck:
            if key[1] == 230:  # comes by event: see xid()
                continue
            if key[0] in self.silent and key[1] in ZEROS:
                self.samples[key] = _Sample(0, now_us)
            elif (key[1] in PROFILING and key not in self.samples) or key[0] in self.lost | self.silent:
                self.samples[key] = _Sample(DOUBLE_BLANK if key[1] in DOUBLES else INT_BLANK, now_us)
            elif key in self.figures:
                self.samples[key] = _Sample(self.figures[key], now_us)

    def xid(self, gpu: int, number: int) -> None:
        self.samples[gpu, 230] = _Sample(number, round(self.clock() * 1e6))

    def hang(self, function: str) -> None:
        """Let the next call of ``function`` block until :meth:`release`."""
        self._hang_in = function

    def await_hanging(self) -> bool:
        return self._hanging.wait(PATIENCE_S)

    def release(self) -> None:
        self._hang_in = ""
        self._released.set()

    # -- what the bindings do with it ----------------------------------------------------------

    def enter(self, function: str) -> int:
        """A call has come in; the code that it is to fail with."""
        self.calls[function] += 1
        if self.live and function == "dcgmEntitiesGetLatestValues":
            self.update()
            if self.calls[function] == self.answers:
                self.stop()
        if function == self._hang_in:
            self._hang_in = ""
            self._hanging.set()
            self._released.wait(PATIENCE_S)
        return self.fails.get(function, 0)

    def next_number(self) -> int:
        return next(self._numbers)

    def field_names(self) -> list[tuple[str, list[int]]]:
        return self.other_groups + [group for client in self.clients for group in client.field_groups.values()]


def engine_at(address: str, is_path: bool) -> HostEngine | None:
    """The engine that listens there; in a subprocess the one that its environment describes."""
    found = next((e for e in HostEngine.all if e.alive and e.serves(address, is_path)), None)
    if not HostEngine.all and "DCGM_DOUBLE" in os.environ:
        found = _described(json.loads(os.environ["DCGM_DOUBLE"]))
        found = found if found.serves(address, is_path) else None
    return found


def _described(setting: dict[str, Any]) -> HostEngine:
    engine = HostEngine([Gpu(**gpu) for gpu in setting["gpus"]], elsewhere=setting["port"])
    engine.answers = setting.get("answers")
    engine.watched_by_others(setting["watched"])
    engine.figures = {(gpu, int(i)): value for gpu in engine.gpus for i, value in setting["figures"].items()}
    return engine
