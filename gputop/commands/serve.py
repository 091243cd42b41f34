"""``gputop serve``: the monitor in a browser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from gputop.commands.arguments import (
    add_shared,
    dip_options,
    notify_options,
    rules_options,
    screen_options,
    watch_options,
)
from gputop.commands.common import check_notify, is_loopback, options_of, source_of
from gputop.commands.option_types import listen_address
from gputop.core.errors import EXIT_USAGE, GputopError
from gputop.text.console import say

DEFAULT_ADDRESS = ("127.0.0.1", 8792)
_PASSED_ON = (watch_options, rules_options, dip_options, screen_options, notify_options)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, *_PASSED_ON)
    parser.add_argument("--listen", type=listen_address, default=DEFAULT_ADDRESS, metavar="[HOST:]PORT",
                        help="address to serve at (127.0.0.1:8792; port 0: any free port). Only this machine can "
                             "reach it, unless you name another HOST. Then there is no encryption")


def run(args: argparse.Namespace) -> int:
    from gputop.launch.web_server import serve

    if args.export is not None:
        raise GputopError("--export cannot be used with gputop serve, where each page has its own monitor",
                          "Run gputop export in addition.", EXIT_USAGE)
    as_monitor = argparse.Namespace(**{**vars(args), "command": None})
    source_of(as_monitor), options_of(as_monitor)  # what is wrong with the options is said here, not in the page
    check_notify(as_monitor)
    host, port = args.listen
    local = is_loopback(host)
    if not local:
        say(f"whoever reaches {host} and learns the address can use the monitor; the network carries it without "
            "encryption")
    return serve(list(_words(args)), host, port, local)


def _words(args: argparse.Namespace) -> Iterator[str]:
    """The options of the monitor as they would be written, those at their defaults left out."""
    monitor = argparse.ArgumentParser(add_help=False)
    for group in _PASSED_ON:
        group(monitor)
    for action in monitor._actions:
        value = getattr(args, action.dest)
        if value == action.default:
            continue
        if isinstance(action, argparse.BooleanOptionalAction):
            if isinstance(value, bool):  # not "auto", of the settings, which the monitor reads itself
                yield action.option_strings[0 if value else 1]
        elif action.nargs == 0:
            yield action.option_strings[0]
        else:
            yield from (f"{action.option_strings[0]}={one}" for one in (value if isinstance(value, list) else [value]))
