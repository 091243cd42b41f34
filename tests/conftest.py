"""What tests of several modules share: real training jobs, started once and only where asked for."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from gputop.advice.user_registry import UserRules
from gputop.advice.user_registry import use as use_user_rules
from tests.source_trees import sources
from tests.tf_job import TfJob, start_tf_job
from tests.tui.textual_private import make_pilots_cheap


@pytest.fixture(autouse=True)
def no_rules_of_the_user() -> Iterator[None]:
    """What a test takes into the registry is of that test alone."""
    yield
    use_user_rules(UserRules())


# A shell that starts the suite in the background has these ignored, and every child of a test would begin so.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# A loaded machine is no fault of a test, and what one run of the suite tries the next one tries, too. Examples by
# chance, and more: pytest --hypothesis-profile chance, and make fuzz.
settings.register_profile("chance", deadline=None, max_examples=1000, suppress_health_check=list(HealthCheck))
settings.register_profile("the same", settings.get_profile("chance"), derandomize=True, max_examples=60)
settings.load_profile("the same")

# What takes seconds to make is made once: the tests of these files share a process.
_SHARED_JOBS, _PYTORCH_JOBS = "TensorFlow jobs", "PyTorch jobs"
_PARSED_SOURCES, _REAL_TRACES = "parsed sources", "real traces"
_CAPTURES, _STAGES = "captures that are compared", "stages"
_TOGETHER = {
    _SHARED_JOBS: (  # their jobs are forked from one process
        "tests/launch/test_real.py", "tests/profiler/xprof/test_real.py", "tests/profiler/xprof/test_real_workers.py",
        "tests/ranks/test_real_hang.py", "tests/session/test_restart.py", "tests/test_end_to_end.py",
        "tests/test_framework_code.py", "tests/test_marks.py"),
    _PYTORCH_JOBS: ("tests/launch/test_real_pytorch.py", "tests/ranks/test_real_pytorch_hang.py"),
    _PARSED_SOURCES: (  # they call tests.source_trees.sources
        "tests/advice/test_registry.py", "tests/core/test_codec.py", "tests/core/test_own_program.py",
        "tests/test_docs.py", "tests/test_house.py", "tests/test_imports.py", "tests/test_words.py",
        "tests/text/test_console.py", "tests/tui/terminal/test_textual_private.py"),
    _REAL_TRACES: (  # they take traces and analyses of tests.diagnosis.real_traces
        "tests/analysis/gpu/test_batch_scaling.py", "tests/analysis/gpu/test_real_device_tables.py",
        "tests/analysis/gpu/test_sm_use.py", "tests/analysis/host/test_wall_time.py",
        "tests/analysis/layers/test_layers.py", "tests/analysis/layers/test_pytorch.py",
        "tests/diagnosis/test_every_second.py", "tests/diagnosis/test_real_traces.py",
        "tests/diagnosis/test_true_figures.py", "tests/timeline/test_build.py", "tests/timeline/test_idle_gaps.py",
        "tests/trace/readers/chrome/test_reader.py", "tests/trace/readers/test_nsys.py"),
    _CAPTURES: ("tests/comparison/test_demo.py", "tests/comparison/test_gates.py"),  # of tests.comparison.captures
    _STAGES: (  # they show the sessions and captures of tests.tui.stages
        "tests/tui/test_keys.py", "tests/tui/test_mouse.py", "tests/tui/screens/test_stacks.py",
        "tests/tui/widgets/test_dialog_frame.py"),
}
_MAX_ID_CHARS = 300
_GROUP = {file: group for group, files in _TOGETHER.items() for file in files}
# What takes minutes begins first, so that no process works on alone at the end.
_FIRST = (_PYTORCH_JOBS, "tests/test_environments.py", _SHARED_JOBS, "tests/test_fix_code.py", "tests/test_install.py",
          _STAGES, "tests/tui/test_golden.py", "tests/advice/test_labeled.py", "tests/launch/test_inject_attacks.py",
          "tests/diagnosis/test_fuzz.py", "tests/analysis/layers/test_cpu_layers.py", "tests/tui/test_main_job.py",
          "tests/launch/test_real_limits.py", "tests/tui/terminal/", "tests/session/test_other_nodes.py",
          "tests/profiler/kineto/", "tests/sources/nvml/test_faults.py", "tests/telemetry/test_step_period.py",
          "tests/profiler/xprof/", "tests/commands/test_cli", "tests/diagnosis/", _REAL_TRACES, _CAPTURES, "tests/tui/",
          "tests/comparison/", "tests/timeline/", "tests/advice/live/", "tests/session/", "tests/trace/readers/",
          "tests/launch/", "tests/text/test_redaction.py", _PARSED_SOURCES)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Import the test modules of a whole run, each process from another place on: what one compiled the rest read."""
    process = getattr(session.config, "workerinput", None)
    root = Path(__file__).parent
    if process is None or [Path(argument).resolve() for argument in session.config.args] != [root]:
        return
    files = sorted(file.relative_to(root.parent) for file in root.rglob("test_*.py"))
    modules = [".".join(file.with_suffix("").parts) for file in files]
    first = len(modules) * int(process["workerid"].removeprefix("gw")) // process["workercount"]
    for module in modules[first:] + modules[:first]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # pytest comes by, and says so
            importlib.import_module(module)


