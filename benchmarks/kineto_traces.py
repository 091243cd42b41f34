"""Makes PyTorch traces of any size out of a real one, for the benchmarks of the trace engine.

    python benchmarks/kineto_traces.py FILE.pt.trace.json[.gz] EVENTS OUT.json

Repeats the events of FILE, layout and all, until there are EVENTS: each copy begins where the one before it ended, and
has steps, correlations and ids of its own.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from pathlib import Path

_NUMBERS = re.compile(r'("ts": ?)(\d+)|("(?:correlation|External id|Ev Idx|Sequence number|id)": ?|ProfilerStep#)(\d+)')


def write(source: Path, events: int, out: Path) -> int:
    """Write the trace; returns its number of events."""
    raw = source.read_bytes()
    text = (gzip.decompress(raw) if source.suffix == ".gz" else raw).decode()
    begin = text.index('"traceEvents": [') + len('"traceEvents": [')
    listed, end = json.JSONDecoder().raw_decode(text, begin - 1)
    ends = [e["ts"] + e.get("dur", 0) for e in listed if e.get("cat") in ("kernel", "cpu_op")]
    starts = [e["ts"] for e in listed if e.get("cat") in ("kernel", "cpu_op")]
    period_us = int(max(ends) - min(starts)) + 100
    largest = 1 + max((int(match[4]) for match in _NUMBERS.finditer(text, begin, end) if match[4]), default=0)
    copies = max(round(events / len(listed)), 1)
    with out.open("w") as file:
        file.write(text[:begin])
        for copy in range(copies):
            file.write("," if copy else "")
            moved_us, more = copy * period_us, copy * largest
            file.write(_NUMBERS.sub(
                lambda m, us=moved_us, n=more: f"{m[1]}{int(m[2]) + us}" if m[1] else f"{m[3]}{int(m[4]) + n}",
                text[begin:end - 1]))
        file.write(text[end - 1:])
    return copies * len(listed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("events", type=int)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    count = write(args.file, args.events, args.out)
    print(f"{count:,} events, {args.out.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
