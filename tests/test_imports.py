"""Imports inside functions: each one saves something, and here is what."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.source_trees import sources

# A command loads what it runs: wrong usage, --help and the other commands do without. The code inside a job loads what
# the job has. Whatever these import in functions needs no further reason.
ANY = ("gputop.commands", "gputop.cli", "gputop.__main__", "gputop.launch.inside", "gputop.doctor")

# What the others import in functions, by the longest prefix, and what that saves. MB of memory and ms of a CPU of 2025
# as measured alone, on top of the command line's own modules.
SAVES = {
    "base64": "an address with a password alone",
    "concurrent.futures": "7 ms of the first frame",
    "ctypes": "4 ms; processes that set their own limits alone",
    "ctypes.util": "23 ms; a driver's library that is not where it should be",
    "difflib": "a message about a mistyped word",
    "google.protobuf": "with gRPC, for the first capture: 16 MB together",
    "gputop.advice.fleet": "the document of a cluster alone",
    "gputop.advice.live": "the rules: 130 ms of the first frame",
    "gputop.advice.registry": "the table of rules: 20 ms of the first frame",
    "gputop.analysis": "NumPy, 13 MB: for the first trace",
    "gputop.cluster": "jobs on several nodes alone: 70 ms",
    "gputop.comparison": "NumPy, 13 MB: for the first comparison",
    "gputop.core.bounded_http": "http.client, 5 MB: for the first webhook",
    "gputop.core.codec": "5 ms; a server, a package or a driver that has something to decode",
    "gputop.core.files": "11 ms of the first frame, which writes no file",
    "gputop.core.proc": "with the search for servers",
    "gputop.core.version": "5 ms; documents alone",
    "gputop.diagnosis": "NumPy and the analyses, 22 MB and 530 ms: for the first trace",
    "gputop.export.write_tables": "for the first file",
    "gputop.export.analysis_page": "the analyses, in notebooks alone",
    "gputop.export.html": "NumPy and the analyses, 24 MB: for pages alone",
    "gputop.export.snapshot": "for the first snapshot: 3 MB, 110 ms",
    "gputop.launch": "for the first server that gputop starts in a job: 8 MB, 130 ms",
    "gputop.profiler": "for the first search for servers or the first capture: 2 to 21 MB, with gRPC",
    "gputop.ranks": "for the first job of several ranks: 4 MB",
    "gputop.render.evidence_words": "for the first finding that is copied",
    "gputop.rules": "for the first file with rules: 60 ms",
    "gputop.session": "what few sessions do, as automatic captures (3 MB): when one does it",
    "gputop.simulation": "the demo alone: NumPy, 13 MB",
    "gputop.sources": "the source in use alone: DCGM 2 MB, the demo 15 MB; processes 44 ms after the first GPUs",
    "gputop.telemetry": "35 ms of the first frame, which has no history yet",
    "gputop.text.commands": "for the first job",
    "gputop.text.redaction": "11 ms; a crash or a command line alone",
    "gputop.timeline": "NumPy, 18 MB: for the first timeline",
    "gputop.trace": "NumPy, 13 MB: for the first trace",
    "gputop.tui.screens": "when a screen opens: up to 35 MB with NumPy",
    "gputop.tui.timeline": "when a timeline opens: NumPy, 13 MB",
    "grpc": "for the first capture: 16 MB",
    "hashlib": "OpenSSL, 4 MB: for the first capture",
    "html": "pages in notebooks alone",
    "http.client": "5 MB: for the first webhook",
    "importlib": "the name of the module is computed",
    "json": "pages and JSON alone",
    "pickletools": "a message about a damaged dump",
    "prometheus_client": "optional: the exporter alone, 9 MB",
    "psutil": "28 ms of the first frame; optional in an exporter",
    "pyarrow": "optional: Parquet alone, 39 MB",
    "pynvml": "3 MB: a source other than NVML does without",
    "rich.cells": "a terminal that shows ASCII alone",
    "ssl": "4 MB: https alone",
    "statistics": "6 ms: a capture alone",
    "tempfile": "8 ms: temporary files alone",
    "tomli": "Python 3.10 alone",
    "tomllib": "Python 3.11 and newer",
    "traceback": "a crash alone",
    "urllib.error": "with urllib.request",
    "urllib.request": "7 MB: for the first webhook",
}

# Modules that load what a function of theirs imports anyway: to be imported at their top. It may only get shorter.
LOADED_ANYWAY = {
    ("gputop.cluster.slurm", "gputop.core.codec"), ("gputop.comparison.compare", "gputop.core.version"),
}


def module_of(name: str) -> str:
    return f"gputop.{name.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__")


@cache
def modules() -> frozenset[str]:
    return frozenset(module_of(source.name) for source in sources())


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    names = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name if name in modules() else node.module or "" for name in names]


@cache
def imports_by_module() -> dict[str, frozenset[tuple[str, bool]]]:
    return {module_of(source.name): frozenset(imports(source.tree)) for source in sources()}


def imports(node: ast.AST, in_function: bool = False) -> Iterator[tuple[str, bool]]:
    """What a module imports when it runs, and whether in a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield from ((name, in_function) for name in imported(child))
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        elif isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield from imports(child, in_function or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)))


