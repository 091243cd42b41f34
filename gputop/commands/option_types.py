"""What options of the command line take, for argparse: each function converts a text or says what is wrong with it."""

from __future__ import annotations

import argparse
import math


def number_of_seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None


def positive_seconds(text: str) -> float:
    value = number_of_seconds(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return value


def minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes above 0")
    return value


def seconds_from_zero(text: str) -> float:
    value = number_of_seconds(text)
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0 on")
    return value


def count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= 1000):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 to 1000")
    return int(text)


def port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text} is not a port from 1 to 65535")
    return int(text)


def pid(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a process")
    return int(text)


def parameter_count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) < 10**15):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of parameters, in digits")
    return int(text)


def amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value < 1e30:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on, such as 3.2e15")
    return value


def seconds_before_dip(text: str) -> float:
    value = number_of_seconds(text)
    if not (value == 0 or 2 <= value <= 60):
        raise argparse.ArgumentTypeError(f"{text} is not between 2 and 60 seconds")
    return value


def replay_speed(text: str) -> float:
    if text == "max":
        return math.inf
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.01 <= value <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0.01 and 1000, or max")
    return value


def hours(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 168:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of hours from 0.1 to 168")
    return value


def refresh_s(text: str) -> float:
    value = number_of_seconds(text)
    if not 2 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 2 and 3600 seconds")
    return value


def interval_s(text: str) -> float:
    value = number_of_seconds(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.1 and 3600 seconds")
    return value


def listen_address(text: str) -> tuple[str, int]:
    """[HOST:]PORT, [IPv6]:PORT; without a host this machine alone, port 0: any free one."""
    host, _, number = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    is_port = number.isascii() and number.isdecimal() and len(number) <= 5 and int(number) <= 65535
    if not is_port or text.startswith(":") or (":" in bare) != (host != bare):
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not PORT, HOST:PORT or [IPv6]:PORT (all addresses of this "
                                         "machine: 0.0.0.0:PORT)")
    return bare or "127.0.0.1", int(number)
