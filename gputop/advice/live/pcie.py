"""Live rules about the link between GPU and host: full, or slower than it could be."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gputop.advice.live.node_view import View, gpus_text
from gputop.advice.registry import limit, source
from gputop.core.findings import Abstained, Finding, Gain, Severity
from gputop.core.samples import GpuSample
from gputop.sources.nvml.pcie import link_bytes_per_s
from gputop.text.units import percent, rate

F32 = npt.NDArray[np.float32]

_NO_FIGURE = "telemetry shows no steps: a capture (c) gives the figure"
_LINK = "pcie_max_bytes_per_s"
_WAYS = {"pcie_rx_bytes_per_s": "host to device", "pcie_tx_bytes_per_s": "device to host"}


# -- pcie_link_degraded -----------------------------------------------------------------------------

def pcie_link_degraded(view: View) -> Finding | Abstained | None:
    """A busy GPU whose link runs at fewer lanes or a lower generation than it can."""
    rule, window_s = "pcie_link_degraded", view.seconds("pcie_link_degraded.window_s")
    slow: dict[int, tuple[GpuSample, dict[str, float]]] = {}
    judged, missing = False, ""
    at_work = _rates_at_work(view, window_s)
    lowest, counts = np.fmin.reduce(at_work, axis=0, initial=np.inf), (~np.isnan(at_work)).sum(axis=0)
    for gpu in view.readable_gpus:
        info = gpu.info
        full = link_bytes_per_s(info.pcie_gen_max or 0, info.pcie_width_max or 0)
        if full is None:
            missing = missing or f"the highest PCIe generation and width of {gpus_text([gpu])}"
            continue
        column = view.column(gpu)
        if not view.readings_count(gpu, _LINK, window_s):
            missing = missing or _no_link(gpu)
            continue
        if counts[column] < limit("min_readings"):
            continue  # idle: links run slower on purpose
        judged = True
        least = limit("pcie_link_degraded.rate") * full
        if lowest[column] >= least:
            continue
        rates = at_work[:, column]
        below = rates[rates < least]
        share = len(below) / counts[column]
        if share >= view.limit(rule, "share_", info.index):
            slow[info.index] = (gpu, {"window_s": window_s, "slow_share_ratio": float(share),
                                      "link_max_bytes_per_s": full, "link_bytes_per_s": float(np.median(below))})
    if not slow:
        if judged:
            return None
        return Abstained(rule, missing or f"{limit('min_readings'):.0f} readings of a GPU at work in the last "
                                          f"{window_s:.0f} s: idle links run slower on purpose")
    return _degraded(view, slow, window_s)


def _rates_at_work(view: View, window_s: float) -> F32:
    """The rates of the links, [look, gpu]; NaN where they are not known or the GPU was not at work."""
    rates, busy = view.window(_LINK, window_s).values, limit("pcie_link_degraded.busy")
    work = np.zeros(rates.shape, bool)
    for metric in ("gpu_util", "sm_active"):
        work |= view.window(metric, window_s).values >= busy  # NaN is not
    return np.where(work, rates, np.float32(np.nan))


def _no_link(gpu: GpuSample) -> str:
    return f"generation and width of the PCIe link of {gpus_text([gpu])}: {gpu[_LINK].reason or 'not yet read'}"


def _degraded(view: View, slow: dict[int, tuple[GpuSample, dict[str, float]]], window_s: float) -> Finding:
    def loss(index: int) -> float:
        evidence = slow[index][1]
        return evidence["link_bytes_per_s"] / evidence["link_max_bytes_per_s"]

    index = min(slow, key=loss)
    gpu, evidence = slow[index]
    shares = {i: _traffic(view, g, e["link_bytes_per_s"], window_s) for i, (g, e) in slow.items()}
    used = [s for s in shares.values() if s is not None]
    shown_medium = any(f.id == "pcie_link_degraded" and f.severity == "medium" for f in view.previous)
    medium = bool(used) and max(used) >= limit("pcie_link_degraded.traffic_" + ("leave" if shown_medium else "enter"))
    if shares[index] is not None:
        evidence["traffic_of_link_ratio"] = shares[index] or 0.0
    gen, width = gpu["pcie_gen"].value, gpu["pcie_width"].value
    now = gpu[_LINK].value
    trained = ""
    if gen and width and now and abs(now - evidence["link_bytes_per_s"]) < 0.01 * now:
        trained = (f" (generation {gen:.0f} × {width:.0f} instead of "
                   f"{gpu.info.pcie_gen_max} × {gpu.info.pcie_width_max})")
    return Finding(
        id="pcie_link_degraded", severity="medium" if medium else "low", origin="live", gpus=tuple(sorted(slow)),
        evidence=evidence, title=f"{gpus_text(slow)}: PCIe link slower than it could be",
        why=f"At work, the link of GPU {index} ran at {rate(evidence['link_bytes_per_s'])}{trained} over the last "
            f"{window_s:.0f} s; GPU and board could do {rate(evidence['link_max_bytes_per_s'])}. Copies and input take "
            "that much longer.",
        action="Have the card reseated and slot, riser and BIOS settings of the link checked; some virtual machines "
               "and shared slots give fewer lanes on purpose.",
        snippet=f"nvidia-smi -q -i {index} | grep -A 12 'GPU Link Info'",
        source="NVML current and maximum PCIe generation and width; " + source("pcie_link_degraded.busy"),
        gain=Gain(None, "depends on how much is copied; " + _NO_FIGURE),
    )


def _traffic(view: View, gpu: GpuSample, link: float, window_s: float) -> float | None:
    """The larger direction's mean traffic, of what the link carries."""
    means = [m for m in (view.mean(gpu, metric, window_s) for metric in _WAYS) if m is not None]
    return max(means) / link if means else None


