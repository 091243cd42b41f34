"""The question for the address of a job's profiler server."""

from __future__ import annotations

from gputop.core.errors import GputopError
from gputop.tui.screens.dialogs import Ask


def ask_attach() -> Ask:
    """Where the profiler server is."""
    def problem(address: str) -> str | None:
        from gputop.profiler.workers import addresses

        try:
            addresses([address])
        except GputopError as error:
            return error.in_one_line
        return None

    hint = ("The profiler server of a job. To start one in it:\n"
            "  tf.profiler.experimental.server.start(6009)\n"
            "  jax.profiler.start_server(6009)\n"
            "A job that runs without one is given one by:\n"
            "  gputop attach PID")
    return Ask("Attach to HOST:PORT", hint, placeholder="localhost:6009", check=problem)
