"""``python -m gputop`` is the command ``gputop``."""

from gputop.cli import command

if __name__ == "__main__":
    command()
