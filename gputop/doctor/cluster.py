"""Checks of what this node is to a cluster: its clock, its RDMA adapters, NCCL's RAS, and the exporter of its
figures."""

from __future__ import annotations

import ctypes
import http.client
import math
import re
import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from gputop.core.bounded_http import Connection
from gputop.core.samples import PORT_ACTIVE, AdapterSample
from gputop.doctor.check import Result, processes_by_name
from gputop.doctor.driver_facts import DriverFacts
from gputop.ranks.nccl_ras import ADDRESS_VARIABLE, DEFAULT_ADDRESS, ENABLE_VARIABLE, split
from gputop.sources.exporters import SCHEMAS
from gputop.sources.host.rdma import RdmaPorts
from gputop.sources.nvml.devices import numa_node
from gputop.text.programs import run_program
from gputop.text.units import printable, ranges, rate, seconds

_CHRONYC = ("chronyc", "-c", "tracking")
_ANSWER_BYTES = 4096
_TIMEOUT_S = 2.0
_LATE_S = 0.01  # gputop: chosen so that the ranks of a step of some 100 ms keep their order in time
_STA_UNSYNC = 0x40  # adjtimex(2)
_TIMEX = struct.Struct("=I4xqqqqi")  # modes, offset, freq, maxerror (µs), esterror, status: 64-bit Linux
_PTP = ("ptp4l", "phc2sys", "timemaster")
_SYNCHRONIZE = "sudo apt-get install chrony && sudo systemctl enable --now chrony   # dnf and chronyd on RHEL"
# Where exporters listen unless told otherwise; the ids are those of the schemas.
_PORTS = {9400: "dcgm", 9810: "gputop", 5050: "nvitop", 9090: "all-smi"}
_PAGE_BYTES = 4 << 20
_STALE_S = 60.0
_BLANK = 1e14  # what DCGM prints in place of a missing value is above


# -- clock ----------------------------------------------------------------------------------------


def clock(root: Path, ask: Callable[[], str | None] | None = None,
          kernel: Callable[[], tuple[int, int] | None] | None = None) -> Result:
    """Check how far this node's clock may be off. ``ask`` prints what chrony says; ``kernel`` tells maxerror (µs) and
    status of adjtimex."""
    running = processes_by_name(root)
    ptp = [name for name in _PTP if name in running]
    text = (ask or _chronyc)()
    fields = text.strip().split(",") if text else []
    if len(fields) == 14:
        try:
            # chrony.txt, tracking: the error is at most |system time| + root dispersion + half the root delay.
            error_s = abs(float(fields[4])) + float(fields[11]) + float(fields[10]) / 2
        except ValueError:
            return Result("unknown", f"cannot parse chrony's answer: {printable(text or '')}")
        source = printable(fields[1]) or "its own reference"
        if fields[13] != "Normal" or fields[2] == "0":
            return Result("warn", f"chrony is running but has no source yet ({printable(fields[13])}), so times from "
                                  "different nodes cannot be compared", "chronyc sources -v")
        return _judged(error_s, f"chrony follows {source}, stratum {printable(fields[2])}")
    if ptp:
        return Result("ok", f"PTP ({', '.join(ptp)}) is running; to see its expected error: sudo pmc -u -b 0 'GET "
                            "CURRENT_DATA_SET'")
    answer = (kernel or _adjtimex)()
    if answer is None:
        return Result("unknown", "neither chrony nor the kernel reports the clock error")
    max_error_us, status = answer
    if status & _STA_UNSYNC:
        return Result("warn", "not synchronized: in a capture of several workers, gputop needs collectives to compare "
                              "times from different nodes", _SYNCHRONIZE)
    return _judged(max_error_us / 1e6, "synchronized, according to the kernel")


def _judged(error_s: float, what: str) -> Result:
    detail = (f"{what}: at most {seconds(error_s)} off, so two nodes like this differ by up to {seconds(2 * error_s)}")
    if error_s <= _LATE_S:
        return Result("ok", detail)
    return Result("warn", f"{detail}: the order of short events on different nodes is uncertain",
                  "chronyc sources -v   # use closer servers, or PTP")


