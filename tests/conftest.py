"""What tests of several modules share: real training jobs, started once and only where asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.tf_job import TfJob, start_tf_job

# A loaded machine is no fault of a test.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

_SHARED_JOBS = "TensorFlow jobs"
# What takes minutes begins first, so that no process works on alone at the end.
_FIRST = ("tests/test_environments.py", _SHARED_JOBS, "tests/tui/test_golden.py", "tests/launch/test_real.py",
          "tests/commands/test_cli_workers_dips.py", "tests/sources/nvml/test_faults.py", "tests/tui/test_keys.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    items.sort(key=lambda item: _FIRST.index(_group(item)) if _group(item) in _FIRST else len(_FIRST))
    if importlib.util.find_spec("tensorflow") is not None:
        return
    absent = pytest.mark.skip(reason="TensorFlow is not installed")
    for item in items:
        if item.get_closest_marker("tensorflow"):
            item.add_marker(absent)


def _group(item: pytest.Item) -> str:
    """Which tests share a process: those of one file; and all on the jobs below, which take seconds to start."""
    shared = {"fast_process", "slow_process"}.intersection(getattr(item, "fixturenames", ()))
    return _SHARED_JOBS if shared else item.nodeid.partition("::")[0]


@pytest.fixture(scope="session", autouse=True)
def no_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test depends on the settings of who runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("settings")))
        patch.delenv("NO_COLOR", raising=False)
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
