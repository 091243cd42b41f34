"""The stacks of a process's threads, Python's and native ones, by py-spy: a program of its own, which changes nothing.

py-spy reads the memory of the process while it runs on (15 ms of CPU). For native frames it has to hold the process
while it reads the symbols of its libraries: 18 s with TensorFlow 2.21 (two processes on two cores), and that job of two
workers ended of it, as one had not heard of the other for so long. What py-spy prints has names that the process chose:
it is bounded and made printable.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from gputop.core.codec import from_document, parse
from gputop.core.errors import GputopError, NoDataError, os_errors_as
from gputop.core.own_program import install_command
from gputop.core.proc import owner
from gputop.ranks.processes import Halt, check_rights, command_line, halt_of, rank_label
from gputop.text.programs import Ended, run_program
from gputop.text.units import printable

INSTALL = install_command("stacks")
WHAT_NATIVE_DOES = ("For native frames, each process pauses while py-spy reads its libraries (18 s with TensorFlow). "
                    "The job may end if its workers do not answer each other for that long.")
TIMEOUT_S, NATIVE_TIMEOUT_S = 10.0, 60.0  # native: it reads the symbols of TensorFlow's libraries, 1 GB
MAX_PROCESSES = 64
_AT_ONCE = 4
_ATTEMPTS = 3  # a process that runs on can change a stack while it is read
_MAX_BYTES = 16 << 20
_SCRIPT = ("<module>", "_run_module_as_main")  # what a script's main thread is called from
_MAX_THREADS, _MAX_FRAMES, _NAME_CHARS = 2000, 500, 300


class Frame(Struct, frozen=True):
    """``file`` is a library if it is ``native``; ``line`` None: not known."""

    function: str
    file: str
    line: int | None
    native: bool = False


class ThreadStack(Struct, frozen=True):
    """``frames``, innermost first. ``active``: it was running, by what the system says of it."""

    name: str
    main: bool
    active: bool
    frames: tuple[Frame, ...]


class ProcessStacks(Struct, frozen=True):
    """``rank`` is its place in the job, "" where that is not known; ``problem`` says why there are no threads.
    ``command`` has its secrets hidden. ``halt``: what keeps the process from running, None where nothing does.
    """

    pid: int
    rank: str = ""
    command: str = ""
    threads: tuple[ThreadStack, ...] = ()
    problem: GputopError | None = None
    halt: Halt | None = None

    @property
    def main(self) -> ThreadStack | None:
        return next((thread for thread in self.threads if thread.main), None)

    @property
    def label(self) -> str:
        return f"{self.rank} (pid {self.pid})" if self.rank else f"pid {self.pid}"


class _Frame(Struct):
    name: str
    filename: str = ""
    module: str | None = None
    line: int = 0


class _Thread(Struct):
    frames: list[_Frame]
    thread_name: str | None = None
    os_thread_id: int | None = None
    active: bool = False


def find_py_spy() -> str | None:
    """The program, of gputop's own environment or on PATH; None where there is none."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.is_file() else shutil.which("py-spy")


def read_all(pids: Iterable[int], *, native: bool = False) -> tuple[ProcessStacks, ...]:
    """The stacks of these processes, some at a time. Blocks; what goes wrong with one is its own ``problem``.

    Raises GputopError where py-spy is not installed.
    """
    program = py_spy()

    def read(pid: int) -> ProcessStacks:
        before = halt_of(pid)
        process = ProcessStacks(pid, rank_label(pid), command_line(pid), halt=before)
        if before is not None and before.state == "ended":
            return process
        try:
            process = replace(process, threads=read_stacks(pid, native=native, program=program))
        except GputopError as error:
            process = replace(process, problem=error)
        # A process that waits for a disk for a moment is not held up.
        return replace(process, halt=after if (after := halt_of(pid)) == before or (before is None and after is not None
                       and after.state != "waiting") else None)

    with ThreadPoolExecutor(_AT_ONCE, "gputop-stacks") as threads:
        return tuple(threads.map(read, list(dict.fromkeys(pids))[:MAX_PROCESSES]))