def at_top(module: str) -> set[str]:
    return {name for name, in_function in imports_by_module().get(module, ()) if not in_function}


@cache
def in_functions() -> set[tuple[str, str]]:
    return {(module, name) for module, names in imports_by_module().items()
            for name, in_function in names if in_function}


def prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def loaded_with(module: str) -> set[str]:
    loaded: set[str] = set()
    waiting = [module]
    while waiting:
        for name in prefixes(waiting.pop()):
            if name not in loaded:
                loaded.add(name)
                waiting += at_top(name)
    return loaded


def reasons() -> dict[tuple[str, str], str | None]:
    """For each import in a function the entry of :data:`SAVES`; None without one."""
    return {(module, name): next((prefix for prefix in prefixes(name) if prefix in SAVES), None)
            for module, name in in_functions() if not set(prefixes(module)) & set(ANY)}


def test_each_import_in_a_function_saves_something():
    found = reasons()
    assert len(found) > 150
    unexplained = sorted(pair for pair, reason in found.items() if reason is None)
    assert not unexplained, "import it at the top, or say in SAVES what that would cost"
    assert SAVES.keys() == set(found.values()), "no function imports these any more"


def test_what_a_module_loads_anyway_is_imported_at_its_top():
    loaded = {module: loaded_with(module) for module, _ in in_functions()}
    late = {(module, name) for module, name in in_functions() if name in loaded[module]} - LOADED_ANYWAY
    assert not late, "the module loads it at its start: import it at the top"


TRACE = Path(__file__).parent / "data" / "keras3_slow_input.xplane.pb.gz"
# What a notebook that analyzes a trace does without: the node and the fleet, and what they need from outside.
OUTSIDE = ("psutil", "pynvml", "grpc", "google", "textual", "rich", "prometheus_client")
NODE_AND_FLEET = ("sources", "telemetry", "profiler", "ranks", "simulation", "launch", "replay", "goodput", "session",
                  "doctor", "tui", "cluster", "commands", "advice.live", "advice.fleet")


def test_an_analysis_loads_the_engine_alone():
    code = "import sys, gputop; print(len(gputop.analyze(sys.argv[1]).findings), *sys.modules, sep='\\n')"
    run = subprocess.run([sys.executable, "-c", code, TRACE], capture_output=True, text=True, check=True)
    findings, *loaded = run.stdout.splitlines()
    assert int(findings) and "numpy" in loaded and "gputop.diagnosis.diagnose" in loaded
    beginnings = tuple(f"{name}." for name in (*OUTSIDE, *(f"gputop.{part}" for part in NODE_AND_FLEET)))
    assert not [name for name in loaded if f"{name}.".startswith(beginnings)]
