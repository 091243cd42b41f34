"""How long a key press on the timeline takes, from the key to the last byte on the terminal.

    python benchmarks/timeline_screen.py [--events 5000000] [--gpus 8] [--size 200x60] [FILE…]

Makes an XSpace of a job (xspaces.py), or takes FILE, and runs `gputop analyze FILE --timeline` on a pseudo-terminal of
that size. Then a walk of pans, zooms, row moves, gaps, ranges and matches of a search, by their keys. For each kind:
the time to the last byte of the new picture, as who types sees it (it holds Textual's wait for the next frame, 1/60 s
at most), the processor's time, and the bytes sent. Budget: 50 ms at the 95th percentile for a pan or zoom.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import random
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

BUDGET_MS = 50.0
_KEYS = {
    "pan": (b"\x1b[C", b"\x1b[D", b"L", b"H"), "zoom": (b"+", b"+", b"-"), "row": (b"j", b"k"), "gap": (b"n", b"N"),
    "range": (b".", b","), "match": (b">", b"<"), "unfold": (b"e",), "whole": (b"0",),
}
_WEIGHTS = {"pan": 8, "zoom": 10, "row": 5, "gap": 3, "range": 3, "match": 3, "unfold": 1, "whole": 1}
_SOUGHT = b"gemm_17"
_QUIET_S = 0.1  # without a byte, after which a picture is done
_ASKED = b"\x1b[6n"  # where is the cursor? gputop goes on once it is answered


class Terminal:
    """gputop on a pseudo-terminal that takes everything at once and answers what it is asked."""

    def __init__(self, arguments: list[str], size: tuple[int, int]) -> None:
        width, height = size
        self._end, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "LC_ALL": "C.UTF-8"}
        self.child = subprocess.Popen([sys.executable, "-m", "gputop", *arguments], stdin=theirs, stdout=theirs,
                                      env=environment, start_new_session=True)
        os.close(theirs)

    def press(self, key: bytes, quiet_s: float = _QUIET_S) -> tuple[float, float, bytes]:
        """Seconds to the last byte and of the processor, and what came; 0 s if nothing did."""
        spent = self.cpu_s()
        asked = last = time.perf_counter()
        if key:
            os.write(self._end, key)
        out = b""
        while time.perf_counter() - last < quiet_s:
            if not select.select([self._end], [], [], 0.005)[0]:
                continue
            try:
                got = os.read(self._end, 1 << 16)
            except OSError:  # it has ended
                break
            if _ASKED in got:
                os.write(self._end, b"\x1b[1;1R")
            if got.replace(_ASKED, b""):
                last = time.perf_counter()
                out += got
        return last - asked, self.cpu_s() - spent, out

    def cpu_s(self) -> float:
        """Processor time of all its threads, those that have ended, too."""
        if self.child.poll() is not None:
            return 0.0
        return time.clock_gettime(~self.child.pid << 3 | 2)  # as clock_getcpuclockid(3) makes it

    def close(self) -> None:
        """End it, reading on meanwhile: it may have something to say to its terminal."""
        self.child.send_signal(signal.SIGTERM)
        self.press(b"", 0.5)
        self.child.kill()
        self.child.wait()
        os.close(self._end)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def walk(paths: list[str], size: tuple[int, int], presses: int) -> bool:
    """Print a line a kind of key; True if pans and zooms are within the budget."""
    rng = random.Random(1)
    begin = time.perf_counter()
    terminal = Terminal(["analyze", *paths, "--timeline"], size)
    try:
        shown = b""
        while b" shown" not in shown:
            if terminal.child.poll() is not None or time.perf_counter() - begin > 900:
                raise SystemExit(f"the timeline did not come up: {shown[-500:]!r}")
            shown += terminal.press(b"")[2]
        print(f"{time.perf_counter() - begin:.1f} s to the first picture; {size[0]}x{size[1]}, {presses} keys")
        # The findings are still being looked for in another process: that is not what is measured.
        while subprocess.run(["pgrep", "-P", str(terminal.child.pid)], capture_output=True, check=False).stdout:
            terminal.press(b"", 0.5)
        for keys in (b"/", _SOUGHT, b"\r", b"0"):
            terminal.press(keys, 1.0)
        wall: dict[str, list[float]] = {}
        cpu: dict[str, list[float]] = {}
        sent: dict[str, list[float]] = {}
        for kind in rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=presses):
            took_s, cpu_s, out = terminal.press(rng.choice(_KEYS[kind]))
            if took_s:
                wall.setdefault(kind, []).append(1e3 * took_s)
                cpu.setdefault(kind, []).append(1e3 * cpu_s)
                sent.setdefault(kind, []).append(len(out) / 1e3)
    finally:
        terminal.close()
    print(f"{'':>14}   {'to the last byte, ms':^20}   {'processor, ms':^20}   {'kB':>6}")
    print(f"{'key':>8} {'n':>5}   {'median':>10}{'p95':>10}   {'median':>10}{'p95':>10}   {'median':>6}")
    for kind in _KEYS:
        if kind in wall:
            figures = [f"{percentile(own[kind], share):10.1f}" for own in (wall, cpu) for share in (0.5, 0.95)]
            print(f"{kind:>8} {len(wall[kind]):5d}   {''.join(figures[:2])}   {''.join(figures[2:])}   "
                  f"{percentile(sent[kind], 0.5):6.1f}")
    both = wall.get("pan", []) + wall.get("zoom", [])
    if not both:
        raise SystemExit("no picture changed")
    cost = percentile(cpu.get("pan", []) + cpu.get("zoom", []), 0.95)
    print(f"pan and zoom, p95: {percentile(both, 0.95):.1f} ms, {cost:.1f} ms of processor (budget {BUDGET_MS:g} ms)")
    return percentile(both, 0.95) <= BUDGET_MS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE")
    parser.add_argument("--events", type=int, default=5_000_000)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--size", default="200x60")
    parser.add_argument("--presses", type=int, default=300)
    args = parser.parse_args()
    width, height = map(int, args.size.split("x"))
    with tempfile.TemporaryDirectory() as folder:
        paths = args.files
        if not paths:
            from xspaces import write

            paths = [str(Path(folder) / "job.xplane.pb")]
            write(Path(paths[0]), args.events, args.gpus)
        return 0 if walk(paths, (width, height), args.presses) else 1


if __name__ == "__main__":
    sys.exit(main())
