"""Control groups, version 1 and 2: the CPU and memory that a container or batch job is granted, and its use.

A limit holds for a group and all groups below it, so all groups from the process's own up to the one
that is mounted here are read. File names and units: the kernel's documents cgroup-v2,
cgroup-v1/memory, cgroup-v1/cpuacct and sched-bwc.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct, field

from gputop.core.metrics import BYTES, CGROUP_METRICS
from gputop.core.samples import NO_LIMIT, CgroupSample, Reading, missing_of, reading_of
from gputop.sources.host import proc_files
from gputop.sources.host.containers import container_of
from gputop.sources.host.cpu import parse_cpus
from gputop.sources.host.proc_files import FIRST
from gputop.text.units import printable

PERIOD_S = 1.9  # the kernel sums the counters of all cores for a read; a little under 2 s, as ticks jitter
LIMITS_PERIOD_S = 10.0  # a limit may change while a job runs
UNSEEN = "the process's control group is not visible here: run gputop on the host or with --cgroupns=host"
NO_QUOTA = "no CPU quota"
_UNCOUNTED = "the kernel does not track this value here"
_UNLIMITED_BYTES = 1 << 62  # version 1 says "no limit" by the largest multiple of a page
_SOURCE = "cgroup"
_FILE_BYTES = 1 << 16
_FORGET_AFTER_S = 60.0


class _Level(Struct, frozen=True):
    """One group on the way up: its path below what is mounted, and its folder."""

    path: str
    folder: str


class _Limit(Struct, frozen=True):
    value: float
    level: _Level
    file: str


class _Known(Struct):
    """The state for one text of /proc/PID/cgroup."""

    name: str
    limits_due_s: float = float("-inf")
    cpu: _Limit | None = None
    quotas: list[_Level] = field(default_factory=list)
    memory: list[_Limit] = field(default_factory=list)
    accounts: list[_Level] = field(default_factory=list)
    memories: list[_Level] = field(default_factory=list)
    used: tuple[float, _Level, float] | None = None  # monotonic seconds, whose, CPU seconds
    periods: dict[str, tuple[int, int]] = field(default_factory=dict)  # folder -> periods, throttled ones
    last: tuple[float, CgroupSample] | None = None
    asked_s: float = 0.0


class Cgroups:
    """Reads the groups that /proc/PID/cgroup names. Used by one thread."""

    def __init__(self, clock: Callable[[], float], root: Path = Path("/"), *,
                 online: Callable[[], int | None] = os.cpu_count) -> None:
        """``online`` returns the number of logical cores: a cpuset of all of them is no limit."""
        self._clock = clock
        self._root = root
        self._online = online
        self._known: dict[bytes, _Known] = {}

    def own(self) -> CgroupSample | None:
        """gputop's own groups; None where /proc does not show them."""
        try:
            return self.read(proc_files.read(f"{self._root}/proc/self/cgroup", _FILE_BYTES), is_own=True)
        except OSError:
            return None

    def read(self, cgroup: bytes, is_own: bool = False) -> CgroupSample:
        """A sample of the groups that /proc/PID/cgroup names; within a period the last one again.

        ``is_own``: they are gputop's; where their path is not visible, the mounted hierarchy is
        taken for the container's own part of it.
        """
        now_s = self._clock()
        group = self._known.get(cgroup)
        if group is None:
            group = self._known[cgroup] = _Known(_name(cgroup))
        group.asked_s = now_s
        if group.last is None or now_s - group.last[0] >= PERIOD_S:
            for text in [t for t, other in self._known.items() if now_s - other.asked_s > _FORGET_AFTER_S]:
                del self._known[text]
            group.last = now_s, CgroupSample(group.name, self._read_groups(group, cgroup, is_own, now_s))
        return group.last[1]

    def _read_groups(self, group: _Known, cgroup: bytes, is_own: bool, now_s: float) -> dict[str, Reading]:
        try:
            if now_s >= group.limits_due_s:
                group.limits_due_s = now_s + LIMITS_PERIOD_S
                self._find_limits(group, cgroup, is_own)
            if not group.accounts and not group.memories:
                return _all_missing(UNSEEN)
            return {**self._cpu(group, now_s), **_memory(group)}
        except (OSError, ValueError, ZeroDivisionError, IndexError) as error:
            group.limits_due_s = now_s  # the group may have been removed just now
            return _all_missing(f"could not read the process's control group: {printable(str(error))}")

    def _find_limits(self, group: _Known, cgroup: bytes, is_own: bool) -> None:
        mounts, paths = self._mounts(), _paths(cgroup)
        levels = {c: _levels(mounts, paths, c, is_own) for c in ("cpu", "cpuacct", "cpuset", "memory")}
        group.accounts, group.memories = levels["cpuacct"], levels["memory"]
        level_quotas = [(level, _quota(level.folder)) for level in levels["cpu"]]
        quotas = [_Limit(cores, level, file) for level, (cores, file) in level_quotas if cores is not None]
        group.quotas = [limit.level for limit in quotas]
        online = self._online()
        sets = [_Limit(cores, level, "cpuset") for level in levels["cpuset"]
                if (cores := _cpuset(level.folder)) is not None and (online is None or cores < online)]
        # Of equal limits the outermost: its usage covers all that the limit holds for.
        group.cpu = min([*reversed(quotas), *reversed(sets)], key=lambda limit: limit.value, default=None)
        group.memory = [_Limit(value, level, file) for level in levels["memory"]
                        for value, file in _memory_limits(level.folder)]

    def _mounts(self) -> dict[str, list[tuple[str, str]]]:
        """Mounts by controller: where its hierarchy is mounted, and which part of it; "" is version 2."""
        out: dict[str, list[tuple[str, str]]] = {}
        text = proc_files.read(f"{self._root}/proc/self/mountinfo", proc_files.ENVIRON_BYTES)
        for line in text.decode("utf-8", "surrogateescape").splitlines():
            # Before " - ": …, root of the mount, mount point, …; after it: type, source, options (proc(5)).
            before, _, after = line.partition(" - ")
            mount, kind = before.split(), after.split()
            if len(mount) >= 5 and len(kind) >= 3 and kind[0] in ("cgroup", "cgroup2"):
                for name in kind[2].split(",") if kind[0] == "cgroup" else [""]:
                    out.setdefault(name, []).append((f"{self._root}/{mount[4].lstrip('/')}", mount[3]))
        return out

    def _cpu(self, group: _Known, now_s: float) -> dict[str, Reading]:
        out = {"cpu_limit_cores": missing_of("cpu_limit_cores", NO_LIMIT)}
        account = group.accounts[0] if group.accounts else None
        if group.cpu is not None:
            out["cpu_limit_cores"] = reading_of("cpu_limit_cores", group.cpu.value, group.cpu.file)
            # Hierarchies of version 1 may differ: then no counter covers exactly what the limit holds for.
            account = next((level for level in group.accounts if level.path == group.cpu.level.path), None)
        seconds = None if account is None else _cpu_seconds(account.folder)
        before, group.used = group.used, None
        out["cpu_used_cores"] = missing_of("cpu_used_cores", _UNCOUNTED)
        if account is not None and seconds is not None:
            group.used = now_s, account, seconds
            # When a limit appears or disappears, the account changes: counters of two groups give no rate.
            out["cpu_used_cores"] = missing_of("cpu_used_cores", FIRST)
            if before is not None and before[1] == account and now_s > before[0] and seconds >= before[2]:
                used = (seconds - before[2]) / (now_s - before[0])
                out["cpu_used_cores"] = reading_of("cpu_used_cores", used, _SOURCE)
        out["cpu_throttled_ratio"] = _throttled(group)
        return out


