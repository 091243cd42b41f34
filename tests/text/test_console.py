"""Nothing that others wrote drives the terminal, and one place alone writes to it."""

from __future__ import annotations

import ast
import contextlib
import fcntl
import io
import json
import os
import pty
import struct
import sys
import termios
from pathlib import Path

import pytest

from gputop.cli import main
from gputop.core.errors import GputopError
from gputop.text import console
from tests.source_trees import Source, sources

# A title, the clipboard, colors, 8-bit controls, directions of text, lines that are none, nothing at all, half a
# surrogate pair, a bell, a rewritten line.
ATTACKS = ("\x1b]0;root@prod\x07", "\x1b]52;c;cm0gLXJmIH4=\x1b\\", "\x1b[31m", "\x9b2J", "\x9d0;t\x9c", "\u202e",
           "\u2066", "\u2069", "\u200b", "\u200d", "\u2028", "\u2029", "\x85", "\ufeff", "\U000e0041",
           "\udc9b", "\ud800", "\a", "\b\b\b", "\r", "\x7f", "\x00")

# What may use the standard streams itself, and why.
WRITERS = {
    "text/console.py": "the one place",
    "tui/terminal/first_frame.py": "the terminal's driver: what it draws has been made of printable text",
    "commands/agent.py": "the answers to gputop on another node",
    "commands/capture_ranks.py": "another node's gputop reads its standard output through ssh, JSON in ASCII",
    "diagnosis/worker.py": "a child process: its standard output is a pipe that gputop reads, JSON in ASCII",
    "doctor/driver_facts.py": "a child process: its standard output is a pipe that gputop reads, JSON in ASCII",
    "launch/inside/gputop_serve.py": "inside the user's job, which has no gputop to import; made printable there",
}
# What tells about a stream or empties it, and writes nothing.
ASKS = {"isatty", "fileno", "flush", "encoding", "reconfigure"}


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_message_drives_the_terminal(attack: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"before{attack}after"
    console.say(text)
    console.print_error(GputopError(text, text))
    console.note(text)
    console.write_text(text)
    console.write_colored(text)
    console.write_document(text)
    console.write_json({text: text})
    out, err = capsys.readouterr()
    for line in (out + err).split("\n"):
        assert line.isprintable() or line.replace("\x1b[31m", "").isprintable(), line
        assert "before" not in line or "after" in line, "one message is one line"
    assert attack not in err
    assert json.loads(out[out.index("{"):]) == {text: text}, "the document says what it said"


def test_a_flood_of_error_text_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    flood = "\x1b[2Jserver says no. " * 3_000_000
    error = GputopError(flood, flood.replace(" ", "\n"))
    console.print_error(error)
    console.say(flood)
    console.note(flood)
    console.write_text(flood)
    out, err = capsys.readouterr()
    assert len(err) < 4 * console.MESSAGE_CHARS + 8 * console.FIX_LINES
    assert len(err.splitlines()) < console.FIX_LINES + 5
    assert len(out) <= console.LINE_CHARS + 1
    assert "characters)" in err and len(str(error)) < 10_000


def test_what_is_printable_and_colors_of_gputops_own_stay(capsys: pytest.CaptureFixture[str]) -> None:
    text = "  two  spaces: 71.2 °C, ⣿ µs, 漢字\n    indented\n"
    console.write_text(text, end="")
    console.write_document(text)
    assert capsys.readouterr().out == text + text
    console.print_error(GputopError("cause", "one\n  two"))
    assert capsys.readouterr().err == "gputop: cause\n  one\n  two\n"
    console.write_colored("\x1b[32mok\x1b[0m \x1b[5mblink\x1b]0;t\a\n")  # colors of gputops own pass
    assert capsys.readouterr().out == "\x1b[32mok\x1b[0m \ufffd[5mblink\ufffd]0;t\ufffd\n"


def _all_of(terminal: int) -> str:
    """What was written to a terminal whose other side is closed."""
    read = b""
    with contextlib.suppress(OSError):  # EIO at its end
        while part := os.read(terminal, 4096):
            read += part
    os.close(terminal)
    return read.decode()


def test_messages_on_a_terminal_are_wrapped_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "the job at 10.0.0.7:6009 ended, or the connection to it broke, before its trace arrived"
    command = f"  {message}\n  gputop attach {'x' * 60}"
    told = {}
    for columns in (40, 0):  # a terminal whose size is not known is no reason to fail
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        with os.fdopen(theirs, "w", encoding="utf-8") as terminal:
            monkeypatch.setattr(sys, "stderr", terminal)
            console.print_error(GputopError(message, f"Capture fewer seconds. {message}."))
            console.note(command)
        told[columns] = _all_of(ours).replace("\r\n", "\n")
    prose, rest = told[40].split(command)
    assert rest == "\n", "lines of several, as commands to paste are, stay whole"
    lines = prose.splitlines()
    assert len(lines) > 5 and max(map(len, lines)) <= 40
    assert [line for line in lines if not line.startswith("  ")] == lines[:1]
    assert " ".join(prose.split()) == f"gputop: {message} Capture fewer seconds. {message}."
    assert len(told[0].splitlines()) == 4


def test_a_stream_that_is_closed_or_poor_takes_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    poor = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stderr", poor)
    console.say("71 °C")
    poor.flush()
    assert poor.buffer.getvalue() == b"gputop: 71 ?C\n"  # type: ignore[attr-defined]
    monkeypatch.setattr(sys, "stderr", None)
    console.say("nobody hears it")


@pytest.mark.parametrize("arguments", [
    ["analyze", "{}"], ["compare", "{}", "{}"], ["analyze", "--params", "{}", "x"], ["{}"], ["--interval", "{}"],
    ["replay", "{}"], ["snapshot", "--demo", "{}"], ["xprof", "{}"], ["run", "--", "{}"],
    ["--theme", "x", "record", "{}"],
    ["capture", "--on-dip", "{}"], ["--gpus", "{}", "--demo", "healthy", "snapshot"], ["--attach", "{}", "capture"]])
def test_what_was_typed_comes_back_printable(arguments: list[str], capsys: pytest.CaptureFixture[str],
                                             monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    name = "a\x1b]0;title\x07\u202eb\x9bc"
    try:
        status = main([word.replace("{}", name) for word in arguments])
    except SystemExit as ending:
        status = int(ending.code or 0)
    out, err = capsys.readouterr()
    assert status in (1, 2, 3, 126, 127) and err
    assert all(line.isprintable() for line in (out + err).split("\n")), err


@pytest.mark.parametrize("content", [b"\x1b]52;c;eA==\x07", b'{"\x1b]0;t\x07": ', b'{"schema": "\\u001b[31m\\u202e"}',
                                     b"\x0a\x10\x1b]0;title\x07aaaaaa"])
def test_files_that_hold_escape_codes_are_told_without(content: bytes, capsys: pytest.CaptureFixture[str],
                                                       tmp_path: Path) -> None:
    for ending in (".xplane.pb", ".json", ".sqlite", ".bin"):
        path = tmp_path / f"t\x1b[5m{ending}"
        path.write_bytes(content)
        for command in (["analyze", str(path)], ["compare", str(path), str(path)], ["replay", str(path)]):
            assert main(command) in (1, 2, 3)
            out, err = capsys.readouterr()
            assert err and all(line.isprintable() for line in (out + err).split("\n")), err


def test_nothing_else_prints() -> None:
    lines = {source.name: _writes(source) for source in sources()}
    found = [f"{name}:{line}" for name in lines.keys() - WRITERS.keys() for line in lines[name]]
    assert not found, f"these write to the terminal themselves; gputop.text.console is the way: {found}"
    for name in WRITERS:
        assert lines[name], f"{name} prints no more: take it off the list"


def _writes(source: Source) -> list[int]:
    """The lines that print, or hand out a standard stream for something to be written to it."""
    parents = {child: node for node in source.nodes for child in ast.iter_child_nodes(node)} \
        if "sys." in source.text else {}
    found = []
    for node in source.nodes:
        if isinstance(node, ast.Name) and node.id == "print":
            found.append(node.lineno)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            if name.startswith(("traceback.print_", "warnings.warn")) or node.attr in ("print_help", "print_usage"):
                found.append(node.lineno)
            if name in ("sys.stdout", "sys.stderr", "sys.__stdout__", "sys.__stderr__") and not _asks(node, parents):
                found.append(node.lineno)
    return found


def _asks(stream: ast.Attribute, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether the stream is only asked something there: ``sys.stdout.isatty()``, ``sys.stdout is None``."""
    parent = parents[stream]
    if isinstance(parent, ast.Attribute):
        return parent.attr in ASKS
    return isinstance(parent, (ast.Compare, ast.Tuple))
