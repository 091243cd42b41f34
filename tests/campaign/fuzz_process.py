"""What the campaign attacks of processes: what /proc says of them, the files and the memory of a Python that gputop
attaches to, what listens on the port of NCCL's RAS, and what a recording becomes in a report and in other formats."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path

from gputop import cli
from gputop.core.errors import GputopError
from gputop.core.framework import framework_of
from gputop.core.job_limits import read_limits
from gputop.core.own_memory import control_groups, left_in
from gputop.core.proc import environ_of, mappings
from gputop.launch import elf, remote_exec
from gputop.profiler import discovery
from gputop.profiler.capture.requirements import need_of, shortage
from gputop.profiler.discovery import Finder, TrainingProcesses
from gputop.profiler.workers import job_hosts
from gputop.ranks import nccl_ras
from gputop.ranks.processes import command_line, environment, rank_label
from gputop.rules.rule_file import read_rules
from gputop.sources.host import proc_files
from gputop.sources.host.cgroups import Cgroups
from gputop.sources.host.containers import container_of
from gputop.text import console
from tests.campaign.target import Target
from tests.launch.elf_files import symbol, with_symbols
from tests.launch.python_memory import MAIN, NEWER, RUNTIME, PythonMemory
from tests.listening import listening
from tests.records import replace

_MOST_CPU_S, _MOST_BYTES = 5.0, 100 << 20
_STAT = "7 (python) S 1 7 7 0 -1 4194304 1 0 0 0 100 50 0 0 20 0 9 0 5000 1000000 500 " + "0 " * 30
_MAPS = b"""55d0c0000000-55d0c0001000 r-xp 00000000 08:01 11                         /usr/bin/python3.11
7f0000000000-7f0000100000 r-xp 00000000 08:01 12      /opt/my env/lib/site-packages/tensorflow/libtensorflow_cc.so.2
7f0000200000-7f0000300000 r--p 00000000 08:01 13                         /usr/lib/x86_64-linux-gnu/libc.so.6
7f0000400000-7f0000500000 r-xp 00001000 08:01 14                         /opt/x/site-packages/jaxlib/_jax.so (deleted)
7f0000600000-7f0000700000 rw-p 00000000 00:00 0
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                          [stack]
7f0000800000-7f0000900000 r-xp 00000000 08:01 15                         /usr/lib/libcuda.so.580.65
"""
_ENVIRON = b"\0".join((
    b'TF_CONFIG={"cluster": {"worker": ["n1:1", "[::1]:2"], "chief": ["n3"]}, "task": {"type": "worker", "index": 1}}',
    b"RANK=3", b"SLURM_PROCID=4", b"SLURM_JOB_NODELIST=n[1-3,07],login", b"NCCL_RAS_ADDR=127.0.0.1:28028", b"A=\xff",
    b"CUDA_VISIBLE_DEVICES=GPU-1,2", b""))
_CGROUPS = (b"0::/system.slice/slurmstepd.scope/job_1234/step_0/user/task_0\n",
            b"12:cpu,cpuacct:/docker/" + b"0123456789abcdef" * 4 + b"\n5:memory:/slurm/uid_1000/job_7\n0::/\n",
            b"0::/../../kubepods.slice/kubepods-pod1.slice/cri-containerd-" + b"0123456789abcdef" * 4 + b".scope\n")
_MOUNTS = ("30 20 0:26 / {0}/cg rw,nosuid shared:9 - cgroup2 cgroup2 rw\n"
           "31 20 0:27 / {0}/cg/memory rw - cgroup cgroup rw,memory\n")


def _process(folder: Path) -> Path:
    """A /proc with a process 7."""
    proc = folder / "proc"
    shutil.rmtree(proc, ignore_errors=True)
    (proc / "7").mkdir(parents=True)
    (proc / "7" / "stat").write_text(_STAT)
    (proc / "7" / "status").write_text(f"Uid:\t{os.geteuid()}\t{os.geteuid()}\t0\t0\n")
    (proc / "7" / "cmdline").write_bytes(b"python\0train.py\0")
    return proc


def _printed(*texts: str | None) -> None:
    for text in texts:
        console.say(console.one_line(text or ""))


def _maps(folder: Path, data: bytes) -> None:
    proc = _process(folder)
    (proc / "7" / "maps").write_bytes(data)
    finder = Finder(proc)
    relevant, framework, version = finder._libraries(7)
    assert relevant == bool(discovery.is_training(7, proc))
    assert framework_of(data) in ("", "tensorflow", "jax", "pytorch")
    TrainingProcesses(proc).find()
    _printed(framework, version, finder.crash_risk([7]))


def _environ(folder: Path, data: bytes) -> None:
    proc = _process(folder)
    (proc / "7" / "environ").write_bytes(data)
    (proc / "7" / "cmdline").write_bytes(data[::-1])
    environ = environ_of(7, proc)
    found = environment(7, ("TF_CONFIG", nccl_ras.ADDRESS_VARIABLE, "RANK"), proc)
    assert all(value.isprintable() for value in found.values())
    label, command = rank_label(7, proc), command_line(7, proc)
    _printed(discovery.rank_of(environ), label, command, proc_files.command(data, data[:15]))
    _printed(nccl_ras.address_of({}, [found, environ], frozenset({"10.0.0.1"})), " ".join(job_hosts(environ)))


def _status(folder: Path, data: bytes) -> None:
    proc = _process(folder)
    for name in ("stat", "status", "io"):
        (proc / "7" / name).write_bytes(data)
    proc_files.parse_stat(data)
    proc_files.parse_io(data)
    _printed(proc_files.parse_status(data).cpus)
    discovery.effective_uid(7, proc)
    (proc / "7" / "limits").write_bytes(data)
    short = shortage(read_limits(7, proc=proc, root=folder), need_of("jax", 4, 1), 7)
    _printed(*(() if short is None else (short.limit, short.fix)))
    TrainingProcesses(proc).find()


def _cgroup(folder: Path, data: bytes) -> None:
    """The text of the groups, in a tree that has some of them, whose files say the same."""
    proc = _process(folder)
    (proc / "self").mkdir()
    for path in (proc / "7" / "cgroup", proc / "self" / "cgroup"):
        path.write_bytes(data)
    (proc / "self" / "mountinfo").write_text(_MOUNTS.format(folder))
    root = folder / "cg"
    for group in (root / "memory", root / "system.slice" / "slurmstepd.scope", root / "docker"):
        group.mkdir(parents=True, exist_ok=True)
        for name in ("cpu.max", "memory.max", "memory.current", "memory.stat", "cpu.stat", "cpuset.cpus.effective",
                     "pids.max", "pids.current"):
            (group / name).write_bytes(data)
    container = container_of(data)
    assert container is None or (container.isprintable() and len(container) < 100)
    cgroups = Cgroups(lambda: 0.0, folder)
    _printed(container, cgroups.read(data).name, *(reading.reason for reading in cgroups.read(data).readings.values()))
    cgroups.own()
    read_limits(7, proc=proc, root=root)
    for group in control_groups(7, proc, root):
        assert root in (group, *group.parents)
        left_in(group)


# -- the files and the memory of a Python that is attached to -----------------------------------------

_FUNCTIONS = ("Py_AddPendingCall", "PyRun_SimpleString")
_BASE = 4096  # of the memory in its file


def _elf(_: Path, data: bytes) -> None:
    try:
        found, segments, anywhere = elf.functions_of(io.BytesIO(data), _FUNCTIONS)
    except (OSError, ValueError) as error:  # as elf.addresses_in takes them
        raise GputopError(str(error)) from None
    assert found.keys() <= {*_FUNCTIONS} and isinstance(anywhere, bool)
    for names in (data, _MAPS):
        mapped = list(mappings(names))[:100]
        for mapping in mapped:
            elf._shift(mapped, mapping.path, segments)


def _elfs(_: Path) -> list[bytes]:
    names = b"\0" + b"\0".join(name.encode() for name in _FUNCTIONS) + b"\0"
    symbols = b"".join(symbol(names.index(name.encode()), 0x1000 + at)
                       for at, name in enumerate(_FUNCTIONS))
    return [with_symbols(symbols, names), with_symbols(symbols * 20, names, 3),
            Path(sys.executable).resolve().read_bytes()[:1 << 15]]


def _runtime(folder: Path, data: bytes) -> None:
    """A file in place of a process's memory: where _PyRuntime leads, and what is written there."""
    path = folder / "memory"
    path.write_bytes(data)
    memory = os.open(path, os.O_RDWR)
    try:
        for runtime in (_BASE, _BASE + 8, -1, 1 << 63):
            with contextlib.suppress(OSError):
                slot = remote_exec.slot_at(memory, runtime)
                if slot is not None:
                    remote_exec.request(memory, slot, Path("/tmp/x.py"))
                    remote_exec.withdraw(memory, slot)
        assert os.fstat(memory).st_size <= max(len(data), 1) + 4096
    finally:
        os.close(memory)


