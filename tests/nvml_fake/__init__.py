"""A fake ``libnvidia-ml.so.1``: built by gcc from the C files here and put in the real one's place.

Two ways to use it. A subprocess finds it on its loader path::

    library = build(tmp_path)
    subprocess.run([sys.executable, ...], env=environment(library, "gpus 8", "gpm 0"))

or it is loaded into this process, handed to nvidia-ml-py as its library, and driven call
by call (:class:`FakeNvml`). What the settings mean stands at the top of ``nvml_fake.c``.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

from tests.waiting import PATIENCE_S

SONAME = "libnvidia-ml.so.1"
_SOURCES = sorted(Path(__file__).parent.glob("*.c"))


def build(folder: Path) -> Path:
    """Compile the fake into ``folder`` and return the library's path."""
    compiler = shutil.which(os.environ.get("CC", "gcc"))
    if compiler is None:
        raise RuntimeError("the NVML tests compile a fake driver library: install gcc (or set CC)")
    library = folder / SONAME
    command = [compiler, "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", f"-Wl,-soname,{SONAME}"]
    done = subprocess.run([*command, "-o", str(library), *map(str, _SOURCES), "-lm", "-lpthread"],
                          capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the fake NVML does not compile:\n{done.stderr}")
    return library


def environment(library: Path, *settings: str) -> dict[str, str]:
    """This process's environment, changed so that a subprocess loads the fake with ``settings``."""
    handle, path = tempfile.mkstemp(prefix="nvml-", suffix=".conf", dir=library.parent)
    with os.fdopen(handle, "w") as file:
        file.writelines(f"{line}\n" for line in settings)
    path_now = os.environ.get("LD_LIBRARY_PATH")
    search = f"{library.parent}:{path_now}" if path_now else str(library.parent)
    return {**os.environ, "LD_LIBRARY_PATH": search, "NVML_FAKE_CONFIG": path}


class FakeNvml:
    """The fake inside this process, in use by nvidia-ml-py within the ``with`` block.

    The library has one state for the whole process: use one at a time.
    """

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.fake_calls.restype = ctypes.c_long
        self._library.fake_calls_after_lost.restype = ctypes.c_long
        self._library.fake_function.restype = ctypes.c_char_p
        self._config = library.with_name("in-process.conf")

    def __enter__(self) -> FakeNvml:
        self._use(self._library)
        self.configure()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end()
        self._use(None)
        os.environ.pop("NVML_FAKE_CONFIG", None)

    @staticmethod
    def _use(library: ctypes.CDLL | None) -> None:
        # What nvidia-ml-py does itself with the library of the loader path, and keeps.
        import pynvml

        pynvml.nvmlLib = library
        pynvml._nvmlGetFunctionPointer_cache.clear()

    def configure(self, *settings: str) -> None:
        """Take effect at the next nvmlInit; without settings: 8 GPUs with GPM."""
        self._end()
        self._config.write_text("".join(f"{line}\n" for line in settings))
        os.environ["NVML_FAKE_CONFIG"] = str(self._config)
        self.set_time(-1)

    def set_time(self, seconds: float) -> None:
        """Stop the fake's clock at ``seconds``; -1 lets it run again."""
        self._library.fake_set_time(ctypes.c_double(seconds))

    def change(self, setting: str) -> None:
        """Apply one setting now."""
        if not self._library.fake_setting(setting.encode()):
            raise ValueError(setting)

    def allow_everything(self) -> None:
        """Forget every "refuse"."""
        self._library.fake_allow()

    def calls(self, function: str, gpu: int = 0) -> int:
        """How often ``function`` was called for that GPU since nvmlInit."""
        return int(self._library.fake_calls(function.encode(), gpu))

    def functions(self) -> list[str]:
        """What was asked for of any GPU since nvmlInit: functions, "field:197", "gpm:2"."""
        found = []
        while (name := self._library.fake_function(len(found))) is not None:
            found.append(name.decode())
        return found

    def calls_after_lost(self, gpu: int) -> int:
        return int(self._library.fake_calls_after_lost(gpu))

    def lose(self, gpu: int) -> None:
        self._library.fake_lose(gpu)

    def hang(self, gpu: int) -> None:
        """Let the next call for that GPU block until :meth:`release`."""
        self._library.fake_hang(gpu)

    def await_hanging(self, gpu: int, seconds: float = 10.0) -> bool:
        return bool(self._library.fake_await_hanging(gpu, ctypes.c_double(seconds)))

    def release(self, gpu: int) -> None:
        self._library.fake_release(gpu)

    def xid(self, gpu: int, xid: int, gpu_instance: int = -1) -> int:
        """Report an Xid, of a MIG instance where one is named; returns how many listen to it."""
        return int(self._library.fake_xid(gpu, xid, gpu_instance))

    def await_registered(self, gpu: int, seconds: float = 10.0) -> bool:
        """Wait until the Xids of that GPU are listened to."""
        return bool(self._library.fake_await_registered(gpu, ctypes.c_double(seconds)))

    def _end(self) -> None:
        """Let the threads of sources that were left open come out of the library."""
        self._library.fake_end()
        for thread in threading.enumerate():
            if thread.name.startswith("gputop-nvml-"):
                thread.join(PATIENCE_S)
