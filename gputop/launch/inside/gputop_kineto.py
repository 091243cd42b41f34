"""Inside a PyTorch job's process: switches kineto's daemon mode on, so that gputop can record it, and guards each
recording, so that it does not end the job.

Run as text by ``gputop capture`` and ``gputop attach``, in the thread that runs Python's pending calls, and loaded by
:mod:`gputop_inside` where the job was started with ``gputop run``. Stands alone like that one.

Four things ended jobs, seen so with PyTorch 2.6 to 2.15. The guard is a thread that sleeps until gputop asks for a
recording, and then prevents each:

- Kineto takes the records of all threads while they still write them: a thread that is within an operator's callback
  at that moment writes into what is read, or freed. The guard removes the callbacks first (as
  ``torch.profiler.profile.toggle_collection_dynamic`` does), a while before the recording ends; whoever was within one
  has left it by then.
- A job that ends while it is recorded destroys what kineto still uses. Python's ``atexit`` waits for the recording.
- The job's own torch.profiler begins while kineto starts: it waits for the recording.
- A child that is forked, and ends as a program does, waits for ever for kineto's thread, which is not in it. One that
  is forked from a recording is recorded for its whole life. The guard frees it from both.

Where gputop is killed, the guard ends the recording, and removes gputop's socket, at which kineto would wait.

What stays in the environment are the folder of the sockets, which kineto reads at each message, its base config, and
TEARDOWN_CUPTI, which it reads after each recording.
KINETO_USE_DAEMON does not: each child that imports torch would become a client, too.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import select
import socket
import struct
import sys
import threading
import time
from typing import Any

_FLAG = "KINETO_USE_DAEMON"
_IS_SET, _INIT = "_ZN9libkineto17isDaemonEnvVarSetEv", "_ZN5torch18global_kineto_initEv"
_IS_RECORDED = "_ZN2at18hasGlobalCallbacksEv"  # whether operators call somebody back on all threads
# Counts the blocks of 512 events that kineto's queues have ever had. It is only read.
_BLOCKS, _BLOCK_EVENTS = ("_ZZN5torch8profiler4impl19ThreadLocalSubqueue14TorchOpStorage10EventBlockINS1_"
                          "21KinetoObserverContext5EventELm512EEC4EvE8counter_"), 512
_MOST_EVENTS_PER_S = 2e6  # of a process: 900,000 were seen
_LOADER, _MAKE_LOADER = "_ZN9libkineto12ConfigLoader8instanceEv", "_ZN9libkineto12ConfigLoaderC1Ev"
_LOG_LEVEL, _ERRORS_ONLY = "FLAGS_caffe2_log_level", 2  # of c10
_FOLDER = "/gputop-kineto-"  # the name of a folder that gputop made begins with this
GUARD_PREFIX = "gputop-guard-"  # of the guard's socket in the folder, before the PID
END_MARK = "gputop: end of recording"  # the annotation after which operators are no longer recorded
_LEAST_PERIOD_S, _PERIOD_S = 0.02, 0.2
_BEGIN_S = 3.0  # after it has fetched a request: kineto looks twice, once a second
_WRITE_S, _EXIT_WRITE_S, _EXIT_S = 60.0, 10.0, 2.0
_MAX_RECORDING_S = 3600.0
_AHEAD_STEPS = 10_000  # of a schedule of the job's own torch.profiler
_RECORDING_TAKES_S = 8.0  # beyond its length, from the request to the file
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


def is_launcher(words: list[str]) -> bool:
    """Return whether this is the command line of a program that starts the ranks of a job."""
    return not _LAUNCHERS.isdisjoint(word.rpartition("/")[2] for word in words[:_LAUNCHER_WORDS])


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
            guard = _Guard(torch, folder).start()
            client = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            client.bind(f"{folder}/dynoconfigclient-{os.urandom(8).hex()}")
            client.settimeout(_ANSWER_S)
            guard.recorder = threading.Thread(target=_poll, args=(torch, folder, client), name="gputop", daemon=True)
            guard.recorder.start()
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
    """One recording of all threads, into the file that kineto would write; guarded as kineto's own."""
    stem, ending = os.path.splitext(config["ACTIVITIES_LOG_FILE"])  # noqa: PTH122
    file = f"{stem}_{os.getpid()}{ending}"
    seconds = int(config["ACTIVITIES_DURATION_MSECS"]) / 1000
    start_s = int(config.get("PROFILE_START_TIME", "0")) / 1000
    time.sleep(max(0.0, start_s - time.time()))
    profiler = torch.profiler.profile(
        experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True))
    profiler.start()
    time.sleep(seconds)
    profiler.stop()  # the job waits meanwhile: it holds Python's lock
    profiler.export_chrome_trace(f"{file}.tmp.json")
    os.rename(f"{file}.tmp.json", file)  # noqa: PTH104


