"""Facts that the NVIDIA driver reports about itself, read by a child process.

A call into a wedged driver can be neither canceled nor killed, a process waits for all its threads when it ends, and a
broken library can crash the process that loads it. So a child reads the facts, with one thread per GPU, and writes each
as a line of JSON as soon as it has it; a child that does not answer is abandoned.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gputop.core.own_memory import ANALYSIS_SCORE, offer_to_oom_killer
from gputop.core.own_program import child_command
from gputop.core.proc import MAPS_BYTES, mappings, read_or_empty, waited_for_cpu_s

DEADLINE_S = 8.0  # nvmlInit takes seconds where 8 GPUs wake up without persistence mode
_MOST_STARVED = 0.1  # of the deadline that the child may wait for a CPU, if the driver is to be the one that hangs
LIBRARY = "libnvidia-ml.so.1"


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU. ``code`` is the NVML error it was given up with (0: none, None: it did not answer)."""

    index: int
    code: int | None = None
    name: str = ""
    uuid: str = ""
    mig: bool = False
    sm_active: bool = False
    sm_active_reason: str = ""  # why SM activity cannot be read
    pids: tuple[int, ...] = ()  # of processes that compute, in the driver's PID namespace: the host's
    problem: str = ""  # what went wrong other than with an NVML code


@dataclass(frozen=True, slots=True)
class DriverFacts:
    """Facts that were learned before the child ended or the deadline passed."""

    nvml_path: str = ""  # the file that was loaded, links resolved
    load_error: str = ""
    import_error: str = ""  # nvidia-ml-py cannot be used
    init_code: int | None = None  # None: nvmlInit was not reached or did not return
    driver: str = ""
    cuda: int | None = None  # newest CUDA the driver serves, major version
    count: int | None = None
    gpus: tuple[GpuFacts, ...] = ()
    hung_in: str = ""  # the call that did not return
    died: str = ""  # how the child ended before it was done
    starved_s: float = 0.0  # for which a child that did not end in time had waited for a CPU, if that is much

    @property
    def nvml_version(self) -> str:
        """The driver version the library belongs to, by its file name (libnvidia-ml.so.580.65.06), or ""."""
        version = self.nvml_path.rpartition(".so.")[2]
        return version if version.count(".") >= 1 else ""

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(sorted({pid for gpu in self.gpus for pid in gpu.pids}))

    @property
    def all_sm_active(self) -> bool:
        """Return whether SM activity can be read of every GPU."""
        return bool(self.gpus) and all(gpu.sm_active for gpu in self.gpus)


def ask_driver(deadline_s: float = DEADLINE_S, env: Mapping[str, str] | None = None) -> DriverFacts:
    """Ask the driver; returns within about ``deadline_s`` whatever the driver does."""
    command = child_command("gputop.doctor.driver_facts:child")
    # Not in a `with` block: that waits for the child, and one inside a wedged driver never ends.
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   env=env, start_new_session=True)
    except OSError as error:
        return DriverFacts(died=f"before it started: {error}")
    ended, starved_s = False, 0.0
    try:
        output, errors, ended = _read(process, deadline_s)
    finally:
        if not ended:
            starved_s = waited_for_cpu_s(process.pid)
            process.kill()
    how = _ending(process, errors)
    died = how if ended else ""
    facts = facts_from(output.decode(errors="replace").splitlines(), hung=not ended, died=died)
    return replace(facts, starved_s=starved_s) if starved_s > _MOST_STARVED * deadline_s else facts


def _read(process: subprocess.Popen[bytes], deadline_s: float) -> tuple[bytes, bytes, bool]:
    """Return both outputs of the child, and whether it closed them before the deadline."""
    assert process.stdout is not None and process.stderr is not None
    with process.stdout, process.stderr:
        try:
            return (*process.communicate(timeout=deadline_s), True)
        except subprocess.TimeoutExpired as late:
            return late.stdout or b"", late.stderr or b"", False


def _ending(process: subprocess.Popen[bytes], errors: bytes) -> str:
    """Return how a child that closed its outputs ended, "" where it ended well."""
    try:
        code = process.wait(1.0)
    except subprocess.TimeoutExpired:
        return ""
    if code == 0:
        return ""
    lines = errors.decode(errors="replace").strip().splitlines()
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
    return how + (f": {lines[-1][:300]}" if lines else "")


