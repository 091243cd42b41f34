"""The training jobs of this node: whether they may be profiled, and whether they have a profiler server."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from gputop.core.errors import GputopError
from gputop.core.framework import loaded_frameworks
from gputop.core.proc import command_of, effective_capabilities, read_maps, stat_of
from gputop.doctor.check import Check, Result, text_of
from gputop.doctor.driver import in_container
from gputop.doctor.driver_facts import DriverFacts
from gputop.profiler.addresses import process_of
from gputop.profiler.discovery import Discovery, Finder, TrainingProcesses
from gputop.profiler.kineto.jobs import find_jobs
from gputop.profiler.kineto.recorder import unsafe
from gputop.profiler.ways import check
from gputop.profiler.xprof.probe import probe
from gputop.text.commands import short_command
from gputop.text.units import fit, printable

# include/uapi/linux/capability.h. CAP_PERFMON counts since driver R565.
_CAP_SYS_ADMIN = 1 << 21
_CAP_PERFMON = 1 << 38
_PERFMON_DRIVER = 565
_ADMIN_ONLY = re.compile(r"^RmProfilingAdminOnly:\s*(\d+)", re.MULTILINE)
_ALLOW = """\
echo 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' | sudo tee /etc/modprobe.d/nvidia-profiling.conf
{rebuild}
sudo reboot"""
_SERVICES = ("nvidia-cuda-mps", "nvidia-persiste", "nv-hostengine", "dcgm")  # as comm shows them: 15 letters
_SERVE_TF = "tf.profiler.experimental.server.start(6009)   # TensorFlow: add this line at the start of the job"
_SERVE_JAX = "jax.profiler.start_server(6009)               # JAX: add this line at the start of the job"


def profiling_rights(facts: DriverFacts, root: Path) -> Result:
    """Check whether CUPTI may use the GPU's counters, for the jobs that run and for this user.

    NVIDIA, "CUPTI ERROR INSUFFICIENT PRIVILEGES" and "ERR_NVGPUCTRPERM": restricted, only
    administrators may use counters; tracing of kernels works for all since CUDA 10.2.
    """
    match = _ADMIN_ONLY.search(text_of(root / "proc/driver/nvidia/params"))
    if match is None:
        return Result("unknown", "cannot read /proc/driver/nvidia/params here")
    if match[1] == "0":
        return Result("ok", "all users may use the GPU's counters (RmProfilingAdminOnly: 0)")
    perfmon = int(facts.driver.partition(".")[0] or 0) >= _PERFMON_DRIVER if facts.driver[:1].isdecimal() else False
    jobs = {pid: allowed for pid in facts.pids if (allowed := _privileged(root, pid, perfmon)) is not None}
    this_user = _privileged(root, "self", perfmon)
    detail = "only administrators may use the GPU's counters (RmProfilingAdminOnly: 1)"
    if jobs and all(jobs.values()):
        return Result("ok", f"{detail}; the jobs that hold GPUs have permission (CAP_SYS_ADMIN)")
    if not jobs and this_user:
        return Result("ok", f"{detail}; this user is an administrator (CAP_SYS_ADMIN). Jobs need their own permission.")
    lacking = ", ".join(str(pid) for pid, allowed in jobs.items() if not allowed)
    who = f"Processes without permission: {lacking}. " if lacking else ""
    detail += (f". {who}Since CUDA 10.2, kernels are traced anyway. If a capture reports "
               "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES instead of GPU events, this is the reason.")
    fix = _ALLOW.format(rebuild=_rebuild(root))
    if in_container(root):
        fix = "docker run --cap-add=SYS_ADMIN …   # for this job, or for all jobs on the host:\n" + fix
    return Result("warn", detail, fix)


def _privileged(root: Path, process: int | str, perfmon: bool) -> bool | None:
    """Return whether a process has the capability that counts; None if it cannot be seen."""
    capabilities = effective_capabilities(process, root / "proc")
    wanted = _CAP_SYS_ADMIN | (_CAP_PERFMON if perfmon else 0)
    return None if capabilities is None else bool(capabilities & wanted)


def _rebuild(root: Path) -> str:
    """The boot image may hold the module's options; how it is made anew."""
    if (root / "usr/bin/dracut").exists() and not (root / "usr/sbin/update-initramfs").exists():
        return "sudo dracut --regenerate-all --force"
    return "sudo update-initramfs -u -k all"


