"""The exceptions gputop raises on purpose: the cause and the fix, in words for the user."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NO_DATA = 3
EXIT_GATE = 4  # --fail-on
MESSAGE_CHARS = 4000  # of what an error keeps: a server may answer with 50 MB of error text


class GputopError(Exception):
    """Something failed for a reason the user can act on. ``message`` names the cause, ``fix`` what to do about it (may
    be empty), ``exit_code`` the status of the command (1 failed, 2 wrong usage, 3 no data)."""

    def __init__(self, message: str, fix: str = "", exit_code: int = EXIT_FAILED) -> None:
        message = _shortened(message)
        super().__init__(message)
        self.message = message
        self.fix = _shortened(fix)
        self.exit_code = exit_code

    @property
    def in_one_line(self) -> str:
        """Cause and way out, as sentences."""
        return sentences(self.message, self.fix)

    def __str__(self) -> str:
        return f"{self.message}\n  {self.fix}" if self.fix else self.message


@contextlib.contextmanager
def os_errors_as(message: str, fix: str = "", kind: type[GputopError] = GputopError) -> Iterator[None]:
    """Raise GputopError, "message: the system's reason", for an OSError of the block."""
    try:
        yield
    except OSError as error:
        raise kind(f"{message}: {error.strerror or error}", fix) from error


def sentences(*texts: str) -> str:
    """Texts in one line, each ending as a sentence does; empty ones are left out."""
    parts = [" ".join(text.split()) for text in texts]
    return " ".join(text if text[-1] in ".!?…:" else f"{text}." for text in parts if text)


def _shortened(text: str) -> str:
    return text if len(text) <= MESSAGE_CHARS else f"{text[:MESSAGE_CHARS]}… ({len(text):,} characters)"


class NoDataError(GputopError):
    """Error where there is no GPU, no profiler server or no trace event (exit status 3)."""

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(message, fix, EXIT_NO_DATA)
