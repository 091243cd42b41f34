from __future__ import annotations

import pytest

from gputop.tui.terminal.terminal_app import bell


def test_the_terminal_gets_a_text_and_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TMUX", raising=False)
    assert bell("node-1: idle") == "\x1b]9;node-1: idle\x07\x07"


def test_tmux_is_asked_to_hand_it_on_and_rings_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMUX", "/tmp/tmux-0/default,1,0")
    assert bell("idle") == "\x1bPtmux;\x1b\x1b]9;idle\x07\x1b\\\x07"


@pytest.mark.parametrize("tmux", ["", "/tmp/t,1,0"])
def test_a_text_cannot_end_the_sequence(monkeypatch: pytest.MonkeyPatch, tmux: str) -> None:
    monkeypatch.setenv("TMUX", tmux)
    shown = bell("a\x1b\\b\x07c\x1b]52;c;AAAA\x07" + "x" * 500)
    assert shown.count("\x07") == 2 and "\x1b]52" not in shown and len(shown) < 250
