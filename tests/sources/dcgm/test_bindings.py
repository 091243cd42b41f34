"""Finding and loading NVIDIA's bindings, as DCGM 3 and 4 install them."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest

from gputop.core.errors import GputopError
from gputop.sources.dcgm.bindings import find_bindings, find_installed, find_libraries, load
from tests.dcgm_double import LAYOUT, install, install_bindings, install_library

NAMES = ("dcgm_agent", "dcgm_structs", "dcgm_fields", "dcgmvalue", "pydcgm")


def test_newest_with_its_library_first(tmp_path: Path) -> None:
    install(tmp_path, 3, 4)
    assert [entry.major for entry in find_installed(tmp_path, {})] == [4, 3]
    assert [load(entry).major for entry in find_installed(tmp_path, {})] == [4, 3]


def test_bindings_without_their_library_are_passed_over(tmp_path: Path) -> None:
    install(tmp_path, 4, library=False)
    install(tmp_path, 3)
    assert [entry.major for entry in find_installed(tmp_path, {})] == [3]


def test_libraries_where_the_bindings_look(tmp_path: Path) -> None:
    install_library(tmp_path / "usr/lib64", 3)
    install_library(tmp_path / "opt/dcgm", 4)
    install_library(tmp_path / "usr/local/lib", 2)  # only in the loader's cache: not found
    assert find_libraries(tmp_path, {}).keys() == {3}
    assert find_libraries(tmp_path, {"LD_LIBRARY_PATH": "/nowhere::/opt/dcgm"}).keys() == {3, 4}
    explicit = install_library(tmp_path / "mine", 3)
    assert find_libraries(tmp_path, {}, tmp_path / "mine")[3] == explicit


@pytest.mark.parametrize(("have", "words"), [
    ("nothing", "bindings for Python and libdcgm.so are not installed"),
    ("bindings", "library libdcgm.so.4 of the DCGM bindings in"),
    ("library", "bindings for libdcgm.so.4 are not installed"),
    ("mismatch", "library libdcgm.so.4 of the DCGM bindings in"),
])
def test_what_is_missing_is_said_with_the_command(tmp_path: Path, have: str, words: str) -> None:
    if have in ("bindings", "mismatch"):
        install(tmp_path, 4, library=False)
    if have in ("library", "mismatch"):
        install_library(tmp_path / "usr/lib64", 4 if have == "library" else 3)
    with pytest.raises(GputopError) as caught:
        find_installed(tmp_path, {})
    assert words in caught.value.message and "datacenter-gpu-manager-4-core" in caught.value.fix


def test_a_folder_given_counts_alone_and_tells_its_major_itself(tmp_path: Path) -> None:
    install(tmp_path, 4)
    mine = install_bindings(tmp_path / "mine", 3)
    assert find_bindings(tmp_path, mine) == {3: mine}
    with pytest.raises(GputopError, match=r"library libdcgm.so.3"):
        find_installed(tmp_path, {}, mine)
    install_library(mine, 3)
    assert find_installed(tmp_path, {}, mine)[0].shared_object == mine / "libdcgm.so.3"
    with pytest.raises(GputopError, match=r"--dcgm-bindings .* does not contain DCGM's bindings"):
        find_installed(tmp_path, {}, tmp_path / "empty")


def test_loading_leaves_no_trace_and_disturbs_no_module_of_the_same_name(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, 4)
    mine = types.ModuleType("dcgm_structs")
    monkeypatch.setitem(sys.modules, "dcgm_structs", mine)
    trap = tmp_path / "cwd"
    trap.mkdir()
    (trap / "dcgm_fields.py").write_text("raise RuntimeError('the wrong dcgm_fields')")
    monkeypatch.syspath_prepend(str(trap))
    path = list(sys.path)
    bindings = load(find_installed(tmp_path, {})[0])
    assert bindings.structs is not mine and bindings.structs.__file__.startswith(str(tmp_path / LAYOUT[4]))
    assert sys.modules["dcgm_structs"] is mine and sys.path == path
    assert not [name for name in NAMES if name != "dcgm_structs" and name in sys.modules]


def test_a_module_that_an_import_hook_puts_in_place_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, 4)
    other = tmp_path / "other"
    install_bindings(other, 4)

    class Hook:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> object:
            from importlib.util import spec_from_file_location

            return spec_from_file_location(name, other / f"{name}.py") if name == "dcgm_agent" else None

    monkeypatch.setattr(sys, "meta_path", [Hook, *sys.meta_path])
    with pytest.raises(GputopError, match=r"dcgm_agent was imported from .*other"):
        load(find_installed(tmp_path, {})[0])


@pytest.mark.parametrize(("name", "text", "words"), [
    ("dcgm_agent", "import nowhere_to_be_found", "cannot import .*: ModuleNotFoundError"),
    ("dcgm_agent", "print 'python 2'", "cannot import .*: SyntaxError"),
    ("dcgm_fields", "raise KeyError('x')", "cannot import .*: KeyError"),
    ("dcgm_agent", "def dcgmInit(): pass", "lack dcgmConnect_v2"),
])
def test_bindings_that_are_broken_or_too_old(tmp_path: Path, name: str, text: str, words: str) -> None:
    install(tmp_path, 4)
    (tmp_path / LAYOUT[4] / f"{name}.py").write_text(text)
    with pytest.raises(GputopError, match=words):
        load(find_installed(tmp_path, {})[0])
    assert not [module for module in NAMES if module in sys.modules]


def test_a_library_that_does_not_load(tmp_path: Path) -> None:
    install(tmp_path, 4)
    entry = find_installed(tmp_path, {})[0]
    entry.shared_object.write_bytes(b"broken")
    with pytest.raises(GputopError, match=r"cannot load .*libdcgm.so.4 \(DCGM -25\)"):
        load(entry)


def test_starting_gputop_imports_no_client_of_dcgm() -> None:
    code = ("import sys, argparse; from gputop.commands.common import source_of; "
            "from gputop.commands.arguments import parser; "
            "source_of(parser().parse_args([])); print([m for m in sys.modules if 'dcgm' in m])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "dcgm_client" not in done.stdout and "dcgm_bindings" not in done.stdout and "dcgm_agent" not in done.stdout


def test_bindings_are_loaded_once(tmp_path: Path) -> None:
    newest, older = find_installed(install(tmp_path, 3, 4), {})
    assert (newest.major, older.major) == (4, 3)
    assert load(older) is load(older) is not load(newest)
