"""Stacks over time by the real py-spy, and what is made of a record that is none."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputop.core.errors import GputopError
from gputop.core.host_stacks import StackSamples
from gputop.ranks import stacks
from gputop.ranks.stack_sampler import Clock, StackSampler, read_record
from gputop.ranks.stacks import find_py_spy
from tests.processes import asleep

needs_py_spy = pytest.mark.skipif(find_py_spy() is None, reason="py-spy is not installed")
# It takes turns of 80 ms, and says when each began; on a line the loop that asks for the end.
PROGRAM = """import sys, threading, time
def busy(until):
    while time.time() < until: sum(range(100))
def naps(until):
    time.sleep(max(0.0, until - time.time()))
threading.Thread(target=sys.stdin.read, name="load\\x1b[2J", daemon=True).start()
print("ready", flush=True)
while True:
    for turn in (busy, naps):
        print(turn.__name__, time.time(), flush=True)
        turn(time.time() + 0.08)
"""
NOW = 1_700_000_000 * 10 ** 9
CLOCK = Clock(NOW, NOW + 2 * 10 ** 9, NOW + 2 * 10 ** 9, NOW + 2009 * 10 ** 6)


@needs_py_spy
def test_the_stacks_of_a_real_process_have_the_time_at_which_they_ran(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    with subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as job:
        assert job.stdout is not None and job.stdout.readline() == "ready\n"
        sampler = StackSampler(job.pid)
        assert sampler.wait_for_samples(30.0)
        begins = [job.stdout.readline().split() for _ in range(16)]
        sampler.stop()
        samples = sampler.samples()
        job.kill()
    assert not sampler._folder.exists()
    (main,) = [thread for thread in samples.threads if thread.main]
    assert "load" in " ".join(thread.name for thread in samples.threads)
    assert not any("\x1b" in thread.name for thread in samples.threads)
    seen: dict[str, list[float]] = {}
    for time_us, stack in zip(main.times_us, main.stacks, strict=True):
        frames = [samples.frames[at] for at in samples.stacks[stack]] if stack >= 0 else []
        for frame in frames:
            if frame.function in ("busy", "naps"):
                assert frame.file == str(script)
                seen.setdefault(frame.function, []).append(samples.start_s + time_us / 1e6)
    assert seen.keys() == {"busy", "naps"}
    # No stack was seen before it ran, as far as the clock is known. How late it is seen is up to the node's load.
    turns = [(name, float(at)) for name, at in begins]
    for (_, before), (name, began), (_, ended) in zip(turns, turns[1:], turns[2:], strict=False):
        # One of the turn before comes late where py-spy has to wait for a CPU.
        early = [t for t in seen[name] if before + max(0.04, 2 * samples.error_s) < t < began - 2 * samples.error_s]
        assert not early, (name, began, ended, samples.error_s)
    assert 0 < samples.error_s < 0.5 and 0 < samples.cpu_s < 30 and samples.rate_hz <= 100


@needs_py_spy
def test_a_process_that_is_no_python_is_said_to_be_none() -> None:
    with asleep() as other:
        sampler = StackSampler(other.pid)
        sampler.wait_for_samples(30.0)
        with pytest.raises(GputopError, match="could not sample"):
            sampler.samples()
    assert not sampler._folder.exists()


@needs_py_spy
def test_one_that_is_not_wanted_any_more_leaves_nothing() -> None:
    sampler = StackSampler(os.getpid(), seconds=67.0)
    sampler.discard()
    assert "--duration 67 " in " ".join(map(str, sampler._process.args))
    assert not sampler._folder.exists() and sampler._process.returncode is not None


def test_without_py_spy_or_process_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "find_py_spy", lambda: None)
    with pytest.raises(GputopError, match="not installed"):
        StackSampler(os.getpid())
    monkeypatch.setattr(stacks, "find_py_spy", lambda: "/bin/false")
    with pytest.raises(GputopError, match="no process"):
        StackSampler(1 << 30)


@needs_py_spy
def test_what_ends_without_a_record_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for text, said in (("#!/bin/sh\necho Permission Denied >&2; exit 1\n", "Permission Denied"),
                       ("#!/bin/sh\nexit 0\n", "cannot read py-spy's output")):
        program = tmp_path / f"py-spy{len(text)}"
        program.write_text(text)
        program.chmod(0o755)
        monkeypatch.setattr(stacks, "find_py_spy", lambda program=program: str(program))
        sampler = StackSampler(os.getpid())
        sampler.wait_for_samples(30.0)
        with pytest.raises(GputopError, match=said):
            sampler.samples()


def event(ph: str, name: str, ts: int, tid: int = 1, file: str = "/a/b.py", line: int = 3) -> dict[str, object]:
    return {"ph": ph, "name": name, "ts": ts, "tid": tid, "args": {"filename": file, "line": line}, "pid": 7, "cat": ""}


def record(*events: dict[str, object], counts: tuple[int, int] | None = (40, 10)) -> StackSamples:
    return read_record(json.dumps(events).encode(), 7, CLOCK, 100.0, counts, 0.05)


def test_changes_of_a_stack_become_stacks_with_times() -> None:
    title = event("B", "thread (7): Main\x1bThread", 1000, file="", line=0)
    samples = record(
        title, event("B", "fit", 1000), event("B", "call", 1000, line=9),
        event("E", "call", 21_000, line=9), event("B", "log", 21_000, line=12),
        event("E", "log", 401_000, line=12), event("E", "fit", 401_000), event("E", "thread (7): …", 401_000))
    (thread,) = samples.threads
    assert thread.main and "\x1b" not in thread.name and thread.times_us == (0, 20_000)
    named = [[samples.frames[at].function for at in samples.stacks[stack]] for stack in thread.stacks]
    assert named == [["fit", "call"], ["fit", "log"]]
    assert samples.length_s == pytest.approx(0.4)
    assert samples.missed == pytest.approx(0.2) and samples.rate_hz == 100.0
    # The recorder wrote its last events, of 0.401 s after its start, between 2.000 s and 2.009 s of this clock.
    assert samples.start_s - 0.001 - NOW / 1e9 == pytest.approx(2.0045 - 0.401, abs=1e-4)
    assert samples.error_s == pytest.approx(0.0045, abs=1e-4)


@pytest.mark.parametrize("line", [-5, 1 << 31, 1 << 62])
def test_a_frame_that_changed_while_it_was_read_has_no_line(line: int) -> None:
    samples = record(event("B", "f", 0, line=line), event("E", "f", 9000, line=line))
    assert [frame.line for frame in samples.frames] == [0]


def test_the_clock_holds_the_truth_between_its_bounds() -> None:
    assert CLOCK.origin(10 ** 9) == (NOW + 10 ** 9 + 4_500_000, 4_500_000)
    # The thread that samples began 2 ms after the recorder could have been made.
    assert Clock(NOW, NOW + 1002 * 10 ** 6, CLOCK.made, CLOCK.ended).origin(10 ** 9) == (NOW + 1001 * 10 ** 6, 10 ** 6)
    # A file server an hour ahead; a thread that began before the recorder was made.
    for other in (Clock(NOW, NOW + 10 ** 9, NOW + 3600 * 10 ** 9, NOW + 3 * 10 ** 9),
                  Clock(NOW, NOW + 10 ** 8, NOW + 25 * 10 ** 8, NOW + 3 * 10 ** 9)):
        assert other.origin(2 * 10 ** 9) == (NOW + 5 * 10 ** 8, 5 * 10 ** 8)
    with pytest.raises(GputopError, match="clock"):
        CLOCK.origin(10 * 10 ** 9)


@given(start=st.integers(0, 10 ** 9), before=st.integers(0, 10 ** 8), length=st.integers(1, 10 ** 11),
       delays=st.lists(st.integers(0, 10 ** 8), min_size=3, max_size=3), stale=st.integers(0, 8 * 10 ** 6),
       tick=st.integers(0, 10 ** 7))
def test_whatever_is_late_the_true_origin_is_in_bounds(
        start: int, before: int, length: int, delays: list[int], stale: int, tick: int) -> None:
    truth = start + before
    made, last, ended = itertools.accumulate((truth + length, *delays[1:]))
    origin, error = Clock(start, truth + delays[0] + tick, made - stale, ended).origin(last - truth)
    assert abs(origin - truth) <= error + 1


@needs_py_spy
def test_a_file_that_takes_long_to_write_leaves_the_clock_as_it_is(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time\ndef f(n):\n    return f(n - 1) if n else time.sleep(0.001)\nwhile True: f(250)\n")
    with subprocess.Popen([sys.executable, str(script)]) as job:
        sampler = StackSampler(job.pid, rate_hz=500)
        assert sampler.wait_for_samples(30.0)
        time.sleep(3.0)
        sampler.stop()
        started, sampling = sampler._started, sampler._sampling
        samples = sampler.samples()
        job.kill()
    assert started < sampling < started + 10 ** 9
    assert samples.error_s <= (sampling - started) / 2e9 + 1e-6


@pytest.mark.parametrize("data", [b"", b"{}", b"[", b"[]", b"[1]", b'[{"ph": "B"}]', b"[" * 10 ** 5,
                                  b'[{"name": "a", "ph": "B", "ts": -1}]', b'[{"name": "a", "ph": "B", "ts": 1e99}]',
                                  b'[{"name": "a", "ph": "B", "args": {"line": "4"}}]', b"\xff\xfe"])
def test_a_damaged_record_is_an_error_for_people(data: bytes) -> None:
    with pytest.raises(GputopError):
        read_record(data, 7, CLOCK, 100.0, None, 0.0)


Events = st.lists(st.builds(event, st.sampled_from("BEMX"), st.text(max_size=8) | st.just("thread (7): MainThread"),
                            st.integers(0, 10 ** 6), st.integers(0, 3), st.text(max_size=5), st.integers(0, 9)),
                  max_size=60)


@given(Events)
def test_any_record_is_read_or_refused(events: list[dict[str, object]]) -> None:
    try:
        samples = record(*events, counts=None)
    except GputopError:
        return
    assert samples.length_s > 0  # its own checks passed: indices, order, bounds
    for thread in samples.threads:
        assert thread.name.isprintable()


def test_a_very_large_record_is_bounded() -> None:
    events = [event(ph, f"f{n}", n * 60, line=n) for n in range(30_000) for ph in "BE"]
    samples = record(*events)
    assert len(samples.frames) == 20_000 and len(samples.threads[0].times_us) < 70_000