def _paths(cgroup: bytes) -> dict[str, str]:
    """The path by controller; "" is version 2."""
    lines = [line.split(":", 2) for line in cgroup.decode("utf-8", "surrogateescape").split("\n")]
    return {name: fields[2] for fields in lines if len(fields) == 3 for name in fields[1].split(",")}


def _levels(mounts: dict[str, list[tuple[str, str]]], paths: dict[str, str], controller: str,
            is_own: bool) -> list[_Level]:
    """The groups that are mounted here, innermost first; none where the innermost is not mounted."""
    for name in (controller, ""):  # version 2 has the controllers that no hierarchy of version 1 took
        for point, mounted in mounts.get(name, ()) if name in paths else ():
            inner = _below(paths[name], mounted)
            if inner is None and not is_own:
                continue
            parts = inner or []
            levels = [_Level("/".join(parts[:n]), "/".join((point, *parts[:n]))) for n in range(len(parts), -1, -1)]
            if Path(levels[0].folder).is_dir():
                return levels
    return []


def _throttled(group: _Known) -> Reading:
    """The share of throttled periods since the sample before, in the group where it is largest."""
    before, group.periods = group.periods, {}
    shares = []
    for level in group.quotas:
        counts = _numbers(f"{level.folder}/cpu.stat")
        if "nr_periods" not in counts or "nr_throttled" not in counts:
            continue
        now = group.periods[level.folder] = counts["nr_periods"], counts["nr_throttled"]
        then = before.get(level.folder)
        if then is not None and now[0] >= then[0] and now[1] >= then[1]:
            # No period passes while nothing wants to run: then nothing is throttled either.
            shares.append((now[1] - then[1]) / max(1, now[0] - then[0]))
    if not shares:
        reason = NO_QUOTA if not group.quotas else FIRST if group.periods else _UNCOUNTED
        return missing_of("cpu_throttled_ratio", reason)
    return reading_of("cpu_throttled_ratio", min(1.0, max(shares)), _SOURCE)


