"""``python -m gputop`` is the command ``gputop``."""

import sys

from gputop.cli import main

if __name__ == "__main__":
    sys.exit(main())
