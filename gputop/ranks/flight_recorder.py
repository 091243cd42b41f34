"""Reads the dumps of PyTorch's flight recorder: which collectives each rank of a job has launched.

A rank writes its dump when a collective times out, and again for every later one. Nothing here makes it write one.
The fields are those of version 2.x (2.10 is PyTorch 2.13's; torch/distributed/flight_recorder); the file's name, not
its content, says the rank.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from msgspec import Struct
from msgspec.structs import replace

from gputop.core.codec import parse
from gputop.core.errors import EXIT_USAGE, GputopError
from gputop.core.files import folder_of_process, open_regular
from gputop.core.framework import loaded_frameworks
from gputop.core.proc import owner, read_maps, started_s, stat_of
from gputop.ranks.plain_pickle import MAX_BYTES, load
from gputop.ranks.processes import environment, rank_label
from gputop.ranks.stack_groups import is_library, short_file
from gputop.ranks.stacks import MAX_PROCESSES
from gputop.text.units import printable, ranges

VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")  # the first one counts
_MEETING = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
_MAX_FILES = 4096
_MAX_ANCESTORS = 8  # between a rank and what it has started: a fork server, a shell
_CLOCK_S = 2.0  # a process's start is counted from the boot, a file's time from the clock
_OLD_DEFAULT = "/tmp/nccl_trace_rank_"
_NEW_DEFAULT = "torch/comm_lib_trace_rank_"  # in the user's cache folder, of newer versions
_FIX = "The job itself is not affected."
_MAX_ENTRIES, _MAX_FRAMES, _MAX_SIZES, _MAX_RANKS = 50_000, 200, 10_000, 100_000
_MAX_MEMBER_CHARS = 16 << 20  # of all groups together: 100,000 ranks in ten groups each take 7 MB
_NAME_CHARS, _PATH_CHARS = 200, 4096
_MAX_NUMBER = 1 << 62


class Collective(Struct, frozen=True):
    """A collective that a rank launched: number ``seq`` of its process group. ``elements`` of its input tensors,
    None where the dump does not say. ``line``: the program's line, "train.py:112", "" where the dump has no frames.

    ``completed``: it ended on the GPU. ``ended``: it did so, or a backend without GPU events, as gloo, waits for it no
    longer. NCCL's collectives that failed have not ended.
    """

    seq: int
    operation: str
    elements: int | None
    started: bool
    completed: bool
    ended: bool
    created_s: float
    line: str = ""


class ProcessGroup(Struct, frozen=True):
    """A process group as one rank sees it. ``ranks`` are its members, numbered in the whole job; None where the dump
    does not say. ``collectives`` are those that the recorder still holds, oldest first."""

    name: str
    description: str
    ranks: tuple[int, ...] | None
    collectives: tuple[Collective, ...]


class Dump(Struct, frozen=True):
    """Dump of one rank's flight recorder. ``whole``: nothing older was overwritten. ``job_ranks``: all that its groups
    name. ``written_s``: Unix time of the file. ``messages``: how many sends and receives it holds besides.
    ``only_active``: collectives that completed may be left out of it."""

    rank: int
    written_s: float
    groups: tuple[ProcessGroup, ...]
    whole: bool
    job_ranks: frozenset[int]
    messages: int = 0
    only_active: bool = False


class Dumps(Struct, frozen=True):
    """The dumps that were read, and why others were not."""

    dumps: tuple[Dump, ...]
    problems: tuple[str, ...] = ()


def read_files(paths: Sequence[str]) -> Dumps:
    """The dumps that a user names. Raises GputopError where there are too many, or two of them are of one rank."""
    if len(paths) > _MAX_FILES:
        raise GputopError(f"gputop reads at most {_MAX_FILES:,} dumps", "Name the dumps of some ranks.", EXIT_USAGE)
    by_rank: dict[int, str] = {}
    for path in paths:
        rank = rank_of_file(path)
        if rank in by_rank:
            raise GputopError(f"there are two dumps for rank {rank}: {printable(by_rank[rank])} and {printable(path)}",
                              "Name only the dumps of one run.", EXIT_USAGE)
        by_rank[rank] = path
    dumps, problems = [], []
    for rank, path in sorted(by_rank.items()):
        name = printable(Path(path).name)[:_NAME_CHARS]
        try:
            dumps.append(_read_open(open_regular(path, MAX_BYTES), rank, name))
        except OSError as error:
            problems.append(f"cannot open {name}: {error.strerror or error}")
        except GputopError as error:
            problems.append(error.message)
    return Dumps(tuple(dumps), tuple(problems))


def rank_of_file(path: str) -> int:
    """The number at the end of its name, before its endings. Raises GputopError."""
    name = Path(path).name
    number = re.search(r"(\d{1,7})(?:\.[A-Za-z]{1,10})*$", name, re.ASCII)
    if number is None:
        raise GputopError(f"the name {printable(name)[:_NAME_CHARS]} does not end with a rank number",
                          "For example, PyTorch names the dump of rank 3 nccl_trace_rank_3.", EXIT_USAGE)
    return int(number[1])


class _NoDump(GputopError):
    """A process that has written none."""


def read_of_processes(pids: Iterable[int], proc: Path = Path("/proc")) -> tuple[Dumps, ...]:
    """The dumps that these processes have written since their start, job by job, as :func:`jobs_of`."""
    jobs, unknown = jobs_of(pids, proc)
    files: Counter[tuple[int, int]] = Counter()
    read = [_of_job(job, files, proc) for job in jobs]
    dumps_of_jobs = tuple(_unshared(dumps, problems, files) for dumps, problems in read)
    return (*dumps_of_jobs, Dumps((), unknown)) if unknown else dumps_of_jobs


def jobs_of(pids: Iterable[int], proc: Path = Path("/proc")) -> tuple[list[list[int]], tuple[str, ...]]:
    """The processes that have loaded PyTorch, job by job, and why it is not known of others. Jobs are told apart by
    their user and by where their ranks meet (MASTER_ADDR, MASTER_PORT)."""
    jobs: dict[tuple[object, ...], list[int]] = defaultdict(list)
    unknown = []
    for pid in list(dict.fromkeys(pids))[:MAX_PROCESSES]:
        try:
            loaded = loaded_frameworks(read_maps(pid, proc))
        except PermissionError:
            unknown.append(f"gputop is not allowed to see which libraries process {pid} has loaded")
            continue
        except OSError:  # it has ended
            continue
        if "pytorch" in loaded:
            met = environment(pid, _MEETING, proc)
            jobs[owner(pid, proc), tuple(met.items())].append(pid)
    return [_without_helpers(job, proc) for job in jobs.values()], tuple(unknown)


def _without_helpers(pids: Sequence[int], proc: Path) -> list[int]:
    """Leave out of the processes those that one of the same rank has started, such as its data loader's workers."""
    labels = {pid: rank_label(pid, proc) for pid in pids}

    def helps(pid: int) -> bool:
        ancestor, label = pid, labels[pid]
        for _ in range(_MAX_ANCESTORS):
            stat = stat_of(ancestor, proc)
            if stat is None or not stat.parent:
                return False
            ancestor = stat.parent
            if label and labels.get(ancestor) == label:
                return True
        return False

    return [pid for pid in pids if not helps(pid)]