def _runtimes(_: Path) -> list[bytes]:
    found = []
    for version in (0x030E03F0, 0x030F01F0):
        python = PythonMemory(version)
        memory = bytearray(python.block.raw)
        for place in (RUNTIME + 1500, NEWER + 24, MAIN + 40):
            (address,) = struct.unpack_from("<Q", memory, place)
            struct.pack_into("<Q", memory, place, address - python.at + _BASE)
        found.append(bytes(_BASE) + bytes(memory))
    return found


# -- NCCL's RAS, whoever it is -------------------------------------------------------------------------


def _ras(_: Path, data: bytes) -> None:
    """A server that answers each line with the next of what it was given, and then with the rest."""
    pieces = data.split(b"\x00") if b"\x00" in data else data.split(b"\n", 3)

    def serve(own: socket.socket) -> None:
        own.settimeout(0.1)
        for piece in pieces:
            own.recv(1 << 12)
            own.sendall(piece + (b"\n" if piece is not pieces[-1] else b""))

    with listening(serve, together=False) as address:
        answer = nccl_ras.ask(address, 0.2, owners=frozenset({os.geteuid()}))
        _printed(answer.nccl, *(c.key for c in answer.communicators[:10]))


# -- recordings -------------------------------------------------------------------------------------------


def _report(folder: Path, data: bytes) -> None:
    path = folder / "node.gputop"
    path.write_bytes(data)
    choice = len(data) % 2
    out = folder / ("out.html", "out.sqlite")[choice]
    out.unlink(missing_ok=True)
    cli.main(["report", str(path), *(["--html", str(out)] if choice == 0 else ["--json"])])
    if choice:
        cli.main(["convert", str(path), "-o", str(out)])