def pytest_collection_finish() -> None:
    """What has been loaded stays until the end: the garbage collector need not search a million objects again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """A short name for a long value: one of megabytes would be part of the test's name, which each process makes, sends
    and keeps, every byte of it as four characters."""
    return f"{argname} of {len(val)}" if isinstance(val, (str, bytes)) and len(val) > _MAX_ID_CHARS else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _turn(_file(item.nodeid)))
    if importlib.util.find_spec("tensorflow") is not None:
        return
    absent = pytest.mark.skip(reason="TensorFlow is not installed")
    for item in items:
        if item.get_closest_marker("tensorflow"):
            item.add_marker(absent)


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _group(nodeid: str) -> str:
    """The name of the tests that share a process with this one: those of its file, or of several."""
    return _GROUP.get(_file(nodeid), _file(nodeid))


@functools.cache
def _turn(file: str) -> int:
    """The place of a file's tests among those that begin first; the number of such places if it has none."""
    group = _GROUP.get(file, file)
    return next((turn for turn, first in enumerate(_FIRST) if group.startswith(first)), len(_FIRST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a process whole groups, in their order.

    The groups of ``--dist loadgroup`` would not do: xdist reads the marks before this file can set them, and adds them
    to the names of tests, by which --last-failed does not find these again.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    return Groups(config, log)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    # gputop would take a process of tests for a job, and servers that tests start in it for the job's.
    assert not sys.modules.keys() & {"jax", "tensorflow", "torch"}, "frameworks are for processes of their own"
    if _group(item.nodeid) == _PARSED_SOURCES and (nextitem is None or _group(nextitem.nodeid) != _PARSED_SOURCES):
        sources.cache_clear()  # a quarter of a gigabyte


@pytest.fixture(scope="session", autouse=True)
def no_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test depends on the settings of who runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("settings")))
        patch.delenv("NO_COLOR", raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_pilots() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        make_pilots_cheap(patch)
        yield


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that others may enter, with a short path: the name of a socket has 107 characters at most."""
    with tempfile.TemporaryDirectory(prefix="gk-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def analysis_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures analyzed without a process of its own, whose start takes several times as long as a small trace."""
    from gputop.diagnosis import worker
    from gputop.diagnosis.diagnose import analyze_to_facts
    from gputop.trace.readers.load import load

    monkeypatch.setattr(worker, "analyze_in_worker",
                        lambda paths, *_: worker.diagnosis_of(analyze_to_facts(load(paths))))
    monkeypatch.setattr(worker.AnalysisAhead, "begin", lambda _: None)


@pytest.fixture(scope="session")
def fast_process() -> Iterator[TfJob]:
    with start_tf_job("fast", threads=1) as job:
        yield job


@pytest.fixture(scope="session")
def slow_process() -> Iterator[TfJob]:
    with start_tf_job("slow input", threads=1) as job:
        yield job


@pytest.fixture
def tf_fast_job(fast_process: TfJob) -> Iterator[TfJob]:
    """A Keras job whose input is always ready."""
    with fast_process.awake() as job:
        yield job


@pytest.fixture
def tf_slow_job(slow_process: TfJob) -> Iterator[TfJob]:
    """A Keras job that waits for its input most of the time."""
    with slow_process.awake() as job:
        yield job
