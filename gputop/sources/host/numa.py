"""NUMA nodes that a process is bound to, by the CPUs that it may use."""

from __future__ import annotations

import os
import re
from pathlib import Path

from gputop.sources.host import proc_files

_NODE = re.compile(r"node(\d{1,4})")
_MAX_CPU = 65_536  # far above NR_CPUS of any kernel


def parse_cpus(text: str) -> frozenset[int]:
    """The CPUs of a list such as "0-3,8"; empty where it is malformed (cpuset(7), List Format)."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(part) > 16:
            return frozenset()
        begin, end = int(first), int(last or first)
        if not begin <= end < _MAX_CPU:
            return frozenset()
        cpus.update(range(begin, end + 1))
    return frozenset(cpus)


def cpus_by_node(root: Path = Path("/")) -> dict[int, frozenset[int]]:
    """The CPUs of each NUMA node that has any; empty where the kernel does not tell."""
    top = f"{root}/sys/devices/system/node"
    cpus_of: dict[int, frozenset[int]] = {}
    try:
        for name in os.listdir(top):  # noqa: PTH208
            node = _NODE.fullmatch(name)
            if node and (cpus := parse_cpus(proc_files.read(f"{top}/{name}/cpulist").decode("ascii", "replace"))):
                cpus_of[int(node[1])] = cpus
    except OSError:
        return {}
    return cpus_of


def bound_to(allowed: frozenset[int], nodes: dict[int, frozenset[int]]) -> tuple[int, ...]:
    """The nodes that have all CPUs a process may use; empty where it may use some of each node."""
    held = sorted(node for node, cpus in nodes.items() if cpus & allowed)
    return tuple(held) if len(held) < len(nodes) else ()
