"""Analysis in a process of its own, which prints its answer as JSON: an :class:`WorkerAnswer`.

Parsing a trace holds the interpreter's lock and up to gigabytes; the monitor must neither
stand still for it nor keep the memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from gputop.advice.user_registry import user_rules
from gputop.analysis.gpu.packed_series import ComparedTrace
from gputop.analysis.results import Analysis
from gputop.core.codec import convert, encode, parse, to_document
from gputop.core.errors import EXIT_FAILED, EXIT_OK, GputopError
from gputop.core.own_memory import ANALYSIS_SCORE, keep_freed_memory, offer_to_oom_killer
from gputop.core.own_program import child_command

if TYPE_CHECKING:
    from gputop.advice.trace.facts import TraceFacts

T = TypeVar("T")

# A trace of two million events takes 2 to 4 s (docs/project/cost.md). A worker that needs longer than this hangs.
TIMEOUT_S = 600.0
_POLL_S = 0.1
_FROM_FILE = "paths in file "  # before the number of an open file, which takes the place of paths
_PR_SET_PDEATHSIG = 1  # include/uapi/linux/prctl.h
REPORT_WIDTH = 70  # columns that the monitor can show on 80


class WorkerFailed(GputopError):
    """The subprocess did not come to an answer of its own: it took too long, was killed, or ended by a fault."""


class Failure(msgspec.Struct, frozen=True):
    message: str
    fix: str
    exit_code: int


class WorkerAnswer(msgspec.Struct, frozen=True):
    """Answer that a subprocess prints: the result, or why there is none."""

    result: Any = None
    error: Failure | None = None


class Diagnosis(msgspec.Struct, frozen=True):
    """Diagnosis of a trace: as data, as text, and in a sentence on what bounds the job; and what a later comparison
    needs of it, so that the trace is not read again for one."""

    analysis: Analysis
    report: str  # of REPORT_WIDTH columns
    limit: str
    compared: ComparedTrace


class WorkerTask(msgspec.Struct, frozen=True):
    """``main(arguments)`` of a module of gputop, for a subprocess."""

    module: str
    arguments: tuple[str, ...]
    what: str = "analysis"  # names it in messages
    pass_fds: tuple[int, ...] = ()  # files that the subprocess inherits


def analyze_in_worker(
    paths: Sequence[str], stop: threading.Event | None = None, timeout_s: float = TIMEOUT_S,
) -> Diagnosis:
    """Analyze these files in a subprocess. Blocks; call it from a worker thread. Set ``stop`` to give up early. Raises
    GputopError with the child's own message, or one that says how the child ended. However this ends, KeyboardInterrupt
    included, the child does not outlive it."""
    return run_in_worker(WorkerTask("gputop.diagnosis.worker", tuple(map(str, paths))), Diagnosis, stop, timeout_s)


class AnalysisAhead:
    """A subprocess that imports what an analysis needs before there is a trace, from :meth:`begin` on."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop, self._paths = stop, -1
        self._threads = ThreadPoolExecutor(1, "gputop-analysis")  # the subprocess ends with its thread
        self._diagnosis: Future[Diagnosis] | None = None

    def __enter__(self) -> AnalysisAhead:
        return self

    def __exit__(self, *_: object) -> None:
        if self._paths >= 0:  # without paths it ends
            os.close(self._paths)
        self._threads.shutdown(wait=False)

    def begin(self) -> None:
        if self._diagnosis is None:
            read, self._paths = os.pipe()
            task = WorkerTask("gputop.diagnosis.worker", (f"{_FROM_FILE}{read}",), pass_fds=(read,))
            self._diagnosis = self._threads.submit(run_in_worker, task, Diagnosis, self._stop)
            self._diagnosis.add_done_callback(lambda _: os.close(read))

    def analyze(self, paths: Sequence[str]) -> Diagnosis:
        """Analyze as :func:`analyze_in_worker` does."""
        if self._diagnosis is None:
            return analyze_in_worker(paths, self._stop)
        with contextlib.suppress(OSError):  # it has ended, and the result says how
            os.write(self._paths, encode(list(paths)))
        os.close(self._paths)
        self._paths = -1
        return self._diagnosis.result()


def run_in_worker(
    task: WorkerTask, kind: type[T], stop: threading.Event | None = None, timeout_s: float = TIMEOUT_S,
    on_line: Callable[[bytes], None] | None = None,
) -> T:
    """Run a task in a subprocess, which prints an :class:`WorkerAnswer` (:func:`answer`). ``kind`` is the type of its
    result. ``on_line`` is called with each line that it prints before its answer (:func:`print_line`), as soon as it
    has. Else as :func:`analyze_in_worker`."""
    rules = "" if user_rules().paths is None else encode(user_rules().paths).decode()
    command = child_command("gputop.diagnosis.worker:child", str(os.getpid()), rules, task.module, *task.arguments)
    try:
        output, code, stderr = _run(command, task, stop, timeout_s, on_line)
    except OSError as error:
        raise WorkerFailed(f"Could not start the {task.what}: {error}",
                           "The trace is saved; run `gputop analyze` on it.") from error
    return _result(output, code, stderr, kind, task.what)


