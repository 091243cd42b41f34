"""The thread that hears the keys, over a pipe."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from textual.events import Key

from gputop.tui.terminal.cell_grid import CellGrid
from gputop.tui.terminal.driver import StallProofDriver, WakingEvent
from tests.waiting import PATIENCE_S


class Keyboard(StallProofDriver):
    """Its input thread alone, and what is typed."""

    def __init__(self) -> None:
        self.fileno, self.types = os.pipe()
        self._debug = False
        self.exit_event = self._input_exit = WakingEvent()
        self.heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.process_message = self.heard.put  # type: ignore[method-assign]
        self.thread = threading.Thread(target=self.run_input_thread, daemon=True)
        self.thread.start()

    def key(self) -> str:
        message = self.heard.get(timeout=PATIENCE_S)
        assert isinstance(message, Key)
        return message.key

    def ended(self) -> bool:
        self.exit_event.set()
        self.thread.join(PATIENCE_S)
        return not self.thread.is_alive()


@pytest.fixture
def keyboard() -> Iterator[Keyboard]:
    there = Keyboard()
    yield there
    assert there.ended()
    there._input_exit.close()
    os.close(there.fileno)


def test_keys_sequences_and_characters_that_come_in_pieces(keyboard: Keyboard, monkeypatch: pytest.MonkeyPatch) -> None:
    read = os.read
    monkeypatch.setattr(os, "read", lambda fd, size: read(fd, 1))
    for typed, key in ((b"a", "a"), ("é".encode(), "é"), (b"\x1b[A", "up"), (b"b", "b")):
        os.write(keyboard.types, typed)
        message = keyboard.heard.get(timeout=PATIENCE_S)
        assert key in (message.key, message.character)
    os.close(keyboard.types)


def test_escape_alone_is_a_key_though_nothing_follows(keyboard: Keyboard) -> None:
    for _ in range(2):
        os.write(keyboard.types, b"\x1b")
        assert keyboard.key() == "escape"
    os.close(keyboard.types)


def test_the_end_needs_no_key_and_comes_without_a_terminal_too() -> None:
    for gone in (False, True):
        there = Keyboard()
        if gone:
            os.close(there.types)
        assert there.ended()


def test_the_event_can_be_set_twice_and_again_after_it_was_cleared() -> None:
    event = WakingEvent()
    for _ in range(2):
        event.set()
        event.set()
        event.clear()
        event.clear()
    event.set()
    assert event.is_set() and os.read(event.wakes, 10) == b"!"
    event.close()


class Drawing(StallProofDriver):
    """Its grid alone; nothing is sent."""

    def __init__(self, width: int, height: int) -> None:
        self._out = -1
        self.cells = CellGrid(width, height)
        self._lock = threading.RLock()
        self._scheduled = True


def test_a_size_heard_in_the_middle_of_an_update_waits_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Drawing(20, 9)

    class Interrupted(set[int]):
        def add(self, row: int) -> None:  # where SIGWINCH came: after the row was found to be on the screen
            monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((10, 3)))
            assert there.terminal_size() == (10, 3)
            super().add(row)

    there.cells._dirty = Interrupted()
    there.write("\x1b[8;1Hlast rows")
    assert (there.cells.width, there.cells.height) == (20, 9)
    there.write("\x1b[3;1Hnow last")
    assert (there.cells.width, there.cells.height) == (10, 3)
    assert "now last" in there.cells.update()


class Written:
    """A writer that is never busy, and what it got."""

    busy = False

    def __init__(self) -> None:
        self.data = b""

    def send(self, data: bytes) -> None:
        self.data += data


def test_a_stop_in_the_middle_of_an_update_draws_the_whole_screen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    there, before, after = Drawing(20, 3), Written(), Written()
    later: list[Callable[[], None]] = []
    monkeypatch.setattr(there, "_in_loop", later.append)
    there._leaving = there._keeps_first_frame = False
    there._answered, there._asked_s, there._answers = threading.Event(), time.monotonic(), False
    there._answered.set()
    update, there._writer = there.cells.update, before  # type: ignore[assignment]

    def interrupted() -> str:  # SIGTSTP and SIGCONT come within it
        monkeypatch.setattr(there.cells, "update", update)
        there._writer = after  # type: ignore[assignment]
        there.cells.forget()
        return update()

    monkeypatch.setattr(there.cells, "update", interrupted)
    there.write("\x1b[1;1Hfirst\x1b[3;1Hlast")
    there._send()
    assert not before.data and not after.data and len(later) == 1
    later[0]()
    assert b"first" in after.data and b"last" in after.data