def rank_of_process(pid: int, proc: Path = Path("/proc")) -> int:
    """Rank of a process by its environment; raises GputopError."""
    kind, _, number = rank_label(pid, proc).partition(" ")
    if kind != "rank" or not number.isdecimal():
        raise GputopError("its environment does not set a rank")
    return int(number)


def _of_job(pids: Iterable[int], files: Counter[tuple[int, int]],
            proc: Path) -> tuple[list[tuple[Dump, tuple[int, int]]], list[str]]:
    """The dumps of a job, each with its file's device and number, which are counted in ``files``."""
    dumps: list[tuple[Dump, tuple[int, int]]] = []
    problems: list[str] = []
    without: dict[int, str] = {}
    for pid in pids:
        try:
            dump, file = _of_process(pid, proc)
        except _NoDump as error:
            without[pid] = error.message
        except GputopError as error:
            problems.append(f"process {pid}: {error.message}")
        else:
            files[file] += 1
            dumps.append((dump, file))
    if without:
        who = f"process{'es' if len(without) > 1 else ''} {ranges(without, ', ')}"
        problems.append(f"{who}: {next(iter(without.values()))}")
    return dumps, problems


def _unshared(dumps: Iterable[tuple[Dump, tuple[int, int]]], problems: list[str],
              files: Mapping[tuple[int, int], int]) -> Dumps:
    """A file that two processes would have written is neither's."""
    dumps = list(dumps)
    alone = [dump for dump, file in dumps if files[file] == 1]
    if shared := sorted({dump.rank for dump, file in dumps if files[file] > 1}):
        problems.append(f"several processes of rank {ranges(shared, ', ')} write to the same file, so it is unknown "
                        "which one wrote the dump")
    return dumps_by_rank(alone, problems)


def dumps_by_rank(dumps: Sequence[Dump], problems: list[str]) -> Dumps:
    """The dumps by rank; none of them where several processes are of one rank, which one more problem says."""
    if doubled := sorted(rank for rank, times in Counter(dump.rank for dump in dumps).items() if times > 1):
        problems.append(f"several processes are rank {ranges(doubled, ', ')}: name the processes of one job")
        dumps = ()
    return Dumps(tuple(sorted(dumps, key=lambda dump: dump.rank)), tuple(problems))


