"""Makes gputop/completion while the package is built (setup.py): what `gputop completion` prints, and what is built."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from gputop.commands.arguments import COMMANDS, parser
from gputop.commands.completion import FILES
from gputop.commands.schema import SCHEMAS
from gputop.commands.versions import BUILD, WORKING_COPY
from gputop.core.version import __version__
from gputop.simulation.scenarios import SCENARIOS

_SUMMARY = "shows why the GPUs are not at 100%, and what to do about it"
ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "gputop" / "completion"
_FOLDERS = ("DIR", "RUN|LOGDIR")
_NAMES = ("FILE", "PATH", "A", "B")
# Words for arguments whose words argparse does not check: others are right, too, or gputop's own message says more.
_WORDS: dict[tuple[str | None, str], Iterable[str]] = {
    (None, "demo"): ("list", *SCENARIOS), (None, "theme"): ("gputop-dark", "gputop-light", "gputop-contrast"),
    (None, "notify"): ("bell", "webhook"), ("schema", "name"): SCHEMAS,
}


def _with_values(root: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The parser, its arguments that are paths marked as such, and others with the words that they take."""
    shtab = import_module("shtab")
    parsers = {None: root, **root._commands.choices}  # type: ignore[attr-defined]
    for command, action in ((command, action) for command, own in parsers.items() for action in own._actions):
        if action.metavar in _FOLDERS:
            action.complete = shtab.DIRECTORY
        elif action.metavar in _NAMES:
            action.complete = shtab.FILE
        elif words := _WORDS.get((command, action.dest)) or _WORDS.get((None, action.dest)):
            action.choices = list(words)
    return root


def _man_page(page: str) -> str:
    """What argparse-manpage leaves out: a line for whatis, lines that begin with a dot, the lines of the examples."""
    page = page.replace(".SH NAME\ngputop\n", f".SH NAME\ngputop \\- {_SUMMARY}\n", 1)
    page = re.sub(r"(?m)^(?=\.(?![A-Z]{1,2}\b)|')", r"\\&", page)
    head, _, tail = page.partition(".SH COMMENTS\n")
    return f"{head}.SH EXAMPLES\n.nf\n{tail.removeprefix('examples:').strip(chr(10))}\n.fi\n"


def made(what: str) -> str:
    """The text of one file."""
    os.environ["COLUMNS"] = "80"  # argparse breaks lines by it
    if what != "man":
        return str(import_module("shtab").complete(_with_values(parser()), what))
    page = import_module("argparse_manpage.manpage").Manpage(parser())
    page.source, page.manual, page.date = f"gputop {__version__}", "User Commands", ""
    return _man_page(f"{page}\n")


def build(root: Path = ROOT) -> str:
    """What these sources are, for `gputop --version`: nothing for a release, which its tag names."""
    def git(*words: str) -> str:
        # These sources' own repository: not one around them, nor that of a hook which builds.
        return subprocess.run(("git", f"--git-dir={root / '.git'}", f"--work-tree={root}", *words), check=True,
                              capture_output=True, text=True).stdout.strip()

    try:
        commit, changed = git("rev-parse", "--short=12", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
        if f"v{__version__}" in git("tag", "--points-at", "HEAD").splitlines() and not changed:
            return ""
    except (OSError, subprocess.CalledProcessError):
        return "commit unknown: built without git"
    return f"commit {commit}{' with changes' if changed else ''}, not a release"


def make(folder: Path = FOLDER, working_copy: bool = False) -> None:
    """Write all files into `folder`."""
    folder.mkdir(exist_ok=True)
    note = folder / BUILD
    if working_copy or (ROOT / ".git").exists() or not note.exists():  # else of an sdist, which brings its own
        note.write_text(WORKING_COPY if working_copy else build(), encoding="utf-8")
    for what, name in FILES.items():
        (folder / name).write_text(made(what), encoding="utf-8")


if __name__ == "__main__":
    make()
    print(f"{FOLDER}: the words of {len(COMMANDS)} commands for {', '.join(FILES)}")
