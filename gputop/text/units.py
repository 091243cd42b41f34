"""Text for people: figures with units, untrusted text made printable, text of a fixed width, prose in lines."""

from __future__ import annotations

import math
import re
import textwrap
import time
import unicodedata
from collections.abc import Iterable, Sequence

from gputop.core.metrics import BYTES, BYTES_PER_S, CELSIUS, HERTZ, RATIO, WATTS
from gputop.core.samples import CgroupSample, ProcessSample, Reading

NA = "N/A"
BLANK = "·"  # in a lane: nothing was measured; a measured zero draws as the lowest bar


def printable(text: str | bytes) -> str:
    """``text`` without control characters, escape codes or bytes that are not UTF-8.

    Each removed character leaves one U+FFFD, so that manipulated names are visible.
    White space becomes single spaces. A GPU name or a command line can hold any bytes; an
    escape sequence drawn as it is would repaint the user's terminal.
    """
    try:
        raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
        decoded = raw.decode("utf-8", "replace")
    except UnicodeEncodeError:  # half of a surrogate pair: JSON can hold it, file names cannot
        decoded = str(text)
    if decoded.isprintable():
        return decoded
    kept = "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in decoded)
    return " ".join(kept.split())


def percent(value: float) -> str:
    """Format a ratio: 38%."""
    # The history keeps 32 bits of a value: without the first rounding, a constant 80.5% would be 80% as a reading and
    # 81% as the mean of the same readings. Halves go up, and not to the even number.
    return f"{math.floor(round(100 * value, 3) + 0.5)}%"


def portion(value: float) -> str:
    """Format a ratio as :func:`percent` does, but a small share is shown as more than none."""
    return "<1%" if 0 < value < 0.005 else percent(value)


def reads_zero(value: float) -> bool:
    """Return whether a ratio reads as 0%: such a share is no evidence."""
    return percent(abs(value)) == percent(0.0)


def bytes_(value: float) -> str:
    """Binary units, three significant digits: 71.2G, 820M."""
    for unit in ("B", "K", "M", "G", "T"):
        if abs(value) < 999.5 or unit == "T":
            digits = 0 if unit == "B" or abs(value) >= 99.95 else 1
            return f"{value:.{digits}f}{unit}"
        value /= 1024
    raise AssertionError("unreachable")


def size(value: float) -> str:
    """The same in a sentence: 71.2 GiB, 820 MiB, 12 B."""
    text = bytes_(value)
    return f"{text[:-1]} {text[-1].removesuffix('B')}{'iB' if text[-1] != 'B' else 'B'}"


