"""The processes that hold GPUs, as the host sees them: user, command, container, CPU and I/O with their workers."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from gputop.core.framework import framework_of
from gputop.core.metrics import BYTES, COUNT
from gputop.core.proc import (
    FIRST_PID_NAMESPACE,
    MAPS_BYTES,
    boot_time_s,
    children_by_parent,
    pid_namespace,
    process_ids,
    read_or_empty,
    user_name,
    with_descendants,
)
from gputop.core.samples import ENDED, ZOMBIE, GpuInfo, GpuProcess, GpuSample, ProcessSample, Reading
from gputop.sources.host import cpu, proc_files
from gputop.sources.host.cgroups import Cgroups
from gputop.sources.host.containers import PodContainers, container_of
from gputop.sources.host.proc_files import DENIED, UNPARSABLE, Stat
from gputop.sources.host.process_table import (
    MAX_COST,
    Counts,
    Family,
    FamilyRates,
    Member,
    ProcessTable,
    Rates,
    no_rates,
)
from gputop.sources.host.process_table import PERIOD_S as TABLE_PERIOD_S
from gputop.text.units import printable

SOURCE = "/proc"
UPDATE_PERIOD_S = 0.9  # the kernel counts CPU in ticks of 10 ms; a little under 1 s, because ticks jitter
HIDDEN = "not visible to this user (/proc is mounted with hidepid): run as root"
OTHER_NAMESPACE = "not in this PID namespace: run on the host or with --pid=host"
OTHER_USERS = ("the process with this PID is another user's and may not be the one that the driver reports: run as "
               "root")
MATCHED = "the driver reports PID {}; matched because only this process here maps /dev/nvidia{}"
NO_PID = "the driver does not report a PID for this process"
# At which scans of the process table a process's maps, of megabytes, are read for its framework: after 0, 5, 15,
# 35, 75 and 155 s. A program imports one after the other, and may do so late.
_FRAMEWORK_SCANS = frozenset({1, 2, 4, 8, 16, 32})


class _Known(Struct):
    """A process met before. ``local`` is its PID in this /proc."""

    local: int
    start: int
    identified: bool = False  # the fields below have been read
    note: str | None = None
    user: str | None = None
    command: str | None = None
    reason: str | None = None
    container: str | None = None
    container_pid: int | None = None
    cuda_visible_devices: str | None = None
    cuda_device_order: str | None = None
    reasons: dict[str, str] = field(default_factory=dict)
    children: tuple[int, ...] = ()
    groups: bytes | None = None  # its /proc/PID/cgroup
    numa_nodes: tuple[int, ...] = ()
    framework: str = ""
    scans: int = 0  # of the process table since it runs this program


class GpuProcessTable:
    """Joins PIDs of NVML with the host's processes. Used by one thread."""

    def __init__(self, clock: Callable[[], float], proc: Path = Path("/proc"), *,
                 read: Callable[[str, int], bytes] = proc_files.read,
                 cpu_clock: Callable[[], float] = time.thread_time) -> None:
        """``cpu_clock`` returns the CPU time of the calling thread in seconds; ``read`` is :func:`proc_files.read`."""
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._proc = proc
        self._read = read
        self._known: dict[int, _Known] = {}  # by the driver's PID
        self.node = ProcessTable(clock, proc, read=read, cpu_clock=cpu_clock)
        self.cgroups = Cgroups(clock, proc.parent)
        self._pods = PodContainers(clock, proc.parent)
        self._ticks_per_s = os.sysconf("SC_CLK_TCK")
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._rates = FamilyRates(self._ticks_per_s)
        self._boot_s = boot_time_s(proc)
        self._cpus_by_node = cpu.cpus_by_node(proc.parent)
        self._due_s = self._table_due_s = clock()
        self._last: dict[int, ProcessSample] = {}
        try:
            self._nested = pid_namespace(proc) != FIRST_PID_NAMESPACE
        except OSError:
            self._nested = False  # not known: take the PIDs as they are

    @property
    def follows(self) -> bool:
        """Return whether it follows any process, and so scans the whole process table itself."""
        return bool(self._known)

    def read(self, gpus: Sequence[GpuSample], watched: Iterable[int] = ()) -> tuple[ProcessSample, ...]:
        """One entry per PID that any of ``gpus`` lists, in the order of the first GPU it holds; then the ``watched``.

        CPU is in cores and counts the process with all its descendants, as does I/O: a training job's input pipeline
        often runs in worker processes. A descendant that holds a GPU itself has its own entry and is not counted twice.
        Between the periods the last samples are joined with what the GPUs list now.
        """
        held = holders(gpus)
        for pid in watched:
            held.setdefault(pid, {})
        now_s = self._clock()
        if held.keys() == self._last.keys() and now_s < self._due_s:
            for pid, on_gpus in held.items():
                if self._last[pid].gpus != on_gpus:
                    self._last[pid] = replace(self._last[pid], gpus=on_gpus)
        else:
            began_s = self._cpu_clock()
            self._last, table_cost_s = self._update(now_s, held, gpus)
            cost_s = self._cpu_clock() - began_s - table_cost_s
            self._due_s = now_s + max(UPDATE_PERIOD_S, cost_s / MAX_COST)
        return tuple([self._last[pid] for pid in held])

    def _update(self, now_s: float, held: dict[int, dict[int, GpuProcess]],
              gpus: Sequence[GpuSample]) -> tuple[dict[int, ProcessSample], float]:
        """The samples by PID, and the CPU time of the process table's scan in seconds."""
        stats: dict[int, Stat] = {}
        absent: dict[int, str] = {}
        table_due = now_s >= self._table_due_s
        for pid, on_gpus in held.items():
            stat = self._find(pid, from_driver=bool(on_gpus))
            if isinstance(stat, str):
                absent[pid] = stat
            else:
                stats[pid] = stat
        if self._nested and absent and (table_due or held.keys() != self._last.keys()):
            unsure = [pid for pid in absent if absent[pid] in (OTHER_NAMESPACE, OTHER_USERS)]
            stats.update(self._match_by_device(unsure, held, gpus))
        for pid in self._known.keys() - stats.keys():
            del self._known[pid]
        table_cost_s = 0.0
        if self._known and (table_due or not all(record.identified for record in self._known.values())):
            began_s = self._cpu_clock()
            self._scan_table(stats)
            table_cost_s = self._cpu_clock() - began_s
            self._table_due_s = now_s + max(TABLE_PERIOD_S, table_cost_s / MAX_COST)
        families = {pid: self._family(record, stats[pid]) for pid, record in self._known.items()}
        rates = self._rates.update(now_s, families, self._is_alive)
        return {
            pid: self._sample(pid, on_gpus, stats[pid], rates[pid]) if pid in stats
            else missing_process(pid, on_gpus, absent[pid], self._last.get(pid))
            for pid, on_gpus in held.items()
        }, table_cost_s

    def _sample(self, pid: int, on_gpus: dict[int, GpuProcess], stat: Stat, rates: Rates) -> ProcessSample:
        record = self._known[pid]
        return ProcessSample(
            pid, record.user, record.command, rates.cpu_cores,
            Reading(float(stat.rss_pages * self._page_bytes), BYTES, SOURCE),
            threads=stat.threads, gpus=on_gpus, reason=record.reason, parent_pid=stat.parent,
            started_s=None if self._boot_s is None else self._boot_s + stat.start / self._ticks_per_s,
            local_pid=record.local if record.local != pid else None,
            container=record.container, cuda_visible_devices=record.cuda_visible_devices,
            io_read_bytes_per_s=rates.io_read_bytes_per_s, io_write_bytes_per_s=rates.io_write_bytes_per_s,
            container_pid=record.container_pid, note=record.note, reasons=dict(record.reasons),
            cuda_device_order=record.cuda_device_order,
            cgroup=None if record.groups is None else self.cgroups.read(record.groups), numa_nodes=record.numa_nodes,
            framework=record.framework, kubernetes=None if record.groups is None else self._pods.read(record.groups))

    # -- which process is meant ------------------------------------------------------------

    def _find(self, pid: int, *, from_driver: bool) -> Stat | str:
        """The process that the driver, or else this /proc, calls ``pid``, or why it is not visible. A new one becomes
        known."""
        if pid == 0:
            return NO_PID
        record = self._known.get(pid)
        stat = self.node.stat(pid if record is None else record.local)
        if record is None or not isinstance(stat, Stat) or stat.start != record.start:  # new, gone, or another one
            self._known.pop(pid, None)
            if record is not None and record.local != pid:
                return OTHER_NAMESPACE
            if self._nested and from_driver:
                # NVML's PIDs may be the host's: here the same number can belong to a process without a GPU.
                doubt = OTHER_NAMESPACE if isinstance(stat, str) else self._identity_doubt(pid)
                if doubt is not None:
                    return doubt
            if isinstance(stat, str):
                return self._why_absent(pid, stat)
            self._known[pid] = _Known(pid, stat.start)
        if isinstance(stat, Stat) and stat.state in "ZX":
            return ZOMBIE
        return stat

    def _identity_doubt(self, pid: int) -> str | None:
        """Reason why the process with this PID in this namespace may not be the one that the driver means."""
        try:
            return None if opens_gpu(self._proc, pid) else OTHER_NAMESPACE
        except PermissionError:
            return OTHER_USERS
        except OSError:
            return OTHER_NAMESPACE

    def _match_by_device(self, pids: Sequence[int], held: dict[int, dict[int, GpuProcess]],
               gpus: Sequence[GpuSample]) -> dict[int, Stat]:
        """Find PIDs of the host among the processes of this namespace by the devices they have mapped."""
        minors = device_minors(self._proc, [gpu.info for gpu in gpus])
        listed = {pid: {minors[index] for index in held[pid]} for pid in pids if held[pid].keys() <= minors.keys()}
        if len(listed) != len(pids) or not listed:
            return {}  # a process whose devices are not known may be on any device
        taken = {record.local for record in self._known.values()} | {os.getpid()}
        watched = set(minors.values())
        mapped = mapped_devices(self._proc, (pid for pid in process_ids(self._proc) if pid not in taken))
        mapped = {pid: devices & watched for pid, devices in mapped.items() if devices & watched}
        matched = {}
        for pid, local in match(listed, mapped).items():
            stat = self.node.stat(local)
            if isinstance(stat, Stat) and stat.state not in "ZX":
                names = ", /dev/nvidia".join(str(n) for n in sorted(listed[pid]))
                self._known[pid] = _Known(local, stat.start, note=MATCHED.format(pid, names))
                matched[pid] = stat
        return matched

    def _why_absent(self, pid: int, reason: str) -> str:
        """The reason to show where /proc/PID/stat could not be read because of ``reason``."""
        if reason not in (ENDED, DENIED):
            return reason
        try:
            os.kill(pid, 0)  # signal 0 only asks whether it exists
        except (ProcessLookupError, OverflowError):
            return ENDED
        except PermissionError:
            return HIDDEN
        return HIDDEN

    # -- who a process is --------------------------------------------------------------------

    def _read_identity(self, record: _Known, name: bytes) -> None:
        folder = f"{self._proc}/{record.local}"
        reasons = {} if self._boot_s is not None else {"started_s": "/proc/stat does not show the boot time"}
        record.reason, before, record.command = None, record.command, None
        try:
            record.command = proc_files.command(self._read(f"{folder}/cmdline", proc_files.LARGE_BYTES), name)
        except OSError as error:
            record.reason = proc_files.reason_of(error)
        try:
            status = proc_files.parse_status(self._read(f"{folder}/status", proc_files.LARGE_BYTES))
            record.user = None if status.uid is None else printable(user_name(status.uid))
            record.container_pid = status.pids[-1] if len(status.pids) > 1 else None
            record.numa_nodes = cpu.bound_to(cpu.parse_cpus(status.cpus), self._cpus_by_node)
            if record.user is None:
                reasons["user"] = UNPARSABLE
        except OSError as error:
            record.user = record.container_pid = None
            record.numa_nodes = ()
            reasons["user"] = reasons["container_pid"] = proc_files.reason_of(error)
        try:
            record.groups = self._read(f"{folder}/cgroup", proc_files.LARGE_BYTES)
            record.container = container_of(record.groups)
        except OSError as error:
            record.groups = record.container = None
            reasons["container"] = proc_files.reason_of(error)
        key = "cuda_visible_devices"
        if not record.identified or record.command != before or key in record.reasons:  # it changes with the program
            try:
                environ = self._read(f"{folder}/environ", proc_files.ENVIRON_BYTES)
                record.cuda_visible_devices = proc_files.variable(environ, b"CUDA_VISIBLE_DEVICES")
                record.cuda_device_order = proc_files.variable(environ, b"CUDA_DEVICE_ORDER")
            except OSError as error:
                record.cuda_visible_devices = record.cuda_device_order = None
                reasons[key] = proc_files.reason_of(error)
        record.scans = record.scans + 1 if record.command == before else 1  # another program
        if record.scans in _FRAMEWORK_SCANS:
            record.framework = ""
            with contextlib.suppress(OSError):
                record.framework = framework_of(self._read(f"{folder}/maps", MAPS_BYTES))
        record.reasons, record.identified = reasons, True

    # -- the process table -------------------------------------------------------------------

    def _scan_table(self, stats: dict[int, Stat]) -> None:
        """Find the descendants of every known process, and refresh their identities."""
        local_pids = {record.local for record in self._known.values()}
        children = children_by_parent(
            (pid, parent) for pid, parent in self.node.scan().items() if pid not in local_pids)
        for pid, record in self._known.items():
            record.children = tuple(with_descendants([record.local], children) - {record.local})
            self._read_identity(record, stats[pid].name)

    def _family(self, record: _Known, stat: Stat) -> Family:
        family = {(record.local, stat.start): self._counts(record.local, stat)}
        for child in record.children:
            of_child = self.node.stat(child)
            if isinstance(of_child, Stat):
                counts = self._counts(child, of_child)
                if counts.io_reason != ENDED:  # between the two calls
                    family[child, of_child.start] = counts
        return family

    def _is_alive(self, member: Member) -> bool:
        stat = self.node.stat(member[0])
        return isinstance(stat, Stat) and stat.start == member[1]

    def _counts(self, pid: int, stat: Stat) -> Counts:
        try:
            io_bytes = proc_files.parse_io(self._read(f"{self._proc}/{pid}/io", proc_files.SMALL_BYTES))
            reason = "" if io_bytes else UNPARSABLE
        except OSError as error:
            io_bytes, reason = None, proc_files.reason_of(error)
        return Counts(stat.parent, stat.cpu_ticks, io_bytes, reason)


