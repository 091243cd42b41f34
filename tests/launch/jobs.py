"""Stand-ins for JAX and TensorFlow that start in no time: packages of the same names whose profiler server is a
socket that listens, on all interfaces as theirs do. What rests on the real ones is in test_real.py."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from gputop.launch.elf import addresses_in
from gputop.launch.inject import call_with_text
from gputop.launch.job import StartedJob
from gputop.launch.remote_exec import memory_of

GPUTOP = (sys.executable, "-m", "gputop")
_LISTEN = """\
import socket
def start_server(port):
    server = socket.socket(socket.AF_INET6)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    server.bind(("::", port))
    server.listen()
    return server
"""


def frameworks(folder: Path, start_server: str = _LISTEN) -> Path:
    """A folder for sys.path that holds both."""
    files = {
        "jax/__init__.py": "__version__ = '0.0.jax'\nfrom jax._src import lib\n",
        "jax/_src/__init__.py": "",
        "jax/_src/lib/__init__.py": "from jax._src.lib import _profiler\n",
        "jax/_src/lib/_profiler.py": start_server,
        "tensorflow/__init__.py": "__version__ = '0.0.tf'\nfrom tensorflow import profiler\n",
        "tensorflow/profiler/__init__.py": "from tensorflow.profiler import experimental\n",
        "tensorflow/profiler/experimental/__init__.py": "from tensorflow.profiler.experimental import server\n",
        "tensorflow/profiler/experimental/server.py": start_server + "kept = []\ndef start(port):\n"
                                                                    "    kept.append(start_server(port))\n",
    }
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def run(*arguments: str, path: Path | None = None, environ: Mapping[str, str] | None = None,
        stdin: str = "") -> subprocess.CompletedProcess[str]:
    """``gputop run --headless`` with these arguments, to its end. ``path``: the PYTHONPATH of the job."""
    return subprocess.run([*GPUTOP, "run", "--headless", *arguments], input=stdin, text=True, capture_output=True,
                          env=environment(path, environ), timeout=120, check=False)


def environment(path: Path | None = None, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The tests' own environment, without the variables that carry a rank."""
    own = {name: value for name, value in os.environ.items()
           if not name.startswith(("GPUTOP_", "SLURM_", "OMPI_", "PMI", "LOCAL_RANK", "RANK", "TF_CONFIG"))}
    own.pop("PYTHONPATH", None)
    return {**own, **({"PYTHONPATH": str(path)} if path else {}), **(more or {})}


@functools.lru_cache(1)  # not more: another process may get the PID
def functions_of(pid: int) -> tuple[int, int]:
    functions = addresses_in(pid, ("Py_AddPendingCall", "PyRun_SimpleString"))
    return functions["Py_AddPendingCall"], functions["PyRun_SimpleString"]


def borrow(pid: int, code: str = "") -> int:
    """Have a thread of the process ask its Python for that; Py_AddPendingCall's answer."""
    functions = functions_of(pid)
    with memory_of(pid) as memory:
        return call_with_text(pid, memory, *functions, code.encode())


def addresses(text: str) -> list[str]:
    """Where servers came up, by what the job's processes say."""
    return re.findall(r"gputop: profiler server at (\S+) ", text)


def wait_for(job: StartedJob, text: str) -> None:
    """Wait until the job's output holds it."""
    subprocess.run(["timeout", "60", "bash", "-c", f"tail -f -n +1 {job.log} | grep -q -m1 {text}"], check=True)