def count(value: float) -> str:
    """Format a number, also an average: 12,300, 25, 0.25, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def counted(n: int, what: str, ending: str = "s") -> str:
    """A noun with its number: 1 step, 3 steps."""
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}{ending}"


def counted_cpus(n: float) -> str:
    """CPUs with their number: 1 CPU, 1.5 CPUs."""
    number = f"{n:.3g}"
    return f"{number} CPU{'' if number == '1' else 's'}"


def first_few(names: Sequence[object], most: int, count: int | None = None) -> str:
    """The first of so many names, for a sentence: "a, b and 3 more"."""
    more = (count or len(names)) - len(names[:most])
    return ", ".join(map(str, names[:most])) + (f" and {more} more" if more > 0 else "")


def listed(parts: Sequence[str]) -> str:
    """The parts as a list in a sentence: "a", "a and b", "a, b, and c"."""
    return " and ".join(parts) if len(parts) < 3 else f"{', '.join(parts[:-1])}, and {parts[-1]}"


def rate_gb(value: float) -> str:
    """Bytes per second as decimal GB/s, the unit of PCIe and NVLink."""
    gigabytes = value / 1e9
    if gigabytes >= 99.5:
        return f"{gigabytes:.0f}"
    # Little traffic must not read as none; less than 5 MB/s is none beside a link.
    return f"{gigabytes:.2f}" if 0.005 <= gigabytes < 0.095 else f"{gigabytes:.1f}"


def rate(value: float) -> str:
    """Bytes per second in a unit that fits the size: 1.2 GB/s, 340 kB/s."""
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if value >= size * 0.9995:
            return f"{value / size:.1f} {unit}" if value < 99.5 * size else f"{value / size:.0f} {unit}"
    return f"{value:.0f} B/s"


def seconds(value: float) -> str:
    """A duration in a fitting unit: 412 ms, 95.4 ms, 1.24 s, 2.6 min."""
    if value == 0:
        return "0 s"
    if abs(value) >= 99.95:
        return f"{value / 60:.2g} min" if abs(value) < 5970 else f"{value / 3600:.1f} h"
    if abs(value) >= 0.9995:
        return f"{value:.2f} s" if abs(value) < 9.995 else f"{value:.1f} s"
    scaled, unit = (value * 1e3, "ms") if abs(value) >= 0.9995e-3 else (value * 1e6, "µs")
    return f"{scaled:.0f} {unit}" if abs(scaled) >= 99.95 else f"{scaled:.1f} {unit}"


_DIFFERS = 0.1  # share of the median: a mean that is further from it is not what most steps take


def step_time(mean_s: float, median_s: float | None) -> str:
    """The mean step, of which all shares are, with the median beside it where they differ: "643 ms (median 295)"."""
    mean = seconds(mean_s)
    if median_s is None or abs(mean_s - median_s) < _DIFFERS * median_s:
        return mean
    median = seconds(median_s)
    return f"{mean} (median {median.split()[0] if median.split()[-1:] == mean.split()[-1:] else median})"


def ranges(numbers: Iterable[int], separator: str = ",") -> str:
    """Whole numbers as short ranges: 0, 1, 2, 5 → "0-2,5"."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return separator.join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def devices(process: ProcessSample) -> str:
    """The GPUs a process holds, MIG instances by their label: "0-3", "0:1"."""
    whole = ranges(index for index, on in process.gpus.items() if on.mig is None)
    parts = [f"{index}:{on.mig}" for index, on in sorted(process.gpus.items()) if on.mig is not None]
    return ",".join([whole, *parts] if whole else parts)


def limits(group: CgroupSample) -> str:
    """Limits of a control group and the use of them: "CPU 12.0 of 16 cores, throttled 41%"; "" without limits."""
    parts = []
    used, most, held = group["cpu_used_cores"], group["cpu_limit_cores"].value, group["cpu_throttled_ratio"].value
    if most is not None:
        parts.append(f"CPU {NA if used.value is None else f'{used.value:.1f}'} of {most:g} cores")
        parts += [f"throttled {percent(held)}"] if held is not None else []
    if group["memory_limit_bytes"].value is not None:
        parts.append(f"memory {reading(group['memory_used_bytes'], spelled=True)} of "
                     f"{reading(group['memory_limit_bytes'], spelled=True)}")
    if group["oom_kills"].value:
        parts.append(f"{group['oom_kills'].value:.0f} OOM kills")
    return ", ".join(parts)


def reading(r: Reading, *, spelled: bool = False) -> str:
    """A reading with its unit, or N/A. ``spelled``: where there is room for 71.2 GiB, which is 71.2G else."""
    if r.value is None:
        return NA
    if r.unit == RATIO:
        return percent(r.value)
    if r.unit == BYTES:
        return size(r.value) if spelled else bytes_(r.value)
    if r.unit == BYTES_PER_S:
        return rate(r.value)
    if r.unit == WATTS:
        return f"{r.value:.0f}W"
    if r.unit == CELSIUS:
        return f"{r.value:.0f}°C"
    if r.unit == HERTZ:
        return f"{r.value / 1e6:.0f}MHz"
    return f"{r.value:g}"


