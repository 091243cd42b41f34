"""The one place that makes the commands of gputop's own processes, and those that gputop advises to run.

No process of its own imports from the folder it is started in, which may be anybody's: see
:mod:`gputop.core.entry.start_gputop`.
"""

from __future__ import annotations

import sys
from pathlib import Path

_START = Path(__file__).resolve().with_name("entry") / "start_gputop.py"


def child_command(function: str, *arguments: str) -> list[str]:
    """The command that calls ``function``, as "module:name", in a process of its own. ``arguments`` are its sys.argv
    from the second word on, what it returns is the status."""
    return [sys.executable, str(_START), function, *arguments]


def gputop_command() -> list[str]:
    """The words that start gputop as this process was started, from whatever folder."""
    script = Path(sys.argv[0])
    if script.name == "gputop" and "/" in sys.argv[0] and script.is_file():
        return [str(script.absolute())]
    return child_command("gputop.__main__:command")


def pip_command() -> list[str]:
    """The words that start pip for this interpreter."""
    return [sys.executable, "-P" if sys.version_info >= (3, 11) else "-I", "-m", "pip"]


# The packages that some commands need besides gputop's dependencies, by extra of pyproject.toml. The plain package is
# named, not gputop's extra: no index has gputop's distribution.
PACKAGES = {"export": "prometheus-client", "parquet": "pyarrow", "stacks": "py-spy", "xprof": "xprof"}
# By the file that pipx and uv leave in the environment that they make for a program. None of these has pip.
_TOOLS = {"pipx_metadata.json": "pipx inject gputop-tf {package}",
          "uv-receipt.toml": "uv pip install --python '{prefix}' {package}"}


def install_command(extra: str) -> str:
    """The line that installs what ``extra`` stands for into the environment of gputop."""
    for file, line in _TOOLS.items():
        if Path(sys.prefix, file).exists():
            return line.format(package=PACKAGES[extra], prefix=sys.prefix)
    return f"pip install {PACKAGES[extra]}"
