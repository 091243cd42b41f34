"""Run by every Python that starts with this folder on its PYTHONPATH, before the job's own first line.

It sets the watch of :mod:`gputop_inside` and leaves as if it had never been there: the folder goes from
``sys.path`` again, and the environment's own ``sitecustomize``, which this one hides, is imported in its place.
Any Python may come by, 2.7 too, so only what all of them can read is written here.
"""
import sys

_here = __file__.rpartition("/")[0]
try:
    if sys.version_info >= (3, 8):  # noqa: UP036  of the job's Python, not of gputop's
        import gputop_inside  # type: ignore[import-not-found]

        gputop_inside.watch()
except Exception:  # noqa: BLE001  whatever it is, the job must not notice
    pass
sys.path[:] = [entry for entry in sys.path if entry.rstrip("/") != _here]
sys.modules.pop("sitecustomize")
# Where there is none, this raises what `site` expects of an interpreter without one.
import sitecustomize  # type: ignore[import-not-found]  # noqa: E402, F401