def facts_from(lines: list[str], *, hung: bool = False, died: str = "") -> DriverFacts:
    """The facts from the child's lines; the last one may be cut short."""
    from gputop.core.codec import parse  # 2 MB, which the child does without

    node_facts: dict[str, Any] = {}
    gpus: dict[int, dict[str, Any]] = {}
    calling = ""
    finished = False
    for line in lines:
        entry: Any = None
        with contextlib.suppress(ValueError):
            entry = parse(line)
        if not isinstance(entry, dict):  # cut short, or a line that a library printed
            continue
        calling = entry.pop("calling", "")
        finished |= entry.pop("done", False)
        if "gpu" in entry:
            index = entry.pop("gpu")
            fields = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
            gpus.setdefault(index, {}).update(fields)
        else:
            node_facts.update(entry)
    every = range(node_facts.get("count") or 0)
    if died and finished:
        died = ""  # an end after the last fact does not matter
    return DriverFacts(
        **node_facts, hung_in=calling if hung else "", died=died,
        gpus=tuple(GpuFacts(index, **gpus.get(index, {})) for index in every))


# -- the child ------------------------------------------------------------------------------------

_output = threading.Lock()


def _say(**fact: Any) -> None:
    with _output:
        print(json.dumps(fact), flush=True)


def child() -> None:
    """Ask and print. Ends when every GPU has answered."""
    offer_to_oom_killer(ANALYSIS_SCORE)
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        _say(load_error=str(error))
        return
    _say(nvml_path=_mapped(LIBRARY.removesuffix(".1")))
    try:
        import pynvml as nvml

        _say(calling="nvmlInit")
        try:
            nvml.nvmlInit()
            _say(calling="nvmlDeviceGetCount")
            count = nvml.nvmlDeviceGetCount()
            _say(init_code=0, count=count, driver=_text(nvml.nvmlSystemGetDriverVersion))
        except nvml.NVMLError as error:
            _say(init_code=error.value)
            return
    except (ImportError, AttributeError) as error:
        _say(import_error=f"{type(error).__name__}: {error}")
        return
    with contextlib.suppress(nvml.NVMLError):
        _say(cuda=nvml.nvmlSystemGetCudaDriverVersion() // 1000)
    threads = [threading.Thread(target=_ask_gpu, args=(nvml, index)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _say(done=True)


def _ask_gpu(nvml: Any, index: int) -> None:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        facts: dict[str, Any] = {
            "name": _text(nvml.nvmlDeviceGetName, handle), "uuid": _text(nvml.nvmlDeviceGetUUID, handle),
        }
        _say(gpu=index, **facts)
        _say(gpu=index, **_mode(nvml, handle), **_sm_active(nvml, handle), **_processes(nvml, handle), code=0)
    except nvml.NVMLError as error:
        _say(gpu=index, code=error.value)
    except Exception as error:  # noqa: BLE001 - thread boundary: the other GPUs are still to be asked
        _say(gpu=index, code=-1, problem=f"{type(error).__name__}: {error}")


def _mode(nvml: Any, handle: Any) -> dict[str, Any]:
    from gputop.sources.nvml.status import DEVICE_GONE

    try:
        return {"mig": bool(nvml.nvmlDeviceGetMigMode(handle)[0])}
    except nvml.NVMLError as error:
        if error.value in DEVICE_GONE:
            raise
        return {}  # GPUs without MIG refuse the question


def _sm_active(nvml: Any, handle: Any) -> dict[str, Any]:
    """Read SM activity once: that a GPU has GPM does not mean that this user may read it."""
    from gputop.sources.nvml import gpm
    from gputop.sources.nvml import status as nvml_status

    reason = gpm.unavailable_reason(nvml, handle)
    if reason is not None:
        return {"sm_active_reason": reason}
    try:
        reader = gpm.Gpm(nvml, handle, time.monotonic)
        reader.read()
        time.sleep(2 * gpm.MIN_GAP_S)
        reading = reader.read()["sm_active"]
    except nvml.NVMLError as error:
        if error.value in nvml_status.DEVICE_GONE:
            raise
        return {"sm_active_reason": nvml_status.reason(error.value, "GPM")}
    return {"sm_active": True} if reading.value is not None else {"sm_active_reason": reading.reason}


def _processes(nvml: Any, handle: Any) -> dict[str, Any]:
    from gputop.sources.nvml.processes import ProcessReader

    processes, _ = ProcessReader(nvml, handle, time.monotonic, time.time).read()
    return {"pids": [p.pid for p in processes if "C" in p.kind]}


def _text(call: Any, *args: Any) -> str:
    from gputop.text.units import printable

    return printable(getattr(call, "__wrapped__", call)(*args))  # the raw bytes: a name need not be UTF-8


def _mapped(name: str) -> str:
    """The file behind a loaded library; the loader has resolved its links."""
    maps = read_or_empty("/proc/self/maps", MAPS_BYTES)
    return next((mapping.path for mapping in mappings(maps) if name in mapping.path), "")
