"""What each NVML call that gputop makes costs on this machine, and which are refused; as Markdown tables.

    python benchmarks/nvml_calls.py > calls.md          # and once more with sudo: GPM may need it

Every call is made ``--calls`` times on every GPU; the times are those of the call through
nvidia-ml-py, in microseconds, the first one apart because it can wake the GPU. GPM is
sampled at several intervals: which share of its values is valid, and how many of the byte
rates are 0 although they count as valid. Whatever libnvidia-ml.so.1 the loader finds is measured:
the driver's, or the fake of the tests (see tests/nvml_fake), whose times say nothing.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import pynvml as nvml  # noqa: E402

from gputop.core.errors import GputopError  # noqa: E402
from gputop.sources.nvml import gpm, status  # noqa: E402
from gputop.sources.nvml.fields import FIELDS, FieldValues  # noqa: E402
from gputop.sources.nvml.processes import LIST_PERIOD_S, SHARE_PERIOD_S, ProcessReader  # noqa: E402
from gputop.sources.nvml.status import nvml_text  # noqa: E402
from gputop.sources.nvml.traffic import NVLINK_FIELDS, PCIE_FIELDS, PERIOD_S, WINDOW_PERIOD_S  # noqa: E402

Call = Callable[[], Any]
RATIOS = [number for number, _, _ in gpm.METRICS if number < 20]
RATES = [number for number, _, _ in gpm.METRICS if number >= 20]


def calls_of(handle: Any) -> Iterator[tuple[str, float | None, float | None, Callable[[], Call]]]:
    """Name, period in s (0: every tick; None: not regular), published cost in us and what makes the call."""
    for field in FIELDS:
        step: Any = field
        while step is not None:
            name = f"{step.call} → {', '.join(step.metrics)}"
            yield name, step.period_s, step.cost_us, lambda step=step: step.build(nvml, handle)
            step = step.fallback
    pairs = (("PCIe counters 197/198", PCIE_FIELDS, 650.0), ("NVLink counters 138/139", NVLINK_FIELDS, None))
    for name, pair, cost_us in pairs:
        yield name, PERIOD_S, cost_us, lambda pair=pair: FieldValues(nvml, handle, *pair).read
    batch = [(186, 0), (82, 0), *PCIE_FIELDS]
    yield "186, 82, 197, 198 in one batch", None, None, lambda: FieldValues(nvml, handle, *batch).read
    yield "field value 185 (not used: average power)", None, 3300.0, lambda: FieldValues(nvml, handle, (185, 0)).read
    plain = (
        ("nvmlDeviceGetCurrentClocksEventReasons", 0.0, 1.0, ()),
        ("nvmlDeviceGetPcieThroughput", WINDOW_PERIOD_S, 21000.0, (nvml.NVML_PCIE_UTIL_TX_BYTES,)),
        ("nvmlDeviceGetProcessUtilization", SHARE_PERIOD_S, 1700.0, (int((time.time() - 3) * 1e6),)),
        ("nvmlDeviceGetSamples", None, 1500.0, (nvml.NVML_GPU_UTILIZATION_SAMPLES, 0)),
        ("nvmlGpmQueryDeviceSupport", None, None, ()),
    )
    for name, period_s, cost_us, args in plain:
        yield name, period_s, cost_us, lambda name=name, args=args: lambda: getattr(nvml, name)(handle, *args)
    clocks = (time.monotonic, time.time)
    yield "process lists and shares", LIST_PERIOD_S, 2000.0, lambda: lambda: ProcessReader(nvml, handle, *clocks).read()


def measure(make: Callable[[], Call], count: int) -> tuple[list[float], dict[int, int]]:
    """Microseconds of each call, refused ones included, and how often each code came back."""
    codes: dict[int, int] = {}
    took_us: list[float] = []
    try:
        call = make()
    except nvml.NVMLError as error:
        return [], {error.value: count}
    for _ in range(count):
        began = time.perf_counter()
        code = status.SUCCESS
        try:
            call()
        except nvml.NVMLError as error:
            code = error.value
        took_us.append((time.perf_counter() - began) * 1e6)
        codes[code] = codes.get(code, 0) + 1
        if code in status.DEVICE_GONE:
            break
    return took_us, codes


def said(codes: dict[int, int]) -> str:
    if set(codes) <= {status.SUCCESS}:
        return "ok"
    return ", ".join(f"{code} ({n}×): {status.reason(code, '')[:-3]}" for code, n in codes.items() if code)


def number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def print_calls(index: int, handle: Any, count: int) -> None:
    print(f"\n## GPU {index}: calls\n")
    print("| call → metrics | every | published µs | first µs | median µs | p95 µs | result |")
    print("|---|---|---|---|---|---|---|")
    for name, period_s, cost_us, make in calls_of(handle):
        took_us, codes = measure(make, count)
        later = took_us[1:] or took_us
        p95 = sorted(later)[int(0.95 * (len(later) - 1))] if later else None
        median = statistics.median(later) if later else None
        every = "–" if period_s is None else "tick" if period_s == 0 else f"{period_s:g} s"
        first = took_us[0] if took_us else None
        print(
            f"| {name} | {every} | {number(cost_us)} | {number(first)} | {number(median)} | {number(p95)} "
            f"| {said(codes)} |"
        )


def print_gpm(index: int, handle: Any, intervals_s: Sequence[float], count: int) -> None:
    print(f"\n## GPU {index}: GPM\n")
    why = gpm.unavailable_reason(nvml, handle)
    if why is not None:
        print(why)
        return
    print("| interval s | ratios valid | rates valid | of those 0 | sample µs | metrics µs | codes |")
    print("|---|---|---|---|---|---|---|")
    for interval_s in intervals_s:
        older, newer = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        values: dict[int, list[float | None]] = {metric: [] for metric in (*RATIOS, *RATES)}
        codes: dict[int, int] = {}
        sample_us, metrics_us = [], []
        try:
            nvml.nvmlGpmSampleGet(handle, older)
            for _ in range(count):
                time.sleep(interval_s)
                began = time.perf_counter()
                nvml.nvmlGpmSampleGet(handle, newer)
                between = time.perf_counter()
                request = nvml.c_nvmlGpmMetricsGet_t()
                request.version, request.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(values)
                request.sample1, request.sample2 = older, newer
                for slot, metric in enumerate(values):
                    request.metrics[slot].metricId = metric
                nvml.nvmlGpmMetricsGet(request)
                sample_us.append((between - began) * 1e6)
                metrics_us.append((time.perf_counter() - between) * 1e6)
                for slot, metric in enumerate(values):
                    result = request.metrics[slot]
                    codes[result.nvmlReturn] = codes.get(result.nvmlReturn, 0) + 1
                    values[metric].append(result.value if result.nvmlReturn == status.SUCCESS else None)
                older, newer = newer, older
        except nvml.NVMLError as error:
            print(f"| {interval_s:g} | – | – | – | – | – | {said({error.value: 1})} |")
            if error.value in status.DEVICE_GONE:
                return
        else:
            ratios = [value for metric in RATIOS for value in values[metric]]
            rates = [value for metric in RATES for value in values[metric]]
            valid = [value for value in rates if value is not None]
            good, zero = sum(v is not None for v in ratios) / len(ratios), sum(v == 0 for v in valid)
            print(
                f"| {interval_s:g} | {good:.0%} | {len(valid) / len(rates):.0%} | {zero / max(1, len(valid)):.0%} "
                f"| {statistics.median(sample_us):.1f} | {statistics.median(metrics_us):.1f} | {said(codes)} |"
            )
        for buffer in (older, newer):
            nvml.nvmlGpmSampleFree(buffer)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100, metavar="N")
    parser.add_argument("--gpus", type=lambda s: [int(i) for i in s.split(",")], metavar="0,1", help="default: all")
    parser.add_argument("--intervals", type=lambda s: [float(i) for i in s.split(",")], metavar="S,S",
                        default=[0.02, 0.05, 0.1, 0.11, 0.15, 0.2, 0.5, 1.0])  # fmt: skip
    parser.add_argument("--gpm-samples", type=int, default=20, metavar="N")
    options = parser.parse_args(argv)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        reason: GputopError = status.open_error(error.value)
        print(f"nvml_calls: {reason}", file=sys.stderr)
        return reason.exit_code
    who = "root" if os.geteuid() == 0 else f"user {os.geteuid()}"
    print(f"# NVML calls, driver {nvml_text(nvml.nvmlSystemGetDriverVersion)}, {platform.machine()}, as {who}")
    for index in options.gpus or range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        print(f"\nGPU {index}: {nvml_text(nvml.nvmlDeviceGetName, handle)}")
        print_calls(index, handle, options.calls)
        print_gpm(index, handle, options.intervals, options.gpm_samples)
    nvml.nvmlShutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
