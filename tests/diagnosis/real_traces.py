"""Real traces, where they are, and their analyses."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from gputop.analysis.results import Analysis
from gputop.diagnosis.diagnose import analyze

DATA = (Path(__file__).parents[2] / "../shared/data").resolve()
needs_data = pytest.mark.skipif(not DATA.exists(), reason="the shared real traces are not on this machine")
FILES = {
    "dlrm": "dlrm_8gpu_v100/*.json.gz",
    "a100": "kineto/a100_launch_bound.json.gz", "v100": "kineto/v100_healthy.json.gz",
    "h100": "nsys/h100_2gpu_1s.sqlite", "mfu": "nsys/mfu_2gpu_before.sqlite",
    "amd_8gpu": "xplane_amd/jax_conv_minimal_08*.pb", "amd_legacy": "xplane_amd/jax_conv_minimal_legacy*.pb",
    "amd_attention": "xplane_amd/te_fused*.pb",
}


@cache
def analysis_of(*files: Path) -> Analysis:
    """The analysis of one trace; for tests of files that share a process, see tests/conftest.py."""
    return analyze([str(file) for file in files])


def analyzed(name: str) -> Analysis:
    return analysis_of(*sorted(DATA.glob(FILES[name])))


def shared_inputs() -> list[tuple[Path, ...]]:
    """The files of each trace."""
    single = [*DATA.glob("xplane_*/*.*[bz]"), *DATA.glob("kineto*/*.gz"), *DATA.glob("nsys/*.sqlite"),
              *DATA.glob("cases/*.gz")]
    sets = [DATA / "dlrm_8gpu_v100", DATA / "torchrec_4v100", *DATA.glob("cases/ddp_*")]
    return [(path,) for path in sorted(single)] + [tuple(sorted(folder.glob("*.gz"))) for folder in sorted(sets)]
