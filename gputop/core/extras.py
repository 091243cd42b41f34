"""The packages that some commands need besides gputop's dependencies: the extras of pyproject.toml, for messages."""

from __future__ import annotations

import sys
from pathlib import Path

# By extra. The plain package is named, not gputop's extra: no index has gputop's distribution.
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