# -- pcie_saturated -----------------------------------------------------------------------------------

def pcie_saturated(view: View) -> Finding | Abstained | None:
    """Copies fill the link most of the time."""
    rule = "pcie_saturated"
    explained = view.gpus_left_out(rule)
    full: dict[int, tuple[GpuSample, str, dict[str, float]]] = {}
    judged, missing = False, ""
    for gpu in view.readable_gpus:
        link = gpu[_LINK].value
        for metric in _WAYS:
            mean, window_s = _rate(view, gpu, metric)
            if mean is None or not link:
                missing = missing or _no_traffic(gpu, metric, window_s)
                continue
            judged = True
            index = gpu.info.index
            share = mean / link
            if share >= view.limit(rule, "rate_", index) and index not in explained:
                before = full.get(index)
                if before is None or share > before[2]["traffic_of_link_ratio"]:
                    full[index] = (gpu, metric, {"window_s": window_s, metric: mean, "link_bytes_per_s": link,
                                                 "traffic_of_link_ratio": share})
    if not full:
        return None if judged else Abstained(rule, missing or "a GPU whose PCIe traffic can be read")
    index = max(full, key=lambda i: full[i][2]["traffic_of_link_ratio"])
    gpu, metric, evidence = full[index]
    window_s = evidence["window_s"]
    activity = view.activity(gpu, window_s)
    shown_medium = any(f.id == rule and f.severity == "medium" for f in view.previous)
    severity: Severity = "low"
    waits = ""
    if activity is not None:
        evidence[f"{activity[0]}_ratio"] = activity[1]
        if activity[1] < limit("pcie_saturated.medium_" + ("leave" if shown_medium else "enter")):
            severity, waits = "medium", f" while the GPU was active {percent(activity[1])} of the time"
    coarse = ", from looks of 20 ms," if gpu[metric].coarse else ""
    return Finding(
        id=rule, severity=severity, origin="live", gpus=tuple(sorted(full)), evidence=evidence,
        title=f"{gpus_text(full)}: PCIe link full",
        why=f"GPU {index} over the last {window_s:.0f} s: {_WAYS[metric]} traffic was{coarse} "
            f"{rate(evidence[metric])} of the link's raw {rate(evidence['link_bytes_per_s'])}, of which 80-90 % can be "
            f"reached{waits}.",
        action="Copy less: send input in its smallest type (uint8 images) and decode or cast on the GPU, keep what is "
               "used again on the GPU, and stop offloading if there is memory. A capture (c) names the copies.",
        snippet="dataset = dataset.map(keep_uint8).prefetch(tf.data.AUTOTUNE)\n"
                "# in the model: x = tf.cast(images, tf.bfloat16) / 255",
        source=("NVML PCIe throughput (20 ms)" if coarse else f"PCIe traffic ({gpu[metric].source or 'counters'})")
               + "; " + source("pcie_saturated.rate_enter"),
        gain=Gain(None, "depends on whether the copies overlap with kernels; " + _NO_FIGURE),
    )


def _rate(view: View, gpu: GpuSample, metric: str) -> tuple[float | None, float]:
    """Mean traffic and its window. 20-ms looks, kept until the next one, count only if there are enough."""
    if not gpu[metric].coarse:
        window_s = view.seconds("window_s")
        return view.mean(gpu, metric, window_s), window_s
    window_s = view.seconds("pcie_saturated.coarse_window_s")
    mean = view.mean(gpu, metric, window_s)
    if mean is None:
        return None, window_s
    values = view.window(metric, window_s).values[:, view.column(gpu)]
    known = values[~np.isnan(values)]
    looks = 1 + int(np.count_nonzero(np.diff(known)))
    return (mean if looks >= limit("pcie_saturated.coarse_count") else None), window_s


def _no_traffic(gpu: GpuSample, metric: str, window_s: float) -> str:
    for name in (metric, _LINK):
        if gpu[name].reason is not None:
            return f"{name} of {gpus_text([gpu])}: {gpu[name].reason}"
    if gpu[metric].coarse:
        return (f"{limit('pcie_saturated.coarse_count'):.0f} different 20-ms looks at the traffic in {window_s:.0f} s: "
                "single ones say little")
    return f"{window_s:.0f} s of PCIe traffic"