def guard_now(folder: str, token: str, until_s: float) -> None:
    """Guard the recordings of a process that another tool, or an older gputop, has made a client in ``folder``. Nothing
    after ``until_s``."""
    torch = sys.modules.get("torch")
    if time.time() > until_s:
        return
    try:
        if torch is not None:
            _Guard(torch, folder).start()
        _report(folder, token, "absent" if torch is None else "on")
    except Exception as error:  # noqa: BLE001  whatever it is, the job must not notice
        _report(folder, token, "unguarded", f"{getattr(torch, '__version__', '')}: {type(error).__name__}: {error}")


class _Guard:
    """Guards the recordings of this process, one at a time, from :meth:`start` on. Raises AttributeError where torch
    has no such functions, OSError where ``folder`` takes no socket."""

    def __init__(self, torch: Any, folder: str) -> None:
        self._is_recorded, self._loader, self._make_loader = (
            getattr(_library(torch, "torch_cpu"), name) for name in (_IS_RECORDED, _LOADER, _MAKE_LOADER))
        self._is_recorded.restype, self._is_recorded.argtypes = ctypes.c_bool, ()
        self._loader.restype, self._loader.argtypes = ctypes.c_void_p, ()
        self._make_loader.restype, self._make_loader.argtypes = None, (ctypes.c_void_p,)
        self._blocks, self._abilities = _block_counter(torch)
        libc = ctypes.CDLL(None)
        self._call_at_end, self._close_and_end = libc.on_exit, [
            ctypes.cast(function, ctypes.c_void_p) for function in (libc.fcloseall, libc._exit)]
        self._call_at_end.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._toggle = torch._C._autograd._toggle_collection_dynamic
        self._torch, self._folder, self._pid = torch, folder, os.getpid()
        self.recorder: threading.Thread | None = None  # records itself, in the place of kineto
        self._ending, self._over = threading.Event(), threading.Event()
        self._over.set()
        self._lock = threading.Lock()
        self._ends_s = 0.0  # monotonic, at the earliest; 0: nobody knows yet
        self._file = ""
        self._next: dict[str, Any] | None = None  # came during a recording whose gputop was killed
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._bound = os.fstat(self._socket.fileno())

    def start(self) -> _Guard:
        self._socket.bind(f"{self._folder}/{GUARD_PREFIX}{self._pid}")
        atexit.register(self._wait_at_exit)
        os.register_at_fork(after_in_child=self._in_child)
        threading.Thread(target=self._run, name="gputop", daemon=True).start()
        return self

    def _run(self) -> None:
        while self._socket.fileno() >= 0:
            request = self._next or self._receive(_POLL_S if self._is_served() else None)
            self._next = None
            if request is not None and "file" in request:
                with contextlib.suppress(Exception):
                    self._guard(request)

    def _receive(self, timeout_s: float | None) -> dict[str, Any] | None:
        """Request of gputop's; None where nothing that can be read came in time."""
        try:
            if not os.path.samestat(os.fstat(self._socket.fileno()), self._bound):
                raise OSError("another file has its number")
            self._socket.settimeout(timeout_s)
            request = json.loads(self._socket.recv(4096))
        except (socket.timeout, ValueError, RecursionError):  # noqa: UP041  one of its own before Python 3.10
            self._is_served()
            return None
        except OSError:  # the job has closed all that is open: a recording is followed to its end, and is the last
            self._socket.detach()
            time.sleep(timeout_s or 0.0)
            return None
        if not isinstance(request, dict):
            return None
        if "ends_s" in request:
            with contextlib.suppress(TypeError, ValueError):
                self._ends_s = time.monotonic() + float(request["ends_s"]) - time.time()
            return None
        if "file" in request and not self._over.is_set():
            self._next, request = request, {}
        return request

    def _is_served(self) -> bool:
        """Return whether a gputop reads what is sent. Removes the socket of one that was killed, and, in a folder that
        is this process's alone, of one that is stopped: kineto would wait for 10 s at each message, and the job's end
        for kineto."""
        daemon = f"{self._folder}/dynolog"
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asker:
                asker.connect(daemon)
                room = select.poll()
                room.register(asker, select.POLLOUT)
                if room.poll(0) or _FOLDER not in self._folder:
                    return True
        except FileNotFoundError:
            return False
        except ConnectionRefusedError:
            pass
        except OSError:  # no more descriptors: nobody knows
            return True
        with contextlib.suppress(OSError):
            os.unlink(daemon)  # noqa: PTH108
        return False

    def _guard(self, request: dict[str, Any]) -> None:
        """Answer, and guard one recording unless the answer is no."""
        token, seconds = str(request["token"]), min(float(request["seconds"]), _MAX_RECORDING_S)
        with self._lock:
            if self._ending.is_set():
                _report(self._folder, token, "ending")
                return
            self._ends_s, self._file = 0.0, f"{self._folder}/{os.path.basename(str(request['file']))}"  # noqa: PTH119
            self._over.clear()
        try:
            with self._own_profiler_waits():
                # Once gputop is told, kineto may begin at any time.
                most_events = (int(request.get("most_events", 0)) or float("inf")) + _BLOCK_EVENTS * self._blocks.value
                state, detail = ("observed", "") if self._is_recorded() else _own_profiler(self._torch, seconds)
                _report(self._folder, token, state or "ready", detail if state else self._abilities)
                if not state:
                    wait_s = min(float(request["wait_s"]), _MAX_RECORDING_S)
                    self._follow(token, seconds, float(request["rest_s"]), wait_s, most_events)
        finally:
            self._over.set()

    @contextlib.contextmanager
    def _own_profiler_waits(self) -> Any:
        """Have the job's own torch.profiler begin when the recording is over."""
        module = self._torch.autograd.profiler
        before = {name: getattr(module, name) for name in ("_prepare_profiler", "_enable_profiler")}

        def waiting(call: Any) -> Any:
            def wait(*args: Any, **kwargs: Any) -> Any:
                if threading.current_thread() is not self.recorder:
                    self._over.wait()
                return call(*args, **kwargs)
            return wait

        after = {name: waiting(call) for name, call in before.items()}
        for name, call in after.items():
            setattr(module, name, call)
        try:
            yield
        finally:
            for name, call in before.items():
                if getattr(module, name) is after[name]:
                    setattr(module, name, call)

    def _follow(self, token: str, seconds: float, rest_s: float, wait_s: float, most_events: float) -> None:
        """Follow one recording from its begin, which may be ``wait_s`` away, to its file. It takes ``rest_s`` longer
        than ``seconds``: no operator is recorded in the rest, nor after ``most_events`` of all that there ever were."""
        asked_s = idle_s = time.monotonic()
        given_up_s = asked_s + wait_s
        while not self._is_recorded():
            idle_s = time.monotonic()
            if self._ending.is_set() and given_up_s > idle_s + _BEGIN_S:
                given_up_s = idle_s + _BEGIN_S
                _report(self._folder, token, "ending")  # gputop takes back what has not been fetched, and says so
            if idle_s > given_up_s:
                return
            quick = idle_s < asked_s + _BEGIN_S or self._ending.is_set()
            if self._receive(_LEAST_PERIOD_S if quick else _LEAST_PERIOD_S * 2) is not None:
                return  # gputop has given it up
        latest_s = idle_s + seconds + rest_s
        self._ends_s = min(self._ends_s or latest_s, latest_s)  # kineto begins late, at times, but does not end later
        while (not self._ending.is_set() and self._is_served()
               and (left_s := min(self._ends_s, latest_s) - rest_s - time.monotonic()) > 0):
            left = most_events - _BLOCK_EVENTS * self._blocks.value
            if left <= 0:
                _report(self._folder, token, "full", f"{seconds - left_s:.3f}")
                break
            self._receive(min(_PERIOD_S, left_s, max(_LEAST_PERIOD_S, left / _MOST_EVENTS_PER_S)))
        with contextlib.suppress(Exception), self._torch.autograd.profiler.record_function(END_MARK):
            pass
        # Kineto must not have let go of the callbacks meanwhile.
        if self._is_recorded() and time.monotonic() < self._ends_s - _LEAST_PERIOD_S:
            self._stop_operators()
        while time.monotonic() < self._ends_s + _WRITE_S and not os.path.exists(self._file):  # noqa: PTH110
            left_s = self._ends_s - time.monotonic()
            word = self._receive(max(_LEAST_PERIOD_S, min(_PERIOD_S, left_s)))
            if left_s < 0 and (word is not None or self._next is not None):
                return  # gputop has fetched it, or another one asks

    def _in_child(self) -> None:
        """Free a forked child from kineto, whose threads are not in it: the recording would go on, keep all that the
        child does, and end it by SIGSEGV. And its end would wait for ever for the thread that polled, which was waiting
        for its condition variable; that of a new poller in its place has nobody waiting. Nor must it join the thread
        that recorded: glibc may have given its stack to a new thread, and the child then waits for that one or ends by
        SIGSEGV. So it ends with its own status, once C's files are written, without destructors."""
        self._make_loader(self._loader())
        for function in reversed(self._close_and_end):  # on_exit(3) calls the last one first
            self._call_at_end(function, None)
        if not self._over.is_set() and self._is_recorded():
            self._stop_operators()
        self._over = threading.Event()  # somebody may have held the other one's lock
        self._over.set()

    def _stop_operators(self) -> None:
        with self._without_warnings():  # of what this does to other kinds of recordings
            self._toggle(False, {self._torch.profiler.ProfilerActivity.CPU})

    @contextlib.contextmanager
    def _without_warnings(self) -> Any:
        """Have torch say nothing in the job's stderr but errors."""
        try:
            level = ctypes.c_int.in_dll(_library(self._torch, "c10"), _LOG_LEVEL)
        except (OSError, ValueError):  # a build with glog
            level = ctypes.c_int()
        before, level.value = level.value, _ERRORS_ONLY
        try:
            yield
        finally:
            level.value = before

    def _wait_at_exit(self) -> None:
        """Wait for the recording under way; bounded."""
        if os.getpid() != self._pid:  # a forked child
            return
        with self._lock:
            self._ending.set()
        began_s = time.monotonic()
        while not self._over.wait(_LEAST_PERIOD_S):
            late_s = time.monotonic() - (self._ends_s or began_s + _BEGIN_S) - _EXIT_S
            if late_s > (_EXIT_WRITE_S if os.path.exists(f"{self._file}.tmp") else 0.0):  # noqa: PTH110
                return
        if _FOLDER in self._folder and not self._is_served():
            _remove(self._folder)