def holders(gpus: Iterable[GpuSample]) -> dict[int, dict[int, GpuProcess]]:
    """PID → GPU index → the process there. A MIG instance knows more about it than its GPU."""
    held: dict[int, dict[int, GpuProcess]] = {}
    for gpu in gpus:
        for process in gpu.processes:
            on_gpus = held.setdefault(process.pid, {})
            if process.mig is not None or gpu.info.index not in on_gpus:
                on_gpus[gpu.info.index] = process
    return held


def missing_process(pid: int, held: dict[int, GpuProcess], reason: str,
                    before: ProcessSample | None = None) -> ProcessSample:
    """A process of which the host knows nothing, with the reason; of one that has ended, whose it was ``before``."""
    rates = no_rates(reason)
    user, command = (before.user, before.command) if before is not None and reason in (ENDED, ZOMBIE) else (None, None)
    return ProcessSample(
        pid, user, command, Reading.missing(COUNT, reason), Reading.missing(BYTES, reason), gpus=held, reason=reason,
        io_read_bytes_per_s=rates.io_read_bytes_per_s, io_write_bytes_per_s=rates.io_write_bytes_per_s,
        reasons=dict.fromkeys(
            ("user", "parent_pid", "started_s", "threads", "container", "cuda_visible_devices"), reason))


