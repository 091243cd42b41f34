"""The live rule about RDMA: an adapter is full while the GPUs wait."""

from __future__ import annotations

from collections.abc import Mapping

from gputop.advice.fix_code import code
from gputop.advice.live.frameworks import NO_FIGURE
from gputop.advice.live.node_view import NodeView, gpus_text
from gputop.advice.registry import limit, source
from gputop.advice.verdict import Explanation, Missing, Verdict
from gputop.core.samples import PORT_ACTIVE, AdapterSample
from gputop.text.units import percent, rate

_RULE = "network_bound"
_WAYS = ("received", "sent")  # in the order of HostHistoryPoint.rdma_bytes_per_s


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
    left_out = view.gpus_left_out(_RULE)
    waiting = {gpu.info.index: activity[1] for gpu in view.warmed_up_gpus
               if gpu.info.index not in left_out and (activity := view.activity(gpu, window_s)) is not None
               and limit("low_sm_active.pause") < activity[1] <= view.limit(_RULE, "waiting_", gpu.info.index)}
    if not waiting:
        return None
    full, missing = [], ""
    readable: list[AdapterSample] = []  # of the others nobody knows whether they could carry more
    for adapter in working:
        traffic = _traffic(view, adapter, window_s)
        link = adapter["rdma_max_bytes_per_s"].value
        if traffic is None or not link:
            missing = missing or _why(adapter, window_s)
            continue
        readable.append(adapter)
        if max(traffic) >= view.limit(_RULE, "rate_", min(waiting)) * link:
            full.append((max(traffic) / link, adapter, traffic, float(link)))
    if not full:
        return Missing(missing) if missing else None
    _, adapter, traffic, link = max(full, key=lambda other: other[0])
    return NetworkBound(
        gpus=tuple(sorted(waiting)), severity="medium", window_s=window_s, adapter=adapter.name,
        way=_WAYS[traffic.index(max(traffic))], rdma_bytes_per_s=max(traffic), link_bytes_per_s=link, waiting=waiting,
        full_adapters=sum(other.link_layer == adapter.link_layer for _, other, *_ in full),
        adapters=sum(other.link_layer == adapter.link_layer for other in readable),
        retransmits=_retransmits(view, window_s))


def _traffic(view: NodeView, adapter: AdapterSample, window_s: float) -> tuple[float, float] | None:
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
        source="port counters in /sys/class/infiniband; " + source(f"{_RULE}.rate_enter", f"{_RULE}.waiting_enter"),
    )
