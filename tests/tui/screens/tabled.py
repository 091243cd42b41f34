"""A session whose capture has tables."""

from __future__ import annotations

from typing import Any

from gputop.analysis.results import Analysis
from tests.analyses import make_analysis
from tests.records import replace
from tests.tui.found import FoundSession

STACKS: dict[str, Any] = {
    "basis": "step", "length_s": 4.0, "rate_hz": 98.0, "error_s": 0.004, "cpus": 0.05,
    "gaps": [{"gap": "gap", "s_per_step": 0.08, "gaps": 40, "seen": 39, "lines": [
        {"line": "metrics.py:112 confusion_matrix", "file": "/job/metrics.py", "s_per_step": 0.07, "share": 0.875,
         "inner": "numpy/core.py:3 add"}]},
             {"gap": "input", "s_per_step": 0.02, "gaps": 40, "seen": 40}],
    "flame": [{"line": "train.py:90 <module>", "file": "/job/train.py", "parent": None, "time_s": 0.1, "gap_s": 0.08},
              {"line": "metrics.py:112 confusion_matrix", "file": "/job/metrics.py", "parent": 0, "time_s": 0.075,
               "gap_s": 0.07},
              {"line": "numpy/core.py:3 add", "file": "/e/numpy/core.py", "parent": 1, "time_s": 0.05, "gap_s": 0.05},
              {"line": "tensorflow/…/execute.py:53 quick_execute", "file": "/e/execute.py", "parent": 0,
               "time_s": 0.025, "gap_s": 0.01}]}


def found(**changes: Any) -> Analysis:
    document: dict[str, Any] = {
        "gpus": [{"gpu": 0, "kernels": 40}, {"gpu": 1, "kernels": 9}],
        "trace": {"window_s": 4.0}, "steps": {"count": 4, "mean_s": 1.0, "unit": "step"},
        "kernels": {"by_name": [
            {"name": "gemm_[bold]x", "count": 40, "time_s": 0.8, "mean_s": 0.02, "share": 0.8, "types": {"bf16": 1.0},
             "tensor_core": 1.0, "occupancy": 0.25, "by_gpu": {"0": {}, "1": {}}},
            {"name": "", "names": 7, "count": 9, "time_s": 0.2, "mean_s": 0.1, "share": 0.2, "types": {"unknown": 1.0},
             "tensor_core": None, "occupancy": None, "by_gpu": {"0": {}}}],
            "by_op": None, "occupancy_is": "theoretical"},
        "collectives": {"operations": [{"operation": "AllReduce", "count": 5, "count_per_step": 1.0, "time_s": 0.5,
                                        "transfer_s": 0.1, "waiting": 0.8, "bytes": 4096, "exposed_s": {"0": 0.2},
                                        "reason": None}], "last_to_arrive": {"0": 1, "1": 3}},
        "memory": [{"allocator": "GPU_0_bfc", "peak_bytes": 8 << 30, "capacity_bytes": 16 << 30,
                    "peak_in_window_bytes": 4 << 30, "unattributed_bytes": 1 << 30,
                    "holders": [{"op": "Conv2D", "bytes": 3 << 30, "allocations": 2}]}],
        "copies": {"rows": [{"gpu": 0, "direction": "h2d", "source": "pageable", "target": "device", "count": 3,
                             "bytes": 1000, "time_s": 0.001, "bytes_per_s": 1e6}],
                   "by_op": [{"op": "cast", "direction": "h2d", "count": 1, "bytes": None, "time_s": 0.1}]},
        "ops": {"basis": "steps", "types": [{"type": "Cast", "placement": "host", "count": 4, "host_s": 0.1,
                                             "device_s": 0.0, "example": "model/Cast"}],
                "eager": [{"name": "AddV2", "count": 8, "seconds": 0.01}]},
        "functions": {"functions": [{"name": "train", "calls": 5, "seconds": 1.0, "tracings": 2, "retracings": 1,
                                     "tracing_s": 0.3, "xla": True, "xla_s": 0.2, "modes": {"concrete": 5}}],
                      "xla_compilations": 1, "xla_compile_s": 2.0},
        "input": {"wait_s_per_step": 0.1, "wait_ratio": 0.4, "pipelines": [
            {"bounding": "Prefetch/Map", "stages": [{"path": "Prefetch/Map", "self_s": 1.0, "function_s": 0.9,
                                                     "calls": 10, "workers": 4, "cost_s_per_batch": 0.2,
                                                     "parallelism": 4, "buffer_empty": None}]}]},
        "layers": {"basis": "step", "total_s": 0.1, "gpus": 1, "rows": [
            {"name": "forward", "parent": None, "device_s": 0.06, "wait_s": 0.02, "share": 0.8, "kernels": 6.0},
            {"name": "dense", "parent": 0, "device_s": 0.04, "wait_s": 0.01, "share": 0.5, "kernels": 3.0,
             "flops": 4e9, "flops_known": 0.5, "source": "train.py:7"},
            {"name": "MatMul", "parent": 1, "device_s": 0.04, "wait_s": 0.0, "share": 0.4, "kernels": 1.0},
            {"name": "no op named", "parent": None, "device_s": 0.02, "wait_s": 0.0, "share": 0.2, "kernels": 2.0,
             "reason": "CUDA graphs"}]},
        "limits": {"step_s": 0.1, "steps": [{"id": "launch", "time_s": 0.02}, {"id": "limit", "time_s": 0.08}],
                   "gpu": "H100 SXM", "mfu": 0.4, "hfu": 0.5, "flops": 4e13, "coverage": 0.9, "peaks": [
                       {"dtype": "bf16", "flops_per_s": 989.4e12, "source": "a data sheet"}]},
        "critical_path": {"step": 3, "start_ns": 0, "end_ns": 100_000_000, "kinds": [
            {"id": "host", "time_s": 0.08}, {"id": "kernel", "time_s": 0.02, "other_s": 0.01, "slack_s": 0.05}],
            "slack": [{"kind": "kernel", "name": "gemm", "place": "GPU 0 stream 7", "count": 4, "time_s": 0.01,
                       "slack_s": None}], "reason": "Not sure."},
    }
    return make_analysis(**(document | changes))


class TabledSession(FoundSession):
    def __init__(self) -> None:
        super().__init__()
        self.results.last_capture = replace(self.results.last_capture, analysis=found())
