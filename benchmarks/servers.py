"""What gputop gets from the profiler servers of each TensorFlow, and of JAX, on the CPU: a table.

    python benchmarks/servers.py [--versions 2.13,2.15,2.17,2.19,2.20,2.21,jax] [--where DIR]

Each gets a virtual environment of its own (tests/environments.py), kept in DIR for the next time, with
gputop installed in it. Told of each: how the trace comes, whether it says when it was recorded, how far
from a common start it began, steps found, whether ``pip check``
is clean, and whether gputop captures from inside of that environment, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402

from gputop.analysis.steps.steps import find_steps  # noqa: E402
from gputop.core.errors import GputopError  # noqa: E402
from gputop.profiler.discovery import Finder  # noqa: E402
from gputop.profiler.xprof.outline import session_window_ns  # noqa: E402
from gputop.trace.readers.load import load  # noqa: E402
from tests.environments import JAX, Environment, Recipe, environment  # noqa: E402
from tests.jax_job import jax_job  # noqa: E402
from tests.profiler.capturing import capture  # noqa: E402
from tests.tf_job import start_tf_job  # noqa: E402

RECIPES = {
    "2.13": Recipe("tensorflow-2.13", ("tensorflow-cpu==2.13.*",), (11, 10)),
    "2.15": Recipe("tensorflow-2.15", ("tensorflow-cpu==2.15.*",), (11, 10)),
    "2.17": Recipe("tensorflow-2.17", ("tensorflow-cpu==2.17.*",), (12, 11, 10)),
    "2.18": Recipe("tensorflow-2.18", ("tensorflow-cpu==2.18.*",), (12, 11, 10)),
    "2.19": Recipe("tensorflow-2.19", ("tensorflow-cpu==2.19.*",), (12, 11, 10)),
    "2.20": Recipe("tensorflow-2.20", ("tensorflow-cpu==2.20.*",), (13, 12, 11, 10)),
    "2.21": Recipe("tensorflow-2.21", ("tensorflow-cpu==2.21.*",), (13, 12, 11, 10)),
    "jax": JAX,
}
COLUMNS = ("server", "protobuf", "grpcio", "found as", "trace comes by", "tells when", "start off by", "steps",
           "pip check", "from inside")
_AHEAD_S = 1.0


def examine(recipe: Recipe) -> list[str]:
    """One line of the table; raises what stops it."""
    place = environment(recipe)
    with contextlib.ExitStack() as stack:
        if recipe is JAX:
            address, pid, _ = stack.enter_context(jax_job(place.python))
        else:
            job = stack.enter_context(start_tf_job("fast", python=str(place.python)))
            address, pid = job.address, job.pid
        logdir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = next((s for s in Finder().find([pid]).servers if s.address == address), None)
        start_ns = time.time_ns() + round(_AHEAD_S * 1e9)
        result = capture(address, seconds=1.0, logdir=logdir, pid=pid, start_ns=start_ns)
        window_ns = session_window_ns(result.path)
        steps = find_steps(load([result.path]))
        off = "not told" if window_ns is None else f"{(window_ns[0] - start_ns) / 1e3:.0f} µs"
        if window_ns is None and result.took_s > 1.0 + 0.9 * _AHEAD_S:
            off = f"waited ({result.took_s:.2f} s)"
        return [
            recipe.name, *_versions(place), f"{server.framework} {server.version}" if server else "not found",
            result.delivered, "yes" if window_ns else "no", off,
            f"{steps.count} ({steps.times.anchor})"[:44] if steps else "none",
            "clean" if place.run("-m", "pip", "check").returncode == 0 else "BROKEN", _inside(place, address, logdir),
        ]


def _versions(place: Environment) -> tuple[str, str]:
    code = "from importlib.metadata import version as v; print(v('protobuf'), v('grpcio'))"
    protobuf, grpcio = place.run("-c", code).stdout.split()
    return protobuf, grpcio


def _inside(place: Environment, address: str, logdir: Path) -> str:
    done = place.run("-m", "gputop", "capture", "--attach", address, "--seconds", "1", "--json",
                     "--logdir", str(logdir))
    if done.returncode:
        return f"status {done.returncode}: {done.stderr.strip().splitlines()[-1][:60]}"
    return f"{len(json.loads(done.stdout)['findings'])} findings"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--versions", default=",".join(RECIPES))
    parser.add_argument("--where", type=Path, help="where the environments are kept (below this Python's)")
    args = parser.parse_args()
    if args.where is not None:
        os.environ["GPUTOP_TEST_ENVIRONMENTS"] = str(args.where.resolve())
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS), flush=True)
    for version in args.versions.split(","):
        try:
            cells = examine(RECIPES[version])
        except (pytest.skip.Exception, GputopError, RuntimeError) as error:
            cells = [RECIPES[version].name, f"not examined: {str(error)[:200]}"]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
