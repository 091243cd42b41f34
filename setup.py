"""Makes the completion scripts and the man page while the package is built; all else about it is in pyproject.toml."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithCompletion(build_py):
    """Copies the package's files, these among them."""

    def run(self) -> None:
        # A process of its own: a build leaves nothing of the package loaded in the builder's process.
        subprocess.run([sys.executable, "-c", "from tools.make_completion import make; make()"], check=True,
                       cwd=Path(__file__).resolve().parent)
        super().run()


setup(cmdclass={"build_py": BuildWithCompletion})