def _memory(group: _Known) -> dict[str, Reading]:
    """The limit with the least memory left and its usage; without a limit, the usage of the innermost group."""
    used = {level: _first_number(level.folder, "memory.current", "memory.usage_in_bytes") for level in group.memories}
    limits = [limit for limit in group.memory if used.get(limit.level) is not None]
    tight = min(limits, key=lambda limit: limit.value - (used[limit.level] or 0), default=None)
    level = tight.level if tight is not None else group.memories[0] if group.memories else None
    out = {"memory_limit_bytes": missing_of("memory_limit_bytes", NO_LIMIT) if tight is None
           else reading_of("memory_limit_bytes", tight.value, tight.file)}
    total = None if level is None else used[level]
    if level is None or total is None:
        return out | {m: missing_of(m, _UNCOUNTED) for m in ("memory_used_bytes", "oom_kills")}
    stat = _numbers(f"{level.folder}/memory.stat")
    cache = stat.get("total_inactive_file", stat.get("inactive_file"))  # version 1 has both: its own, and all below
    used_bytes = float(max(0, total - (cache or 0)))
    out["memory_used_bytes"] = Reading(used_bytes, BYTES, _SOURCE, coarse=cache is None)
    events = _numbers(f"{level.folder}/memory.events") or _numbers(f"{level.folder}/memory.oom_control")
    out["oom_kills"] = (reading_of("oom_kills", events["oom_kill"], _SOURCE) if "oom_kill" in events
                        else missing_of("oom_kills", _UNCOUNTED))
    return out


def _below(path: str, mounted: str) -> list[str] | None:
    """The parts of ``path`` below ``mounted``, the mounted part of the hierarchy; None where it is outside."""
    parts, top = ([part for part in p.split("/") if part] for p in (path, mounted))
    return None if parts[:len(top)] != top or ".." in parts else parts[len(top):]


def _name(cgroup: bytes) -> str:
    """The container or job, or else the path of version 2, or of the memory controller."""
    paths = _paths(cgroup)
    path = paths.get("", "/")
    return container_of(cgroup) or printable(path if path != "/" else paths.get("memory", "/"))


def _quota(folder: str) -> tuple[float | None, str]:
    """Cores that the CPU quota of this group grants, and the file it is in; None: no limit."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        texts = [_text(f"{folder}/{name}") for name in names]
        if None not in texts:
            quota, period = " ".join(text or "" for text in texts).split()
            return (None if quota in ("max", "-1") else int(quota) / int(period)), names[0]
    return None, ""


def _cpuset(folder: str) -> int | None:
    """Number of logical cores in the cpuset of this group; None: not known."""
    text = _text(f"{folder}/cpuset.cpus.effective") or _text(f"{folder}/cpuset.effective_cpus")
    return len(parse_cpus(text or "")) or None


def _memory_limits(folder: str) -> Iterator[tuple[float, str]]:
    """Limits in bytes. Above ``memory.high`` a group is not killed but slowed down until it frees memory."""
    for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
        text = (_text(f"{folder}/{name}") or "max").strip()
        if text != "max" and int(text) < _UNLIMITED_BYTES:
            yield float(int(text)), name


def _cpu_seconds(folder: str) -> float | None:
    used_us = _numbers(f"{folder}/cpu.stat").get("usage_usec")
    used_ns = _first_number(folder, "cpuacct.usage") if used_us is None else None
    return used_us / 1e6 if used_us is not None else None if used_ns is None else used_ns / 1e9


def _first_number(folder: str, *names: str) -> int | None:
    """The number in the first of these files that exists."""
    return next((int(text) for name in names if (text := _text(f"{folder}/{name}")) is not None), None)


def _numbers(path: str) -> dict[str, int]:
    """A file of lines "name number"; empty where there is no such file."""
    words = [line.split() for line in (_text(path) or "").splitlines()]
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2}


def _text(path: str) -> str | None:
    """None where there is no such file: not every group has every controller. Raises OSError otherwise."""
    try:
        return proc_files.read(path, _FILE_BYTES).decode("ascii", "replace")
    except FileNotFoundError:
        return None


def _all_missing(reason: str) -> dict[str, Reading]:
    return {metric: missing_of(metric, reason) for metric in CGROUP_METRICS}
