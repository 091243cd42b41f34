"""Types of the command line's options, for argparse: each function converts a text or says what is wrong with it."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")
_AGE_S = {"m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE_BYTES = {"M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def number_of_seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None


def _number(text: str) -> float:
    """NaN, which is in no range, for what is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _checked(value: _T, good: bool, problem: str) -> _T:
    if not good:
        raise argparse.ArgumentTypeError(problem)
    return value


def output_file(text: str) -> Path:
    """A file to write, where standard output cannot take it: "-" would be a file of that name."""
    return _checked(Path(text), text != "-", "this format needs a file; it cannot be written to standard output")


def _digits(text: str, low: int, high: int, problem: str) -> int:
    if not (text.isascii() and text.isdecimal() and low <= int(text) <= high):
        raise argparse.ArgumentTypeError(problem)
    return int(text)


def _whole(high: int, problem: str) -> Callable[[str], int]:
    return lambda text: _digits(text, 1, high, problem.format(text))


def _in_range(is_good: Callable[[float], bool], problem: str,
              convert: Callable[[str], float] = _number) -> Callable[[str], float]:
    """Type of a number; ``problem`` says of another text what it is not."""
    return lambda text: _checked(value := convert(text), is_good(value), problem.format(text))


positive_seconds = _in_range(lambda s: 0 < s < 1e6, "{} is not a number of seconds above 0", number_of_seconds)
seconds_from_zero = _in_range(lambda s: 0 <= s < 1e9, "{} is not a non-negative number of seconds", number_of_seconds)
refresh_s = _in_range(lambda s: 2 <= s <= 3600, "{} is not between 2 and 3600 seconds", number_of_seconds)
interval_s = _in_range(lambda s: 0.1 <= s <= 3600, "{} is not between 0.1 and 3600 seconds", number_of_seconds)
minutes = _in_range(lambda m: 0 < m < 1e6, "{!r} is not a number of minutes above 0")
hours = _in_range(lambda h: 0.1 <= h <= 168, "{!r} is not a number of hours from 0.1 to 168")
amount = _in_range(lambda n: 1 <= n < 1e30, "{!r} is not a number of 1 or more, such as 3.2e15")
price = _in_range(lambda p: 0 < p < 1e9, "{!r} is not a price above 0")
count = _whole(1000, "{} is not a number from 1 to 1000")
port = _whole(65535, "{} is not a port from 1 to 65535")
parameter_count = _whole(10**15 - 1, "{!r} is not a number of parameters written in digits")


def pid(text: str) -> int:
    hint = (f"; for a server at an address: gputop --attach {text}" if ":" in text else
            f"; to find it: pgrep -f {text}" if text and text.isprintable() and " " not in text else "")
    return _digits(text, 1, 2**31 - 1, f"{text!r} is not a process ID{hint}")


def replay_speed(text: str) -> float:
    value = math.inf if text == "max" else _number(text)
    return _checked(value, text == "max" or 0.01 <= value <= 1000, f"{text!r} is neither between 0.01 and 1000 nor max")


def parsed_bounds(text: str) -> dict[str, float]:
    """Ages, sizes and numbers of parts, with commas (14d,2G,40), by the names of gputop.replay.parts.Bounds."""
    out: dict[str, float] = {}
    for word in text.split(","):
        match = re.fullmatch(r"(\d{1,6})([a-zA-Z]?)", word.strip())
        number, unit = (int(match[1]), match[2]) if match else (0, "")
        meanings = {"age_s": number * _AGE_S.get(unit, 0.0), "size_bytes": number * _SIZE_BYTES.get(unit.upper(), 0),
                    "parts": number * (not unit)}
        bound = next(((name, value) for name, value in meanings.items() if value), None)
        if bound is None or bound[0] in out:
            raise argparse.ArgumentTypeError(f"{text[:60]!r} is not an age (12h, 7d), a size (64M, 2G), or both, "
                                             "separated by a comma: 7d,2G")
        out[bound[0]] = bound[1]
    return out


def bounds(text: str) -> str:
    """A text that :func:`parsed_bounds` can read."""
    return text if parsed_bounds(text) else ""


def part_bounds(text: str) -> str:
    """The same of one part."""
    return _checked(text, "parts" not in parsed_bounds(text), f"{text[:60]!r} is not an age (12h) or a size (64M)")


def listen_address(text: str) -> tuple[str, int]:
    """[HOST:]PORT, [IPv6]:PORT; without a host this machine alone, port 0: any free one."""
    host, _, number = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    is_port = number.isascii() and number.isdecimal() and len(number) <= 5 and int(number) <= 65535
    if not is_port or text.startswith(":") or (":" in bare) != (host != bare):
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not PORT, HOST:PORT or [IPv6]:PORT (all addresses of this "
                                         "machine: 0.0.0.0:PORT)")
    return bare or "127.0.0.1", int(number)
