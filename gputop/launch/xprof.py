"""Opens a captured trace in XProf or TensorBoard: the command for it, and XProf on the loopback interface.

``xprof`` binds to all interfaces, its web server and a gRPC worker, without a password, and has no option for it.
So ``gputop xprof`` runs its entry point in a process that takes each socket as it appears to the loopback.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
import threading
import time
from importlib import metadata
from pathlib import Path

from gputop.core.errors import GputopError, NoDataError
from gputop.core.own_program import install_command
from gputop.launch.inside.gputop_serve import confine, free_port, listening_sockets
from gputop.text.console import say

INSTALL = install_command("xprof")
_POLL_PERIOD_S = 0.02
_LAYOUT = ("plugins", "profile")  # LOGDIR/plugins/profile/RUN/HOST.xplane.pb


def logdir_of(path: Path) -> Path:
    """The logdir that ``path``, a trace, run folder or logdir, is or lies in. Raises NoDataError."""
    path = path.absolute()
    if not path.exists():
        raise NoDataError(f"{path} does not exist", "Capture a trace first: press c in gputop, or run gputop capture.")
    for folder in (path, *path.parents):
        if folder.parts[-2:] == _LAYOUT:
            return folder.parent.parent
    if next(path.glob("**/plugins/profile/*/*.xplane.pb"), None) is not None:
        return path
    raise NoDataError(f"{path} contains no traces in TensorBoard's layout, LOGDIR/plugins/profile/RUN/HOST.xplane.pb",
                       "Give the logdir of a capture, or one of its runs.")


def open_command(logdir: Path) -> str:
    """The command that shows the traces of ``logdir`` with what is installed in this environment or on PATH."""
    folder = shlex.quote(str(logdir))
    if _version("xprof") is not None:
        return f"gputop xprof {folder}"
    if shutil.which("xprof"):
        return f"xprof --logdir {folder}"
    if shutil.which("tensorboard") and _version("tensorboard-plugin-profile") is not None:
        return f"tensorboard --logdir {folder}"
    return f"{INSTALL} && gputop xprof {folder}"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def serve(logdir: Path, port: int) -> int:
    """Run XProf over ``logdir`` at 127.0.0.1:``port`` until ctrl-c. Raises GputopError where it is not installed."""
    entry = next(iter(metadata.entry_points(group="console_scripts", name="xprof")), None)
    if entry is None:
        raise GputopError("XProf is not installed in gputop's environment", f"{INSTALL}; or use TensorBoard with "
                                                                            "tensorboard-plugin-profile: tensorboard "
                                                                            f"--logdir {logdir}")
    if not free_port(port):
        raise GputopError(f"port {port} is in use",
                          "XProf may already be running. Otherwise choose another port with --port.")
    start = entry.load()
    threading.Thread(target=_keep_to_loopback, args=(port,), name="gputop-loopback", daemon=True).start()
    sys.argv = ["xprof", "--logdir", str(logdir), "--port", str(port)]
    with contextlib.suppress(KeyboardInterrupt):
        return int(start() or 0)
    return 0


def _keep_to_loopback(port: int) -> None:
    """Confine all listening sockets of this process to the loopback, until its web server, the last one, listens."""
    while True:
        up = bool(listening_sockets(port))
        if not confine(listening_sockets(0)):
            say("on this kernel (before 5.7), any host that reaches this one can also reach XProf")
            return
        if up:
            say(f"XProf is running at http://127.0.0.1:{port}/, only for this host; press ctrl-c to stop it")
            return
        time.sleep(_POLL_PERIOD_S)
