"""Matches the driver's PIDs with processes of this namespace by the devices they have mapped.

Newer drivers give PIDs of the caller's PID namespace (``_gpuConvertPid`` in NVIDIA's open
kernel modules); older ones give the host's, which a container cannot translate: NSpid in
/proc/PID/status begins at the namespace of /proc. The devices remain: a CUDA context maps
/dev/nvidiaN into its process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from gputop.core.proc import read_maps
from gputop.core.samples import GpuInfo

# The whole path: any user can map a file of a name that ends so.
_MAPPED = re.compile(rb"^\S+ \S+ \S+ \S+ \d+ +/dev/nvidia(\d{1,4})$", re.MULTILINE)
_MINOR = re.compile(r"^Device Minor:\s*(\d+)", re.MULTILINE)


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
    by_address: dict[tuple[int, ...], int] = {}
    try:
        folders = sorted((proc / "driver/nvidia/gpus").iterdir())
    except OSError:
        return {}
    for folder in folders:
        try:
            match = _MINOR.search((folder / "information").read_text("utf-8", "replace"))
        except OSError:
            continue
        if match is not None:
            by_address[_address(folder.name)] = int(match[1])
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
        try:
            minors = {int(n) for n in _MAPPED.findall(read_maps(pid, proc))}
        except OSError:
            continue
        if minors:
            out[pid] = minors
    return out


def match(listed: Mapping[int, Collection[int]], mapped: Mapping[int, Collection[int]]) -> dict[int, int]:
    """The driver's PID → the PID in this namespace, for unambiguous pairs.

    ``listed`` are the unknown PIDs, each with the devices (N) it holds; ``mapped`` the
    unassigned processes of this namespace with the devices they have mapped. A pair is made
    where each device of either has one such PID and one such process. Two jobs on one device,
    in this or another container, are ambiguous.
    """
    pairs = {}
    for pid, devices in listed.items():
        candidates = [local for local, theirs in mapped.items() if set(theirs) & set(devices)]
        rivals = [other for other, theirs in listed.items() if other != pid and set(theirs) & set(devices)]
        if len(candidates) == 1 and not rivals and set(mapped[candidates[0]]) == set(devices):
            pairs[pid] = candidates[0]
    return pairs
