"""Real PID namespaces and a real hidepid, where this user may make them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gputop.sources.host import gpu_processes as hp
from gputop.sources.host.gpu_processes import GpuProcessTable
from tests.sources.host.proc_tree import Ticking, on_gpus
from tests.waiting import PATIENCE_S

REPO = Path(__file__).resolve().parents[3]
UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


@cache
def may_unshare() -> bool:
    return shutil.which("unshare") is not None and subprocess.run(
        [*UNSHARE, "true"], capture_output=True, check=False).returncode == 0


needs_unshare = pytest.mark.skipif(not may_unshare(), reason="this user may not make PID namespaces")

# Asks a GpuProcessTable about the PIDs that it gets as JSON and answers in JSON.
ASK = """
import json, os, sys
from msgspec import to_builtins
from tests.sources.host.proc_tree import Ticking, on_gpus
from gputop.sources.host.gpu_processes import GpuProcessTable
print(json.dumps([to_builtins(p) for p in GpuProcessTable(Ticking()).read(on_gpus(*json.loads(sys.argv[1])))]))
"""


def ask_inside(*pids: int, before: str = "") -> list[dict[str, Any]]:
    """What gputop says of ``pids`` in a PID namespace of its own, where it is PID 1."""
    done = subprocess.run([*UNSHARE, sys.executable, "-c", before + ASK, json.dumps(pids)], capture_output=True,
                          text=True, cwd=REPO, check=True, env={**os.environ, "PYTHONPATH": str(REPO)})
    answer: list[dict[str, Any]] = json.loads(done.stdout)
    return answer


@needs_unshare
def test_in_a_container_a_number_of_the_host_is_nobody() -> None:
    itself, host = ask_inside(1, os.getpid())
    assert itself["reason"] == hp.OTHER_NAMESPACE, "PID 1 in here holds no GPU: it is not the host's PID 1"
    assert (host["command"], host["local_pid"], host["reason"]) == (None, None, hp.OTHER_NAMESPACE)


@needs_unshare
def test_seen_from_the_host_a_process_in_a_container_has_two_numbers() -> None:
    script = "print(1, flush=True); input()"
    outer = subprocess.Popen([*UNSHARE, sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert outer.stdin is not None and outer.stdout is not None
    assert outer.stdout.readline() == b"1\n"
    inner = int(Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text())
    outside, inside = GpuProcessTable(Ticking()).read(on_gpus(outer.pid, inner))
    outer.communicate(b"\n", timeout=PATIENCE_S)
    assert (outside.container_pid, inside.container_pid) == (None, 1)
    assert (inside.local_pid, inside.parent_pid) == (None, outer.pid)
    assert inside.command is not None and script in inside.command


@needs_unshare
def test_hidepid_hides_other_users_processes() -> None:
    # /proc of a namespace of its own: the machine's is not touched. PID 1 stays root's, a fork looks as nobody.
    before = (
        "import json, os, subprocess, sys\n"
        "from pathlib import Path\n"
        "from gputop.sources.host import gpu_processes\n"
        "subprocess.run(['mount', '-o', 'remount,hidepid=2', '/proc'], check=True)\n"
        "gpu_processes.FIRST_PID_NAMESPACE = os.readlink('/proc/self/ns/pid')\n"
        "if pid := os.fork():\n"
        "    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "import tests.sources.host.proc_tree\n"
        "os.setresgid(65534, 65534, 65534)\n"
        "os.setresuid(65534, 65534, 65534)\n")
    hidden, itself = ask_inside(1, 3, before=before)
    assert hidden["reason"] == hp.HIDDEN
    assert itself["reason"] is None and itself["command"] is not None
    assert itself["user"] in ("nobody", "65534")
