"""The user's settings: ``$XDG_CONFIG_HOME/gputop/config.toml``, read without a TOML library.

A line is a key and a value, ``interval = 0.5``: that much of TOML, whose strings, numbers, booleans and
arrays on one line are those of JSON, can be read on every Python without a dependency (tomllib came with
3.11), tells the line of what is wrong, and stays a file that editors and other tools know.

A value that cannot be used is left out with a warning that names file and line, and what is used in its
place: a file must never keep the monitor from starting. What the command line says comes first.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gputop.core.errors import GputopError
from gputop.core.metrics import LANE_METRICS
from gputop.text.units import printable

Value = float | str | bool | tuple[str, ...]
_LINE = re.compile(r"\s*([A-Za-z0-9_-]+)\s*=\s*(.*)", re.S)
_LARGEST_BYTES = 1 << 20  # more is not a file of settings


def _number(low: float, high: float) -> Callable[[object], Value]:
    def check(value: object) -> Value:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise ValueError(f"is not a number of seconds from {low:g} to {high:g}")
        return float(value)
    return check


def _one_of(*choices: str | bool) -> Callable[[object], Value]:
    def check(value: object) -> Value:
        if any(value is choice or (isinstance(choice, str) and value == choice) for choice in choices):
            return value  # type: ignore[return-value]
        raise ValueError("is not one of " + ", ".join(map(_written, choices)))
    return check


def _text(value: object) -> Value:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError("is not a text in quotes")
    return value


def _addresses(value: object) -> Value:
    from gputop.profiler.client import parse_address

    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError('is not an array like ["localhost:6009"]')
    for text in texts:
        try:
            parse_address(text)
        except GputopError as error:
            raise ValueError(f"holds what is no HOST:PORT: {error.message}") from None
    return tuple(texts)


@dataclass(frozen=True, slots=True)
class Setting:
    """One key: its value where nothing else is said, how to check one, and what it is for."""

    key: str
    default: Value
    check: Callable[[object], Value]
    help: str
    option: str = ""  # the command line's, where there is one


SETTINGS = {s.key: s for s in (
    Setting("interval", 1.0, _number(0.1, 3600), "seconds between samples", "--interval"),
    Setting("theme", "gputop-dark", _text, "gputop-dark, gputop-light, gputop-contrast, or one of Textual's; "
                                           "a choice in the monitor (ctrl+p) is kept here", "--theme"),
    Setting("metric", "activity", _one_of("activity", *(m for m in LANE_METRICS if m != "sm_active")),
            "what the main lane shows at first: activity, " + ", ".join(LANE_METRICS[1:4]) + ", …"),
    Setting("span", 240.0, _number(60, 12 * 3600), "seconds the lanes reach back at first"),
    Setting("logdir", "gputop-traces", _text, "where traces and snapshots go; ~ is your home", "--logdir"),
    Setting("attach", (), _addresses, "profiler servers to capture from; none: find those of the node", "--attach"),
    Setting("low_bandwidth", "auto", _one_of("auto", True, False),
            "draw every 5 s only: on a line that drains slowly (auto), always or never", "--low-bandwidth"),
    Setting("color", "auto", _one_of("auto", "truecolor", "256", "16", "none"),
            "auto: what the terminal says it has, none where NO_COLOR is set", "--color"),
    Setting("ascii", "auto", _one_of("auto", True, False),
            "without glyphs beyond ASCII; auto: where the locale is not UTF-8", "--ascii"),
)}


@dataclass(frozen=True, slots=True)
class Config:
    """What a file says, checked: ``values`` hold only what it sets and can be used; ``lines`` where it does."""

    path: Path | None
    values: dict[str, Value] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def __getitem__(self, key: str) -> Value:
        return self.values.get(key, SETTINGS[key].default)


def config_path() -> Path | None:
    """Where the settings are; None for a user without a home. A relative XDG_CONFIG_HOME is no place (XDG)."""
    folder = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    if not folder.is_absolute():
        try:
            folder = Path.home() / ".config"
        except RuntimeError:
            return None
    return folder / "gputop" / "config.toml"


def load(path: Path | None) -> Config:
    """The settings in ``path``; no file, no settings. Raises nothing."""
    if path is None:
        return Config(None)
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_BYTES + 1)
        if len(data) > _LARGEST_BYTES:
            return Config(path, warnings=(f"{path} is no file of settings: it is larger than 1 MiB; "
                                          "the defaults are used",))
        text = data.decode("utf-8-sig")
    except FileNotFoundError:
        return Config(path)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        return Config(path, warnings=(f"{path} cannot be read: {why}; the defaults are used",))
    config = Config(path)
    warnings: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        problem = _take(line, number, config)
        if problem:
            warnings.append(f"{path}:{number}: {problem}")
    return Config(path, config.values, config.lines, tuple(warnings))


def _take(line: str, number: int, config: Config) -> str:
    """One line into ``config``; returns what is wrong with it, or nothing."""
    stripped = line.strip()
    if not stripped or stripped.startswith("#"):
        return ""
    match = _LINE.fullmatch(stripped)
    if match is None:
        return f"{_shown(stripped)} is not KEY = VALUE; the line is left out"
    key, text = match.groups()
    setting = SETTINGS.get(key.replace("-", "_"))
    if setting is None:
        from difflib import get_close_matches

        near = get_close_matches(key, SETTINGS, 1)
        return f"there is no setting {_shown(key)}{f'; {near[0]} is meant?' if near else ''} The line is left out"
    used = config[setting.key]
    try:
        value = _parse(text)
        config.values[setting.key] = setting.check(value)
    except ValueError as error:
        return f"{setting.key} = {_shown(text)} {error}; {_written(used)} is used"
    twice = config.lines.get(setting.key)
    config.lines[setting.key] = number
    return f"{setting.key} was set in line {twice} already; this line counts" if twice else ""


def _parse(text: str) -> object:
    """A value as TOML writes it on one line; ValueError for what is none."""
    import json  # only where there is a file: the first frame need not wait for it

    if text.startswith("'"):
        inside, quote, rest = text[1:].partition("'")
        value: object = inside
        if not quote:
            raise ValueError("has no closing quote")
    else:
        try:
            value, end = json.JSONDecoder(parse_constant=_no_constant).raw_decode(text)
        except (ValueError, RecursionError):
            raise ValueError('is no value: texts stand in "quotes"') from None
        rest = text[end:]
    if rest.strip() and not rest.lstrip().startswith("#"):
        raise ValueError("goes on after its value")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("is no number")
    return value


def _no_constant(name: str) -> object:
    raise ValueError(name)


def _shown(text: str) -> str:
    shown = printable(text)
    return shown if len(shown) <= 60 else shown[:59] + "…"


def _written(value: Value) -> str:
    """A value as it stands in the file."""
    import json

    if isinstance(value, tuple):
        return json.dumps(list(value), ensure_ascii=False)
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value, ensure_ascii=False)


def settle(args: argparse.Namespace, config: Config) -> None:
    """Fill what the command line left open from the file, and from the defaults after that."""
    for key in ("interval", "theme", "low_bandwidth", "color", "ascii"):
        if getattr(args, key, None) is None:
            setattr(args, key, config[key])
    if args.logdir is None:
        logdir = Path(str(config["logdir"]))
        args.logdir = _home(logdir)
    # Machines of a job, by its port, are another way to say where to attach.
    if not args.attach and getattr(args, "profiler_port", None) is None:
        attach = config["attach"]
        args.attach = list(attach) if isinstance(attach, tuple) else []
    args.config = config


def _home(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:  # ~nobody
        return path


def document(config: Config) -> str:
    """All settings as a file: what is set as it is, everything else as a comment with its default."""
    out = [f"# {config.path or 'a user without a home has no file of settings'}"]
    for setting in SETTINGS.values():
        option = f" ({setting.option})" if setting.option else ""
        line = f"{setting.key} = {_written(config[setting.key])}"
        out += ["", f"# {setting.help}{option}", line if setting.key in config.values else f"# {line}"]
    return "\n".join(out) + "\n"


def remember(path: Path | None, key: str, value: str) -> str:
    """Write one setting into the file, leaving all else in it as it is; what went wrong, or nothing."""
    from gputop.export.files import write_private

    if path is None:
        return "There is no home folder to remember this in."
    path = Path(os.path.realpath(path))  # kept among other dotfiles, it is a link
    line = f"{key} = {_written(value)}"
    try:
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        at = [i for i, old in enumerate(lines) if (m := _LINE.fullmatch(old)) and m[1].replace("-", "_") == key]
        if at:
            lines[at[-1]] = line
        else:
            lines.append(line)
        write_private(path, ("\n".join(lines) + "\n").encode())
    except (OSError, UnicodeDecodeError) as error:
        return f"{path} cannot be read, so it is not written: {error}"
    except GputopError as error:
        return f"This is not remembered: {error.message}"
    return ""
