"""Reading a host that answers, fails or hangs, and its processes behind it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

from gputop.core.metrics import HOST_METRICS
from gputop.core.samples import GpuSample, HostSample
from gputop.telemetry.deadline_calls import HostReader, Workers
from tests.telemetry.node_doubles import Node
from tests.waiting import PATIENCE_S


def gpus_of(node: Node) -> tuple[GpuSample, ...]:
    return tuple(probe.read(1.0) for probe in node.gpus)


def test_the_host_and_its_processes_are_read_on_one_thread() -> None:
    node, workers, threads = Node(), Workers(time.monotonic), []
    read, processes = node.host.read, node.host.processes

    def read_noted(now_s: float) -> HostSample:
        threads.append(threading.current_thread().name)
        return read(now_s)

    def processes_noted(now_s: float, gpus: Sequence[GpuSample]) -> object:
        threads.append(threading.current_thread().name)
        return processes(now_s, gpus)

    node.host.read, node.host.processes = read_noted, processes_noted  # type: ignore[method-assign, assignment]
    host, (process,) = HostReader(node, workers).read(1.0, gpus_of(node), PATIENCE_S)
    assert host["cpu_ratio"].value == 0.5 and sorted(process.gpus) == [0, 1]
    assert threads == ["gputop-host"] * 2
    assert workers.end(PATIENCE_S)


def test_processes_of_a_host_that_fails_are_those_of_the_gpus() -> None:
    node, workers = Node(), Workers(time.monotonic)
    node.host.fault = OSError("no /proc")
    host, (process,) = HostReader(node, workers).read(1.0, gpus_of(node), PATIENCE_S)
    assert host["cpu_ratio"].reason == "could not be read: OSError('no /proc')"
    assert process.pid == 7 and sorted(process.gpus) == [0, 1] and "no /proc" in (process.reason or "")
    assert workers.end(PATIENCE_S)


def test_a_host_that_hangs_is_missing_and_is_not_asked_twice() -> None:
    node, workers, gate, calls = Node(), Workers(time.monotonic), threading.Event(), []

    def hang(now_s: float) -> HostSample:
        calls.append(now_s)
        gate.wait(PATIENCE_S)
        return HostSample("late", {})

    node.host.read = hang  # type: ignore[method-assign]
    reader = HostReader(node, workers)
    for now_s in (1.0, 2.0):
        host, processes = reader.read(now_s, (), 0.0)
        assert host["cpu_ratio"].reason == "the host did not answer in time" and processes == ()
    gate.set()
    assert workers.end(PATIENCE_S) and calls == [1.0]


def test_a_missing_host_has_a_name_and_all_metrics() -> None:
    missing = HostReader(Node(), Workers(time.monotonic)).missing("not asked yet")
    assert missing.hostname == os.uname().nodename
    assert {missing[metric].reason for metric in HOST_METRICS} == {"not asked yet"}
    node = Node()
    node.simulated = True
    assert HostReader(node, Workers(time.monotonic)).missing("").hostname == ""
