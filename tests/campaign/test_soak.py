"""The short form of ``make soak``: the processes run and are measured, and the session's own objects do not grow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.campaign import soak
from tests.campaign.soak import HISTORY_BYTES_PER_GPU, OTHER_GROWTH_BYTES, Row, Subject, problems
from tests.records import replace

_KEPT_SAMPLES = 3000  # of the host; all other single samples lie in arrays


def test_ten_hertz_over_a_driver_with_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    subjects = soak.soak(soak.start(tmp_path, gpus=4), seconds=2.0, rows=2, settle_s=1.0)
    assert [s.name for s in subjects] == ["monitor", "session", "record"]
    for subject in subjects:
        assert len(subject.rows) == 3
        assert all(row.memory_bytes > 1e6 and row.descriptors >= 3 and row.threads >= 1 for row in subject.rows)
        assert subject.process.returncode is not None
    for subject in subjects[1:]:
        assert subject.rows[-1].samples > subject.rows[0].samples > 0
    assert len(capsys.readouterr().out.splitlines()) == 9


def test_with_time_only_the_arrays_of_the_history_fill() -> None:
    """Half a minute of samples at 10 Hz and the live rules leave nothing behind, in a process of its own."""
    command = [sys.executable, "-m", "tests.campaign.soak", "--fast-clock", "1", str(_KEPT_SAMPLES), "300"]
    done = subprocess.run(command, cwd=soak.ROOT, stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout)
    assert found["grown_bytes"] < 300 * 200  # one object for each sample would take more
    assert found["reserved_bytes_per_gpu"] < HISTORY_BYTES_PER_GPU


def _subject(*rows: tuple[float, int, int], history: bool = True) -> Subject:
    process: subprocess.Popen[bytes] = subprocess.Popen.__new__(subprocess.Popen)
    process.returncode = 0
    return Subject("x", process, history, rows=[Row(i, int(memory), descriptors, threads, 0.0, None)
                                                for i, (memory, descriptors, threads) in enumerate(rows)])


@pytest.mark.parametrize(("samples", "said"), [
    ((100, 700, 1300, 1900), ""), ((100, 700, 1290, 1880), ""),
    ((100, 700, 1300, 1300), "no sample came in the last 1"), ((100, None, None, None), "no sample came"),
    ((100, 500, 900, 1300), "33.3% of the samples that were due"),
])
def test_a_session_that_samples_no_more_is_no_fine_run(samples: tuple[int | None, ...], said: str) -> None:
    own = _subject(*[(5e6, 9, 5)] * len(samples))
    own.samples_file = Path("samples")
    own.rows = [replace(row, samples=count) for row, count in zip(own.rows, samples, strict=True)]
    found = problems(own, gpus=2)
    assert len(found) == bool(said) and said in "".join(found)


@pytest.mark.parametrize(("rows", "history", "said"), [
    (((50e6, 9, 5), (50e6 + 2 * HISTORY_BYTES_PER_GPU, 9, 5)), True, ""),
    (((50e6, 9, 5), (50e6 + 2 * HISTORY_BYTES_PER_GPU + OTHER_GROWTH_BYTES + 1e5, 9, 5)), True, "grew by 11.3 MB"),
    (((50e6, 9, 5), (50e6 + OTHER_GROWTH_BYTES + 1e5, 9, 5)), False, "memory grew by 8.1 MB"),
    (((5e6, 9, 5), (5e6, 12, 6), (5e6, 10, 5), (5e6, 9, 5)), True, ""),  # for a while
    (((5e6, 9, 5), (5e6, 9, 5), (5e6, 10, 5), (5e6, 11, 5)), True, "never fewer than 10 descriptors"),
    (((5e6, 9, 5), (5e6, 9, 6), (5e6, 9, 7), (5e6, 9, 8)), True, "never fewer than 7 threads"),
])
def test_growth_beyond_its_bound_is_said(rows: tuple[tuple[float, int, int], ...], history: bool, said: str) -> None:
    found = problems(_subject(*rows, history=history), gpus=2)
    assert len(found) == bool(said) and said in "".join(found)
