"""The packages that some commands need besides gputop's dependencies: the extras of pyproject.toml, for messages."""

from __future__ import annotations

# By extra. The plain package is named, not gputop's extra: no index has gputop's distribution.
PACKAGES = {
    "export": "prometheus-client",
    "parquet": "pyarrow",
    "stacks": "py-spy",
    "xprof": "xprof",
}


def install_command(extra: str) -> str:
    """The line that installs what ``extra`` stands for into the environment of gputop."""
    return f"pip install {PACKAGES[extra]}"
