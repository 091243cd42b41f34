"""Starts a function of the gputop that this file belongs to, wherever the process is started.

    python …/gputop/core/entry/start_gputop.py MODULE:FUNCTION ARGUMENTS…

With ``python -m`` and ``python -c`` Python imports from the folder the process is started in first. That may be
anybody's: a contextlib.py there would run as root. With a file Python imports from the file's folder instead, and this
one holds nothing else. :mod:`gputop.core.own_program` makes the command.
"""

import sys
from importlib import import_module
from os.path import abspath, dirname


def _import_gputop() -> None:
    """Import the gputop of this file, not one that another folder of sys.path has. What is installed beside it is
    found, too, and last: it may not take the place of the standard library."""
    here = dirname(abspath(__file__))  # noqa: PTH100, PTH120  pathlib takes 5 ms of the first frame
    root = dirname(dirname(dirname(here)))  # noqa: PTH120
    sys.path[:] = [root, *(folder for folder in sys.path if folder and folder != here)]
    import_module("gputop")
    sys.path.append(sys.path.pop(0))


if __name__ == "__main__":
    _import_gputop()
    module, _, function = sys.argv.pop(1).partition(":")
    sys.exit(getattr(import_module(module), function)())
