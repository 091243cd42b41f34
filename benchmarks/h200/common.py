"""What the jobs of ``jax_jobs.py`` and ``torch_jobs.py`` have in common: how they start, count their steps and end."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEPS_BEFORE = 5  # compiled, tuned and allocated before a job says that it is ready

Stepped = Callable[[], None]  # called by a loop after each of its steps
Loop = Callable[[Stepped], None]


@dataclass(frozen=True)
class Job:
    """``fault`` is the finding id gputop should come to (None: a healthy job), ``fix`` the job without it."""

    make: Callable[[float], Any]
    fault: str | None = None
    fix: str | None = None


def parser(jobs: Mapping[str, Job], about: str | None) -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    arguments.add_argument("job", choices=jobs)
    arguments.add_argument("--log", type=Path, required=True, help="where the end of every step is written")
    arguments.add_argument("--scale", type=float, default=1.0, help="of the arrays")
    return arguments


def wait_to_begin() -> None:
    """Say that all is imported, and wait for a line: until then the job leaves the GPU alone."""
    print("imported", flush=True)
    sys.stdin.readline()


def run_until_signaled(loop: Loop, log: Path, facts: dict[str, Any]) -> None:
    """Run the loop until SIGTERM or SIGINT, which end the process and write the log."""
    ends: list[float] = []
    process = os.getpid()

    def end(*_: object) -> None:
        if os.getpid() == process:  # not a worker of the job's
            log.write_text(json.dumps({**facts, "step_ends_s": ends}))
        os._exit(0)

    def stepped() -> None:
        ends.append(time.time())
        if len(ends) == STEPS_BEFORE:
            print("ready", flush=True)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    loop(stepped)