# -- the driver's PIDs and the processes of this namespace ---------------------------------------
# Newer drivers give PIDs of the caller's PID namespace (_gpuConvertPid in NVIDIA's open kernel modules); older ones
# give the host's, which a container cannot translate: NSpid in /proc/PID/status begins at the namespace of /proc. The
# devices remain: a CUDA context maps /dev/nvidiaN into its process.

# The whole path: any user can map a file of a name that ends so.
_MAPPED = re.compile(rb"^\S+ \S+ \S+ \S+ \d+ +/dev/nvidia(\d{1,4})$", re.MULTILINE)
_MINOR = re.compile(rb"^Device Minor:\s*(\d+)", re.MULTILINE)


def opens_gpu(proc: Path, pid: int) -> bool:
    """Return whether it has any /dev/nvidia* open. Raises OSError where that is not visible to this user."""
    folder = f"{proc}/{pid}/fd"
    for name in os.listdir(folder):  # noqa: PTH208  names are all that is needed
        try:
            if os.readlink(f"{folder}/{name}").startswith("/dev/nvidia"):  # noqa: PTH115  a string, not a path
                return True
        except FileNotFoundError:  # closed meanwhile
            continue
    return False


def device_minors(proc: Path, infos: Iterable[GpuInfo]) -> dict[int, int]:
    """GPU index → N of its /dev/nvidiaN, from /proc/driver/nvidia; empty where that is not shown."""
    by_address = {_address(folder.name): int(match[1]) for folder in (proc / "driver/nvidia/gpus").glob("*")
                  if (match := _MINOR.search(read_or_empty(f"{folder}/information"))) is not None}
    return {i.index: by_address[pci] for i in infos if (pci := _address(i.pci_bus_id)) and pci in by_address}