def _own_profiler(torch: Any, seconds: float | None) -> tuple[str, str]:
    """Activity of the job's own torch.profiler: "profiling" and for how many steps more, if that is known; "cycles" and
    in how many steps it begins, where that is before a recording of ``seconds`` would be over; else nothing. Behind
    the steps stands the share of the steps to come that it records, if that is known. Looks for half a second at how
    fast it steps, unless there are no ``seconds``."""
    module = torch.autograd.profiler
    enabled = bool(getattr(module, "_is_profiler_enabled", False))
    if "ProfilerStep" not in module.KinetoStepTracker._step_dict:  # of each torch.profiler.profile until it is left
        return ("profiling", "") if enabled else ("", "")
    idle = torch.profiler.ProfilerAction.NONE
    alive = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.profiler.profile)]
    before = [profiler.step_num for profiler in alive]
    time.sleep(0.0 if enabled or seconds is None else _ANSWER_S)
    for profiler, first in zip(alive, before):  # noqa: B905  of the job's Python, which may be older
        step, rate, action = profiler.step_num, (profiler.step_num - first) / _ANSWER_S, profiler.current_action
        at_work = [profiler.schedule(step + n) != idle for n in range(1, _AHEAD_STEPS)]
        steps = next((n for n, works in enumerate(at_work, 1) if works is (action == idle)), 0)
        detail = f"{steps or ''} {sum(at_work) / len(at_work):.3f}"
        # One that was stopped, and not left, stays at its last action.
        if action != idle and (enabled or action == torch.profiler.ProfilerAction.WARMUP):
            return "profiling", detail
        if action == idle and seconds is not None and 0 < steps < rate * (seconds + _RECORDING_TAKES_S):
            return "cycles", detail
    return ("profiling", "") if enabled else ("", "")


def _library(torch: Any, name: str) -> Any:
    """A library of torch's own that this process has loaded, not a second copy. Raises OSError."""
    return ctypes.CDLL(f"{os.path.dirname(str(torch.__file__))}/lib/lib{name}.so",  # noqa: PTH120
                       mode=os.RTLD_NOW | os.RTLD_NOLOAD)


def _block_counter(torch: Any) -> tuple[Any, str]:
    """The counter of the blocks of events, or one that stays at 0; and, as words, what a guard with it can be told."""
    with contextlib.suppress(ValueError):
        return ctypes.c_uint64.in_dll(_library(torch, "torch_cpu"), _BLOCKS), "ends_s most_events"
    return ctypes.c_uint64(), "ends_s"  # another version of torch


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
    if os.environ.get(_FLAG) or is_launcher(getattr(sys, "orig_argv", sys.argv)) or not claimed():
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
    folder = f"/tmp{_FOLDER}{os.urandom(6).hex()}"
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
    announce(version)


def _remove(folder: str) -> None:
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
        activity = _own_profiler(torch, None)
        if activity[0]:
            return activity
        guard, library = _Guard(torch, folder), _library(torch, "torch_cpu")
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
        guard.start()
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
