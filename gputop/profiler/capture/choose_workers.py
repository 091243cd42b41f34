"""Choice of the workers of a job to capture where there are many: their traces would be alike, and cost each of them.
Pure.

The slowest rank of a synchronous job is the one that all others wait for. Live figures do not name it for sure: a rank
that is held up by its host shows less activity than the others, one whose GPU is slow may show more, as it waits for
nobody. So the ranks at both ends and one in the middle are proposed: what differs between them is what to see.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

MAX_WORKERS = 8  # captured at once without being asked for: a node's
MAX_ALL_WORKERS = 64  # captured at once at all: their traces alone would be gigabytes, of which none adds to the others
_ENDS = ("lowest", "median", "highest")
_PLACES = ("first", "middle", "last")


class Choice(Struct, frozen=True):
    """``chosen`` are addresses, each with why: ``reasons`` ("lowest, 41%"). ``of`` is how many there are;
    ``by`` says by what they were chosen, ``risk`` what a capture may do to the job."""

    chosen: tuple[str, ...]
    reasons: tuple[str, ...]
    of: int
    by: str
    risk: str = ""

    def text(self) -> str:
        """ "3 of 64 workers, by SM activity: n07:6009 (lowest, 41%), …"."""
        named = ", ".join(f"{address} ({reason})" for address, reason in zip(self.chosen, self.reasons, strict=True))
        return f"{len(self.chosen)} of {self.of} workers, by {self.by}: {named}"


def choose_workers(addresses: Sequence[str], figures: Mapping[str, float], name: str = "",
                   show: Callable[[float], str] = str) -> Choice:
    """Three workers of many: those with lowest, median and highest figure.

    ``figures`` holds by address the live figure called ``name``, which ``show`` writes. Workers without one are not
    compared; where fewer than three have one, the first, the middle and the last are chosen.
    """
    measured = sorted((address for address in addresses if address in figures), key=lambda a: (figures[a], a))
    if len(measured) >= 3:
        three = (measured[0], measured[(len(measured) - 1) // 2], measured[-1])
        reasons = tuple(f"{end}, {show(figures[address])}" for end, address in zip(_ENDS, three, strict=True))
        unknown = len(addresses) - len(measured)
        return Choice(three, reasons, len(addresses),
                      name + (f" ({unknown} {'have' if unknown > 1 else 'has'} no value)" if unknown
                              else ""))
    three = (addresses[0], addresses[(len(addresses) - 1) // 2], addresses[-1])
    return Choice(three, _PLACES, len(addresses), "their order, because gputop has no live samples from them")
