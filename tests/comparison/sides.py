"""Sides of a comparison made by hand: what an analysis of such a job would hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from gputop.analysis.gpu.step_series import StepArrays
from gputop.analysis.results import Analysis
from gputop.comparison.sides import Side
from gputop.trace.model import F64
from tests.analyses import make_analysis
from tests.records import replace

SHARES = {"busy": 0.8, "compute": 0.6, "collectives": 0.2, "collectives_exposed": 0.1, "copies": 0.1, "idle": 0.2,
          "launch_delay_s": 2e-5, "kernels": 500.0, "tensor_core_time": 0.5}
PARTS = {"compute": 0.6, "collectives": 0.1, "h2d": 0.05, "d2h": 0.05, "input": 0.1, "launch": 0.05, "host": 0.05,
         "idle": 0.0}


def finding(id_: str, gain: float | None = 0.3, *, severity: str = "high", per: str = "step",
            consequences: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    return {"id": id_, "severity": severity, "title": f"Title of {id_}", "why": "", "evidence": {}, "action": "",
            "snippet": None, "gain": {"step_time": gain, "how": "", "per": per}, "gpus": [0], "source": "",
            "origin": "trace", "consequences": list(consequences)}


def side(seed: int = 0, steps: int = 20, mean_s: float = 0.2, spread: float = 0.03, *, gpus: int = 2,
         step_s: F64 | None = None, with_series: bool = True, iterations: float = 1.0, findings: Any = (),
         abstained: Any = (), h2d_bytes: float = 1e8, kernels: tuple[str, ...] = ("gemm", "relu"),
         parts: dict[str, float] | None = None, simulated: bool = False) -> Side:
    """A job whose steps vary by ``spread`` (relative), as do all its figures, each for itself."""
    rng = np.random.default_rng(seed)

    def noisy(value: float, most: float = np.inf) -> F64:
        return np.clip(value * (1 + spread * rng.standard_normal(len(durations))), 0, most)

    durations = mean_s * (1 + spread * rng.standard_normal(steps)) if step_s is None else step_s
    by_part = {name: noisy(share * mean_s) for name, share in (parts or PARTS).items()}
    by_gpu = {gpu: {name: noisy(value, 1.0 if value < 1 and name != "launch_delay_s" else np.inf)
                    for name, value in SHARES.items()} for gpu in range(gpus)}
    series = StepArrays(durations, by_part, by_gpu, noisy(0.4, 1.0))
    document: dict[str, Any] = {
        "schema": "gputop.analysis/1", "simulated": simulated,
        "steps": {"anchor": "train markers", "confidence": "high", "count": len(durations),
                  "median_s": float(np.median(durations)), "mean_s": float(durations.mean()),
                  "p95_s": float(np.percentile(durations, 95)), "durations_s": durations.tolist(),
                  "iterations_per_step": iterations, "phase": "training"},
        "breakdown": {name: float(values.mean()) for name, values in by_part.items()},
        "gpus": [{"gpu": gpu, "busy": 0.8, "compute": 0.6, "collectives": 0.2, "collectives_exposed": 0.1,
                  "copies": 0.1, "launch_delay_median_s": 2e-5, "kernels_per_s": 2500.0, "tensor_core_time": 0.5}
                 for gpu in range(gpus)],
        "collectives": {"count_per_step": 6.0, "waiting": 0.4},
        "memory": [{"allocator": "GPU_0_bfc", "peak_bytes": 2**30}],
        "kernels": {"by_name": [{"name": name, "time_s": 1.0} for name in kernels]},
        "copies": {"rows": [{"gpu": 0, "direction": "h2d", "bytes_per_step": h2d_bytes}]},
        "findings": list(findings), "abstained": [{"id": id_, "missing": "the trace"} for id_ in abstained],
    }
    return Side(f"{seed}.xplane.pb", "trace" if with_series else "analysis", make_analysis(**document),
                series=series if with_series else None)


def changed(of: Side, change: Callable[[dict[str, Any]], object]) -> Side:
    """The same side with another analysis: ``change`` edits its document."""
    assert of.analysis is not None
    document = json.loads(json.dumps(of.analysis.to_json()))
    change(document)
    return replace(of, analysis=Analysis.from_json(document))
