"""Stacks of the ranks of a job against each other: those that stand alike are one group, and the odd one is named.

Ranks run one program. Where most of them wait in the same call, the one that stands elsewhere is what they wait for.
Stacks are alike where the program's own lines and the functions called from there are; lines inside of libraries differ
from look to look while a thread waits in a loop.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from msgspec import Struct

from gputop.ranks.stacks import Frame, ProcessStacks, ThreadStack
from gputop.text.commands import short_command
from gputop.text.units import counted, fit, ranges

_FUNCTION_COLUMNS, _COMMAND_CHARS = 34, 100
_MAX_LABELED = 4  # of more processes that stand alike the numbers alone are told
# Code that is not the program's own, by its file: installed packages, Python's library, code without a file.
_IMPORTING = "<frozen importlib"
_PACKAGE = re.compile(r"/(?:site|dist)-packages/([^/]+?)(?:\.py)?(?:/|$)")
# Functions in which a rank waits for the others, by name, of any framework; and PyTorch's module of them.
_COLLECTIVE = re.compile(
    r"all_?(?:reduce|gather|to_?all)|reduce_scatter|broadcast|barrier|collective|sync_global_devices", re.IGNORECASE)
_COLLECTIVE_FILE = re.compile(r"/torch/distributed/distributed_c10d\.py$")
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python\d[^/]*/|^<")


class StackGroup(Struct, frozen=True):
    """Processes whose main threads stand alike. ``line`` is the innermost line of the program's own, None where there
    is none; ``calls`` are the functions called from there, outermost first. ``stack`` is one of theirs."""

    processes: tuple[ProcessStacks, ...]
    line: Frame | None
    calls: tuple[str, ...]
    stack: ThreadStack
    halted: str = ""  # how these are kept from running: "stopped"

    @property
    def place(self) -> str:
        """ "all_reduce at train.py:112"; of those that do not run, "all_reduce at train.py:112 (stopped)"."""
        return f"{self._stands}{f' ({self.halted})' if self.halted else ''}"

    @property
    def _stands(self) -> str:
        named = [call for call in self.calls if "<" not in call] or list(self.calls)  # not a wrapper's <locals>
        called = " → ".join(dict.fromkeys(named[:1] + named[-1:]))
        if self.line is None:
            return called or "native code only"
        return f"{called or self.line.function} at {_where(self.line)}"


def group(processes: Sequence[ProcessStacks]) -> tuple[StackGroup, ...]:
    """Largest group first. Processes without a main thread that could be read are left out."""
    members: dict[tuple[Frame | None, tuple[str, ...], str], list[tuple[ProcessStacks, ThreadStack]]] = (
        defaultdict(list))
    for process in processes:
        if (main := process.main) is not None:
            halted = process.halt.state if process.halt is not None else ""
            line, calls = _place(main)
            members[line, calls, halted].append((process, main))
    return tuple(
        StackGroup(tuple(process for process, _ in processes_there), line, calls, processes_there[0][1], halted)
        for (line, calls, halted), processes_there in sorted(members.items(), key=lambda item: -len(item[1])))


def _place(thread: ThreadStack) -> tuple[Frame | None, tuple[str, ...]]:
    python = [frame for frame in thread.frames if not frame.native]
    index = next((i for i, frame in enumerate(python) if not is_library(frame.file)), None)
    if index is None:
        return None, tuple(frame.function for frame in reversed(python))
    calls = list(reversed(python[:index]))
    if calls and calls[0].file.startswith(_IMPORTING):
        loaded = next((match[1] for frame in calls if (match := _PACKAGE.search(frame.file))), "")
        return python[index], (f"import of {loaded}" if loaded else "import",)
    return python[index], tuple(frame.function for frame in calls)


def sentence(groups: Sequence[StackGroup]) -> str:
    """ "7 ranks in all_reduce at train.py:112, 1 rank in load at data.py:40"."""
    def count(stack_group: StackGroup) -> str:
        what, ending = ("rank", "s") if all(p.rank for p in stack_group.processes) else ("process", "es")
        return f"{counted(len(stack_group.processes), what, ending)} in {stack_group.place}"

    return ", ".join(map(count, groups))


def odd_ones(groups: Sequence[StackGroup]) -> tuple[ProcessStacks, ...]:
    """Processes that most are likely to wait for: those that do not run; else those that stand elsewhere than most;
    where there is no majority, as of two, those outside of the collective that the others are in."""
    if halted := [process for stack_group in groups if stack_group.halted for process in stack_group.processes]:
        return tuple(halted)
    if len(groups) < 2:
        return ()
    total = sum(len(stack_group.processes) for stack_group in groups)
    if len(groups[0].processes) * 2 <= total:
        outside = [stack_group for stack_group in groups if not any(
            _COLLECTIVE.search(frame.function) or _COLLECTIVE_FILE.search(frame.file)
            for frame in stack_group.stack.frames if not frame.native)]
        return tuple(process for stack_group in outside for process in stack_group.processes) if (
            0 < len(outside) < len(groups)) else ()
    return tuple(process for stack_group in groups[1:] for process in stack_group.processes)


def jobs(processes: Sequence[ProcessStacks]) -> list[list[ProcessStacks]]:
    """The processes by job: those of one run one command, but for numbers. The largest job first; those that have
    ended have no command any more, and are with it."""
    by_command: dict[str, list[ProcessStacks]] = defaultdict(list)
    ended = [process for process in processes if process.halt is not None and process.halt.state == "ended"]
    for process in processes:
        if process not in ended:
            by_command[re.sub(r"\d+", "#", process.command)].append(process)
    first, *others = sorted(by_command.values(), key=len, reverse=True) or [[]]
    return [job for job in ([*first, *ended], *others) if job]


def report(by_job: Sequence[Sequence[ProcessStacks]], *, threads: bool = False) -> Iterator[str]:
    """Job by job: its groups in a sentence, the odd one, a stack of each. ``threads``: of all threads."""
    for number, job in enumerate(by_job):
        if number:
            yield ""
        if len(by_job) > 1:
            yield f"Job {number + 1}: {short_command(job[0].command)[:_COMMAND_CHARS] or 'its command is unknown'}"
        yield from _job(job, threads)


def _job(processes: Sequence[ProcessStacks], threads: bool) -> Iterator[str]:
    groups = group(processes)
    halted: dict[str, list[ProcessStacks]] = defaultdict(list)
    for process in processes:
        if process.halt is not None:
            halted[process.halt.text.replace(str(process.pid), "PID")].append(process)
    for each in halted.values():
        yield from (f"{process.label} {process.halt.text}." for process in each[:_MAX_LABELED] if process.halt)
        if len(each) > _MAX_LABELED:
            yield f"So {_labels(each[_MAX_LABELED:])}."
    if groups:
        yield f"{sentence(groups)}."
    odd = odd_ones(groups)
    if odd and not halted:
        whom = "it" if len(odd) == 1 else "them"
        where = "most ranks are elsewhere" if len(odd) * 2 < len(processes) else "the others are in a collective"
        yield f"Check {_labels(odd)} first: {where} and may be waiting for {whom}."
    for stack_group in reversed(groups) if odd else groups:
        yield ""
        yield f"{_labels(stack_group.processes)}: {stack_group.place}"
        yield from _frames(stack_group.stack, stack_group.line)
        if threads:
            yield from _other_threads(stack_group.processes)
    for process in processes:
        if process.problem is not None:
            yield f"{process.label}: {process.problem.message}. {process.problem.fix}".rstrip()
        elif process.main is None and (process.halt is None or process.halt.state != "ended"):
            yield f"{process.label}: its main thread is not running Python."


def _labels(processes: Sequence[ProcessStacks]) -> str:
    """ "rank 3 (pid 7)"; of many alone the numbers: "ranks 0-6"."""
    kinds = {process.rank.rpartition(" ")[0] for process in processes}
    if len(processes) <= _MAX_LABELED or len(kinds) > 1:
        return ", ".join(process.label for process in processes)
    (kind,) = kinds
    numbers = [int(process.rank.rpartition(" ")[2]) if kind else process.pid for process in processes]
    return f"{kind or 'pid'}s {ranges(numbers, ', ')}"


def _other_threads(processes: Sequence[ProcessStacks]) -> Iterator[str]:
    for process in processes:
        for thread in (t for t in process.threads if not t.main and t.frames):
            yield f"  {process.label}, thread {thread.name or 'without a name'}:"
            yield from _frames(thread, None)


def _frames(thread: ThreadStack, line: Frame | None) -> Iterator[str]:
    for frame in thread.frames:
        if frame.file.startswith(_IMPORTING):
            continue  # five frames of Python's own for each module
        yield f"  {'→' if frame == line else ' '} {fit(frame.function, _FUNCTION_COLUMNS)} {_where(frame)}"


def _where(frame: Frame) -> str:
    return short_file(frame.file) + (f":{frame.line}" if frame.line else "")


def is_library(file: str) -> bool:
    """Return whether the code in a file is not the program's own."""
    return _LIBRARY.search(file) is not None


def short_file(path: str) -> str:
    """The name, with the package of what is installed: "torch/…/distributed_c10d.py"."""
    *_, installed = re.split(r"/(?:site|dist)-packages/", path)
    parts = [part for part in installed.split("/") if part]
    if installed == path or len(parts) < 2:
        return parts[-1] if parts else path
    return "/".join([parts[0], *["…"] * (len(parts) > 2), parts[-1]])
