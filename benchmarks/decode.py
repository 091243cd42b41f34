"""How fast, and in how much memory, an XSpace becomes columns: gputop's reader against the
way everybody starts with, protobuf's own parser and a loop over its objects.

    python benchmarks/decode.py [--events N] [FILE.xplane.pb]

Without a file it makes an XSpace of N events like those of a GPU training job (xspaces.py). Each
reader runs in a process of its own, twice; the faster run counts. Both must find the same number
of events. Prints CPU seconds, peak memory and the ratios.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_STATS = ("correlation_id", "tf_op", "memcpy_details", "step_num", "device_id")


def read_ours(path: Path) -> int:
    from gputop.trace.readers.load import load

    return load([path]).event_count


def read_objects(path: Path) -> int:
    """protobuf's parser (upb where it is installed) and a loop that keeps five stats of each event."""
    from tests import xspace_messages as messages

    space = messages.XSpace.FromString(path.read_bytes())
    rows = []
    for plane in space.planes:
        stat_names = {i: m.name for i, m in plane.stat_metadata.items()}
        names = {i: m.name for i, m in plane.event_metadata.items()}
        for number, line in enumerate(plane.lines):
            for event in line.events:
                start = line.timestamp_ns + event.offset_ps // 1000
                kept = {}
                for stat in event.stats:
                    name = stat_names[stat.metadata_id]
                    if name in _STATS:
                        value = getattr(stat, stat.WhichOneof("value"))
                        kept[name] = stat_names.get(value) if stat.WhichOneof("value") == "ref_value" else value
                name = names[event.metadata_id]
                if not name.startswith("ThreadpoolListener"):
                    rows.append((number, name, start, start + event.duration_ps // 1000, kept))
    return len(rows)


_READERS = {"gputop": read_ours, "protobuf and a loop": read_objects}


def measure(reader: str, path: Path) -> dict[str, float]:
    """One run in a fresh process."""
    done = subprocess.run([sys.executable, __file__, "--run", reader, str(path)], check=True, capture_output=True,
                          text=True)
    return json.loads(done.stdout)


def run(reader: str, path: Path) -> None:
    import numpy  # noqa: F401  both processes hold the same libraries before the clock starts

    from gputop.trace.readers import load, nsys  # noqa: F401
    from gputop.trace.readers.chrome import reader as chrome  # noqa: F401
    from gputop.trace.readers.xspace import reader as xspace  # noqa: F401
    from tests import xspace_messages as messages

    messages.XSpace()
    before, start = peak_bytes(), time.process_time()
    events = _READERS[reader](path)
    print(json.dumps({"seconds": time.process_time() - start, "events": events, "before_bytes": before,
                      "peak_bytes": peak_bytes()}))


def peak_bytes() -> int:
    """The most memory this process ever held. Not getrusage's figure, which a child inherits from its parent."""
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--run", choices=list(_READERS), help=argparse.SUPPRESS)
    parser.add_argument("file", type=Path, nargs="?")
    args = parser.parse_args()
    if args.run:
        run(args.run, args.file)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = args.file
        if path is None:
            from xspaces import write

            path = Path(folder) / "benchmark.xplane.pb"
            write(path, args.events)
        size = path.stat().st_size
        results = {}
        for reader in _READERS:
            best = min((measure(reader, path) for _ in range(2)), key=lambda m: m["seconds"])
            results[reader] = best
            print(f"{reader:20} {best['events']:>10,.0f} events  {best['seconds']:6.2f} s  "
                  f"{best['events'] / best['seconds'] / 1e6:5.2f} M events/s  peak {best['peak_bytes'] / 1e6:6.0f} MB "
                  f"({(best['peak_bytes'] - best['before_bytes']) / size:4.1f} x the file's {size / 1e6:.0f} MB)")
    ours, theirs = results.values()
    print(f"ratios: {theirs['seconds'] / ours['seconds']:.1f} times as fast, "
          f"{theirs['peak_bytes'] / ours['peak_bytes']:.1f} times less memory")


if __name__ == "__main__":
    main()