def _of_process(pid: int, proc: Path) -> tuple[Dump, tuple[int, int]]:
    rank = rank_of_process(pid, proc)
    uid, began_s = owner(pid, proc), started_s(pid, proc)
    if uid is None or began_s is None:
        raise GputopError("it has ended")
    tried = []
    for prefix in _prefixes(environment(pid, (*VARIABLES, "XDG_CACHE_HOME", "HOME"), proc)):
        path = Path(f"{prefix}{rank}")
        shown = printable(str(path))[:_NAME_CHARS]
        if not path.is_absolute():
            raise GputopError(f"its dump path {shown} is relative")
        try:
            with folder_of_process(pid, path.parent, proc) as folder:
                file = open_regular(path.name, MAX_BYTES, follow_links=False, owners=frozenset({uid}),
                                    folder_fd=folder.fd)
        except FileNotFoundError:
            tried.append(shown)
            continue
        except OSError as error:
            raise GputopError(f"cannot open its dump {shown}: {error.strerror or error}") from None
        state = os.fstat(file.fileno())
        if state.st_mtime < began_s - _CLOCK_S:
            file.close()
            raise GputopError(f"the dump {shown} is older than the process, so an earlier run wrote it")
        return _read_open(file, rank, shown), (state.st_dev, state.st_ino)
    raise _NoDump(f"no dump such as {' or '.join(tried)}")


def _prefixes(environ: Mapping[str, str]) -> Iterator[str]:
    named = next((environ[name] for name in VARIABLES if environ.get(name)), None)
    if named is not None:
        yield named
        return
    yield _OLD_DEFAULT
    cache = environ.get("XDG_CACHE_HOME") or (f"{environ['HOME']}/.cache" if environ.get("HOME") else "")
    if cache.startswith("/"):
        yield f"{cache}/{_NEW_DEFAULT}"


def _read_open(file: BinaryIO, rank: int, name: str) -> Dump:
    with file:
        written_s = os.fstat(file.fileno()).st_mtime
        data = file.read(MAX_BYTES)
    return read_dump(data, rank, name, written_s)


def read_dump(data: bytes, rank: int, name: str, written_s: float) -> Dump:
    """The dump in a pickle or a JSON document; raises GputopError.

    PyTorch's JSON has no list of collectives if it would be empty (FlightRecorder::dump_json): either the rank has
    recorded none, or it was asked for active ones only.
    """
    as_json = data.lstrip()[:1] == b"{"
    if as_json:
        try:
            document = parse(data)
        except ValueError as error:
            raise GputopError(f"{name} is damaged: {error}", _FIX) from None
    else:
        document = load(data, name)
    version = document.get("version") if isinstance(document, dict) else None
    if not isinstance(version, str):
        raise GputopError(f"{name} is not a PyTorch flight recorder dump", _FIX)
    if not version.startswith("2."):
        raise GputopError(f"{name} has version {printable(version)[:20]}; gputop reads 2.x", _FIX)
    entries, only_active = document.get("entries"), False
    if entries is None and as_json and isinstance(document.get("pg_config"), dict):
        entries, only_active = (), True
    if not isinstance(entries, (list, tuple)) or len(entries) > _MAX_ENTRIES:
        raise GputopError(f"{name} has no readable entries", "The recorder may be off: check TORCH_FR_BUFFER_SIZE.")
    dump = _dump(entries, _members(document.get("pg_config"), name), rank, name, written_s)
    return replace(dump, only_active=True, whole=dump.whole and bool(entries)) if only_active else dump


def _dump(entries: Iterable[object], members: Mapping[str, tuple[int, ...]], rank: int, name: str,
          written_s: float) -> Dump:
    groups: dict[tuple[str, str], list[Collective]] = defaultdict(list)
    records: list[int] = []
    messages, reader = 0, _Entries()
    after_message: dict[object, bool] = {}  # by group: whether the entry before is a send or a receive
    for entry in entries:
        if not isinstance(entry, dict):
            raise GputopError(f"an entry of {name} is damaged", _FIX)
        if (record := _whole(entry.get("record_id"))) is not None:
            records.append(record)
        group = _pair(entry.get("process_group"))
        if _is_message(entry, after_message.get(group, False)):
            after_message[group] = True
            messages += 1
            continue
        after_message[group] = False
        collective = reader.collective(entry)
        if group is None or collective is None:
            raise GputopError(f"an entry of {name} is damaged", _FIX)
        groups[group].append(collective)
    described = {group for group, _ in groups}
    for member_group in members:
        if member_group not in described:
            groups[member_group, ""] = []
    recorded = tuple(ProcessGroup(group, description, members.get(group),
                                  tuple(sorted(collectives, key=lambda c: c.seq)))
                     for (group, description), collectives in groups.items())
    return Dump(rank, written_s, recorded, min(records, default=0) == 0,
                frozenset(member for group_ranks in members.values() for member in group_ranks), messages)


