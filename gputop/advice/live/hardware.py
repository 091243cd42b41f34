"""The live rule about sick hardware: lost GPUs, Xid faults, memory that ECC or row remapping gave up on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from gputop.advice.fix_code import code
from gputop.advice.live.node_view import NodeView, gpus_text
from gputop.advice.registry import limit, source
from gputop.advice.verdict import NO_TIME, Explanation, Missing, Verdict
from gputop.core.findings import Severity
from gputop.core.samples import LOST, NOT_RESPONDING, OK, GpuSample
from gputop.core.xid import APPLICATION, DRIVER, HARDWARE, UNKNOWN, Xid, explain

_SEVERITIES: tuple[Severity, ...] = ("high", "medium", "low")
_DMESG = "sudo dmesg | grep -i xid"
_REMAPPER = "nvidia-smi -q -d ROW_REMAPPER"
_OFF_BUS = 79  # such a GPU answers to nothing: this outranks its other faults, whose cure is a reset
_KILLED = 45  # the consequence of an earlier Xid, or of somebody ending the program
_NVML = "NVML return codes 15 (GPU is lost) and 16 (reset required); gputop's own deadline for a driver call"
_ECC = "NVML: ECC counters since the driver was loaded; remapped rows. " + source("hardware_error.ecc")
_XID = ("Xid events of the driver (NVML's XidCriticalError, or DCGM's field 230); NVIDIA: Xid documentation. "
        + source("hardware_error.xid_window_s"))


class _Fault(Struct, frozen=True):
    """One kind of fault on some GPUs. ``what`` follows "GPU 3"; ``reset`` says whether ``action`` is to reset them."""

    severity: Severity
    gpus: tuple[int, ...]
    what: str
    why: str
    action: str
    evidence: dict[str, float]
    source: str
    snippet: str = _DMESG
    reset: bool = False


class HardwareError(Verdict, frozen=True, kw_only=True):
    faults: Sequence[_Fault]  # the worst first


def judge_hardware_error(view: NodeView) -> HardwareError | Missing | None:
    """Faults that the GPUs, or the driver for them, report; the worst first."""
    gpus = view.sample.gpus
    faults = sorted([*_gone(view), *_xids(view), *_memory(gpus)], key=lambda fault: _SEVERITIES.index(fault.severity))
    if not faults:
        return _unknown(gpus)
    return HardwareError(gpus=tuple(sorted({index for fault in faults for index in fault.gpus})),
                         severity=faults[0].severity, faults=faults)


def describe_hardware_error(v: HardwareError) -> Explanation:
    worst, *others = v.faults
    evidence: dict[str, float] = {}
    for fault in v.faults:
        evidence = fault.evidence | evidence
    also = " ".join(f"Also: {gpus_text(fault.gpus)} {fault.what}." for fault in others
                    # That a GPU fell off the bus is why it is lost: the reason says so.
                    if not (fault.evidence.get("xid") == _OFF_BUS and {*fault.gpus} <= {*worst.gpus}
                            and f"Xid {_OFF_BUS}" in worst.why))
    resets = worst.gpus if worst.reset else ()  # of the GPUs that the title names and the action means
    stop = "" if worst.why.endswith(".") else "."  # what a driver says may lack it
    return Explanation(
        title=f"{gpus_text(worst.gpus)} {worst.what}", why=f"{worst.why}{stop} {also}".rstrip(), evidence=evidence,
        action=worst.action,
        snippet="\n".join([worst.snippet, *(f"sudo nvidia-smi --gpu-reset -i {index}" for index in resets)]),
        gain=NO_TIME, source=worst.source)


def _unknown(gpus: Sequence[GpuSample]) -> Missing | None:
    """Abstain where neither faults nor error counts can be read."""
    seen = [g for g in gpus if g.state == OK]
    if not seen or any(g.xids_reason is None or g["ecc_uncorrected"].value is not None for g in seen):
        return None
    return Missing(f"Xid events ({seen[0].xids_reason}) or ECC counts ({seen[0]['ecc_uncorrected'].reason})")


# -- GPUs that are gone ---------------------------------------------------------------------------

def _gone(view: NodeView) -> Iterable[_Fault]:
    """One fault for each state: each asks for a fix of its own."""
    sick: dict[str, list[GpuSample]] = {}
    for gpu in view.sample.gpus:
        if gpu.state == LOST:
            sick.setdefault("unusable until a reset" if "needs a reset" in gpu.message else "lost", []).append(gpu)
        elif gpu.state == NOT_RESPONDING and _silent_s(view, gpu) >= limit("hardware_error.silent_s"):
            sick.setdefault("not responding", []).append(gpu)
    for what, gpus in sorted(sick.items()):
        evidence = {"lost_count": float(len(gpus))} if gpus[0].state == LOST else {
            "not_responding_count": float(len(gpus)), "silent_s": max(_silent_s(view, gpu) for gpu in gpus)}
        cause, _, fix = gpus[0].message.partition(". ")  # the cause, then what to do
        yield _Fault(
            "high", _indices(gpus), f"{'is' if len(gpus) == 1 else 'are'} {what}",
            cause[:1].upper() + cause[1:] or f"NVML reports the state {gpus[0].state!r}.",
            f"{fix.rstrip('.') or 'Stop the jobs on it, and find the Xid in the kernel log before you use it again'}.",
            evidence, _NVML)


def _silent_s(view: NodeView, gpu: GpuSample) -> float:
    """Seconds for which the GPU has been silent."""
    last_s = view.history.last_ok_s(gpu.info.uuid)
    since_s = last_s if last_s is not None else view.history.oldest_s
    return 0.0 if since_s is None else view.sample.time_s - since_s


# -- Xids -----------------------------------------------------------------------------------------

def _xids(view: NodeView) -> Iterable[_Fault]:
    """One fault per number. A GPU and its MIG instances report the same event: it counts once."""
    oldest_s = view.sample.time_s - limit("hardware_error.xid_window_s")
    events = {(e.xid, g.info.index, e.time_s) for g in view.sample.gpus for e in g.xids if e.time_s >= oldest_s}
    for number in sorted({number for number, _, _ in events}, key=lambda number: (number != _OFF_BUS, number)):
        here = [(index, time_s) for xid, index, time_s in events if xid == number]
        meaning = explain(number)
        evidence = {"xid": float(number), "xid_count": float(len(here)),
                    "xid_age_s": view.sample.time_s - max(time_s for _, time_s in here)}
        blame = "unknown origin" if meaning.fault == UNKNOWN else f"mostly the {meaning.fault}'s fault"
        yield _Fault(
            _xid_severity(meaning), tuple(sorted({index for index, _ in here})),
            f"reported Xid {number}: {meaning.meaning}",
            f"The driver reported this Xid {len(here)}× in the last "
            f"{limit('hardware_error.xid_window_s') / 60:.0f} minutes; {blame}.",
            meaning.action, evidence, _XID,  # one that fell off the bus, say, cannot be reset
            reset=meaning.fault in (HARDWARE, DRIVER) and not meaning.goes_on and "reset" in meaning.action.lower())


def _xid_severity(meaning: Xid) -> Severity:
    if meaning.number == _KILLED:
        return "low"
    return "medium" if meaning.goes_on or meaning.fault in (APPLICATION, UNKNOWN) else "high"


# -- memory ---------------------------------------------------------------------------------------

# By metric: severity, what follows "GPU 3", the reason, the action, whether that is to reset them, what shows it.
_COUNTS: Mapping[str, tuple[Severity, str, str, str, bool, str]] = {
    "row_remap_failed": (
        "high", "could not replace a bad row of device memory",
        "Row remapping failed because the memory bank has no spare rows left, or the replacement did not work.",
        "Take the GPU out of service and have the board examined: NVIDIA replaces boards for this failure.", False,
        _REMAPPER),
    "row_remap_pending": (
        "medium", "will replace a bad row of device memory at the next reset",
        "Row remapping is pending: until the reset, the bad row stays in use or its page is retired.",
        "Reset the GPU when the job is done.", True, _REMAPPER),
    "ecc_uncorrected": (
        "high", "had memory errors that ECC could not correct",
        "Uncorrectable ECC errors since the driver was loaded: {}. A job that uses such memory fails.",
        "Reset the GPU when no job needs it, so that bad rows are replaced. If the count rises again, have the board "
        "examined.", True, code("hardware_error", "ecc") or _DMESG),
}


def _memory(gpus: Sequence[GpuSample]) -> Iterable[_Fault]:
    for metric, (severity, what, why, action, reset, snippet) in _COUNTS.items():
        if sick := [g for g in gpus if (g[metric].value or 0) >= limit("hardware_error.ecc")]:
            count = sum(g[metric].value or 0 for g in sick)
            yield _Fault(severity, _indices(sick), what, why.format(f"{count:.0f}"), action,
                         {f"{metric}_count": float(count)}, _ECC, snippet, reset)


def _indices(gpus: Iterable[GpuSample]) -> tuple[int, ...]:
    return tuple(sorted({g.info.index for g in gpus}))
