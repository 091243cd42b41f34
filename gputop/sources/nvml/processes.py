"""The processes that hold one GPU, as NVML lists them. PIDs are the host's."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

from gputop.core.metrics import BYTES, RATIO
from gputop.core.samples import GpuProcess, Reading
from gputop.sources.nvml import status

LIST_PERIOD_S = 1.9  # 0.3 ms a call; a little under two ticks of 1 s, so that jitter does not make it three
SHARE_PERIOD_S = 2.9  # 1.7 ms a call
_NOT_AVAILABLE = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE
_SHARE_CALL = "nvmlDeviceGetProcessUtilization"
_MAX_CAPACITY = 4096  # more processes than a GPU can serve: a driver that asks for more capacity is sick
_CLOCK_ERROR_S = 60.0  # the driver's time stamps may be ahead of ours by this much
_GOLDEN_RATIO = 0.6180339887498949  # multiples of it, modulo 1, spread evenly
_NO_MEMORY = Reading.missing(BYTES, "the driver does not report this value for the process", "NVML")
_NO_NEW_SHARE = Reading.missing(RATIO, "the driver has no new value for the process", "NVML")
_NOT_ASKED = Reading.missing(RATIO, "not sampled yet", "NVML")

# PID and bytes of nvmlProcessInfo_t, of the calls that end in _v3 and _v2 (R450 and newer) and of the plain call, the
# only one of older drivers; PID, time stamp (us) and percent of the SMs of nvmlProcessUtilizationSample_t.
_INFO, _INFO_V1, _SHARE = struct.Struct("=I4xQ8x"), struct.Struct("=I4xQ"), struct.Struct("=I4xQI12x")
_VERSIONS = (("_v3", _INFO), ("_v2", _INFO), ("", _INFO_V1))


class _ImplausibleList(ValueError):
    """The driver returned an implausible list."""


class ProcessReader:
    """Lists the processes of one GPU and their share of its SMs. Used by one thread."""

    def __init__(self, nvml: Any, handle: Any, clock: Callable[[], float], wall_clock: Callable[[], float],
                 phase: int = 0, mig: int | None = None) -> None:
        """``phase`` differs between GPUs, so that their lists are read at different ticks. ``mig``: the number of the
        MIG instance that ``handle`` is of."""
        self._nvml = nvml
        self._handle = handle
        self._mig = mig
        self._clock = clock
        self._list_due_s = self._share_due_s = clock()
        self._shift = phase * _GOLDEN_RATIO % 0.5  # how much of a period the first one is shorter
        self._wall_clock = wall_clock
        # Asking from time 0 returns stale samples of processes long gone.
        self._share_seen_us = int((wall_clock() - SHARE_PERIOD_S) * 1e6)
        self._share_refused: Reading | None = None
        self._default_share = _NOT_ASKED
        self._shares: dict[int, Reading] = {}
        # nvidia-ml-py knows only the newest symbol, and makes two calls where one is enough.
        self._versions = {kind: [(f"nvmlDeviceGet{kind}RunningProcesses{version}", structure)
                                 for version, structure in _VERSIONS] for kind in ("Compute", "Graphics")}
        self._capacity = 32
        self._refused: dict[str, str] = {}
        self._processes: tuple[GpuProcess, ...] = ()
        self._reason: str | None = None

    def read(self) -> tuple[tuple[GpuProcess, ...], str | None]:
        """The processes, and why they cannot be listed (else None). Raises NVMLError if the device is gone.

        Between the periods the last list is returned.
        """
        now_s = self._clock()
        if now_s < self._list_due_s:
            return self._processes, self._reason
        self._list_due_s = now_s + LIST_PERIOD_S * (1.0 - self._shift)
        self._shift = 0.0
        held: dict[int, tuple[str, int | None]] = {}
        self._reason = None
        for kind, letter in (("Compute", "C"), ("Graphics", "G")):
            for pid, used in self._list(kind):
                before = held.get(pid)
                # A process in both lists is reported with the same memory in each.
                held[pid] = (letter, used) if before is None else (f"{before[0]}+{letter}", before[1] or used)
        if held and now_s >= self._share_due_s:
            self._share_due_s = now_s + SHARE_PERIOD_S
            self._read_shares()
        self._processes = tuple(
            GpuProcess(pid, kind, self._mig, _memory(used), self._shares.get(pid, self._default_share))
            for pid, (kind, used) in held.items())
        return self._processes, self._reason

    def _list(self, kind: str) -> list[tuple[int, int | None]]:
        """(PID, bytes) of one kind. Compute-only GPUs may refuse the graphics list: not an error."""
        nvml = self._nvml
        versions = self._versions[kind]
        reason = self._refused.get(kind)
        while reason is None:
            try:
                return self._call(*versions[0])
            except _ImplausibleList as error:
                reason = str(error)
            except nvml.NVMLError as error:
                code = status.raise_if_gone(error)
                if code == status.FUNCTION_NOT_FOUND and len(versions) > 1:
                    del versions[0]
                    continue
                reason = status.reason(code, f"nvmlDeviceGet{kind}RunningProcesses")
                if code in status.REFUSED:
                    self._refused[kind] = reason
        if kind == "Compute":
            self._reason = reason
        return []

    def _call(self, symbol: str, structure: struct.Struct) -> list[tuple[int, int | None]]:
        entries = self._fetch_list(symbol, structure)
        wrong = next((pid for pid, _ in entries if not 0 < pid <= status.MAX_PID), None)
        if wrong is not None:
            raise _ImplausibleList(f"the driver listed an impossible process {wrong} ({symbol})")
        return [(pid, None if used == _NOT_AVAILABLE else used) for pid, used in entries]

    def _fetch_list(self, symbol: str, structure: struct.Struct, *args: Any) -> list[Any]:
        """The list of ``structure`` that the driver fills; one call where the capacity is sufficient."""
        nvml = self._nvml
        function = nvml._nvmlGetFunctionPointer(symbol)
        while True:
            capacity = self._capacity
            count = ctypes.c_uint(capacity)
            entries = (ctypes.c_char * (structure.size * capacity))()
            # The list precedes its length where there is a third argument, otherwise it follows it.
            order = (entries, ctypes.byref(count)) if args else (ctypes.byref(count), entries)
            code = function(self._handle, *order, *args)
            if code not in (status.SUCCESS, status.INSUFFICIENT_SIZE):
                raise nvml.NVMLError(code)
            enough = code == status.SUCCESS
            if count.value > (capacity if enough else _MAX_CAPACITY) or (not enough and count.value <= capacity):
                raise _ImplausibleList(f"the driver returned {count.value} as the list length ({symbol})")
            if enough:
                return list(structure.iter_unpack(entries.raw[:structure.size * count.value]))
            self._capacity = count.value + 16  # some may start meanwhile

    def _read_shares(self) -> None:
        """SM share by PID, of the driver's samples since the last read."""
        if self._share_refused is not None:
            return
        nvml = self._nvml
        self._shares = {}
        try:
            samples = self._fetch_list(_SHARE_CALL, _SHARE, ctypes.c_ulonglong(self._share_seen_us))
        except nvml.NVMLError as error:
            code = status.raise_if_gone(error)
            if code != status.NOT_FOUND:  # that one says that there is nothing new
                missing = Reading.missing(RATIO, status.reason(code, _SHARE_CALL), "NVML")
                if code in status.REFUSED:
                    self._share_refused = missing
                self._default_share = missing
                return
            samples = []
        except _ImplausibleList as error:
            self._default_share = Reading.missing(RATIO, str(error), "NVML")
            return
        self._default_share = _NO_NEW_SHARE
        newest: dict[int, int] = {}
        latest_us = int((self._wall_clock() + _CLOCK_ERROR_S) * 1e6)
        for pid, stamp, percent in samples:
            # Drivers have been seen to return garbage of several thousand percent.
            if newest.get(pid, 0) <= stamp <= latest_us and percent <= 100:
                self._share_seen_us = max(self._share_seen_us, stamp)
                newest[pid] = stamp
                self._shares[pid] = Reading(percent / 100, RATIO, "NVML")


def _memory(used: int | None) -> Reading:
    return _NO_MEMORY if used is None else status.plausible_reading("memory_used_bytes", float(used), "NVML")
