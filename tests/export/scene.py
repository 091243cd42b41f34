"""A session with a capture, findings and a job, and one whose every name is hostile."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import msgspec

from gputop.analysis.results import (
    Analysis,
    Breakdown,
    CriticalPath,
    LayerRow,
    Layers,
    Limits,
    LimitStep,
    PathKind,
    Peak,
    RooflinePoint,
    Slack,
    StepRuns,
    TypicalStep,
)
from gputop.core.findings import Finding, Gain
from gputop.core.samples import GpuSample, NodeSample, Reading, XidEvent
from gputop.diagnosis.diagnose import analyze
from gputop.diagnosis.report import text_report
from gputop.profiler.capture.records import CaptureRecord, Server
from tests.fakes import StillSession
from tests.records import replace

_TRACE = Path(__file__).resolve().parents[1] / "data" / "keras3_slow_input.xplane.pb.gz"
HOSTILE = ("</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
           "]]>&amp;<!--'\"\x1b[31m\x00\u202etxt.exe\u2066\ud800[bold]x[/]")
SECRET = "hunter2secret"
RUNS = (("input", 0, 150), ("h2d", 150, 160), ("compute", 160, 390), ("collectives", 390, 400))


def _limits() -> Limits:
    """Two ops below the roofs of one type, of which the memory binds the second."""
    points = (RooflinePoint("Dense_0/dot_general", "bf16", 0.08, 4e14, 900.0),
              RooflinePoint(HOSTILE, "bf16", 0.02, 2e13, 10.0))
    return Limits(step_s=0.3, steps=(LimitStep("limit", 0.1),), gpu="H100 SXM", bytes_per_s=3.35e12, coverage=0.9,
                  peaks=(Peak("bf16", 989.4e12, "test"),), points=points)


@cache
def _analysis() -> tuple[Analysis, str]:
    found = analyze(str(_TRACE))
    path = CriticalPath(3, 0, 300_000_000, (PathKind("input", 0.13), PathKind("kernel", 0.17, 0.01, 0.02)), slack=(
        Slack("kernel", "gemm", "GPU 0 stream 7", 4, 0.01, 0.02), Slack("copy", HOSTILE, HOSTILE, 1, 0.001, None)))
    shown = msgspec.structs.replace(
        found, breakdown=Breakdown(input=0.13, h2d=0.002, compute=0.15, collectives=0.01, d2h=0.0, launch=0.0,
                                   host=0.005, idle=0.003),
        critical_path=path, limits=_limits(), layers=Layers("step", 0.3, 8, (
            LayerRow("forward", None, 0.2, 0.05, 0.8, 10.0), LayerRow(HOSTILE, 0, 0.2, 0.05, 0.8, 10.0),
            LayerRow("no op named", None, 0.05, 0.0, 0.2, 2.0, reason="These kernels name no op.")), None),
        typical_step=TypicalStep(3, 0.3, 400, tuple(StepRuns(g, RUNS) for g in range(8))))
    return shown, text_report(found, 80)


@cache
def _watched(gpus: int, name: str, noise: bool, ticks: int) -> tuple[StillSession, NodeSample]:
    """A session after so many samples, and the last of these."""
    chance = random.Random(7)

    def change(gpu: GpuSample, tick: int) -> GpuSample:
        readings = dict(gpu.readings)
        if noise:
            readings = {m: r if r.value is None or r.unit == "bytes" else replace(r, value=r.value * chance.random())
                        for m, r in readings.items()}
        if name:
            readings["power_w"] = Reading.missing("W", name)
            return replace(gpu, info=replace(gpu.info, name=name), readings=readings, xids_reason=name,
                           clock_event_reasons=(name,))
        xids = (XidEvent(1_800_000_200.0, 79),) if gpu.info.index == 1 else ()
        return replace(gpu, readings=readings, xids=xids)

    out = StillSession(ticks=ticks, gpus=gpus, change=change)
    return out, out.feed.sample


def session(gpus: int = 8, *, name: str = "", noise: bool = False, ticks: int = 300) -> StillSession:
    """A job with a capture; ``name`` takes the place of all that comes from outside, ``noise`` of smooth figures."""
    out, sample = _watched(gpus, name, noise, ticks)
    process = replace(sample.processes[0], command=name or f"python train.py --api-key {SECRET} --lr 0.1",
                      container=name or None, note=name or None, user=name or "ana",
                      cuda_visible_devices=name or "0,1")
    host = replace(sample.host, hostname=name or "node-07", core_ratios=(1.0, 0.3))
    out.feed.sample = replace(sample, processes=(process,), host=host, source=name or sample.source)
    out.watch.servers = (Server("localhost:6009", name or f"python train.py --token={SECRET}", 41231),
                         Server("far:1", problem=name or "no answer", asked=True))
    analysis, report = _analysis()
    finding = Finding(id="input_bound", severity="high", title=name or "Input wait takes 46% of the step",
                      why=name or "No GPU has work.",
                      evidence={name or "wait_s": 0.137, "share_ratio": 0.46},
                      action=name or "Run the map in parallel.",
                      source=name or "XProf", gain=Gain(0.46, name or "assuming it scales"), gpus=(0, 1),
                      snippet=name or "ds = ds.map(\n    fn)", consequences=())
    small = replace(finding, id="idle_gpu", severity="low", gain=Gain(None, "no figure"), origin="live", snippet=None)
    out.results.findings = (replace(finding, consequences=(small,)), small)
    out.results.last_capture = CaptureRecord(
        "localhost:6009", Path("/traces/vm.xplane.pb"), out.feed.sample.time_s - 30, 10.0, 10.2,
        (name or "the server said so",), analysis, name or report, "The limit.")
    return out
