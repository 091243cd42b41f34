"""Runs all checks of ``gputop doctor`` on the real node, and reports them in order, as text or as a document, and by
the exit status.

Every check is a function of what it reads (a file tree, the driver's facts), so that tests bring their own.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct

from gputop.core.errors import EXIT_FAILED, EXIT_NO_DATA, EXIT_OK
from gputop.doctor.check import DEADLINE_S, Check, RunningTasks, Task
from gputop.text import console

_ROOT = Path("/")
_COLORS = {"ok": "32", "warn": "33", "fail": "31", "unknown": "35"}
# The order of the report; the id of a check of one GPU or process ends in its number.
_ORDER = ("python", "dependencies", "driver_library", "kernel_module", "device_files", "nvml", "gpus", "gpu_",
          "sm_activity", "dcgm", "dcgm_engine", "profiling_rights", "profiler_servers", "attached_server", "process_",
          "container", "pod", "host", "clock", "adapters", "nccl_ras", "exporter", "terminal", "logdir", "disk")


class DoctorDocument(Struct, frozen=True, tag_field="schema", tag="gputop.doctor/1"):
    checks: tuple[Check, ...]


class Examination(Struct, frozen=True):
    """All checks, and whether there is anything to monitor at all."""

    checks: tuple[Check, ...]
    no_gpu: bool

    @property
    def exit_code(self) -> int:
        """3 without a driver or GPU, else 1 if a check failed, else 0."""
        if self.no_gpu:
            return EXIT_NO_DATA
        return EXIT_FAILED if any(check.status == "fail" for check in self.checks) else EXIT_OK


def examine(logdir: Path, attach: Sequence[str] = (), env: Mapping[str, str] | None = None, root: Path = _ROOT,
            deadline_s: float = DEADLINE_S, *, dcgm_address: str | None = None,
            dcgm_bindings: Path | None = None) -> Examination:
    """Run all checks: the driver's library is searched as ``env`` says, DCGM as the ``--dcgm…`` options say. Takes
    about a second, at most a little more than twice ``deadline_s``."""
    from gputop.doctor import cluster, dcgm, driver, jobs, node
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
        Task("dcgm_engine", "DCGM host engine", lambda: dcgm.engine(facts, root, env, dcgm_address, dcgm_bindings)),
        Task("profiling_rights", "Profiling rights", lambda: jobs.profiling_rights(facts, root)),
        Task("pod", "Pod's rights", lambda: node.pod_rights(facts, root, env)),
        Task("adapters", "RDMA adapters", lambda: cluster.adapters(facts, root)),
        Task("nccl_ras", "NCCL RAS", lambda: cluster.ras(facts, env)),
        Task("profiler_servers", "Profiler servers", lambda: jobs.servers(facts, root)),
    ], deadline_s)
    checks = on_driver.results() + on_node.results()
    checks.sort(key=lambda check: _ORDER.index(re.split(r"\d", check.id)[0]))  # stable: GPUs stay in their order
    return Examination(tuple(checks), driver.no_gpu(facts))


def to_text(report: Examination, width: int = 100, *, color: bool = False) -> str:
    """One aligned entry per check, its fix below."""
    margin = max(len(check.title) for check in report.checks) + 12
    lines: list[str] = []
    for check in report.checks:
        word = check.status.ljust(8)
        if color:
            word = f"\x1b[{_COLORS[check.status]}m{word}\x1b[0m"
        shown = console.one_line(check.detail, console.LINE_CHARS)
        detail = textwrap.wrap(shown, max(30, width - margin), break_on_hyphens=False) or [""]
        lines.append(f"{word}  {check.title.ljust(margin - 12)}  {detail[0]}".rstrip())
        lines += [" " * margin + rest for rest in detail[1:]]
        if check.fix:
            lines += ["", *(" " * margin + fix for fix in console.clean(check.fix).split("\n")), ""]
    if lines[-1]:
        lines.append("")
    return "\n".join([*lines, _summary(report)]) + "\n"


def print_report(report: Examination, *, as_json: bool) -> None:
    """Print to stdout; in colors on a terminal that has them, unless NO_COLOR is set."""
    if as_json:
        console.write_json(DoctorDocument(report.checks))
        return
    tty = sys.stdout.isatty()
    width = min(120, shutil.get_terminal_size((100, 24)).columns) if tty else 100
    color = tty and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
    text = to_text(report, width, color=color)
    console.write_colored(text)


def _summary(report: Examination) -> str:
    counts = {status: sum(check.status == status for check in report.checks) for status in _COLORS}
    words = {"ok": "ok", "warn": "with limits", "fail": "failed", "unknown": "unknown"}
    text = ", ".join(f"{count} {words[status]}" for status, count in counts.items() if count)
    if report.no_gpu:
        text += ". gputop can read no GPU here; to see a simulated node: gputop --demo"
    return text + "."
