"""What options take, and what is said of what they do not."""

from __future__ import annotations

import re
import shlex

import pytest

from gputop.commands.arguments import COMMANDS, parse
from gputop.core.version import __version__


@pytest.mark.parametrize(("words", "message"), [
    (["replay", "f", "--start", "x"], "'x' is not a number of seconds"),
    (["replay", "f", "--start", "-1"], "-1 is not a non-negative number of seconds"),
    (["replay", "f", "--speed", "x"], "'x' is neither between 0.01 and 1000 nor max"),
    (["replay", "f", "--speed", "0"], "'0' is neither between 0.01 and 1000 nor max"),
    (["--on-dip", "--dip-every", "0"], "'0' is not a number of minutes above 0"),
    (["--on-dip", "--dip-every", "x"], "'x' is not a number of minutes above 0"),
    (["--on-dip", "--dip-max", "0"], "0 is not a number from 1 to 1000"),
    (["--interval", "nan"], "nan is not between 0.1 and 3600 seconds"),
    (["analyze", "t", "--params", "0"], "'0' is not a number of parameters"),
    (["analyze", "t", "--params", "-7"], "'-7' is not a number of parameters"),
    (["analyze", "t", "--params", "7e9"], "'7e9' is not a number of parameters written in digits"),
])
def test_what_an_option_cannot_take_is_said_in_words(words, message, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(words)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert message in err and "invalid" not in err


def test_numbers_in_their_units():
    assert parse(["analyze", "t", "--params", "7000000000"]).params == 7_000_000_000
    assert parse(["--on-dip", "--dip-every", "2.5"]).dip_every == 2.5
    assert parse(["replay", "f", "--speed", "max"]).speed == float("inf")


@pytest.mark.parametrize(("words", "message"), [
    (["snapsht"], "there is no command 'snapsht'. Did you mean snapshot?"),
    (["demo"], "Did you mean gputop --demo?"),
    (["serve"], "ttyd -W -i lo gputop"), (["--demo", "healthy", "serve", "--listen", "8792"], "ttyd -W -i lo gputop"),
    (["--on-dip", "--dip-before", "5"], "--on-dip captures right after a dip"),
    (["--no-low-bandwidth"], "skips frames on a slow connection"),
    (["capture", "--dip-before=5"], "--on-dip captures right after a dip"),
    (["-i", "0"], "gputop --gpus 0"), (["-l", "1"], "gputop --interval 2"), (["-l1"], "gputop --interval 2"),
    (["--demo", "hang", "-d", "2"], "gputop --interval 2"), (["--once"], "gputop snapshot"),
    (["snapshot", "--once"], "To print one snapshot"), (["version"], "gputop --version"), (["profile"], "gputop "
                                                                                                        "capture"),
    (["xyzzy"], "there is no command 'xyzzy'. For a list: gputop --help"),
    (["--intervall", "2"], "gputop has no option --intervall. Did you mean --interval?"),
    (["capture", "--secnds=3"], "gputop capture has no option --secnds. Did you mean --seconds? For a list: gputop "
                                "capture --help"),
    (["doctor", "c"], "gputop doctor does not accept c."),
    (["localhost:6009"], "Did you mean gputop --attach localhost:6009?"),
    (["snapshot", "node1:6009"], "gputop snapshot does not accept node1:6009. Did you mean --attach node1:6009?"),
    (["capture", "node1:6009", "trace"], "gputop capture does not accept node1:6009."),
    (["capture", "node1:6009", "-y"], "gputop capture has no option -y. Did you mean --yes?"),
    (["export", "9810"], "Did you mean --listen 9810?"),
    (["snapshot", "node.html"], "Did you mean --output node.html?"),
    (["cluster", "http://p:9090"], "Did you mean --prometheus http://p:9090?"), (["cluster", "7"], "--job 7?"),
    (["attach", "localhost:6009"], "for a server at an address: gputop --attach localhost:6009"),
    (["attach", "train.py"], "to find it: pgrep -f train.py"), (["completion", "bsh"], "Did you mean bash?"),
])
def test_a_mistyped_word_is_answered_with_the_one_that_was_meant(words, message, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(words)
    assert caught.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("words", [["a:1", "b:2", "--seconds", "3"], ["--seconds", "3", "a:1", "b:2"],
                                   ["--attach", "a:1", "--seconds", "3", "b:2"]])
def test_capture_takes_addresses_without_the_option(words):
    args = parse(["capture", *words])
    assert (args.attach, args.seconds) == (["a:1", "b:2"], 3.0)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_has_a_sentence_and_an_example_that_can_be_parsed(name, capsys):
    shown = []
    for words in (["help", name], [name, "--help"]):
        with pytest.raises(SystemExit) as caught:
            parse(words)
        assert caught.value.code == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert " ".join(COMMANDS[name].description.split()) in " ".join(shown[0].split())
    example = re.search(rf"gputop {name}\b[^>|#\")]*", COMMANDS[name].example)
    assert example is not None and COMMANDS[name].example in shown[0]
    assert parse(shlex.split(example[0])[1:]).command == name


def test_help_alone_and_the_version(capsys):
    for words, first in ((["help"], "usage: gputop [options]"), (["--version"], f"gputop {__version__}\n")):
        with pytest.raises(SystemExit) as caught:
            parse(words)
        assert caught.value.code == 0
        out = capsys.readouterr().out
        assert out.startswith(first)
    assert "\nPython 3." in out and "textual " in out and "NVIDIA driver " in out
