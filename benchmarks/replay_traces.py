"""How well the replay reproduces real traces, and what it makes of cures: one row of a table per trace.

    python benchmarks/replay_traces.py TRACE... [--together RANK RANK ...]

A trace is a file; with --together all files are the ranks of one job. "error" is by how much a replay of the unchanged
steps, with usual latencies in place of the recorded ones, misses their time. The others are what is saved of the step:
all FP32 matrix kernels of ordinary cores three times as fast, all kernels three times as fast, launching without time
of the host, no wait of the host for the GPU (large pageable copies
excepted, which wait by nature), each batch ready when it is asked for.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from gputop.advice.registry import limit
from gputop.analysis.gpu.device_time import timelines
from gputop.analysis.steps.steps import find_steps
from gputop.analysis.what_if.cure import Cure
from gputop.analysis.what_if.host_waits import host_waits
from gputop.analysis.what_if.replay import replay_window
from gputop.trace.complete_part import up_to_last_gpu_event
from gputop.trace.kernel_names import classify
from gputop.trace.model import Kind
from gputop.trace.readers.load import load


def row(paths: list[str]) -> list[str]:
    trace = up_to_last_gpu_event(load(paths))
    replay = replay_window(trace, timelines(trace), find_steps(trace))
    assert replay is not None, "no GPU ran in the steps"
    device = trace.device
    kernels = np.flatnonzero(device.kind == Kind.COMPUTE)
    kinds = [classify(name) for name in trace.names]
    plain = np.array([kind.dtype == "fp32" and kind.tensor_core is False for kind in kinds] + [False])
    cures = (
        Cure(assumes="", scaled=((kernels[plain[device.name[kernels]]], 1 / 3),)),
        Cure(assumes="", scaled=((kernels, 1 / 3),)), Cure(assumes="", launching=True),
        Cure(assumes="", calls=host_waits(trace, limit("copies_pageable.bytes")).calls),
        Cure(assumes="", input_left=0.0))
    return [Path(paths[0]).name.split(".")[0], f"{replay.recorded_ns / 1e6:.2f}", f"{replay.modeled_ns / 1e6:.2f}",
            f"{100 * replay.error:.1f}", *(f"{100 * replay.saved(cure):.1f}" for cure in cures)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*")
    parser.add_argument("--together", nargs="*", default=[])
    options = parser.parse_args()
    print("| trace | recorded ms | replayed ms | error % | FP32 ×3 | kernels ×3 | launching | waits | input |")
    print("|---|" + "---:|" * 8)
    for paths in [*([options.together] if options.together else []), *([path] for path in options.traces)]:
        print(f"| {' | '.join(row(paths))} |")


if __name__ == "__main__":
    main()
