"""RDMA adapters (InfiniBand, RoCE): state, rate, traffic and retransmits of each port, from /sys/class/infiniband.

Files and units: the kernel's Documentation/ABI/stable/sysfs-class-infiniband; port_rcv_data and port_xmit_data count
words of four bytes. Each read of a counter asks the adapter itself, which may take long: all are read at most once a
period, and the period grows with what they take.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct, field

from gputop.core.proc import read_or_empty
from gputop.core.samples import AdapterSample, Reading, missing_of, reading_of
from gputop.sources.host import proc_files
from gputop.sources.host.proc_files import FIRST
from gputop.text.units import printable

SOURCE = "/sys/class/infiniband"
PERIOD_S = 0.9  # a little under 1 s, because ticks jitter
MAX_SHARE = 0.02  # share of the time for reading
REDISCOVER_S = 30.0
WENT_BACK = "a counter went backward because the adapter was reset"
FULL = "the adapter's counter has only 32 bits and has reached its maximum"
_MAX_PORTS = 64
_WORD_BYTES = 4
_FULL = 0xFFFFFFFF
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec")  # "400 Gb/sec (4X NDR)"
# What makes a sender send again: an answer that a packet is missing, and no answer in time. out_of_sequence is left
# out: with adaptive routing packets arrive so where nothing is wrong.
_RETRANSMITS = ("packet_seq_err", "local_ack_timeout_err")


class _Port(Struct):
    name: str
    folder: str
    numa_node: int | None
    counts: dict[str, tuple[float, int]] = field(default_factory=dict)  # metric -> (monotonic seconds, bytes)


class RdmaPorts:
    """Reads all ports of this node. Used by one thread."""

    def __init__(self, clock: Callable[[], float], root: Path = Path("/")) -> None:
        self._clock = clock
        self._root = root
        self._ports: dict[str, _Port] = {}
        self._find_s = self._due_s = float("-inf")
        self._last: tuple[AdapterSample, ...] = ()

    def read(self) -> tuple[AdapterSample, ...]:
        """One sample of each port, by name; within a period the last ones again."""
        now_s = self._clock()
        if now_s < self._due_s:
            return self._last
        if now_s >= self._find_s:
            self._find_s = now_s + REDISCOVER_S
            self._ports = {port.name: self._ports.get(port.name, port) for port in find_ports(self._root)}
        self._last = tuple([self._sample(port) for port in self._ports.values()])
        took_s = self._clock() - now_s
        self._due_s = now_s + max(PERIOD_S, took_s / MAX_SHARE)
        return self._last

    def _sample(self, port: _Port) -> AdapterSample:
        state = _text(f"{port.folder}/state").rpartition(": ")[2]  # "4: ACTIVE"
        rate = _RATE.match(_text(f"{port.folder}/rate"))
        readings = {
            "rdma_max_bytes_per_s": reading_of("rdma_max_bytes_per_s", float(rate[1]) * 1e9 / 8, SOURCE) if rate else (
                missing_of("rdma_max_bytes_per_s", "the kernel does not report the rate of this port", SOURCE)),
            "rdma_rx_bytes_per_s": self._rate(port, "rdma_rx_bytes_per_s", "port_rcv_data"),
            "rdma_tx_bytes_per_s": self._rate(port, "rdma_tx_bytes_per_s", "port_xmit_data")}
        again = [_count(f"{port.folder}/hw_counters/{name}") for name in _RETRANSMITS]
        counts = [count for count in again if isinstance(count, int)]
        reasons = [reason for reason in again if isinstance(reason, str)]
        readings["rdma_retransmits"] = missing_of("rdma_retransmits", reasons[0], SOURCE) if reasons else (
            reading_of("rdma_retransmits", sum(counts), SOURCE))
        return AdapterSample(port.name, state, _text(f"{port.folder}/link_layer"), port.numa_node, readings)

    def _rate(self, port: _Port, metric: str, file: str) -> Reading:
        words = _count(f"{port.folder}/counters/{file}")
        now_s = self._clock()
        if isinstance(words, str) or words == _FULL:
            port.counts.pop(metric, None)
            return missing_of(metric, FULL if words == _FULL else str(words), SOURCE)
        before, port.counts[metric] = port.counts.get(metric), (now_s, words)
        if before is None:
            return missing_of(metric, FIRST, SOURCE)
        if words < before[1] or now_s <= before[0]:
            return missing_of(metric, WENT_BACK, SOURCE)
        return reading_of(metric, (words - before[1]) * _WORD_BYTES / (now_s - before[0]), SOURCE)


def find_ports(root: Path = Path("/")) -> list[_Port]:
    """The ports that the kernel lists, by adapter and number; none without RDMA."""
    top = f"{root}/sys/class/infiniband"
    ports = []
    for adapter in sorted(_names(top), key=lambda name: (len(name), name)):  # mlx5_2 before mlx5_10
        numbers = sorted((n for n in _names(f"{top}/{adapter}/ports") if n.isdecimal()), key=int)
        node = _text(f"{top}/{adapter}/device/numa_node")
        for number in numbers:
            ports.append(_Port(adapter if len(numbers) == 1 else f"{adapter}:{number}",
                               f"{top}/{adapter}/ports/{number}", int(node) if node.isdecimal() else None))
    return ports[:_MAX_PORTS]


def _names(folder: str) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if _NAME.fullmatch(name)]  # noqa: PTH208
    except OSError:
        return []


def _text(path: str) -> str:
    return printable(read_or_empty(path)).strip()


def _count(path: str) -> int | str:
    """A counter, or why it has no value: "N/A (no PMA)" stands in the file of an adapter without counters."""
    try:
        text = printable(proc_files.read(path, 64)).strip()
    except OSError as error:
        return f"the kernel does not report {path.rpartition('/')[2]} for this port: {error.strerror or error}"
    return int(text) if text.isascii() and text.isdecimal() else (f"the adapter does not count this: {text or 'empty'}")
