"""Selection of GPUs by ``--gpus`` and by CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence

from gputop.core.errors import EXIT_NO_DATA, EXIT_USAGE, GputopError
from gputop.core.samples import GpuInfo

VISIBLE = "visible"
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_LABEL = re.compile(r"\d+:\d+")
_PLACEHOLDER_PREFIX = "index:"  # the UUID of a device whose UUID could not be read begins with this


def placeholder_uuid(index: int) -> str:
    """The stand-in for the UUID of a GPU whose UUID could not be read."""
    return f"{_PLACEHOLDER_PREFIX}{index}"


def select_gpus(items: Iterable[str], present: Sequence[GpuInfo],
                environ: Mapping[str, str] = os.environ) -> list[GpuInfo]:
    """The devices of ``present`` that ``items`` name, in its order.

    ``items`` are indices ("0"), inclusive ranges ("2-3"), UUIDs or the beginning of one ("GPU-4f", "MIG-7"), labels of
    MIG instances ("3:1"), or "visible" for what CUDA_VISIBLE_DEVICES of ``environ`` names; alone or joined by commas.
    None at all means every device. A GPU brings its MIG instances with it; an instance comes alone. Raises
    :class:`GputopError`: an item that names nothing (wrong usage, listing what there is), or CUDA_VISIBLE_DEVICES that
    hides every GPU.
    """
    wanted = [part.strip() for item in items for part in item.split(",") if part.strip()]
    if not wanted:
        return list(present)
    chosen: set[str] = set()
    for item in wanted:
        if item == VISIBLE:
            chosen |= _visible(present, environ)
            continue
        matched = _matches(item, present)
        if not matched:
            raise _no_such_gpu(f"--gpus {item}", item, present)
        chosen |= matched
    return [info for info in present if info.uuid in chosen]


def _matches(item: str, present: Sequence[GpuInfo]) -> set[str]:
    numbers = _RANGE.fullmatch(item)
    if numbers:
        first = int(numbers[1])
        last = int(numbers[2]) if numbers[2] else first
        indices = {info.index for info in present}
        # A range must exist as a whole: "0-15" on a node of 8 GPUs is probably a mistake.
        if first not in indices or last not in indices:
            return set()
        return {info.uuid for info in present if first <= info.index <= last}
    if _LABEL.fullmatch(item):
        return {info.uuid for info in present if info.label == item}
    folded = item.casefold()
    named = {info.uuid for info in present if info.uuid.casefold().startswith(folded) and not _lacks_uuid(info)}
    whole = {info.index for info in present if info.mig is None and info.uuid in named}
    return named | {info.uuid for info in present if info.index in whole}


def _lacks_uuid(info: GpuInfo) -> bool:
    return info.uuid.startswith(_PLACEHOLDER_PREFIX)


def _no_such_gpu(where: str, item: str, present: Sequence[GpuInfo]) -> GputopError:
    without_uuid = [info for info in present if _lacks_uuid(info)]
    listing = ", ".join(info.label if info in without_uuid else f"{info.label} ({info.uuid})" for info in present)
    message = f"{where}: there is no such GPU."
    if without_uuid and not _RANGE.fullmatch(item):
        labels = " or ".join(info.label for info in without_uuid)
        message = f"{where} matches none of the GPUs that respond. It may be GPU {labels}, which does not respond."
    return GputopError(message, f"This node has {listing}. Use indices, ranges (2-3), UUIDs, MIG instance labels (0:1) "
                                f"or {VISIBLE!r}.", EXIT_USAGE)


def _visible(present: Sequence[GpuInfo], environ: Mapping[str, str]) -> set[str]:
    """UUIDs of the devices in CUDA_VISIBLE_DEVICES, read as CUDA does: up to the first entry that matches none.

    CUDA numbers GPUs by speed unless CUDA_DEVICE_ORDER is PCI_BUS_ID, which is NVML's order. For GPUs of one model both
    orders are the same; with several models, numbers that choose some of the GPUs are ambiguous and raise GputopError.
    """
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return {info.uuid for info in present}
    chosen: set[str] = set()
    by_number = False
    for entry in (part.strip() for part in value.split(",")):
        if re.fullmatch(r"\d+", entry):
            matched = _matches(entry, present)
            by_number = True
        elif re.match(r"(GPU|MIG)-", entry):
            named = [info for info in present if info.uuid.casefold().startswith(entry.casefold())]
            matched = _matches(entry, present) if len(named) == 1 else set()  # of several none, as in CUDA
        else:
            matched = set()
        if not matched:
            if entry.startswith(("GPU-", "MIG-")) and any(_lacks_uuid(info) for info in present):
                raise _no_such_gpu(f"CUDA_VISIBLE_DEVICES={value}", entry, present)
            break
        chosen |= matched
    if not chosen:
        raise GputopError(f"CUDA_VISIBLE_DEVICES={value!r} hides all GPUs of this node.", "Set the variable as in the "
                          "job, or select GPUs by index or UUID with --gpus.", EXIT_NO_DATA)
    whole = [info for info in present if info.mig is None]
    by_speed = environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
    models = {info.name for info in whole if not _lacks_uuid(info)}
    if by_number and by_speed and len(models) > 1 and any(info.uuid not in chosen for info in whole):
        raise GputopError(
            f"CUDA_VISIBLE_DEVICES={value} is ambiguous: the GPUs are of different models, so CUDA numbers the fastest "
            "GPU first.", "Set CUDA_DEVICE_ORDER=PCI_BUS_ID here and for the job, or name GPUs by UUID.", EXIT_USAGE)
    return chosen
