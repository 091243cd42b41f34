"""All that ``gputop run`` changes about a job: the variables PYTHONPATH and GPUTOP_… of its environment."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from gputop.core.errors import GputopError
from gputop.core.own_memory import NUMPY_SETTINGS

INSIDE = Path(__file__).resolve().parent / "inside"
EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND = 126, 127  # the exit status of shells, env and nohup

_PYTHON = re.compile(r"python[0-9.]*(-dbg)?")
_WITH_VALUE = "WX"  # interpreter options whose value may be the next argument
_IGNORING_PYTHONPATH = {"I": "-I", "E": "-E", "S": "-S"}
# In the C locale Python sets LC_CTYPE (PEP 538), which would change the behavior of a job that is not Python.
_ADDED_BY_GPUTOP = ("LC_CTYPE", *NUMPY_SETTINGS)
_DROPS_ENVIRONMENT = {"docker", "podman", "nerdctl", "kubectl", "sudo", "su", "doas", "ssh"}


def job_environ(environ: Mapping[str, str], token: str, port: int = 0, listen: str = "local") -> dict[str, str]:
    """``environ`` for a job whose first process, or each rank, shall serve its profiler. ``token`` identifies the job
    to its processes; ``port`` 0 is any; ``listen`` is "local" or "all"."""
    before = environ.get("PYTHONPATH")
    out = {**environ, "PYTHONPATH": f"{INSIDE}{os.pathsep}{before}" if before else str(INSIDE), "GPUTOP_RUN": token}
    if port:
        out["GPUTOP_PORT"] = str(port)
    if listen != "local":
        out["GPUTOP_LISTEN"] = listen
    return out


def new_token() -> str:
    return secrets.token_hex(8)


def inherited_environ() -> dict[str, str]:
    """The environment gputop was started with, without what its interpreter and gputop itself have added since."""
    environ = dict(os.environ)
    try:
        at_start = Path("/proc/self/environ").read_bytes()
    except OSError:
        return environ
    for name in _ADDED_BY_GPUTOP:
        if f"\0{name}=".encode() not in b"\0" + at_start:
            environ.pop(name, None)
    return environ


def find_command(argv: Sequence[str]) -> str:
    """The file that ``argv`` starts. Raises GputopError with a shell's exit status where there is none."""
    command = shutil.which(argv[0])
    if command is not None:
        return command
    path = Path(argv[0])
    if "/" in argv[0] and path.exists():
        reason = "is a folder" if path.is_dir() else "is not executable"
        raise GputopError(f"{argv[0]} {reason}", f"For a Python script: gputop run -- python {argv[0]}",
                          EXIT_NOT_EXECUTABLE)
    raise GputopError("there is no command named "
                      f"{argv[0]}", "Check the name and PATH. The job's command comes after --.", EXIT_NOT_FOUND)


def launch_warning(argv: Sequence[str], file: str) -> str | None:
    """Reason why a server may not start in this command, judged by its arguments; None where no reason is found."""
    name = Path(argv[0]).name
    if name in _DROPS_ENVIRONMENT or (name == "env" and {"-i", "-", "--ignore-environment"} & set(argv)):
        return (f"{name} does not pass on its environment, so a profiler server may not start in the job. Put gputop "
                f"run inside: {name} … gputop run --headless -- python …")
    option = _option_ignoring_pythonpath(argv if _PYTHON.fullmatch(name) else _shebang(file))
    if option is None:
        return None
    return (f"Python's {option} ignores the environment, so no profiler server will start in the job. Remove the "
            "option, or start the server in the script.")


def _shebang(file: str) -> list[str]:
    try:
        with Path(file).open("rb") as script:
            first = script.readline(256)
    except OSError:
        return []
    words = first[2:].decode("utf-8", "replace").split() if first.startswith(b"#!") else []
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if word not in ("-S", "--split-string") and "=" not in word]
    return words


def _option_ignoring_pythonpath(words: Sequence[str]) -> str | None:
    """The option that makes this Python ignore PYTHONPATH or sitecustomize; None without one."""
    if not words or not _PYTHON.fullmatch(Path(words[0]).name):
        return None
    skip = False
    for word in words[1:]:
        if skip:
            skip = False
            continue
        if not word.startswith("-") or word in ("-", "--") or word.startswith("--"):
            return None
        for index, letter in enumerate(word[1:], 1):
            if letter in _IGNORING_PYTHONPATH:
                return _IGNORING_PYTHONPATH[letter]
            if letter in "cm":
                return None
            if letter in _WITH_VALUE:
                skip = index == len(word) - 1
                break
    return None
