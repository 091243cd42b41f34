"""Shell completion and the man page: they have the words that the command line has."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gputop.cli import main
from gputop.commands import completion
from gputop.commands.arguments import COMMANDS, parser
from gputop.commands.completion import FILES
from gputop.commands.schema import SCHEMAS
from gputop.simulation.scenarios import SCENARIOS
from tools import make_completion


@pytest.fixture(scope="module", autouse=True)
def completion_of_today(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Completion of the command line as it is, not as it was when this checkout was installed."""
    folder = tmp_path_factory.mktemp("completion")
    make_completion.make(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(completion, "folder", lambda: folder)
        yield


def printed(what: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", what]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("what", FILES)
def test_they_are_those_of_today(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = re.sub(r"\\f[A-Z]", " ", printed(what, capsys).replace("\\-", "-"))
    root = parser()
    parsers = {"": root, **root._commands.choices}  # type: ignore[attr-defined]
    own = {option[2:] for each in parsers.values() for option, action in each._option_string_actions.items()
           if option.startswith("--") and action.help != argparse.SUPPRESS}
    assert not [name for name in COMMANDS if not re.search(rf"\b{name}\b", text)]
    bare = text.replace("--", "")
    assert not [option for option in own - {"help"} if not re.search(rf"(?<![\w-]){option}(?![\w-])", bare)]
    assert set(re.findall(r"(?<![\w-])--([a-z][\w-]*)", text)) <= own


def test_a_checkout_that_nobody_installed_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                          capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(completion, "folder", lambda: tmp_path)
    assert main(["completion", "bash"]) == 1
    assert "pip install ." in capsys.readouterr().err


@pytest.mark.parametrize("what", ["bash", "zsh", "fish"])
def test_scenarios_and_schemas_are_completed(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(what, capsys)
    assert not [word for word in (*SCENARIOS, *SCHEMAS) if not re.search(rf"(?<![\w-]){word}(?![\w-])", text)]


def test_the_man_page_has_the_sections_of_one_and_each_option_once(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed("man", capsys)
    assert ".SH NAME\ngputop \\- " in text and "Generated" not in text and ".xplane.pb, run folder" in text
    assert not [line for line in text.splitlines() if re.match(r"\.(?![A-Za-z]{1,2}( |$))|'", line)]
    sections = dict(re.findall(r"(?ms)^\.SH ([A-Z ]+)\n(.*?)(?=^\.SH |\Z)", text))
    assert re.findall(r"^\\fB(\d)", sections["EXIT STATUS"], re.M) == list("01234")
    assert "GPUTOP_WEBHOOK_URL" in sections["ENVIRONMENT"] and "config.toml" in sections["FILES"]
    assert "nvidia" in sections["SEE ALSO"] and "exit status" not in sections["EXAMPLES"]
    assert text.count("\n\\fB\\-\\-dcgm\\-watch") == 1 and "under \\fBWHAT TO WATCH" in text


@pytest.mark.parametrize("command", ["record", "export", "snapshot"])
def test_an_option_is_shown_only_where_it_does_something(command: str) -> None:
    """Without a capture nobody samples stacks; command lines of older versions stay valid."""
    own = parser()._commands.choices[command]  # type: ignore[attr-defined]
    assert "--stacks" not in own.format_help() and "--gpus" in own.format_help()
    words = [command, "--no-stacks", *(["-o", "x"] if command == "record" else [])]
    assert parser().parse_args(words).stacks is False
    assert "--stacks" in parser()._commands.choices["capture"].format_help()  # type: ignore[attr-defined]


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(("words", "found"), [
    (["gputop", "sn"], ["snapshot"]), (["gputop", "capture", "--sec"], ["--seconds"]),
    (["gputop", "--ver"], ["--version"]), (["gputop", "completion", "f"], ["fish"]),
    (["gputop", "--demo", "inp"], ["input-bound"]), (["gputop", "schema", "analyze-"], ["analyze-all"])])
def test_bash_completes(words: list[str], found: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    script = printed("bash", capsys) + f"""
COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}
$(complete -p gputop | sed 's/.*-F \\([^ ]*\\) .*/\\1/') gputop {words[-1]} {words[-2]}
echo "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == found, done.stderr
