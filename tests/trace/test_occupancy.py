from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from gputop.trace.occupancy import LaunchShape, theoretical_occupancy, with_estimate
from tests.records import replace

DATA = Path(__file__).resolve().parents[2] / "../shared/data/kineto"


@pytest.mark.parametrize(("capability", "threads", "registers", "shared", "occupancy"), [
    ((8, 0), 1024, 32, 0, 1.0),
    ((8, 0), 1024, 33, 0, 0.5),  # one register more, and the second block does not fit
    ((8, 0), 256, 255, 0, 0.125),
    ((7, 0), 32, 16, 0, 0.5),  # 32 blocks of a warp
    ((9, 0), 384, 168, 230_400, 12 / 64),
    ((7, 5), 256, 32, 32 << 10, 0.5),
    ((8, 6), 1, 0, 0, 16 / 48),
])
def test_limits(capability, threads, registers, shared, occupancy):
    assert theoretical_occupancy(capability, threads, registers, shared) == pytest.approx(occupancy)


@pytest.mark.parametrize(("capability", "threads", "registers", "shared"), [
    (None, 256, 32, 0), ((3, 5), 256, 32, 0), ((8, 0), 256, -1, 0), ((8, 0), 256, 32, -1), ((8, 0), 0, 32, 0),
    ((8, 0), 256, 32, 1 << 20), ((8, 0), 4096, 32, 0),
])
def test_unknown_gpus_and_blocks_that_fit_none(capability, threads, registers, shared):
    assert theoretical_occupancy(capability, threads, registers, shared) is None


@pytest.mark.skipif(not DATA.exists(), reason="the shared real traces are not on this machine")
@pytest.mark.parametrize(("name", "capability", "sms"), [
    ("a100_launch_bound", (8, 0), 108), ("v100_healthy", (7, 0), 80),
])
def test_agrees_with_kineto_on_every_kernel(name, capability, sms):
    """Kineto bounds the blocks by the grid's blocks per SM, rounds to a percent, and fails (writes 0) for kernels with
    more than 48 KiB of shared memory."""
    compared = 0
    for event in json.loads(gzip.decompress((DATA / f"{name}.json.gz").read_bytes()))["traceEvents"]:
        args = event.get("args", {})
        percent = args.get("est. achieved occupancy %")
        if percent is None or (percent == 0 and args["shared memory"] > 48 << 10):
            continue
        shape = LaunchShape(tuple(args["grid"]), tuple(args["block"]), args["registers per thread"],
                            args["shared memory"])
        estimate = with_estimate(shape, *capability, sms).occupancy
        assert estimate is not None and estimate * 100 == pytest.approx(percent, abs=0.51)
        compared += 1
    assert compared > 2000


def test_no_estimate_without_the_gpus_figures():
    shape = LaunchShape((8, 1, 1), (256, 1, 1), 32, 0)
    assert with_estimate(shape, 8, 0, 4).occupancy == pytest.approx(2 * 256 / 2048)
    for figures in ((None, 0, 4), (8, 0, None), (8, 0, 0), (8, "0", 4), (3, 5, 4)):
        assert with_estimate(shape, *figures) is shape
    recorded = replace(shape, occupancy=0.5)
    assert with_estimate(recorded, 8, 0, 4) is recorded
