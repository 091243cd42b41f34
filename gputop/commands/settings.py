"""The user's settings: ``$XDG_CONFIG_HOME/gputop/config.toml``.

A value that cannot be used is left out with a warning that names file and line, and what is used in its place: a
file must never keep the monitor from starting. The command line overrides the file.

The file is parsed as a whole. Where that fails it is parsed line by line, so that one mistake costs one line.
The TOML parser is imported only where there is a file: the first frame does not wait for it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct, field

from gputop.core.errors import GputopError
from gputop.core.metrics import LANE_METRICS
from gputop.text.units import printable

Value = float | str | bool | tuple[str, ...]
_ASSIGNMENT = re.compile(r"\s*([A-Za-z0-9_-]+)\s*=\s*(.*)", re.S)
_MAX_BYTES = 1 << 20  # a larger file is not one of settings


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
        raise ValueError("is not one of " + ", ".join(map(_toml, choices)))
    return check


def _text(value: object) -> Value:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError("is not text in quotes")
    return value


def _text_or_none(value: object) -> Value:
    return "" if value == "" else _text(value)


def _addresses(value: object) -> Value:
    from gputop.profiler.addresses import parse_address

    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError('is not an array like ["localhost:6009"]')
    for text in texts:
        try:
            parse_address(text)
        except GputopError as error:
            raise ValueError(f"has an entry that is not HOST:PORT: {error.message}") from None
    return tuple(texts)


_NO_VALUE = object()  # stands for a value that TOML cannot parse


class Setting(Struct, frozen=True):
    """One key: its default, how a value is checked, and what it is for."""

    key: str
    default: Value
    check: Callable[[object], Value]
    help: str
    option: str = ""  # of the command line, where there is one


SETTINGS = {s.key: s for s in (
    Setting("interval", 1.0, _number(0.1, 3600), "seconds between samples", "--interval"),
    Setting("theme", "gputop-dark", _text, "gputop-dark, gputop-light, gputop-contrast, or a Textual theme; a choice "
                                           "in the monitor (ctrl+p) is saved here", "--theme"),
    Setting("metric", "activity", _one_of("activity", *(m for m in LANE_METRICS if m != "sm_active")),
            "metric shown in the lanes at startup: activity, " + ", ".join(LANE_METRICS[1:4]) + ", …"),
    Setting("span", 240.0, _number(60, 12 * 3600), "seconds of history shown in the lanes at startup"),
    Setting("logdir", "gputop-traces", _text, "folder for traces and snapshots; ~ is your home folder", "--logdir"),
    Setting("attach", (), _addresses, "profiler servers to capture from (default: any on this node)", "--attach"),
    Setting("prometheus", "", _text_or_none, "address of Prometheus for gputop cluster: http://HOST:9090, "
                                             "ssh://LOGIN/http://HOST:9090",
            "--prometheus"),
    Setting("remote_command", "gputop", _text, "the command that starts gputop on other nodes", "--remote-command"),
    Setting("prometheus_token_file", "", _text_or_none, "a file with the bearer token for this Prometheus"),
    Setting("prometheus_user", "", _text_or_none, "user name for this Prometheus, instead of a token"),
    Setting("prometheus_password_file", "", _text_or_none, "a file with this user's password"),
    Setting("prometheus_ca", "", _text_or_none, "a file with CA certificates for Prometheus (default: the system's)"),
    Setting("color", "auto", _one_of("auto", "truecolor", "256", "16", "none"),
            "auto: what the terminal reports, none if NO_COLOR is set", "--color"),
    Setting("ascii", "auto", _one_of("auto", True, False),
            "use only ASCII characters; auto: if the locale is not UTF-8", "--ascii"),
)}


PROMETHEUS_CREDENTIALS = ("prometheus_token_file", "prometheus_user", "prometheus_password_file", "prometheus_ca")


class Config(Struct, frozen=True):
    """The checked content of a file: ``values`` of the valid settings it has, ``lines`` with their line numbers."""

    path: Path | None
    values: dict[str, Value] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def __getitem__(self, key: str) -> Value:
        return self.values.get(key, SETTINGS[key].default)


def config_path() -> Path | None:
    """Path of the settings; None for a user without a home. A relative XDG_CONFIG_HOME is ignored (XDG)."""
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
    if not os.path.lexists(path):
        return Config(path)  # the common case, for which the first frame need not wait for an import
    from gputop.core.files import open_trusted

    try:
        with open_trusted(path, _MAX_BYTES) as file:
            text = file.read(_MAX_BYTES).decode("utf-8-sig")
    except FileNotFoundError:
        return Config(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        return Config(path, warnings=(f"gputop ignores {path} and uses the defaults: {reason}",))
    return _checked(path, text.splitlines(), *_parse(text))


def _parse(text: str) -> tuple[list[tuple[int, str, object]], list[tuple[int, str]]]:
    """(line, key, value) of each setting, and (line, what is wrong with it) of each line that is none."""
    lines = text.splitlines()
    with contextlib.suppress(ValueError):
        line_of = {match[1]: number for number, line in enumerate(lines, 1) if (match := _ASSIGNMENT.fullmatch(line))}
        return [(line_of.get(key, 1), key, value) for key, value in _parse_toml(text).items()], []
    settings: list[tuple[int, str, object]] = []
    problems: list[tuple[int, str]] = []
    for number, line in enumerate(lines, 1):
        try:
            settings += [(number, key, value) for key, value in _parse_toml(line).items()]
        except ValueError:
            match = _ASSIGNMENT.fullmatch(line.strip())
            if match is None:
                problems.append((number, f"{_shown(line.strip())} is not KEY = VALUE; gputop ignores the line"))
            else:
                settings.append((number, match[1], _NO_VALUE))
    return settings, problems


def _parse_toml(text: str) -> dict[str, object]:
    """Raises ValueError where the text is not TOML or has tables: no setting is a table."""
    from gputop.rules.toml_places import parse_toml  # only for a file

    settings = parse_toml(text)
    if any(isinstance(value, dict) for value in settings.values()):
        raise ValueError("a table")
    return settings


def _checked(path: Path, lines: list[str], settings: list[tuple[int, str, object]],
             problems: list[tuple[int, str]]) -> Config:
    """The settings that can be used; a warning for each of the others, and for each of the ``problems``."""
    config = Config(path)
    problems = [*problems]
    for number, key, value in settings:
        setting = SETTINGS.get(key.replace("-", "_"))
        if setting is None:
            from difflib import get_close_matches

            near = get_close_matches(key, SETTINGS, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            problems.append((number, f"there is no setting {_shown(key)}{hint}; gputop ignores the line"))
            continue
        try:
            if value is _NO_VALUE:
                raise ValueError('is not a value; put text in "quotes"')
            checked = setting.check(value)
        except ValueError as error:
            text = lines[number - 1].partition("=")[2].strip()
            problems.append((number, f"{setting.key} = {_shown(text)} {error}; using {_toml(config[setting.key])}"))
            continue
        if setting.key in config.lines:
            problems.append((number, f"{setting.key} was already set in line {config.lines[setting.key]}; gputop uses "
                                     "this later line"))
        config.values[setting.key], config.lines[setting.key] = checked, number
    return Config(path, config.values, config.lines,
                  tuple(f"{path}:{number}: {problem}" for number, problem in sorted(problems)))


def _shown(text: str) -> str:
    shown = printable(text)
    return shown if len(shown) <= 60 else shown[:59] + "…"


def _toml(value: Value) -> str:
    """A value as it stands in the file."""
    import json

    if isinstance(value, tuple):
        return json.dumps(list(value), ensure_ascii=False)
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value, ensure_ascii=False)


def apply_settings(args: argparse.Namespace, config: Config) -> None:
    """Set the options that the command line leaves open, from the file or else from the defaults."""
    for key in ("interval", "theme", "color", "ascii", "remote_command"):
        if getattr(args, key, None) is None:
            setattr(args, key, config[key])
    if args.logdir is None:
        args.logdir = Path(str(config["logdir"]))
        with contextlib.suppress(RuntimeError):  # ~nobody
            args.logdir = args.logdir.expanduser()
    # --profiler-port names the machines of a job: another way to say where to attach.
    if not args.attach and getattr(args, "profiler_port", None) is None:
        attach = config["attach"]
        args.attach = list(attach) if isinstance(attach, tuple) else []
    args.config = config


def document(config: Config) -> str:
    """All settings as a file: those that are set, and the others as comments with their defaults."""
    head = f"# {config.path or 'a user without a home folder has no settings file'}"
    return "\n".join([head, *(part for _, part in _parts(config))]) + "\n"


def _parts(config: Config) -> Iterator[tuple[str, str]]:
    """Each setting's key, and its lines in the file."""
    for setting in SETTINGS.values():
        option = f" ({setting.option})" if setting.option else ""
        line = f"{setting.key} = {_toml(config[setting.key])}"
        yield setting.key, f"\n# {setting.help}{option}\n{line if setting.key in config.values else f'# {line}'}"