def figure(name: str, value: float) -> str:
    """A number of a finding's evidence in the unit that its name ends with: ("wait_s", 0.181) → 181 ms."""
    if name.endswith("bytes_per_s"):
        return rate(value)
    if name.endswith("_per_s"):
        return f"{value:,.0f}/s"
    if name.endswith("_bytes") or "_bytes_" in name or name.startswith("bytes_per_"):  # h2d_bytes_per_step
        return size(value)
    if name.endswith(("_ratio", "_share")):
        return percent(value)
    if name in ("ratio", "factor", "times_peers"):
        return f"{value:.3g}×"
    if name.endswith("_s"):
        return seconds(value)
    for suffix, unit in (("_w", WATTS), ("_c", CELSIUS), ("_hz", HERTZ)):
        if name.endswith(suffix):
            return reading(Reading(value, unit))
    return count(value)


def compact(value: float, unit: str) -> str:
    """A figure for a narrow column, of at most five cells as a rule; rates are in GB/s, clocks in MHz."""
    return {BYTES: f"{value / 2**30:.0f}G", BYTES_PER_S: rate_gb(value), WATTS: f"{value:.0f}W",
            CELSIUS: f"{value:.0f}°", HERTZ: f"{value / 1e6:.0f}"}.get(unit, percent(value))


_ONE_CELL_EACH = re.compile("[ -~\xa1-\xac\xae-\u02af\u2026\u2580-\u259f]*")


def fit_middle(text: str, width: int) -> str:
    """Fit as :func:`fit` does, but what is too long is cut in the middle: of names that begin alike the ends differ."""
    if len(text) > width > 2 and (text.isascii() or _ONE_CELL_EACH.fullmatch(text)):
        return f"{text[:width // 2]}…{text[-(width - width // 2 - 1):]}"
    return fit(text, width)


def fit(text: str, width: int, *, right: bool = False) -> str:
    """Exactly ``width`` cells: padded, or cut with an ellipsis. Wide characters count double."""
    if text.isascii() or _ONE_CELL_EACH.fullmatch(text):
        size = len(text)
        if size > width:
            text = text[: max(0, width - 1)] + "…" if width > 0 else ""
            size = width
        return text.rjust(width) if right else text.ljust(width)
    out: list[str] = []
    used = 0
    for char in text:
        cells = _cells(char)
        if used + cells > width:
            while out and used > width - 1:
                used -= _cells(out.pop())
            if width > 0:
                out.append("…")
                used += 1
            break
        out.append(char)
        used += cells
    pad = " " * max(0, width - used)
    body = "".join(out)
    return pad + body if right else body + pad


def _cells(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def wrap(text: str, width: int, first: str = "", rest: str | None = None) -> list[str]:
    """Lines of at most ``width`` columns, the first after ``first``, the others after ``rest`` or as far in.

    Words are kept whole, a path or a name that is longer than a line, too; control characters are not.
    """
    indent = " " * len(first) if rest is None else rest
    return textwrap.wrap(printable(text), width, initial_indent=first, subsequent_indent=indent,
                         break_long_words=False, break_on_hyphens=False)


_SHIFTS_S = (1800, 3600, 7200)  # by which clocks are set: half an hour on Lord Howe Island, two hours at some bases


def clock_time(time_s: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Format a time in the form of strftime: "2026-10-25 02:10:00", and " (UTC+02:00)" behind it where that alone says
    which."""
    text = time.strftime(form, time.localtime(time_s))
    return f"{text} ({utc_offset(time_s)})" if comes_twice(time_s) else text


def comes_twice(time_s: float) -> bool:
    """Return whether the clocks show this time of this day twice."""
    clock = time.localtime(time_s)
    return any(time.localtime(time_s + shift_s)[:6] == clock[:6] for s in _SHIFTS_S for shift_s in (s, -s))


def utc_offset(time_s: float) -> str:
    """"UTC+02:00"."""
    minutes = int(time.localtime(time_s).tm_gmtoff or 0) // 60
    return f"UTC{'-' if minutes < 0 else '+'}{abs(minutes) // 60:02d}:{abs(minutes) % 60:02d}"
