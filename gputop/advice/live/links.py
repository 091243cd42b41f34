"""Live rules about the link between GPU and host, full or slower than it could be, and about RDMA: an adapter is full
while the GPUs wait."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from gputop.advice.fix_code import code, code_for
from gputop.advice.live.node_view import NodeView, gpus_text
from gputop.advice.registry import limit, source
from gputop.advice.verdict import NO_FIGURE, Explanation, Missing, Verdict, known
from gputop.core.samples import PORT_ACTIVE, AdapterSample, GpuSample
from gputop.sources.nvml.traffic import link_bytes_per_s
from gputop.text.units import percent, rate

_LINK = "pcie_max_bytes_per_s"
_WAYS = {"pcie_rx_bytes_per_s": "host-to-device", "pcie_tx_bytes_per_s": "device-to-host"}


class _SlowLink(Struct, frozen=True):
    gpu: GpuSample
    slow_share: float  # of the readings at work
    bytes_per_s: float
    max_bytes_per_s: float
    traffic: float | None = None  # the larger direction's, of what the link carries


class PcieLinkDegraded(Verdict, frozen=True, kw_only=True):
    window_s: float
    worst: _SlowLink


def judge_pcie_link_degraded(view: NodeView) -> PcieLinkDegraded | Missing | None:
    """A busy GPU whose link runs at fewer lanes or a lower generation than it can."""
    rule, window_s = "pcie_link_degraded", view.seconds("pcie_link_degraded.window_s")
    busy = limit("pcie_link_degraded.busy")
    slow: list[_SlowLink] = []
    judged, missing = False, ""
    for gpu in view.readable_gpus:
        info = gpu.info
        full = link_bytes_per_s(info.pcie_gen_max or 0, info.pcie_width_max or 0)
        if full is None:
            missing = missing or f"the highest PCIe generation and width of {gpus_text([gpu])}"
            continue
        if view.mean(gpu, _LINK, window_s) is None:
            reason = gpu[_LINK].reason or "not yet seen for that long"
            missing = missing or f"generation and width of the PCIe link of {gpus_text([gpu])}: {reason}"
            continue
        rates, util, active = (view.all_values(gpu, metric, window_s) for metric in (_LINK, "gpu_util", "sm_active"))
        rates = [rate for rate, u, a in zip(rates, util, active, strict=True) if rate == rate  # NaN is not
                 and (u >= busy or a >= busy)]
        if len(rates) < limit("min_readings"):
            continue  # idle: links run slower on purpose
        judged = True
        least = limit("pcie_link_degraded.rate") * full
        below = [rate for rate in rates if rate < least]
        share = len(below) / len(rates)
        if below and share >= view.limit(rule, "share_", info.index):
            slow.append(_SlowLink(gpu, share, median(below), full))
    if slow:
        slow = [replace(link, traffic=_traffic(view, link, window_s)) for link in slow]
        used = [link.traffic for link in slow if link.traffic is not None]
        medium = bool(used) and max(used) >= view.level(rule, f"{rule}.traffic_", "medium")
        return PcieLinkDegraded(
            gpus=tuple(sorted(link.gpu.info.index for link in slow)), severity="medium" if medium else "low",
            window_s=window_s, worst=min(slow, key=lambda link: link.bytes_per_s / link.max_bytes_per_s))
    return None if judged else Missing(
        missing or f"{limit('min_readings'):.0f} readings from a working GPU in the last {window_s:.0f} s, because "
                   "idle links run slower by design")


def _traffic(view: NodeView, link: _SlowLink, window_s: float) -> float | None:
    """The larger direction's mean traffic, of what the link carries."""
    means = [mean for metric in _WAYS if (mean := view.mean(link.gpu, metric, window_s)) is not None]
    return max(means) / link.bytes_per_s if means else None


