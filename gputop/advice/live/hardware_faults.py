"""The live rule about sick hardware: lost GPUs, Xid faults, memory that ECC or row remapping gave up on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from gputop.advice.live.node_view import NodeView, gpus_text
from gputop.advice.registry import limit, source
from gputop.advice.verdict import Explanation, Missing, Verdict
from gputop.core.findings import Severity
from gputop.core.samples import LOST, NOT_RESPONDING, OK, GpuSample
from gputop.core.xid import APPLICATION, UNKNOWN, Xid, explain

_SEVERITIES: tuple[Severity, ...] = ("high", "medium", "low")
_DMESG = "sudo dmesg | grep -i xid"
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
    return Explanation(
        title=f"{gpus_text(worst.gpus)} {worst.what}", why=_sentences(worst.why, also), evidence=evidence,
        action=worst.action,
        snippet="\n".join([worst.snippet, *(f"sudo nvidia-smi --gpu-reset -i {index}" for index in resets)]),
        gain="none: the job on this GPU fails or hangs, so there is no step to shorten", source=worst.source,
    )


def _sentences(first: str, rest: str) -> str:
    """One after the other; what a driver says may lack its full stop."""
    return f"{first}{'' if first.endswith('.') else '.'} {rest}".rstrip()


def _begun(message: str) -> str:
    """A message as a sentence; a name that it begins with stays as it is."""
    return f"T{message[1:]}" if message.startswith("the ") else message


def _unknown(gpus: Sequence[GpuSample]) -> Missing | None:
    """Abstain where neither faults nor error counts can be read."""
    seen = [g for g in gpus if g.state == OK]
    if not seen or any(g.xids_reason is None or g["ecc_uncorrected"].value is not None for g in seen):
        return None
    return Missing(f"Xid events ({seen[0].xids_reason}) or ECC counts ({seen[0]['ecc_uncorrected'].reason})")


# -- GPUs that are gone ---------------------------------------------------------------------------

def _gone(view: NodeView) -> Iterable[_Fault]:
    lost = [g for g in view.sample.gpus if g.state == LOST]
    silences = {
        g.info.uuid: s for g in view.sample.gpus if g.state == NOT_RESPONDING and (s := _silent_s(view, g)) is not None
    }
    silent = [g for g in view.sample.gpus if g.info.uuid in silences]
    sick = lost + silent
    if not sick:
        return
    evidence = {"lost_count": float(len(lost)), "not_responding_count": float(len(silent))}
    if silences:
        evidence["silent_s"] = max(silences.values())
    what = "lost" if not silent else "not responding" if not lost else "lost or not responding"
    indices = _indices(sick)
    yield _Fault(
        "high", indices, f"{'is' if len(indices) == 1 else 'are'} {what}",
        _begun(sick[0].message or "") or f"NVML reports the state {sick[0].state!r}.",
        "Stop the jobs on that GPU, and find the Xid in the kernel log before you train on it again.", evidence, _NVML,
    )


def _silent_s(view: NodeView, gpu: GpuSample) -> float | None:
    """Seconds for which the GPU has been silent; None while that is short."""
    last_s = view.history.last_ok_s(gpu.info.uuid)
    since_s = last_s if last_s is not None else view.history.oldest_s
    if since_s is None:
        return None
    silent_s = view.sample.time_s - since_s
    return silent_s if silent_s >= limit("hardware_error.silent_s") else None


# -- Xids -----------------------------------------------------------------------------------------

def _xids(view: NodeView) -> Iterable[_Fault]:
    """One fault per number. A GPU and its MIG instances report the same event: it counts once."""
    oldest_s = view.sample.time_s - limit("hardware_error.xid_window_s")
    events = {
        (e.xid, g.info.index, e.time_s) for g in view.sample.gpus for e in g.xids if e.time_s >= oldest_s
    }
    for number in sorted({number for number, _, _ in events}, key=lambda number: (number != _OFF_BUS, number)):
        here = [(index, time_s) for xid, index, time_s in events if xid == number]
        meaning = explain(number)
        evidence = {"xid": float(number), "xid_count": float(len(here)),
                    "xid_age_s": view.sample.time_s - max(time_s for _, time_s in here)}
        blame = "unknown origin" if meaning.fault == UNKNOWN else f"mostly the {meaning.fault}'s fault"
        yield _Fault(
            _xid_severity(meaning), tuple(sorted({index for index, _ in here})),
            f"reported Xid {number}: {meaning.meaning}",
            f"The driver reported it {len(here)}× in the last {limit('hardware_error.xid_window_s') / 60:.0f} minutes; "
            f"{blame}.",
            meaning.action, evidence, _XID, reset=meaning.reset_helps,
        )


def _xid_severity(meaning: Xid) -> Severity:
    if meaning.number == _KILLED:
        return "low"
    return "medium" if meaning.goes_on or meaning.fault in (APPLICATION, UNKNOWN) else "high"


# -- memory ---------------------------------------------------------------------------------------

def _memory(gpus: Sequence[GpuSample]) -> Iterable[_Fault]:
    failed = [g for g in gpus if g["row_remap_failed"].value]
    if failed:
        yield _Fault(
            "high", _indices(failed), "could not replace a bad row of device memory",
            "Row remapping failed: the spare rows of that memory bank are used up, or the replacement did not work.",
            "Take the GPU out of service and have the board examined: NVIDIA replaces boards for this.",
            {"row_remap_failed_count": float(len(failed))}, _ECC, "nvidia-smi -q -d ROW_REMAPPER",
        )
    lossy = [g for g in gpus if (g["ecc_uncorrected"].value or 0) >= limit("hardware_error.ecc")]
    if lossy:
        errors = sum(g["ecc_uncorrected"].value or 0 for g in lossy)
        yield _Fault(
            "high", _indices(lossy), "had memory errors that ECC could not correct",
            f"{errors:.0f} uncorrectable ECC error{'s' if errors > 1 else ''} since the driver was loaded: data was "
            "lost, and the job it hit has failed.",
            "Reset the GPU when no job needs it, so that bad rows are replaced. If the count rises again, have the "
            "board examined.", {"ecc_uncorrected_count": float(errors)}, _ECC, "nvidia-smi -q -d ECC,ROW_REMAPPER",
            reset=True,
        )
    pending = [g for g in gpus if g["row_remap_pending"].value]
    if pending:
        yield _Fault(
            "medium", _indices(pending), "will replace a bad row of device memory at the next reset",
            "Row remapping is pending: until the reset the bad row stays in use, or its page is kept out of use.",
            "Reset the GPU when the job is done.", {"row_remap_pending_count": float(len(pending))}, _ECC,
            "nvidia-smi -q -d ROW_REMAPPER", reset=True,
        )


def _indices(gpus: Iterable[GpuSample]) -> tuple[int, ...]:
    return tuple(sorted({g.info.index for g in gpus}))
