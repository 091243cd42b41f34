"""What a recording costs in bytes and time, as ratios against the obvious way: a line of JSON
per sample, gzipped and flushed after each so that a kill loses no more than with gputop.

    python benchmarks/recording.py [--samples N]

Both store the same samples of the simulated node (8 GPUs, 1 Hz), by default an hour. gputop
gives back equal samples; the JSON lines are only parsed into dictionaries, and the seek reads
them up to the middle, for want of an index. Times are CPU seconds of this process.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import to_builtins

from gputop.core.samples import NodeSample
from gputop.replay.format import RecordingWriter
from gputop.replay.reader import Recording
from gputop.sources.simulated import BACKFILL_S, SimulatedSource


def make(count: int) -> list[NodeSample]:
    source = SimulatedSource("input-bound")
    source.open()
    samples: list[NodeSample] = []
    now_s = time.time()
    while len(samples) < count:
        now_s += BACKFILL_S
        samples += source.backfill(now_s, 1.0)
    return samples[:count]


def write_gputop(samples: list[NodeSample], path: Path) -> None:
    writer = RecordingWriter(path)
    for sample in samples:
        writer.append(sample)
    writer.close()


def write_json(samples: list[NodeSample], path: Path) -> None:
    with gzip.open(path, "wb") as file:
        for sample in samples:
            file.write(json.dumps(to_builtins(sample)).encode() + b"\n")
            file.flush()


def read_gputop(path: Path) -> int:
    recording = Recording(path)
    return len([recording.sample(i) for i in range(len(recording))])


def read_json(path: Path) -> int:
    with gzip.open(path, "rb") as file:
        return len([json.loads(line) for line in file])


def seek_gputop(path: Path) -> float:
    recording = Recording(path)
    middle_s = (recording.times_s[0] + recording.times_s[-1]) / 2
    return recording.sample(recording.index_at(middle_s)).time_s


def seek_json(path: Path) -> float:
    size = read_json(path)  # how many there are is only known at the end
    with gzip.open(path, "rb") as file:
        for i, line in enumerate(file):
            if i == size // 2:
                return float(json.loads(line)["time_s"])
    raise AssertionError("unreachable")


def cpu_s(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--samples", type=int, default=3600)
    count = parser.parse_args().samples
    samples = make(count)
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder) / "node.rec", Path(folder) / "node.jsonl.gz"
        figures = {}
        for name, path, write, read, seek in (("gputop", ours, write_gputop, read_gputop, seek_gputop),
                                              ("JSON lines, gzip", theirs, write_json, read_json, seek_json)):
            wrote = cpu_s(lambda write=write, path=path: write(samples, path))
            read_s = cpu_s(lambda read=read, path=path: read(path))
            find = min(cpu_s(lambda seek=seek, path=path: seek(path)) for _ in range(2))
            size = path.stat().st_size
            figures[name] = (size, wrote, read_s, find)
            print(f"{name:18} {size / count * 3600 / 1e6:7.2f} MB per hour at 1 Hz  "
                  f"write {wrote / count * 1e3:6.3f} ms  read {read_s / count * 1e3:6.3f} ms a sample  "
                  f"open and seek to the middle {find * 1e3:7.1f} ms")
        recording = Recording(ours)
        assert [recording.sample(i) for i in range(count)] == samples
    size, wrote, read_s, find = (b / a for a, b in zip(*figures.values(), strict=True))
    print(f"ratios: {size:.1f} times smaller; "
          f"writing {wrote:.1f}, reading {read_s:.1f}, seeking {find:.1f} times as fast")


if __name__ == "__main__":
    main()
