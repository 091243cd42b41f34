"""Real traces, where they are, and their analyses. No test may change one."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from gputop.advice.trace.facts import TraceFacts
from gputop.analysis.results import Analysis
from gputop.diagnosis.diagnose import analyze, analyze_to_facts
from gputop.trace.model import Trace
from gputop.trace.readers.load import load

DATA = (Path(__file__).parents[2] / "../shared/data").resolve()
needs_data = pytest.mark.skipif(not DATA.exists(), reason="the shared real traces are not on this machine")
FILES = {
    "dlrm": "dlrm_8gpu_v100/*.json.gz",
    "a100": "kineto/a100_launch_bound.json.gz", "v100": "kineto/v100_healthy.json.gz",
    "resnet50": "kineto_pair/resnet50_w4_old.pt.trace.json.gz",
    "h100": "nsys/h100_2gpu_1s.sqlite", "mfu": "nsys/mfu_2gpu_before.sqlite",
    "amd_8gpu": "xplane_amd/jax_conv_minimal_08*.pb", "amd_legacy": "xplane_amd/jax_conv_minimal_legacy*.pb",
    "amd_attention": "xplane_amd/te_fused*.pb",
}


# What follows is made once for tests of files that share a process, see tests/conftest.py.


@cache
def trace_of(name: str) -> Trace:
    return load(files_of(name))


@cache
def facts_of(name: str) -> TraceFacts:
    return analyze_to_facts(trace_of(name))


def analyzed(name: str) -> Analysis:
    return facts_of(name).analysis


@cache
def analysis_of(*files: Path) -> Analysis:
    """The analysis of one trace, which itself is not kept but for those of FILES."""
    name = next((name for name in FILES if files == tuple(files_of(name))), None)
    return analyze([str(file) for file in files]) if name is None else analyzed(name)


@cache
def files_of(name: str) -> list[Path]:
    return sorted(DATA.glob(FILES[name]))


def shared_inputs() -> list[tuple[Path, ...]]:
    """The files of each trace."""
    single = [*DATA.glob("xplane_*/*.*[bz]"), *DATA.glob("kineto*/*.gz"), *DATA.glob("nsys/*.sqlite"),
              *DATA.glob("cases/*.gz")]
    sets = [DATA / "dlrm_8gpu_v100", DATA / "torchrec_4v100", *DATA.glob("cases/ddp_*")]
    return [(path,) for path in sorted(single)] + [tuple(sorted(folder.glob("*.gz"))) for folder in sorted(sets)]