def _address(bus_id: str) -> tuple[int, ...]:
    """"00000000:1B:00.0" (NVML) and "0000:1b:00.0" (the kernel) are the same address."""
    try:
        return tuple(int(part, 16) for part in re.split("[:.]", bus_id))
    except ValueError:
        return ()


def mapped_devices(proc: Path, pids: Iterable[int]) -> dict[int, set[int]]:
    """PID → the N of each /dev/nvidiaN it has mapped; processes with none, or not visible, are left out."""
    out = {}
    for pid in pids:
        if minors := {int(n) for n in _MAPPED.findall(read_or_empty(f"{proc}/{pid}/maps", MAPS_BYTES))}:
            out[pid] = minors
    return out


def match(listed: Mapping[int, Collection[int]], mapped: Mapping[int, Collection[int]]) -> dict[int, int]:
    """The driver's PID → the PID in this namespace, for unambiguous pairs.

    ``listed`` are the unknown PIDs, each with the devices (N) it holds; ``mapped`` the unassigned processes of this
    namespace with the devices they have mapped. A pair is made where each device of either has one such PID and one
    such process. Two jobs on one device, in this or another container, are ambiguous.
    """
    pairs = {}
    for pid, devices in listed.items():
        candidates = [local for local, theirs in mapped.items() if set(theirs) & set(devices)]
        rivals = [other for other, theirs in listed.items() if other != pid and set(theirs) & set(devices)]
        if len(candidates) == 1 and not rivals and set(mapped[candidates[0]]) == set(devices):
            pairs[pid] = candidates[0]
    return pairs
