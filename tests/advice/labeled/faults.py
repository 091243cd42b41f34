"""One fault per finding id, put into a healthy job: what physically happens, and why the label holds.

``share`` is the part of the faulty step that the fault is meant to cost; the label's severity follows from
what it really costs then (:attr:`Case.shares`). ``consequences`` are ids of other faults that the cause
brings with it; ids that contradict it must not be found.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from tests.advice.labeled import faults_gpu, faults_gpus, faults_host
from tests.advice.labeled.fault import Fault

FAULTS: Mapping[str, Callable[[int, float], Fault]] = {
    name: function for module in (faults_host, faults_gpu, faults_gpus) for name, function in vars(module).items()
    if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
}
