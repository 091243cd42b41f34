"""The words of rules, and the goldens that hold them."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest

from gputop.advice.rule import Rule
from gputop.advice.trace.job import Job
from gputop.advice.verdict import Verdict
from gputop.core.samples import CgroupSample, GpuSample, ProcessSample
from tests.advice.live.scene import Scene
from tests.fakes import cgroup_sample

FOLDER = Path(__file__).parent / "words"
JOBS = {
    "rich": Job("step", 0.1, "tensorflow", "Keras 3", (0, 1), strategy="mirrored"),
    "poor": Job("window", 10.0, "pytorch", "PyTorch", (0,), strategy="ddp")}
SCENE = Scene().sample(0.0)
# Fields whose values are words that the sentences choose by.
CHOSEN: Mapping[str, Mapping[str, Any]] = {
    "rich": {"worst": "h2d", "metric": "sm_active", "limited_by": "quota", "pool": "gpu_private", "way": "h2d",
             "kind": "line", "products": ("attention", "other matmuls"), "operation": "AllReduce",
             "gpus": (0, 1), "severity": "medium", "framework": "tensorflow", "id": None, "saving": None, "idle": (1,),
             "inside": ("prediction",), "new_workers": False, "starts": (), "lines": (), "offloaded": False,
             "activations": False, "claim": None, "severest": "high", "tries": "", "held_by": "power brake"},
    "poor": {"worst": "d2d", "metric": "gpu_util", "limited_by": "node", "pool": "global", "way": "d2h",
             "kind": "checkpoint", "products": ("convolutions",), "operation": "AllToAll", "inside": (), "lines": (),
             "starts": (), "gpus": (0,), "severity": "low", "framework": "pytorch", "id": None, "saving": None,
             "idle": (0, 1), "claim": "measured", "severest": "high", "tries": "", "held_by": "application clocks"},
}
FIGURES = ("gpu_util_ratio", "power_of_limit_ratio", "sm_active_ratio")


def example(cls: Any, style: str, name: str = "") -> Any:
    """A value of this type: with all that is optional where ``style`` is "rich", with none of it where it is "poor"."""
    origin, arguments = get_origin(cls), get_args(cls)
    if origin in (Union, types.UnionType):
        return None if style == "poor" and type(None) in arguments else example(arguments[0], style, name)
    if origin is tuple:
        inner = arguments[:1] * 2 if arguments[-1] is Ellipsis else arguments
        return tuple(example(argument, style, name) for argument in inner)
    if origin in (Sequence, frozenset):
        items = [example(arguments[0], style, name)]
        return tuple(items) if origin is Sequence else frozenset(items if style == "rich" else ())
    if origin is Mapping:
        keys = {"ways": ("h2d", "d2h", "d2d"), "copies": ("h2d", "d2h"),
                "figures": FIGURES if style == "rich" else FIGURES[:2]}.get(name, (0, 1) if arguments[0] is int else ())
        return {key: example(arguments[1], style, name) for key in keys}
    if has_fields(cls) and cls not in (GpuSample, ProcessSample, CgroupSample):
        return cls(**{field: chosen(cls, style, field, hint) for field, hint in get_type_hints(cls).items()
                      if field in cls.__struct_fields__ and Any not in (hint, *get_args(hint))})  # a cure, spans
    return plain(cls, style, name)


def has_fields(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, msgspec.Struct)


def chosen(cls: Any, style: str, name: str, hint: Any) -> Any:
    if name == "metric" and cls.__name__ == "_FullLink":
        return "pcie_rx_bytes_per_s"
    return CHOSEN[style][name] if name in CHOSEN[style] and not has_fields(hint) else example(hint, style, name)


def plain(cls: Any, style: str, name: str) -> Any:
    if cls is bool:
        return style == "rich"
    if cls is str:
        return f"<{name}>" if name != "severity" else "medium"
    if cls is int:
        return 64_000_000 if name.endswith("bytes") else 3
    if cls is float:
        large = name.endswith(("bytes", "bytes_per_s"))
        return 6.4e10 if large else 120.0 if name == "window_s" else 0.025 if name.endswith("_s") else 0.25
    if cls is dict or get_origin(cls) is dict:
        return {"xid": 79.0}
    return {GpuSample: SCENE.gpus[0], ProcessSample: SCENE.processes[0],
            CgroupSample: cgroup_sample("slurm 7", cpu_limit_cores=8.0)}[cls]


def verdicts_of(rule: Rule) -> tuple[type[Verdict], ...]:
    """The types of the verdicts that the rule's words are written from; most rules have one."""
    describe = rule.function("describe")
    first = next(iter(inspect.signature(describe).parameters))
    found = get_type_hints(describe)[first]
    types = get_args(found) or (found,)
    assert all(issubclass(each, Verdict) for each in types)
    return types


def same_as_golden(name: str, words: str, request: pytest.FixtureRequest) -> None:
    path = FOLDER / f"{name}.txt"
    if request.config.getoption("--snapshot-update", default=False):
        path.write_text(words, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == words
