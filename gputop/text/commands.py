"""Command lines as people name them: the script, not the interpreter's path."""

from __future__ import annotations

import re
from functools import lru_cache

_PYTHON = re.compile(r"(?:python|pypy)[\d.]*t?|ipython3?")
_SHELL = re.compile(r"(?:ba|da|k|z)?sh")
# Options of Python that take the next word, unless it is joined to them; every other begins with - and stands alone.
_WITH_WORD = re.compile(r"-[a-zA-Z]*[WX]|--check-hash-based-pycs")
_PATH = re.compile(r"(?<![^\s=:,'\"])(~?/[^\s=:,'\"]{2,})")
_PATH_CHARS = 32  # a longer one is cut in the middle


@lru_cache(maxsize=4096)
def short_command(command: str) -> str:
    """``command`` with its secrets hidden, without the interpreter and folders that only say where a program lies.

    "/opt/conda/bin/python3.11 -u /home/ana/vit/train.py --data /a/long/path" is "train.py --data /a/…/path", of
    "python -m pkg.train" and "python -c CODE" the first word stays. A long path among the arguments is cut in its
    middle. The words of a command are those between spaces: /proc tells no better.
    """
    from gputop.text import redaction

    words = redaction.command(command).split(" ")
    while words and not words[0]:
        words = words[1:]
    if not words or words[0].startswith("["):  # a kernel thread
        return " ".join(words)
    program = _base(words[0].removeprefix("-"))  # a login shell has a dash
    rest = words[1:]
    if _PYTHON.fullmatch(program) or _SHELL.fullmatch(program):
        rest = _without_options(rest)
        if rest and not rest[0].startswith("-"):
            program, rest = _base(rest[0]), rest[1:]
    return " ".join((program, *(_PATH.sub(lambda match: cut_path(match[1], _PATH_CHARS), word) for word in rest)))


def program_name(command: str) -> str:
    """The first word that tells programs apart: the script, the module, or the program."""
    words = short_command(command).split(" ")
    return words[2] if len(words) > 2 and words[1] == "-m" and _PYTHON.fullmatch(words[0]) else words[0]


def command_of(about: str) -> str:
    """The command out of what is known of a server: "TensorFlow 2.21.0, rank 1: python train.py"."""
    return _split(about)[1]


def script_of(command: str) -> str:
    """Part of a command of Python that stays when its options change: the script's path, or the module. Any other
    command, also ``python -c``, is returned whole."""
    words = command.split(" ")
    if not _PYTHON.fullmatch(_base(words[0])):
        return command
    rest = _without_options(words[1:])
    if not rest:
        return command
    if not rest[0].startswith("-"):
        return rest[0]
    return f"-m {rest[1]}" if rest[0].endswith("m") and len(rest) > 1 else command


def short_description(about: str) -> str:
    """Description of a server, with the script first: "train.py --lr 1 (TensorFlow 2.21.0, rank 1)"."""
    facts, command = _split(about)
    return f"{short_command(command)} ({facts})" if facts else short_command(command)


def _split(about: str) -> tuple[str, str]:
    facts, colon, command = about.partition(": ")
    return (facts, command) if colon and "/" not in facts and " -" not in facts else ("", about)


def cut_path(path: str, chars: int) -> str:
    """``path`` in as many characters: its beginning and its last names, an ellipsis for what is between them."""
    if len(path) <= chars:
        return path
    head = path[:path.find("/", 1) + 1] or path[:1]
    names = path.split("/")
    for first in range(2, len(names)):
        tail = "/".join(names[first:])
        if len(head) + 2 + len(tail) <= chars:
            return f"{head}…/{tail}"
    name = names[-1]
    room = max(3, chars - len("…/"))
    return "…/" + (name if len(name) <= room else f"{name[:room // 2]}…{name[-(room - room // 2 - 1):]}")


def _base(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2] or path


def _without_options(words: list[str]) -> list[str]:
    """The words from the script on, or from -m or -c on."""
    index = 0
    while index < len(words) and words[index].startswith("-"):
        if re.fullmatch(r"-[a-zA-Z]*[mc]", words[index]) or words[index] == "-":
            return [words[index], *words[index + 1:]]
        index += 2 if _WITH_WORD.fullmatch(words[index]) else 1
    return words[index:]
