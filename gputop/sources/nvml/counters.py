"""Rates from pairs of counters that only ever count up: PCIe bytes, NVLink data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gputop.core.metrics import BYTES_PER_S
from gputop.core.samples import Reading
from gputop.sources.nvml import status
from gputop.sources.nvml.fields import FieldValues
from gputop.sources.nvml.plausibility import MAX_COUNTER, implausible_text

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

    ``max_bytes_per_s`` is the capacity of the link in one direction, None where it is not known; it
    distinguishes a wrapped counter, a restarted one and garbage.
    """

    def __init__(
        self,
        nvml: Any,
        handle: Any,
        clock: Callable[[], float],
        fields: tuple[tuple[int, int], tuple[int, int]],
        metrics: tuple[str, str],
        max_bytes_per_s: float | None,
        unit_bytes: int = 1,
    ) -> None:
        self._values = FieldValues(nvml, handle, *fields)
        self._clock = clock
        self._metrics = metrics
        self._max = max_bytes_per_s
        self._unit_bytes = unit_bytes
        self._previous: tuple[float, tuple[int, int]] | None = None
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
        sent, received = (int(value) for value in self._values.read())
        counts = (sent, received)
        previous, self._previous = self._previous, (now_s, counts)
        wrong = next((count for count in counts if count >= MAX_COUNTER or count == 0xFFFFFFFF), None)
        if wrong is not None:
            self._previous = None
            return self._missing(f"the driver reported an impossible count of {wrong}")
        if self._values.are_32_bits():
            self._bits = 32
        if previous is None:
            return self._missing(_FIRST)
        elapsed_s = now_s - previous[0]
        if elapsed_s <= 0:
            return self._missing("no time has passed since the previous value")
        if any(count < before < 1 << 32 for count, before in zip(counts, previous[1], strict=True)):
            # It went back without ever exceeding 32 bits: the hardware's counter has 32 bits,
            # whatever the type of the value.
            self._bits = 32
        if self._bits == 64:
            self._due_s = now_s + PERIOD_S
        elif self._max is not None and self._max * elapsed_s >= self._unit_bytes << 32:
            return None
        self._last = {
            metric: self._rate(count, before, elapsed_s)
            for metric, count, before in zip(self._metrics, counts, previous[1], strict=True)
        }
        return self._last

    def _rate(self, count: int, before: int, elapsed_s: float) -> Reading:
        rate = (count - before) % (1 << self._bits) * self._unit_bytes / elapsed_s
        # A restarted counter looks like a wrapped one; the capacity of the link tells them apart. The limit is
        # twice the capacity, because the driver refreshes some counters only now and then.
        too_fast = self._max is not None and rate > 2 * self._max
        if count < before and (self._bits == 64 or too_fast):
            return Reading.missing(BYTES_PER_S, "the counter was restarted", SOURCE)
        if too_fast:
            return Reading.missing(BYTES_PER_S, implausible_text(rate, BYTES_PER_S), SOURCE)
        return Reading(rate, BYTES_PER_S, SOURCE)

    def _missing(self, reason: str) -> dict[str, Reading]:
        self._last = dict.fromkeys(self._metrics, Reading.missing(BYTES_PER_S, reason, SOURCE))
        return self._last


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
                    nvml, self._handle, self._clock, NVLINK_FIELDS, NVLINK_METRICS, NVLINK_MAX_BYTES_PER_S, _KIB
                )
            readings = self._pair.read()
            reason = "the NVLink counters have 32 bits and can wrap between two samples"
        except nvml.NVMLError as error:
            status.raise_if_gone(error)
            reason = status.reason(error.value, _NVLINK_CALL, self._mig)
            if error.value not in status.FIELD_VALUE_REFUSED:
                return dict.fromkeys(NVLINK_METRICS, Reading.missing(BYTES_PER_S, reason, SOURCE))
            readings = None
        if readings is None:
            readings = self._refused = dict.fromkeys(
                NVLINK_METRICS, Reading.missing(BYTES_PER_S, f"{self._why_not}; {reason}")
            )
        return readings
