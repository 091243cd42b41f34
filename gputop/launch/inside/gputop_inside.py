"""Inside each Python of the job: waits for the import of TensorFlow or JAX, then starts its profiler server; or of
PyTorch, then has its profiler listen for gputop.

Stands alone: only the standard library, Python 3.8 and newer, nothing of gputop, which the job's environment
need not have. Every Python that the job starts loads it, so it imports next to nothing itself.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing's own would have to be imported
if TYPE_CHECKING:
    from typing import Any


def watch() -> None:
    """Serve as soon as TensorFlow or JAX has been imported, and have PyTorch listen."""
    sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds nothing itself: it returns what the other finders find, with a hook at the end of the import."""

    def __init__(self) -> None:
        self.awaited = {"tensorflow", "jax", "torch"}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.awaited:
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec = find(name, path, target)
            if spec is not None:
                self._follow(name, spec.loader)
                return spec
        return None

    def _follow(self, name: str, loader: Any) -> None:
        """Hook this one loader instance so that it calls us at the end; its class stays unchanged."""
        try:
            execute = loader.exec_module

            def exec_module(module: object) -> None:
                del loader.exec_module
                execute(module)
                self.awaited.discard(name)
                if not self.awaited and self in sys.meta_path:
                    sys.meta_path.remove(self)
                _serve(name)

            loader.exec_module = exec_module
        except AttributeError:  # a loader that takes no attributes, or loads in a way of its own: no server
            pass


def _serve(framework: str) -> None:
    try:
        server = _load("gputop_serve")
        if framework == "torch":
            _load("gputop_kineto").listen(server.claimed, server.announce_pytorch)
        else:
            server.serve(framework)
    except Exception:  # noqa: BLE001  whatever it is, the job must not notice
        pass


def _load(name: str) -> Any:
    """A module of this folder, which is not on the path."""
    if name not in sys.modules:  # a second framework finds what the first left
        from importlib.util import module_from_spec, spec_from_file_location

        spec = spec_from_file_location(name, f"{os.path.dirname(__file__)}/{name}.py")  # noqa: PTH120
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]
