"""Marks of steps: those that gputop finds are those that a job made, and the job does as without them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import pytest

import gputop
from gputop import marks
from gputop.trace.lookups import host_stat
from gputop.trace.readers.load import load
from tests import forked_processes, marks_job
from tests.environments import JAX, environment
from tests.marks_job import EPOCHS, STEPS, TESTS


def check(printed: str, folder: Path) -> None:
    train, test = map(int, printed.split()[-2:])
    assert (train, test) == (EPOCHS * STEPS, EPOCHS * TESTS)
    trace = load([str(folder)])
    rows, _ = host_stat(trace.host, "step_num")
    assert Counter(trace.names[i] for i in trace.host.name[rows].tolist()) == {"train": train, "test": test}
    names = Counter(trace.names[i] for i in trace.host.name.tolist())
    assert names["epoch"] == EPOCHS and names["evaluation"] == EPOCHS
    analysis = gputop.analyze([str(folder)])
    steps = analysis.steps
    assert steps is not None and steps.anchor.startswith("train markers") and steps.confidence == "high"
    assert steps.count + steps.dropped == train
    assert steps.phase == "training" and set(steps.left_out_s) == {"evaluation"}
    assert analysis.gaps is not None
    assert not {"train", "test", "epoch"} & {work.name for work in analysis.gaps.main}, "marks are no work"


@pytest.mark.tensorflow
def test_the_steps_of_a_keras_job(tmp_path: Path) -> None:
    if find_spec("tensorflow") is None:
        pytest.skip("TensorFlow is not installed")
    job = forked_processes.start(Path(marks_job.__file__), ["keras", str(tmp_path)], {**os.environ}, stderr=2)
    printed = job.stdout.read()
    assert job.wait() == 0
    check(printed, tmp_path)


def test_the_steps_of_a_jax_job(tmp_path: Path) -> None:
    job = subprocess.run([environment(JAX).python, "-m", "tests.marks_job", "jax", str(tmp_path)], capture_output=True,
                         text=True, cwd=Path(__file__).parents[1])
    assert job.returncode == 0, job.stderr
    check(job.stdout, tmp_path)


def test_nothing_is_imported_and_nothing_marked_without_a_framework() -> None:
    program = ("import sys; from gputop import marks\n"
               "list(marks.steps(range(3)))\nwith marks.span('x'), marks.step(1): pass\n"
               "assert not {'tensorflow', 'jax', 'torch', 'keras', 'numpy'} & set(sys.modules)")
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


class _Callback:
    model: object = None


def test_a_step_function_is_marked_once_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(marks, "step", lambda number, name: seen.append(f"{name} {number}") or nullcontext())

    class Model:
        train_function = staticmethod(lambda x: x + 1)
        test_function = None

    class Keras:
        __version__ = "3.9.0"

        class callbacks:
            Callback = _Callback

    callback = marks.keras_callback(Keras)
    assert isinstance(callback, _Callback)
    callback.model, original = Model(), Model.train_function
    callback.on_test_end()  # of a model that evaluates nothing
    for _ in range(2):  # the first run was interrupted
        callback.on_train_begin()
    assert callback.model.train_function(1) == 2 and callback.model.train_function(x=2) == 3
    callback.on_train_end()
    assert callback.model.train_function is original and seen == ["train 0", "train 1"]
    Keras.__version__ = "2.15.0"
    older = marks.keras_callback(Keras)
    older.model = Model()
    older.on_train_begin()
    assert older.model.train_function is original, "Keras 2 marks its steps itself"