def others_of(pids: Iterable[int]) -> dict[int, int]:
    """Processes of these that belong to another user than gputop's, with that user's number."""
    return {pid: uid for pid in pids if (uid := owner(pid)) not in (None, os.geteuid()) and uid is not None}


def read_stacks(pid: int, *, native: bool = False, program: str | None = None,
                proc: Path = Path("/proc")) -> tuple[ThreadStack, ...]:
    """The stacks of one process. Blocks for :data:`TIMEOUT_S` at most, for native frames :data:`NATIVE_TIMEOUT_S`.

    Raises GputopError where it is gone, may not be read or is no Python.
    """
    program = program or py_spy()
    uid = owner(pid, proc)
    if uid is None:
        raise NoDataError(f"there is no process {pid}", "ps shows the right PID.")
    check_rights(pid, proc / str(pid), uid, "stacks", proc=proc)
    how, timeout_s, attempts = ("--native", NATIVE_TIMEOUT_S, 1) if native else ("--nonblocking", TIMEOUT_S, _ATTEMPTS)
    command = [program, "dump", "--json", "--full-filenames", how, "--pid", str(pid)]
    for _ in range(attempts):
        ended = _run(command, timeout_s)
        if ended.status == 0:
            return read_dump(ended.out, pid)
    raise GputopError(f"py-spy could not read process {pid}: {ended.error or f'status {ended.status}'}",
                      "Check that it is a running Python process.")


def is_ending(pid: int) -> bool:
    """Return whether the main thread of a Python process has left its script, and runs what is called at the exit.
    False where that cannot be read, or another program has Python in it. Blocks as :func:`read_stacks` does."""
    try:
        main = ProcessStacks(pid, threads=read_stacks(pid)).main
        if not Path(f"/proc/{pid}/exe").readlink().name.startswith("python"):
            return False
    except (GputopError, OSError):
        return False
    return main is not None and main.frames != () and main.frames[-1].function not in _SCRIPT


def py_spy() -> str:
    """The program; raises GputopError where it is not installed."""
    program = find_py_spy()
    if program is None:
        raise GputopError("py-spy, which reads stacks, is not installed", f"{INSTALL}, or put py-spy on PATH.")
    return program


def read_dump(data: bytes, pid: int) -> tuple[ThreadStack, ...]:
    """Read what ``py-spy dump --json`` printed; raises GputopError."""
    name = "py-spy's output"
    try:
        document = parse(data)
    except ValueError as error:
        raise GputopError(f"{name} is damaged: {error}") from None
    threads = from_document(document, list[_Thread], name)
    return tuple(ThreadStack(_text(t.thread_name or ""), t.os_thread_id == pid or t.thread_name == "MainThread",
                             t.active, tuple(map(_frame, t.frames[:_MAX_FRAMES]))) for t in threads[:_MAX_THREADS])


def _frame(frame: _Frame) -> Frame:
    # What was made at run time has neither name nor file.
    native = frame.module is not None or frame.name.startswith("0x")
    return Frame(_text(frame.name), _text(frame.filename), frame.line if frame.line > 0 else None, native)


def _text(text: str) -> str:
    return printable(text)[-_NAME_CHARS:]


def _run(command: list[str], timeout_s: float) -> Ended:
    """Raises GputopError where it takes too long or prints too much."""
    with os_errors_as("cannot start py-spy", INSTALL):
        ended = run_program(command, timeout_s, _MAX_BYTES)
    if not ended.in_time:
        raise GputopError(f"py-spy did not finish within {timeout_s:.0f} s", "gputop stopped py-spy, not the process.")
    if not ended.in_bounds:
        raise GputopError(f"py-spy printed more than {_MAX_BYTES >> 20} MB", "It was ended.")
    return ended
