"""The logdir of a captured trace, and the command that shows it in XProf or TensorBoard."""

from __future__ import annotations

import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path

from gputop.core.errors import NoDataError
from gputop.core.extras import install_command

_LAYOUT = ("plugins", "profile")  # LOGDIR/plugins/profile/RUN/HOST.xplane.pb


def logdir_of(path: Path) -> Path:
    """The logdir that ``path``, a trace, run folder or logdir, is or lies in. Raises NoDataError."""
    path = path.absolute()
    if not path.exists():
        raise NoDataError(f"there is no {path}", "Capture a trace first: gputop, then c; or gputop capture.")
    for folder in (path, *path.parents):
        if folder.parts[-2:] == _LAYOUT:
            return folder.parent.parent
    if next(path.glob("**/plugins/profile/*/*.xplane.pb"), None) is not None:
        return path
    raise NoDataError(f"{path} holds no traces in TensorBoard's layout, LOGDIR/plugins/profile/RUN/HOST.xplane.pb",
                       "Give the logdir of a capture, or one of its runs.")


def open_command(logdir: Path) -> str:
    """The command that shows the traces of ``logdir`` with what is installed in this environment or on PATH."""
    folder = shlex.quote(str(logdir))
    if shutil.which("tensorboard") and not shutil.which("xprof") and find_spec("tensorboard_plugin_profile"):
        return f"tensorboard --logdir {folder}"
    install = "" if shutil.which("xprof") else f"{install_command('xprof')} && "
    return f"{install}xprof --logdir {folder}"
