"""What options take, and what is said of what they do not."""

from __future__ import annotations

import pytest

from gputop.commands.arguments import parse


@pytest.mark.parametrize(("words", "message"), [
    (["replay", "f", "--start", "x"], "'x' is not a number of seconds"),
    (["replay", "f", "--start", "-1"], "-1 is not a number of seconds from 0 on"),
    (["replay", "f", "--speed", "x"], "'x' is not between 0.01 and 1000, or max"),
    (["replay", "f", "--speed", "0"], "'0' is not between 0.01 and 1000, or max"),
    (["--on-dip", "--dip-every", "0"], "'0' is not a number of minutes above 0"),
    (["--on-dip", "--dip-every", "x"], "'x' is not a number of minutes above 0"),
    (["--interval", "nan"], "nan is not between 0.1 and 3600 seconds"),
    (["analyze", "t", "--params", "0"], "'0' is not a number of parameters"),
    (["analyze", "t", "--params", "-7"], "'-7' is not a number of parameters"),
    (["analyze", "t", "--params", "7e9"], "'7e9' is not a number of parameters, in digits"),
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
