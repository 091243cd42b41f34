"""What tests of several modules share: real training jobs, started once and only where asked for."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from gputop.advice.user_registry import UserRules
from tests.source_trees import sources
from tests.tf_job import TfJob, start_tf_job
from tests.tui.textual_private import make_pilots_cheap


@pytest.fixture(autouse=True)
def no_rules_of_the_user() -> Iterator[None]:
    """What a test takes into the registry is of that test alone."""
    yield
    UserRules.clear()


# A shell that starts the suite in the background has these ignored, and every child of a test would begin so.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# A loaded machine is no fault of a test.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

_SHARED_JOBS, _PARSED_SOURCES, _REAL_TRACES = "TensorFlow jobs", "parsed sources", "real traces"
_SHARED = {"fast_process": _SHARED_JOBS, "slow_process": _SHARED_JOBS, "parsed_sources": _PARSED_SOURCES,
           "real_analyses": _REAL_TRACES}
# What takes minutes begins first, so that no process works on alone at the end.
_FIRST = ("tests/test_environments.py", _SHARED_JOBS, "tests/tui/test_golden.py", "tests/launch/test_real.py",
          "tests/launch/test_real_pytorch.py",
          "tests/commands/test_cli_workers_dips.py", "tests/sources/nvml/test_faults.py", "tests/tui/test_keys.py",
          "tests/tui/terminal/test_terminal_manners.py", "tests/advice/test_labeled.py", "tests/tui/test_themes.py",
          "tests/commands/test_cli.py", "tests/tui/", "tests/trace/readers/", "tests/timeline/",
          "tests/diagnosis/", "tests/comparison/test_demo.py", "tests/advice/live/",
          "tests/launch/test_inject_attacks.py",
          "tests/text/test_redaction.py", "tests/telemetry/test_step_period.py", _PARSED_SOURCES)


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    groups = {item: _group(item) for item in items}
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: next((i for i, first in enumerate(_FIRST) if groups[item].startswith(first)),
                                     len(_FIRST)))
    if importlib.util.find_spec("tensorflow") is not None:
        return
    absent = pytest.mark.skip(reason="TensorFlow is not installed")
    for item in items:
        if item.get_closest_marker("tensorflow"):
            item.add_marker(absent)


def _group(item: pytest.Item) -> str:
    """Which tests share a process: those of one file; and all on what takes seconds to make."""
    shared = next((_SHARED[name] for name in getattr(item, "fixturenames", ()) if name in _SHARED), None)
    return shared or item.nodeid.partition("::")[0]


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if _group(item) == _PARSED_SOURCES and (nextitem is None or _group(nextitem) != _PARSED_SOURCES):
        sources.cache_clear()  # a quarter of a gigabyte


@pytest.fixture(scope="session", autouse=True)
def no_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test depends on the settings of who runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("settings")))
        patch.delenv("NO_COLOR", raising=False)
        yield


@pytest.fixture
def parsed_sources() -> None:
    """For tests that call :func:`tests.source_trees.sources`: it keeps them together."""


@pytest.fixture
def real_analyses() -> None:
    """For tests that take analyses of :mod:`tests.diagnosis.real_traces`: it keeps them together."""


@pytest.fixture(scope="session", autouse=True)
def quick_pilots() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        make_pilots_cheap(patch)
        yield


@pytest.fixture(scope="session")
def fast_process() -> Iterator[TfJob]:
    with start_tf_job("fast") as job:
        yield job


@pytest.fixture(scope="session")
def slow_process() -> Iterator[TfJob]:
    with start_tf_job("slow input") as job:
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
