"""Maps the GPU numbers of a job to those of the node: its GPU 0 can be the node's GPU 2.

A trace has CUDA's numbers inside the process: by CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER
(CUDA C++ Programming Guide, "CUDA Environment Variables"). All live figures have NVML's index. Pure functions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile

from msgspec import Struct, field
from msgspec.structs import replace

from gputop.core.findings import Finding
from gputop.core.samples import GpuInfo, NodeSample, ProcessSample
from gputop.profiler.capture.records import CaptureRecord, Server
from gputop.text.units import printable, ranges

_DIGITS = 4  # of a GPU's number; int() refuses thousands
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")


class GpuNumbers(Struct, frozen=True):
    """NVML's index of each GPU of a job, by the job's own number; ``reason`` where that is not known.

    ``how`` names the source of the mapping and its assumptions.
    """

    by_ordinal: Mapping[int, int] = field(default_factory=dict)
    how: str = ""
    reason: str | None = None

    def on_node(self, ordinals: Collection[int]) -> tuple[int, ...] | None:
        """NVML's indices of these GPUs of the job; None where one of them is not known."""
        if not all(n in self.by_ordinal for n in ordinals):
            return None
        return tuple(sorted({self.by_ordinal[n] for n in ordinals}))

    @property
    def same(self) -> bool:
        """Return whether the job's numbers are the node's."""
        return bool(self.by_ordinal) and all(a == b for a, b in self.by_ordinal.items())

    def remark(self, finding: Finding) -> str:
        """Remark for a trace's finding: which of the job's numbers in it are which GPUs of the node; "" if equal."""
        if finding.origin != "trace" or self.same:
            return ""
        pairs = [f"GPU {a} is GPU {b} on this node" for a, b in sorted(self.by_ordinal.items()) if b in finding.gpus]
        return f"The job's {', '.join(pairs)}. " if pairs else ""

    def text(self) -> str:
        """Text for the details of a finding: "GPU 0 of the process = GPU 2 of the node", or why that is not known."""
        if self.reason is not None:
            return ("GPU numbers are those of the process. gputop cannot match them to the node's GPUs: "
                    f"{self.reason}.")
        if self.same:
            return f"GPU numbers are those of the node. {self.how}"
        pairs = ", ".join(f"GPU {a} of the process = GPU {b} of the node" for a, b in sorted(self.by_ordinal.items()))
        return f"{pairs}. {self.how}"


def unknown(reason: str) -> GpuNumbers:
    return GpuNumbers(reason=reason)


def on_node(finding: Finding, numbers: GpuNumbers) -> Finding:
    """A finding of a trace with NVML's numbers in ``gpus``, consequences included; unchanged where they are not known.
    Its texts keep the job's own numbers."""
    gpus = numbers.on_node(finding.gpus)
    if numbers.same or gpus is None:
        return finding
    return replace(finding, gpus=gpus, consequences=tuple(on_node(f, numbers) for f in finding.consequences))


def job_process(processes: Sequence[ProcessSample], pid: int | None, local: bool) -> ProcessSample | None:
    """The process behind a profiler server: by its PID here; of a local server without one, the only one on GPUs."""
    if pid is not None:
        return next((p for p in processes if (p.local_pid or p.pid) == pid), None)
    return processes[0] if local and len(processes) == 1 else None


def local(server: Server) -> bool:
    """Return whether a server is known to be on this machine."""
    return server.pid is not None or server.address.rpartition(":")[0] in _LOCAL_HOSTS


def numbers_of(record: CaptureRecord, servers: Sequence[Server], sample: NodeSample | None) -> GpuNumbers:
    """The node's numbers of the GPUs in a capture of these servers; ``sample``: the node's newest. Of one worker of
    several, those of all GPUs that it holds: which of the trace's are its own is not known here."""
    if record.analysis is None or sample is None:
        return unknown("the capture has no analysis, or the node has not been sampled yet")
    if len(servers) != 1:
        return unknown("several workers were captured at once, each with its own numbering")
    server = servers[0]
    process = job_process(sample.processes, server.pid, local(server))
    ordinals = [gpu.gpu for gpu in record.analysis.gpus]
    if record.workers and process is not None:
        ordinals = list(range(len(process.gpus)))
    return gpu_numbers(process, [g.info for g in sample.gpus], ordinals, whole_node=sample.gpus_unwatched == 0)


