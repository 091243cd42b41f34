"""The monitor and the recorder do without what is large: it is imported for the first capture, and not before."""

from __future__ import annotations

import subprocess
import sys

_LARGE = ("numpy", "grpc", "google.protobuf", "importlib.metadata")
_CODE = f"""
import sys
from tests.fakes import StillSession
import gputop.session.finding_store, gputop.sources.dcgm.connection, gputop.tui.app, gputop.tui.monitor.lanes
import gputop.session.session, gputop.session.capture.capture_control
session = StillSession(ticks=200)
from gputop.advice.live.advise import live_advice
live_advice(session.feed.history, session.feed.sample)
assert {{"gputop.advice.live.activity", "gputop.advice.live.user_rules"}} < sys.modules.keys()
from gputop.telemetry.step_period import estimate_step_period
found = estimate_step_period(session.feed.history)
assert found.reason or found.period_s
sample, history = session.feed.sample, session.feed.history
import gputop.commands.record, gputop.replay.parts, gputop.sources.factory
from gputop.replay.format import Encoder
assert Encoder().encode(sample)
assert history.lane(history.uuids[0], "sm_active", end_s=sample.time_s, slice_s=5.0, slices=10).count
sys.exit(f"imported: {{large}}" if (large := [m for m in {_LARGE} if m in sys.modules]) else 0)
"""


def test_samples_live_rules_and_the_step_period_need_nothing_large():
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
