"""The question for the address of a job's profiler server."""

from __future__ import annotations

from gputop.core.errors import GputopError
from gputop.tui.screens.dialogs import Ask


def ask_attach() -> Ask:
    """Ask where the profiler server is."""
    def problem(address: str) -> str | None:
        from gputop.profiler.workers import addresses

        try:
            addresses([address])
        except GputopError as error:
            return error.in_one_line
        return None

    hint = ("The address of a job's profiler server. To start one in the job:\n"
            "  tf.profiler.experimental.server.start(6009)\n"
            "  jax.profiler.start_server(6009)\n"
            "To start one in a running job:\n"
            "  gputop attach PID")
    return Ask("Attach to HOST:PORT", hint, placeholder="localhost:6009", check=problem)
