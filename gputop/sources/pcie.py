"""PCIe traffic of a GPU without GPM, and what its link can carry.

Two ways, the better one first: byte counters (field values 197 and 198), else the call
that watches the link for 20 ms per direction, which blocks meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gputop.metrics import BYTES_PER_S
from gputop.samples import Reading
from gputop.sources import nvml_status as status

TX = "pcie_tx_bytes_per_s"  # from the GPU: device to host
RX = "pcie_rx_bytes_per_s"  # to the GPU: host to device

COUNTER = "NVML counter"
WINDOW = "NVML 20 ms"
WINDOW_PERIOD_S = 5.0  # it blocks about 21 ms per direction

_FIELD_TX = 197  # NVML_FI_DEV_PCIE_COUNT_TX_BYTES
_FIELD_RX = 198  # NVML_FI_DEV_PCIE_COUNT_RX_BYTES
_UNSIGNED_INT = 1  # nvmlValueType_t
_FIRST_COUNT = "first counter value: a rate needs two"
_LATER = "the call that measures it blocks for 40 ms: it comes with the next tick"

# GT/s per lane and the share of bits that is data: 8b/10b (PCIe 1 and 2), 128b/130b (3 to 5),
# FLIT with 242 of 256 bytes for the transaction layer (6). PCI Express Base Specification 6.0, sections 4.2 and 8.
_TRANSFERS_PER_S = {1: 2.5e9, 2: 5e9, 3: 8e9, 4: 16e9, 5: 32e9, 6: 64e9}
_ENCODING = {1: 8 / 10, 2: 8 / 10, 3: 128 / 130, 4: 128 / 130, 5: 128 / 130, 6: 242 / 256}


def link_bytes_per_s(generation: int, lanes: int) -> float | None:
    """Raw rate of a link in one direction, after line coding, before packet headers.

    About 10 to 20 % of it goes to headers and flow control, so no transfer reaches it.
    None for a generation that is not known here.
    """
    transfers = _TRANSFERS_PER_S.get(generation)
    if transfers is None or lanes <= 0:
        return None
    return transfers * _ENCODING[generation] / 8 * lanes


class PcieTraffic:
    """PCIe rates of one GPU by the best way that it supports. Used by one thread."""

    def __init__(self, nvml: Any, handle: Any, clock: Callable[[], float], link_max_bytes_per_s: float | None) -> None:
        self._nvml = nvml
        self._handle = handle
        self._clock = clock
        self._link_max = link_max_bytes_per_s
        self._steps = [self._by_counter, self._by_window]
        self._why_not: list[str] = []
        self._previous: tuple[float, int, int] | None = None
        self._bits = 64
        self._window_due_s: float | None = None
        self._window: dict[str, Reading] = {}

    def read(self) -> dict[str, Reading]:
        """RX and TX, or why not. Raises NVMLError only if the device is gone."""
        nvml = self._nvml
        while self._steps:
            try:
                readings = self._steps[0]()
            except nvml.NVMLError as error:
                if error.value in status.DEVICE_GONE:
                    raise
                call = "field values 197/198" if self._steps[0] == self._by_counter else "nvmlDeviceGetPcieThroughput"
                why = status.reason(error.value, call)
                if error.value not in status.REFUSED:
                    return _missing(why)
                self._why_not.append(why)
            else:
                if readings is not None:
                    return readings
            del self._steps[0]
        return _missing("; ".join(self._why_not))

    def _by_counter(self) -> dict[str, Reading] | None:
        """Rates from the byte counters; None if they wrap too fast to tell a rate."""
        nvml = self._nvml
        values = nvml.nvmlDeviceGetFieldValues(self._handle, (_FIELD_TX, _FIELD_RX))
        now_s = self._clock()
        for value in values:
            if value.nvmlReturn != status.SUCCESS:
                raise nvml.NVMLError(value.nvmlReturn)
        sent, received = _unsigned(values[0]), _unsigned(values[1])
        if values[0].valueType == _UNSIGNED_INT:
            self._bits = 32
        previous, self._previous = self._previous, (now_s, sent, received)
        if previous is None:
            return _missing(_FIRST_COUNT, COUNTER)
        elapsed_s = now_s - previous[0]
        if elapsed_s <= 0:
            return _missing("no time has passed since the value before", COUNTER)
        if (sent < previous[1] and previous[1] < 1 << 32) or (received < previous[2] and previous[2] < 1 << 32):
            # It went back without ever having left 32 bits: the hardware's counter is one of 32 bits,
            # whatever the type that carries it.
            self._bits = 32
        if self._bits == 32 and self._link_max is not None and self._link_max * elapsed_s >= 1 << 32:
            self._why_not.append(
                f"the byte counters have 32 bits: at this link's speed they can wrap within {elapsed_s:.1f} s"
            )
            return None
        return {
            TX: self._rate(sent, previous[1], elapsed_s),
            RX: self._rate(received, previous[2], elapsed_s),
        }

    def _rate(self, count: int, before: int, elapsed_s: float) -> Reading:
        moved = (count - before) % (1 << self._bits)
        rate = moved / elapsed_s
        # A restarted counter looks like a wrap; the link's own speed tells the two apart.
        if count < before and (self._bits == 64 or (self._link_max is not None and rate > self._link_max)):
            return Reading.missing(BYTES_PER_S, "the counter was restarted", COUNTER)
        return Reading(rate, BYTES_PER_S, COUNTER)

    def _by_window(self) -> dict[str, Reading]:
        """What the link did in a 20 ms window, measured anew every few seconds.

        Coarse: it sees a hundredth of the time. The first call does not measure, so that
        the first frame need not wait for it.
        """
        now_s = self._clock()
        if self._window_due_s is None:
            self._window_due_s = now_s
            return _missing(_LATER, WINDOW)
        if now_s >= self._window_due_s:
            self._window_due_s = now_s + WINDOW_PERIOD_S
            self._window = _missing("not measured", WINDOW)
            nvml = self._nvml
            for metric, counter in ((TX, nvml.NVML_PCIE_UTIL_TX_BYTES), (RX, nvml.NVML_PCIE_UTIL_RX_BYTES)):
                kilobytes_per_s = nvml.nvmlDeviceGetPcieThroughput(self._handle, counter)
                self._window[metric] = Reading(kilobytes_per_s * 1000.0, BYTES_PER_S, WINDOW, coarse=True)
        return self._window


def _missing(why: str, source: str = "") -> dict[str, Reading]:
    reading = Reading.missing(BYTES_PER_S, why, source)
    return {TX: reading, RX: reading}


def _unsigned(field: Any) -> int:
    kind = field.valueType
    if kind == _UNSIGNED_INT:
        return int(field.value.uiVal)
    return int(field.value.ullVal)