def _run(
    command: list[str], task: WorkerTask, stop: threading.Event | None, timeout_s: float,
    on_line: Callable[[bytes], None] | None,
) -> tuple[bytes, int, str]:
    """The output of the subprocess, its status, and the end of what it wrote to stderr."""
    with tempfile.TemporaryFile() as errors, subprocess.Popen(
        # A session of its own: ctrl-c in the terminal is for gputop to decide on.
        command, stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL, start_new_session=True,
        pass_fds=task.pass_fds,
    ) as child:
        try:
            output = _read(child, stop, timeout_s, task.what, on_line)
        finally:
            if child.poll() is None:
                child.kill()
            code = child.wait()
        errors.seek(0)
        tail = errors.read()[-2000:].decode(errors="replace").strip()
    return output, code, tail


def _read(child: subprocess.Popen[bytes], stop: threading.Event | None, timeout_s: float, what: str,
          on_line: Callable[[bytes], None] | None) -> bytes:
    """The child's output, looking at ``stop`` several times a second; of several lines the last one, which has no end.
    """
    assert child.stdout is not None
    chunks: list[bytes] = []
    waited = 0.0
    with selectors.DefaultSelector() as ready:
        ready.register(child.stdout, selectors.EVENT_READ)
        while True:
            if stop is not None and stop.is_set():
                raise GputopError(f"The {what} was stopped.", "The trace is saved.")
            if waited >= timeout_s:
                raise WorkerFailed(f"The {what} did not finish within {timeout_s:.0f} s.",
                                   "Capture a shorter window, or run `gputop analyze` on a larger machine.")
            if not ready.select(_POLL_S):
                waited += _POLL_S
                continue
            chunk = os.read(child.stdout.fileno(), 1 << 16)
            if not chunk:
                return b"".join(chunks)
            if on_line is not None and b"\n" in chunk:
                *lines, chunk = b"".join((*chunks, chunk)).split(b"\n")
                chunks.clear()
                for line in lines:
                    on_line(line)
            chunks.append(chunk)


def _result(output: bytes, code: int, stderr: str, kind: type[T], what: str) -> T:
    if code == -signal.SIGKILL:
        raise WorkerFailed(f"The {what} was killed by the kernel, most likely because memory ran out.",
                           "The trace is saved. Analyze it on a machine with more memory, or capture a shorter window.")
    try:
        answered = convert(parse(output), WorkerAnswer)
        if answered.error is None and code == EXIT_OK:
            return convert(answered.result, kind)
        problem = ""
    except ValueError as error:
        answered, problem = WorkerAnswer(), str(error)
    if answered.error is not None:
        raise GputopError(answered.error.message, answered.error.fix, answered.error.exit_code)
    last = stderr.splitlines()[-1] if stderr else problem or "it left no message"
    how = f"was terminated by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
    raise WorkerFailed(f"The {what} {how}: {last}", "The trace is saved; please report this with the trace.")


def child() -> int:
    """Begin a subprocess, for each kind of work."""
    _, parent, rules, module, *arguments = sys.argv
    offer_to_oom_killer(ANALYSIS_SCORE)
    keep_freed_memory()
    die_with(int(parent))
    if rules:
        from gputop.diagnosis.rules_in_process import use_rules
        from gputop.rules.read_files import RulePath

        use_rules(convert(parse(rules), list[RulePath]))  # the parent has said what is wrong with them
    status: int = import_module(module).main(arguments)
    return status


def die_with(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` ends, in whatever way. Strictly, when the thread that started
    it ends: that one waits for it in :func:`run_in_worker` (prctl(2), PR_SET_PDEATHSIG)."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it ended before that call
        sys.exit(EXIT_FAILED)


def print_line(line: str) -> None:
    """Print a line for the ``on_line`` of :func:`run_in_worker`, in the subprocess and before its answer."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def answer(work: Callable[[], object]) -> int:
    """Print the result of ``work``, or its error, as JSON, in the subprocess; returns the status to end with."""
    try:
        answered = WorkerAnswer(work())
        status = EXIT_OK
    except GputopError as error:
        answered = WorkerAnswer(error=Failure(error.message, error.fix, error.exit_code))
        status = error.exit_code
    except MemoryError:
        answered = WorkerAnswer(error=Failure("There was not enough memory for the trace.",
                                              "Capture a shorter window, or analyze the trace on a larger machine.",
                                              EXIT_FAILED))
        status = EXIT_FAILED
    json.dump(to_document(answered), sys.stdout, allow_nan=False)
    return status


def main(arguments: Sequence[str]) -> int:
    from gputop.diagnosis import report  # noqa: F401  before the paths are known
    from gputop.diagnosis.diagnose import analyze_to_facts
    from gputop.trace.readers.load import load

    if arguments[0].startswith(_FROM_FILE):
        with os.fdopen(int(arguments[0].removeprefix(_FROM_FILE)), "rb") as file:
            arguments = convert(parse(file.read()), list[str])
    return answer(lambda: diagnosis_of(analyze_to_facts(load(arguments))))


def diagnosis_of(facts: TraceFacts) -> Diagnosis:
    """Make the subprocess's answer for a trace that it has analyzed."""
    from gputop.diagnosis.diagnose import compared_trace
    from gputop.diagnosis.report import limit_of, not_judged, text_report

    analysis = facts.analysis
    return Diagnosis(analysis, text_report(analysis, REPORT_WIDTH),
                     f"{limit_of(analysis)}\n{not_judged(analysis)}".rstrip(), compared_trace(facts))
