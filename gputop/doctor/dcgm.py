"""DCGM on this node: its Python bindings, its library, its host engine. Looked at, not used."""

from __future__ import annotations

import platform
import socket
from collections.abc import Mapping
from pathlib import Path

from gputop.doctor.check import Check
from gputop.doctor.driver_facts import DriverFacts

NOT_YET = "gputop does not read DCGM yet"
ENGINE = ("127.0.0.1", 5555)  # nv-hostengine's default
_TIMEOUT_S = 1.0
_BINDINGS = {
    4: "usr/share/datacenter-gpu-manager-4/bindings/python3",
    3: "usr/local/dcgm/bindings/python3",
}


def bindings(root: Path) -> dict[int, Path]:
    """Folders with NVIDIA's Python bindings, by DCGM's major version."""
    return {major: root / place for major, place in _BINDINGS.items() if (root / place / "pydcgm.py").is_file()}


def libraries(root: Path, env: Mapping[str, str]) -> dict[int, Path]:
    """libdcgm.so.N where the bindings look for it (not in the loader's cache), by major version."""
    places = [place for place in env.get("LD_LIBRARY_PATH", "").split(":") if place]
    places += [f"/usr/lib/{platform.machine()}-linux-gnu", "/usr/lib64"]
    found: dict[int, Path] = {}
    for place in places:
        for major in _BINDINGS:
            path = root / place.lstrip("/") / f"libdcgm.so.{major}"
            if path.exists():
                found.setdefault(major, path)
    return found


def installation(facts: DriverFacts, root: Path, env: Mapping[str, str]) -> Check:
    """Which DCGM is installed and whether bindings and library are of one major version."""
    id_, title = "dcgm", "DCGM"
    python, shared = bindings(root), libraries(root, env)
    if not python and not shared:
        if facts.all_sm_active:
            return Check(id_, "ok", title, "not installed, and not needed: GPM gives the same figures without it")
        if not facts.gpus:
            return Check(id_, "unknown", title, "not installed; whether it is needed depends on the GPUs")
        cuda = facts.cuda or 12
        return Check(id_, "warn", title, "not installed. On GPUs without GPM it is what reads SM activity "
                     f"({NOT_YET}; DCGM's own dcgmi shows it).",
                     f"sudo apt-get install --install-recommends datacenter-gpu-manager-4-cuda{cuda}   "
                     "# from NVIDIA's CUDA repository; dnf on RHEL\nsudo systemctl --now enable nvidia-dcgm")
    matching = sorted(python.keys() & shared.keys(), reverse=True)
    parts = [f"bindings of DCGM {m} in {p}" for m, p in python.items()] or ["no Python bindings"]
    parts += [str(path) for path in shared.values()] or ["no libdcgm.so"]
    detail = "; ".join(parts) + f". {NOT_YET[0].upper()}{NOT_YET[1:]}."
    if matching:
        return Check(id_, "ok", title, f"DCGM {matching[0]}: {detail}")
    if python and shared:
        return Check(id_, "warn", title, f"bindings and library are not of one major version: {detail}",
                     f"sudo apt-get install --install-recommends datacenter-gpu-manager-4-cuda{facts.cuda or 12}")
    return Check(id_, "warn", title, f"half installed: {detail}")


def engine(root: Path, address: tuple[str, int] = ENGINE, timeout_s: float = _TIMEOUT_S) -> Check:
    """Whether something listens where the host engine does; connects and hangs up, sends nothing."""
    id_, title = "dcgm_engine", "DCGM host engine"
    place = f"{address[0]}:{address[1]}"
    process = _process(root)
    seen = f"nv-hostengine runs (pid {process})" if process else ""
    try:
        socket.create_connection(address, timeout_s).close()
    except OSError as error:
        why = "nothing listens" if isinstance(error, ConnectionRefusedError) else f"no connection ({error})"
        if process:
            return Check(id_, "warn", title, f"{seen}, but {why} at {place}: it serves a unix socket or another port",
                         f"tr '\\0' ' ' < /proc/{process}/cmdline")
        if bindings(root) or libraries(root, {}):
            return Check(id_, "warn", title, f"does not run: {why} at {place}. {NOT_YET[0].upper()}{NOT_YET[1:]}.",
                         "sudo systemctl start nvidia-dcgm")
        return Check(id_, "ok", title, f"none, as DCGM is not installed ({why} at {place})")
    who = seen or "not seen to be nv-hostengine: its process is not visible here"
    return Check(id_, "ok" if process else "unknown", title, f"something listens at {place}; {who}. "
                 f"{NOT_YET[0].upper()}{NOT_YET[1:]}.")


def _process(root: Path) -> int | None:
    for entry in (root / "proc").glob("[0-9]*"):
        try:
            if (entry / "comm").read_text().strip() == "nv-hostengine":
                return int(entry.name)
        except (OSError, ValueError):
            continue
    return None
