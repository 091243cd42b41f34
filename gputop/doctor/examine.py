"""Runs all checks of ``gputop doctor`` on the real node.

Every check is a function of what it reads (a file tree, the driver's facts), so that tests bring their own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from gputop.doctor.check import DEADLINE_S, RunningTasks, Task
from gputop.doctor.report import Report

_ROOT = Path("/")
# The order of the report; the id of a check of one GPU or process ends in its number.
_ORDER = ("python", "dependencies", "driver_library", "kernel_module", "device_files", "nvml", "gpus", "gpu_",
          "sm_activity", "dcgm", "dcgm_engine", "profiling_rights", "profiler_servers", "attached_server", "process_",
          "container", "pod", "host", "clock", "adapters", "nccl_ras", "exporter", "terminal", "logdir", "disk")


def examine(logdir: Path, attach: Sequence[str] = (), env: Mapping[str, str] | None = None, root: Path = _ROOT,
            deadline_s: float = DEADLINE_S, *, dcgm_address: str | None = None,
            dcgm_bindings: Path | None = None) -> Report:
    """Run all checks: the driver's library is searched as ``env`` says, DCGM as the ``--dcgm…`` options say.

    Takes about a second, at most a little more than twice ``deadline_s``.
    """
    from gputop.doctor import cluster, dcgm, driver, jobs, node, pod
    from gputop.doctor.driver_facts import ask_driver

    dcgm_address = dcgm_address or dcgm.DEFAULT_ADDRESS
    dcgm.parse_address(dcgm_address)  # raises for wrong usage before anything starts
    env = os.environ if env is None else env
    on_node = RunningTasks([
        Task("python", "Python", node.python),
        Task("dependencies", "Python packages", node.dependencies),
        Task("container", "Container", lambda: node.container(root, env)),
        Task("host", "Host figures", lambda: node.host(root)),
        Task("clock", "Clock", lambda: cluster.clock(root)),
        Task("exporter", "Exporter", cluster.exporter),
        Task("terminal", "Terminal", lambda: node.terminal(env)),
        Task("logdir", "Trace folder", lambda: node.logdir(logdir)),
        Task("disk", "Free disk", lambda: node.disk(logdir)),
        *(Task("attached_server", "Attached server", partial(jobs.attached, address)) for address in attach),
    ], deadline_s)
    facts = ask_driver(min(8.0, deadline_s), env)
    on_driver = RunningTasks([
        Task("driver_library", "Driver library", lambda: driver.nvml_library(facts, root)),
        Task("kernel_module", "Kernel module", lambda: driver.kernel_module(facts, root)),
        Task("device_files", "Device files", lambda: driver.device_files(facts, root)),
        Task("nvml", "NVML", lambda: driver.nvml(facts, root)),
        Task("gpus", "GPUs", lambda: driver.gpus(facts)),
        Task("sm_activity", "SM activity", lambda: driver.sm_activity(facts)),
        Task("dcgm", "DCGM", lambda: dcgm.installation(facts, root, env, dcgm_bindings)),
        Task("dcgm_engine", "DCGM host engine",
             lambda: dcgm.engine(facts, root, env, dcgm_address, dcgm_bindings)),
        Task("profiling_rights", "Profiling rights", lambda: jobs.profiling_rights(facts, root)),
        Task("pod", "Pod's rights", lambda: pod.rights(facts, root, env)),
        Task("adapters", "RDMA adapters", lambda: cluster.adapters(facts, root)),
        Task("nccl_ras", "NCCL RAS", lambda: cluster.ras(facts, env)),
        Task("profiler_servers", "Profiler servers", lambda: jobs.servers(facts, root)),
    ], deadline_s)
    checks = on_driver.results() + on_node.results()
    checks.sort(key=lambda check: _ORDER.index(check.id.rstrip("0123456789")))  # stable: GPUs stay in their order
    return Report(tuple(checks), driver.no_gpu(facts))