def _chronyc() -> str | None:
    try:
        ended = run_program(_CHRONYC, _TIMEOUT_S, _ANSWER_BYTES)
    except OSError:
        return None
    return ended.out.decode("utf-8", "replace") if ended.status == 0 and ended.in_bounds else None


def _adjtimex() -> tuple[int, int] | None:
    try:
        call = ctypes.CDLL(None, use_errno=True).adjtimex
    except (OSError, AttributeError):
        return None
    buffer = ctypes.create_string_buffer(512)  # struct timex has 208 bytes; modes of 0: it is only read
    if struct.calcsize("P") != 8 or call(buffer) < 0:
        return None
    _, _, _, max_error_us, _, status = _TIMEX.unpack_from(buffer.raw)
    return max_error_us, status


# -- adapters -------------------------------------------------------------------------------------


def adapters(facts: DriverFacts, root: Path) -> Result:
    """The RDMA adapters, and the GPUs that have none beside them."""
    ports = RdmaPorts(time.monotonic, root).read()
    if not ports:
        return Result("ok", "none: NCCL uses regular network adapters between nodes")
    working = [port for port in ports if port.state == PORT_ACTIVE]
    detail = "; ".join(map(_port_text, ports))
    if not working:
        return Result("fail", f"no link is active: {detail}",
                      "ibstat   # state of each port: check cables, the switch, and for InfiniBand the subnet manager")
    problems, fixes = [], []
    links = {port.name: link for port in working if (link := port["rdma_max_bytes_per_s"].value)}
    fastest: dict[str, float] = {}  # by link layer: InfiniBand and Ethernet are not of one speed
    for port in working:
        fastest[port.link_layer] = max(fastest.get(port.link_layer, 0.0), links.get(port.name, 0.0))
    slow = [port.name for port in working if links.get(port.name, math.inf) < fastest[port.link_layer]]
    if slow:
        problems.append(f"{', '.join(slow)} {'is' if len(slow) == 1 else 'are'} slower than the others; the slowest "
                        "adapter delays every collective")
        fixes.append(f"ibstat {slow[0].partition(':')[0]}   # shows the rate: check the cable and the switch port")
    nodes = {gpu.index: node for gpu in facts.gpus if (node := numa_node(_bus_id(root, gpu.index), root)) is not None}
    near = {port.numa_node for port in working}
    far = sorted(index for index, node in nodes.items() if node not in near)
    if far and None not in near:
        down = [port.name for port in ports if port.state != PORT_ACTIVE and port.numa_node in
                {nodes[index] for index in far}]
        problems.append(f"GPU {ranges(far, ', ')} {'has' if len(far) == 1 else 'have'} no adapter with a link on "
                        f"{'its' if len(far) == 1 else 'their'} NUMA node"
                        + (f" ({', '.join(down)} there {'is' if len(down) == 1 else 'are'} down)" if down else ""))
        fixes.append(f"ibstat {down[0].partition(':')[0]}" if down else
                     "nvidia-smi topo -m   # NCCL reaches these GPUs over the link between the CPU sockets")
    return Result("warn" if problems else "ok", "; ".join((*problems, detail)), "\n".join(fixes) or None)


def _port_text(port: AdapterSample) -> str:
    link, node = port["rdma_max_bytes_per_s"].value, port.numa_node
    return (f"{printable(port.name)} {printable(port.link_layer)} {printable(port.state) or 'of an unknown state'}"
            + (f" {rate(link)}" if link else "") + ("" if node is None else f", NUMA node {node}"))


def _bus_id(root: Path, index: int) -> str:
    """The PCI address of a GPU by its place among the driver's folders, which are in NVML's order."""
    bus_ids = sorted(folder.name for folder in (root / "proc/driver/nvidia/gpus").glob("*"))
    return bus_ids[index] if index < len(bus_ids) else ""


# -- RAS ------------------------------------------------------------------------------------------


