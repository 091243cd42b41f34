"""The exceptions gputop raises on purpose: the cause and the fix, in words for the user."""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NO_DATA = 3


class GputopError(Exception):
    """Something failed for a reason the user can act on.

    ``message`` names the cause, ``fix`` what to do about it (may be empty), ``exit_code``
    the status of the command (1 failed, 2 wrong usage, 3 no data).
    """

    def __init__(self, message: str, fix: str = "", exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix
        self.exit_code = exit_code

    def __str__(self) -> str:
        return f"{self.message}\n  {self.fix}" if self.fix else self.message


class NoDataError(GputopError):
    """There is no GPU, no profiler server or no trace event (exit status 3)."""

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(message, fix, EXIT_NO_DATA)
