"""The line of keys does not work at each sample."""

from __future__ import annotations

import pytest

from gputop.tui.widgets.cached_lines import KeyLine


def test_the_same_keys_are_laid_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    line, shown = KeyLine(), []
    monkeypatch.setattr(line, "show", shown.append)
    for width in (80, 80, 12, 12):
        line.show_keys([("c", "capture"), ("q", "quit"), ("h", "help")], width)
    texts = ["".join(text for text, _ in lines[0]) for lines in shown]
    assert texts == [" c capture  q quit  h help  ", " q quit  h help  "]
