"""The program ``gputop``, and ``python -m gputop``."""

import gc
import sys
from typing import NoReturn

from gputop.core.imports import without


def command() -> NoReturn:
    """Run the command line and end the process.

    Without the garbage collector at first: what is imported leaves next to no garbage, and to search for it is a tenth
    of the time to the monitor's first frame. Commands turn it on when they begin, the monitor when its screen is there.
    """
    gc.disable()
    if sys.version_info >= (3, 11):  # whose typing has what msgspec takes from typing_extensions
        with without("typing_extensions"):  # it takes 10 ms: with inspect, ast and dis
            import msgspec  # noqa: F401
    from gputop.cli import command

    command()


if __name__ == "__main__":
    command()
