"""Traffic of a GPU on NVLink and PCIe where GPM does not give it, and the capacity of its PCIe link.

Mostly from pairs of counters that only ever count up. For PCIe there are two methods, the better one first: byte
counters (field values 197 and 198), else the call that measures the link for 20 ms per direction and blocks meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gputop.core.metrics import BYTES_PER_S
from gputop.core.samples import Reading
from gputop.sources.nvml import status
from gputop.sources.nvml.fields import FieldValues

SOURCE = "NVML counter"
PERIOD_S = 0.9  # 0.2 to 0.45 ms a call
_FIRST = "first counter value: a rate needs two values"
_ALL_LINKS = 0xFFFFFFFF  # as the scope: the sum over all NVLinks
_KIB = 1024

# NVML_FI_DEV_PCIE_COUNT_TX_BYTES and …_RX_BYTES; NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX and …_RX.
PCIE_FIELDS = ((197, 0), (198, 0))
NVLINK_FIELDS = ((138, _ALL_LINKS), (139, _ALL_LINKS))
NVLINK_MAX_BYTES_PER_S = 2e12  # one direction; NVLink 5 has 0.9e12
NVLINK_METRICS = ("nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s")
_NVLINK_CALL = "field values 138/139"


class CounterPair:
    """The rates of two counters that are read together: sent and received. Used by one thread.

    ``max_bytes_per_s`` is the capacity of the link in one direction: it distinguishes a wrapped counter, a restarted
    one and garbage.
    """

    def __init__(self, nvml: Any, handle: Any, clock: Callable[[], float], fields: Sequence[tuple[int, int]],
                 metrics: Sequence[str], max_bytes_per_s: float, unit_bytes: int = 1) -> None:
        self._values = FieldValues(nvml, handle, *fields)
        self._clock = clock
        self._metrics = metrics
        self._max = max_bytes_per_s
        self._unit_bytes = unit_bytes
        self._previous: tuple[float, list[int]] | None = None
        self._last: dict[str, Reading] = {}
        self._due_s = clock()
        self._bits = 64

    def read(self) -> dict[str, Reading] | None:
        """The rates since the value before, every ``PERIOD_S``; None if the counters wrap too fast for a rate.

        Counters of 32 bits are read at every tick, so that they wrap as rarely as possible.
        Raises NVMLError where the driver gives no counters.
        """
        now_s = self._clock()
        if now_s < self._due_s and self._last:
            return self._last
        counts = [int(value) for value in self._values.read()]
        previous, self._previous = self._previous, (now_s, counts)
        wrong = next((count for count in counts if count >= status.MAX_COUNTER or count == 0xFFFFFFFF), None)
        if wrong is not None:
            self._previous = None
            return self._without(f"the driver reported an impossible count of {wrong}")
        if self._values.are_32_bits:
            self._bits = 32
        if previous is None:
            return self._without(_FIRST)
        elapsed_s = now_s - previous[0]
        if elapsed_s <= 0:
            return self._without("no time has passed since the previous value")
        if any(count < before < 1 << 32 for count, before in zip(counts, previous[1], strict=True)):
            # It went back without ever exceeding 32 bits: the hardware's counter has 32 bits,
            # whatever the type of the value.
            self._bits = 32
        if self._bits == 64:
            self._due_s = now_s + PERIOD_S
        elif self._max * elapsed_s >= self._unit_bytes << 32:
            return None
        self._last = {metric: self._rate(count, before, elapsed_s)
                      for metric, count, before in zip(self._metrics, counts, previous[1], strict=True)}
        return self._last

    def _rate(self, count: int, before: int, elapsed_s: float) -> Reading:
        rate = (count - before) % (1 << self._bits) * self._unit_bytes / elapsed_s
        # A restarted counter looks like a wrapped one; the capacity of the link tells them apart. The limit is
        # twice the capacity, because the driver refreshes some counters only now and then.
        too_fast = rate > 2 * self._max
        if count < before and (self._bits == 64 or too_fast):
            return Reading.missing(BYTES_PER_S, "the counter was restarted", SOURCE)
        if too_fast:
            return Reading.missing(BYTES_PER_S, status.implausible_text(rate, BYTES_PER_S), SOURCE)
        return Reading(rate, BYTES_PER_S, SOURCE)

    def _without(self, reason: str) -> dict[str, Reading]:
        self._last = _missing(self._metrics, reason, SOURCE)
        return self._last


def _missing(metrics: Iterable[str], reason: str, source: str | None = None) -> dict[str, Reading]:
    return dict.fromkeys(metrics, Reading.missing(BYTES_PER_S, reason, source))


class NvlinkTraffic:
    """NVLink rates of a GPU where GPM does not give them. Used by one thread."""

    def __init__(self, nvml: Any, handle: Any, clock: Callable[[], float], before: str, mig: bool = False) -> None:
        """``before`` is why GPM does not give them."""
        self._nvml = nvml
        self._handle = handle
        self._clock = clock
        self._mig = mig
        self._why_not = before
        self._pair: CounterPair | None = None
        self._refused: dict[str, Reading] | None = None

    def read(self) -> dict[str, Reading]:
        """RX and TX, or why not. Raises NVMLError only if the device is gone."""
        if self._refused is not None:
            return self._refused
        nvml = self._nvml
        try:
            if self._pair is None:
                self._pair = CounterPair(
                    nvml, self._handle, self._clock, NVLINK_FIELDS, NVLINK_METRICS, NVLINK_MAX_BYTES_PER_S, _KIB)
            readings = self._pair.read()
            reason = "the NVLink counters have 32 bits and can wrap between two samples"
        except nvml.NVMLError as error:
            status.raise_if_gone(error)
            reason = status.reason(error.value, _NVLINK_CALL, self._mig)
            if error.value not in status.FIELD_VALUE_REFUSED:
                return _missing(NVLINK_METRICS, reason, SOURCE)
            readings = None
        if readings is None:
            readings = self._refused = _missing(NVLINK_METRICS, f"{self._why_not}; {reason}")
        return readings


# -- PCIe -------------------------------------------------------------------------------------------

_PCIE_METRICS = ("pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s")  # from the GPU to the host, and to the GPU

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

    Headers and flow control take about 10 to 20% of it, so no transfer reaches it. None for an unknown generation.
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
        self._counters: CounterPair | None = None
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
                    return _missing(_PCIE_METRICS, reason, "")
                self._why_not.append(reason)
            else:
                if readings is not None:
                    self._worked = True
                    return readings
            del self._methods[0]
        return _missing(_PCIE_METRICS, "; ".join(self._why_not), "")

    def _by_counter(self) -> dict[str, Reading] | None:
        """Rates from the byte counters; None if they wrap too fast for a rate."""
        if self._counters is None:
            self._counters = CounterPair(
                self._nvml, self._handle, self._clock, PCIE_FIELDS, _PCIE_METRICS, self._link_max)
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
            return _missing(_PCIE_METRICS, _NOT_MEASURED_YET, WINDOW)
        if now_s >= self._window_due_s:
            self._window_due_s = now_s + WINDOW_PERIOD_S
            self._window = _missing(_PCIE_METRICS, "not measured", WINDOW)
            nvml = self._nvml
            counters = nvml.NVML_PCIE_UTIL_TX_BYTES, nvml.NVML_PCIE_UTIL_RX_BYTES
            for metric, counter in zip(_PCIE_METRICS, counters, strict=True):
                rate = nvml.nvmlDeviceGetPcieThroughput(self._handle, counter) * 1000.0
                self._window[metric] = Reading(rate, BYTES_PER_S, WINDOW, coarse=True) if rate <= self._link_max else (
                    Reading.missing(BYTES_PER_S, status.implausible_text(rate, BYTES_PER_S), WINDOW))
        return self._window
