from __future__ import annotations

import pytest

from gputop.core.errors import GputopError, sentences


@pytest.mark.parametrize(("texts", "line"), [
    (("the port is missing", "Write HOST:PORT."), "the port is missing. Write HOST:PORT."),
    (("It ended.", ""), "It ended."), (("Really?", "Yes"), "Really? Yes."), (("", " "), ""),
    (("two\nlines", "and a\ttab"), "two lines. and a tab."),
])
def test_cause_and_fix_are_sentences_of_one_line(texts: tuple[str, ...], line: str) -> None:
    assert sentences(*texts) == line
    assert GputopError(*texts).in_one_line == line
