"""benchmarks/nvml_calls.py over the fake driver library: it measures every call and names what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gputop.sources.nvml.fields import FIELDS
from tests.nvml_fake import environment

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks/nvml_calls.py"


def run(library: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--calls", "3", "--gpm-samples", "2", "--intervals", "0.02,0.12"],
        env=environment(library, *settings),
        capture_output=True,
        text=True,
        timeout=60,
        check=False)


def test_every_call_is_in_the_table_with_its_result(nvml_library: Path) -> None:
    done = run(nvml_library, "gpus 2", "refuse field:82 3 1", "fault nvmlDeviceGetTotalEccErrors 1 1 2 code 999")
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if line[:1] == "|"]
    calls = [row for row in rows if len(row) == 7 and "→" in row[0] and row[0] != "call → metrics"]
    assert len(calls) == 2 * (len(FIELDS) + sum(field.fallback is not None for field in FIELDS))
    assert all(float(row[4]) > 0 for row in calls)
    results = [row[6] for row in calls if row[0].startswith("field value 82")]
    assert results == ["ok", "3 (3×): not supported by this GPU"]
    assert any("999" in row[6] for row in calls if row[0].endswith("ecc_corrected"))
    # At 20 ms the byte rates are 0, and no error says so; at 120 ms they are real. (Where the machine is so
    # busy that 20 ms become 100, some are real there, too.)
    zero = [int(row[3].rstrip("%")) for row in rows if row[0] in ("0.02", "0.12")]
    assert zero[1::2] == [0, 0]
    assert max(zero[::2]) > 0


def test_without_gpm_and_without_a_driver_it_says_so(nvml_library: Path) -> None:
    assert "needs Hopper" in run(nvml_library, "gpus 1", "gpm 0").stdout
    failed = run(nvml_library, "init 9")
    assert failed.returncode == 3
    assert "kernel module" in failed.stderr
