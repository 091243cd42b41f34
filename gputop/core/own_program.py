"""The one place that makes the commands of gputop's own processes, and those that gputop advises to run.

None imports from the folder it is started in, which may be anybody's: see :mod:`gputop.core.entry.start_gputop`.
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
