"""Check that a job has what a capture makes it take: threads, address space, open files, disk. Looked at before
anything in it is touched: at a limit PyTorch aborts, and TensorFlow and JAX stand still for good.

The limit of locked memory (RLIMIT_MEMLOCK) is not among them. CUPTI locks nothing itself (libcupti 12 and 13 call
neither mlock nor perf_event_open), and NVIDIA's kernel module pins pages without asking for that limit
(os_lock_user_pages in its open sources).

What is needed was measured on CPUs, from the request to the end of the second recording, and has a margin here: a GPU
adds the threads of CUPTI.
"""

from __future__ import annotations

import os
from pathlib import Path

from msgspec import Struct

from gputop.core import job_limits
from gputop.core.errors import GputopError
from gputop.core.framework import LABELS, loaded_frameworks
from gputop.core.job_limits import LimitFacts, read_limits
from gputop.core.proc import read_maps
from gputop.text.units import counted, size

_MIB = 1 << 20


class Need(Struct, frozen=True):
    """Needs of a job for a capture: ``threads``, and besides their stacks address space and descriptors."""

    threads: int
    bytes: int
    files: int


def need_of(framework: str, cpus: int, threads: int) -> Need:
    """Needs of a job of a framework (:data:`~gputop.core.framework.LABELS`) with so many threads on a node with so many
    CPUs.

    Measured: PyTorch 2.6 and 2.13 three threads, gputop's own among them, and two descriptors. JAX 0.10 and TensorFlow
    2.21 eight threads on 2 CPUs, 20 on 64, as gRPC has up to 16 by the number of CPUs; eight descriptors. A new thread
    takes an arena of glibc's, as long as there are fewer than eight for each CPU. Jobs without a thread of their own
    ended at 200 MiB to spare (PyTorch, 264 are asked for) and at 560 (TensorFlow, 656), and took 236 and 585 where they
    had 300 and 640; JAX, which had all its arenas, was well at 70 (144). What events take is not in it: the plan looks
    at what is left."""
    usual = 3 if framework == "pytorch" else 6 + min(cpus, 16)
    arenas_bytes = _ARENA_BYTES * max(0, min(usual, 8 * cpus - threads))
    if framework == "pytorch":
        return Need(usual + 4, arenas_bytes + 16 * _MIB, 16)
    return Need(usual + 6, arenas_bytes + 32 * _MIB, 24)


_LEAST_TRACE_BYTES = 64 * _MIB  # of some ten thousand events
_USUAL_STACK_BYTES, _ARENA_BYTES = 8 * _MIB, 64 * _MIB


class Shortage(Struct, frozen=True):
    """``left`` and ``needed`` of ``what``, in words, below the limit that ``limit`` names; ``fix`` raises it."""

    what: str
    left: int
    needed: int
    limit: str
    fix: str
    in_bytes: bool = False


def shortage(facts: LimitFacts, need: Need, pid: int, jobs: int = 1) -> Shortage | None:
    """The first limit below which a job with these facts has less than it needs; None where it has enough of all that
    is known. So many ``jobs`` are recorded at once, and share what a user, a control group or a disk has. Pure."""
    limits, for_job = facts.limits, f"Raise the job's limit: prlimit --pid {pid}"
    shortages: list[Shortage] = []
    processes = limits.get(job_limits.PROCESSES)
    if processes is not None and facts.user_threads is not None:
        shortages.append(Shortage(
            "threads", processes - facts.user_threads, jobs * need.threads,
            f"ulimit -u is {processes:,}, and user {facts.user} has {facts.user_threads:,} threads on this node",
            f"{for_job} --nproc={facts.user_threads + 2 * jobs * need.threads}: (as root above the hard limit), or "
            "stop some of that user's other programs"))
    for path, most, now in facts.groups:
        raised = f"echo {now + 2 * jobs * need.threads} > {path}/pids.max"
        shortages.append(Shortage("threads", most - now, jobs * need.threads,
                              f"pids.max of {path} is {most:,}, and the group holds {counted(now, 'thread')}",
                              f"Raise the limit as root: {raised} (Docker: --pids-limit)"))
    stacks_bytes = need.threads * min(limits.get(job_limits.STACK, _USUAL_STACK_BYTES), _USUAL_STACK_BYTES)
    for name, used, option, what in (
            (job_limits.ADDRESS_SPACE, facts.size_bytes, "as", "address space (ulimit -v)"),
            (job_limits.DATA, facts.data_bytes, "data", "data size (ulimit -d)")):
        most_bytes = limits.get(name)
        if most_bytes is not None and used is not None:
            shortages.append(Shortage(what, most_bytes - used, need.bytes + stacks_bytes,
                                  f"the limit is {size(most_bytes)}, and the job uses {size(used)}",
                                  f"{for_job} --{option}=unlimited: (as root above the hard limit)", in_bytes=True))
    files = limits.get(job_limits.FILES)
    if files is not None and facts.files is not None:
        shortages.append(Shortage("file descriptors", files - facts.files, need.files,
                              f"ulimit -n is {files:,}, and {facts.files:,} files are open",
                              f"{for_job} --nofile={facts.files + 2 * need.files}: (as root above the hard limit)"))
    if (file_bytes := limits.get(job_limits.FILE_SIZE)) is not None and facts.folder:
        shortages.append(Shortage("bytes in a file (ulimit -f)", file_bytes, _LEAST_TRACE_BYTES,
                              "the job cannot write larger files", f"{for_job} --fsize=unlimited:", in_bytes=True))
    if facts.disk_bytes is not None:
        shortages.append(Shortage(f"disk space in {facts.folder}", facts.disk_bytes, jobs * _LEAST_TRACE_BYTES,
                              "the job writes its trace there", "Make room there", in_bytes=True))
    return next((one for one in shortages if one.left < one.needed), None)


def check_limits(pid: int | None, proc: Path = Path("/proc"), jobs: int = 1) -> None:
    """Raises GputopError where a job on this machine has too little left for a capture of so many jobs at once; where
    that cannot be known, nothing. Reads only what the kernel says of it."""
    if pid is None:
        return
    try:
        loaded = loaded_frameworks(read_maps(pid, proc))
    except OSError:
        return
    framework = next((name for name in ("jax", "tensorflow", "pytorch") if name in loaded), None)
    if framework is None:
        return
    writes_to = Path("/tmp") if framework == "pytorch" else None
    facts = read_limits(pid, writes_to, proc)
    short = shortage(facts, need_of(framework, os.cpu_count() or 1, facts.threads), pid, jobs)
    if short is None:
        return
    left, needed = (map(size, (max(0, short.left), short.needed)) if short.in_bytes
                    else (f"{max(0, short.left):,}", str(short.needed)))
    raise GputopError(
        f"recording {LABELS[framework]} may need {needed} {short.what}, and process {pid} has {left} left: "
        f"{short.limit}. At its limit, the job could crash or hang, so gputop did not touch it",
        f"{short.fix}; or start the job with higher limits.")