def describe_pcie_link_degraded(v: PcieLinkDegraded) -> Explanation:
    link, gpu = v.worst, v.worst.gpu
    gen, width, now = gpu["pcie_gen"].value, gpu["pcie_width"].value, gpu[_LINK].value
    trained = ""
    if gen and width and now and abs(now - link.bytes_per_s) < 0.01 * now:
        trained = (f" (generation {gen:.0f} × {width:.0f} instead of "
                   f"{gpu.info.pcie_gen_max} × {gpu.info.pcie_width_max})")
    return Explanation(
        title=f"{gpus_text(v.gpus)}: PCIe link below its full rate",
        why=f"While GPU {gpu.info.index} was busy in the last {v.window_s:.0f} s, its link ran at "
            f"{rate(link.bytes_per_s)}{trained}. The GPU and the board support {rate(link.max_bytes_per_s)}, so "
            "copies and input take longer than necessary.",
        evidence=known({
            "window_s": v.window_s, "slow_share_ratio": link.slow_share, "link_max_bytes_per_s": link.max_bytes_per_s,
            "link_bytes_per_s": link.bytes_per_s, "traffic_of_link_ratio": link.traffic}),
        brief=f"The link runs at {rate(link.bytes_per_s)} but supports {rate(link.max_bytes_per_s)}.",
        action="Have the card reseated, and have its slot, riser, and BIOS settings checked. Some virtual machines and "
               "shared slots have fewer lanes by design.",
        snippet=code("pcie_link_degraded", "link", INDEX=gpu.info.index),
        gain="depends on how much is copied; " + NO_FIGURE,
        source="current and maximum PCIe generation and width from NVML; " + source("pcie_link_degraded.busy"))


class _FullLink(Struct, frozen=True):
    gpu: GpuSample
    metric: str  # the direction
    window_s: float
    bytes_per_s: float
    link_bytes_per_s: float

    @property
    def share(self) -> float:
        return self.bytes_per_s / self.link_bytes_per_s


class PcieSaturated(Verdict, frozen=True, kw_only=True):
    worst: _FullLink
    activity: tuple[str, float] | None  # metric and mean of that GPU; None: not known


def judge_pcie_saturated(view: NodeView) -> PcieSaturated | Missing | None:
    """Copies fill the link most of the time."""
    rule = "pcie_saturated"
    left_out = view.gpus_left_out(rule)
    full: dict[int, _FullLink] = {}
    judged, missing = False, ""
    for gpu in view.readable_gpus:
        link, index = gpu[_LINK].value, gpu.info.index
        for metric in _WAYS:
            mean, window_s = _rate(view, gpu, metric)
            if mean is None or not link:
                missing = missing or _no_traffic(gpu, metric, window_s)
                continue
            judged = True
            full_link = _FullLink(gpu, metric, window_s, mean, link)
            if full_link.share >= view.limit(rule, "rate_", index) and index not in left_out and (
                    index not in full or full_link.share > full[index].share):
                full[index] = full_link
    if not full:
        return None if judged else Missing(missing or "a GPU whose PCIe traffic can be read")
    worst = max(full.values(), key=lambda full_link: full_link.share)
    activity = view.activity(worst.gpu, worst.window_s)
    medium = activity is not None and activity[1] < view.level(rule, f"{rule}.medium_", "medium")
    return PcieSaturated(gpus=tuple(sorted(full)), severity="medium" if medium else "low", worst=worst,
                         activity=activity)


