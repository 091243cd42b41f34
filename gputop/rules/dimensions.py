"""Units of figures: which may be added and compared, how they are written in an expression, and in text."""

from __future__ import annotations

from typing import NamedTuple

from gputop.core import metrics


class Unit(NamedTuple):
    """A dimension, by the exponents of its base units. Values are always in base units."""

    seconds: int = 0
    bytes: int = 0
    watts: int = 0
    celsius: int = 0

    def times(self, other: Unit) -> Unit:
        return Unit(*(a + b for a, b in zip(self, other, strict=True)))

    def over(self, other: Unit) -> Unit:
        return Unit(*(a - b for a, b in zip(self, other, strict=True)))

    def __str__(self) -> str:
        above = "·".join(_power(name, n) for name, n in zip(_SYMBOLS, self, strict=True) if n > 0)
        below = "·".join(_power(name, -n) for name, n in zip(_SYMBOLS, self, strict=True) if n < 0)
        return f"{above or '1'}/{below}" if below else above or "no unit"


NONE = Unit()
SECONDS, BYTES, WATTS, CELSIUS, HERTZ = Unit(1), Unit(0, 1), Unit(0, 0, 1), Unit(0, 0, 0, 1), Unit(-1)
BYTES_PER_S = Unit(-1, 1)
_SYMBOLS = ("s", "B", "W", "°C")
OF_METRIC = {metrics.RATIO: NONE, metrics.COUNT: NONE, metrics.BYTES: BYTES, metrics.BYTES_PER_S: BYTES_PER_S,
             metrics.WATTS: WATTS, metrics.CELSIUS: CELSIUS, metrics.HERTZ: HERTZ}
# What ends the name of a figure in documents, from which texts choose the unit (gputop.text.units.figure).
SUFFIX = {SECONDS: "_s", BYTES: "_bytes", BYTES_PER_S: "_bytes_per_s", WATTS: "_w", CELSIUS: "_c", HERTZ: "_hz"}

_SIZES = {"": 1, "k": 10 ** 3, "M": 10 ** 6, "G": 10 ** 9, "T": 10 ** 12,
          "Ki": 2 ** 10, "Mi": 2 ** 20, "Gi": 2 ** 30, "Ti": 2 ** 40}
# As written after a number: its dimension, and how many base units it is.
LITERALS: dict[str, tuple[Unit, float]] = {
    "%": (NONE, 0.01), "W": (WATTS, 1.0), "kW": (WATTS, 1e3), "C": (CELSIUS, 1.0), "°C": (CELSIUS, 1.0),
    "ns": (SECONDS, 1e-9), "us": (SECONDS, 1e-6), "µs": (SECONDS, 1e-6), "ms": (SECONDS, 1e-3), "s": (SECONDS, 1.0),
    "min": (SECONDS, 60.0), "h": (SECONDS, 3600.0),
    **{f"{prefix}Hz": (HERTZ, float(_SIZES[prefix])) for prefix in ("", "k", "M", "G")},
    **{f"{prefix}B": (BYTES, float(size)) for prefix, size in _SIZES.items()},
    **{f"{prefix}B/s": (BYTES_PER_S, float(size)) for prefix, size in _SIZES.items()},
}
EXAMPLE = {NONE: "40%", SECONDS: "300ms", BYTES: "70GiB", WATTS: "600W", CELSIUS: "85C", HERTZ: "1.2GHz",
           BYTES_PER_S: "10GB/s"}


def _power(name: str, exponent: int) -> str:
    return name if exponent == 1 else f"{name}^{exponent}"
