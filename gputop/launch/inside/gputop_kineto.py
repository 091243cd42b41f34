"""Inside a PyTorch job's process: switches kineto's daemon mode on, so that gputop can record it.

Run as text by ``gputop capture`` and ``gputop attach``, in the thread that runs Python's pending calls, and loaded by
:mod:`gputop_inside` where the job was started with ``gputop run``. Stands alone like that one.

What stays in the environment are the folder of the sockets, which kineto reads at each message, its base config, and
TEARDOWN_CUPTI, which it reads after each recording.
KINETO_USE_DAEMON does not: each child that imports torch would become a client, too.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import socket
import struct
import sys
import threading
import time
from typing import Any

_FLAG = "KINETO_USE_DAEMON"
_IS_SET, _INIT = "_ZN9libkineto17isDaemonEnvVarSetEv", "_ZN5torch18global_kineto_initEv"
_DETAIL_CHARS = 300
_POLL_S, _ANSWER_S = 1.0, 0.5
_DRIVER = "/dev/nvidiactl"
# Kineto must not detach CUPTI from the process after a recording. A job with CUDA graphs then ends with "unspecified
# launch failure", SIGABRT or SIGSEGV: each of five did (H200, PyTorch 2.11, CUDA 13), and none of three without it.
# The price: each launch takes longer until the process ends. Whoever sets the variable themselves keeps their value.
_STAY_ATTACHED = ("TEARDOWN_CUPTI", "0")
_kept: list[object] = []  # what Python may call later
BASE_CONFIG = "ON_DEMAND_CONFIG_UPDATE_INTERVAL_SECS=1\n"  # kineto polls every 5 s otherwise
# They import torch as well, and train nothing.
_LAUNCHERS = {"torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "deepspeed"}
_LAUNCHER_WORDS = 8  # of the command line: as far as a launcher's name may stand there


def variables(folder: str) -> dict[str, str]:
    """The environment that daemon mode needs."""
    return {_FLAG: "1", "KINETO_IPC_SOCKET_DIR": folder, "KINETO_ONDEMAND_TRACE_DIR": folder,
            "KINETO_CONFIG": folder + "/kineto.conf", "KINETO_LOG_LEVEL": "5",
            _STAY_ATTACHED[0]: os.environ.get(*_STAY_ATTACHED)}


def switch_on_now(folder: str, token: str, until_s: float) -> None:
    """Become a client of the daemon in ``folder``, which is told what came of it; nothing after ``until_s``."""
    if time.time() > until_s:
        return
    _report(folder, token, *_switch_on(folder))


def hold_now(folder: str, token: str, until_s: float) -> None:
    """Be a client by a thread of Python's that records with torch.profiler, in a process that has used torch.profiler,
    which kineto's daemon mode leaves out. Nothing after ``until_s``."""
    if time.time() > until_s:
        return
    torch = sys.modules.get("torch")
    try:
        if torch is None:
            _report(folder, token, "absent")
        elif "profile_all_threads" not in str(torch._C._profiler._ExperimentalConfig.__init__.__doc__):
            _report(folder, token, "no threads", str(torch.__version__))
        else:
            os.environ.setdefault(*_STAY_ATTACHED)
            client = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            client.bind(f"{folder}/dynoconfigclient-{os.urandom(8).hex()}")
            client.settimeout(_ANSWER_S)
            threading.Thread(target=_poll, args=(torch, folder, client), name="gputop", daemon=True).start()
            _report(folder, token, "on", str(torch.__version__))
    except Exception as error:  # noqa: BLE001  whatever it is, the job must not notice
        _report(folder, token, "failed", f"{type(error).__name__}: {error}")


def _poll(torch: Any, folder: str, client: socket.socket) -> None:
    """Ask for work as kineto does, and do it."""
    body = struct.pack("=iiqi", 3, 1, 0, os.getpid())
    request = struct.pack("=Q32s", len(body), b"req") + body
    while os.path.isdir(folder):  # noqa: PTH112
        try:
            client.sendto(request, f"{folder}/dynolog")
            config = client.recv(4096)[40:].decode()
        except OSError:  # nobody is there
            config = ""
        if config:
            with contextlib.suppress(Exception):  # no trace comes, and gputop says so
                _record(torch, dict(line.partition("=")[::2] for line in config.split("\n")))
        time.sleep(_POLL_S)


def _record(torch: Any, config: dict[str, str]) -> None:
    """One recording of all threads, into the file that kineto would write."""
    stem, ending = os.path.splitext(config["ACTIVITIES_LOG_FILE"])  # noqa: PTH122
    file = f"{stem}_{os.getpid()}{ending}"
    seconds = int(config["ACTIVITIES_DURATION_MSECS"]) / 1000
    start_s = int(config.get("PROFILE_START_TIME", "0")) / 1000
    time.sleep(max(0.0, start_s - time.time()))
    if torch._C._autograd._profiler_enabled():  # the job's own
        return
    profiler = torch.profiler.profile(
        experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True))
    profiler.start()
    time.sleep(seconds)
    profiler.stop()  # the job waits meanwhile: it holds Python's lock
    profiler.export_chrome_trace(f"{file}.tmp.json")
    os.rename(f"{file}.tmp.json", file)  # noqa: PTH104


