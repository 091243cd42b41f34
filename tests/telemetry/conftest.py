from __future__ import annotations

import pytest

from gputop.telemetry import sampler
from tests.waiting import PATIENCE_S


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No probe that answers is late, however loaded the machine is."""
    monkeypatch.setattr(sampler, "tick_timeout_s", lambda _: PATIENCE_S)
