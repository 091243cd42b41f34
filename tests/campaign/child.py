"""The process in which inputs are tried: ``-m tests.campaign.child FOLDER MODULE TARGETS SEED COUNT [KEPT ...]``.

Before each input it writes it to ``current``, so that whoever started it has it when this process dies or hangs. It
says of each failure one line of JSON, with the input, on the descriptor that was its stdout, and a line for each input
that began.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import re
import resource
import shutil
import sys
import threading
import time
import traceback
import warnings
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gputop.core.errors import GputopError
from gputop.text import console
from tests.campaign.mutation import mutated

if TYPE_CHECKING:
    from tests.campaign.target import Target

_ADDRESS_SPACE_BYTES = 6 << 30
_OUTPUT_BYTES = 4 << 20
# What drives a terminal: C0 but for tab and line feed, DEL, C1; what turns the direction of text, or is not seen.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
_KEPT, _KEPT_BYTES = 200, 1 << 16  # inputs that led somewhere new, for further mutation
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CHANGES = {"os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.chown",
            "os.truncate", "os.utime", "shutil.rmtree", "shutil.copyfile", "shutil.move"}
_LOOPBACK = ("127.0.0.1", "::1")
_STARTS = {"os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "os.fork", "os.forkpty", "os.kill"}


class Watch:
    """What the code under test does that it must not: files outside ``folder``, connections, processes."""

    def __init__(self, folder: Path) -> None:
        self._inside = tuple(str(Path(path).resolve()) for path in (folder, folder.parent / "driver", "/dev/null",
                                                                    "/dev/shm"))
        self._inside += ("/proc/self/oom_score_adj",)
        self._bait = str(folder.parent / "bait")
        self.found: list[str] = []
        self.on = False
        sys.addaudithook(self._hook)
        threading.excepthook = lambda fault: self.found.append(
            f"traceback in a thread: {describe(fault.exc_value, fault.exc_traceback)}")
        sys.unraisablehook = lambda fault: self.found.append(f"ignored error: {fault.exc_value!r}")
        warnings.simplefilter("always")
        warnings.showwarning = self._warning

    def _warning(self, message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
        if "/gputop/" in filename and not issubclass(category, ResourceWarning):
            self.found.append(f"warning: {category.__name__}: {message} ({Path(filename).name}:{lineno})")

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, bytes):
                path = os.fsdecode(path)
            if isinstance(path, str) and path.startswith("/"):
                outside = not path.startswith(self._inside)
                if path.startswith(self._bait) or (outside and (flags or 0) & _WRITING):
                    self.found.append(f"opened outside: {'bait' if 'bait' in path else path[:80]}")
        elif event in _CHANGES:
            for path in arguments[:2]:
                path = os.fsdecode(path) if isinstance(path, (bytes, os.PathLike)) else path
                if isinstance(path, str) and path.startswith("/") and not path.startswith(self._inside):
                    self.found.append(f"{event} outside: {path[:80]}")
        elif event in _STARTS:
            self.found.append(f"{event}: {str(arguments)[:80]}")
        elif event == "socket.connect" and isinstance(arguments[1], tuple) and arguments[1][0] not in _LOOPBACK:
            self.found.append(f"connected to {arguments[1][0]!r}")


def describe(error: BaseException | None, trace: TracebackType | None) -> str:
    """The kind of an error and the innermost line of the project: what two failures have in common."""
    frames = [f for f in traceback.extract_tb(trace) if "/gputop/" in f.filename] or traceback.extract_tb(trace)
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__} at {place}: {str(error)[:120]!r}"


class Output:
    """The standard streams as files, looked at and emptied after each input."""

    def __init__(self, folder: Path) -> None:
        self._paths = [folder / "stdout", folder / "stderr"]
        for descriptor, path in enumerate(self._paths, 1):
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(file, descriptor)
            os.close(file)

    def take(self) -> list[str]:
        """What both hold since the last time, as text."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        texts = []
        for descriptor in (1, 2):
            os.lseek(descriptor, 0, os.SEEK_SET)
            texts.append(os.read(descriptor, _OUTPUT_BYTES).decode("utf-8", "replace"))
            os.ftruncate(descriptor, 0)
        return texts