def describe_pcie_saturated(v: PcieSaturated) -> Explanation:
    worst, reading = v.worst, v.worst.gpu[v.worst.metric]
    evidence = {"window_s": worst.window_s, worst.metric: worst.bytes_per_s, "link_bytes_per_s": worst.link_bytes_per_s,
                "traffic_of_link_ratio": worst.share}
    waits = ""
    if v.activity is not None:
        evidence[f"{v.activity[0]}_ratio"] = v.activity[1]
        if v.severity == "medium":
            waits = f" The GPU was active for {percent(v.activity[1])} of the time."
    coarse = " (from samples of 20 ms)" if reading.coarse else ""
    return Explanation(
        title=f"{gpus_text(v.gpus)}: PCIe link saturated",
        why=f"On GPU {worst.gpu.info.index}, {_WAYS[worst.metric]} traffic was {rate(worst.bytes_per_s)}{coarse} over "
            f"the last {worst.window_s:.0f} s. The raw link rate is {rate(worst.link_bytes_per_s)}, of which 80-90% is "
            f"achievable.{waits}",
        evidence=evidence, unknown="which copies?",
        brief=f"{_WAYS[worst.metric].capitalize()} traffic is {rate(worst.bytes_per_s)} (raw link rate: "
              f"{rate(worst.link_bytes_per_s)}).",
        action="Copy less: send input in its smallest type (uint8 images) and decode or cast it on the GPU. Keep "
               "reused data on the GPU, and stop offloading if there is enough memory. A capture names the copies.",
        snippet=code_for(v.framework, "pcie_saturated"),
        gain="depends on whether the copies overlap with kernels; " + NO_FIGURE,
        source=("NVML PCIe throughput (20 ms)" if reading.coarse else f"PCIe traffic ({reading.source or 'counters'})")
               + "; " + source("pcie_saturated.rate_enter"))


def _rate(view: NodeView, gpu: GpuSample, metric: str) -> tuple[float | None, float]:
    """Mean traffic and its window. 20-ms samples, kept until the next one, count only if there are enough."""
    if not gpu[metric].coarse:
        window_s = view.seconds("window_s")
        return view.mean(gpu, metric, window_s), window_s
    window_s = view.seconds("pcie_saturated.coarse_window_s")
    mean = view.mean(gpu, metric, window_s)
    if mean is None:
        return None, window_s
    samples = 1 + sum(a != b for a, b in pairwise(view.values(gpu, metric, window_s)))
    return (mean if samples >= limit("pcie_saturated.coarse_count") else None), window_s


def _no_traffic(gpu: GpuSample, metric: str, window_s: float) -> str:
    for name in (metric, _LINK):
        if gpu[name].reason is not None:
            return f"{name} of {gpus_text([gpu])}: {gpu[name].reason}"
    if gpu[metric].coarse:
        return (f"{limit('pcie_saturated.coarse_count'):.0f} different 20-ms samples of traffic in {window_s:.0f} s, "
                "because single samples show little")
    return f"{window_s:.0f} s of PCIe traffic"


_NET = "network_bound"
_RDMA_WAY = ("received", "sent")  # in the order of HostHistoryPoint.rdma_bytes_per_s


class NetworkBound(Verdict, frozen=True, kw_only=True):
    """``adapter`` is the fullest of ``full_adapters``; its figures are means over the window, ``way`` the fuller
    direction."""

    window_s: float
    adapter: str
    way: str
    rdma_bytes_per_s: float
    link_bytes_per_s: float
    waiting: Mapping[int, float]  # activity of the GPUs that wait
    full_adapters: int
    adapters: int  # of the fullest one's kind, whose links work and whose traffic is known
    retransmits: float | None  # of all adapters, in the window


def judge_network_bound(view: NodeView) -> NetworkBound | Missing | None:
    """An RDMA adapter carries nearly what its link can, and GPUs have time left. Without such adapters there is
    nothing to judge, and nothing to abstain from."""
    window_s = view.seconds("window_s")
    working = [adapter for adapter in view.sample.host.adapters if adapter.state == PORT_ACTIVE]
    if not working:
        return None
    left_out = view.gpus_left_out(_NET)
    waiting = {gpu.info.index: activity[1] for gpu in view.warmed_up_gpus
               if gpu.info.index not in left_out and (activity := view.activity(gpu, window_s)) is not None
               and limit("low_sm_active.pause") < activity[1] <= view.limit(_NET, "waiting_", gpu.info.index)}
    if not waiting:
        return None
    full, missing = [], ""
    readable: list[AdapterSample] = []  # of the others nobody knows whether they could carry more
    for adapter in working:
        traffic = _rdma_traffic(view, adapter, window_s)
        link = adapter["rdma_max_bytes_per_s"].value
        if traffic is None or not link:
            missing = missing or _why(adapter, window_s)
            continue
        readable.append(adapter)
        if max(traffic) >= view.limit(_NET, "rate_", min(waiting)) * link:
            full.append((max(traffic) / link, adapter, traffic, float(link)))
    if not full:
        return Missing(missing) if missing else None
    _, adapter, traffic, link = max(full, key=lambda other: other[0])
    return NetworkBound(
        gpus=tuple(sorted(waiting)), severity="medium", window_s=window_s, adapter=adapter.name,
        way=_RDMA_WAY[traffic.index(max(traffic))], rdma_bytes_per_s=max(traffic), link_bytes_per_s=link,
        waiting=waiting, full_adapters=sum(other.link_layer == adapter.link_layer for _, other, *_ in full),
        adapters=sum(other.link_layer == adapter.link_layer for other in readable),
        retransmits=_retransmits(view, window_s))


