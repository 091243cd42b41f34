"""How pynvml is imported."""

from __future__ import annotations

import subprocess
import sys


def test_pynvml_comes_without_shutil_and_finds_libraries_all_the_same() -> None:
    program = ("import sys\n"
               "from gputop.sources.nvml.status import import_pynvml\n"
               "nvml = import_pynvml()\n"
               "assert not {'ctypes.util', 'shutil'} & set(sys.modules), 'imported for nothing'\n"
               "from ctypes.util import find_library\n"
               "assert nvml.find_library('c') == find_library('c') and find_library.__module__ == 'ctypes.util'\n"
               "assert import_pynvml() is nvml is sys.modules['pynvml']\n")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
