"""One check of this node, and tasks that run many checks at once so that none waits for one that hangs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from gputop.core.errors import GputopError

Status = Literal["ok", "warn", "fail", "unknown"]
DEADLINE_S = 10.0


class Check(Struct, frozen=True):
    """The result for one capability.

    ``fail``: gputop or a part of it does not work; ``warn``: it works, but with less than possible;
    ``unknown``: it could not be determined. ``fix`` are lines to paste, shell unless they are
    Python for the training job; None where there is nothing to repair or no way to.
    """

    id: str
    status: Status
    title: str
    detail: str
    fix: str | None = None


class Result(Struct, frozen=True):
    """The result of a task, which names the capability."""

    status: Status
    detail: str
    fix: str | None = None


class Task(Struct, frozen=True):
    """Makes the check of that id and title, none (None), or several: ``run`` may block and may raise anything."""

    id: str
    title: str
    run: Callable[[], Result | Iterable[Check] | None]

    def checks(self) -> list[Check]:
        """Run it. Raises what ``run`` raises."""
        result = self.run()
        if isinstance(result, Result):
            return [Check(self.id, result.status, self.title, result.detail, result.fix)]
        return list(result or ())


def text_of(path: Path) -> str:
    """The text in a file, without blanks around it; "" where it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def processes_by_name(root: Path) -> dict[str, int]:
    """The PID of a process of each name, as far as /proc shows them."""
    pids: dict[str, int] = {}
    for entry in (root / "proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            pids.setdefault((entry / "comm").read_text(errors="replace").strip(), int(entry.name))
    return pids


class RunningTasks:
    """Tasks that run, each in its own daemon thread, so that none waits for another."""

    def __init__(self, tasks: Sequence[Task], deadline_s: float = DEADLINE_S) -> None:
        self._tasks = tasks
        self._deadline_s = deadline_s
        self._ends_s = time.monotonic() + deadline_s
        self._results: dict[int, list[Check]] = {}
        self._threads = [threading.Thread(target=self._run, args=numbered, daemon=True) for numbered in
                         enumerate(tasks)]
        for thread in self._threads:
            thread.start()

    def _run(self, position: int, task: Task) -> None:
        try:
            self._results[position] = task.checks()
        except GputopError as error:
            self._results[position] = [Check(task.id, "fail", task.title, error.message, error.fix or None)]
        except Exception as error:  # noqa: BLE001 - thread boundary: one broken check must not hide the others
            problem = f"the check itself failed: {type(error).__name__}: {error}"
            self._results[position] = [Check(task.id, "unknown", task.title, problem)]

    def results(self) -> list[Check]:
        """All checks in the order of the tasks; a task not done by the deadline is reported as hanging."""
        checks: list[Check] = []
        for position, (task, thread) in enumerate(zip(self._tasks, self._threads, strict=True)):
            thread.join(max(0.0, self._ends_s - time.monotonic()))
            late = f"no answer within {self._deadline_s:g} s: the call is hanging"
            checks += self._results.get(position, [Check(task.id, "unknown", task.title, late)])
        return checks
