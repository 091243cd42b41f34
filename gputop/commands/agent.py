"""``gputop agent``: what gputop on another node talks with, by ssh (:mod:`gputop.telemetry.agents`).

It is asked for figures of the GPUs here, again and again, or for traces of a job's ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import sys

from gputop.commands.common import options_of, source_of, start
from gputop.core.errors import EXIT_OK, EXIT_USAGE, GputopError
from gputop.core.version import __version__
from gputop.session.session import Session
from gputop.telemetry.agents import SCHEMA, NodeAnswer, NodeProblem, Request, answer_of, read_line, write_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has none: what it is asked for comes on standard input."""


def run(args: argparse.Namespace) -> int:
    """Raises GputopError where a question cannot be answered."""
    while True:
        try:
            request = read_line(sys.stdin.buffer, Request)
        except NodeProblem:  # whoever asked is gone
            return EXIT_OK
        if request.schema != SCHEMA:
            raise GputopError(f"gputop {__version__} on that node is not the version that sent the request",
                              "Install the same version on all nodes.", EXIT_USAGE)
        if request.ranks_of:
            from gputop.commands import capture_ranks

            capture_ranks.answer(request)
            return EXIT_OK
        write_line(sys.stdout.buffer, _figures(args, request))


def _figures(args: argparse.Namespace, request: Request) -> NodeAnswer:
    """Raises GputopError."""
    with contextlib.closing(Session(source_of(args), options_of(args))) as session:
        start(session, request.seconds)
        sample, history = session.feed.sample, session.feed.history
        assert sample is not None and history is not None
        return answer_of(sample, history, request.seconds)
