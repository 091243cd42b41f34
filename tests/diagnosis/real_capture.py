"""A real capture of a small job."""

from __future__ import annotations

from pathlib import Path

CAPTURE = Path(__file__).resolve().parents[1] / "data" / "keras3_slow_input.xplane.pb.gz"
