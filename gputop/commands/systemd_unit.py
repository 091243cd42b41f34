"""A unit of systemd --user that keeps a command running. systemd.service(5), systemd.syntax(7), "QUOTING"."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gputop.core.errors import EXIT_USAGE, GputopError

NAME = "gputop-record.service"
RETRY_S = 60
_PLAIN = re.compile(r"[\w./=,:@+-]+")
_ESCAPES = {"\\": "\\\\", '"': '\\"', "%": "%%", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def user_unit(words: Sequence[str]) -> str:
    """The unit that runs ``words`` again where they end with an error."""
    command = " ".join([quoted(words[0], variables=False), *map(quoted, words[1:])])
    return f"""\
# ~/.config/systemd/user/{NAME}
# To start it now and at every login:
#   systemctl --user daemon-reload && systemctl --user enable --now {NAME.removesuffix('.service')}
# Also from boot on, and after you have logged out:  loginctl enable-linger
# Its messages:  journalctl --user -u {NAME.removesuffix('.service')}
[Unit]
Description=gputop record: GPU telemetry for gputop report
StartLimitIntervalSec=0

[Service]
ExecStart={command}
# It tries again after a full disk or a missing driver, but not after wrong usage (status 2).
Restart=on-failure
RestartSec={RETRY_S}
RestartPreventExitStatus={EXIT_USAGE}
Nice=10

[Install]
WantedBy=default.target
"""


def quoted(word: str, *, variables: bool = True) -> str:
    """A word of ExecStart as systemd reads it back. ``variables``: not in the program's own path, $ begins one.

    Raises GputopError for what no unit can hold.
    """
    if "\0" in word or any(0xD800 <= ord(char) < 0xE000 for char in word):  # a name that is no UTF-8
        raise GputopError(f"a unit of systemd cannot hold {word!r}", "Choose a folder with a plain name.", EXIT_USAGE)
    text = "".join(_ESCAPES.get(char) or (f"\\x{ord(char):02x}" if ord(char) < 0x20 or ord(char) == 0x7F else char)
                   for char in word)
    if variables:
        text = text.replace("$", "$$")
    return text if _PLAIN.fullmatch(text) else f'"{text}"'
