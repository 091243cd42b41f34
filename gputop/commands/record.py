"""``gputop record``: telemetry into a file, or for days into a folder of parts."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence

from gputop.commands.arguments import add_shared
from gputop.commands.common import source_of
from gputop.commands.option_types import bounds, output_file, parsed_bounds, part_bounds, positive_seconds
from gputop.core.errors import EXIT_OK, EXIT_USAGE, GputopError
from gputop.core.own_program import gputop_command
from gputop.core.signal_handlers import stop_at_end
from gputop.replay.parts import Bounds, Rotation, record
from gputop.text import console
from gputop.text.console import say

DEFAULT_ROTATION, DEFAULT_KEEP = "1d,64M", "30d,2G"
_MIN_KEPT_BYTES = 8 << 20
# Of a unit of systemd --user: systemd.service(5), systemd.syntax(7), "QUOTING".
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
# To run it also from boot on and after you log out:  loginctl enable-linger
# Its messages:  journalctl --user -u {NAME.removesuffix('.service')}
[Unit]
Description=gputop record: GPU telemetry for gputop report
StartLimitIntervalSec=0

[Service]
ExecStart={command}
# Restarts after a full disk or a missing driver, but not after wrong usage (status 2).
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
        raise GputopError(f"a systemd unit cannot contain {word!r}", "Choose a folder whose name has no special "
                                                                     "characters.", EXIT_USAGE)
    text = "".join(_ESCAPES.get(char) or (f"\\x{ord(char):02x}" if ord(char) < 0x20 or ord(char) == 0x7F else char)
                   for char in word)
    if variables:
        text = text.replace("$", "$$")
    return text if _PLAIN.fullmatch(text) else f'"{text}"'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "what to watch", idle=("profiler servers", "captures"))
    parser.add_argument("-o", "--output", type=output_file, required=True, metavar="FILE",
                        help="output file, which must not exist yet; with --rotate, a folder")
    parser.add_argument("--seconds", type=positive_seconds, default=None, metavar="S",
                        help="length of the recording (default: until ctrl-c)")
    parser.add_argument("--rotate", nargs="?", type=part_bounds, const=DEFAULT_ROTATION, default=None,
                        metavar="WHEN", help="for recordings of several days: -o names a folder, and gputop starts a "
                                             f"new file at this age or size ({DEFAULT_ROTATION}). A later start "
                                             "continues in the same folder")
    parser.add_argument("--keep", type=bounds, default=None, metavar="LIST",
                        help="limit the folder by age, size or number of files; gputop removes the oldest files "
                             f"({DEFAULT_KEEP})")
    parser.add_argument("--systemd-unit", action="store_true",
                        help="print a systemd user unit that records with these options, and how to install it")


def run(args: argparse.Namespace) -> int:
    rotation = _rotation(args)
    if args.systemd_unit:
        console.write_text(user_unit(list(_words(args))))
        return EXIT_OK
    with stop_at_end() as stop:
        record(source_of(args), args.interval, args.output, args.seconds, stop, say, rotation)
    return EXIT_OK


def _rotation(args: argparse.Namespace) -> Rotation | None:
    if args.rotate is None:
        if args.keep is not None or args.systemd_unit:
            option = "--keep" if args.keep is not None else "--systemd-unit"
            raise GputopError(f"{option} works only with a folder of "
                              "recordings", "Add --rotate, and name a folder with -o.", EXIT_USAGE)
        return None
    if args.output.is_file():
        raise GputopError(f"{args.output} is a file; with --rotate, -o names a folder", "Give another name with -o.",
                          EXIT_USAGE)
    keep = Bounds(**parsed_bounds(args.keep or DEFAULT_KEEP))
    if keep.size_bytes is not None and keep.size_bytes < _MIN_KEPT_BYTES:
        raise GputopError("--keep is less than 8M, which is too small for one day", "Keep more.", EXIT_USAGE)
    return Rotation(Bounds(**parsed_bounds(args.rotate)), keep)


# -- the unit ---------------------------------------------------------------------------------------


def _words(args: argparse.Namespace) -> Iterator[str]:
    """The command that does what this one was told, wherever it is started."""
    bindings = args.dcgm_bindings and args.dcgm_bindings.absolute()
    yield from gputop_command()
    yield "record"
    yield from ("-o", str(args.output.absolute()))
    yield f"--rotate={args.rotate}"
    yield f"--interval={args.interval:g}"
    for option, value, default in (("keep", args.keep, None), ("gpus", args.gpus, ""), ("source", args.source, "auto"),
                                   ("dcgm", args.dcgm, None), ("dcgm-bindings", bindings, None),
                                   ("demo", args.demo, None), ("seconds", args.seconds, None)):
        if value != default:
            yield f"--{option}={value}"
    if args.dcgm_watch:
        yield "--dcgm-watch"
