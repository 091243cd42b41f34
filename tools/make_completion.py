"""Makes gputop/completion while the package is built (setup.py): what `gputop completion` prints, and what is built."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path

from gputop.commands.arguments import COMMANDS, GROUPS, parser
from gputop.commands.completion import BUILD, FILES, WORKING_COPY
from gputop.commands.schema import SCHEMAS
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
    ("rules", "words"): sorted(page.stem for page in (ROOT / "gputop" / "advice" / "pages").glob("*.md")),
}

# Each variable that gputop reads, and what for. The test compares the names of gputop with the code.
ENVIRONMENT: Mapping[str, str] = {
    "GPUTOP_PROMETHEUS_TOKEN": "bearer token for the Prometheus of `gputop cluster`",
    "GPUTOP_PROMETHEUS_USER": "user name for it, instead of a token",
    "GPUTOP_PROMETHEUS_PASSWORD": "password of that user",
    "GPUTOP_PROMETHEUS_CA": "file with the certificates that signed the server's certificate",
    "GPUTOP_WEBHOOK_URL": "where `--notify webhook` sends its documents",
    "GPUTOP_WEBHOOK_TOKEN": "bearer token for it",
    "GPUTOP_PORT": "port of the profiler server in a job that `gputop run` or its `PYTHONPATH` prepares",
    "GPUTOP_LISTEN": "`all`: that server listens on all addresses, and not only on the loopback",
    "GPUTOP_RUN": "set by `gputop run` for its job; not for users",
    "NCCL_RAS_ADDR": "address of NCCL's RAS service (`localhost:28028`)",
    "CUDA_VISIBLE_DEVICES": "the GPUs of `--gpus visible`; from a job's environment, the numbers that the job uses",
    "TF_CONFIG": "the workers of a job, for `--profiler-port`",
    "SLURM_JOB_NODELIST": "the nodes of a job, for `--profiler-port`",
    "SLURM_JOB_ID": "the job that `gputop cluster` shows by default",
    "XDG_CONFIG_HOME": "folder of the settings and rules (`~/.config`, and in it `gputop`)",
    "XDG_CACHE_HOME": "folder that holds crash reports (`~/.cache`)",
    "NO_COLOR": "no colors",
    "TMPDIR": "folder of temporary files",
}
# Each file or folder that gputop has, and what it holds.
PLACES: Mapping[str, str] = {
    "~/.config/gputop/config.toml": "settings",
    "~/.config/gputop/rules.toml": "your custom rules, thresholds and budgets",
    "./gputop.toml": "those of the project in this folder",
    "./gputop-traces/": "captures, snapshots and baselines (`--logdir`), a TensorBoard logdir",
    "./gputop-traces/black-box/": "automatic captures (`--on-dip`)",
    "~/.cache/gputop/": "crash reports, ten at most",
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
    """What argparse-manpage leaves out: a line for whatis, lines that begin with a dot, the lines of the examples,
    and the sections of each manual. A command's options that the monitor has as well are described once, with it."""
    page = page.replace(".SH NAME\ngputop\n", f".SH NAME\ngputop \\- {_SUMMARY}\n", 1)
    page = page.replace(".SH\nPOSITIONAL ARGUMENTS\n", ".SH COMMANDS\n", 1)
    page = re.sub(r"(?m)^(?=\.(?![A-Z]{1,2}\b)|')", r"\\&", page)
    shared = "|".join(title.upper() for title in GROUPS)
    page = re.sub(rf"(?ms)^\.SH ({shared}) \\fI\\,'gputop \w+'\\/\\fR\n.*?(?=^\.SH )",
                  r".PP\nAlso the options under \\fB\1\\fR, below.\n", page)
    head, _, tail = page.partition(".SH COMMENTS\n")
    examples, settings, exits = re.split(r"\n\n(?=Defaults)|\nexit status: ", tail.removeprefix("examples:").rstrip())
    statuses = dict(text.split(" ", 1) for text in re.split(r"; (?=\d )", exits.replace("\n", " ")))
    return "\n".join((
        f"{head}.SH EXAMPLES\n.nf\n{examples.strip(chr(10))}\n.fi", *_section("EXIT STATUS", statuses),
        *_section("ENVIRONMENT", ENVIRONMENT), *_section("FILES", PLACES), f".PP\n{settings}",
        ".SH SEE ALSO", r"\fBnvidia\-smi\fR(1), \fBgputop skill\fR, https://github.com/gputop/gputop\-tf", ""))


def _section(title: str, rows: Mapping[str, str]) -> Iterator[str]:
    yield f".SH {title}"
    for name, text in rows.items():
        yield ".TP\n\\fB{}\\fR\n{}".format(*(part.replace("\\-", "-").replace("-", "\\-").replace("`", "")
                                             for part in (name, text)))


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
