"""PCIe traffic of a GPU without GPM, and the capacity of its link.

Two methods, the better one first: byte counters (field values 197 and 198), else the call
that measures the link for 20 ms per direction and blocks meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gputop.core.metrics import BYTES_PER_S
from gputop.core.samples import Reading
from gputop.sources.nvml import counters, status
from gputop.sources.nvml.plausibility import implausible_text

TX = "pcie_tx_bytes_per_s"  # from the GPU: device to host
RX = "pcie_rx_bytes_per_s"  # to the GPU: host to device

WINDOW = "NVML 20 ms"
WINDOW_PERIOD_S = 5.0  # it blocks about 21 ms per direction

_MAX_FAILURES = 3  # of counters that were never read, before the call is tried
_NOT_MEASURED_YET = "the measurement blocks for 40 ms, so the value follows with the next sample"

# GT/s per lane and the share of bits that is data: 8b/10b (PCIe 1 and 2), 128b/130b (3 to 5),
# FLIT with 242 of 256 bytes for the transaction layer (6). PCI Express Base Specification 6.0, sections 4.2 and 8.
_TRANSFERS_PER_S = {1: 2.5e9, 2: 5e9, 3: 8e9, 4: 16e9, 5: 32e9, 6: 64e9}
_ENCODING = {1: 8 / 10, 2: 8 / 10, 3: 128 / 130, 4: 128 / 130, 5: 128 / 130, 6: 242 / 256}

_MAX_LINK_BYTES_PER_S = 64e9 * 242 / 256 / 8 * 16  # PCIe 6.0 x16, where the maximum of the link is not known


def link_bytes_per_s(generation: int, lanes: int) -> float | None:
    """Raw rate of a link in one direction, after line coding, before packet headers.

    Headers and flow control take about 10 to 20% of it, so no transfer reaches it.
    None for an unknown generation.
    """
    transfers = _TRANSFERS_PER_S.get(generation)
    if transfers is None or lanes <= 0:
        return None
    return transfers * _ENCODING[generation] / 8 * lanes


def link_rate(generation: Reading, lanes: Reading, source: str) -> Reading:
    """The reading of :func:`link_bytes_per_s` by those of generation and lanes, or why there is none."""
    if generation.value is None or lanes.value is None:
        return Reading.missing(BYTES_PER_S, generation.reason or lanes.reason or "", source)
    rate = link_bytes_per_s(int(generation.value), int(lanes.value))
    if rate is None:
        reason = f"unknown link: PCIe generation {generation.value:.0f}, {lanes.value:.0f} lanes"
        return Reading.missing(BYTES_PER_S, reason, source)
    return Reading(rate, BYTES_PER_S, source)


class PcieTraffic:
    """PCIe rates of one GPU by the best method that it supports. Used by one thread."""

    def __init__(self, nvml: Any, handle: Any, clock: Callable[[], float], link_max_bytes_per_s: float | None) -> None:
        self._nvml = nvml
        self._handle = handle
        self._clock = clock
        self._link_max = link_max_bytes_per_s or _MAX_LINK_BYTES_PER_S
        self._methods = [self._by_counter, self._by_window]
        self._why_not: list[str] = []
        self._worked = False  # whether the counters were ever read
        self._failures = 0
        self._counters: counters.CounterPair | None = None
        self._window_due_s: float | None = None
        self._window: dict[str, Reading] = {}

    def read(self) -> dict[str, Reading]:
        """RX and TX, or why not. Raises NVMLError only if the device is gone."""
        nvml = self._nvml
        while self._methods:
            by_counter = self._methods[0] == self._by_counter
            try:
                readings = self._methods[0]()
            except nvml.NVMLError as error:
                status.raise_if_gone(error)
                call = "field values 197/198" if by_counter else "nvmlDeviceGetPcieThroughput"
                reason = status.reason(error.value, call)
                refused = error.value in (status.FIELD_VALUE_REFUSED if by_counter else status.REFUSED)
                self._failures += 1
                if not refused and (self._worked or not by_counter or self._failures < _MAX_FAILURES):
                    return _missing(reason)
                self._why_not.append(reason)
            else:
                if readings is not None:
                    self._worked = True
                    return readings
            del self._methods[0]
        return _missing("; ".join(self._why_not))

    def _by_counter(self) -> dict[str, Reading] | None:
        """Rates from the byte counters; None if they wrap too fast for a rate."""
        if self._counters is None:
            self._counters = counters.CounterPair(
                self._nvml, self._handle, self._clock, counters.PCIE_FIELDS, (TX, RX), self._link_max
            )
        readings = self._counters.read()
        if readings is None:
            self._why_not.append("the byte counters have 32 bits and can wrap between two samples at this link's speed")
        return readings

    def _by_window(self) -> dict[str, Reading]:
        """Rates of a 20 ms window, measured every few seconds.

        Coarse: it covers less than a hundredth of the time. The first call does not measure, so that
        the first frame does not wait for it.
        """
        now_s = self._clock()
        if self._window_due_s is None:
            self._window_due_s = now_s
            return _missing(_NOT_MEASURED_YET, WINDOW)
        if now_s >= self._window_due_s:
            self._window_due_s = now_s + WINDOW_PERIOD_S
            self._window = _missing("not measured", WINDOW)
            nvml = self._nvml
            for metric, counter in ((TX, nvml.NVML_PCIE_UTIL_TX_BYTES), (RX, nvml.NVML_PCIE_UTIL_RX_BYTES)):
                rate = nvml.nvmlDeviceGetPcieThroughput(self._handle, counter) * 1000.0
                self._window[metric] = (
                    Reading(rate, BYTES_PER_S, WINDOW, coarse=True)
                    if rate <= self._link_max
                    else Reading.missing(BYTES_PER_S, implausible_text(rate, BYTES_PER_S), WINDOW)
                )
        return self._window


def _missing(reason: str, source: str = "") -> dict[str, Reading]:
    reading = Reading.missing(BYTES_PER_S, reason, source)
    return {TX: reading, RX: reading}
