"""The host alone where there are no GPUs, and when that is enough."""

from __future__ import annotations

import os

import pytest

from gputop.core.errors import EXIT_NO_DATA, EXIT_USAGE, GputopError, NoDataError
from gputop.sources.factory import GpusOrHost
from gputop.sources.simulated import SimulatedSource


class NoGpus(SimulatedSource):
    """A node whose driver cannot be opened."""

    error: GputopError = NoDataError("There is no driver.", "Install it.")

    def open(self) -> None:
        raise self.error


def test_without_gpus_the_host_and_the_watched_processes_are_read_and_the_label_says_why():
    source = GpusOrHost(NoGpus(), lambda: True)
    source.open()
    source.open()  # the monitor opens it before the screen, the sampler once more
    assert (source.gpus, source.gpus_present, source.label) == ((), None, "There is no driver. Install it.")
    assert source.host.read(0.0)["memory_total_bytes"].value and not source.host.processes(0.0, ())
    source.watch_processes([os.getpid()])
    (own,) = source.host.processes(1.0, ())
    assert own.pid == os.getpid() and own.command and not own.gpus
    source.close()


def test_where_the_host_is_not_enough_the_error_names_the_ways_out():
    with pytest.raises(GputopError) as caught:
        GpusOrHost(NoGpus(), lambda: False).open()
    assert caught.value.exit_code == EXIT_NO_DATA
    assert caught.value.fix.startswith("Install it.") and "--attach" in caught.value.fix \
        and "gputop run" in caught.value.fix


def test_wrong_usage_is_an_error_in_any_case():
    source = NoGpus()
    source.error = GputopError("no GPU 9", "", EXIT_USAGE)
    with pytest.raises(GputopError, match="no GPU 9"):
        GpusOrHost(source, lambda: True).open()


def test_with_gpus_it_is_the_source_itself():
    inner = SimulatedSource(gpus=("0-1",))
    source = GpusOrHost(inner, lambda: False)
    source.open()
    assert source.gpus is inner.gpus and source.host is inner.host and source.label == inner.label
    assert source.gpus_present == inner.gpus_present
    source.watch_processes([os.getpid()])  # the GPUs say which processes there are
    assert all(p.pid != os.getpid() for p in source.host.processes(0.0, ()))
    source.close()
