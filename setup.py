"""What pyproject.toml cannot say of a build: completion scripts, the man page, what is built, README on an index."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
REPOSITORY = "https://github.com/gputop/gputop-tf"


def make(working_copy: bool = False) -> None:
    """In a process of its own: a build leaves nothing of the package loaded in the builder's process."""
    subprocess.run([sys.executable, "-c", f"from tools.make_completion import make; make(working_copy={working_copy})"],
                   check=True, cwd=ROOT)


class BuildWithCompletion(build_py):
    """Copies the package's files, these among them."""

    def run(self) -> None:
        make(self.editable_mode)
        super().run()


class SourceWithCommit(sdist):
    """Packs the sources with the name of their commit, which a build without git cannot ask for."""

    def run(self) -> None:
        make()
        super().run()


def readme() -> str:
    """README.md as an index shows it: it has none of the files that the links name."""
    def link(found: re.Match[str]) -> str:
        place = f"raw/main/{found[3]}?sanitize=true" if found[1] else f"blob/main/{found[3]}"
        return f"{found[1]}{found[2]}{REPOSITORY}/{place})"

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"(!?)(\[[^]]*\]\()(?!https?:|#)([^)]+)\)", link, text)


setup(cmdclass={"build_py": BuildWithCompletion, "sdist": SourceWithCommit}, long_description=readme(),
      long_description_content_type="text/markdown")
