"""Real engines on the loopback interface, where they are: sshd, and a Slurm of two nodes with eight GPUs each.

tests/debian_packages.sh unpacks them.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.listening import free_port
from tests.waiting import PATIENCE_S, until

_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def needed(*programs: str) -> list[str]:
    """Their places; skips the test where one is not there."""
    found = [shutil.which(program, path=_PATH) for program in programs]
    for program, place in zip(programs, found, strict=True):
        if place is None:
            pytest.skip(f"no {program} here (tests/debian_packages.sh unpacks it)")
    return [str(Path(place).absolute()) for place in found if place is not None]


def until_serving(there: Callable[[], bool], what: str, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    def served() -> bool:
        for process in processes:
            assert process.poll() is None, f"{process.args!r} has ended, and {what} is not installed there"
        return there()

    until(served, what)


@contextlib.contextmanager
def sshd(folder: Path, hosts: Sequence[str]) -> Iterator[Path]:
    """An sshd, and the folder of an ``ssh`` that knows it by the names of ``hosts`` (LC_NODE tells which); beside
    them ``stranger``, whose host key is not known, ``locked``, which takes no key of ours, and ``closed``."""
    ssh, server, keygen = needed("ssh", "sshd", "ssh-keygen")
    if os.geteuid() == 0:
        try:
            pwd.getpwnam("sshd")
        except KeyError:
            pytest.skip("sshd run by root wants a user sshd")
        Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("hostkey", "key", "other"):
        subprocess.run([keygen, "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    shutil.copy(folder / "key.pub", folder / "authorized_keys")
    (folder / "known_hosts").write_text("lab " + (folder / "hostkey.pub").read_text())
    port, closed = free_port(), free_port()
    (folder / "sshd_config").write_text(f"""\
ListenAddress 127.0.0.1:{port}
HostKey {folder}/hostkey
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
AcceptEnv LC_NODE
MaxStartups 100
""")
    every = f"""\
Host *
  HostName 127.0.0.1
  Port {port}
  HostKeyAlias lab
  UserKnownHostsFile {folder}/known_hosts
  IdentityFile {folder}/key
  IdentitiesOnly yes
"""
    special = {"stranger": "HostKeyAlias nobody", "locked": f"IdentityFile {folder}/other", "closed": f"Port {closed}"}
    own = [f"Host {name}\n  {line}\n" for name, line in special.items()]
    own += [f"Host {name}\n  SetEnv LC_NODE={name}\n" for name in hosts]
    # "locked" shall offer its own key alone.
    (folder / "ssh_config").write_text("".join(own) + every.replace("Host *", "Host * !locked") + (
        every.replace("Host *", "Host locked").replace(f"  IdentityFile {folder}/key\n", "")))
    bin_ = folder / "bin"
    bin_.mkdir()
    (bin_ / "ssh").write_text(f'#!/bin/sh\nexec {ssh} -F {folder}/ssh_config "$@"\n')
    (bin_ / "ssh").chmod(0o755)
    with (folder / "sshd.log").open("wb") as log, subprocess.Popen(
            [server, "-D", "-e", "-f", folder / "sshd_config"], stderr=log) as process:
        try:
            until_serving(lambda: _answers(port), "sshd", [process])
            yield bin_
        finally:
            process.terminate()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0) as connection:
        return connection.recv(4).startswith(b"SSH")
    return False


@contextlib.contextmanager
def slurm(folder: Path, more: str = "") -> Iterator[dict[str, str]]:
    """A slurmctld with the nodes gpu1 and gpu2; the environment in which squeue and sbatch find it. ``more``: lines of
    its slurm.conf."""
    controller, daemon, sinfo, squeue, scancel = needed("slurmctld", "slurmd", "sinfo", "squeue", "scancel")
    for name in ("state", "gpu1", "gpu2", "dev"):
        (folder / name).mkdir()
    for i in range(8):
        (folder / f"dev/nvidia{i}").touch()  # a plain file will do for the count and for IDX
    (folder / "gres.conf").write_text(f"Name=gpu Type=h100 File={folder}/dev/nvidia[0-7]\n")
    user, host, ports = pwd.getpwuid(os.geteuid()).pw_name, socket.gethostname().partition(".")[0], [
        free_port() for _ in range(3)]
    plugins = Path(controller).parent.parent / "slurm-plugins"  # where it was unpacked
    # Without NoInAddrAny the daemons listen on all interfaces, and with auth/none whoever reaches them runs commands.
    conf = f"""\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
MpiDefault=none
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,sched_min_interval=0
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=gpu1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=64 RealMemory=512000 Gres=gpu:h100:8
NodeName=gpu2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=64 RealMemory=512000 Gres=gpu:h100:8
PartitionName=train Nodes=gpu1,gpu2 Default=YES MaxTime=INFINITE State=UP
{more}"""
    if plugins.is_dir():  # at the top: lines are read with the plugins that are known by then
        conf = f"PluginDir={plugins}\n{conf}"
    (folder / "slurm.conf").write_text(conf)
    environ = {**os.environ, "SLURM_CONF": f"{folder}/slurm.conf"}
    file, quiet = str(folder / "slurm.conf"), subprocess.DEVNULL

    def said(*words: str) -> str:
        return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=PATIENCE_S).stdout

    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(subprocess.Popen(words, env=environ, stdout=quiet, stderr=quiet)) for words in (
            [controller, "-D", "-c", "-i", "-f", file],
            *([daemon, "-D", "-N", node, "-f", file] for node in ("gpu1", "gpu2")))]
        try:
            until_serving(lambda: said(sinfo, "-h", "-N", "-o", "%T").split() == ["idle", "idle"], "Slurm", running)
            yield environ
        finally:
            said(scancel, "-f", "-u", user)
            until(lambda: not said(squeue, "-h", "-t", "R,CG"), "the end of the jobs")
            for process in running[::-1]:
                process.terminate()