def peak_bytes() -> int:
    """The most resident memory since the last call of :func:`forget_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def forget_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def run(target: Target, folder: Path, data: bytes) -> str:
    """How it ended, in a word or a message."""
    try:
        target.run(folder, data)
    except GputopError as error:
        console.print_error(error)
        return error.message
    except SystemExit as error:
        return f"exit {error.code}"
    return "fine"


def attempt(target: Target, data: bytes, folder: Path, output: Output, watch: Watch) -> tuple[list[str], str]:
    """What went wrong with one input, and what its way through the program looks like."""
    watch.found.clear()
    forget_peak()
    before, began_s = peak_bytes(), time.process_time()
    watch.on = True
    try:
        end = run(target, folder, data)
    except BaseException as error:  # noqa: BLE001  that is what is looked for
        end = f"traceback: {describe(error, error.__traceback__)}"
        watch.found.append(end)
    watch.on = False
    problems = list(dict.fromkeys(watch.found))
    grown, took_s = peak_bytes() - before, time.process_time() - began_s
    if took_s > target.most_cpu_s:
        problems.append(f"slow: {took_s:.1f} s of CPU for {len(data)} bytes")
    if grown > target.most_bytes:
        problems.append(f"memory: {grown >> 20} MB for {len(data)} bytes")
    texts = output.take()
    for text in texts:
        found = _UNPRINTABLE.search(text)
        if found:
            before_it = text[max(0, found.start() - 40):found.start()]
            problems.append(f"unprintable on the terminal: {found[0]!r} after {before_it!r}")
        if "Traceback (most recent call last)" in text or "a fault of gputop" in text:
            problems.append(f"a traceback was shown: {text[-200:]!r}")
    shape = re.sub(r"[\d.]+|/\S+", "", " ".join((end, texts[1][:300], texts[0][:2000])))
    return problems, shape


class Child:
    """Tries inputs one after the other and tells of them on what was stdout."""

    def __init__(self, folder: Path) -> None:
        self._tell = os.fdopen(os.dup(1), "w")
        self._folder, self._work = folder, folder / "work"
        shutil.rmtree(self._work, ignore_errors=True)
        self._work.mkdir(parents=True)
        os.chdir(self._work)
        self._output, self._watch = Output(folder), Watch(self._work)
        self._seeds: dict[str, list[bytes]] = {}
        self._pools: dict[str, list[bytes]] = {}
        self._shapes: set[tuple[str, str]] = set()

    def tell(self, **what: object) -> None:
        self._tell.write(json.dumps(what) + "\n")
        self._tell.flush()

    def mutate(self, targets: list[Target], seed: int, count: int) -> None:
        random_ = random.Random(seed)
        for number in range(count):
            target = random_.choices(targets, [1 / target.cost for target in targets])[0]
            if number < len(targets):
                target = targets[number]
            seeds = self._prepare(target)
            self.attempt(target, mutated(random_, [*seeds, *self._pools[target.name]], target.structure))
        self.tell(done=count, shapes=len(self._shapes))

    def _prepare(self, target: Target) -> list[bytes]:
        """The seeds of a target, one of which has been tried: what that imports is no growth of memory."""
        if target.name not in self._seeds:
            bait = str(self._folder / "bait").encode()
            self._seeds[target.name] = [seed.replace(b"{BAIT}", bait) for seed in target.seeds(self._work)]
            self._pools[target.name] = []
            attempt(target, self._seeds[target.name][0], self._work, self._output, self._watch)
        return self._seeds[target.name]

    def attempt(self, target: Target, data: bytes) -> None:
        self._prepare(target)
        (self._folder / "current").write_bytes(data)
        self.tell(target=target.name)
        problems, shape = attempt(target, data, self._work, self._output, self._watch)
        if (target.name, shape) not in self._shapes and len(data) < _KEPT_BYTES:
            self._shapes.add((target.name, shape))
            self._pools[target.name] = [*self._pools[target.name], data][-_KEPT:]
        for problem in problems:
            self.tell(target=target.name, problem=problem, data=base64.b64encode(data).decode())


def main(folder: str, module: str, names: str, seed: str, count: str, *kept: str) -> None:
    all_targets: dict[str, Target] = import_module(module).TARGETS
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE_BYTES, _ADDRESS_SPACE_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    child = Child(Path(folder))
    for path in map(Path, kept):
        child.attempt(all_targets[path.name.rpartition("-")[0]], path.read_bytes())
    child.mutate([all_targets[name] for name in names.split(",")], int(seed), int(count))
    os._exit(0)  # gRPC's threads are not waited for


if __name__ == "__main__":
    main(*sys.argv[1:])
