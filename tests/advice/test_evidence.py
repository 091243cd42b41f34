"""The evidence of findings, of labeled jobs and of real traces."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.advice import analysis_of
from gputop.diagnosis.diagnose import analyze
from tests.advice.evidence import check_evidence
from tests.advice.labeled.cases import fault_case
from tests.advice.labeled.rules import ids_with_rules

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
# One file, or all files of the job in a folder.
SETS = sorted([*(path for path in SHARED.glob("*/*") if path.name.endswith((".gz", ".pb", ".sqlite"))
                 and path.parent.name not in ("dlrm_8gpu_v100", "torchrec_4v100")),
               SHARED / "dlrm_8gpu_v100", SHARED / "torchrec_4v100", *(p for p in SHARED.glob("cases/*") if p.is_dir())]
              if SHARED.is_dir() else [])


@pytest.mark.parametrize("id_", sorted(ids_with_rules()))
def test_findings_of_jobs_with_weak_faults(id_: str) -> None:
    """Those with strong ones: test_labeled."""
    check_evidence(analysis_of(fault_case(id_, "weak", 1)))


@pytest.mark.skipif(not SETS, reason="the shared traces are not on this machine")
@pytest.mark.parametrize("path", SETS, ids=lambda path: path.name)
def test_findings_of_real_traces(path: Path) -> None:
    files = sorted(map(str, path.glob("*.gz"))) if path.is_dir() else [str(path)]
    check_evidence(analyze(files))
