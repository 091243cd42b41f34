from __future__ import annotations

import pytest

from gputop.tui.terminal.terminal_app import bell


@pytest.mark.parametrize(("tmux", "sent"), [
    ("", "\x1b]9;node-1: idle\x07\x07"),
    ("/tmp/tmux-0/default,1,0", "\x1bPtmux;\x1b\x1b]9;node-1: idle\x07\x1b\\\x07")])
def test_the_terminal_rings_and_gets_a_text_which_cannot_end_the_sequence(
        monkeypatch: pytest.MonkeyPatch, tmux: str, sent: str) -> None:
    monkeypatch.setenv("TMUX", tmux)
    assert bell("node-1: idle") == sent
    shown = bell("a\x1b\\b\x07c\x1b]52;c;AAAA\x07" + "x" * 500)
    assert shown.count("\x07") == 2 and "\x1b]52" not in shown and len(shown) < 250


def test_tmux_is_asked_to_hand_it_on_and_rings_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMUX", "/tmp/tmux-0/default,1,0")
    assert bell("idle") == "\x1bPtmux;\x1b\x1b]9;idle\x07\x1b\\\x07"
