"""The program ``gputop``, and ``python -m gputop``."""

import gc
from typing import NoReturn


def command() -> NoReturn:
    """Run the command line and end the process.

    Without the garbage collector at first: what is imported leaves next to no garbage, and to search for it is a tenth
    of the time to the monitor's first frame. Commands turn it on when they begin, the monitor when its screen is there.
    """
    gc.disable()
    from gputop.cli import command

    command()


if __name__ == "__main__":
    command()
