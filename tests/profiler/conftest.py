from __future__ import annotations

from pathlib import Path

import pytest

from gputop.profiler.capture import safe_capture


@pytest.fixture
def logdir(tmp_path: Path) -> Path:
    return tmp_path / "logs"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes of a twentieth of a second, captures from a tenth on."""
    monkeypatch.setattr(safe_capture, "PROBE_S", 0.05)
    monkeypatch.setattr("gputop.profiler.capture.plan.MIN_CAPTURE_S", 0.1)
