"""Two real workers of one job, captured at once."""

from __future__ import annotations

import json

import pytest

from gputop.cli import main
from gputop.core.errors import EXIT_FAILED
from gputop.trace.readers.clock_file import HostClock, write_clocks
from gputop.trace.readers.load import load
from tests import xspace_messages as messages
from tests.workers_job import start_workers

pytestmark = pytest.mark.tensorflow

AHEAD_NS = 137_000_000  # what the second worker's clock is made to be ahead by


def test_two_workers_of_one_job(tmp_path, capsys):
    for attempt in range(4):
        logdir = tmp_path / str(attempt)
        with start_workers() as job:
            servers = job.servers
            command = ["capture", "--attach", ",".join([*servers, "127.0.0.1:1"]), "--seconds", "2", "--json",
                       "--logdir", str(logdir)]
            assert main(command) == EXIT_FAILED, "they are of TensorFlow 2.21, and call each other"
            assert "a capture may end the job" in capsys.readouterr().err and not logdir.exists()
            status = main([*command, "--accept-risk"])
            out, err = capsys.readouterr()
            lost = status != 0 or any(worker["error"] for worker in json.loads(out)["capture"]["workers"])
            if not (lost and job.crashed()):
                break
    else:
        pytest.skip("TensorFlow's profiler took its job down four times running")
    assert status == 0, err
    document = json.loads(out)
    capture = document["capture"]
    assert [w["address"] for w in capture["workers"]] == servers and "not captured: 127.0.0.1:1" in err
    assert [(w["error"], w["clock_error_s"]) for w in capture["workers"]] == [(None, 0)] * 2, "one machine, one clock"
    began = [w["began_s"] for w in capture["workers"]]
    assert max(began) - min(began) < 2, "they were recorded at one time"
    (run,) = (logdir / "plugins" / "profile").iterdir()
    assert capture["path"] == str(run)
    traces = sorted(run.glob("*.xplane.pb"))
    assert len(traces) == 2 and len(document["trace"]["hosts"]) == 2
    assert document["steps"]["count"] > 1

    # The same traces as of two machines whose clocks differ, which the capture knew to 2 ms.
    before = load([run])
    space = messages.XSpace.FromString(traces[1].read_bytes())
    space.hostnames[0] = "another-machine"
    for plane in space.planes:
        if plane.name == "Task Environment":
            for stat in plane.stats:
                stat.uint64_value += AHEAD_NS
    traces[1].write_bytes(space.SerializeToString())
    write_clocks(run, {traces[0].name: HostClock(), traces[1].name: HostClock(AHEAD_NS - 1_000_000, 2_000_000)})
    after = load([run])
    assert [note.id for note in after.quality if note.id == "clocks"], "the steps' collectives were compared"
    assert _span_ns(after) == pytest.approx(_span_ns(before), abs=3_000_000), "on one clock again"


def _span_ns(trace):
    return trace.profile_window_ns[1] - trace.profile_window_ns[0]