def ras(facts: DriverFacts, env: Mapping[str, str]) -> Result:
    """Check whether NCCL's RAS can be reached; nothing is asked of it."""
    where = env.get(ADDRESS_VARIABLE, DEFAULT_ADDRESS)
    host, port = split(where)
    try:
        socket.create_connection((host, port), _TIMEOUT_S).close()
    except OSError as error:
        if not facts.pids:
            return Result("ok", "no process holds a GPU, and nothing answers; a job with NCCL 2.24 or newer provides "
                                "RAS while it is running")
        return Result("warn", f"nothing answers at {printable(where)} ({error.strerror or error}): if a collective "
                              "hangs, gputop cannot find the missing rank. NCCL 2.24 and newer provides RAS in jobs "
                              "with several ranks",
                      f"unset {ENABLE_VARIABLE}   # in the job, if it is 0; set {ADDRESS_VARIABLE} as in the job")
    return Result("ok", f"a job answers at {printable(where)}, so gputop stacks can name a missing rank")


# -- exporter -------------------------------------------------------------------------------------


def exporter(ports: Mapping[int, str] = _PORTS, clock: Callable[[], float] = time.time) -> Result:
    """Check whether an exporter of GPU figures answers on this node, and whether its figures are of now."""
    answers, problems, fixes = [], [], []
    for port, schema_id in ports.items():
        page = _page(port)
        schema = next(candidate for candidate in SCHEMAS if candidate.id == schema_id)
        if page is None:
            continue
        names = {name.name for alternatives in schema.figures.values() for name in alternatives}
        values = [value for match in re.finditer(r"^(\w+)(?:\{[^\n]*\})? (\S+)", page, re.M)
                  if match[1] in names and (value := _number(match[2])) is not None]
        not_blank = [value for value in values if value < _BLANK]
        where = f"{schema.title} on port {port}"
        if not values and schema_id == "all-smi":
            continue  # that port is Prometheus's own, too
        answers.append(f"{where} answers with {len(not_blank)} values")
        stamp = re.search(r"^gputop_sample_timestamp_seconds(?:\{[^\n]*\})? (\S+)", page, re.M)
        sampled_s = _number(stamp[1]) if stamp else None
        age_s = clock() - sampled_s if sampled_s is not None and sampled_s >= 0 else 0.0
        if age_s > _STALE_S:
            problems.append(f"the values of {where} are {seconds(age_s)} old")
            fixes.append("nvidia-smi   # check whether the driver is hanging")
        elif not not_blank:
            problems.append(f"{where} answers without GPU metrics")
            fixes.append("sudo systemctl restart nvidia-dcgm nvidia-dcgm-exporter   # or check its log"
                         if schema_id == "dcgm" else f"curl -s http://127.0.0.1:{port}/metrics | head   # and check "
                                                     "its log")
        elif schema_id == "dcgm" and not re.search(r"^DCGM_FI_PROF_SM_(ACTIVE|UTIL_RATIO)\b", page, re.M):
            problems.append(f"{where} does not report SM activity")
            name = "SM_UTIL_RATIO" if "DCGM_FI_DEV_GPU_UTIL_RATIO{" in page else "SM_ACTIVE"  # since dcgm-exporter 4.9
            fixes.append(f"add DCGM_FI_PROF_{name} to its counters file (dcgm-exporter -f)")
    if not answers:
        return Result("ok", f"no exporter answers on ports {', '.join(map(str, ports))} of this node; only Prometheus "
                            "needs one. gputop export is an exporter")
    return Result("warn" if problems else "ok", "; ".join(problems or answers), "\n".join(fixes) or None)


def _number(text: str) -> float | None:
    """A figure of an exporter; None for what is no number, or not finite."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _page(port: int) -> str | None:
    """Return what stands at /metrics of a port of this node; None where nothing answers as HTTP with 200."""
    connection = Connection("127.0.0.1", port, timeout=_TIMEOUT_S)
    connection.bound(connection.limits.end_s, 2 * _PAGE_BYTES)  # sizes of chunks included
    try:
        connection.request("GET", "/metrics", headers={"Accept": "text/plain"})
        answer = connection.getresponse()
        return answer.read(_PAGE_BYTES).decode("utf-8", "replace") if answer.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