def servers(facts: DriverFacts, root: Path, find: Callable[[], Discovery] | None = None) -> list[Check]:
    """The profiler servers of this node, and the jobs without one."""
    checks: list[Check] = []
    discovery = (find or Finder(root / "proc").find)()
    proc = root / "proc"
    kineto_jobs = find_jobs(proc)
    answering = (*discovery.servers, *kineto_jobs.servers)
    parents = {server.pid: _ancestors(proc, server.pid) for server in answering}
    jobs = facts.pids or TrainingProcesses(proc).find()  # without a GPU
    lacking = [pid for pid in jobs if _is_job(proc, pid) and not _served(proc, pid, parents)]
    unseen = sum(not (proc / str(pid)).exists() for pid in facts.pids)
    id_, title = "profiler_servers", "Profiler servers"
    notes = "".join(f" {note}" for note in discovery.notes)
    if unseen:
        notes += f" {unseen} more processes that hold GPUs are not visible from here (another PID namespace)."
    if answering:
        listed = "; ".join(f"{s.address} {s.framework or ''} {s.version or ''}".strip() + f", pid {s.pid}: "
                           + fit(short_command(printable(s.command)), 60).strip() for s in answering)
        checks.append(Check(id_, "ok", title, listed + "." + notes))
    elif not lacking:
        nobody = "" if facts.pids else ", and no process holds a GPU"
        checks.append(Check(id_, "warn", title, f"none found{nobody}. TensorFlow and JAX jobs need one for captures; "
                            f"PyTorch jobs do not.{notes}", f"{_SERVE_TF}\n{_SERVE_JAX}"))
    else:
        checks.append(Check(id_, "warn", title, "none found." + notes))
    what = "holds a GPU" if facts.pids else "has TensorFlow, JAX or PyTorch loaded"
    for pid in kineto_jobs.unprotected:
        error = unsafe(pid)
        checks.append(Check(f"process_{pid}_kineto", "warn", f"Process {pid}", error.message, error.fix))
    return checks + [_without_server(proc, pid, what) for pid in lacking]


def attached(address: str) -> Result:
    """Check whether a profiler server answers at an address that was asked for."""
    try:
        if process_of(address) is not None:
            check(address, 2.0)
            return Result("ok", f"{address} is waiting for gputop")
        round_trip_s = probe(address, 2.0)
    except GputopError as error:
        return Result("fail", f"{address}: {error.in_one_line}", f"{_SERVE_TF}\n{_SERVE_JAX}")
    return Result("ok", f"{address} answers in {round_trip_s * 1e3:.1f} ms")


def _is_job(proc: Path, pid: int) -> bool:
    name = text_of(proc / str(pid) / "comm")
    return bool(name) and not name.startswith(_SERVICES) and pid != os.getpid()


def _ancestors(proc: Path, pid: int) -> list[int]:
    """``pid``, its parent, and so on."""
    chain = [pid]
    while (stat := stat_of(chain[-1], proc)) is not None and stat.parent > 1 and stat.parent not in chain:
        chain.append(stat.parent)
    return chain


def _served(proc: Path, pid: int, servers: dict[int, list[int]]) -> bool:
    """Return whether the process has a server, or is the parent or a child of one that has."""
    return any(pid in chain for chain in servers.values()) or not servers.keys().isdisjoint(_ancestors(proc, pid))


def _without_server(proc: Path, pid: int, what: str) -> Check:
    shown = fit(short_command(printable(command_of(pid, proc))), 80).strip() or "command not readable"
    detail = f"{what} but has no profiler server: {shown}"
    try:
        loaded = loaded_frameworks(read_maps(pid, proc))
    except OSError:
        loaded = frozenset()
    fix: str | None = f"{_SERVE_TF}\n{_SERVE_JAX}"
    attach = f"{f'gputop attach {pid}':<43}   # starts a server in the running job, after asking\n"
    if "jax" in loaded:
        fix = attach + _SERVE_JAX
    elif "tensorflow" in loaded:
        fix = attach + _SERVE_TF
    elif "pytorch" in loaded:
        detail = f"{what} but is not prepared for captures: {shown}"
        fix = f"gputop capture {pid}   # records the job with its PyTorch profiler, after asking"
    return Check(f"process_{pid}", "warn", f"Process {pid}", detail, fix)
