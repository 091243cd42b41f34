"""Reads the answers of NCCL's RAS, which come as JSON (NCCL 2.28.7 and newer) or as text for people (2.24 and newer).

The layouts are those of NCCL's ``src/ras/client_support.cc``. Whoever listens on the port may say anything: numbers
are bounded, texts made printable and short, and a part that does not fit is left out or refused.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from gputop.core.codec import from_document, parse
from gputop.core.errors import GputopError
from gputop.ranks.model import Communicator, Level, Rank, RasAnswer
from gputop.text.units import printable

# Of one answer, in all: the largest jobs have a tenth. A rank counts for each of the collectives it is listed with.
MAX_COMMUNICATORS, MAX_RANKS = 10_000, 100_000
_MAX_VALUES = 1_000_000
_MAX_COUNT = 2**63
_NAME_CHARS = 64
# NCCL 2.28.7 and 2.28.9 leave out the comma after "nvml_dev" of a missing rank.
_NO_COMMA = re.compile(rb'("nvml_dev": -?\d{1,9})([ \r]{0,8}\n {0,80}"status")')
_SUCCESS, _IN_PROGRESS = 0, 7  # ncclResult_t

_HEAD = re.compile(r"NCCL version (\S+)")
_BLOCK = re.compile(r"#(\d+)-\d+ \(([0-9a-f]{1,16})\) (INCOMPLETE|ERROR|MISMATCH)$")
_GROUP_ROW = re.compile(r"\s+(\d+)\s+\d+\s+\d+\s+[\d-]+\s+(\d+)\s+\d+\s+[A-Z]+\s+[A-Z,]+$")
_DIFFERENT = re.compile(r"  Communicator ranks have different (?:collective operation|(\w+) operation|(status)\b)")
_MANY = re.compile(r"  (\d+) ranks have (?:launched up to operation (\d+)|not launched any operations)$")
_RANK = re.compile(r"  Rank (\d+)(?: has (?:launched up to operation (\d+)|(not launched any operations)|status \w+)"
                   r"| reported (.+?))? -- (?:GPU (\d+)(?: \(NVML (\d+)\))? managed by process (\d+) on node (\S+)"
                   r"|\[process information not found\])$")
_MISSING_RANKS = re.compile(r"  The missing ranks?: ([\d,]+)$")  # up to 2.25, which name the processes apart from them
_PROCESS = re.compile(r"  Process (\d+) on node (\S+) managing GPU (\d+)(?: \(NVML (\d+)\))?$")


class _Status(Struct):
    init_state: int = 0
    async_error: int = 0
    abort_flag: bool = False
    unresponsive: bool = False
    considered_dead: bool = False


class _Rank(Struct):
    rank: int
    host: str = ""
    pid: int = -1
    nvml_dev: int = -1
    status: _Status = field(default_factory=_Status)
    collective_counts: dict[str, int] = field(default_factory=dict)


class _Communicator(Struct):
    hash: str
    size: int
    secondary_hash: str = ""
    ranks: list[_Rank] = field(default_factory=list)
    missing_ranks: list[_Rank] = field(default_factory=list)


class _Document(Struct):
    nccl_version: str
    communicators: list[_Communicator]
    ras: dict[str, Any]  # the last key: an answer without it is not whole


def read_json(data: bytes, time_s: float) -> RasAnswer:
    """Raises GputopError where it is damaged, or not whole."""
    try:
        try:
            document = parse(data, _MAX_VALUES)
        except ValueError:
            document = parse(_NO_COMMA.sub(rb"\1,\2", data), _MAX_VALUES)
    except ValueError as error:
        raise GputopError(f"NCCL's answer is damaged or incomplete: {error}") from None
    answer = from_document(document, _Document, "NCCL's answer")
    _check(len(answer.communicators), sum(len(c.ranks) + len(c.missing_ranks) + sum(
        len(rank.collective_counts) for rank in c.ranks) for c in answer.communicators))
    return RasAnswer(time_s, _short(answer.nccl_version), tuple(map(_communicator, answer.communicators)), True)


def _communicator(c: _Communicator) -> Communicator:
    by_count: dict[str, dict[int, list[Rank]]] = defaultdict(lambda: defaultdict(list))
    for listed in c.ranks:
        rank = _of_json(listed)
        for name, count in listed.collective_counts.items():
            by_count[_short(name)][_bounded(count)].append(rank)
    levels = {name: tuple(Level(n, len(ranks), tuple(ranks)) for n, ranks in sorted(counts.items()))
              for name, counts in by_count.items()}
    return Communicator(f"{_short(c.hash)} {_short(c.secondary_hash)}", _bounded(c.size), levels,
                        # Others of them have answered, but left this communicator, or not joined it yet.
                        tuple(_of_json(rank) for rank in c.missing_ranks
                              if rank.status.unresponsive or rank.status.considered_dead))


def _of_json(listed: _Rank) -> Rank:
    status = listed.status
    errors = [("an initialization error", status.init_state), ("an asynchronous error", status.async_error)]
    trouble = next((f"{what} ({code})" for what, code in errors if code not in (_SUCCESS, _IN_PROGRESS)), "")
    if status.considered_dead:
        trouble = "NCCL considers the rank dead"
    elif status.unresponsive:
        trouble = "the rank does not answer"
    elif status.abort_flag:
        trouble = "the rank was aborted"
    return Rank(_bounded(listed.rank), _short(listed.host), listed.pid if 0 < listed.pid <= 2**22 else None,
                listed.nvml_dev if 0 <= listed.nvml_dev < 1024 else None, trouble)


def read_text(data: bytes, time_s: float) -> RasAnswer:
    """Raises GputopError where it is not the text of RAS, or not whole."""
    lines = [printable(line) for line in data.decode("utf-8", "replace").split("\n")]
    head = _HEAD.match(lines[0])
    if head is None:
        raise GputopError("the program that answered is not NCCL's RAS", "Another program uses this port.")
    if not data.endswith(b"\n") or "Warnings" not in lines:
        raise GputopError("NCCL's answer is incomplete", "The process that answered may have ended.")
    sizes: dict[str, int] = {}  # ranks per communicator, by group
    blocks: dict[str, _Reader] = {}
    lost: dict[Rank, None] = {}  # processes that did not answer, of no number
    reader, named = None, 0
    for line in lines:
        if (row := _GROUP_ROW.match(line)) is not None:
            sizes[row[1]] = _number(row[2])
        elif (block := _BLOCK.match(line)) is not None:
            reader = blocks.setdefault(block[2], _Reader(sizes.get(block[1])))
            reader.begin(block[3])
        elif (process := _PROCESS.match(line)) is not None:
            gpu = _number(process[4] if process[4] is not None else process[3])
            lost[Rank(-1, _short(process[2]), _number(process[1]) or None, gpu, "the rank does not answer")] = None
        elif reader is not None:
            named += reader.read(line)
        _check(len(blocks), named + len(lost))
    one = next(iter(lost)) if len(lost) == 1 else None
    communicators = tuple(reader.communicator(key, one) for key, reader in blocks.items())
    return RasAnswer(time_s, _short(head[1]), communicators, False)


class _Reader:
    """Reads the blocks of one communicator in the text format."""

    def __init__(self, size: int | None) -> None:
        self._size, self._kind = size, ""
        self._operation: str | None = None
        self._count: int | None = None  # of the ranks that are named next
        self._levels: dict[str, dict[int, tuple[int, list[Rank]]]] = {}
        self._silent: list[Rank] = []

    def begin(self, kind: str) -> None:
        self._kind, self._operation, self._count = kind, None, None

    def read(self, line: str) -> int:
        """Read a line; returns the number of ranks that it names."""
        if (different := _DIFFERENT.match(line)) is not None:
            self._operation = None if different[2] else different[1] or ""
        elif (many := _MANY.match(line)) is not None and self._operation is not None:
            self._count = _number(many[2])
            self._level(self._count, _number(many[1]))
        elif (rank_match := _RANK.match(line)) is not None:
            self._rank(rank_match)
        elif (missing := _MISSING_RANKS.match(line)) is not None:
            numbers = [n for n in missing[1].split(",", MAX_RANKS + 1)[:MAX_RANKS + 1] if n]
            self._silent += [Rank(_number(n), trouble="the rank does not answer") for n in numbers]
            return len(numbers)
        else:
            return 0
        return 1

    def _rank(self, match: re.Match[str]) -> None:
        gpu = match[6] if match[6] is not None else match[5]
        trouble = "the rank does not answer" if self._kind == "INCOMPLETE" else _short(match[4] or "")
        rank = Rank(_number(match[1]), _short(match[8] or ""), _number(match[7]) or None,
                    None if gpu is None else _number(gpu), trouble)
        if self._kind == "INCOMPLETE":
            self._silent.append(rank)
        elif self._kind == "MISMATCH" and self._operation is not None:
            alone = match[2] is not None or match[3] is not None
            count = _number(match[2]) if alone else self._count
            if count is not None:
                self._level(count, 1 if alone else 0).append(rank)

    def _level(self, count: int, size: int) -> list[Rank]:
        levels = self._levels.setdefault(self._operation or "", {})
        before, ranks = levels.get(count, (0, []))
        levels[count] = (before + size, ranks)
        return ranks

    def communicator(self, key: str, lost: Rank | None) -> Communicator:
        """``lost``: the one process that did not answer, where there is one: up to 2.25 nothing else tells which
        process a missing rank is."""
        if lost is not None and len(self._silent) == 1 and self._silent[0].pid is None:
            self._silent = [replace(lost, number=self._silent[0].number)]
        levels = {name: tuple(Level(count, number, tuple(ranks)) for count, (number, ranks) in sorted(counts.items()))
                  for name, counts in self._levels.items()}
        return Communicator(key, self._size, levels, tuple(self._silent))


def _number(text: str | None) -> int:
    return _bounded(int(text.strip()[:18])) if text else 0


def _bounded(number: int) -> int:
    if not 0 <= number < _MAX_COUNT:
        raise GputopError("NCCL's answer contains an impossible number", "Another program may use this port.")
    return number


def _check(communicators: int, ranks: int) -> None:
    if communicators > MAX_COMMUNICATORS or ranks > MAX_RANKS:
        raise GputopError(f"NCCL's answer is too large: {communicators:,} communicators, {ranks:,} ranks",
                          f"gputop reads at most {MAX_COMMUNICATORS:,} communicators and {MAX_RANKS:,} ranks.")


def _short(text: str) -> str:
    return printable(text)[:_NAME_CHARS]