def save_setting(path: Path | None, key: str, value: str) -> str:
    """Write one setting into the file, leaving the rest unchanged; returns what went wrong, or ""."""
    line = f"{key} = {_toml(value)}"

    def change(lines: list[str]) -> list[str]:
        lines_of_key = [i for i, old in enumerate(lines)
                        if (m := _ASSIGNMENT.fullmatch(old)) and m[1].replace("-", "_") == key]
        if not lines_of_key:
            return [*lines, line]
        return [*lines[:lines_of_key[-1]], line, *lines[lines_of_key[-1] + 1:]]

    return _change_file(path, change)


def save_all(config: Config) -> str:
    """Add the settings that the file does not name to it, as comments with their defaults; what stands there stays.
    Returns what went wrong, or ""."""
    def change(lines: list[str]) -> list[str]:
        named = {m[1].replace("-", "_") for old in lines if (m := _ASSIGNMENT.fullmatch(old.lstrip("# \t")))}
        added = [part for key, part in _parts(config) if key not in named]
        return [*lines, *"\n".join(added).lstrip("\n" if not lines else "").split("\n")] if added else lines

    return _change_file(config.path, change)


def _change_file(path: Path | None, change: Callable[[list[str]], list[str]]) -> str:
    """Write the lines of the file anew; returns what went wrong, or ""."""
    from gputop.core.files import read_regular, untrusted_ancestor, writable_folder

    if path is None:
        return "The setting was not saved: there is no home folder."
    exchangeable = untrusted_ancestor(path)
    if exchangeable is not None:  # root in the home of another user, whose link could lead anywhere
        return f"The setting was not saved: {exchangeable[0]} {exchangeable[1]}."
    path = Path(os.path.realpath(path))  # kept among other dotfiles, it is a link
    try:
        lines = change(read_regular(path, _MAX_BYTES).decode("utf-8").splitlines() if path.exists() else [])
    except (OSError, UnicodeDecodeError) as error:
        return f"The setting was not saved because {path} cannot be read: {error}"
    try:
        with writable_folder(path.parent, "XDG_CONFIG_HOME") as folder, folder.replacing(path.name) as file:
            file.write(("\n".join(lines) + "\n").encode())
    except (OSError, GputopError) as error:
        return f"The setting was not saved: {getattr(error, 'message', None) or error}"
    return ""