def _report(folder: str, token: str, state: str, detail: str = "") -> None:
    """Tell gputop's daemon, if it is there."""
    message = json.dumps({"token": token, "state": state, "detail": detail[:_DETAIL_CHARS]}).encode()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as teller:
            teller.setblocking(False)
            teller.sendto(struct.pack("=Q32s", len(message), b"gputop") + message, folder + "/dynolog")
    except OSError:  # nobody listens any more
        pass


def listen(claimed: Any, announce: Any) -> None:
    """Have torch listen in a new folder once it is imported, if this process is the one that ``claimed()`` says is
    captured; ``announce`` is then called with torch's version. Not by KINETO_USE_DAEMON during the import: there torch
    2.6 hangs, and 2.7 to 2.9 may crash.

    With a GPU it is done once the job itself uses CUDA: kineto counts the devices, and that would fix which ones are
    visible, and keep children that are forked from using them.
    """
    first_words = list(getattr(sys, "orig_argv", sys.argv))[:_LAUNCHER_WORDS]
    if os.environ.get(_FLAG) or _LAUNCHERS & {word.rpartition("/")[2] for word in first_words} or not claimed():
        return
    torch = sys.modules["torch"]
    if not _cuda_untouched(torch):
        _listen(announce)
        return
    # In the main thread, as a request of gputop's is.
    call = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: _listen(announce))
    _kept.append(call)

    def wait() -> None:
        while _cuda_untouched(torch):
            time.sleep(_POLL_S)
        ctypes.pythonapi.Py_AddPendingCall(call, None)

    threading.Thread(target=wait, name="gputop", daemon=True).start()


def _cuda_untouched(torch: Any) -> bool:
    """Return whether there is a GPU that the process could use and has not begun to use."""
    return torch.version.cuda is not None and os.path.exists(_DRIVER) and not torch.cuda.is_initialized()  # noqa: PTH110


def _listen(announce: Any) -> int:
    """Switch daemon mode on in a new folder. Raises nothing; returns 0, as a pending call does."""
    with contextlib.suppress(Exception):
        _listen_in_new_folder(announce)
    return 0


def _listen_in_new_folder(announce: Any) -> None:
    folder = f"/tmp/gputop-kineto-{os.urandom(6).hex()}"
    os.mkdir(folder, 0o700)  # noqa: PTH102
    try:
        with open(f"{folder}/kineto.conf", "x") as config:  # noqa: PTH123
            config.write(BASE_CONFIG)
        state, version = _switch_on(folder, importing=True)
    except OSError:
        state = version = ""
    if state != "on":
        _remove(folder)
        return
    pid = os.getpid()

    def ended() -> None:
        if os.getpid() == pid:  # not a forked child
            _remove(folder)

    atexit.register(ended)
    announce(version)


def _remove(folder: str) -> None:
    """Remove the folder of this process's socket."""
    try:
        for name in os.listdir(folder):  # noqa: PTH208
            os.unlink(f"{folder}/{name}")  # noqa: PTH108
        os.rmdir(folder)  # noqa: PTH106
    except OSError:  # gputop removes it later
        pass


def _switch_on(folder: str, importing: bool = False) -> tuple[str, str]:
    """Switch on; returns the outcome, "on", or a reason as a word; and a detail. Raises nothing. ``importing``: called
    at the end of torch's import, before Python calls it done."""
    torch = sys.modules.get("torch")
    if torch is None:
        return "absent", ""
    if not importing and getattr(torch.__spec__, "_initializing", False):
        return "importing", ""
    version = str(getattr(torch, "__version__", ""))
    try:
        if _cuda_untouched(torch):
            return "no CUDA yet", version
        if torch._C._autograd._profiler_enabled():
            return "profiling", version
        # Those of torch's own process, not a second copy.
        library = ctypes.CDLL(f"{os.path.dirname(str(torch.__file__))}/lib/libtorch_cpu.so",  # noqa: PTH120
                              mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        is_set, init = getattr(library, _IS_SET), getattr(library, _INIT)
    except (AttributeError, OSError):  # before 2.6 the functions are not exported
        return "unsupported", version
    is_set.restype, is_set.argtypes, init.restype, init.argtypes = ctypes.c_bool, (), None, ()
    before = {name: os.environ.get(name) for name in variables(folder)}
    os.environ.update(variables(folder))  # by putenv, too, where kineto looks
    done = False
    try:
        # Remembers what the environment said when it was first asked: no, once torch.profiler has been used.
        if not is_set():
            return "used", version
        init()
        done = True
        return "on", version
    except Exception as error:  # noqa: BLE001  whatever it is, the job must not notice
        return "failed", f"{version}: {type(error).__name__}: {error}"
    finally:
        for name, value in before.items():
            if name == _FLAG or not done:
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