def _rdma_traffic(view: NodeView, adapter: AdapterSample, window_s: float) -> tuple[float, float] | None:
    """Mean bytes/s received and sent."""
    def mean(way: int) -> float | None:
        return view.host_mean(lambda point: rates[way] if (rates := point.rdma_bytes_per_s.get(adapter.name)) else None,
                              window_s)

    received, sent = mean(0), mean(1)
    return None if received is None or sent is None else (received, sent)


def _retransmits(view: NodeView, window_s: float) -> float | None:
    """Increase from the beginning of the window to its end; None: not counted, or reset."""
    points = [point.rdma_retransmits for point in view.host(window_s) if point.rdma_retransmits]
    if len(points) < 2 or points[0].keys() != points[-1].keys():
        return None
    more = sum(points[-1].values()) - sum(points[0].values())
    return more if more >= 0 else None


def _why(adapter: AdapterSample, window_s: float) -> str:
    reason = next((r for m in ("rdma_rx_bytes_per_s", "rdma_tx_bytes_per_s", "rdma_max_bytes_per_s")
                   if (r := adapter[m].reason)), "not yet seen for that long")
    return f"{window_s:.0f} s of traffic of RDMA adapter {adapter.name}: {reason}"


def describe_network_bound(v: NetworkBound) -> Explanation:
    share = v.rdma_bytes_per_s / v.link_bytes_per_s
    evidence = {"window_s": v.window_s, "rdma_bytes_per_s": v.rdma_bytes_per_s, "link_bytes_per_s": v.link_bytes_per_s,
                "traffic_of_link_ratio": share, "gpu_activity_ratio": min(v.waiting.values())}
    again = ""
    if v.retransmits:
        evidence["retransmits_count"] = v.retransmits
        again = f" The adapters retransmitted data {v.retransmits:.0f} times."
    some = "" if v.full_adapters == v.adapters else (
        f" {v.full_adapters} of {v.adapters} adapters {'is' if v.full_adapters == 1 else 'are'} saturated, and the "
        "others could carry part of the traffic.")
    return Explanation(
        title=f"The network is saturated while {gpus_text(v.gpus)} {'waits' if len(v.gpus) == 1 else 'wait'}",
        why=f"RDMA adapter {v.adapter} {v.way} {rate(v.rdma_bytes_per_s)} on average over {v.window_s:.0f} s, or "
            f"{percent(share)} of its link rate. The least active GPU was active for only "
            f"{percent(min(v.waiting.values()))} of this time.{some}{again}",
        evidence=evidence, unknown="which collectives, and how much of their time is exposed?",
        brief=f"{v.adapter} {v.way} {rate(v.rdma_bytes_per_s)}, or {percent(share)} of its link rate.",
        action="Send less data between the nodes, or overlap it with compute: use bf16 gradients, accumulation over "
               "several batches, and collectives that overlap with the backward pass. NCCL_DEBUG=INFO shows whether "
               "NCCL uses every adapter (NCCL_IB_HCA), and gputop doctor lists the adapters. "
               "A capture shows the collectives.",
        snippet=code("network_bound", "log"),
        gain="depends on how much of the communication is exposed; " + NO_FIGURE,
        source="port counters in /sys/class/infiniband; " + source(f"{_NET}.rate_enter", f"{_NET}.waiting_enter"))