def gpu_numbers(process: ProcessSample | None, gpus: Sequence[GpuInfo], ordinals: Collection[int],
                whole_node: bool = True) -> GpuNumbers:
    """The node's numbers of the GPUs ``ordinals`` in a trace of ``process``.

    ``gpus`` are the devices watched, ``whole_node`` that these are all there are. The CUDA order of unlike GPUs is
    "fastest first", which is not known outside the process; of like ones it is the order of the PCI bus, as NVML's.
    """
    if process is None:
        return unknown("the profiler server's process is not among the processes that hold GPUs")
    if not ordinals:
        return unknown("the trace contains no GPUs")
    visible = process.cuda_visible_devices
    if visible is not None:
        numbers = _listed(visible, gpus, process, whole_node)
    elif "cuda_visible_devices" in process.reasons:
        numbers = unknown(f"the process's environment is unknown: {printable(process.reasons['cuda_visible_devices'])}")
    elif process.container is not None or not whole_node:
        numbers = unknown("a container may have fewer GPUs than the node" if process.container is not None
                          else "gputop does not watch all GPUs of the node")
    else:
        numbers = _in_order(gpus, process, None, whole_node)
    # The driver's list of GPUs held by the process decides: TensorFlow and JAX open all visible GPUs.
    held = sorted(process.gpus)
    if numbers.by_ordinal and not set(held) <= set(numbers.by_ordinal.values()):
        numbers = unknown(f"the driver lists the process on GPU {ranges(held)}, which does not match its environment")
    if numbers.reason is not None and _alike(gpus, held) and len(held) == len(set(ordinals)) == max(ordinals) + 1:
        return GpuNumbers(dict(enumerate(held)), "Assumes that these are the GPUs on which the driver lists the "
                                                 "process, in PCI bus order.")
    missing = sorted(set(ordinals) - numbers.by_ordinal.keys())
    if numbers.reason is None and missing:
        return unknown(f"the trace contains GPU {ranges(missing)}, which does not match the process's environment")
    return numbers


def _listed(text: str, gpus: Sequence[GpuInfo], process: ProcessSample, whole_node: bool) -> GpuNumbers:
    """Numbers by CUDA_VISIBLE_DEVICES; entries after the first one that names no device are not visible."""
    entries = [entry.strip() for entry in text.split(",")]
    how = f"By CUDA_VISIBLE_DEVICES={printable(text)}."
    if not entries or not entries[0]:
        return unknown("CUDA_VISIBLE_DEVICES is empty, which hides all GPUs: it changed after the process started")
    if entries[0].startswith(("GPU-", "MIG-")):
        by_ordinal: dict[int, int] = {}
        for ordinal, entry in enumerate(entries):
            # "MIG-GPU-…/gi/ci" is the older form of MIG's. A UUID may be cut as long as one device has it.
            uuid = entry.removeprefix("MIG-").split("/")[0] if entry.startswith("MIG-GPU-") else entry
            matching = {g.index for g in gpus if g.uuid.lower().startswith(uuid.lower())}
            if len(matching) != 1:
                if whole_node:
                    break
                return unknown(f"{printable(entry)} is not among the GPUs that gputop watches")
            by_ordinal[ordinal] = matching.pop()
        if not by_ordinal:
            return unknown(f"the node has no GPU with the UUID {printable(entries[0])}")
        return GpuNumbers(by_ordinal, how)
    numbers: list[int] = []
    for entry in entries:
        if not entry.isascii() or not entry.isdigit() or len(entry) > _DIGITS:
            break
        numbers.append(int(entry))
    if not numbers:
        return unknown(f"CUDA_VISIBLE_DEVICES={printable(text)} does not name any GPU")
    if len(set(numbers)) < len(numbers):
        return unknown(f"CUDA_VISIBLE_DEVICES={printable(text)} names a GPU twice, which hides all GPUs")
    if process.container is not None and set(process.gpus) != set(numbers):
        return unknown("the GPUs may have other numbers inside the process's container")
    return _in_order(gpus, process, numbers, whole_node, how)


def _in_order(gpus: Sequence[GpuInfo], process: ProcessSample, numbers: Sequence[int] | None, whole_node: bool,
              how: str = "CUDA_VISIBLE_DEVICES is not set.") -> GpuNumbers:
    """``numbers`` into CUDA's order of the GPUs, None for all of them."""
    if any(g.mig_mode or g.mig is not None for g in gpus):
        return unknown("the order of MIG instances is known only inside the process")
    order = process.cuda_device_order
    bus = sorted(g.index for g in gpus)
    if order != "PCI_BUS_ID" and not _alike(gpus, bus):
        flaw = "could not be read" if "cuda_visible_devices" in process.reasons else "is not PCI_BUS_ID"
        return unknown(f"the GPUs are different models and CUDA_DEVICE_ORDER {flaw}, so CUDA lists the fastest first")
    how += (" CUDA_DEVICE_ORDER is PCI_BUS_ID." if order == "PCI_BUS_ID"
            else " GPUs of the same model are numbered in PCI bus order.")
    if numbers is None:
        return GpuNumbers(dict(enumerate(bus)), how)
    visible = [*takewhile(lambda n: n in bus or not whole_node, numbers)]
    return GpuNumbers(dict(enumerate(visible)), how) if visible else unknown(f"the node has no GPU {numbers[0]}")


def _alike(gpus: Sequence[GpuInfo], indices: Collection[int]) -> bool:
    return len({g.name for g in gpus if g.index in indices and g.mig is None}) == 1
