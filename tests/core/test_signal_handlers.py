"""Handlers of signals for the time of a block."""

from __future__ import annotations

import signal

import pytest

from gputop.core.signal_handlers import signals_held, unwinding


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_unwinds_the_block_with_its_status(number):
    before, ended = signal.getsignal(number), []
    with pytest.raises(SystemExit) as caught, unwinding():
        try:
            signal.raise_signal(number)
        finally:
            ended.append(number)
    assert caught.value.code == 128 + number and ended == [number]
    assert signal.getsignal(number) == before


def test_a_held_signal_that_is_to_end_the_program_is_seen():
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with signals_held() as end_asked:
            assert not end_asked()
            signal.raise_signal(signal.SIGCHLD)
            assert not end_asked()
            signal.raise_signal(signal.SIGTERM)
            assert end_asked()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_held_signal_that_is_ignored_ends_nothing():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_held() as end_asked:
            signal.raise_signal(signal.SIGHUP)
            assert not end_asked()
    finally:
        signal.signal(signal.SIGHUP, before)
