"""DCGM on this node: its Python bindings, its library, and its host engine, which is contacted."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gputop.core.errors import GputopError
from gputop.doctor.check import Result, processes_by_name
from gputop.doctor.driver_facts import DriverFacts
from gputop.sources.dcgm import bindings
from gputop.sources.dcgm import fields as dcgm_fields
from gputop.sources.dcgm.bindings import INSTALL, find_bindings, find_libraries
from gputop.sources.dcgm.connection import DEFAULT_ADDRESS, Address, CallFailed, Engine, EngineError, parse_address
from gputop.sources.dcgm.engine_reader import reads_through_gpm
from gputop.sources.dcgm.fields import COMPUTE_CAPABILITY, PROFILING_IDS, FieldValue
from gputop.text.units import ranges

_TIMEOUT_S = 1.0
_MAX_NAMES = 8  # of field groups
_RECENT_S = 60.0  # dcgm-exporter reads every 30 s unless told otherwise
_START = "sudo systemctl start nvidia-dcgm   # or: sudo nv-hostengine"
_WATCH = ("gputop --dcgm-watch   # before Hopper, other profilers (ncu, nsys) fail while gputop runs\ndcgmi dmon -e "
          "1002,1004,1005   # this or dcgm-exporter also works: gputop shows what they watch")


def installation(facts: DriverFacts, root: Path, env: Mapping[str, str], folder: Path | None = None) -> Result:
    """Check which DCGM is installed and whether bindings and library are of one major version."""
    python, shared = find_bindings(root, folder), find_libraries(root, env, folder)
    if not python and not shared and folder is None:
        if facts.all_sm_active:
            return Result("ok", "not installed and not needed: GPM provides the same values")
        if not facts.gpus:
            return Result("unknown", "not installed; whether it is needed depends on the GPUs")
        cuda = facts.cuda or 12
        return Result("warn", "not installed. On data-center GPUs without GPM, SM activity requires DCGM.",
                      f"sudo apt-get install --install-recommends datacenter-gpu-manager-4-cuda{cuda}   "
                      "# from NVIDIA's CUDA repository; dnf on RHEL\nsudo systemctl --now enable nvidia-dcgm")
    parts = [f"bindings for DCGM {m} in {p}" for m, p in python.items()] or ["no Python bindings"]
    parts += [str(path) for path in shared.values()] or ["no libdcgm.so"]
    detail = "; ".join(parts)
    try:
        installed = bindings.find_installed(root, env, folder)
    except GputopError as error:
        what = "bindings and library have different major versions" if python and shared else "half installed"
        return Result("warn", f"{what}: {detail}; {error.message}", error.fix or INSTALL)
    return Result("ok", f"DCGM {installed[0].major}: {detail}")


def engine(facts: DriverFacts, root: Path, env: Mapping[str, str], address: str = DEFAULT_ADDRESS,
           folder: Path | None = None, wall_clock: Callable[[], float] = time.time) -> Result:
    """Check whether a host engine answers, and what gputop gets from it. No profiling field is watched for this."""
    target = parse_address(address)
    try:
        target.reach(_TIMEOUT_S)
    except OSError as error:
        return _unreachable(error, target, root, env, folder)
    problem = ""
    try:
        for installed in bindings.find_installed(root, env, folder):
            try:
                connection = Engine(bindings.load(installed), target)
            except EngineError as error:
                problem = problem or (f"DCGM {installed.major} cannot communicate with the program at {target}: "
                                      f"{error}")
                if error.code != dcgm_fields.FUNCTION_NOT_FOUND:
                    break
                continue
            with contextlib.closing(connection):
                return _answers(connection, target, facts, wall_clock())
    except GputopError as error:
        return Result("warn", f"something listens at {target}, but gputop cannot query it: {error.message}",
                      error.fix or None)
    except EngineError as error:
        problem = f"the host engine at {target} answers, but not completely: {error}"
    return Result("warn", problem, f"dcgmi discovery -l --host {target}")


def _unreachable(error: OSError, target: Address, root: Path, env: Mapping[str, str], folder: Path | None) -> Result:
    cause = "nothing listens" if isinstance(error, ConnectionRefusedError) else f"no connection ({error})"
    if isinstance(error, PermissionError):
        return Result("warn", f"this user is not allowed to connect to {target}", f"ls -l {target.path}")
    process = processes_by_name(root).get("nv-hostengine")
    if process:
        return Result("warn", f"nv-hostengine is running (pid {process}), but {cause} at {target}: it uses a Unix "
                              "socket or another port; name that with --dcgm",
                      f"tr '\\0' ' ' < /proc/{process}/cmdline")
    if find_bindings(root, folder) or find_libraries(root, env, folder):
        return Result("warn", f"not running: {cause} at {target}.", _START)
    if target != parse_address(DEFAULT_ADDRESS):
        return Result("fail", f"{cause} at {target}; for DCGM on another machine, gputop also needs DCGM here")
    return Result("ok", f"none, because DCGM is not installed ({cause} at {target})")


def _answers(connection: Engine, target: Address, facts: DriverFacts, now_s: float) -> Result:
    entities = [gpu.entity for gpu in (*connection.gpus, *connection.instances)]
    detail = f"DCGM {connection.version or 'of unknown version'} answers at {target}, with {len(connection.gpus)} GPUs"
    if not entities:
        return Result("warn", f"{detail}, but gputop cannot read any of them", "dcgmi discovery -l")
    lost = [gpu.gpu for gpu in connection.gpus if connection.refusal(gpu.entity) == dcgm_fields.GPU_IS_LOST]
    if lost:
        return Result("warn", f"{detail}. Lost: GPU {ranges(lost)} (DCGM's numbering). gputop reads the others.",
                      "sudo dmesg | grep -i xid")
    values = connection.read(entities, PROFILING_IDS)
    held = _held_ids(connection)
    watched = sorted({i for (_, i), value in values.items()
                      if _is_watched(value, now_s) and (held is None or i in held)})
    if watched:
        names = ""
        with contextlib.suppress(EngineError):  # only a courtesy
            names = ", ".join(connection.watchers(watched)[:_MAX_NAMES])
        by = f" (field groups that hold them: {names})" if names else ""
        return Result("ok", f"{detail}. Profiling fields watched: {ranges(watched)}{by}; gputop reads these if GPM is "
                            "not available.")
    able, reasons = _profiling(connection, [gpu.gpu for gpu in connection.gpus])
    detail += ". No program watches the profiling fields (1001-1012)"
    if reasons:
        detail += "; not available on " + "; ".join(f"GPU {ranges(ids)}: {reason}" for reason, ids in reasons.items())
    if facts.all_sm_active:
        return Result("ok", f"{detail}; not needed: GPM provides the same values.")
    if able and set(able) <= _through_gpm(connection):
        return Result("ok", f"{detail}; gputop --source dcgm watches them: the engine reads them through GPM, which "
                            "leaves the counters free for other profilers.")
    return Result("warn", f"{detail}.", _WATCH if able else None)


def _through_gpm(connection: Engine) -> frozenset[int]:
    """The GPUs whose profiling fields the engine reads through GPM. Their capability is watched for a moment."""
    entities = [gpu.entity for gpu in connection.gpus]
    try:
        connection.watch(entities, [COMPUTE_CAPABILITY], 1.0, 10.0)
        connection.update()
        read = connection.read(entities, [COMPUTE_CAPABILITY])
    except CallFailed:
        return frozenset()
    finally:
        connection.unwatch()
    return frozenset(gpu.gpu for gpu in connection.gpus if reads_through_gpm(
        connection.version, gpu.driver, read.get((gpu.entity, COMPUTE_CAPABILITY))))


def _held_ids(connection: Engine) -> frozenset[int] | None:
    """The fields in field groups of the engine's clients; None where it does not list them. The last value of a watch
    that ended stays readable, and looks like one of now. Its group is gone."""
    try:
        return frozenset().union(*connection.field_groups().values())
    except CallFailed:
        return None


def _profiling(connection: Engine, gpus: Sequence[int]) -> tuple[list[int], dict[str, list[int]]]:
    """The GPUs whose profiling fields the engine can read, and the others by the reason why not."""
    able: list[int] = []
    reasons: dict[str, list[int]] = {}
    for gpu in gpus:
        try:
            connection.profiling_fields(gpu)
        except CallFailed as error:
            reasons.setdefault(dcgm_fields.meaning(error.code), []).append(gpu)
        else:
            able.append(gpu)
    return able, reasons


def _is_watched(value: FieldValue, now_s: float) -> bool:
    if value.time_us:  # a value or a blank
        return now_s - value.time_us / 1e6 < _RECENT_S
    return value.code == dcgm_fields.NO_DATA