def _is_message(entry: Mapping[str, object], after_message: bool) -> bool:
    """Return whether it is a send or a receive, or ends a batch of them: older versions give that one the number of the
    last collective, and do not mark it."""
    called = entry.get("profiling_name")
    operation = called[:_PATH_CHARS].rpartition(":")[2].partition(" ")[0] if isinstance(called, str) else ""
    return bool(entry.get("is_p2p")) or operation in ("send", "recv") or (operation == "coalesced" and after_message)


def _members(config: object, name: str) -> Mapping[str, tuple[int, ...]]:
    """The members of each group. gloo writes all its groups under one empty name: that says nothing. Raises GputopError
    for very many: a few bytes can name the same list again."""
    members = {}
    left = _MAX_MEMBER_CHARS
    for group, settings in (config.items() if isinstance(config, dict) else ()):
        ranks = settings.get("ranks") if isinstance(settings, dict) else None
        if not group or not isinstance(ranks, str):
            continue
        left -= len(ranks)
        if left < 0:
            raise GputopError(f"{name} lists more group members than gputop can read", _FIX)
        if numbers := _numbers(ranks):
            members[_text(group)] = numbers
    return members


def _numbers(text: str) -> tuple[int, ...]:
    """ "[0, 1]" as numbers; () where it is something else."""
    inner = text.strip()
    if not re.fullmatch(r"\[\d{1,7}(?:, ?\d{1,7})*\]", inner, re.ASCII) or inner.count(",") >= _MAX_RANKS:
        return ()
    return tuple(sorted({int(number) for number in inner[1:-1].split(",")}))


class _Entries:
    """Reads the entries of a dump. A pickle may use one list in all of them: what it says is worked out once, and kept
    by the identity of the list, which the document holds."""

    def __init__(self) -> None:
        self._elements: dict[int, int | None] = {}  # by list of sizes
        self._products: dict[int, int | None] = {}  # by size
        self._lines: dict[int, str] = {}  # by list of frames

    def collective(self, entry: Mapping[str, object]) -> Collective | None:
        seq, created_ns = _whole(entry.get("collective_seq_id")), _whole(entry.get("time_created_ns"))
        called, state = entry.get("profiling_name"), entry.get("state")
        if seq is None or not isinstance(called, str) or not isinstance(state, str):
            return None
        completed = state == "completed" or bool(_whole(entry.get("time_discovered_completed_ns")))
        started = completed or state == "started" or bool(_whole(entry.get("time_discovered_started_ns")))
        backend, _, operation = called[:_PATH_CHARS].rpartition(":")
        ended = completed or (entry.get("retired") is True and not backend.startswith("nccl"))
        sizes, frames = entry.get("input_sizes"), entry.get("frames")
        if id(sizes) not in self._elements:
            self._elements[id(sizes)] = self._count(sizes)
        if id(frames) not in self._lines:
            self._lines[id(frames)] = _line(frames)
        return Collective(seq, _text(operation), self._elements[id(sizes)], started, completed, ended,
                          (created_ns or 0) / 1e9, self._lines[id(frames)])

    def _count(self, sizes: object) -> int | None:
        """The elements of all input tensors together."""
        if not isinstance(sizes, (list, tuple)) or not sizes or len(sizes) > _MAX_SIZES:
            return None
        total = 0
        for shape in sizes:
            if id(shape) not in self._products:
                self._products[id(shape)] = _product(shape)
            if (elements := self._products[id(shape)]) is None:
                return None
            total += elements
        return total


def _product(shape: object) -> int | None:
    if not isinstance(shape, (list, tuple)) or len(shape) > 64:
        return None
    lengths = [whole for length in shape if (whole := _whole(length)) is not None]
    return math.prod(lengths) if len(lengths) == len(shape) else None


def _line(frames: object) -> str:
    """The innermost line of the program's own, else the innermost of all."""
    if not isinstance(frames, (list, tuple)):
        return ""
    read: list[tuple[str, int]] = []
    for frame in frames[:_MAX_FRAMES]:
        if isinstance(frame, dict) and isinstance(file := frame.get("filename"), str):
            read.append((file[-_PATH_CHARS:], _whole(frame.get("line")) or 0))
    chosen = next((file_line for file_line in read if not is_library(file_line[0])), read[0] if read else None)
    return f"{_text(short_file(chosen[0]))}:{chosen[1]}" if chosen is not None else ""


def _pair(value: object) -> tuple[str, str] | None:
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(part, str) for part in value):
        return _text(value[0]), _text(value[1])
    return None


def _whole(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= _MAX_NUMBER else None


def _text(text: Any) -> str:
    return printable(str(text)[:_NAME_CHARS])