def _toml(_: Path, data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    lines = text.split("\n")
    for problem in read_rules(text, "gputop.toml").problems:
        _printed(str(problem))
        assert 1 <= problem.place.line <= len(lines) + 1 and problem.place.column >= 1


_TOML = (b'x = [\n[          ], [ 1 ]\n]\n[ limits ]\na.b.c = "10%"\n[[ rule ]]\nid = "a"\n"on" = \'live\'\n'
         b'when = "sm_active < 0.4"\ntitle = """\n[x]\n"""\n[budget]\nstep = "step.time < 300ms"\n',)


def targets(recordings: Callable[[Path], list[bytes]], answers: Callable[[Path], list[bytes]]) -> tuple[Target, ...]:
    """``recordings`` and ``answers`` of RAS make seeds."""
    return tuple(replace(target, most_cpu_s=_MOST_CPU_S, most_bytes=_MOST_BYTES) for target in (
        Target("maps", "text", lambda _: [_MAPS], _maps),
        Target("environ", "bytes", lambda _: [_ENVIRON], _environ),
        Target("status", "text", lambda _: [
            _STAT.encode(), b"Uid:\t1\t2\t3\t4\nNSpid:\t7\t1\nCpus_allowed_list:\t0-3,8\n",
            b"Max processes             100                  unlimited            processes \n"
            b"Max address space         2097152              2097152              bytes     \n",
            b"read_bytes: 1\nwrite_bytes: 2\n"], _status),
        Target("cgroup", "text", lambda _: [*_CGROUPS, b"max 100000\n", b"0-3,8\n"], _cgroup),
        Target("elf", "bytes", _elfs, _elf),
        Target("runtime", "bytes", _runtimes, _runtime),
        Target("ras", "bytes", lambda f: [b"SERVER PROTOCOL 2\x00OK\x00OK\x00" + own for own in answers(f)], _ras, 4),
        Target("report", "recording", recordings, _report, 4),
        Target("toml", "text", lambda _: list(_TOML), _toml),
    ))
